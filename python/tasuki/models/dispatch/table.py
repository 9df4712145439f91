"""Choices by stage and number of rows: pure data, no torch.

A stage is two GEMMs of a layer and what lies between them:

    mlp         output GEMM + residual ▶ norm ▶ gate and up GEMM + gate
    attention   down GEMM + residual ▶ norm ▶ the next layer's query, key and value GEMM

A choice names what computes the first and the second: `ours` (gemms.py), `linear` (cuBLAS,
and one kernel for residual and norm), or, for the first, `addmm` (cuBLAS adds the residual).
They are chosen together, as the norm belongs to one or the other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from tasuki.errors import TasukiError


class DispatchError(TasukiError):
    """A file of choices is not one."""


class Choice(NamedTuple):
    """What computes the two GEMMs of a stage."""

    add: str
    use: str

    def __str__(self) -> str:
        return f"{self.add}/{self.use}"


CHOICES = tuple(
    Choice(*ways.split("/"))
    for ways in (
        "ours/ours",
        "ours/linear",
        "linear/ours",
        "linear/linear",
        "addmm/linear",
    )
)

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128)
"""Buckets: a choice for so many rows is that for fewer, down to the bucket before."""

STAGES = ("mlp", "attention")


class Table:
    """Choices; what is missing is left to the default.

    Args:
        choices: By stage (see `stage_key`), then by bucket.
    """

    def __init__(self, choices: Mapping[str, Mapping[int, Choice]] | None = None) -> None:
        self._choices = {key: dict(of) for key, of in (choices or {}).items()}

    def __bool__(self) -> bool:
        return bool(self._choices)

    def choice(self, key: str, rows: int) -> Choice | None:
        """For so many rows; None: the default."""
        return self._choices.get(key, {}).get(bucket_of(rows))

    def has(self, key: str, bucket: int) -> bool:
        """Whether this was measured, be the answer the default."""
        return bucket in self._choices.get(key, {})

    def set(self, key: str, bucket: int, choice: Choice) -> None:
        """Add or replace one."""
        self._choices.setdefault(key, {})[bucket] = choice

    def to_json(self) -> dict[str, dict[str, str]]:
        """As files hold it."""
        return {
            key: {str(bucket): str(choice) for bucket, choice in sorted(of.items())}
            for key, of in sorted(self._choices.items())
        }

    @classmethod
    def from_json(cls, given: Any) -> Table:
        """What `to_json` made.

        Raises:
            DispatchError: It did not.
        """
        try:
            table = cls()
            for key, of in given.items():
                for bucket, name in of.items():
                    table.set(key, int(bucket), _NAMES[name])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            known = ", ".join(_NAMES)
            raise DispatchError(
                f"not a table of choices by stage and rows ({error!r}): choices are {known};"
                " use a file that --dispatch measured wrote"
            ) from None
        return table


_NAMES = {str(choice): choice for choice in CHOICES}


def bucket_of(rows: int) -> int:
    """The least bucket that holds so many rows; 0: there is none."""
    return next((bucket for bucket in ROWS if bucket >= rows), 0)


@functools.lru_cache(64)
def stage_key(stage: str, first: tuple[int, int], second: tuple[int, int], dtype: str) -> str:
    """Names a stage by the shapes [out, in] of its weights and their dtype."""
    shapes = " ".join(f"{out}x{size}" for out, size in (first, second))
    return f"{stage} {shapes} {dtype}"
