"""What `tasuki serve` passes on to the router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.launch.errors import LaunchError
from tasuki.options import arguments, first_refused, option, options_of

_LONGEST_S = 86_400


def _number(help_text: str, low: float, high: float | None = None, **more: Any) -> Any:
    return option(None, help_text, bounds=(low, high), range_in_help=True, **more)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options of the router; names and meanings as in `tasuki router --help`.

    None: the option is not passed on, so the router's own default stands. To add an option that
    the router has, add a field here.
    """

    on_kv_loss: str | None = option(
        None,
        "recompute or fail, when a prefill worker dies with KV [recompute].",
        choices=("recompute", "fail"),
    )
    policy: str | None = option(
        None,
        "How workers are chosen: cost, round-robin, least-loaded, power-of-two, consistent-hash"
        " or prefix-hash [cost].",
        choices=(
            "cost",
            "round-robin",
            "least-loaded",
            "power-of-two",
            "consistent-hash",
            "prefix-hash",
        ),
    )
    strict_roles: bool = option(False, "Never let a worker do another role's work.")
    roles: str | None = option(
        None,
        "fixed, or follow: workers' roles follow the load [fixed].",
        choices=("fixed", "follow"),
    )
    role_preference: float | None = _number(
        "How much a role counts: what a request costs more on a worker of another role, as a"
        " share of its time on that worker if it is idle [0.05]; 0: roles do not matter.",
        0.0,
        1e6,
    )
    ttft_target_ms: float | None = _number(
        "A request whose first token is expected later is refused, with 503 or 429 [no objective].",
        0.001,
    )
    tpot_target_ms: float | None = _number(
        "Mean time per token after the first: a request that would make it longer waits, and"
        " --itl-target-ms is 0.8 of it [no objective].",
        0.001,
    )
    no_admission: bool = option(
        False,
        "Place requests at once, whatever the load; --itl-target-ms stays 0.8 of --tpot-target-ms.",
    )
    tenant_header: str | None = option(
        None,
        "Header that names a request's tenant; tenants that wait get equal shares [the field"
        " user names it].",
        metavar="NAME",
    )
    api_keys_file: Path | None = option(
        None,
        "File of API keys, of which clients must have one: lines as `tasuki api-key NAME` prints"
        " them; read again when it changes.",
    )
    api_key_env: str | None = option(
        None, "Environment variable that has an API key, in plain text.", metavar="NAME"
    )
    admin_port: int | None = _number(
        "Port of the admin API and of the dashboard, on 127.0.0.1 only [not served].",
        1,
        65_535,
        metavar="PORT",
    )
    tls_cert: Path | None = option(
        None, "Certificate chain in PEM: clients are served over https alone.", metavar="PATH"
    )
    tls_key: Path | None = option(None, "Private key in PEM, of --tls-cert.", metavar="PATH")
    metrics_listen: str | None = option(
        None,
        "Address of a listener of the router that serves /metrics alone; required for /metrics"
        " where --host is not a loopback address.",
        metavar="HOST:PORT",
    )
    request_log: Path | None = option(
        None,
        "File of the router that gets a line for each request, without text; `tasuki simulate`"
        " replays it.",
        metavar="PATH",
    )
    request_log_mb: int | None = _number("Largest file of --request-log [64].", 1)
    request_log_files: int | None = _number("Files of --request-log that are kept [8].", 1)
    otlp_endpoint: str | None = option(
        None,
        "OpenTelemetry collector (OTLP over HTTP) that gets traces of requests.",
        metavar="http://HOST:PORT",
    )
    trace_sample_ratio: float | None = _number("Share of requests that are traced [1].", 0.0, 1.0)
    tool_parser: str | None = option(
        None,
        "How the model writes tool calls: auto, none, hermes, qwen3-coder, glm45, mistral, llama3,"
        " deepseek-v3 or harmony [auto: as its chat template].",
        metavar="FORMAT",
        choices=(
            "auto",
            "none",
            "hermes",
            "qwen3-coder",
            "glm45",
            "mistral",
            "llama3",
            "deepseek-v3",
            "harmony",
        ),
    )
    reasoning_parser: str | None = option(
        None,
        "How the model marks reasoning: auto, none, think or harmony [auto: as its chat template].",
        metavar="FORMAT",
        choices=("auto", "none", "think", "harmony"),
    )
    max_concurrent_requests: int | None = _number(
        "Sequences (prompts times n) in the router at once; 503 beyond [1024].", 1
    )
    max_connections: int | None = _number(
        "Connections to the router at once; 503 beyond [4096].", 1
    )
    idle_timeout_s: float | None = _number(
        "A connection without a complete request header for so long is closed, in seconds [30].",
        0.001,
        _LONGEST_S,
    )
    body_timeout_s: float | None = _number(
        "How long a request's body may take to arrive, in seconds [30].", 0.001, _LONGEST_S
    )
    request_timeout_s: float | None = _number(
        "How long a request may take from its body to the end of its answer, in seconds [1800].",
        0.001,
        _LONGEST_S,
    )
    client_stall_s: float | None = _number(
        "A client that reads nothing of its answer for so long is cut off, in seconds [30].",
        0.001,
        _LONGEST_S,
    )
    drain_s: float = option(
        30.0,
        "How long Ctrl-C waits for running requests, in seconds [30].",
        bounds=(0, _LONGEST_S),
        range_in_help=True,
    )

    def __post_init__(self) -> None:
        if refused := first_refused(self):
            name, value, allowed = refused
            raise LaunchError(f"--{name} is {value!r}: use {allowed}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise LaunchError("--tls-cert and --tls-key go together: give both, or none")
        endpoint = self.otlp_endpoint
        if endpoint is not None and not endpoint.startswith("http://"):
            raise LaunchError(f"--otlp-endpoint is {endpoint!r}: use http://HOST:PORT")
        if endpoint is None and self.trace_sample_ratio is not None:
            raise LaunchError("--trace-sample-ratio is given without --otlp-endpoint: give both")
        if self.request_log is None and (self.request_log_mb or self.request_log_files):
            raise LaunchError(
                "--request-log-mb or -files is given without --request-log: give both"
            )

    def arguments(self) -> list[str]:
        """The command-line arguments that say the same.

        No load balancer has to notice the end of `tasuki serve`, so readiness has no grace. The
        launcher waits for the drain, so the router is told its length.
        """
        words = arguments(self, options_of(RouterOptions).keys() - {"drain_s"})
        return [*words, "--readiness-grace-s", "0", "--drain-s", f"{self.drain_s:g}"]

    @property
    def key_variable(self) -> str | None:
        """Environment variable in which a client has its API key; None: it requires none."""
        required = self.api_keys_file is not None or self.api_key_env is not None
        return (self.api_key_env or "TASUKI_API_KEY") if required else None
