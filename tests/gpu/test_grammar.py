"""Grammars on CUDA: masks made while the device computes, steps launched ahead."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("llguidance")

from grammar_fakes import EOS, folder, text_of
from test_gpu_engine import VOCAB, Rig, crowd, make_model, make_rig, spec

from tasuki.engine.api import FinishReason, LegEndReason, RequestSpec
from tasuki.engine.grammar import Grammar, GrammarCompiler, GrammarSource
from tasuki.models.base import CausalModel

PATTERNS = ("[a-z]{20,40}", "([0-9]{2}-){3,12}[a-f]", "(yes|no|maybe)( [a-z]{2,6}){4}")
EXTRAS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {70: 5.0}, "logprobs": 2},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    return make_model("qwen3", tmp_path_factory.mktemp("qwen3"))


def compiled(pattern: str, cache: dict[str, Grammar] = {}) -> Grammar:  # noqa: B006 - a cache
    if pattern not in cache:
        compiler = GrammarCompiler(Path(folder()), VOCAB, [EOS])
        cache[pattern] = compiler.compile(GrammarSource("regex", pattern))
    return cache[pattern]


def bound() -> dict[str, tuple[str, RequestSpec]]:
    """Requests with grammars, and their patterns."""
    found = {}
    for i in range(12):
        pattern, extra = PATTERNS[i % len(PATTERNS)], EXTRAS[i % len(EXTRAS)]
        stops = frozenset({EOS})
        request = spec(f"g{i}", 5 + 9 * i, i, 120, stop_token_ids=stops, **extra)
        found[request.request_id] = (pattern, replace(request, grammar=compiled(pattern)))
    return found


def answers(rig: Rig) -> dict[str, str]:
    found = {}
    for name, (pattern, _) in bound().items():
        assert rig.ended[name] is LegEndReason.FINISHED
        assert rig.outputs[name][-1].finish is FinishReason.STOP
        found[name] = text_of(rig.tokens(name))
        assert re.fullmatch(pattern, found[name]), (pattern, found[name])
    return found


@pytest.mark.parametrize(
    ("graphs", "overlap"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_answers_match_beside_others_that_are_free(
    model: CausalModel, graphs: bool, overlap: bool
) -> None:
    rig = make_rig(model, graphs=graphs, overlap=overlap)
    for (_, request), free in zip(bound().values(), crowd(12), strict=True):
        rig.engine.submit(request)
        rig.engine.submit(free)
    rig.drain()
    answers(rig)
    assert all(len(rig.tokens(free.request_id)) == free.sampling.max_tokens for free in crowd(12))
    assert rig.engine.referenced_blocks == 0


def test_neither_launch_nor_sampling_waits_for_the_device(model: CausalModel) -> None:
    rig = make_rig(model, graphs=True, overlap=True)
    for _, request in bound().values():
        rig.engine.submit(request)
    for _ in range(12):  # all prompts
        rig.step()
    rig.runner.strict, rig.runner.samplings = True, 0
    for _ in range(6):
        rig.step()
    assert rig.runner.samplings > 3
    rig.runner.strict = False
    rig.drain()
    answers(rig)
