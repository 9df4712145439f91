"""A folder that brings its own model class runs only when told to trust it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from paged import Paged, Sequence
from tiny import save

from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.loader import load_model
from tasuki.models.spec_reader import read_spec

_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(__file__).with_name("ran").touch()


class OwnConfig(LlamaConfig):
    model_type = "own-kind"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", sys.path.copy())  # the cache's folder is added to it
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    path = tmp_path / "model"
    save("llama-gelu", path)
    (path / "own.py").write_text(_CODE)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["architectures"], config["model_type"] = ["OwnForCausalLM"], "own-kind"
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnForCausalLM",
    }
    file.write_text(json.dumps(config))
    return path


def test_refused_by_default(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="OwnForCausalLM"):
        read_spec(folder)
    assert not list(folder.parent.rglob("ran"))


def test_runs_when_trusted(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32, trust_remote_code=True)
    tokens = list(range(3, 20))
    got = Paged(model).step([(Sequence(tokens), 17)])
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.inference_mode():
        want = reference(torch.tensor([tokens])).logits[0]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("import no_such_package", "no_such_package"),
        ("from transformers import NoSuchName", "NoSuchName"),
        ("LlamaForCausalLM.no_such_attribute", "no_such_attribute"),
        ("assert 0, 'only on Sundays'", "only on Sundays"),
    ],
)
def test_code_that_does_not_run_is_refused_by_name(folder: Path, line: str, named: str) -> None:
    """As code for another version of transformers, or without the packages that it needs."""
    (folder / "broken.py").write_text(f"from .own import OwnForCausalLM\n{_CODE}\n{line}\n")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "broken.OwnForCausalLM"
    file.write_text(json.dumps(config))
    for weights in ("auto", "dummy"):
        with pytest.raises(ModelError, match=rf"cannot be loaded: .*{named}"):
            load_model(folder, dtype=torch.float32, trust_remote_code=True, weights=weights)
