"""KV from one GPU to another through the product's transport, and how near the link it comes.

    python benchmarks/gpu/handoff.py                     2 GPUs, under 2 minutes
    python benchmarks/gpu/handoff.py --device cpu        the same code on any machine, tiny

A source and a reader, a process each as in production, each seeing one GPU
only. In each one allocation of --pool-gb is looked at as a pool of blocks of
each size in turn, in the shape of Qwen3-4B (36 layers, 8 KV heads of 128,
bfloat16: 147,456 bytes a token). Both pools are worn before: --ages random
allocations and frees by the product's own block pool ("aged"), or blocks drawn
at random from the whole pool ("scattered"). The reader pulls prompts through
the transfer thread; after every pull all bytes are compared with what the
source wrote. The limit is one torch copy between the same two GPUs.

Median of --repeats pulls, each of other blocks: `wire` is from the first post
to the last byte seen to be there, `total` from the order to its report, `post`
what the transfer thread spent handing descriptors to NIXL. 904 tokens is the
last chunk of a prompt of 5,000 in chunks of 2,048: what prefill cannot hide.
With --digests each prompt is pulled again with digests of all that came (`--kv-digest all`):
`checked` is the time from the order to its report then, `digests` what computing them alone
takes, from the call to the values on the host; a source takes as long, beside the transfer.
The product tells UCX to keep no mappings (kv/cuda_ipc.py); a second run lets it,
and shows what that gains and what a dead source then keeps of its GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from handoff_sides import DEADLINE_S, READER, SOURCE, Pipe, Settings, copy_limit, read, serve
from worn_pools import TOKEN_BYTES, UNIT_TOKENS

from tasuki.bench.header import header, write_result

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "handoff_nvlink.json"


@contextmanager
def process(target: Any, settings: Settings, visible: str | None) -> Iterator[Pipe]:
    """`target` in a process of its own that sees only the GPUs `visible`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    child = context.Process(target=target, args=(theirs, settings), daemon=True)
    child.start()
    theirs.close()
    if before is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    try:
        yield ours
    finally:
        child.terminate()
        child.join(10)


def receive(pipe: Pipe) -> Any:
    """The next message.

    Raises:
        SystemExit: None came in time, or the process is gone; its own words are above.
    """
    try:
        if pipe.poll(DEADLINE_S):
            return pipe.recv()
    except EOFError:
        raise SystemExit("a process of the measurement ended") from None
    raise SystemExit(f"a process of the measurement was silent for {DEADLINE_S:g} s")


def used_gb(settings: Settings) -> float | None:
    """GB taken on the source's GPU, by whomever."""
    if settings.device == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run([*query, "-i", str(SOURCE)], capture_output=True, text=True, check=True)
    return float(done.stdout) * 2**20 / 1e9


def run(settings: Settings, cache: str, limit: dict[str, float]) -> dict[str, Any]:
    """All measurements with UCX keeping its mappings (`y`) or not (`n`)."""
    apart = settings.device == "cuda" and not settings.all_visible
    os.environ["UCX_CUDA_IPC_CACHE"] = cache
    print(f"UCX_CUDA_IPC_CACHE={cache}", flush=True)
    rows = []
    before = used_gb(settings)
    with process(read, settings, str(READER) if apart else None) as reader:
        with process(serve, settings, str(SOURCE) if apart else None) as source:
            receive(reader)
            for block_size in settings.block_sizes:
                reader.send((block_size, *receive(source)))
                for row in receive(reader):
                    rows.append(row)
                    show(row, limit)
        # The source is dead, its reader lives on and has forgotten it.
        time.sleep(1.0)
        after = used_gb(settings)
        reader.send(None)
    found = {"ucx_cuda_ipc_cache": cache, "rows": rows}
    if before is not None and after is not None:
        found["dead_source_keeps_gb"] = after - before
        print(f"the dead source keeps {after - before:.1f} GB of its GPU", flush=True)
    return found


def show(row: dict[str, Any], limit: dict[str, float]) -> None:
    """One line of the table."""
    share = row["gb_per_s"] / limit[str(row["tokens"])] if limit else float("nan")
    print(
        f"{row['block_size']:>6} {row['state']:<10}{row['tokens']:>7}{row['bytes'] / 1e6:>9.1f} MB"
        f"{row['descriptors']:>7.0f} desc{row['post_ms']:>8.2f} post{row['wire_ms']:>8.2f} wire"
        f"{row['total_ms']:>8.2f} total ms{row['gb_per_s']:>8.1f} GB/s, {share:.0%} of a copy"
        + (
            f"{row['checked_ms']:>8.2f} checked{row['digests_ms']:>8.2f} digests ms"
            if "checked_ms" in row
            else ""
        ),
        flush=True,
    )


def main() -> int:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--all-visible", action="store_true", help="see both GPUs in each process")
    parser.add_argument("--product-only", action="store_true", help="no UCX_CUDA_IPC_CACHE=y")
    parser.add_argument("--pool-gb", type=float, help="of each pool [110; cpu: 1]")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--digests", action="store_true", help="measure --kv-digest all, too")
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 904, 5000])
    parser.add_argument("--ages", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if wrong := [size for size in arguments.block_sizes if size % UNIT_TOKENS]:
        parser.error(f"--block-sizes {wrong}: must be multiples of {UNIT_TOKENS}")
    pool_gb = arguments.pool_gb or (110.0 if arguments.device == "cuda" else 1.0)
    settings = Settings(
        device=arguments.device,
        all_visible=arguments.all_visible,
        pool_bytes=int(pool_gb * 1e9),
        block_sizes=tuple(arguments.block_sizes),
        prompts=tuple(arguments.tokens),
        ages=arguments.ages,
        repeats=arguments.repeats,
        digests=arguments.digests,
    )
    begin_s = time.monotonic()
    with process(copy_limit, settings, None) as pipe:
        limit = receive(pipe)
    runs: list[dict[str, Any]] = []
    for cache in ("n",) if arguments.product_only else ("n", "y"):
        try:
            runs.append(run(settings, cache, limit))
        except SystemExit as error:  # the other way may work
            print(f"failed: {error}", flush=True)
            runs.append({"ucx_cuda_ipc_cache": cache, "failed": str(error)})
            continue
        settings = replace(settings, block_sizes=(32,))  # enough to compare
    for tokens, gb_per_s in limit.items():
        print(f"torch copy of {int(tokens) * TOKEN_BYTES / 1e6:.0f} MB: {gb_per_s:.1f} GB/s")
    print(f"pools of {pool_gb:g} GB, {time.monotonic() - begin_s:.0f} s in all")
    result = header("handoff", label="handoff", topology=None, model="qwen3-4b-shape")
    result |= {"pool_bytes": settings.pool_bytes, "ages": settings.ages}
    result |= {"torch_copy_gb_per_s": limit, "runs": runs}
    write_result(arguments.out, result)
    print(f"written: {arguments.out}")
    return int(any("failed" in each for each in runs))


if __name__ == "__main__":
    sys.exit(main())
