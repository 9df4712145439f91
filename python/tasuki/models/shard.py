"""Which part of each weight a rank has: tensor parallelism of the Llama family.

    q, k, v, gate, up    rows: whole heads, and columns of the inner layer
    output, down         columns; the ranks' GEMMs are summed
    experts              each like an MLP; routers whole on every rank
    head                 rows: a stretch of the vocabulary (execution/sampler.py joins them)
    embedding, norms     whole on every rank

KV heads that are fewer than the ranks are held by several ranks each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of one dimension of a tensor."""

    dim: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    Attributes:
        spec: Of the whole model.
        rank: This one's number.
        size: How many ranks there are; `check_ranks` has passed them.
    """

    spec: ModelSpec
    rank: int = 0
    size: int = 1

    @property
    def local(self) -> ModelSpec:
        """The shape of what this rank computes: fewer heads, a narrower inner layer."""
        spec, size = self.spec, self.size
        return replace(
            spec,
            num_heads=spec.num_heads // size,
            num_kv_heads=max(1, spec.num_kv_heads // size),
            intermediate_size=spec.intermediate_size // size,
            experts=None
            if spec.experts is None
            else replace(spec.experts, inner_size=spec.experts.inner_size // size),
        )

    def even(self, dim: int, total: int) -> Slice:
        """This rank's part of `total` that the ranks divide evenly."""
        each = total // self.size
        return Slice(dim, self.rank * each, (self.rank + 1) * each)

    @property
    def first_kv_head(self) -> int:
        """The model's KV head that is this rank's first."""
        return self.rank * self.spec.num_kv_heads // self.size

    def kv_rows(self) -> Slice:
        """Rows of this rank's KV heads, in the GEMMs with k and v."""
        first, count, size = self.first_kv_head, self.local.num_kv_heads, self.spec.head_dim
        return Slice(0, first * size, (first + count) * size)

    def vocab_rows(self) -> tuple[Slice, int]:
        """Rows of the head, and how many rows of padding bring the last ranks up to the first."""
        each = -(-self.spec.vocab_size // self.size)
        begin = min(self.rank * each, self.spec.vocab_size)
        end = min(begin + each, self.spec.vocab_size)
        return Slice(0, begin, end), each - (end - begin)


def check_ranks(spec: ModelSpec, size: int) -> None:
    """Refuse a number of ranks that the model cannot be divided among.

    Raises:
        UnsupportedModelError: The model has no fast path, which alone can be divided.
        ModelError: Something does not divide; names it, and the ranks that are possible.
    """
    if size == 1:
        return
    if not spec.native:
        raise UnsupportedModelError(
            f"{spec.architecture} runs through transformers, which Tasuki does not divide among"
            f" ranks: --tp is {size}, use 1"
        )
    problems = _problems(spec, size)
    if problems:
        possible = [str(n) for n in range(1, spec.num_heads + 1) if not _problems(spec, n)]
        raise ModelError(
            f"--tp is {size}, but the model has {' and '.join(problems)}: use one of"
            f" {', '.join(possible)}"
        )


def _problems(spec: ModelSpec, size: int) -> list[str]:
    found = []
    if spec.num_heads % size:
        found.append(f"{spec.num_heads} attention heads")
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        found.append(f"{spec.num_kv_heads} KV heads")
    if spec.has_dense_layers and spec.intermediate_size % size:
        found.append(f"an inner layer of {spec.intermediate_size} columns")
    if spec.experts is not None and spec.experts.inner_size % size:
        found.append(f"experts with an inner layer of {spec.experts.inner_size} columns")
    return found
