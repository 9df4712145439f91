"""The command `tasuki`: parses arguments, calls the part that does the work."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tasuki.errors import TasukiError

app = typer.Typer(
    name="tasuki",
    help="Prefill/decode-disaggregated LLM serving in one install.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Fetch and list models.", no_args_is_help=True)
app.add_typer(model_app, name="model")

ModelName = Annotated[
    str, typer.Argument(help="smollm2-135m, a folder, or a hub id owner/model[@revision].")
]


@model_app.command("fetch")
def model_fetch(name: ModelName = "smollm2-135m") -> None:
    """Get a model unless it is there already, and print its folder."""
    from tasuki.models.fetch import resolve_model

    print(resolve_model(name))


@model_app.command("path")
def model_path(name: ModelName = "smollm2-135m") -> None:
    """Print a model's folder; fails if it is not on this machine."""
    from tasuki.models.fetch import FetchError
    from tasuki.models.fetch import model_path as find

    found = find(name)
    if found is None:
        raise FetchError(f"{name} is not on this machine: run `tasuki model fetch {name}`")
    print(found)


@model_app.command("list")
def model_list() -> None:
    """List the models that need no hub."""
    from tasuki.models.fetch import list_models

    for name, folder in list_models():
        print(f"{name}\t{folder if folder else f'not fetched: tasuki model fetch {name}'}")


def main() -> None:
    """Run the command line; a `TasukiError` becomes one line on stderr."""
    try:
        app()
    except TasukiError as error:
        print(f"tasuki: error: {error}", file=sys.stderr)
        sys.exit(1)
