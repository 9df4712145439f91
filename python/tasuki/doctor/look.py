"""Looks at a fleet: finds out who is there, watches for some seconds, and sends small requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tasuki.doctor import probes, rpc
from tasuki.doctor.address import Address
from tasuki.doctor.checks import cache
from tasuki.doctor.checks.speed import looks_slow
from tasuki.doctor.http import Http, NoAnswerError
from tasuki.doctor.picture import Fleet, Pair, Probe, Role, Worker
from tasuki.doctor.result import DoctorError
from tasuki.doctor.servers import (
    EngineServer,
    OtherServer,
    Server,
    TasukiServer,
    addresses_of,
    has_ended,
    identify,
    scrape,
)

_MOST_PAIRS = 16
_SCRAPES = 8
_PROBE_TOKENS = (probes.PROMPT_TOKENS, probes.ANSWER_TOKENS)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a fleet is looked at.

    Attributes:
        window_s: Between the first and the last scrape.
        probe: How many requests of ours are sent; None: none.
        timeout_s: Of each answer.
        key: For the Authorization header.
        admin: `http://host:port` of the router's admin API; empty: not said.
        certificates: Of the workers' gRPC; None: plain.
    """

    window_s: float = 10.0
    probe: probes.Plan | None = field(default_factory=probes.Plan)
    timeout_s: float = 30.0
    key: str = ""
    admin: str = ""
    certificates: Any = None


