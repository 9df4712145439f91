"""Logits on CUDA against transformers: fused kernels, FlashInfer, CUDA graphs, the fallback.

Errors are relative, |got - want| / |want| over all logits. In float32 both sides
round alike but sum in other orders. In bfloat16 the reference is transformers in
float32 with the same (rounded) weights; transformers' own bfloat16 is that far
from it as well, and we may not be farther than it by much.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8 import needs_fp8
from paged import BLOCK_SIZE, Paged, Sequence

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.attention.sdpa import SdpaAttention
from tasuki.models.base import CausalModel
from tasuki.models.loader import load_model

FLOAT32_ERROR = 2e-5
BFLOAT16_ERROR = 0.05
BESIDE_TRANSFORMERS = 1.3  # times the error of its own bfloat16

VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.042,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DENSE = ("llama", "qwen3", "mistral")
ALL = (*DENSE, "qwen3-moe", "olmo2")


@dataclass
class Folder:
    """A saved model, and transformers' view of it."""

    path: Path
    reference: Any  # float32, weights rounded to bfloat16

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab] float32."""
        return _logits(self.reference, tokens)


def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.tensor([tokens], device="cuda")
        result: torch.Tensor = model(ids, use_cache=False).logits[0].float()
    return result


def _transformers(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=dtype, attn_implementation="eager").to("cuda").eval()


def _config(name: str) -> Any:
    import transformers as t

    match name:
        case "llama":
            return t.LlamaConfig(**SHAPE)
        case "qwen3":
            return t.Qwen3Config(**SHAPE, head_dim=64, tie_word_embeddings=True)
        case "mistral":
            return t.MistralConfig(**SHAPE, head_dim=64, sliding_window=33)
        case "qwen3-moe":
            return t.Qwen3MoeConfig(
                **SHAPE,
                head_dim=64,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=256,
                norm_topk_prob=True,
            )
        case "olmo2":  # has no fast path
            return t.Olmo2Config(**SHAPE)
    raise ValueError(name)


@pytest.fixture(scope="module", params=ALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        _config(request.param), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(path)
    return Folder(path, _transformers(path, torch.float32))


def flashinfer(model: CausalModel) -> Callable[[torch.Tensor], AttentionBackend]:
    """Makes the backend over a pool."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed (tasuki[gpu])")
    from tasuki.attention.flashinfer import FlashInferAttention

    return lambda pool: FlashInferAttention(pool, model.spec.num_heads, torch.bfloat16)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def steps(paged: Paged) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits of all tokens of four sequences, fed in chunks, decodes and mixed steps.

    Returns:
        [sum of lengths, vocab] in the sequences' order, and their tokens.
    """
    sequences = [Sequence(prompt(n, n)) for n in (90, 41, 17, 120)]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    plan = [
        {0: 50, 1: 40, 2: 16},
        {1: 1, 0: 39, 3: 30},
        {0: 1, 2: 1, 3: 90},
    ]
    for counts in plan:
        logits = paged.step([(sequences[i], count) for i, count in counts.items()])
        for i, part in zip(counts, torch.split(logits, list(counts.values())), strict=True):
            parts[i].append(part)
    return torch.cat([x for part in parts for x in part]), [s.tokens for s in sequences]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm())


def rounding(folder: Folder, got: torch.Tensor, want: torch.Tensor) -> float:
    """`error`; with experts that of the tokens' better quarter.

    Rounding sends some tokens to another expert, which those after them in a sequence see.
    """
    if not hasattr(folder.reference.config, "num_experts"):
        return error(got, want)
    each = [error(a, b) for a, b in zip(got, want, strict=True)]
    return statistics.quantiles(each, n=4)[0]


def test_float32(folder: Folder) -> None:
    model = load_model(folder.path, dtype=torch.float32, device="cuda")
    got, tokens = steps(Paged(model, torch.float32, "cuda", SdpaAttention))
    assert error(got, torch.cat([folder.expected(t) for t in tokens])) < FLOAT32_ERROR


def test_bfloat16(folder: Folder) -> None:
    model = load_model(folder.path, dtype=torch.bfloat16, device="cuda")
    got, tokens = steps(Paged(model, torch.bfloat16, "cuda", flashinfer(model)))
    want = torch.cat([folder.expected(t) for t in tokens])
    rounded = _transformers(folder.path, torch.bfloat16)
    beside = rounding(folder, torch.cat([_logits(rounded, t) for t in tokens]), want)
    limit = min(BFLOAT16_ERROR, BESIDE_TRANSFORMERS * beside)
    assert rounding(folder, got, want) < limit, f"transformers in bfloat16: {beside:.1e}"


def test_few_rows(folder: Folder) -> None:
    """Steps of 1, 2, 20 and 40 rows: all of a layer by our own kernels, in the fast path."""
    model = load_model(folder.path, dtype=torch.bfloat16, device="cuda")
    paged = Paged(model, torch.bfloat16, "cuda", flashinfer(model))
    first, second = Sequence(prompt(1, 44)), Sequence(prompt(2, 24))
    both = [(first, 1), (second, 1)]
    plan = [[(first, 40)], [(first, 1)], both, [(second, 20)], both, [(second, 1)], both]
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for work in plan:
        logits = paged.step(work).split([count for _, count in work])
        for (sequence, _), part in zip(work, logits, strict=True):
            parts[sequence is second].append(part)
    got = torch.cat([*parts[0], *parts[1]])
    want = torch.cat([folder.expected(first.tokens), folder.expected(second.tokens)])
    rounded = _transformers(folder.path, torch.bfloat16)
    by_transformers = torch.cat([_logits(rounded, s.tokens) for s in (first, second)])
    beside = rounding(folder, by_transformers, want)
    assert rounding(folder, got, want) < min(BFLOAT16_ERROR, BESIDE_TRANSFORMERS * beside)


@needs_fp8
def test_fp8_cache(folder: Folder) -> None:
    """The cache's rounding (3 bits of mantissa) is seen in the logits, and no more than it."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed (tasuki[gpu])")
    from tasuki.attention.flashinfer import FlashInferAttention

    model = load_model(folder.path, dtype=torch.bfloat16, device="cuda")
    paged = Paged(
        model,
        torch.float8_e4m3fn,
        "cuda",
        lambda pool: FlashInferAttention(pool, model.spec.num_heads, torch.bfloat16),
    )
    got, tokens = steps(paged)
    want = torch.cat([folder.expected(t) for t in tokens])
    assert rounding(folder, got, want) < 3 * BFLOAT16_ERROR


