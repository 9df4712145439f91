"""The commands that start processes or order them: `tasuki serve`, `demo`, `scale`, `api-key`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tasuki.command_line import described, with_options
from tasuki.launch.config import ServeConfig
from tasuki.launch.role_options import parse_role_options
from tasuki.launch.router_options import RouterOptions
from tasuki.options import options_of
from tasuki.worker.config import ConfigError, WorkerConfig

Model = Annotated[str, described("Folder, hub id, or smollm2-135m [smollm2-135m].")]
Prefill = Annotated[int | None, described("Prefill workers [CPU 1, GPUs: see --mixed].")]
Decode = Annotated[int | None, described("Decode workers [CPU 1, GPUs: see --mixed].")]
Mixed = Annotated[
    int | None,
    described(
        "Workers that do both [CPU 0; on GPUs without a role given as planned, most often one for"
        " each GPU]."
    ),
]
_BY_ROLE = "Worker option of {} workers alone, such as max-batched-tokens=8192; repeatable."
_SERVED = [name for name, known in options_of(WorkerConfig).items() if known.serve]


@with_options(worker=_SERVED)
def serve(
    *,
    name: Annotated[
        str | None, typer.Argument(help="The same as --model.", metavar="MODEL")
    ] = None,
    model: Annotated[
        str | None, described("Folder, hub id, or smollm2-135m [smollm2-135m].")
    ] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = None,
    on: Annotated[
        str,
        described(
            "Where workers run: local, ray (the cluster of RAY_ADDRESS or of this machine) or"
            " ray://HOST:PORT [local].",
            "--on",
            metavar="PLACE",
        ),
    ] = "local",
    spread: Annotated[
        list[str] | None,
        described(
            "How workers lie on the nodes of a Ray cluster: pack, spread or strict-spread, of all"
            " workers together, or of a role apart, such as decode=spread; repeatable [pack].",
            "--spread",
            metavar="[ROLE=]HOW",
        ),
    ] = None,
    worker_cpus: Annotated[
        int | None,
        described(
            "CPUs that Ray sets aside for each worker, on each of its nodes [one for each rank].",
            min=1,
        ),
    ] = None,
    hosts_prefill: Annotated[
        int, described("Nodes of a Ray cluster that divide a prefill worker [1].")
    ] = 1,
    hosts_decode: Annotated[
        int, described("Nodes of a Ray cluster that divide a decode worker [1].")
    ] = 1,
    hosts_mixed: Annotated[
        int, described("Nodes of a Ray cluster that divide a mixed worker [1].")
    ] = 1,
    tp_prefill: Annotated[int, described("Ranks (GPUs) of a prefill worker [1].")] = 1,
    tp_decode: Annotated[int, described("Ranks (GPUs) of a decode worker [1].")] = 1,
    tp_mixed: Annotated[int, described("Ranks (GPUs) of a mixed worker [1].")] = 1,
    host: Annotated[str, described("Address the router binds [127.0.0.1].")] = "127.0.0.1",
    port: Annotated[
        int | None, described("Port of the router [8000, or a free one if it is taken].")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        described("Name of the model in requests [its folder or id]; repeatable."),
    ] = None,
    worker: WorkerConfig,
    prefill_option: Annotated[
        list[str] | None, described(_BY_ROLE.format("prefill"), metavar="NAME=VALUE")
    ] = None,
    decode_option: Annotated[
        list[str] | None, described(_BY_ROLE.format("decode"), metavar="NAME=VALUE")
    ] = None,
    mixed_option: Annotated[
        list[str] | None, described(_BY_ROLE.format("mixed"), metavar="NAME=VALUE")
    ] = None,
    worker_host: Annotated[str, described("Address the workers bind [127.0.0.1].")] = "127.0.0.1",
    worker_base_port: Annotated[
        int | None,
        described("First worker's port; the others count up; 0: free ones [0]."),
    ] = None,
    router: RouterOptions,
    control_socket: Annotated[
        Path | None,
        described(
            "Unix socket at which `tasuki scale` reaches the launcher [of this process, in"
            " $XDG_RUNTIME_DIR/tasuki].",
            metavar="PATH",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, described("Keep the processes' logs here [kept after a crash only].")
    ] = None,
    quiet: Annotated[bool, described("Don't show the processes' logs.", "--quiet")] = False,
    explain: Annotated[
        bool,
        described(
            "Show the plan by which workers are divided among GPUs where no role is given.",
            "--explain",
        ),
    ] = False,
    startup_timeout_s: Annotated[
        float,
        described(
            "How long the workers may take to start, in seconds [600].",
            "--startup-timeout",
            min=0,
        ),
    ] = 600.0,
    dry_run: Annotated[
        bool,
        described(
            "Check the options, say which workers there would be, and start nothing.", "--dry-run"
        ),
    ] = False,
) -> None:
    """Serve a model until Ctrl-C: workers here or on a Ray cluster, and the router."""
    from tasuki.launch.control import check_socket
    from tasuki.launch.machine import choose_topology, plan_topology
    from tasuki.launch.serve import check_features
    from tasuki.launch.serve import serve as run
    from tasuki.launch.supervisor import say

    if control_socket is not None:
        check_socket(control_socket)  # before the plan, which may fetch the model
    if None not in (name, model) and name != model:
        raise ConfigError(f"the model is {name} and --model {model}: give one of them")
    model = next((given for given in (name, model) if given is not None), "smollm2-135m")
    by_role = {"prefill": prefill_option, "decode": decode_option, "mixed": mixed_option}
    ranks: tuple[tuple[str, int], ...]
    ranks = (("prefill", tp_prefill), ("decode", tp_decode), ("mixed", tp_mixed))
    given = any(n is not None for n in (prefill, decode, mixed, *by_role.values()))
    planned = None
    if not given and on == "local" and {tp_prefill, tp_decode, tp_mixed} == {1}:
        planned = plan_topology(model, worker, router, explain)
    elif explain:
        say("nothing is planned: roles, ranks or options by role are given, or it runs elsewhere")
    if planned is not None and planned.topology is not None:
        workers, ranks = planned.topology, tuple(planned.ranks.items())
        strict = router.strict_roles or planned.strict_roles
        router = replace(router, strict_roles=strict)
    else:
        workers = choose_topology(prefill, decode, mixed, worker.device, dict(ranks), on)
    config = ServeConfig(
        model=model,
        topology=workers.spread_as(spread or ()),
        tensor_parallel=ranks,
        hosts=(("prefill", hosts_prefill), ("decode", hosts_decode), ("mixed", hosts_mixed)),
        on=on,
        worker_cpus=worker_cpus,
        control_socket=control_socket,
        host=host,
        port=port,
        served_names=tuple(served_model_name or ()),
        worker_host=worker_host,
        worker_base_port=worker_base_port,
        worker=worker,
        role_options={
            role: parse_role_options(role, texts) for role, texts in by_role.items() if texts
        },
        router=router,
        log_dir=log_dir,
        echo_logs=not quiet,
        startup_timeout_s=startup_timeout_s,
    )
    if dry_run:
        check_features(config)
        print(f"would start {config.topology}")
        return
    raise typer.Exit(run(config))


@with_options(worker=("device", "dtype"))
def demo(
    *,
    model: Model = "smollm2-135m",
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Annotated[
        int | None,
        described("Workers that do both [CPU 0; GPUs without a role given: one for each GPU]."),
    ] = None,
    worker: WorkerConfig,
    question: Annotated[str, described("What to ask.")] = "",
) -> None:
    """Serve, ask one question, show the answer and where the time went, and stop."""
    from tasuki.launch.demo import QUESTION, ask
    from tasuki.launch.machine import choose_topology
    from tasuki.launch.serve import Deployment
    from tasuki.launch.serve import serve as run

    config = ServeConfig(
        model=model,
        topology=choose_topology(prefill, decode, mixed, worker.device),
        worker=worker,
        router=RouterOptions(strict_roles=True),  # a split is what it shows
        echo_logs=False,
    )

    def job(deployment: Deployment) -> int:
        return ask(deployment, question or QUESTION)

    raise typer.Exit(run(config, job))


def scale(
    role: Annotated[str, typer.Argument(help="prefill, decode or mixed.", metavar="ROLE")],
    count: Annotated[int, typer.Argument(help="Workers of that role, 1 or more.", min=1)],
    control_socket: Annotated[
        Path | None,
        described(
            "Socket of the `tasuki serve` that is meant [the only one of this user].",
            metavar="PATH",
        ),
    ] = None,
) -> None:
    """Start or drain workers of a running `tasuki serve`, until there are COUNT of ROLE."""
    from tasuki.launch.control import send_order

    print(send_order(control_socket, role, count))


def api_key(
    name: Annotated[str, typer.Argument(help="Of the key: its tenant, of at most 64 letters.")],
    max_requests: Annotated[
        int | None, described("Requests of the key at once; 429 beyond [no limit].", min=1)
    ] = None,
) -> None:
    """Make an API key: the key on stderr, its line for --api-keys-file on stdout."""
    from tasuki.launch.api_keys import make_key

    key, line = make_key(name, max_requests)
    print(f"the key, which is shown only now: {key}", file=sys.stderr)
    print(line)
