"""How many random cases a search runs, and from which seed it draws them.

By default every run has the same cases. Two environment variables change that,
for searches of our own, for Hypothesis and for the Rust tests alike:

- `TASUKI_TEST_SEED`: a number, or `random` for a new one in every run;
- `TASUKI_TEST_SCHEDULES`: how many cases each search runs.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence

import pytest

SEED_VARIABLE = "TASUKI_TEST_SEED"
COUNT_VARIABLE = "TASUKI_TEST_SCHEDULES"


def _first_seed() -> int | None:
    text = os.environ.get(SEED_VARIABLE, "")
    if text == "random":
        return random.SystemRandom().randrange(2**32)
    if text and not text.isdecimal():
        raise ValueError(f"{SEED_VARIABLE}={text}: must be a whole number or 'random'")
    return int(text) if text else None


FIRST_SEED = _first_seed()
"""The first seed of this run's searches; None for the default cases."""


def count(default: int) -> int:
    """How many cases a search runs that runs `default` of them unless told otherwise.

    Raises:
        ValueError: `TASUKI_TEST_SCHEDULES` is not a positive number.
    """
    text = os.environ.get(COUNT_VARIABLE, "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{COUNT_VARIABLE}={text}: must be a positive whole number")
    return int(text) if text else default


def seeds(default: int, regressions: Sequence[int] = ()) -> list[int]:
    """The seeds of a search's cases.

    Args:
        default: Unless the environment says otherwise, the seeds are 0 to `default` - 1.
        regressions: Further seeds, of cases that once failed.
    """
    first = FIRST_SEED or 0
    drawn = range(first, first + count(default))
    return [*drawn, *(seed for seed in regressions if seed not in drawn)]


@contextlib.contextmanager
def case(seed: int) -> Iterator[None]:
    """One case of a search. Its failure says how to repeat it and how to keep it."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"seed {seed}; this case alone: {SEED_VARIABLE}={seed} {COUNT_VARIABLE}=1 "
            f"(to test it always, add {seed} to this module's REGRESSIONS)"
        )
        raise


def set_up_hypothesis(config: pytest.Config) -> None:
    """Without a seed the same examples in every run; no deadlines.

    Must run before Hypothesis' own plugin reads its options.

    Raises:
        ImportError: there is no Hypothesis where only the GPU's tests run.
    """
    from hypothesis import settings

    common = settings.get_profile("ci")  # no deadlines, no database
    settings.register_profile(
        "tasuki", common, max_examples=count(100), derandomize=FIRST_SEED is None, print_blob=True
    )
    settings.load_profile("tasuki")
    if FIRST_SEED is not None:
        config.option.hypothesis_seed = FIRST_SEED
