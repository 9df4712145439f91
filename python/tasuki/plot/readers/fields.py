"""Typed access to a JSON object; what does not fit is one error that names file and field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.run import Stats


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
        found = repr(self.data.get(key))
        short = found if len(found) <= 40 else found[:37] + "..."
        return ResultFileError(self.path, f"{self._name(key)} should be {wanted}, is {short}")

    def number(self, key: str) -> float | None:
        """A finite number; None where it is absent, null, infinite or not a number."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value) if math.isfinite(value) else None

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

    def numbers(self, key: str, length: int | None = None) -> list[Any]:
        """A list of numbers, None among them where a number is not known.

        Args:
            key: Its name.
            length: As for `column`.
        """
        values = self.column(key, length)
        self._check_numbers(key, values)
        return values

    def number_lists(self, key: str, length: int | None = None) -> list[list[Any]]:
        """A list of lists of numbers; null is an empty one.

        Args:
            key: Its name.
            length: As for `column`.
        """
        values = [value or [] for value in self.column(key, length)]
        for value in values:
            if not isinstance(value, list):
                raise self._wrong(key, "a list of lists of numbers")
            self._check_numbers(key, value)
        return values

    def _check_numbers(self, key: str, values: list[Any]) -> None:
        if not all(value is None or isinstance(value, int | float) for value in values):
            wrong = next(v for v in values if not (v is None or isinstance(v, int | float)))
            raise ResultFileError(
                self.path, f"{self._name(key)} should hold numbers, holds {wrong!r}"
            )

    def stats(self, pattern: str) -> Stats:
        """Statistics under keys like "mean_ttft_ms", for the pattern "{}_ttft_ms"."""
        names = ("mean", "median", "std", "min", "max", "p90", "p95", "p99")
        return Stats(**{name: self.number(pattern.format(name)) for name in names})


def divide(amount: float | None, by: float | None) -> float | None:
    """A quotient of what may be unknown."""
    return amount / by if amount is not None and by else None


def summed(*amounts: float | None) -> float | None:
    """A sum of what may be unknown."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
