"""`tasuki serve` on one GPU, as a user starts it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gpu_model import save_model, serving
from support.models import VOCAB_SIZE

from tasuki.launch.config import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]


def prompts(count: int, longest: int) -> list[list[int]]:
    draw = random.Random(1)
    return [
        [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, longest))]
        for _ in range(count)
    ]


def test_a_gpu_answers_and_tells_how_it_started(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    with serving(save_model(tmp_path / "model"), Topology(0, 0, 1), log) as client:
        answer = client.complete("bast gong", max_tokens=24)
        assert len(answer.tokens) == 24
        assert answer.finish_reason == "length"
        asked = prompts(40, 900)
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda p: client.complete(p, max_tokens=12), asked))
        assert all(len(answer.tokens) == 12 for answer in answers)
    text = log.read_text()
    assert "device cuda:0: NVIDIA" in text
    for phase in ("imports", "weights", "profiling", "pool", "graphs", "transport"):
        assert f"{phase} " in text.partition("started in")[2].partition("\n")[0]
    assert "CUDA graphs:" in text


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    options = {"load-format": "dummy", "kv-dtype": "fp8", "max-running-requests": 8}
    with serving(model, Topology(0, 0, 1), tmp_path / "serve.log", **options) as client:
        assert len(client.complete("bast gong", max_tokens=8).tokens) == 8
