"""How much of a GPU's memory the block pool may take: measured by running one largest step.

    |<------------------------ the GPU ------------------------>|
    |<------- gpu_memory_utilization ------->|                  |
    | used: weights, CUDA, others |  step  | pool |   graphs     |

`step` is the peak of the largest step there can be, logits and sampling
included; it runs once, over a small pool of its own, which is given back.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.engine.api import Leg, RequestSpec, SamplingParams
from tasuki.engine.plan import Draw
from tasuki.engine.request import Request
from tasuki.engine.step_size import most_logits
from tasuki.execution.sampler import Sampler
from tasuki.models.attending import cache_groups
from tasuki.models.base import CausalModel
from tasuki.worker.config import ConfigError, Limits

log = logging.getLogger(__name__)


def pool_bytes(
    model: CausalModel,
    attend: Callable[[torch.Tensor], AttentionBackend],
    make_pool: Callable[[int], torch.Tensor],
    limits: Limits,
    utilization: float,
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> int:
    """Bytes that the pool may take, once the weights are on the device.

    Args:
        model: On the device.
        attend: Makes attention over a pool.
        make_pool: Makes a pool of so many blocks.
        limits: Of the steps.
        utilization: Share of all of the device's memory that may be used.
        whole: Makes a step's logits of all ranks' parts (`JointLogits`).

    Raises:
        ConfigError: None is left.
    """
    _, total = torch.cuda.mem_get_info()
    step_bytes = _largest_step(model, attend, make_pool, limits, whole)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    left = int(utilization * total) - (total - free) - step_bytes
    log.info(
        "GPU memory: %.1f GB, of them %.1f used, a step of %d tokens takes %.1f more; at"
        " --gpu-memory-utilization %g that leaves %.1f",
        total / 1e9,
        (total - free) / 1e9,
        limits.max_batched_tokens,
        step_bytes / 1e9,
        utilization,
        left / 1e9,
    )
    if left <= 0:
        own = torch.cuda.memory_reserved()
        raise ConfigError(
            f"gpu-memory-utilization is {utilization:g}, which leaves nothing for KV: of the"
            f" GPU's {total} bytes {total - free} are used, {own} of them by this worker's weights,"
            f" and a step takes {step_bytes}: end what else runs there, raise"
            f" gpu-memory-utilization or lower max-batched-tokens"
        )
    return left


@torch.inference_mode()
def _largest_step(
    model: CausalModel,
    attend: Callable[[torch.Tensor], AttentionBackend],
    make_pool: Callable[[int], torch.Tensor],
    limits: Limits,
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> int:
    """Peak of memory over one step, beyond what is allocated before it; bytes."""
    lengths = _lengths(limits.max_batched_tokens, model.spec.max_position)
    tables = [-(-length // limits.block_size) for length in lengths]
    groups = len(cache_groups(model.spec))
    pool = make_pool(sum(tables))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention = attend(pool)
    batch = _batch(lengths, tables, limits, pool.device, groups)
    attention.plan(batch)
    logits = whole(model.forward(batch, attention))
    if logits.shape[-1] == model.spec.vocab_size:  # the first rank's; only it samples
        draws = _costly_draws(most_logits(limits.max_running_requests))
        rows = [index % len(logits) for index in range(len(draws))]
        Sampler(logits.device).sample(logits, rows, draws)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _costly_draws(count: int) -> list[Draw]:
    """Draws that take as much memory as any: drawn at random, penalized, scored."""
    params = SamplingParams(
        seed=0,
        max_tokens=2,
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        min_tokens=1,
        logprobs=20,
    )
    spec = RequestSpec("profile", Leg.COLOCATED, [0], params)
    requests = [Request(spec, index, b"", 0.0) for index in range(count)]
    return [Draw.next(request.sequences[0], 0) for request in requests]


def _lengths(tokens: int, longest: int) -> list[int]:
    """`tokens` as prompts of at most `longest`."""
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + [rest] * bool(rest)


def _batch(
    lengths: list[int], tables: list[int], limits: Limits, device: torch.device, groups: int = 1
) -> Batch:
    """Whole prompts of `lengths` tokens, in blocks that follow one another.

    All cache groups use the same ones: what is computed is of no interest.
    """
    positions = [torch.arange(length) for length in lengths]
    rows = torch.full((len(lengths), max(tables)), 0, dtype=torch.int32)
    slots, first = [], 0
    for row, (length, blocks) in enumerate(zip(lengths, tables, strict=True)):
        rows[row] = first
        rows[row, :blocks] = torch.arange(first, first + blocks)
        slots.append(first * limits.block_size + torch.arange(length))
        first += blocks
    total = sum(lengths)
    wanted = min(total, most_logits(limits.max_running_requests))
    places = torch.cat(slots).to(device), rows.to(device)
    return Batch(
        tokens=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        slots=places[0],
        block_tables=places[1],
        query_lens=lengths,
        context_lens=lengths,
        logits_rows=torch.arange(total - wanted, total, device=device),
        num_decodes=0,
        more_groups=(places,) * (groups - 1),
        cuts=[[length] for length in lengths],
    )