@dataclass(slots=True)
class Look:
    """A fleet, and how its parts are reached.

    Attributes:
        direct: Addresses of Tasuki's workers, and the worker that each is.
    """

    settings: Settings
    fleet: Fleet = field(default_factory=Fleet)
    servers: list[Server] = field(default_factory=list)
    direct: dict[str, Worker] = field(default_factory=dict)

    @classmethod
    def at(cls, addresses: Sequence[Address], settings: Settings) -> Look:
        """Looks at these.

        Raises:
            DoctorError: None of them answers.
        """
        look = cls(settings)
        look._ask_all(addresses)
        if not look.servers and not look.direct:
            reasons = "; ".join(f"{where}: {why}" for where, why in look.fleet.silent.items())
            raise DoctorError(f"nothing answers: {reasons}: start it, or correct the address")
        look._add_listed()
        look._watch()
        look._probe()
        return look

    def _ask_all(self, addresses: Sequence[Address]) -> None:
        with ThreadPoolExecutor(max(1, min(32, len(addresses)))) as pool:
            for address, found in zip(addresses, pool.map(self._identify, addresses), strict=True):
                self._take(address, found)

    def _add_listed(self) -> None:
        """Servers of other engines that a Tasuki router serves: they are asked themselves."""
        if not self.settings.admin or not any(isinstance(s, TasukiServer) for s in self.servers):
            return
        try:
            admin = Http(self.settings.admin, timeout_s=self.settings.timeout_s)
            texts = addresses_of(admin).values()
        except (NoAnswerError, KeyError, TypeError, AttributeError):
            return  # _reach says so
        given = {s.http.base: s for s in self.servers if isinstance(s, EngineServer)}
        listed = [_listed(text) for text in texts if "://" in text]
        for address in listed:
            if (server := given.get(address.where)) and not server.worker.role:
                server.worker.role = address.role
        self._ask_all(
            [
                each
                for each in listed
                if each.where not in given and each.where not in self.fleet.silent
            ]
        )

    def _identify(self, address: Address) -> Server | Worker | NoAnswerError:
        try:
            if address.kind == "tasuki":
                return rpc.ask(
                    address.where, self.settings.certificates, min(10.0, self.settings.timeout_s)
                )
            return identify(
                address, Http(address.where, self.settings.key, self.settings.timeout_s)
            )
        except NoAnswerError as error:
            return error

    def _take(self, address: Address, found: Server | Worker | NoAnswerError) -> None:
        if isinstance(found, NoAnswerError):
            self.fleet.silent[address.where] = str(found)
        elif isinstance(found, Worker):
            self.direct[address.where] = found
        else:
            self.servers.append(found)
            if isinstance(found, EngineServer):
                self.fleet.workers.append(found.worker)
            else:
                self.fleet.routers.append(found.router)

    def _watch(self) -> None:
        """Scrapes everything several times within the window."""
        gap_s = self.settings.window_s / (_SCRAPES - 1)
        begin = time.monotonic()
        with ThreadPoolExecutor(max(1, min(32, len(self.servers)))) as pool:
            for number in range(_SCRAPES):
                time.sleep(max(0.0, begin + number * gap_s - time.monotonic()))
                list(pool.map(scrape, self.servers))
        metrics_elsewhere = any(isinstance(server, TasukiServer) for server in self.servers)
        for server in self.servers:
            if server.metrics_error and not (metrics_elsewhere and isinstance(server, OtherServer)):
                self._explain(server)
            if isinstance(server, EngineServer):
                server.infer_role()
            elif isinstance(server, TasukiServer):
                self.fleet.workers += filter(self._is_only_here, server.workers.values())
                self.fleet.pairs += server.pairs.values()
                self._reach(server)
        known = {id(worker) for worker in self.fleet.workers}
        self.fleet.workers += [each for each in self.direct.values() if id(each) not in known]

    def _explain(self, server: Server) -> None:
        """Why a server showed no metrics at the end."""
        if ended := has_ended(server):
            self.fleet.silent[server.http.base] = f"it answered at first: {ended}"
        else:
            self.fleet.unread[server.http.base] = server.metrics_error

    def _is_only_here(self, worker: Worker) -> bool:
        """Whether a router's metrics are all that there is to see of a worker, or it is lost.

        Workers of other engines are looked at themselves. A router serves a model either by those
        or by workers of Tasuki.
        """
        models = {s.worker.model for s in self.servers if isinstance(s, EngineServer)}
        last = worker.scrapes.last
        return worker.model not in models or last("up") == 0 or bool(last("failing"))

    def _reach(self, server: TasukiServer) -> None:
        """Asks the workers of a router who they are, where its admin port says where they are."""
        if not self.settings.admin:
            return
        try:
            where = addresses_of(Http(self.settings.admin, timeout_s=self.settings.timeout_s))
        except (NoAnswerError, KeyError, TypeError, AttributeError) as error:
            self.fleet.silent[self.settings.admin] = f"no list of workers: {error}"
            return
        for number, worker in server.workers.items():
            address = where.get(number, "")
            if not address or "://" in address:
                continue
            self._merge(worker, address)

    def _merge(self, worker: Worker, address: str) -> None:
        """What a worker says of itself, into what the router says of it."""
        try:
            told = self.direct.get(address) or rpc.ask(address, self.settings.certificates, 10.0)
        except NoAnswerError as error:
            worker.probe_error = (
                f"{address} does not answer ({error}): open the way to it from here, or give"
                " --fleet-cert, --fleet-key and --fleet-ca"
            )
            return
        worker.config, worker.host = told.config, told.host
        worker.name = f"{worker.role or 'worker'} {address}"
        self.direct[address] = worker

    def _probe(self) -> None:
        plan = self.settings.probe
        if plan is None:
            return
        run = uuid.uuid4().hex[:8]
        subjects: list[tuple[Worker, probes.Timed]] = []
        for server in self.servers:
            if not isinstance(server, EngineServer):
                continue
            try:
                subjects.append(
                    (server.worker, probes.timed_over_http(server, run, self._prefill_for(server)))
                )
            except NoAnswerError as error:
                server.worker.probe_error = str(error)
        subjects += [(each, self._timed(where, run)) for where, each in self.direct.items()]
        probes.time_workers(subjects, plan, lambda: looks_slow(self.fleet))
        self._split(run)
        for server in self.servers:
            if not isinstance(server, EngineServer):
                is_open = partial(cache.is_open, self.fleet, server.router)
                server.router.model = self._model(server)
                probes.repeat(server.router, server.http, run, plan, is_open)

    def _prefill_for(self, server: EngineServer) -> EngineServer | None:
        """Who computes the prompts of a server's probes; None: the server itself.

        Raises:
            NoAnswerError: It must not be probed.
        """
        worker = server.worker
        if worker.config.get("disaggregation_mode", "null") not in ("null", "None"):
            raise NoAnswerError("it serves no request without a peer (SGLang)")
        if worker.engine != "vllm" or worker.role in ("prefill", "mixed"):
            return None
        if not worker.role and worker.scrapes.last("kv_transfers") is not None:
            raise NoAnswerError(
                "it has a KV connector, and its role is not known:"
                " give it, vllm://HOST:PORT?role=prefill, decode or mixed"
            )
        if not worker.role:
            return None
        for each in self._vllm("prefill"):
            if each.worker.model == worker.model:
                return each
        raise NoAnswerError("it decodes for others: give a prefill server of its model too")

    def _timed(self, where: str, run: str) -> probes.Timed:
        """Requests to a worker of Tasuki."""
        certificates, timeout_s = self.settings.certificates, self.settings.timeout_s

        def timed(round_: int) -> Probe:
            return rpc.timed(where, certificates, timeout_s, run, round_, _PROBE_TOKENS)

        return timed

    def _model(self, server: Server) -> str:
        try:
            return str(server.http.get("/v1/models").json()["data"][0]["id"])
        except (NoAnswerError, KeyError, IndexError, TypeError):
            return ""

    def _split(self, run: str) -> None:
        """A request over each pair of vLLM workers whose roles are known."""
        for prefill in self._vllm("prefill"):
            for decode in self._vllm("decode"):
                if prefill.worker.model != decode.worker.model:
                    continue
                if len(self.fleet.pairs) >= _MOST_PAIRS:
                    return
                pair = Pair(prefill.worker, decode.worker)
                self.fleet.pairs.append(pair)
                probes.split(pair, prefill, decode, run)

    def _vllm(self, role: Role) -> list[EngineServer]:
        engines = [each for each in self.servers if isinstance(each, EngineServer)]
        return [e for e in engines if e.worker.engine == "vllm" and e.worker.role == role]


def _listed(text: str) -> Address:
    """An address of a router's list: without a role the server serves requests alone."""
    address = Address.of(text)
    return replace(address, role=address.role or "mixed")
