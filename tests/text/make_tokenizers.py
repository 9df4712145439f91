"""Train the small tokenizers under `models/`.

The results are committed, so that golden files do not depend on the trainers
(not all of them give the same twice); folders that are there are left alone.
Each looks like a model's, without weights:

* `byte_level`: byte-level BPE with single digits (GPT-2, SmolLM2).
* `split_regex`: byte-level BPE behind a long regular expression (Llama 3, Qwen).
* `byte_fallback`: sentencepiece-like BPE with `▁`, byte tokens and a BOS (Llama 2).
* `llama_class`: the same, loaded by the class that transformers builds anew.
* `metaspace`: Unigram with Metaspace on both sides.
* `wordpiece`: BERT-like, lower case.

    python tests/text/make_tokenizers.py
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

HERE = Path(__file__).parent
CORPUS = (HERE / "corpus.txt").read_text(encoding="utf-8").splitlines(keepends=True)
CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GPT4_STYLE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(pre_tokenizer: Any) -> Tokenizer:
    """Train a byte-level BPE behind the given splitter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=CHAT_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Train a BPE on `▁` text and rebuild it with the 256 byte tokens."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, limit_alphabet=90, special_tokens=["<unk>"], show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    names = first + [piece for piece in pieces if piece not in first]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """Train a Unigram model with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "</s>", "<pad>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """Train a WordPiece model."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save(name: str, tokenizer: Tokenizer, config: dict[str, Any], model: dict[str, Any]) -> None:
    """Write the folder of one tokenizer."""
    folder = HERE / "models" / name
    if folder.exists():
        return
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **config}
    for file, content in (("tokenizer_config.json", config), ("config.json", model)):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / file).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Train and save them all."""
    llama = {"model_type": "gpt_neox", "max_position_embeddings": 512}
    chat = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
        "pad_token": None,
    }
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    save("byte_level", byte_level(digits), chat, {**llama, "eos_token_id": 2})
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT4_STYLE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    extra = {**chat, "extra_special_tokens": ["<|late|>"], "image_token": "<image>"}
    save("split_regex", byte_level(split), extra, {**llama, "eos_token_id": [2, 0]})
    save(
        "byte_fallback",
        byte_fallback(),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        {**llama, "eos_token_id": 2},
    )
    save(
        "llama_class",
        byte_fallback(),
        {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>"},
        {"model_type": "llama", "max_position_embeddings": 512, "eos_token_id": 2},
    )
    save("metaspace", metaspace(), {"eos_token": "</s>", "unk_token": "<unk>"}, llama)
    save("wordpiece", wordpiece(), {"sep_token": "[SEP]", "unk_token": "[UNK]"}, llama)


if __name__ == "__main__":
    main()
