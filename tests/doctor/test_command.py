"""Options of `tasuki doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki.doctor.command import doctor
from tasuki.doctor.result import DoctorError


def test_an_expectation_that_holds_for_single_peers_is_refused(tmp_path: Path) -> None:
    """`tasuki preflight --expect` takes such a file; here no link would be judged by it."""
    file = tmp_path / "preflight.json"
    checks = [{"name": "transfer 10.0.0.2:7000", "figures": {"bytes_per_s": 2e10}}]
    file.write_text(json.dumps({"checks": checks}))
    for said in (str(file), "0GB/s"):
        with pytest.raises(DoctorError, match="no rate that every link must reach"):
            doctor(["http://127.0.0.1:1"], expect=said)
