"""A small random model that FlashInfer has kernels for, and servers that run it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from support.client import Client
from support.models import CONTEXT_TOKENS, VOCAB_SIZE, _tokenizer

from tasuki.bench.serving import Serving
from tasuki.launch.config import Topology

HEAD_DIM = 64


def save_model(folder: Path, family: str = "qwen3") -> Path:
    """Write a Qwen3, or an OLMo 2, of two layers with heads of 64; gives `folder`."""
    from transformers import AutoModelForCausalLM, Olmo2Config, Qwen3Config

    if folder.exists():
        return folder
    torch.manual_seed(0)
    config = {"qwen3": Qwen3Config, "olmo2": Olmo2Config}[family](
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.25,  # so that every answer depends on all that is in the cache
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    generation = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    _tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path, topology: Topology, log: Path, **options: object) -> Iterator[Client]:
    """`tasuki serve` on GPUs, a client for it; failures carry the log's end."""
    said = {"model": model, "device": "cuda", "gpu-memory-utilization": 0.3}
    said |= {"max-running-requests": 32, **options}  # few graphs: a quicker start
    server = Serving(topology, said, log)
    client = Client(server.url, server.model)
    try:
        yield client
    except BaseException as error:
        error.add_note(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        client.close()
        server.stop()
