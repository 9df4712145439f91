"""YAML whose plain words mean what a person expects."""

from __future__ import annotations

import re

import yaml


class Yaml12(yaml.SafeLoader):
    """Reads plain words as YAML 1.2 does.

    YAML 1.1, PyYAML's own, makes 300250 of `5000:250` (sixties) and true of `on`.

    Source: YAML 1.2.2, section 10.3.2, tag resolution of the core schema.
    """


Yaml12.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    Yaml12.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )
# 010 is ten, not eight.
Yaml12.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
