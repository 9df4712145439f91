"""Turns the GGUF file of the default model into a Hugging Face folder.

Run as `python -m tasuki.models.gguf_convert SOURCE.gguf FOLDER`, in a process
of its own: it needs over a gigabyte for a few seconds, which goes back with it.

The weights are saved as bfloat16. That is the type in which the original model
was published; the rounding (at most one part in 256) disappears beside the
step of the four-bit source, and the folder is half as large as in float32.

Three mends to what the GGUF loader of `transformers` makes of this file:
its `model_max_length` is 1e30 instead of the context length; its pre-tokenizer
does not split digits, so numbers would tokenize otherwise than in the original;
and its generation config carries settings that nobody chose.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, folder: Path) -> None:
    """Write config, safetensors, tokenizer and chat template to `folder`.

    Args:
        source: The GGUF file; the Llama architecture is assumed.
        folder: Destination; must exist.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.hf_quantizer = None  # it is dense now; saving would ask the quantizer
    model.config.__dict__.pop("quantization_config", None)
    model.config.__dict__.pop("_model_name_or_path", None)
    model.save_pretrained(folder)
    _mend_generation_config(folder)
    _save_tokenizer(source, folder, context_tokens=model.config.max_position_embeddings)


def _mend_generation_config(folder: Path) -> None:
    path = folder / "generation_config.json"
    made = json.loads(path.read_text())
    _write_json(path, {k: made[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")})


def _save_tokenizer(source: Path, folder: Path, context_tokens: int) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "bos_token": tokenizer.bos_token,
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.eos_token,
        "model_max_length": context_tokens,
        "pad_token": tokenizer.pad_token,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokenizer.unk_token,
    }
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tensors_digest(weights: Path) -> str:
    """BLAKE2b-256 over every tensor's name, type, shape and bytes, in the order of names.

    It does not depend on how the file orders or pads them, so it stays the same
    when another version of `safetensors` writes the file.

    Args:
        weights: A `.safetensors` file.
    """
    data = weights.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header: dict[str, dict[str, Any]] = json.loads(data[8 : 8 + header_bytes])
    body = memoryview(data)[8 + header_bytes :]
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(header.keys() - {"__metadata__"}):
        entry = header[name]
        first, last = entry["data_offsets"]
        digest.update(f"{name}:{entry['dtype']}:{entry['shape']}:".encode())
        digest.update(body[first:last])
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    """Command line: source file, destination folder."""
    source, folder = arguments
    convert(Path(source), Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
