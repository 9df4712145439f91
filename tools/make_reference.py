"""Writes docs/configuration.md: every option of every command, from the commands themselves.

python tools/make_reference.py            write it
python tools/make_reference.py --check    fail if it differs
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tasuki.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

Every option of every command, written by `tools/make_reference.py` from the commands
themselves. Values in brackets are defaults. `tasuki serve` passes options on to the workers and
to the router; what it does not list can be set where those are started by hand.

## Environment variables

| variable | meaning |
|---|---|
| `TASUKI_CACHE` | Models, kernels, settings [`$XDG_CACHE_HOME/tasuki`, else `~/.cache/tasuki`] |
| `FLASHINFER_WORKSPACE_BASE` | FlashInfer's kernels [in `TASUKI_CACHE`] |
| `TRITON_CACHE_DIR`, `TORCHINDUCTOR_CACHE_DIR` | Triton's and Inductor's [in `TASUKI_CACHE`] |
| `TASUKI_CPU_KERNELS` | portable, avx2, avx512, avx512_bf16, amx_bf16 or neon [the quickest] |
| `TASUKI_LOG` | The router's log filter, for example `info` or `tasuki_router=debug` |
| `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` | As `huggingface_hub` reads them |
| `TASUKI_NODES_KEY` | Secret of the hosts of a worker (`--nodes`), 16 characters or more |
| `TASUKI_PAUSE_TOKEN` | Token of `tasuki worker --pause` beyond loopback [a new one, in its log] |
| `TASUKI_API_KEY` | Key in the commands that `tasuki serve` prints, where keys are required |
| `OPENAI_API_KEY` | The client's key of `tasuki bench serve` and `tasuki doctor` |
| `SSL_CERT_FILE` | CA certificates that these two trust in place of the system's |
| `TASUKI_BENCH_HEADERS` | Further headers of `tasuki bench serve`, lines of `NAME:VALUE` |
| `OTEL_*` | As OpenTelemetry reads them: [tracing](tracing.md) |
| `XDG_RUNTIME_DIR` | The sockets of `tasuki scale` are in its folder `tasuki` [/tmp/tasuki-UID] |
| `RAY_ADDRESS` | The cluster of `tasuki serve --on ray` |
| `CUDA_VISIBLE_DEVICES` | The GPUs that `tasuki serve` may assign to workers |
| `OMP_NUM_THREADS` | Threads of a worker on a CPU [cores / workers] |
| `UCX_*`, `NIXL_*` | The transport's own; what is set wins over what Tasuki would set |
"""
RUST = (("router",), ("simulate",), ("plan",), ("bench", "serve"), ("bench", "fake-server"))


def cell(text: str) -> str:
    """Text for one cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def python_options(command: Any) -> Iterator[tuple[str, str]]:
    """(option, meaning) of a command of Python's."""
    context = command.context_class(command)
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if parameter.param_type_name == "argument":
            yield parameter.name.upper(), getattr(parameter, "help", "") or ""
        elif record is not None and "--help" not in parameter.opts:
            yield record


def rust_options(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(option, meaning) of a command of Rust's, read from its help."""
    done = subprocess.run(
        [sys.executable, "-m", "tasuki", *words, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    option, meaning = "", ""
    for line in done.stdout.splitlines():
        if re.match(r" {2,6}(-\w, )?--\w", line):
            if option:
                yield option, meaning
            option, _, meaning = line.strip().partition("  ")
        elif line.startswith("        "):
            meaning += " " + line
        elif option and line.strip():
            yield option, meaning
            option, meaning = "", ""
    if option:
        yield option, meaning


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands below a group, with their words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


def page() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    parts = [HEAD]
    for words, command in commands(root):
        options = list(rust_options(words) if words in RUST else python_options(command))
        parts.append(f"## tasuki {' '.join(words)}\n\n{cell(command.get_short_help_str(200))}\n")
        rows = [(name, text) for name, text in options if not name.startswith(("-h", "--help"))]
        if rows:
            lines = [f"| `{cell(name)}` | {cell(text)} |" for name, text in rows]
            parts.append("\n".join(["| option | meaning |", "|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def main() -> int:
    """Write or check the page."""
    made = page()
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        print("docs/configuration.md differs from the commands: run tools/make_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
