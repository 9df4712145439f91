"""What can be said of the images without building them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TEXT = re.sub(r"\\\n", " ", (REPOSITORY / "Dockerfile").read_text())
STAGES = re.split(r"(?m)^FROM ", TEXT)[1:]
IMAGES = ("router", "worker-cpu", "worker-cuda", "serve")


def stage(name: str) -> str:
    (found,) = [each for each in STAGES if re.match(rf"\S+ AS {name}\n", each)]
    base = found.split()[0]
    return found if base.startswith("$") else stage(base) + found


def test_bases_are_exact_versions() -> None:
    bases = dict(re.findall(r"(?m)^ARG (\w+)=(\S+)$", TEXT))
    assert set(bases) == {"RUST", "DEBIAN", "CUDA"}
    for image in bases.values():
        _, _, tag = image.partition(":")
        assert "latest" not in tag and re.search(r"\d+\.\d+\.\d+|\d{8}", tag), image
    for each in STAGES:
        base = each.split()[0]
        assert base in {"${RUST}", "${DEBIAN}", "${CUDA}", "worker-cpu"}, base


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_not_root_and_says_whether_it_is_healthy(name: str) -> None:
    text = stage(name)
    users = re.findall(r"(?m)^USER (\S+)$", text)
    assert users and users[-1] == "10001:10001"
    after = text.rsplit("USER ", 1)[1]
    assert "HEALTHCHECK" in text and "RUN" not in after
    for key in ("ENTRYPOINT", "CMD"):
        words = re.findall(rf"(?m)^{key} (\[.*\])$", text)
        assert isinstance(json.loads(words[-1]), list)


@pytest.mark.parametrize(
    ("package", "image"), [("package-debian", "worker-cpu"), ("package-cuda", "worker-cuda")]
)
def test_what_an_image_may_not_write_is_compiled_before(package: str, image: str) -> None:
    """Workers write no bytecode, and uv compiles none unless told to."""
    assert "PYTHONDONTWRITEBYTECODE=1" in stage(image)
    text = stage(package)
    assert re.search(r"UV_COMPILE_BYTECODE=1 tools/install_requirements\.sh", text)
    assert re.search(r"make setup .* -m compileall -q python", text)


def test_what_is_copied_exists() -> None:
    for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", TEXT):
        *sources, _ = line.split()
        for source in sources:
            assert (REPOSITORY / source).exists(), source
    names = {match[1] for each in STAGES if (match := re.match(r"\S+ AS (\S+)", each))}
    assert set(re.findall(r"--from=(\S+)", TEXT)) <= names


def test_the_routers_health_check_is_one_that_bash_understands() -> None:
    (check,) = set(re.findall(r'CMD (\["bash".*\])', TEXT))
    program, flag, script = json.loads(check)
    assert (program, flag) == ("bash", "-c")
    assert "/dev/tcp/127.0.0.1/8000" in script and "\\r\\n" in script
