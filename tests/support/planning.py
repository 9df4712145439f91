"""What tests of `tasuki simulate` and `tasuki plan` share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki.cli import app

RATES = "step-ms=5,sequence-us=20,kv-token-ns=45,prompt-step-ms=5,prompt-token-us=20"
LOAD = ["--lengths", "500:50", "--num-requests", "60", "--request-rate", "8"]


def main(words: list[str]) -> int:
    """The exit code of a command of `tasuki`."""
    with pytest.raises(SystemExit) as ended:
        app(words)
    return int(ended.value.code or 0)


def steps_file(path: Path, **more: object) -> Path:
    """Steps of 10 ms, and 10 us for each token of a prompt."""
    content: dict[str, object] = {
        "kind": "steps",
        "label": "made",
        "model": "made",
        "machine": {"gpus": []},
        "engine": {"block_size_tokens": 16, "block_bytes": 1000, "num_blocks": 4096},
        "prefill": [{"tokens": n, "context": 0, "seconds": 0.005 + 1e-5 * n} for n in (64, 512)],
        "decode": [{"batch": n, "context": 512, "seconds": 0.010} for n in (1, 64)],
    }
    path.write_text(json.dumps(content | more))
    return path
