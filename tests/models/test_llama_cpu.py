"""The native CPU kernels against the models they stand for, in bfloat16.

The quickest kernels of this processor run every model, the others one model each.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from paged import Paged, Sequence
from tiny import NATIVE, save

from tasuki import _native
from tasuki.attention.base import AttentionBackend
from tasuki.attention.errors import AttentionError
from tasuki.attention.sdpa import SdpaAttention
from tasuki.models import cpu_kernels, loader
from tasuki.models.attending import attention_for
from tasuki.models.base import CausalModel
from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.llama_cpu import CpuLlamaModel, PoolOnly, why_not
from tasuki.models.loader import load_model
from tasuki.models.spec_reader import read_spec

BFLOAT16 = torch.bfloat16
Plan = list[list[tuple[int, int]]]  # steps of (sequence, tokens)

WHOLE: Plan = [[(0, 150), (1, 3), (2, 25)]]  # enough rows to go by blocks
CHUNKS: Plan = [[(0, 110)], [(0, 39), (1, 2), (2, 11)], [(0, 1), (1, 1), (2, 13)], [(2, 1)]]
LENGTHS = (150, 3, 25)


@dataclass
class Trio:
    """One model three times: natively and by PyTorch in bfloat16, and in float32."""

    native: CpuLlamaModel
    torch: CausalModel
    exact: CausalModel


def trios() -> Iterator[ParameterSet]:
    """Kernels and model; kernels that this processor lacks are skipped, by name."""
    best = cpu_kernels.available()[-1]
    x86 = platform.machine() == "x86_64"
    for name, missing in _native.cpu_kernels():
        if name != "portable" and name.startswith(("avx", "amx")) != x86:
            continue  # of another architecture
        models = NATIVE if name == best else ["llama"]
        reason = f"this processor has no {', '.join(missing)}"
        marks = pytest.mark.skipif(bool(missing), reason=reason)
        for model in models:
            yield pytest.param((name, model), id=f"{name}-{model}", marks=marks)


@pytest.fixture(scope="module", params=trios())
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    kernels, model = request.param
    folder = tmp_path_factory.mktemp(model)
    save(model, folder)
    return load_trio(folder, kernels)


def load_trio(folder: Path, kernels: str) -> Trio:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu_kernels.VARIABLE, kernels)
        native = load_model(folder, dtype=BFLOAT16)
    assert isinstance(native, CpuLlamaModel)
    assert native.kernels == kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "why_not", lambda *_: "compared with PyTorch's")
        by_torch = load_model(folder, dtype=BFLOAT16)
    assert not isinstance(by_torch, CpuLlamaModel)
    return Trio(native, by_torch, load_model(folder, dtype=torch.float32))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def native_attention(pool: torch.Tensor, model: CausalModel) -> AttentionBackend:
    return attention_for(model, pool, pool.dtype)[0]


def run(
    model: CausalModel, plan: Plan, dtype: torch.dtype = BFLOAT16, *, all_rows: bool = True
) -> list[torch.Tensor]:
    """Logits of each sequence, [tokens, vocab], after the steps of a plan."""
    draw = random.Random(7)
    sequences = [Sequence([draw.randrange(3, 256) for _ in range(n)]) for n in LENGTHS]
    make: Callable[[torch.Tensor], AttentionBackend] = SdpaAttention
    if isinstance(model, CpuLlamaModel):
        make = lambda pool: native_attention(pool, model)  # noqa: E731
    paged = Paged(model, dtype, attention=make)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in plan:
        ordered = sorted(step, key=lambda part: part[1] != 1)
        logits = paged.step([(sequences[i], n) for i, n in ordered], all_rows=all_rows)
        counts = [n if all_rows else 1 for _, n in ordered]
        for (i, _), rows in zip(ordered, logits.split(counts), strict=True):
            found[i].append(rows)
    return [torch.cat(parts) for parts in found]


def distance(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    a, b = torch.cat(got), torch.cat(want)
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("plan", [WHOLE, CHUNKS], ids=["whole", "chunks"])
def test_as_exact_as_pytorch_in_bfloat16(trio: Trio, plan: Plan) -> None:
    exact = run(trio.exact, plan, torch.float32)
    native = distance(run(trio.native, plan), exact)
    by_torch = distance(run(trio.torch, plan), exact)
    assert native <= by_torch, (native, by_torch)
    assert native < 0.05


def test_chunks_batches_and_threads_change_no_bit(trio: Trio) -> None:
    torch.set_num_threads(1)
    want = run(trio.native, WHOLE)
    for count in (1, 2, 4):  # four are more than the cores of a small machine
        torch.set_num_threads(count)
        for plan in (WHOLE, CHUNKS):
            for a, b in zip(run(trio.native, plan), want, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("kernels", cpu_kernels.available())
def test_int8_weights_stay_close_and_change_no_bit_by_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    save("llama", tmp_path)
    monkeypatch.setenv(cpu_kernels.VARIABLE, kernels)
    exact = run(load_model(tmp_path, dtype=torch.float32), WHOLE, torch.float32)
    plain = distance(run(load_model(tmp_path, dtype=BFLOAT16), WHOLE), exact)
    int8 = load_model(tmp_path, dtype=BFLOAT16, quantization="int8")
    want = run(int8, WHOLE)
    # Random weights of few layers amplify 8 bits' rounding; a wrong scale is off by far more.
    assert plain < distance(want, exact) < 0.1
    for count in (1, 2):
        torch.set_num_threads(count)
        for a, b in zip(run(int8, CHUNKS), want, strict=True):
            assert torch.equal(a, b)


def test_int8_weights_are_refused_where_the_kernels_do_not_run(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"in one rank: the dtype is float32; leave"):
        load_model(tmp_path, dtype=torch.float32, quantization="int8")


def test_int8_weights_never_run_by_kernels_that_round_activations() -> None:
    assert cpu_kernels.choose(int8=True) not in ("avx512_bf16", "amx_bf16")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of another architecture")
def test_where_pairs_are_multiplied_slowly_the_kernels_that_widen_come_first() -> None:
    names = [name for name, _ in _native.cpu_kernels()]
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    assert (names.index("avx512") > names.index("avx512_bf16")) == intel
    assert names[-1] == "amx_bf16"


def test_only_wanted_rows_bring_logits(trio: Trio) -> None:
    all_rows = run(trio.native, CHUNKS)
    last = run(trio.native, CHUNKS, all_rows=False)
    for i, (rows, ends) in enumerate(zip(all_rows, last, strict=True)):
        counts = [n for step in CHUNKS for sequence, n in step if sequence == i]
        at = torch.tensor(counts).cumsum(0) - 1
        assert torch.equal(ends, rows[at])


def test_the_cache_is_pytorchs(trio: Trio) -> None:
    """What one wrote, the other goes on from: workers of both kinds may be peers."""
    draw = random.Random(3)
    tokens = [draw.randrange(3, 256) for _ in range(30)]
    first, other = Paged(trio.native, BFLOAT16), Paged(trio.torch, BFLOAT16)
    sequence = Sequence(tokens)
    first.step([(sequence, 29)])
    other.pool.copy_(first.pool)
    taken = Sequence(tokens, cached=29, blocks=list(sequence.blocks))
    got, want = other.step([(taken, 1)]), first.step([(sequence, 1)])
    assert distance([got], [want]) < 0.05


def test_what_does_not_fit_is_refused_by_name(trio: Trio) -> None:
    paged = Paged(trio.native, BFLOAT16)
    with pytest.raises(ValueError, match=r"token is 256, must be from 0 to 256 exclusive"):
        paged.step([(Sequence([1, 256, 2]), 3)])
    with pytest.raises(ValueError, match=r"slot is 768, must be from 0 to 768 exclusive"):
        paged.step([(Sequence([1, 2], blocks=[96]), 2)])
    with pytest.raises(ValueError, match=r"block is 96, must be from 0 to 96 exclusive"):
        paged.step([(Sequence([1] * 9, cached=8, blocks=[96, 1]), 1)])


def test_what_is_not_finite_shows_in_its_own_row_only(trio: Trio) -> None:
    """A sequence whose cache is damaged has no token; its neighbours do not notice."""
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 256) for _ in range(20)] for _ in range(2)]
    paged = Paged(trio.native, BFLOAT16)
    healthy, damaged = (Sequence(prompt) for prompt in prompts)
    paged.step([(healthy, 19), (damaged, 19)])
    want = paged.step([(healthy, 1)])
    healthy.cached -= 1
    paged.pool[damaged.blocks[-1]] = float("nan")
    got = paged.step([(healthy, 1), (damaged, 1)])
    assert torch.equal(got[:1], want)
    assert got[1].isnan().all()


def test_the_rotation_reaches_as_far_as_the_model(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = run(trio.native, CHUNKS)
    monkeypatch.setattr(trio.native, "_rotations", trio.native._make_rotations(4))
    for a, b in zip(run(trio.native, CHUNKS), want, strict=True):
        assert torch.equal(a, b)


def test_others_keep_pytorchs_operators(tmp_path: Path) -> None:
    save("llama", tmp_path)
    spec = read_spec(tmp_path)
    assert why_not(spec, torch.float32, torch.device("cpu")) == "the dtype is float32"
    assert why_not(spec, BFLOAT16, torch.device("cuda")) == "the device is cuda"
    assert not isinstance(load_model(tmp_path, dtype=torch.float32), CpuLlamaModel)


def test_unknown_and_unsupported_kernels_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("llama", tmp_path)
    monkeypatch.setenv(cpu_kernels.VARIABLE, "mmx")
    with pytest.raises(ModelError, match=r"is 'mmx': use one of portable, neon, avx2"):
        load_model(tmp_path, dtype=BFLOAT16)
    foreign = next(name for name, missing in _native.cpu_kernels() if missing)
    monkeypatch.setenv(cpu_kernels.VARIABLE, foreign)
    with pytest.raises(ModelError, match=rf"is '{foreign}', this processor has no .*: use one of"):
        load_model(tmp_path, dtype=BFLOAT16)


def test_it_brings_the_pool_and_refuses_to_attend() -> None:
    pool = torch.zeros(2, 1, 3, 2, 4, 8)
    backend = PoolOnly(pool)
    assert backend.pool is pool
    rows = torch.zeros(1, 1, 8)
    with pytest.raises(AttentionError, match=r"layer 2 .* kernels of its own"):
        backend.forward(2, rows, rows, rows, scale=1.0)
