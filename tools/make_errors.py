"""Fills docs/troubleshooting.md from the source: start-up errors, and kinds of failure.

python tools/make_errors.py            write it
python tools/make_errors.py --check    fail if it differs
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = CHECKOUT / "docs" / "troubleshooting.md"
SOURCE = CHECKOUT / "python" / "tasuki"
# Of these all errors are told; of others, which a defect or a peer may raise, those that say what
# helps, or after a colon what is behind them.
START = {
    "BindError",
    "ConfigError",
    "ControlError",
    "DispatchError",
    "FetchError",
    "HostsError",
    "IdentityError",
    "LaunchError",
    "ModelError",
    "PreflightError",
    "TopologyError",
    "UnsupportedModelError",
}
# Files whose errors end a start, by the heading under which they stand.
PARTS = {
    "tasuki serve": ["launch/**/*.py"],
    "A worker's settings and memory": ["worker/**/*.py", "engine/config.py"],
    "The model folder": ["models/**/*.py", "cli.py"],
    "Attention": ["attention/**/*.py"],
    "The KV transport": ["kv/**/*.py"],
    "Preflight": ["preflight/**/*.py"],
    "tasuki doctor": ["doctor/**/*.py"],
}
# A remedy follows a colon, a semicolon or a comma, and begins with one of these words.
VERBS = (
    "add|check|choose|convert|correct|delete|end|fetch|free|give|install|keep|leave|look|lower|make"
    "|move|must|names?|pip|put|raise|ray|remove|rename|run|see|set|start|there|unset|use|write"
)
REMEDY = re.compile(rf"[:;] (?=`?(?:{VERBS})\b)|, (?=(?:must|use)\b)")
# The meaning of each kind of failure, and whether the router retries.
CONTRACT = CHECKOUT / "proto" / "tasuki" / "v1" / "worker.proto"
RETRIES = CHECKOUT / "crates" / "core" / "src" / "failure.rs"
RETRY_WORDS = {"Never": "no", "Once": "once, on another worker if there is one", "Again": "yes"}


def placeholder(node: ast.expr) -> str:
    """What stands for a value that an error fills in: its name, where it has one."""
    value = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(value, ast.Attribute | ast.Name):
        name = value.attr if isinstance(value, ast.Attribute) else value.id
        return "<" + name.strip("_").lower() + ">"
    return "<…>"


def message(node: ast.expr) -> str | None:
    """The text of an error, with placeholders; None: it is not written in place."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else placeholder(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = (message(node.left), message(node.right))
        return "".join(side or "<…>" for side in sides)
    return None


def split(text: str) -> tuple[str, str]:
    """(what is wrong, what helps) of an error's text; no remedy where it names none."""
    problem, *remedy = REMEDY.split(text, maxsplit=1)
    return problem, remedy[0] if remedy else ""


def letters(text: str) -> str:
    """What is left of a text without placeholders, spaces and marks."""
    return re.sub(r"<[^>]*>|\W", "", text)


def errors(patterns: list[str]) -> list[tuple[str, str]]:
    """(error, remedy) of what files raise, in the order of the alphabet."""
    found = set()
    for path in sorted(path for pattern in patterns for path in SOURCE.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name, arguments = node.exc.func, node.exc.args
            if isinstance(name, ast.Name) and name.id.endswith("Error") and arguments:
                text = re.sub(r"\s+", " ", message(arguments[0]) or "").strip()
                problem, remedy = split(text)
                explained = ": " in text and letters(text.rpartition(": ")[2])
                if letters(problem) and (remedy or explained or name.id in START):
                    found.add((problem, remedy))
    return sorted(found, key=lambda pair: (letters(pair[0]).lower(), pair))


def table() -> str:
    """All of them."""
    parts = []
    for title, patterns in PARTS.items():
        rows = [
            f"| `{problem.replace('|', '/')}` | {remedy.replace('|', '/')} |"
            for problem, remedy in errors(patterns)
        ]
        if rows:
            parts.append("\n".join([f"### {title}\n", "| error | remedy |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def kinds() -> str:
    """The kinds of failure: what is at fault, and whether a retry can help."""
    retries = {}
    arms = re.findall(r"^ +((?:Self::\w+[ |]+)+)=> Retry::(\w+),", RETRIES.read_text(), re.M)
    for names, retry in arms:
        retries.update(dict.fromkeys(re.findall(r"Self::(\w+)", names), RETRY_WORDS[retry]))
    meanings = re.findall(r"^  FAILURE_(\w+) = [1-9]; +// (.*)$", CONTRACT.read_text(), re.M)
    rows = [
        f"| `{name.lower()}` | {text[0].upper()}{text[1:]} | {retries[name.title()]} |"
        for name, text in meanings
    ]
    return "\n".join(["| kind | what is at fault | the router retries |", "|---|---|---|", *rows])


def main() -> int:
    """Write or check the page."""
    page = made = PAGE.read_text()
    for name, content in (("errors", table()), ("kinds", kinds())):
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        filled = f"\n{content}\n\n"
        made = marked.sub(lambda mark, filled=filled: f"{mark[1]}{filled}{mark[2]}", made)
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif made != page:
        print("docs/troubleshooting.md differs from the source: run tools/make_errors.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
