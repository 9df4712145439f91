"""Refuses a contract that released versions could not read, or that could not read theirs.

`proto/released/VERSION` has the contract of each release and the version of its wire
(WIRE_VERSION). Within one version of the wire nothing of a release may change its meaning: a
field keeps number, name, type, presence and oneof, or its number is reserved when it goes; so do
values of enums; methods keep their messages. Fields, values, messages and methods may be added.
Between versions of the wire only the handshake stays readable, so that a refusal names both.

Usage: check_contract.py [RELEASED CONTRACT]    folders; without them each release against proto/
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
RELEASED = ROOT / "proto" / "released"
HANDSHAKE: Mapping[str, tuple[int, ...]] = {
    "WorkerMessage": (1,),
    "WorkerInfo": (1, 2),
    "FromDecode": (1,),
    "FromPrefill": (1,),
    "Hello": (1, 2, 3, 4),
    "HelloReply": (1, 2),
}
"""Fields that are read before the version is known to be the same; all versions have them."""


class ContractError(Exception):
    """A contract cannot be read."""


def compile_contract(folder: Path) -> FileDescriptorSet:
    """The descriptors of all `.proto` files of a folder but those of `released`.

    Raises:
        ContractError: There are none, or protoc refuses them; it has said why.
    """
    files = sorted(folder.glob("tasuki/*/*.proto"))
    if not files:
        raise ContractError(f"{folder} has no tasuki/*/*.proto")
    with tempfile.NamedTemporaryFile() as made:
        # A process of its own: where NIXL is loaded too, importing protoc ends the process.
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}"]
        command += [f"--descriptor_set_out={made.name}", *map(str, files)]
        if subprocess.run(command, check=False).returncode != 0:
            raise ContractError(f"protoc refuses the contract in {folder}: see above")
        return FileDescriptorSet.FromString(Path(made.name).read_bytes())


def breaks(released: FileDescriptorSet, contract: FileDescriptorSet) -> list[str]:
    """What a contract changes of a released one, a line each; empty: nothing."""
    found: list[str] = []
    now = dict(_messages(contract))
    for name, message in _messages(released):
        if (new := now.get(name)) is None:
            found.append(f"message {name} is gone")
        else:
            found += _fields(name, message, new)
    enums = dict(_enums(contract))
    for name, enum in _enums(released):
        if (new_enum := enums.get(name)) is None:
            found.append(f"enum {name} is gone")
        else:
            found += _values(name, enum, new_enum)
    methods = dict(_methods(contract))
    for name, method in _methods(released):
        if name not in methods:
            found.append(f"method {name} is gone")
        elif methods[name] != method:
            found.append(f"method {name} has other messages or streams")
    return found


def handshake_breaks(released: FileDescriptorSet, contract: FileDescriptorSet) -> list[str]:
    """What of the handshake differs, a line each; empty: nothing."""
    found: list[str] = []
    then, now = dict(_messages(released)), dict(_messages(contract))
    for name, numbers in HANDSHAKE.items():
        for number in numbers:
            old, new = (
                next((field for field in each.field if field.number == number), None)
                for each in (then[f"tasuki.v1.{name}"], now[f"tasuki.v1.{name}"])
            )
            if old is None or new is None or _shape(old) != _shape(new):
                found.append(f"{name}, field {number}: the handshake differs")
    return found


def _fields(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    by_number = {field.number: field for field in new.field}
    # Ends of ranges of messages are exclusive, those of enums are inclusive.
    reserved = {n for each in new.reserved_range for n in range(each.start, each.end)}
    for field in old.field:
        where = f"{name}.{field.name} = {field.number}"
        if (same := by_number.get(field.number)) is None:
            moved = [each.number for each in new.field if each.name == field.name]
            if moved:
                yield f"{where}: its number is {moved[0]} now"
            if field.number not in reserved:
                yield f"{where}: is gone, and its number is not reserved"
        elif same.name != field.name:
            yield f"{where}: the number belongs to {same.name} now"
        elif _shape(same) != _shape(field) or _oneof(new, same) != _oneof(old, field):
            yield f"{where}: has another type, label, presence or oneof now"
    for number in {n for each in old.reserved_range for n in range(each.start, each.end)}:
        if number in by_number:
            yield f"{name}.{by_number[number].name} = {number}: the number was reserved"
        elif number not in reserved:
            yield f"{name}: number {number} is not reserved any more"


def _values(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    by_number = {value.number: value.name for value in new.value}
    reserved = {n for each in new.reserved_range for n in range(each.start, each.end + 1)}
    for value in old.value:
        where = f"{name}.{value.name} = {value.number}"
        if value.number not in by_number:
            if value.number not in reserved:
                yield f"{where}: is gone, and its number is not reserved"
        elif by_number[value.number] != value.name:
            yield f"{where}: the number belongs to {by_number[value.number]} now"
    for number in {n for each in old.reserved_range for n in range(each.start, each.end + 1)}:
        if number in by_number:
            yield f"{name}.{by_number[number]} = {number}: the number was reserved"
        elif number not in reserved:
            yield f"{name}: number {number} is not reserved any more"


def _shape(field: FieldDescriptorProto) -> tuple[int, int, str, bool]:
    return (field.type, field.label, field.type_name, field.proto3_optional)


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    if not field.HasField("oneof_index"):
        return ""
    return message.oneof_decl[field.oneof_index].name


def _messages(files: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto]]:
    def below(prefix: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
        name = f"{prefix}.{message.name}"
        yield name, message
        for each in message.nested_type:
            yield from below(name, each)

    for file in files.file:
        for message in file.message_type:
            yield from below(file.package, message)


def _enums(files: FileDescriptorSet) -> Iterator[tuple[str, EnumDescriptorProto]]:
    for file in files.file:
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", enum
    for name, message in _messages(files):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def _methods(files: FileDescriptorSet) -> Iterator[tuple[str, MethodDescriptorProto]]:
    for file in files.file:
        for service in file.service:
            for method in service.method:
                yield f"{file.package}.{service.name}.{method.name}", method


def wire_version(release: Path) -> int:
    """The version of the wire that a release speaks."""
    return int((release / "WIRE_VERSION").read_text())


def main(arguments: list[str]) -> int:
    """Check the folders named, or every release against `proto/`."""
    from tasuki.kv.identity import PROTOCOL_VERSION

    if arguments:
        released, contract = (compile_contract(Path(word)) for word in arguments)
        found = breaks(released, contract)
    else:
        contract, found = compile_contract(ROOT / "proto"), []
        for release in sorted(path for path in RELEASED.iterdir() if path.is_dir()):
            same = wire_version(release) == PROTOCOL_VERSION
            check = breaks if same else handshake_breaks
            lines = check(compile_contract(release), contract)
            found += [f"{release.name}: {line}" for line in lines]
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print(
            "the contract breaks released versions: add fields with new numbers and reserve the"
            " numbers of those that go, or raise PROTOCOL_VERSION in both languages",
            file=sys.stderr,
        )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
