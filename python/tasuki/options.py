"""Options of commands, declared as fields of dataclasses.

An option is one field with `option`. The command line (`command_line.py`), the arguments that the
launcher passes on, the options by role and the checks are made from these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_KEY = "option"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option besides its type and default.

    Attributes:
        help: For people; says units, and in brackets the default.
        flag: With its dashes.
        metavar: Stands for the value in the help; None: the type does.
        choices: Words that are allowed; empty: any.
        bounds: Least and greatest number, in the option's unit; None: no bound.
        range_in_help: Whether the command line shows the bounds, and refuses what is outside
            them as it refuses a word that is no number.
        in_bytes: Whether the command line takes amounts such as 2GB.
        serve: For options of workers: whether `tasuki serve` has it too.
        by_role: For options of workers: whether workers of one deployment may differ in it.
    """

    help: str
    flag: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    bounds: tuple[float | None, float | None] = (None, None)
    range_in_help: bool = False
    in_bytes: bool = False
    serve: bool = True
    by_role: bool = False

    @property
    def name(self) -> str:
        """The flag without its dashes."""
        return self.flag.removeprefix("--")

    def allowed(self, value: Any) -> str | None:
        """What could stand in place of a value that is refused; None: it is allowed."""
        if self.choices and value not in self.choices:
            return f"one of {', '.join(self.choices)}"
        if value == "":  # such as a variable of a script that is not set
            return "a value that is not empty, or leave the option out"
        low, high = self.bounds
        if not ((low is None or value >= low) and (high is None or value <= high)):  # also NaN
            return f"a value from {low}" + ("" if high is None else f" to {high}")
        return None


def option(default: T, help_text: str, *, flag: str = "", **more: Any) -> T:
    """A field of a dataclass that is an option.

    Args:
        default: Where the option is not given.
        help_text: See `Option`.
        flag: Empty: the field's name, with dashes.
        more: Of `Option`.
    """
    known = Option(help_text, flag, **more)
    field: T = dataclasses.field(default=default, metadata={_KEY: known})
    return field


def options_of(of: type) -> dict[str, Option]:
    """The options of a dataclass, by the names of their fields, in order."""
    found = {}
    for each in dataclasses.fields(of):
        if known := each.metadata.get(_KEY):
            flag = known.flag or "--" + each.name.replace("_", "-")
            found[each.name] = dataclasses.replace(known, flag=flag)
    return found


def types_of(of: type) -> dict[str, Any]:
    """The type of each option's value, by the names of their fields; `int` for `int | None`."""
    hints = get_type_hints(of)
    return {name: _without_none(hints[name]) for name in options_of(of)}


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    (kind,) = (each for each in get_args(hint) if each is not type(None))
    return kind


def first_refused(settings: Any) -> tuple[str, Any, str] | None:
    """The name and value of the first option that is refused, and what to use; None: none is.

    Defaults are allowed always, also those that are outside choices and bounds, such as None.
    """
    for name, known in options_of(type(settings)).items():
        value = getattr(settings, name)
        if value != _default(settings, name) and (allowed := known.allowed(value)):
            return known.name, value, allowed
    return None


def arguments(settings: Any, only: Collection[str] | None = None) -> list[str]:
    """The command-line arguments that give these settings, but for the defaults.

    Args:
        settings: A dataclass with options.
        only: Names of fields; None: all.
    """
    words: list[str] = []
    for name, known in options_of(type(settings)).items():
        value = getattr(settings, name)
        if value == _default(settings, name) or (only is not None and name not in only):
            continue
        if value is True:
            words.append(known.flag)
        else:
            words += [known.flag, _word(value)]
    return words


def _default(settings: Any, name: str) -> Any:
    return type(settings).__dataclass_fields__[name].default


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
