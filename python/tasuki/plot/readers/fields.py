"""Typed access to a JSON object; what does not fit is one error that names file and field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.run import Stats

# Larger numbers are no measurement, and overflow in sums; nanoseconds since 1970 are 2e18.
_LARGEST = 1e24
MOST_TOKENS = 1e7  # of an answer; the gaps between them are a list


class Fields:
    """A JSON object of a result file.

    Args:
        path: The file, for errors.
        data: The object.
        where: Its place in the file, for errors: "" or "metrics".
    """

    def __init__(self, path: Path, data: Mapping[str, Any], where: str = "") -> None:
        self.path = path
        self.data = data
        self._where = where

    def _name(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def _wrong(self, key: str, wanted: str) -> ResultFileError:
        found = _short(self.data.get(key))
        return ResultFileError(self.path, f"{self._name(key)} should be {wanted}, is {found}")

    def number(self, key: str) -> float | None:
        """A finite number; None where it is absent, null, infinite or not a number."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if abs(value) > _LARGEST:
            raise self._wrong(key, f"a number of at most {_LARGEST:g}")
        return float(value)

    def count(self, key: str) -> int | None:
        """A whole number; None where it is absent or null."""
        value = self.number(key)
        return None if value is None else round(value)

    def need(self, key: str) -> float:
        """A number without which the file says nothing."""
        value = self.number(key)
        if value is None:
            raise ResultFileError(self.path, f"{self._name(key)} is missing")
        return value

    def above_zero(self, key: str) -> float:
        """A number above 0 without which the file says nothing."""
        value = self.need(key)
        if value * _LARGEST < 1.0:
            raise self._wrong(key, "above 0")
        return value

    def text(self, key: str) -> str:
        """A string; empty where it is absent or null."""
        value = self.data.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._wrong(key, "text")
        return value

    def inner(self, key: str) -> Fields:
        """An object inside; an empty one where it is absent or null."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Fields(self.path, value or {}, self._name(key))

    def rows(self, key: str) -> list[Fields]:
        """A list of objects; empty where it is absent or null."""
        values = self.column(key)
        if not all(isinstance(value, dict) for value in values):
            raise self._wrong(key, "a list of objects")
        return [Fields(self.path, v, f"{self._name(key)}[{i}]") for i, v in enumerate(values)]

    def column(self, key: str, length: int | None = None) -> list[Any]:
        """A list; empty where it is absent or null.

        Args:
            key: Its name.
            length: How long it must be, unless it is empty; then it is filled with None.
        """
        values = self.data.get(key)
        if values is None:
            values = []
        if not isinstance(values, list):
            raise self._wrong(key, "a list")
        if length is None or len(values) == length:
            return values
        if values:
            name = self._name(key)
            raise ResultFileError(self.path, f"{name} has {len(values)} entries, not {length}")
        return [None] * length

    def numbers(self, key: str, length: int | None = None, most: float = _LARGEST) -> list[Any]:
        """A list of numbers, None among them where a number is not known.

        Args:
            key: Its name.
            length: As for `column`.
            most: A larger one, either sign, is refused.
        """
        return [self._listed(key, value, most) for value in self.column(key, length)]

    def number_lists(
        self, key: str, length: int | None = None, most: float = _LARGEST
    ) -> list[list[float]]:
        """A list of lists of numbers, all of them known; null is an empty one.

        Args:
            key: Its name.
            length: As for `column`.
            most: As for `numbers`.
        """
        lists = []
        for values in self.column(key, length):
            if values is not None and not isinstance(values, list):
                raise self._wrong(key, "a list of lists of numbers")
            known = [self._listed(key, value, most) for value in values or ()]
            if None in known:
                raise self._held(key, None)
            lists.append([value for value in known if value is not None])
        return lists

    def _listed(self, key: str, value: Any, most: float) -> float | None:
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > most:
            raise self._held(key, value, most)
        return float(value)

    def _held(self, key: str, value: Any, most: float = _LARGEST) -> ResultFileError:
        limit = "" if most == _LARGEST else f" of at most {most:g}"
        wanted = f"{self._name(key)} should hold numbers{limit}"
        return ResultFileError(self.path, f"{wanted}, holds {_short(value)}")

    def stats(self, pattern: str) -> Stats:
        """Statistics under keys like "mean_ttft_ms", for the pattern "{}_ttft_ms"."""
        names = ("mean", "median", "std", "min", "max", "p90", "p95", "p99")
        return Stats(**{name: self.number(pattern.format(name)) for name in names})


def _short(value: Any) -> str:
    found = repr(value)
    return found if len(found) <= 40 else found[:37] + "..."


def divide(amount: float | None, by: float | None) -> float | None:
    """A quotient of what may be unknown."""
    return amount / by if amount is not None and by else None


def summed(*amounts: float | None) -> float | None:
    """A sum of what may be unknown."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
