"""Layers of transformers that keep a state: what it is, and that the trial proves it is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import save_tiny_model

from tasuki.attention.states import StepStates
from tasuki.models.errors import UnsupportedModelError
from tasuki.models.loader import load_model
from tasuki.models.spec import StateTensor
from tasuki.models.spec_reader import read_spec


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {name: save_tiny_model(root / name, name) for name in ("short-conv", "mamba")}


def test_states_are_found_without_weights(folders: dict[str, Path]) -> None:
    spec = read_spec(folders["short-conv"])
    conv = StateTensor(recurrent=False, index=0, shape=(64, 3), float32=False)
    assert (spec.states, spec.kv_layers) == ({0: (conv,), 2: (conv,)}, (1,))
    spec = read_spec(folders["mamba"])
    conv = StateTensor(recurrent=False, index=0, shape=(160, 4), float32=False)
    scan = StateTensor(recurrent=True, index=0, shape=(8, 16, 16), float32=True)
    assert (spec.states, spec.kv_layers) == ({0: (conv, scan), 2: (conv, scan)}, (1,))


@pytest.mark.parametrize("lost", ["read", "written"])
def test_the_trial_finds_a_state_that_is_lost(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    begin = StepStates.begin
    if lost == "read":

        def forgetful(self: StepStates, layer: int, run: Any) -> list[torch.Tensor]:
            return [part.zero_() for part in begin(self, layer, run)]

        monkeypatch.setattr(StepStates, "begin", forgetful)
    else:
        monkeypatch.setattr(StepStates, "commit", lambda self: None)
    with pytest.raises(UnsupportedModelError, match=r"its logits .* differ"):
        load_model(folders["short-conv"], dtype=torch.float32)


def test_a_model_of_states_alone_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import FalconMambaConfig

    config = FalconMambaConfig(num_hidden_layers=2).to_dict()
    config["architectures"] = ["FalconMambaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="FalconMambaForCausalLM is not supported"):
        read_spec(tmp_path)
