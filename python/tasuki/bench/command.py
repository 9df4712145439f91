"""The command group `tasuki bench`. Commands written in Rust get their arguments as they are."""

from __future__ import annotations

import os
import signal

import typer

from tasuki.bench.batch_command import batch
from tasuki.bench.sweep_command import sweep
from tasuki.command_line import native_words

bench_app = typer.Typer(help="Measure a deployment.", no_args_is_help=True, rich_markup_mode=None)

bench_app.command()(sweep)
bench_app.command()(batch)

_AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True}


@bench_app.command(context_settings=_AS_THEY_ARE, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Send load to an OpenAI-compatible server and report what its users would have seen."""
    raise typer.Exit(_run_native("serve", _with_tokenizer_folder(context.args)))


@bench_app.command("fake-server", context_settings=_AS_THEY_ARE, add_help_option=False)
def fake_server(context: typer.Context) -> None:
    """Answer like a model server, with delays that you set: to try things, and to test clients."""
    raise typer.Exit(_run_native("fake-server", context.args))


def _with_tokenizer_folder(args: list[str]) -> list[str]:
    """The arguments, with a folder where --tokenizer has a model's name or hub id.

    Raises:
        FetchError: There is no such model.
    """
    given = list(args)
    for index, word in enumerate(given):
        option, separator, name = word.partition("=")
        if option != "--tokenizer":
            continue
        if separator:
            given[index] = f"{option}={_folder(name)}"
        elif index + 1 < len(given):
            given[index + 1] = _folder(given[index + 1])
    return given


def _folder(name: str) -> str:
    from tasuki.models.fetch import resolve_model

    # A folder with a tokenizer and no config.json is no model, but will do.
    return name if os.path.isdir(os.path.expanduser(name)) else str(resolve_model(name))


def _run_native(command: str, args: list[str]) -> int:
    """Run a command of crates/bench; gives its exit code."""
    from tasuki import _native

    # Signals belong to the command, which still reports what was measured. Its handlers would call
    # Python's.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    return _native.run_bench(native_words([command, *args]))
