"""The command `tasuki`: parses arguments, calls the part that does the work."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from tasuki.bench.command import bench_app
from tasuki.doctor.command import doctor
from tasuki.errors import ERROR_PREFIX, TasukiError
from tasuki.launch import options as opt
from tasuki.launch.parent_death import follow_parent
from tasuki.linkbench.command import linkbench
from tasuki.plot.command import plot
from tasuki.preflight.command import preflight as preflight_command

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
app.command("preflight")(preflight_command)
app.command("doctor")(doctor)

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


@app.command()
def serve(
    *,
    model: opt.ServeModel = "smollm2-135m",
    prefill: opt.Prefill = None,
    decode: opt.Decode = None,
    mixed: opt.Mixed = None,
    on: opt.On = "local",
    spread: opt.Spread = None,
    worker_cpus: opt.WorkerCpus = None,
    tp_prefill: opt.TpPrefill = 1,
    tp_decode: opt.TpDecode = 1,
    tp_mixed: opt.TpMixed = 1,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = None,
    served_model_name: opt.ServedModelName = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    kv_dtype: opt.KvDtype = None,
    load_format: opt.LoadFormat = None,
    quantization: opt.Quantization = None,
    speculate: opt.Speculate = None,
    kv_memory: opt.KvMemory = None,
    gpu_memory_utilization: opt.GpuMemoryUtilization = None,
    max_model_len: opt.MaxModelLen = None,
    block_size: opt.BlockSize = None,
    max_batched_tokens: opt.MaxBatchedTokens = None,
    max_running_requests: opt.MaxRunningRequests = None,
    itl_target_ms: opt.ItlTarget = None,
    lease_s: opt.Lease = None,
    step_timeout_s: opt.StepTimeout = None,
    pull_timeout_s: opt.PullTimeout = None,
    kv_digest: opt.KvDigest = None,
    state_log_s: opt.StateLog = None,
    all_reduce: opt.AllReduce = None,
    dispatch: opt.Dispatch = None,
    transport: opt.Transport = None,
    require_transport: opt.RequireTransport = None,
    rdma_devices: opt.RdmaDevices = None,
    preflight: opt.Preflight = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    worker_host: opt.WorkersHost = "127.0.0.1",
    worker_base_port: opt.WorkersPort = None,
    on_kv_loss: opt.OnKvLoss = None,
    policy: opt.Policy = None,
    strict_roles: opt.StrictRoles = False,
    roles: opt.Roles = None,
    role_preference: opt.RolePreference = None,
    ttft_target_ms: opt.TtftTarget = None,
    tpot_target_ms: opt.TpotTarget = None,
    no_admission: opt.NoAdmission = False,
    tenant_header: opt.TenantHeader = None,
    api_keys_file: opt.ApiKeysFile = None,
    api_key_env: opt.ApiKeyEnv = None,
    admin_port: opt.AdminPort = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    fleet_cert: opt.FleetCert = None,
    fleet_key: opt.FleetKey = None,
    fleet_ca: opt.FleetCa = None,
    metrics_listen: opt.MetricsListen = None,
    request_log: opt.RequestLog = None,
    request_log_mb: opt.RequestLogMb = None,
    request_log_files: opt.RequestLogFiles = None,
    otlp_endpoint: opt.OtlpEndpoint = None,
    trace_sample_ratio: opt.TraceSampleRatio = None,
    tool_parser: opt.ToolParser = None,
    reasoning_parser: opt.ReasoningParser = None,
    prefill_option: opt.PrefillOption = None,
    decode_option: opt.DecodeOption = None,
    mixed_option: opt.MixedOption = None,
    max_concurrent_requests: opt.MaxConcurrent = None,
    max_connections: opt.MaxConnections = None,
    idle_timeout_s: opt.IdleTimeout = None,
    body_timeout_s: opt.BodyTimeout = None,
    request_timeout_s: opt.RequestTimeout = None,
    client_stall_s: opt.ClientStall = None,
    drain_s: opt.Drain = 30.0,
    control_socket: opt.ControlSocket = None,
    log_dir: opt.LogDir = None,
    quiet: opt.Quiet = False,
    startup_timeout_s: opt.StartupTimeout = 600.0,
) -> None:
    """Serve a model until Ctrl-C: workers here or on a Ray cluster, and the router."""
    from tasuki.launch.config import RouterOptions, ServeConfig, WorkerOptions
    from tasuki.launch.machine import choose_topology
    from tasuki.launch.role_options import parse_role_options
    from tasuki.launch.serve import serve as run

    by_role = {"prefill": prefill_option, "decode": decode_option, "mixed": mixed_option}
    ranks = (("prefill", tp_prefill), ("decode", tp_decode), ("mixed", tp_mixed))
    workers = choose_topology(prefill, decode, mixed, device, dict(ranks), on)
    config = ServeConfig(
        model=model,
        topology=workers.spread_as(spread or ()),
        tensor_parallel=ranks,
        on=on,
        worker_cpus=worker_cpus,
        control_socket=control_socket,
        host=host,
        port=port,
        served_names=tuple(served_model_name or ()),
        device=device,
        dtype=dtype,
        worker_host=worker_host,
        worker_base_port=worker_base_port,
        role_options={
            role: parse_role_options(role, texts) for role, texts in by_role.items() if texts
        },
        worker=WorkerOptions(
            kv_dtype=kv_dtype,
            load_format=load_format,
            quantization=quantization,
            speculate=speculate,
            kv_memory=kv_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            block_size=block_size,
            max_batched_tokens=max_batched_tokens,
            max_running_requests=max_running_requests,
            itl_target_ms=itl_target_ms,
            lease_s=lease_s,
            step_timeout_s=step_timeout_s,
            pull_timeout_s=pull_timeout_s,
            kv_digest=kv_digest,
            state_log_s=state_log_s,
            all_reduce=all_reduce,
            dispatch=dispatch,
            transport=transport,
            require_transport=require_transport,
            rdma_devices=rdma_devices,
            preflight=preflight,
            trust_remote_code=trust_remote_code,
            fleet_cert=fleet_cert,
            fleet_key=fleet_key,
            fleet_ca=fleet_ca,
        ),
        router=RouterOptions(
            on_kv_loss=on_kv_loss,
            policy=policy,
            strict_roles=strict_roles,
            roles=roles,
            role_preference=role_preference,
            ttft_target_ms=ttft_target_ms,
            tpot_target_ms=tpot_target_ms,
            no_admission=no_admission,
            tenant_header=tenant_header,
            api_keys_file=api_keys_file,
            api_key_env=api_key_env,
            admin_port=admin_port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            metrics_listen=metrics_listen,
            request_log=request_log,
            request_log_mb=request_log_mb,
            request_log_files=request_log_files,
            otlp_endpoint=otlp_endpoint,
            trace_sample_ratio=trace_sample_ratio,
            fleet_cert=fleet_cert,
            fleet_key=fleet_key,
            fleet_ca=fleet_ca,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            max_concurrent_requests=max_concurrent_requests,
            max_connections=max_connections,
            idle_timeout_s=idle_timeout_s,
            body_timeout_s=body_timeout_s,
            request_timeout_s=request_timeout_s,
            client_stall_s=client_stall_s,
            drain_s=drain_s,
        ),
        log_dir=log_dir,
        echo_logs=not quiet,
        startup_timeout_s=startup_timeout_s,
    )
    raise typer.Exit(run(config))


@app.command()
def demo(
    *,
    model: opt.ServeModel = "smollm2-135m",
    prefill: opt.Prefill = None,
    decode: opt.Decode = None,
    mixed: opt.Mixed = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    question: opt.Question = "",
) -> None:
    """Serve, ask one question, show the answer and where the time went, and stop."""
    from tasuki.launch.config import RouterOptions, ServeConfig
    from tasuki.launch.demo import QUESTION, ask
    from tasuki.launch.machine import choose_topology
    from tasuki.launch.serve import Deployment
    from tasuki.launch.serve import serve as run

    config = ServeConfig(
        model=model,
        topology=choose_topology(prefill, decode, mixed, device),
        device=device,
        dtype=dtype,
        router=RouterOptions(strict_roles=True),  # a split is what it shows
        echo_logs=False,
    )

    def job(deployment: Deployment) -> int:
        return ask(deployment, question or QUESTION)

    raise typer.Exit(run(config, job))


@app.command()
def worker(
    *,
    model: opt.ModelFolder,
    role: opt.Role = "mixed",
    name: opt.WorkerName = "worker",
    served_name: opt.ServedName = "",
    host: opt.WorkerHost = "127.0.0.1",
    advertise: opt.Advertise = None,
    port: opt.WorkerPort = 0,
    tp: opt.Tp = 1,
    nodes: opt.Nodes = None,
    rank: opt.NodeRank = 0,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    kv_dtype: opt.KvDtype = None,
    load_format: opt.LoadFormat = None,
    quantization: opt.Quantization = None,
    speculate: opt.Speculate = None,
    kv_memory: opt.KvMemory = None,
    gpu_memory_utilization: opt.GpuMemoryUtilization = None,
    max_model_len: opt.MaxModelLen = None,
    block_size: opt.BlockSize = None,
    max_batched_tokens: opt.MaxBatchedTokens = None,
    max_running_requests: opt.MaxRunningRequests = None,
    itl_target_ms: opt.ItlTarget = None,
    lease_s: opt.Lease = None,
    step_timeout_s: opt.StepTimeout = None,
    pull_timeout_s: opt.PullTimeout = None,
    kv_digest: opt.KvDigest = None,
    drain_s: opt.WorkerDrain = None,
    state_log_s: opt.StateLog = None,
    all_reduce: opt.AllReduce = None,
    dispatch: opt.Dispatch = None,
    transport: opt.Transport = None,
    require_transport: opt.RequireTransport = None,
    rdma_devices: opt.RdmaDevices = None,
    preflight: opt.Preflight = None,
    pause: opt.Pause = False,
    pause_host: opt.PauseHost = "127.0.0.1",
    pause_port: opt.PausePort = 0,
    termination_log: opt.TerminationLog = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    fleet_cert: opt.FleetCert = None,
    fleet_key: opt.FleetKey = None,
    fleet_ca: opt.FleetCa = None,
) -> None:
    """Run one worker: tokens in, tokens out, for routers that connect to it."""
    from tasuki.models.fetch import resolve_model
    from tasuki.worker.config import WorkerConfig

    said = {
        "kv_dtype": kv_dtype,
        "load_format": load_format,
        "quantization": quantization,
        "speculate": speculate,
        "kv_memory": kv_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "max_batched_tokens": max_batched_tokens,
        "max_running_requests": max_running_requests,
        "itl_target_ms": itl_target_ms,
        "lease_s": lease_s,
        "step_timeout_s": step_timeout_s,
        "pull_timeout_s": pull_timeout_s,
        "kv_digest": kv_digest,
        "drain_s": drain_s,
        "state_log_s": state_log_s,
        "all_reduce": all_reduce,
        "dispatch": dispatch,
        "transport": transport,
        "require_transport": require_transport,
        "rdma_devices": rdma_devices,
        "preflight": preflight,
    }
    hosts = tuple(each.strip() for each in nodes.split(",")) if nodes else ()
    if rank < len(hosts) and host == "127.0.0.1":
        host = hosts[rank].rpartition(":")[0] if rank == 0 else hosts[rank]
    config = WorkerConfig(
        model=resolve_model(model),
        role=role,
        name=name,
        served_name=served_name,
        host=host,
        advertise=advertise,
        port=port,
        tensor_parallel=tp,
        nodes=hosts,
        rank=rank,
        device=device,
        dtype=dtype,
        pause=pause,
        pause_host=pause_host,
        pause_port=pause_port,
        termination_log=termination_log,
        trust_remote_code=trust_remote_code,
        fleet_cert=fleet_cert,
        fleet_key=fleet_key,
        fleet_ca=fleet_ca,
        **{key: value for key, value in said.items() if value is not None},  # type: ignore[arg-type]
    )
    from tasuki.worker.main import configure_logging, run  # torch: only once the settings are right

    configure_logging(config)
    raise typer.Exit(run(config))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def router(context: typer.Context) -> None:
    """Run the router in front of workers (`tasuki router --help` lists its options)."""
    from tasuki import _native

    raise typer.Exit(_native.run_router(list(context.args)))


@app.command()
def scale(
    role: opt.ScaleRole, count: opt.ScaleCount, control_socket: opt.ScaleSocket = None
) -> None:
    """Start or drain workers of a running `tasuki serve`, until there are COUNT of ROLE."""
    from tasuki.launch.control import send_order

    print(send_order(control_socket, role, count))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def simulate(context: typer.Context) -> None:
    """Run a workload before a deployment in simulated time, and report as `bench serve` does."""
    from tasuki import _native

    raise typer.Exit(_native.run_simulate(list(context.args)))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def plan(context: typer.Context) -> None:
    """Say which topology serves a workload best within objectives, by simulation."""
    from tasuki import _native

    code = _native.run_plan(list(context.args))
    picture, result = _value(context.args, "--plot"), _value(context.args, "--output", "-o")
    if code == 0 and picture and result:
        from tasuki.plot.command import draw
        from tasuki.plot.options import Options

        draw("plan", [result], Options(), Path(picture))
    raise typer.Exit(code)


def _value(words: list[str], *names: str) -> str | None:
    """What a command line of Rust's gives an option that Python needs, too."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        for name in names:
            if word == name:
                return following
            if word.startswith(f"{name}="):
                return word.removeprefix(f"{name}=")
    return None


@app.command("api-key")
def api_key(name: opt.KeyName, max_requests: opt.KeyRequests = None) -> None:
    """Make an API key: the key on stderr, its line for --api-keys-file on stdout."""
    from tasuki.launch.api_keys import make_key

    key, line = make_key(name, max_requests)
    print(f"the key, which is shown only now: {key}", file=sys.stderr)
    print(line)


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
    follow_parent()
    try:
        app()
    except TasukiError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
