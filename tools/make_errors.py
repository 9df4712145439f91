"""Fills docs/troubleshooting.md from the source: start-up errors, and kinds of failure.

python tools/make_errors.py            write it
python tools/make_errors.py --check    fail if it differs
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = CHECKOUT / "docs" / "troubleshooting.md"
SOURCE = CHECKOUT / "python" / "tasuki"
# Packages whose errors end a start, and the heading under which they stand.
PARTS = {
    "launch": "tasuki serve",
    "worker": "A worker's settings and memory",
    "models": "The model folder",
    "attention": "Attention",
    "kv": "The KV transport",
    "preflight": "Preflight",
    "doctor": "tasuki doctor",
}
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


def errors(package: str) -> Iterator[tuple[str, str]]:
    """(message, remedy) of the errors that a package raises; the remedy follows the last colon."""
    found = set()
    for path in sorted((SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name, arguments = node.exc.func, node.exc.args
            if isinstance(name, ast.Name) and name.id.endswith("Error") and arguments:
                text = re.sub(r"\s+", " ", message(arguments[0]) or "").strip()
                problem, separator, remedy = text.rpartition(": ")
                if not separator or not re.sub(r"<[^>]*>|\W", "", remedy):
                    continue
                told = re.sub(r"<[^>]*>|\W", "", problem)
                found.add((problem, remedy) if told else (text, ""))
    yield from sorted(found, key=lambda pair: (re.sub(r"<[^>]*>|\W", "", pair[0]).lower(), pair))


def table() -> str:
    """All of them."""
    parts = []
    for package, title in PARTS.items():
        rows = [
            f"| `{problem.replace('|', '/')}` | {remedy.replace('|', '/')} |"
            for problem, remedy in errors(package)
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
