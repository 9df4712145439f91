"""The command `tasuki doctor`: looks at a fleet that runs, and says what is wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tasuki.command_line import described
from tasuki.errors import ERROR_PREFIX


def doctor(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...",
            help="http://HOST:PORT of a router, a vLLM or an SGLang server;"
            " vllm://HOST:PORT?role=prefill (or decode) says a server's role; HOST:PORT is a worker"
            " of Tasuki.",
            show_default=False,
        ),
    ],
    *,
    admin: Annotated[
        str,
        described(
            "The Tasuki router's admin API (its --admin-port): it says where the workers are, so"
            " that they are asked themselves.",
            metavar="HOST:PORT",
        ),
    ] = "",
    window_s: Annotated[
        float,
        described(
            "Between the first look at the metrics and the last [10].", min=1.0, max=86_400.0
        ),
    ] = 10.0,
    no_probes: Annotated[bool, described("Send no requests: read only.", "--no-probes")] = False,
    probe_rounds: Annotated[
        int,
        described(
            "Requests to each worker; three times as many where one looks slow [7].",
            "--probe-rounds",
            min=5,
            max=100,
        ),
    ] = 7,
    probe_budget_s: Annotated[
        float,
        described(
            "No round begins later than this after the first [60]. The rounds that are added where"
            " one looks slow have as long again, and so have prompts that are sent twice.",
            min=1.0,
            max=86_400.0,
        ),
    ] = 60.0,
    expect: Annotated[
        str | None,
        described(
            "What KV must move at: a rate such as 20GB/s or 100Gb/s, or a file of `tasuki"
            " linkbench --save` [nothing].",
            metavar="RATE|FILE",
        ),
    ] = None,
    request_log: Annotated[
        Path | None,
        described(
            "The Tasuki router's --request-log: a wrong ratio's remedy says what another one would"
            " have given.",
            metavar="FILE",
        ),
    ] = None,
    timeout_s: Annotated[float, described("For each answer [30].", min=0.1, max=3600.0)] = 30.0,
    api_key: Annotated[
        str | None,
        described("For the servers' Authorization header [env: OPENAI_API_KEY].", metavar="KEY"),
    ] = None,
    fleet_cert: Annotated[Path | None, described("As for workers.", metavar="PATH")] = None,
    fleet_key: Annotated[Path | None, described("As for workers.", metavar="PATH")] = None,
    fleet_ca: Annotated[Path | None, described("As for workers.", metavar="PATH")] = None,
    json: Annotated[bool, described("Print JSON instead of text.", "--json")] = False,
) -> None:
    """Look at a fleet that runs (Tasuki, vLLM, SGLang) and say what is wrong, and what to do.

    Exit status 0: nothing was found, 1: something was, 2: it could not be looked at, or nothing was
    found and the request log cannot be replayed.
    """
    from tasuki.doctor.address import Address
    from tasuki.doctor.advice import advice
    from tasuki.doctor.checks import CHECKS
    from tasuki.doctor.look import Look, Settings
    from tasuki.doctor.probes import Plan
    from tasuki.doctor.report import as_json, as_text, exit_code
    from tasuki.doctor.result import DoctorError
    from tasuki.kv.fleet import Fleet as Certificates
    from tasuki.kv.fleet import FleetError
    from tasuki.preflight.expect import Expectation
    from tasuki.preflight.result import PreflightError

    try:
        expected = Expectation.of(expect)
        certificates = Certificates.of(fleet_cert, fleet_key, fleet_ca)
        if certificates is not None:
            certificates.check()
    except (PreflightError, FleetError) as error:
        raise DoctorError(str(error)) from error
    if expect is not None and not expected.default:
        raise DoctorError(
            f"--expect {expect} has no rate that every link must reach: give one such as 20GB/s, or"
            " a file of `tasuki linkbench --save` (one of `tasuki preflight` is for its peers only)"
        )
    if request_log is not None:
        try:
            request_log.open("rb").close()
        except OSError as error:
            raise DoctorError(
                f"--request-log {request_log} cannot be read ({error.strerror}): correct the path"
            ) from error
    key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise DoctorError(
            "the API key has a letter that no header carries, such as a line's end: correct"
            " --api-key, or OPENAI_API_KEY"
        )
    settings = Settings(
        window_s=window_s,
        probe=None if no_probes else Plan(probe_rounds, probe_budget_s),
        timeout_s=timeout_s,
        key=key,
        admin=Address.of(admin if "://" in admin else f"http://{admin}").where if admin else "",
        certificates=certificates,
    )
    look = Look.at([Address.of(text) for text in dict.fromkeys(addresses)], settings)
    look.fleet.expected = expected
    prefill, decode = (len(look.fleet.of_role(role)) for role in ("prefill", "decode"))
    not_replayed: DoctorError | None = None
    if request_log is not None and prefill and decode:
        try:
            look.fleet.advice = advice(request_log, prefill, decode)
        except DoctorError as error:
            not_replayed = error
    outcomes = {name: check(look.fleet) for name, check in CHECKS.items()}
    print(as_json(look, outcomes) if json else as_text(look, outcomes))
    code = exit_code(outcomes)
    if not_replayed is not None:
        print(f"{ERROR_PREFIX}{not_replayed}", file=sys.stderr)
        code = code or not_replayed.exit_code
    raise typer.Exit(code)
