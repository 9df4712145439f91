"""Which workers start and which end when a role gets another number."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import cast

import pytest

from tasuki.launch.config import ServeConfig, Topology
from tasuki.launch.engine import Engine, Member
from tasuki.launch.supervisor import Supervisor
from tasuki.launch.topology import ProcessSpec
from tasuki.launch.worker_set import Change, WorkerSet, plan_change
from tasuki.launch.workers_file import WorkersFile

NAMES = ["prefill-0", "decode-0", "decode-2", "mixed-0"]


def test_new_workers_take_the_lowest_free_numbers() -> None:
    assert plan_change(NAMES, "decode", 4) == Change(("decode-1", "decode-3"), ())
    assert plan_change([], "mixed", 2) == Change(("mixed-0", "mixed-1"), ())


def test_the_highest_numbers_go_first() -> None:
    assert plan_change(NAMES, "decode", 1) == Change((), ("decode-2",))
    many = [f"decode-{n}" for n in range(12)]
    assert plan_change(many, "decode", 9).stop == ("decode-9", "decode-10", "decode-11")


def test_nothing_changes_where_the_number_is_right() -> None:
    assert plan_change(NAMES, "decode", 2) == Change((), ())


SERVE = "import time; print('ready 127.0.0.1:4711', flush=True); time.sleep(600)"


class FakeEngine:
    """Has room for all workers, which serve nothing."""

    def __init__(self) -> None:
        self.placed: set[str] = set()

    def place(
        self, model: Path, dtype: str, members: Sequence[Member] | None, wait: object
    ) -> tuple[ProcessSpec, ...]:
        del model, dtype, wait
        names = ["prefill-0", "decode-0"] if members is None else [name for name, _ in members]
        self.placed.update(names)
        program = (sys.executable, "-c", SERVE)
        return tuple(ProcessSpec(n, ("--port", "0"), (), "ready ", program) for n in names)

    def release(self, names: Collection[str]) -> None:
        self.placed.difference_update(names)


@pytest.mark.system
def test_a_full_disk_does_not_stop_scaling(tmp_path: Path) -> None:
    engine = FakeEngine()
    file = WorkersFile(tmp_path / "workers.txt")
    supervisor = Supervisor(tmp_path, echo=False, on_ready=file.put)
    config = ServeConfig(model="m", topology=Topology(1, 1))
    workers = WorkerSet(config, cast(Engine, engine), supervisor, file)
    try:
        workers.start(tmp_path, "float32")
        file.publish()
        (tmp_path / "workers.txt.new").symlink_to("/dev/full")
        assert workers.scale("decode", 2) == "1 prefill + 2 decode: 3 workers, 2 before"
        assert workers.scale("decode", 1) == "1 prefill + 1 decode: 2 workers, 3 before"
        assert engine.placed == {"prefill-0", "decode-0"}, "no place is lost"
        assert sorted(supervisor.names()) == sorted(engine.placed)
    finally:
        supervisor.stop(supervisor.names(), grace_s=0.0)
        (tmp_path / "workers.txt.new").unlink(missing_ok=True)
