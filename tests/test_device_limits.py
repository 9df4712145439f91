"""What a device allows, and the emulation of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tasuki.attention import own
from tasuki.device_limits import DeviceLimitsError, limits_of
from tasuki.overlap import overlaps

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    limits_of.cache_clear()
    yield
    limits_of.cache_clear()


@pytest.mark.parametrize(
    ("capability", "shared_bytes", "overlapped", "fp8"),
    [
        ("8.0", 166_912, False, False),
        ("8.6", 101_376, False, False),
        ("8.9", 101_376, False, True),
        ("9.0", 232_448, True, True),
        ("10.0", 232_448, True, True),
        ("12.0", 101_376, True, True),
    ],
)
def test_an_emulated_capability_has_its_limits(
    monkeypatch: pytest.MonkeyPatch, capability: str, shared_bytes: int, overlapped: bool, fp8: bool
) -> None:
    monkeypatch.setenv("TASUKI_EMULATE_CAPABILITY", capability)
    limits = limits_of(CPU)
    assert limits.shared_bytes == shared_bytes
    assert overlaps(CPU) == overlapped
    assert limits.has_fp8 == fp8
    pool = torch.empty(4, 2, 1, 2, 16, 64, dtype=torch.float8_e4m3fn)
    refusal = own.why_not(4, pool, torch.bfloat16)
    assert fp8 or f"compute capability is {capability}: fp8 needs 8.9" in str(refusal)


def test_without_emulation_a_cpu_has_no_limits() -> None:
    assert limits_of(CPU).capability == (0, 0)
    assert not overlaps(CPU)


def test_an_unknown_capability_is_refused_with_those_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TASUKI_EMULATE_CAPABILITY", "7.5")
    with pytest.raises(DeviceLimitsError, match=r"'7.5': use one of 8\.0, 8\.6"):
        limits_of(CPU)
