"""Writes a model folder with random bfloat16 weights as transformers saves them.

    python benchmarks/gpu/random_model.py --shape qwen3-4b models/qwen3-4b

What it writes (8 GB for Qwen3-4B) loads like a downloaded checkpoint: safetensors in several
files with an index.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from shapes import add_shape_option, config_of, write_model
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_shape_option(parser)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    folder = write_model(args.folder, config_of(args.shape, args.tiny))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    model.save_pretrained(folder, max_shard_size="2GB")
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"{written / 1e9:.1f} GB of weights in {folder}")


if __name__ == "__main__":
    main()
