"""The clients that people use, unchanged, against `tasuki serve`.

    make test-clients          installs them below target/clients first

Each script gets TASUKI_URL, TASUKI_MODEL and TASUKI_MODEL_FOLDER, prints a line for what it has
seen work, and fails with what it has not. The router takes two sequences at a time, so that
whoever asks three times at once is turned away, and has to try again as the client does by
itself; SGLang's load generator, which does not, asks twice at once.

The default model's chat template has no place for tools, so the model is served with one that has.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / "target" / "clients"
REFUSALS = (
    r'tasuki_http_errors_total{path="/v1/(chat/completions|responses)",code="503"'
    r',reason="[a-z_]*"}'
)
COMMANDS = {
    "langchain-openai": [
        str(INSTALLED / "venv/bin/python"),
        str(HERE / "langchain_openai_client.py"),
    ],
    "openai for Python: responses": [
        str(INSTALLED / "venv/bin/python"),
        str(HERE / "openai_responses.py"),
    ],
    "openai for Node": ["node", str(INSTALLED / "openai.mjs")],
    "ai (Vercel)": ["node", str(INSTALLED / "vercel.mjs")],
    "sglang.bench_serving": [
        str(INSTALLED / "sglang/bin/python"),
        str(HERE / "sglang_bench.py"),
    ],
}
NEVER_REFUSED = {"sglang.bench_serving"}
TEMPLATE = "chat_template.jinja"
TOOLS = """{% if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}A call is <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>
{% endif %}"""


def metric(url: str, pattern: str) -> float:
    """Sum of the samples that match."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(pattern, line))


def model_with_tools(folder: Path) -> Path:
    """The default model in a new folder, with a chat template that shows tools."""
    command = [sys.executable, "-m", "tasuki", "model", "fetch", "smollm2-135m"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    original = Path(done.stdout.split()[-1])
    folder.mkdir()
    for file in original.iterdir():
        if file.name != TEMPLATE:
            (folder / file.name).symlink_to(file)
    (folder / TEMPLATE).write_text(TOOLS + (original / TEMPLATE).read_text())
    return folder


def requests_left(url: str) -> float:
    """What runs on although its client left; it has ten seconds to end."""
    until = time.monotonic() + 10.0
    while (left := metric(url, "tasuki_requests_in_flight")) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def main() -> int:
    """Runs each client; 1 if one fails."""
    for script in HERE.glob("*.mjs"):  # modules are looked for beside the script
        (INSTALLED / script.name).write_text(script.read_text())
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        model = model_with_tools(Path(folder) / "smollm2-with-tools")
        options = {"model": str(model), "max-concurrent-requests": 2}
        server = Serving(Topology(), options, Path(folder) / "log")
        try:
            environment = os.environ | {
                "TASUKI_URL": server.url,
                "TASUKI_MODEL": server.model,
                "TASUKI_MODEL_FOLDER": str(model),
            }
            for name, command in COMMANDS.items():
                refused = metric(server.url, REFUSALS)
                code = subprocess.run(command, env=environment, timeout=300).returncode
                again = metric(server.url, REFUSALS) - refused
                left = requests_left(server.url)
                if code or left or bool(again) == (name in NEVER_REFUSED):
                    failed.append(name)
                print(f"{name}: exit {code}, {again:.0f} times refused with 503, {left:.0f} left")
        finally:
            server.stop()
    print(f"failed: {', '.join(failed)}" if failed else f"{len(COMMANDS)} clients passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
