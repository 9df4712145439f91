"""Servers that speak HTTP: what each one is, and what it shows, again and again."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasuki.doctor import series
from tasuki.doctor.address import Address
from tasuki.doctor.http import Http, NoAnswerError
from tasuki.doctor.picture import Engine, Pair, Router, Scrapes, Worker
from tasuki.doctor.samples import Sample, labels_of, parse, read

_LEAST_REQUESTS = 5  # to tell a role by them alone: the first may be somebody's health check
_PREFILL_SHARE = 0.9
_SGLANG_CONFIG = {
    "version": "version",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_dtype",
    "page_size": "block_size",
    "context_length": "max_model_len",
    "max_total_num_tokens": "kv_tokens",
    "max_running_requests": "max_running",
    "tp_size": "tensor_parallel",
    "disaggregation_mode": "disaggregation_mode",
    "disaggregation_transfer_backend": "kv_connector",
    "quantization": "quantization",
    "served_model_name": "served_name",
    "model_path": "model_path",
}


@dataclass(slots=True)
class EngineServer:
    """A vLLM or SGLang server, which is a worker.

    Attributes:
        metrics_error: Why its metrics cannot be read; empty: they can.
    """

    http: Http
    worker: Worker
    metrics_error: str = ""

    def take(self, now: float, samples: Sequence[Sample]) -> None:
        """Adds what it shows now."""
        values, sources = read(samples, self._table)
        if self.worker.engine == "vllm":
            self.worker.config |= _vllm_config(samples)
        elif "requests" in values:
            values = series.SGLANG_FROM_FIRST | values
            if self.worker.role:
                values = series.SGLANG_KV_FROM_FIRST | values
        self.worker.scrapes.add(now, values, sources)

    @property
    def _table(self) -> series.Table:
        return series.VLLM if self.worker.engine == "vllm" else series.SGLANG

    def values(self) -> dict[str, float]:
        """What it shows now, of which the picture has nothing: our own requests are in it.

        Raises:
            NoAnswerError: It shows no metrics.
        """
        return read(_samples(self.http), self._table)[0]

    def infer_role(self) -> None:
        """By what it was asked for, where neither the user nor the server says it."""
        if self.worker.role or self.worker.engine != "vllm":
            return
        scrapes = self.worker.scrapes
        if scrapes.last("prompt_loaded"):
            self.worker.role = "decode"
        elif scrapes.last("kv_transfers") is not None and _asked_for_one_token(scrapes):
            self.worker.role = "prefill"


def _asked_for_one_token(scrapes: Scrapes) -> bool:
    """Whether routers ask for single tokens only. Probes of an earlier look asked for more."""
    of, least = "max_tokens_count", _LEAST_REQUESTS
    asked = scrapes.recent(of, of, least)
    ones = scrapes.recent("max_tokens_one", of, least)
    if asked is None or ones is None or asked.value < least:
        return False
    return ones.value >= _PREFILL_SHARE * asked.value


def _vllm_config(samples: Sequence[Sample]) -> dict[str, str]:
    labels = labels_of(samples, "vllm:cache_config_info")
    names = {
        "block_size": "block_size",
        "cache_dtype": "kv_dtype",
        "enable_prefix_caching": "prefix_caching",
        "num_gpu_blocks": "num_blocks",
        "sliding_window": "sliding_window",
    }
    return {ours: labels[theirs] for theirs, ours in names.items() if theirs in labels}


@dataclass(slots=True)
class TasukiServer:
    """A router of Tasuki. Its metrics have all its workers.

    Attributes:
        workers: By the number that the router has given them.
        pairs: By decode worker, prefill worker and transport.
    """

    http: Http
    router: Router
    workers: dict[str, Worker] = field(default_factory=dict)
    pairs: dict[tuple[str, str, str], Pair] = field(default_factory=dict)
    metrics_error: str = ""

    def take(self, now: float, samples: Sequence[Sample]) -> None:
        """Adds what it shows now."""
        self.router.scrapes.add(now, *read(samples, series.TASUKI_ROUTER))
        self._reasons(samples)
        by_worker: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.name.startswith(("tasuki_worker_", "tasuki_kv_pair_")):
                by_worker.setdefault(sample.labels.get("worker", ""), []).append(sample)
        for number, found in by_worker.items():
            self._worker(now, number, found)
        for number, found in by_worker.items():
            self._pairs(now, number, found)

    def _reasons(self, samples: Sequence[Sample]) -> None:
        now: defaultdict[tuple[str, str], float] = defaultdict(float)
        for sample in samples:
            if (label := series.TASUKI_REASONS.get(sample.name)) is not None:
                now[sample.name, sample.labels.get(label, "")] += sample.value
        for key, value in now.items():
            first = len(self.router.scrapes.values) == 1
            start = value if first else self.router.by_reason.get(key, (0.0, 0.0))[0]
            self.router.by_reason[key] = (start, value)

    def _worker(self, now: float, number: str, samples: Sequence[Sample]) -> None:
        labels = samples[0].labels
        if number not in self.workers:
            role: Any = labels.get("role", "")
            name = f"{role or 'worker'} {number} of {self.router.name}"
            self.workers[number] = Worker(name, "tasuki", role, labels.get("model", ""))
        worker = self.workers[number]
        values, sources = read(samples, series.tasuki_worker(number))
        if total := values.get("total_blocks"):
            values["kv_used"] = 1.0 - values.get("free_blocks", total) / total
            sources["kv_used"] = "tasuki_worker_free_blocks, tasuki_worker_total_blocks"
        worker.scrapes.add(now, values, sources)

    def _pairs(self, now: float, number: str, samples: Sequence[Sample]) -> None:
        labels = {
            (s.labels["peer"], s.labels["transport"])
            for s in samples
            if s.name == "tasuki_kv_pair_pulls_total"
        }
        for peer, transport in sorted(labels):
            if peer not in self.workers:
                continue
            key = (number, peer, transport)
            if key not in self.pairs:
                self.pairs[key] = Pair(self.workers[peer], self.workers[number], transport)
            pair = self.pairs[key]
            wanted = {"worker": number, "peer": peer, "transport": transport}
            pair.scrapes.add(now, *read(samples, series.tasuki_pair(wanted)))
            for sample in samples:
                if sample.name == "tasuki_kv_pair_failures_total" and (
                    wanted.items() <= sample.labels.items()
                ):
                    pair.failures[sample.labels["cause"]] = sample.value


@dataclass(slots=True)
class OtherServer:
    """A router of which no metrics are known.

    Attributes:
        metrics_error: Why, of a router of Tasuki.
    """

    http: Http
    router: Router
    metrics_error: str = ""


def addresses_of(admin: Http) -> dict[str, str]:
    """Where a Tasuki router's workers are, by their numbers, of its admin port.

    Raises:
        NoAnswerError: That is not there.
    """
    found = admin.get("/workers").json()["workers"]
    return {str(each["id"]): str(each["address"]) for each in found}


Server = EngineServer | TasukiServer | OtherServer


def scrape(server: Server) -> None:
    """Adds what a server shows now. Where it shows nothing, its `metrics_error` says why."""
    if isinstance(server, OtherServer):
        return
    server.metrics_error = ""
    try:
        server.take(time.monotonic(), _samples(server.http))
    except NoAnswerError as error:
        server.metrics_error = str(error)


def _samples(http: Http) -> list[Sample]:
    """All samples of `/metrics`.

    Raises:
        NoAnswerError: It has none.
    """
    answer = http.get("/metrics")
    if answer.status != 200:
        raise NoAnswerError(f"/metrics answers {answer.status}")
    try:
        return parse(answer.body, answer.content_type)
    except (ValueError, KeyError) as error:
        raise NoAnswerError(f"/metrics is no Prometheus text: {str(error)[:160]}") from error


def identify(address: Address, http: Http) -> Server:
    """What a server is, by its metrics, else by its answers.

    Raises:
        NoAnswerError: Nobody answers, or it serves no models.
    """
    try:
        names = {sample.name for sample in _samples(http)}
        without = "" if names else "/metrics is empty"
    except NoAnswerError as error:
        names, without = set(), str(error)
    if any(name.startswith("tasuki_") for name in names):
        return TasukiServer(http, Router(address.where, "tasuki"))
    models = _models(http)
    if models.get("owned_by") == "tasuki":
        without += ": name its --metrics-listen address too"
        return OtherServer(http, Router(address.where, "other"), without)
    kind: Engine | None = None
    if address.kind in ("vllm", "sglang"):
        kind = "vllm" if address.kind == "vllm" else "sglang"
    elif any(name.startswith("vllm:") for name in names):
        kind = "vllm"
    elif any(name.startswith("sglang:") for name in names) or _sglang_info(http):
        kind = "sglang"
    elif "version" in _json(http, "/version"):
        kind = "vllm"
    if kind is None:
        return OtherServer(http, Router(address.where, "other"))
    return EngineServer(http, _engine_worker(kind, address, http, models), without)


def _engine_worker(kind: Engine, address: Address, http: Http, models: Mapping[str, Any]) -> Worker:
    name = address.where.removeprefix("http://")
    worker = Worker(name, kind, address.role, str(models.get("id", "")), address.host)
    if models.get("max_model_len"):
        worker.config["max_model_len"] = str(models["max_model_len"])
    if models.get("root"):
        worker.config["model_path"] = str(models["root"])
    if kind == "vllm":
        if version := _json(http, "/version").get("version"):
            worker.config["version"] = str(version)
        return worker
    info = _sglang_info(http)
    for theirs, ours in _SGLANG_CONFIG.items():
        if info.get(theirs) not in (None, ""):
            worker.config[ours] = str(info[theirs])
    mode = worker.config.get("disaggregation_mode")
    if not worker.role and mode in ("prefill", "decode"):
        worker.role = "prefill" if mode == "prefill" else "decode"
    return worker


def _sglang_info(http: Http) -> Mapping[str, Any]:
    """What an SGLang server tells of itself, by the newest name first; empty: it is none."""
    for path in ("/server_info", "/get_server_info"):
        info = _json(http, path)
        if "model_path" in info:  # vLLM has a page of the first name, too
            return info
    return {}


def has_ended(server: Server) -> str:
    """Why a server that answered at first answers no more; empty: it still does."""
    try:
        _models(server.http)
    except NoAnswerError as error:
        return str(error)
    return ""


def _models(http: Http) -> Mapping[str, Any]:
    answer = http.get("/v1/models")
    if answer.status != 200:
        raise NoAnswerError(f"/v1/models answers {answer.status}" + _key_hint(answer.status))
    found = answer.json()
    data = found.get("data") or [{}] if isinstance(found, dict) else None
    if not isinstance(data, list) or not isinstance(data[0], dict):
        raise NoAnswerError(f"/v1/models is no list of models: {answer.body[:80]!r}")
    return data[0]


def _key_hint(status: int) -> str:
    return ": give its API key by --api-key" if status in (401, 403) else ""


def _json(http: Http, path: str) -> Mapping[str, Any]:
    """What a path has; empty where it has nothing."""
    try:
        answer = http.get(path)
        found = answer.json() if answer.status == 200 else {}
    except NoAnswerError:
        return {}
    return found if isinstance(found, dict) else {}
