"""Renders against the API's own description, unknown fields refused.

It comes with Kubernetes' Go module, which `make cluster-tools` downloads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.yaml"))
# Of operators: their descriptions are elsewhere.
FOREIGN = {"ScaledObject", "PodMonitor"}

Object = dict[str, Any]


@pytest.fixture(scope="module")
def definitions() -> Object:
    """Of all kinds, with no fields but those that are described."""
    pinned = (REPOSITORY / "deploy/cluster-tools/go.mod").read_text()
    found = re.search(r"k8s\.io/kubernetes (v\S+)", pinned)
    assert found is not None
    modules = Path(os.environ.get("GOMODCACHE", Path.home() / "go/pkg/mod"))
    file = modules / f"k8s.io/kubernetes@{found[1]}/api/openapi-spec/swagger.json"
    if not file.exists():
        pytest.skip(f"no {file}: `make cluster-tools` gets it")
    described: Object = json.loads(file.read_text())["definitions"]
    for name, each in described.items():
        if each.get("format") == "int-or-string" or name.endswith("resource.Quantity"):
            each.clear()
            each["type"] = ["string", "number"]
        elif "properties" in each:
            each.setdefault("additionalProperties", False)
    return described


def faults(definitions: Object, text: str) -> Iterator[str]:
    names = {
        (kind["group"], kind["version"], kind["kind"]): name
        for name, each in definitions.items()
        for kind in each.get("x-kubernetes-group-version-kind", [])
    }
    for each in yaml.load_all(text, Loader=yaml.CSafeLoader):
        if each and each["kind"] not in FOREIGN:
            group, _, version = each["apiVersion"].rpartition("/")
            name = names[group, version, each["kind"]]
            schema = {"$ref": f"#/definitions/{name}", "definitions": definitions}
            for error in jsonschema.Draft7Validator(schema).iter_errors(each):
                yield f"{each['kind']} {list(error.absolute_path)}: {error.message}"


@pytest.mark.parametrize("path", GOLDEN, ids=[path.stem for path in GOLDEN])
def test_a_render_is_as_the_api_describes_it(definitions: Object, path: Path) -> None:
    assert list(faults(definitions, path.read_text())) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("startupProbe:", "startupProb:"),
        ("containerPort: 7001", "containerPort: grpc"),
        ("topologyKey:", "topologyKeys:"),
    ],
)
def test_a_mistake_is_found(definitions: Object, right: str, wrong: str) -> None:
    text = GOLDEN[0].read_text()
    assert right in text
    assert list(faults(definitions, text.replace(right, wrong)))
