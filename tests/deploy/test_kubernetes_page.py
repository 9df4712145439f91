"""Values that docs/kubernetes.md names stand where it says: `helm --set` takes them as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from chart_rendering import CHART, REPOSITORY

VALUES: Mapping[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
PAGE = REPOSITORY / "docs" / "kubernetes.md"


def misplaced(text: str) -> Iterator[str]:
    """Paths that begin inside `worker`. A table of `worker` or of a pool says so in its head."""
    for table in re.findall(r"^\| value of `worker`.*?\n\n", text, re.MULTILINE | re.DOTALL):
        text = text.replace(table, "")
    for path in re.findall(r"`([a-z]\w*(?:\.\w+)*)(?:: [^`]*)?`", text):
        keys = path.split(".")
        if keys[0] not in VALUES and keys[0] in VALUES["worker"]:
            yield path


def test_paths_of_values_begin_at_the_root() -> None:
    assert not list(misplaced(PAGE.read_text()))


def test_one_that_does_not_is_found() -> None:
    table = "| value of `worker` or of a pool | meaning |\n|---|---|\n| `gpus` | GPUs |\n\n"
    text = table + "`drainS` is `worker.drainS`, `pdb.enabled: true`, `model.source`."
    assert list(misplaced(text)) == ["drainS", "pdb.enabled"]
