"""The command `tasuki`: its commands, each from the part that does the work."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from tasuki.bench.command import bench_app
from tasuki.command_line import (
    end_at,
    native_words,
    open_standard_handles,
    print_all_letters,
)
from tasuki.doctor.command import doctor
from tasuki.errors import ERROR_PREFIX, TasukiError
from tasuki.launch.command import api_key, demo, scale, serve
from tasuki.launch.parent_death import follow_parent
from tasuki.linkbench.command import linkbench
from tasuki.plot.command import plot
from tasuki.preflight.command import preflight
from tasuki.worker.command import worker

app = typer.Typer(
    name="tasuki",
    help="Prefill/decode-disaggregated LLM serving in one install.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
model_app = typer.Typer(help="Fetch and list models.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")
app.command("plot")(plot)
app.command("linkbench")(linkbench)
app.command("preflight")(preflight)
app.command("doctor")(doctor)


_FULL = (errno.ENOSPC, errno.EDQUOT)

ModelName = Annotated[
    str, typer.Argument(help="smollm2-135m, a folder, or a hub id owner/model[@revision].")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("tasuki"))
        raise typer.Exit()


@app.callback()
def tasuki(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Prefill/decode-disaggregated LLM serving in one install."""


app.command("serve")(serve)
app.command("demo")(demo)
app.command("worker")(worker)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def router(context: typer.Context) -> None:
    """Run the router in front of workers (`tasuki router --help` lists its options)."""
    from tasuki import _native

    words = native_words(_with_model_folders(context.args))
    for number in (signal.SIGINT, signal.SIGTERM):  # the router's handlers would call Python's
        signal.signal(number, signal.SIG_DFL)
    raise typer.Exit(_native.run_router(words))


app.command("scale")(scale)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def simulate(context: typer.Context) -> None:
    """Run a workload before a deployment in simulated time, and report as `bench serve` does."""
    from tasuki import _native

    raise typer.Exit(_until_interrupt(_native.run_simulate, _with_model_config(context.args)))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def plan(context: typer.Context) -> None:
    """Say which topology serves a workload best within objectives, by simulation."""
    from tasuki import _native

    picture, result = _value(context.args, "--plot"), _value(context.args, "--output", "-o")
    if picture:
        from tasuki.plot.command import check_out

        check_out(Path(picture))
    before = _changed_ns(result)
    code = _until_interrupt(_native.run_plan, _with_model_config(context.args))
    # A plan in which no design meets the objectives is written, too.
    if picture and result and _changed_ns(result) != before:
        from tasuki.plot.command import draw
        from tasuki.plot.options import Options

        for path in draw("plan", [result], Options(), Path(picture)):
            print(f"plot: {path}")
    raise typer.Exit(code)


def _changed_ns(path: str | None) -> int:
    """When a file was written last; 0: there is none."""
    try:
        return os.stat(path or "").st_mtime_ns
    except OSError:
        return 0


def _until_interrupt(run: Callable[[list[str]], int], words: list[str]) -> int:
    """Run a native command that Ctrl-C ends; Python's own handler would wait until it returns."""
    before = signal.getsignal(signal.SIGINT)
    end_at(signal.SIGINT)
    try:
        return run(native_words(words))
    finally:
        signal.signal(signal.SIGINT, before)


def _with_model_folders(words: list[str]) -> list[str]:
    """The router's arguments, with folders in place of the names of models.

    Raises:
        FetchError: There is no such model.
    """
    found: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--model":
            word = _model_folder(word)
        elif word.startswith("--model="):
            word = f"--model={_model_folder(word.removeprefix('--model='))}"
        found.append(word)
    return found


def _model_folder(given: str) -> str:
    """A value of the router's --model, PATH or NAME=PATH, with a folder as its path.

    A folder of the hub's cache is named by its commit, so a hub id becomes the model's name.
    """
    name, _, path = given.partition("=") if "=" in given else ("", "", given)
    if given.startswith(("/", ".")) or path.startswith(("/", ".")) or os.path.isdir(path):
        return given
    from tasuki.models.fetch import resolve_model

    name = name or (path.partition("@")[0] if "/" in path else "")
    return f"{name}={resolve_model(path)}" if name else str(resolve_model(path))


def _with_model_config(words: list[str]) -> list[str]:
    """The arguments, and where the config.json is of a model that has a name.

    Raises:
        FetchError: There is no such model.
    """
    name = _value(words, "--model")
    if name is None or os.path.isdir(os.path.expanduser(name)):
        return list(words)
    from tasuki.models.fetch import config_folder

    return [*words, "--model-config", str(config_folder(name))]


def _value(words: list[str], *names: str) -> str | None:
    """What a command line of Rust's gives an option that Python needs, too."""
    for word, following in zip_longest(words, words[1:]):
        for name in names:
            if word == name:
                return following
            if word.startswith(f"{name}="):
                return word.removeprefix(f"{name}=")
            if len(name) == 2 and word.startswith(name):  # -oFILE
                return word.removeprefix(name)
    return None


app.command("api-key")(api_key)


@model_app.command("fetch")
def model_fetch(name: ModelName = "smollm2-135m") -> None:
    """Get a model unless it is there already, and print its folder."""
    from tasuki.models.fetch import resolve_model

    print(resolve_model(name))


@model_app.command("path")
def model_path(name: ModelName = "smollm2-135m") -> None:
    """Print a model's folder; fails if it is not on this machine."""
    from tasuki.models.fetch import model_path as find
    from tasuki.models.fetch import refuse_absent

    found = find(name)
    if found is None:
        refuse_absent(name)
    print(found)


@model_app.command("list")
def model_list() -> None:
    """List the models that need no hub."""
    from tasuki.models.fetch import list_models

    for name, folder in list_models():
        print(f"{name}\t{folder if folder else f'not fetched: tasuki model fetch {name}'}")


def main() -> None:
    """Run the command line; a `TasukiError` becomes one line on stderr."""
    open_standard_handles()
    print_all_letters()
    follow_parent()
    if os.getpid() == 1:
        end_at(signal.SIGTERM)  # commands that end in order replace it
    try:
        try:
            app()
        except TasukiError as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
            sys.exit(error.exit_code)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_FULL):
            raise
        if error.errno in _FULL:
            print(f"{ERROR_PREFIX}cannot write ({error.strerror}): make room", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python writes at its end
        sys.exit(1)
