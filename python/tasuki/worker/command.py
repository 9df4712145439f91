"""The command `tasuki worker`."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Annotated

import typer

from tasuki.command_line import described, end_at, with_options
from tasuki.worker.config import WorkerConfig


@with_options()
def worker(
    *,
    model: Annotated[str, described("Folder, hub id, or smollm2-135m.", "--model")],
    config: WorkerConfig,
) -> None:
    """Run one worker: tokens in, tokens out, for routers that connect to it."""
    # Until the worker serves: `Shutdown` and `run_host` replace it. A KeyboardInterrupt could be
    # lost in callbacks that torch's import makes.
    end_at(signal.SIGINT)
    from tasuki.models.fetch import resolve_model

    host = config.host
    if config.nodes and host == "127.0.0.1":
        own = config.nodes[config.rank]
        host = own.rpartition(":")[0] if config.rank == 0 else own
    config = replace(config, model=resolve_model(model), host=host)
    from tasuki.worker.main import configure_logging, run  # torch: only once the settings are right

    configure_logging(config)
    raise typer.Exit(run(config))
