"""Typer's parameters from options (`options.py`), and what several commands share."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import inspect
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Annotated, Any

import typer

from tasuki.errors import TasukiError
from tasuki.options import Option, options_of, types_of

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_MAX_PORT = 65_535


class WordError(TasukiError):
    """A word of the command line that a command cannot take."""


def native_words(words: Iterable[str]) -> list[str]:
    """The words of a command line, for a command in Rust.

    Raises:
        WordError: One is no UTF-8.
    """
    found = list(words)
    for word in found:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise WordError(
                f"{os.fsencode(word)!r} is no UTF-8, which this command requires: rename the file"
                " or the folder"
            ) from None
    return found


def print_all_letters() -> None:
    """Let standard output take all text from now on.

    File names that are no UTF-8 are printed as they are, letters that the locale lacks as escapes.
    """
    codecs.register_error("tasuki", _as_bytes_or_escapes)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In a worker that was forked it has become a pipe, which has no position; it is set first.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="tasuki")


def _as_bytes_or_escapes(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def parse_bytes(text: str) -> int:
    """Bytes from `1500000`, `512MB`, `2GiB` or `2G`.

    Raises:
        typer.BadParameter: It is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no amount of memory: use 512MB, 2GiB or bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_host_port(text: str) -> str:
    """`HOST:PORT` or `[IPV6]:PORT`, as it is.

    Raises:
        typer.BadParameter: It is none of these.
    """
    host, _, port = text.strip().rpartition(":")
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and int(port) <= _MAX_PORT
    if not plain or not is_port or (plain == host and ":" in host):
        raise typer.BadParameter(
            f"{text!r} is no HOST:PORT: use 10.0.0.8:7001 or [fd00::8]:7001, with a port up to"
            f" {_MAX_PORT}"
        )
    return text.strip()


def open_standard_handles() -> None:
    """Have /dev/null at the handles 0 to 2 that are closed, as after `>&-`.

    Otherwise sockets get these numbers, and children lose them to their own standard handles.
    """
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115  # open until the end
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def end_at(*numbers: signal.Signals) -> None:
    """These signals end the process at once from now on, as by default. Main thread.

    The kernel discards a signal for the first process of a container that has no handler for it.
    There the exit code is 128 + the signal's number. A thread sees to it, since handlers wait until
    the main thread returns from native code.
    """
    if os.getpid() != 1:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        return
    for number in numbers:
        signal.signal(number, _end)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_end_when_told, args=(read,), name="signals", daemon=True).start()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _end_when_told(handle: int) -> None:
    while True:
        for number in os.read(handle, 1):
            if signal.getsignal(number) is _end:  # not replaced since
                _end(number, None)


def end_like_interrupted() -> None:
    """SIGTERM raises KeyboardInterrupt from now on, as Ctrl-C does. Main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def described(help_text: str, *flags: str, **more: Any) -> Any:
    """An option of one command alone, whose help says the default itself."""
    return typer.Option(*flags, help=help_text, show_default=False, **more)


def with_options(
    **chosen: Collection[str] | None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command whose parameters are dataclasses with options.

    Typer sees the options of each such parameter where the parameter stands. Options that are
    not given keep the dataclass's defaults.

    Args:
        chosen: By parameter, the fields that become options; None: all that are options.

    Raises:
        TypeError: Two options have one name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shown: list[inspect.Parameter] = []
        groups: dict[str, tuple[type, list[str]]] = {}
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            kind = parameter.annotation
            if not dataclasses.is_dataclass(kind):
                shown.append(parameter)
                continue
            assert isinstance(kind, type)
            wanted = chosen.get(parameter.name)
            known, types = options_of(kind), types_of(kind)
            names = [name for name in known if wanted is None or name in wanted]
            groups[parameter.name] = (kind, names)
            shown += [_parameter(name, known[name], types[name]) for name in names]
        if len({each.name for each in shown}) < len(shown):
            raise TypeError(f"{command.__name__}: two options have one name")

        def run(**given: Any) -> None:
            for name, (kind, names) in groups.items():
                said = {each: given.pop(each) for each in names}
                given[name] = kind(**{each: v for each, v in said.items() if v is not None})
            command(**given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(name: str, known: Option, kind: Any) -> inspect.Parameter:
    more: dict[str, Any] = {"metavar": known.metavar}
    if known.range_in_help:
        more["min"], more["max"] = known.bounds
    if known.in_bytes:
        more["parser"] = parse_bytes
    elif kind == tuple[str, ...]:
        kind, more["parser"] = str, _parse_words
    info = described(known.help, known.flag, **more)
    is_flag = kind is bool
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if is_flag else None,
        annotation=Annotated[kind if is_flag else kind | None, info],
    )


def _parse_words(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(","))
