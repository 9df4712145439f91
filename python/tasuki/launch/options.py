"""The command line's options, each declared once; `cli.py` puts them together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes from `1500000`, `512MB`, `2GiB` or `2G`.

    Raises:
        typer.BadParameter: It is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no amount of memory: use 512MB, 2GiB or bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def _option(help_text: str, *names: str, **more: object) -> object:
    return typer.Option(*names, help=help_text, show_default=False, **more)  # type: ignore[arg-type]


# What a worker is told; `serve` passes the same on to every worker.
KvMemory = Annotated[
    int | None,
    _option(
        "KV pool of one worker, e.g. 2GB [CPU: an eighth of the free memory, less if that is"
        " plenty; GPU: see --gpu-memory-utilization].",
        parser=parse_bytes,
        metavar="BYTES",
    ),
]
Device = Annotated[
    str,
    _option(
        "auto, cpu, cuda or cuda:N, from the N-th GPU on [auto: the GPUs, if there are any].",
        metavar="DEVICE",
    ),
]
KvDtype = Annotated[
    str | None,
    _option("auto, bfloat16 or fp8, of the KV cache [auto: as --dtype].", metavar="DTYPE"),
]
LoadFormat = Annotated[
    str | None,
    _option("auto, or dummy: random weights, for measurements [auto].", metavar="FORMAT"),
]
Quantization = Annotated[
    str | None,
    _option(
        "none, int8 (Llama family on the CPU) or fp8 (Llama family), of the weights of GEMMs;"
        " everything else is bfloat16. Folders with fp8 weights need no option [none].",
        metavar="KIND",
    ),
]
Speculate = Annotated[
    str | None,
    _option(
        "none or prompt-lookup: drafts from a request's own tokens, answers stay the same; CPU"
        " [none].",
        metavar="KIND",
    ),
]
GpuMemoryUtilization = Annotated[
    float | None, _option("Share of a GPU's memory that its worker may use [0.9].")
]
MaxModelLen = Annotated[
    int | None,
    _option("Longest request, prompt and output, in tokens [the lesser of model and pool].", min=1),
]
BlockSize = Annotated[int | None, _option("Tokens in a KV block [CPU 16, GPU 32].")]
MaxBatchedTokens = Annotated[
    int | None, _option("Tokens in one engine step, at most [CPU 1024, GPU 4096].")
]
MaxRunningRequests = Annotated[
    int | None, _option("Requests decoding at once in a worker [CPU 64, GPU 256].")
]
ItlTarget = Annotated[
    float | None,
    _option(
        "Duration of a step that decodes and computes prompts: bounds the gap between two tokens"
        " while others' prompts come, four times as long where many wait, and never less than"
        " 1.8 times a step that only decodes; 0: no bound but --max-batched-tokens"
        " [GPU 9, CPU 100].",
        "--itl-target-ms",
    ),
]
Lease = Annotated[
    float | None,
    _option("How long announced KV is kept for a silent peer, in seconds [10].", "--lease-s"),
]
StepTimeout = Annotated[
    float | None,
    _option(
        "A step that takes longer, and 50 times what was expected, is hung: its worker ends and"
        " is started again, in seconds [30].",
        "--step-timeout-s",
    ),
]
Dispatch = Annotated[
    str | None,
    _option(
        "default, measured or a file that `measured` wrote: which implementation computes which"
        " GEMMs on a GPU [default].",
        metavar="WAY",
    ),
]
PullTimeout = Annotated[
    float | None,
    _option(
        "A KV transfer without progress for so long is given up: the request is placed again,"
        " in seconds [30].",
        "--pull-timeout-s",
    ),
]
KvDigest = Annotated[
    str | None,
    _option(
        "off, sample or all: which KV that is pulled is compared with digests that the prefill"
        " worker made of it; a mismatch counts as lost KV [off].",
        "--kv-digest",
        metavar="WHICH",
    ),
]
WorkerDrain = Annotated[
    float | None,
    _option(
        "After SIGTERM the worker gets no new requests, and what runs may take so many seconds"
        " [30]; 0: it ends at once, and routers place its requests again.",
        "--drain-s",
    ),
]
StateLog = Annotated[
    float | None,
    _option(
        "Seconds between lines of a worker's log that say what it does while it has work [10]; 0:"
        " none.",
        "--state-log-s",
    ),
]
AllReduce = Annotated[
    str | None,
    _option(
        "auto, nccl or symmetric: how the GPUs of a worker add up [auto: symmetric].",
        metavar="WAY",
    ),
]
Transport = Annotated[
    str | None,
    _option(
        "How KV moves: nixl, or host-staged, through host memory [nixl; serve: host-staged where"
        " GPUs cannot read one another].",
        metavar="WAY",
    ),
]
RequireTransport = Annotated[
    str | None,
    _option(
        "rdma or cuda_ipc: refuse a worker whose KV would travel by TCP; with cuda_ipc, by anything"
        " else. rdma allows what stays inside a machine [nothing is refused].",
        "--require-transport",
        metavar="WAY",
    ),
]
RdmaDevices = Annotated[
    str | None,
    _option(
        "nearest, all, or names such as mlx5_0:1,mlx5_1:1: the RDMA devices of a worker [nearest"
        " to the GPU of each rank].",
        "--rdma-devices",
        metavar="NAMES",
    ),
]
Preflight = Annotated[
    str | None,
    _option(
        "off, warn or strict: check the machine before a worker loads anything; with strict a"
        " failure ends it with exit status 78 [warn].",
        metavar="MODE",
    ),
]
Pause = Annotated[
    bool,
    _option("Wait, before anything is loaded, until POST /exit: for tests by hand.", "--pause"),
]
PauseHost = Annotated[
    str,
    _option(
        "Address that answers during --pause; beyond loopback it requires the token in"
        " TASUKI_PAUSE_TOKEN [127.0.0.1].",
        "--pause-host",
    ),
]
PausePort = Annotated[
    int, _option("Its port [0: any free one, which the log names].", "--pause-port")
]
TerminationLog = Annotated[
    Path | None,
    _option(
        "File that gets what preflight found, if that ends the start [/dev/termination-log, where"
        " it exists].",
        "--termination-log",
        metavar="PATH",
    ),
]
TrustRemoteCode = Annotated[
    bool, _option("Run code that comes with the model folder.", "--trust-remote-code")
]
Dtype = Annotated[
    str, _option("auto, float32 or bfloat16 [auto: the faster one here].", metavar="DTYPE")
]
Tp = Annotated[int, _option("Ranks that divide the model, each with a GPU of its own [1].")]
Nodes = Annotated[
    str | None,
    _option(
        "Hosts that divide the model, with commas between them: HOST:PORT of the first, where the"
        " others come to, then their addresses. Each runs this command with its own --rank and the"
        " same secret in TASUKI_NODES_KEY [all ranks are here].",
        metavar="HOST:PORT,HOST,...",
    ),
]
NodeRank = Annotated[int, _option("Number of this host among --nodes, from 0 [0].", "--rank")]
WorkerPort = Annotated[int, _option("Port to bind [0: any free one].")]
WorkerHost = Annotated[str, _option("Address the worker binds [127.0.0.1].")]
Advertise = Annotated[
    str | None,
    _option(
        "Host where routers and other workers reach the worker; KV moves over its network"
        " [--host].",
        metavar="HOST",
    ),
]
WorkerName = Annotated[str, _option("Name in logs.")]
ServedName = Annotated[str, _option("Name of the model, told to routers [the folder's name].")]
Role = Annotated[
    str, _option("prefill, decode or mixed: a preference of the router.", metavar="ROLE")
]
ModelFolder = Annotated[str, _option("Folder, hub id, or smollm2-135m.")]

# What `serve` decides from.
ServeModel = Annotated[str, _option("Folder, hub id, or smollm2-135m [smollm2-135m].")]
ServedModelName = Annotated[
    list[str] | None, _option("Name of the model in requests [its folder or id]; repeatable.")
]
Prefill = Annotated[int | None, _option("Prefill workers [CPU 1, GPUs: see --mixed].")]
Decode = Annotated[int | None, _option("Decode workers [CPU 1, GPUs: see --mixed].")]
Mixed = Annotated[
    int | None,
    _option("Workers that do both [CPU 0; on GPUs without a role given one for each GPU]."),
]
On = Annotated[
    str,
    _option(
        "Where workers run: local, ray (the cluster of RAY_ADDRESS or of this machine) or"
        " ray://HOST:PORT [local].",
        "--on",
        metavar="PLACE",
    ),
]
Spread = Annotated[
    list[str] | None,
    _option(
        "How workers lie on the nodes of a Ray cluster: pack, spread or strict-spread, of all"
        " workers together, or of a role apart, such as decode=spread; repeatable [pack].",
        "--spread",
        metavar="[ROLE=]HOW",
    ),
]
WorkerCpus = Annotated[
    int | None,
    _option(
        "CPUs that Ray sets aside for each worker [one for each rank].",
        "--worker-cpus",
        min=1,
    ),
]
ControlSocket = Annotated[
    Path | None,
    _option(
        "Unix socket at which `tasuki scale` reaches the launcher [of this process, in"
        " $XDG_RUNTIME_DIR/tasuki].",
        "--control-socket",
        metavar="PATH",
    ),
]
ScaleSocket = Annotated[
    Path | None,
    _option(
        "Socket of the `tasuki serve` that is meant [the only one of this user].",
        "--control-socket",
        metavar="PATH",
    ),
]
ScaleRole = Annotated[str, typer.Argument(help="prefill, decode or mixed.", metavar="ROLE")]
ScaleCount = Annotated[int, typer.Argument(help="Workers of that role, 1 or more.", min=1)]
TpPrefill = Annotated[int, _option("Ranks (GPUs) of a prefill worker [1].")]
TpDecode = Annotated[int, _option("Ranks (GPUs) of a decode worker [1].")]
TpMixed = Annotated[int, _option("Ranks (GPUs) of a mixed worker [1].")]
Host = Annotated[str, _option("Address the router binds [127.0.0.1].")]
Port = Annotated[int | None, _option("Port of the router [8000, or a free one if it is taken].")]
WorkersHost = Annotated[str, _option("Address the workers bind [127.0.0.1].", "--worker-host")]
WorkersPort = Annotated[
    int | None,
    _option("First worker's port; the others count up [free ones].", "--worker-base-port"),
]
OnKvLoss = Annotated[
    str | None, _option("recompute or fail, when a prefill worker dies with KV [recompute].")
]
Policy = Annotated[
    str | None,
    _option(
        "How workers are chosen: cost, round-robin, least-loaded, power-of-two, consistent-hash"
        " or prefix-hash [cost].",
        "--policy",
    ),
]
StrictRoles = Annotated[
    bool, _option("Never let a worker do another role's work.", "--strict-roles")
]
Roles = Annotated[
    str | None,
    _option("fixed, or follow: workers' roles follow the load [fixed].", "--roles"),
]
RolePreference = Annotated[
    float | None,
    _option(
        "How much a role counts: what a request costs more on a worker of another role, as a"
        " share of its time on that worker if it is idle [0.05]; 0: roles do not matter.",
        "--role-preference",
        min=0.0,
        max=1e6,
    ),
]
TtftTarget = Annotated[
    float | None,
    _option(
        "A request whose first token is expected later is refused, with 503 or 429 [no objective].",
        "--ttft-target-ms",
        min=0.001,
    ),
]
TpotTarget = Annotated[
    float | None,
    _option(
        "Mean time per token after the first: a request that would make it longer waits, and"
        " --itl-target-ms is 0.8 of it [no objective].",
        "--tpot-target-ms",
        min=0.001,
    ),
]
NoAdmission = Annotated[
    bool,
    _option(
        "Place requests at once, whatever the load; --itl-target-ms stays 0.8 of --tpot-target-ms.",
        "--no-admission",
    ),
]
ApiKeysFile = Annotated[
    Path | None,
    _option(
        "File of API keys, of which clients must have one: lines as `tasuki api-key NAME` prints"
        " them; read again when it changes.",
        "--api-keys-file",
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    _option(
        "Environment variable that has an API key, in plain text.", "--api-key-env", metavar="NAME"
    ),
]
AdminPort = Annotated[
    int | None,
    _option(
        "Port of the admin API and of the dashboard, on 127.0.0.1 only [not served].",
        "--admin-port",
        metavar="PORT",
        min=1,
        max=65_535,
    ),
]
TlsCert = Annotated[
    Path | None,
    _option(
        "Certificate chain in PEM: clients are served over https alone.",
        "--tls-cert",
        metavar="PATH",
    ),
]
TlsKey = Annotated[
    Path | None, _option("Private key in PEM, of --tls-cert.", "--tls-key", metavar="PATH")
]
FleetCert = Annotated[
    Path | None,
    _option(
        "Certificate chain in PEM, with the DNS name tasuki. With it, --fleet-key and --fleet-ca,"
        " routers and workers speak by mTLS alone.",
        "--fleet-cert",
        metavar="PATH",
    ),
]
FleetKey = Annotated[
    Path | None, _option("Private key in PEM, of --fleet-cert.", "--fleet-key", metavar="PATH")
]
FleetCa = Annotated[
    Path | None,
    _option(
        "Certificates in PEM of the CA that the others' certificates must come from.",
        "--fleet-ca",
        metavar="PATH",
    ),
]
MetricsListen = Annotated[
    str | None,
    _option(
        "Address of a listener of the router that serves /metrics alone; required for /metrics"
        " where --host is not a loopback address.",
        "--metrics-listen",
        metavar="HOST:PORT",
    ),
]
RequestLog = Annotated[
    Path | None,
    _option(
        "File of the router that gets a line for each request, without text; `tasuki simulate`"
        " replays it.",
        "--request-log",
        metavar="PATH",
    ),
]
RequestLogMb = Annotated[
    int | None, _option("Largest file of --request-log [64].", "--request-log-mb", min=1)
]
RequestLogFiles = Annotated[
    int | None, _option("Files of --request-log that are kept [8].", "--request-log-files", min=1)
]
KeyName = Annotated[str, typer.Argument(help="Of the key: its tenant, of at most 64 letters.")]
KeyRequests = Annotated[
    int | None, _option("Requests of the key at once; 429 beyond [no limit].", min=1)
]
TenantHeader = Annotated[
    str | None,
    _option(
        "Header that names a request's tenant; tenants that wait get equal shares [the field"
        " user names it].",
        "--tenant-header",
        metavar="NAME",
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    _option(
        "OpenTelemetry collector (OTLP over HTTP) that gets traces of requests.",
        "--otlp-endpoint",
        metavar="http://HOST:PORT",
    ),
]
TraceSampleRatio = Annotated[
    float | None,
    _option("Share of requests that are traced [1].", "--trace-sample-ratio", min=0.0, max=1.0),
]
ToolParser = Annotated[
    str | None,
    _option(
        "How the model writes tool calls: auto, none, hermes, mistral, llama3 or deepseek-v3 [auto:"
        " as its chat template].",
        "--tool-parser",
        metavar="FORMAT",
    ),
]
ReasoningParser = Annotated[
    str | None,
    _option(
        "How the model marks reasoning: auto, none or think [auto: as its chat template].",
        "--reasoning-parser",
        metavar="FORMAT",
    ),
]
_BY_ROLE = "Worker option of {} workers alone, such as max-batched-tokens=8192; repeatable."
PrefillOption = Annotated[
    list[str] | None, _option(_BY_ROLE.format("prefill"), metavar="NAME=VALUE")
]
DecodeOption = Annotated[list[str] | None, _option(_BY_ROLE.format("decode"), metavar="NAME=VALUE")]
MixedOption = Annotated[list[str] | None, _option(_BY_ROLE.format("mixed"), metavar="NAME=VALUE")]
MaxConcurrent = Annotated[
    int | None,
    _option(
        "Sequences (prompts times n) in the router at once; 503 beyond [1024].",
        "--max-concurrent-requests",
        min=1,
    ),
]
MaxConnections = Annotated[
    int | None,
    _option("Connections to the router at once; 503 beyond [4096].", "--max-connections", min=1),
]
IdleTimeout = Annotated[
    float | None,
    _option(
        "A connection without a complete request header for so long is closed, in seconds [30].",
        "--idle-timeout-s",
        min=0.001,
        max=86_400,
    ),
]
BodyTimeout = Annotated[
    float | None,
    _option(
        "How long a request's body may take to arrive, in seconds [30].",
        "--body-timeout-s",
        min=0.001,
        max=86_400,
    ),
]
RequestTimeout = Annotated[
    float | None,
    _option(
        "How long a request may take from its body to the end of its answer, in seconds [1800].",
        "--request-timeout-s",
        min=0.001,
        max=86_400,
    ),
]
ClientStall = Annotated[
    float | None,
    _option(
        "A client that reads nothing of its answer for so long is cut off, in seconds [30].",
        "--client-stall-s",
        min=0.001,
        max=86_400,
    ),
]
Drain = Annotated[
    float,
    _option(
        "How long Ctrl-C waits for running requests, in seconds [30].",
        "--drain-s",
        min=0,
        max=86_400,
    ),
]
LogDir = Annotated[Path | None, _option("Keep the processes' logs here [kept after a crash only].")]
Quiet = Annotated[bool, _option("Don't show the processes' logs.", "--quiet")]
StartupTimeout = Annotated[
    float,
    _option(
        "How long the workers may take to start, in seconds [600].", "--startup-timeout", min=0
    ),
]
Question = Annotated[str, _option("What to ask.")]
