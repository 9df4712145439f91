"""What the command lines of sweep and batch understand, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.bench.batch_command import sizes
from tasuki.bench.errors import BenchError
from tasuki.bench.pairs import split_pair
from tasuki.bench.sweep_command import parse_load

pytestmark = pytest.mark.system


def tasuki(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tasuki", "bench", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_load_is_a_name_and_options() -> None:
    said = parse_load("chat --input-tokens 512 --steady --slo='ttft=2s' --lengths 5:6")
    assert said == {
        "name": "chat",
        "arguments": {
            "input-tokens": "512",
            "steady": True,
            "slo": "ttft=2s",
            "lengths": "5:6",
        },
    }


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("", "--load is '': begin with a name"),
        ("chat 'open", "--load is .*: No closing quotation"),
        ("chat stray --rate 1", "--load chat: 'stray' is no option"),
    ],
)
def test_a_load_of_another_form_is_refused(said: str, says: str) -> None:
    with pytest.raises(BenchError, match=says):
        parse_load(said)


def test_sizes_and_pairs() -> None:
    assert sizes("1, 8,32", "batch") == (1, 8, 32)
    assert sizes("", "transfer_blocks") == ()
    with pytest.raises(BenchError, match="--decode-batch is '1,x'"):
        sizes("1,x", "decode_batch")
    assert split_pair("a=b=c", "--serve") == ("a", "b=c")
    with pytest.raises(BenchError, match="--serve is 'a': write NAME=VALUE"):
        split_pair("a", "--serve")


def test_a_dry_run_shows_points_and_time_and_starts_nothing(tmp_path: Path) -> None:
    done = tasuki(
        *("sweep", "--workers", "2", "--dry-run"),
        *("--load", "chat --num-requests 30", "--each", "request-rate=1,2"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2m/chat-request-rate-1: pending",
        "2m/chat-request-rate-2: pending",
        "1p1d/chat-request-rate-1: pending",
        "1p1d/chat-request-rate-2: pending",
    ]
    # Two starts of 20 s; runs of 30 and 15 s and 5 s of draining each, twice.
    assert "4 of 4 points to measure: about 2 min" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_search_alone_takes_its_arguments_from_the_one_load(tmp_path: Path) -> None:
    done = tasuki(
        *("sweep", "--topologies", "1m", "--dry-run", "--find-goodput", "--slo", "ttft=1s"),
        *("--load", "chat --input-tokens 9"),
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == ["1m/goodput: pending"]


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_load_that_cannot_be_made_is_named_before_anything_starts(
    dry: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    done = tasuki(
        *("sweep", "--workers", "2", "--model", str(tiny_model)),
        *dry,
        *("--load", "fine --num-requests 2", "--load", "typo --inptu-tokens 8"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "tasuki: error: load typo: unexpected argument '--inptu-tokens' found;"
        " tip: a similar argument exists: '--input-tokens'\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--transport", "tcp,nxil"), "topology 1m-nxil: transport is 'nxil': use one of "),
        (("--on", "ray", "--spread", "wide"), "topology 1m-wide: --spread is 'wide': use one of "),
        (("--serve", "max-model-len=many"), "topology 1m: Invalid value for '--max-model-len': "),
        (("--serve", "max-model-len="), "topology 1m: Invalid value for '--max-model-len': "),
        (("--serve", "dtype=float17"), "topology 1m: dtype is 'float17': use one of "),
        (("--spread", "pack"), "topology 1m-pack: --spread, --hosts-* and --worker-cpus divide a"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry", "run"])
def test_a_server_that_cannot_be_started_is_named_before_anything_starts(
    dry: list[str], given: tuple[str, ...], says: str, tmp_path: Path, tiny_model: Path
) -> None:
    done = tasuki(
        *("sweep", "--topologies", "1m", "--model", str(tiny_model), *given),
        *dry,
        *("--load", "fine --num-requests 2"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"tasuki: error: {says}")
    assert not list(tmp_path.iterdir())


def test_a_search_that_cannot_be_made_is_named(tmp_path: Path, tiny_model: Path) -> None:
    done = tasuki(
        *("sweep", "--topologies", "1m", "--model", str(tiny_model), "--dry-run"),
        *("--find-goodput", "--slo", "ttff=1s", "--load", "chat --input-tokens 9"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "load goodput: " in done.stderr
    assert "ttff" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sweep", "--workers", "2"), "there is nothing to run"),
        (("sweep", "--workers", "2", "--each", "a=1"), "--each needs --load"),
        (("sweep", "--workers", "2", "--find-goodput"), "--slo ttft=2s"),
        (("sweep", "--workers", "2", "--confidence", "0.9"), "belongs to --find-goodput"),
        (("sweep", "none.yaml"), "none.yaml cannot be read"),
        (("batch", "--repeat", "0"), "--repeat is 0"),
        (("batch", "--batch", "0"), "--batch has 0: use 1 or more"),
        (("batch", "--decode-batch", "1"), "--decode-batch belongs to --steps"),
        (("batch", "--steps", "--url", "http://x"), "leave out --url"),
        (("batch", "--steps", "--prefill-tokens", "8,-3"), "error: --prefill-tokens has -3: use 1"),
        (("batch", "--topology", "1x"), "write workers by role"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = tasuki(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("tasuki: error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
