"""Writes a LoRA adapter of random values, for checks with real workers of other engines."""

from __future__ import annotations

import json
import random
import struct
from array import array
from pathlib import Path
from typing import Any

RANK = 4
# Large enough that answers differ from the base's.
SPREAD = 0.1


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Writes an adapter of a Llama model's `q_proj` and `v_proj`. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    width, head = config["hidden_size"], config["head_dim"]
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    rng = random.Random(seed)
    header: dict[str, Any] = {}
    values = bytearray()
    for layer in range(config["num_hidden_layers"]):
        attention = f"base_model.model.model.layers.{layer}.self_attn"
        for module, count in heads.items():
            for half, shape in (("A", [RANK, width]), ("B", [count * head, RANK])):
                name = f"{attention}.{module}.lora_{half}.weight"
                begin = len(values)
                numbers = (rng.gauss(0, SPREAD) for _ in range(shape[0] * shape[1]))
                values += array("f", numbers).tobytes()
                offsets = [begin, len(values)]
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    written = json.dumps(header).encode()
    tensors = struct.pack("<Q", len(written)) + written + values
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(heads),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
