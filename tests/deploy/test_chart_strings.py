"""What people write in values stays what it is, and names fit: renders with unusual words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import render

HERE = Path(__file__).parent
STRINGS = HERE / "golden/strings.yaml"
HOSTS = HERE / "values/hosts.yaml"
CLAIM = HERE / "values/claim.yaml"
# Fields of which each value is a string for Kubernetes, or an object of strings.
STRING_FIELDS = {
    "claimName",
    "key",
    "labels",
    "matchLabels",
    "mountPath",
    "name",
    "priorityClassName",
    "runtimeClassName",
    "secretName",
    "selector",
    "serviceAccountName",
    "sizeLimit",
    "subPath",
    "topologyKey",
}

Object = dict[str, Any]


def rendered(text: str) -> list[Object]:
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]


def workloads(text: str) -> dict[str, Object]:
    """The pod specification of each Deployment and StatefulSet, by name."""
    kinds = ("Deployment", "StatefulSet")
    found = [each for each in rendered(text) if each["kind"] in kinds]
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in found}


def fields(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every field of nested objects: path, name, value."""
    if isinstance(value, list):
        for each in value:
            yield from fields(each, path)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield f"{path}.{name}", name, each
            yield from fields(each, f"{path}.{name}")


def test_words_that_look_like_numbers_stay_strings() -> None:
    checked = set()
    for path, name, value in fields(rendered(STRINGS.read_text())):
        if name in STRING_FIELDS and not path.endswith("matchExpressions.key"):
            leaves = value.values() if isinstance(value, dict) else [value]
            leaves = [each for each in leaves if not isinstance(each, dict)]
            assert all(isinstance(each, str) for each in leaves), (path, value)
            checked.add(name)
        if name in ("args", "command"):
            assert all(isinstance(word, str) for word in value), (path, value)
    assert checked == STRING_FIELDS


def test_names_and_paths_are_kept_whole() -> None:
    pods = workloads(STRINGS.read_text())
    (router,) = pods["demo-tasuki-router"]["containers"]
    assert "--model=llama: 8B #1=/models #1/8B #1" in router["args"]
    (worker,) = pods["demo-tasuki-1"]["containers"]
    assert {"--model=/models #1/8B #1", "--served-name=llama: 8B #1"} <= set(worker["args"])
    mounts = {mount["name"]: mount for mount in worker["volumeMounts"]}
    assert mounts["model"] == {
        "name": "model",
        "mountPath": "/models #1",
        "readOnly": True,
        "subPath": "1e3",
    }


def test_near_is_added_to_the_affinity_that_is_given() -> None:
    affinity = workloads(STRINGS.read_text())["demo-tasuki-1"]["affinity"]
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    assert [each["weight"] for each in affinity["nodeAffinity"][preferred]] == [5]
    given, near = affinity["podAffinity"][preferred]
    assert (given["weight"], given["podAffinityTerm"]["topologyKey"]) == (10, "zone")
    assert (near["weight"], near["podAffinityTerm"]["topologyKey"]) == (20, "1")
    labels = near["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels["tasuki.dev/component"] == "worker"


@pytest.mark.system
@pytest.mark.parametrize(
    ("release", "more", "says"),
    [
        (
            "a" * 36,
            "",
            f"pools.prefill: the StatefulSet {'a' * 36}-tas-prefill-host1 has a name of 54"
            " characters, the limit is 52: use a pool's name of at most 5 characters, or a"
            " release's name of at most 31",
        ),
        (
            "tasuki-" + "a" * 31,
            "pools.prefill.hosts=11",
            "-host10 has a name of 53 characters, the limit is 52: use a pool's name of at most 6"
            " characters, or a release's name of at most 37",
        ),
        (
            "demo",
            "pools.prefill-host1.role=prefill,pools.prefill-host1.replicas=1",
            "pools.prefill-host1: the name is that of host 1 of pools.prefill, use another one",
        ),
        ("1demo", "", 'the release is called "1demo"'),
        ("demo.ml", "", 'the release is called "demo.ml"'),
    ],
)
def test_names_that_kubernetes_refuses_are_refused(release: str, more: str, says: str) -> None:
    done = render(release, HOSTS, *(("--set", more) if more else ()))
    assert done.returncode != 0 and says in done.stderr, done.stderr


@pytest.mark.system
def test_the_longest_names_that_are_allowed_fit() -> None:
    done = render("a" * 31, HOSTS)
    assert done.returncode == 0, done.stderr
    named = [each["metadata"]["name"] for each in rendered(done.stdout)]
    assert max(map(len, named)) <= 63
    stateful = [name for name in workloads(done.stdout) if name.endswith("-host1")]
    assert [len(name) for name in stateful] == [52]


@pytest.mark.system
@pytest.mark.parametrize(
    ("mounted", "source", "fits"),
    [
        ("/models", "/models", True),
        ("/models/", "/models/llama", True),
        ("/", "/model", True),
        ("/models", "owner/model", True),
        ("/models", "/model", False),
        ("/model", "/models/llama", False),
    ],
)
def test_the_model_is_in_its_volume(mounted: str, source: str, fits: bool) -> None:
    given = ("--set", f"model.mountPath={mounted}", "--set", f"model.source={source}")
    done = render("demo", CLAIM, *given)
    assert (done.returncode == 0) == fits, done.stderr
    assert fits or f"model.source is {source}, and model.volume is mounted at" in done.stderr