@needs_fp8
@pytest.mark.parametrize("folder", DENSE, indirect=True)  # the others are refused
def test_fp8_weights(folder: Folder) -> None:
    """Beside the same rounded weights in bfloat16: rows of more than 64 tokens are rounded too."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed (tasuki[gpu])")
    exact = load_model(folder.path, dtype=torch.float32, quantization="fp8")
    want, _ = steps(Paged(exact))
    model = load_model(folder.path, dtype=torch.bfloat16, device="cuda", quantization="fp8")
    got, _ = steps(Paged(model, torch.bfloat16, "cuda", flashinfer(model)))
    assert error(got, want.to(got.device)) < 4 * BFLOAT16_ERROR


def test_a_graph_of_decodes_gives_the_eager_logits(folder: Folder) -> None:
    """Recorded once, padded, and replayed for other sequences of other lengths."""
    model = load_model(folder.path, dtype=torch.bfloat16, device="cuda")
    bucket, width = 4, 16
    eager, graphed = (Paged(model, torch.bfloat16, "cuda", flashinfer(model)) for _ in range(2))
    static = _padding(bucket, width)
    graphed.attention.plan(static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(2):
            model.forward(static, graphed.attention)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        result = model.forward(static, graphed.attention)

    def replay(batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        count = batch.num_decodes
        for name in ("tokens", "positions", "slots"):
            getattr(static, name)[:count] = getattr(batch, name)
        static.slots[count:] = -1
        static.block_tables.zero_()
        static.block_tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
        static.context_lens, static.query_lens = batch.context_lens, batch.query_lens
        static.num_decodes = count
        attention.plan(static)
        graph.replay()
        return result[:count].clone()

    for lengths in ([30, 5, 77], [8], [100, 41, 60, 9]):
        wanted = []
        for paged in (eager, graphed):
            sequences = [Sequence(prompt(n, n)) for n in lengths]
            paged.step([(sequence, n - 1) for sequence, n in zip(sequences, lengths, strict=True)])
            if paged is graphed:
                paged.model = type("Replayed", (), {"forward": staticmethod(replay)})()
            wanted.append(paged.step([(sequence, 1) for sequence in sequences]))
            paged.model = model
            paged.free += [block for sequence in sequences for block in sequence.blocks]
        # Sums in another order, as sequences are divided otherwise.
        assert error(wanted[1], wanted[0]) < 0.02


def _padding(bucket: int, width: int) -> Batch:
    """A batch of padding alone, in tensors that a graph may keep."""
    assert width * BLOCK_SIZE >= 120
    zeros = torch.zeros(bucket, dtype=torch.int64, device="cuda")
    return Batch(
        tokens=zeros.clone(),
        positions=zeros.clone(),
        slots=zeros - 1,
        block_tables=torch.zeros(bucket, width, dtype=torch.int32, device="cuda"),
        query_lens=[],
        context_lens=[],
        logits_rows=torch.arange(bucket, device="cuda"),
        num_decodes=0,
        bucket=bucket,
    )


def test_dummy_weights_give_finite_logits(folder: Folder) -> None:
    model = load_model(folder.path, dtype=torch.bfloat16, device="cuda", weights="dummy")
    got, _ = steps(Paged(model, torch.bfloat16, "cuda", flashinfer(model)))
    assert got.isfinite().all()
    assert got.std() > 0
