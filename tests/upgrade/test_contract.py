"""The contract against those of released versions, and what a later version may send."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
)

from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.convert import request_from_wire

pytestmark = pytest.mark.system  # protoc

REPOSITORY = Path(__file__).parents[2]


def tool() -> Any:
    spec = importlib.util.spec_from_file_location(
        "check_contract", REPOSITORY / "tools/check_contract.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = tool()
RELEASES = sorted(path for path in TOOL.RELEASED.iterdir() if path.is_dir())
OURS = [each for each in RELEASES if TOOL.wire_version(each) == PROTOCOL_VERSION]
OTHERS = [each for each in RELEASES if each not in OURS]


@pytest.fixture(scope="module")
def contract() -> FileDescriptorSet:
    return TOOL.compile_contract(REPOSITORY / "proto")


@pytest.fixture
def changed(contract: FileDescriptorSet) -> FileDescriptorSet:
    """A copy, to be changed."""
    return FileDescriptorSet.FromString(contract.SerializeToString())


def message(files: FileDescriptorSet, name: str) -> DescriptorProto:
    return next(each for file in files.file for each in file.message_type if each.name == name)


def enum(files: FileDescriptorSet, name: str) -> EnumDescriptorProto:
    return next(each for file in files.file for each in file.enum_type if each.name == name)


def field(files: FileDescriptorSet, owner: str, name: str) -> FieldDescriptorProto:
    return next(each for each in message(files, owner).field if each.name == name)


@pytest.mark.parametrize("release", OURS, ids=lambda path: path.name)
def test_releases_of_this_wire_are_readable(release: Path, contract: FileDescriptorSet) -> None:
    assert TOOL.breaks(TOOL.compile_contract(release), contract) == []


@pytest.mark.parametrize("release", OTHERS, ids=lambda path: path.name)
def test_other_releases_can_be_refused(release: Path, contract: FileDescriptorSet) -> None:
    released = TOOL.compile_contract(release)
    assert TOOL.handshake_breaks(released, contract) == []
    assert TOOL.breaks(released, contract), "it could be of one wire"


def test_each_release_has_its_contract_and_one_version_everywhere() -> None:
    def versions(file: str, pattern: str) -> list[str]:
        return re.findall(pattern, (REPOSITORY / file).read_text(), re.M)

    heads = versions("CHANGELOG.md", r"^## (\d+\.\d+\.\d+)")
    assert {path.name for path in RELEASES} == set(heads)
    assert OURS
    assert versions("Cargo.toml", r'^version = "(.+)"') == heads[:1]
    assert versions("deploy/helm/tasuki/Chart.yaml", r"^version: (.+)") == heads[:1]
    assert versions("deploy/helm/tasuki/Chart.yaml", r'^appVersion: "(.+)"') == heads[:1]


def renumber(files: FileDescriptorSet) -> None:
    field(files, "Load", "running_sequences").number = 900


def retype(files: FileDescriptorSet) -> None:
    field(files, "Load", "draining").type = FieldDescriptorProto.TYPE_UINT32


def repeat(files: FileDescriptorSet) -> None:
    field(files, "Submit", "number").label = FieldDescriptorProto.LABEL_REPEATED


def rename(files: FileDescriptorSet) -> None:
    field(files, "Submit", "tenant").name = "client"


def remove(files: FileDescriptorSet) -> None:
    message(files, "Load").field.remove(field(files, "Load", "draining"))


def forget_presence(files: FileDescriptorSet) -> None:
    field(files, "Load", "waiting_kv_tokens").proto3_optional = False


def leave_oneof(files: FileDescriptorSet) -> None:
    field(files, "RouterMessage", "abort").ClearField("oneof_index")


def reuse_reserved(files: FileDescriptorSet) -> None:
    message(files, "WorkerInfo").field.add(name="new", number=3, type=4, label=1)


def unreserve(files: FileDescriptorSet) -> None:
    del message(files, "WorkerInfo").reserved_range[:]


def remove_message(files: FileDescriptorSet) -> None:
    files.file[0].message_type.remove(message(files, "FlushCache"))


def reuse_value(files: FileDescriptorSet) -> None:
    enum(files, "FinishReason").value[1].name = "FINISH_NEW"


def remove_value(files: FileDescriptorSet) -> None:
    del enum(files, "FailureKind").value[-1]


def change_method(files: FileDescriptorSet) -> None:
    files.file[-1].service[0].method[0].server_streaming = False


BREAKING: dict[Callable[[FileDescriptorSet], None], str] = {
    renumber: "Load.running_sequences = 13: its number is 900 now",
    retype: "Load.draining = 19: has another type",
    repeat: "Submit.number = 9: has another type, label",
    rename: "the number belongs to client now",
    remove: "Load.draining = 19: is gone, and its number is not reserved",
    forget_presence: "Load.waiting_kv_tokens = 20: has another type, label, presence",
    leave_oneof: "RouterMessage.abort = 2: has another type, label, presence or oneof",
    reuse_reserved: "WorkerInfo.new = 3: the number was reserved",
    unreserve: "WorkerInfo: number 3 is not reserved any more",
    remove_message: "message tasuki.v1.FlushCache is gone",
    reuse_value: "the number belongs to FINISH_NEW now",
    remove_value: "is gone, and its number is not reserved",
    change_method: "has other messages or streams",
}


@pytest.mark.parametrize("change", BREAKING, ids=lambda change: change.__name__)
def test_a_change_that_breaks_is_named(
    change: Callable[[FileDescriptorSet], None],
    contract: FileDescriptorSet,
    changed: FileDescriptorSet,
) -> None:
    change(changed)
    found = TOOL.breaks(contract, changed)
    assert any(BREAKING[change] in line for line in found), found


def test_what_is_added_or_reserved_breaks_nothing(
    contract: FileDescriptorSet, changed: FileDescriptorSet
) -> None:
    add_of_later(changed)
    remove(changed)
    message(changed, "Load").reserved_range.add(start=19, end=20)
    enum(changed, "FinishReason").value.add(name="FINISH_LATER", number=90)
    assert TOOL.breaks(contract, changed) == []


def test_another_handshake_is_found(
    contract: FileDescriptorSet, changed: FileDescriptorSet
) -> None:
    field(changed, "Hello", "engine_id").number = 9
    assert TOOL.handshake_breaks(contract, changed) == ["Hello, field 3: the handshake differs"]


def add_of_later(files: FileDescriptorSet) -> None:
    """A field in a request and in its sampling parameters, and one more message of a router."""
    for owner in ("Submit", "SamplingParams"):
        message(files, owner).field.add(
            name="later", number=900, type=FieldDescriptorProto.TYPE_STRING, label=1
        )
    message(files, "RouterMessage").field.add(
        name="later",
        number=900,
        type=FieldDescriptorProto.TYPE_MESSAGE,
        type_name=".tasuki.v1.Abort",
        label=1,
        oneof_index=0,
    )


def test_what_a_later_router_sends_is_readable(changed: FileDescriptorSet) -> None:
    add_of_later(changed)
    pool = descriptor_pool.DescriptorPool()
    for file in changed.file:
        pool.Add(file)
    later = message_factory.GetMessageClass(pool.FindMessageTypeByName("tasuki.v1.RouterMessage"))
    submit = {"request_id": "r", "leg": 1, "prompt_tokens": [1], "choices": [0]}
    sampling = {"max_tokens": 3, "top_p": 1.0, "repetition_penalty": 1.0}
    sent = later(submit={**submit, "later": "x", "sampling": {**sampling, "later": "x"}})
    heard = pb.RouterMessage.FromString(sent.SerializeToString())
    plain = pb.Submit(**submit, sampling=pb.SamplingParams(**sampling))
    assert request_from_wire(heard.submit) == request_from_wire(plain)
    unknown = later(later={"request_id": "r"})
    heard = pb.RouterMessage.FromString(unknown.SerializeToString())
    assert heard.WhichOneof("message") is None
