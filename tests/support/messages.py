"""Messages of protobuf changed at random: fields by value, and the bytes of the whole.

A case follows from its seed alone. `cases` says how many there are: for `TASUKI_FUZZ_S`
seconds, otherwise as many as a search has (`searches.count`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from support import searches

SECONDS_VARIABLE = "TASUKI_FUZZ_S"

_SMALL = (0, 0, 1, 2, 3, 4, 4, 5, 8, 8, 9, 12)
_WHOLE = (*_SMALL, 47, 48, 63, 64, 65, 1000, 2**31 - 1, 2**31, 2**32 - 1)
_LARGE = (*_WHOLE, 2**32, 2**53 + 1, 2**63, 2**64 - 1)
_REAL = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, 1e9, 3e38, -3e38)
_DOUBLE = (*_REAL, 1e-300, 1e308, -1e308)
_STRANGE = (float("nan"), float("inf"), float("-inf"))
_TEXT = ("", "\0", "ü", "x" * 5000)
_ADDRESSES = ("", "\0", "127.0.0.1:1", "127.0.0.1:99999", "unix:/none", "dns:///[", ":::")
"""None that a name server is asked about."""
_MOST_COPIES = 2000
_MOST_PARTS = 8  # of a list that are looked at
_MOST_CHANGES = 3


def batches(size: int, default: int) -> Iterator[Sequence[int]]:
    """Seeds of the cases of a fuzz test, `size` at a time; they may run side by side."""
    first, done = searches.FIRST_SEED or 0, 0
    seconds = os.environ.get(SECONDS_VARIABLE)
    end_s = None if seconds is None else time.monotonic() + float(seconds)
    count = searches.count(default)
    while time.monotonic() < end_s if end_s is not None else done < count:
        upto = done + size if end_s is not None else min(done + size, count)
        yield range(first + done, first + upto)
        done = upto


def changed(message: Message, random: Random, words: Sequence[str]) -> bytes:
    """A message with some changes, as bytes that need not be a message.

    Args:
        message: A valid one; not changed.
        random: Draws the changes; none now and then.
        words: Strings that mean something, such as names in use.
    """
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(random.randint(0, _MOST_CHANGES)):
        _change(copy, random, words)
    data = bytearray(copy.SerializeToString())
    if random.random() < 0.2:
        for _ in range(random.randint(1, 3)):
            _change_bytes(data, random)
    return bytes(data)


def _change(root: Message, random: Random, words: Sequence[str]) -> None:
    """Change one field somewhere in a message, most often one that is set."""
    parts = list(_parts(root))
    [message] = random.choices(parts, [1 + len(part.ListFields()) for part in parts])
    fields = [field for field, _ in message.ListFields()]
    if not fields or random.random() < 0.2:
        fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = random.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name.values()
        if value.message_type is None:
            getattr(message, field.name)[_value(key, random, words)] = _value(value, random, words)
    elif field.is_repeated:
        _change_list(getattr(message, field.name), field, random, words)
    elif field.message_type is not None:
        if message.HasField(field.name):
            message.ClearField(field.name)
        else:
            getattr(message, field.name).SetInParent()
    elif random.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, random, words))


def _parts(message: Message) -> Iterator[Message]:
    """A message and all that are in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value[:_MOST_PARTS] if field.is_repeated else [value]:
            yield from _parts(part)


def _change_list(items: Any, field: FieldDescriptor, random: Random, words: Sequence[str]) -> None:
    match random.randrange(5):
        case 0 if items:
            del items[random.randrange(len(items)) :]
        case 1 if items:
            copies = random.choice((1, 2, _MOST_COPIES // len(items)))
            items.extend([random.choice(items)] * copies)
        case 2 if items:
            del items[random.randrange(len(items))]
        case _ if field.message_type is not None:
            items.add()
        case 3 if items:
            items[random.randrange(len(items))] = _value(field, random, words)
        case _:
            items.append(_value(field, random, words))


def _value(field: FieldDescriptor, random: Random, words: Sequence[str]) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_UINT32:
            return random.choice(_WHOLE)
        case FieldDescriptor.CPPTYPE_UINT64:
            return random.choice(_LARGE)
        case FieldDescriptor.CPPTYPE_FLOAT:
            return random.choice((*_REAL, *_STRANGE))
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return random.choice((*_DOUBLE, *_STRANGE))
        case FieldDescriptor.CPPTYPE_BOOL:
            return random.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return random.choice((-1, 0, 1, 2, 3, 4, 99))
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return random.randbytes(random.choice((0, 1, 16, 300)))
        case FieldDescriptor.CPPTYPE_STRING if field.name.endswith("endpoint"):
            return random.choice(_ADDRESSES)
        case FieldDescriptor.CPPTYPE_STRING:
            return random.choice((*_TEXT, *words, *words))
    raise TypeError(f"{field.full_name} has C++ type {field.cpp_type}: give it values here")


def _change_bytes(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data) + 1)
    match random.randrange(4):
        case 0 if at < len(data):
            data[at] ^= 1 << random.randrange(8)
        case 1:
            data[at:at] = random.randbytes(random.randint(1, 8))
        case 2:
            del data[at : at + random.randint(1, 8)]
        case _:
            del data[at:]
