"""Does the simulator give the shapes of results that others have published? Data sheets alone.

    python benchmarks/published_shapes.py                     a minute, no GPU

Step times are estimates, so figures differ from what was published; what must agree is which
deployment wins and where that turns. Each *shape* has figures of several deployments, and a claim
about them that holds or not:

- two GPUs without NVLink: a strict 1:1 split is slower than tensor parallelism over both
- TTFT of a batch of prompts rises steeply once batch x prompt is more than a step computes in the
  time of its weights, and smaller steps give better ones in the mean
- 3:1 (prefill to decode) is worse than 1:3; at the highest load colocated workers have the most
  tokens. That 1:1, 1:2 and 1:3 are the best in turn as the load falls is not tried: it was
  published for another model
- a slow transport turns a split from the best design into the worst
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from simulator_accuracy import RESULTS, simulate

sys.path.append(str(Path(__file__).with_name("gpu")))
from shapes import QWEN3_4B, QWEN3_30B_A3B, write_model

from tasuki.bench.header import header, write_result

Options = Mapping[str, Any]
STRICT_SPLIT: Options = {"prefill": 1, "decode": 1, "strict-roles": True}
# Between GPUs of one machine by PCIe and host memory.
PCIE: Options = {"link-gb-s": 20}


class Shapes:
    """Runs the simulator, and keeps what it says.

    Args:
        folder: Gets the models' shapes.
    """

    def __init__(self, folder: Path) -> None:
        self._small = write_model(folder / "qwen3-4b", QWEN3_4B)
        self._experts = write_model(folder / "qwen3-30b-a3b", QWEN3_30B_A3B)

    def all(self) -> Iterator[dict[str, Any]]:
        """Every shape."""
        yield self.two_gpus_without_nvlink()
        yield self.steep_ttft()
        yield self.ratios()
        yield self.slow_transport()

    def two_gpus_without_nvlink(self) -> dict[str, Any]:
        """Source: two RTX PRO 6000, Qwen3-4B, random 1024:1024, 1,000 prompts, 100 at a time."""
        load = {"lengths": "1024:1024", "num-requests": 1_000, "max-concurrency": 100}
        gpu = {"gpu": "rtxpro6000", "model": self._small, **PCIE}
        figures = {
            "1 prefill + 1 decode, strict": self._run(gpu, STRICT_SPLIT, load),
            "1 mixed over both": self._run(gpu, {"mixed": 1, "tensor-parallel": 2}, load),
        }
        split, divided = figures.values()
        published = {
            "1 prefill + 1 decode, strict": {"output_throughput": 4_465, "ttft_mean_ms": 3_290},
            "1 mixed over both": {"output_throughput": 6_705, "ttft_mean_ms": 125},
        }
        holds = (
            divided["output_throughput"] > 1.2 * split["output_throughput"]
            and divided["ttft_mean_ms"] < split["ttft_mean_ms"]
        )
        return {
            "shape": "two RTX PRO 6000 without NVLink: tensor parallelism is faster than 1:1",
            "figures": figures,
            "published": published,
            "holds": holds,
        }

    def steep_ttft(self) -> dict[str, Any]:
        """TTFT of a batch that comes at once, by its size."""
        gpu = {"gpu": "h100", "model": self._small}
        figures = {}
        for batch, tokens in ((1, 128), (4, 128), (16, 128), (64, 128), (64, 512), (64, 2_048)):
            for step in (16_384, 2_048):
                load = {
                    "lengths": f"{tokens}:16",
                    "num-requests": batch,
                    "max-concurrency": batch,
                    "max-batched-tokens": step,
                }
                name = f"{batch} x {tokens}, steps of {step}"
                figures[name] = self._run(gpu, STRICT_SPLIT, load)
        ttft = {name: found["ttft_mean_ms"] for name, found in figures.items()}
        flat = ttft["4 x 128, steps of 16384"] / ttft["1 x 128, steps of 16384"]
        steep = ttft["64 x 2048, steps of 16384"] / ttft["64 x 128, steps of 16384"]
        smaller = ttft["64 x 2048, steps of 2048"] < ttft["64 x 2048, steps of 16384"]
        return {
            "shape": "TTFT by batch x prompt: flat at first, then steep; smaller steps are better",
            "figures": figures,
            "holds": flat < 2.0 and steep > 8.0 and smaller,
        }

    def ratios(self) -> dict[str, Any]:
        """Source: gpt-oss-120b on H100s, 5000:250. Here another model with experts, 4 GPUs."""
        gpu = {"gpu": "h100", "model": self._experts}
        designs: dict[str, Options] = {
            f"{prefill}:{4 - prefill} strict": {
                "prefill": prefill,
                "decode": 4 - prefill,
                "strict-roles": True,
            }
            for prefill in (1, 2, 3)
        }
        designs["4 mixed"] = {"mixed": 4}
        figures, best = {}, {}
        dominated = True
        for users in (4, 16, 64, 256):
            load = {"lengths": "5000:250", "num-requests": 12 * users, "max-concurrency": users}
            found = {name: self._run(gpu, design, load) for name, design in designs.items()}
            figures.update({f"{name}, {users} users": run for name, run in found.items()})
            few, many = found["3:1 strict"], found["1:3 strict"]
            dominated &= few["output_throughput"] < many["output_throughput"]
            dominated &= few["tpot_mean_ms"] > many["tpot_mean_ms"]
            best[users] = {
                "tokens": max(found, key=lambda name: found[name]["output_throughput"]),
                "TPOT": min(found, key=lambda name: found[name]["tpot_mean_ms"]),
            }
        return {
            "shape": "5000:250 with experts: 3:1 is worse than 1:3 at every load; at the highest"
            " one colocated workers have the most tokens, 1:3 the shortest TPOT",
            "figures": figures,
            "best": best,
            "holds": dominated and best[256] == {"tokens": "4 mixed", "TPOT": "1:3 strict"},
        }

    def slow_transport(self) -> dict[str, Any]:
        """A split whose KV moves ever more slowly, and colocated workers."""
        gpu = {"gpu": "h200", "model": self._small}
        load = {"lengths": "5000:250", "num-requests": 600, "max-concurrency": 48}
        figures = {"2 mixed": self._run(gpu, {"mixed": 2}, load)}
        for rate in (100, 10, 1, 0.25):
            design = {**STRICT_SPLIT, "link-gb-s": rate}
            figures[f"1:1 strict, {rate:g} GB/s"] = self._run(gpu, design, load)
        fast, slow = figures["1:1 strict, 100 GB/s"], figures["1:1 strict, 0.25 GB/s"]
        colocated = figures["2 mixed"]
        return {
            "shape": "slow transport: a split is steadier than colocated over a fast link, and"
            " slower than it over a slow one",
            "figures": figures,
            "holds": fast["itl_p99_ms"] < colocated["itl_p99_ms"]
            and slow["output_throughput"] < 0.5 * fast["output_throughput"]
            and slow["output_throughput"] < colocated["output_throughput"],
        }

    def _run(self, *options: Options) -> dict[str, float]:
        merged = {name: value for each in options for name, value in each.items()}
        found = simulate(merged, {})
        return {
            "output_throughput": found["output_throughput"],
            "ttft_mean_ms": found["ttft_ms"]["mean"],
            "tpot_mean_ms": found["tpot_ms"]["mean"],
            "itl_p99_ms": found["itl_ms"]["p99"],
        }


def main() -> None:
    """Simulate, say what holds, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "published_shapes.json")
    options = parser.parse_args()
    say: Callable[..., None] = print
    rows = []
    with tempfile.TemporaryDirectory(prefix="tasuki-shapes-") as folder:
        for each in Shapes(Path(folder)).all():
            rows.append(each)
            say("holds: " if each["holds"] else "DOES NOT HOLD: ", each["shape"], flush=True)
            for name, figures in each["figures"].items():
                say("  ", name, {key: round(value, 1) for key, value in figures.items()})
    content = header("published_shapes", label="shapes", topology=None, model="shapes")
    write_result(options.output, {**content, "rows": rows})


if __name__ == "__main__":
    main()
