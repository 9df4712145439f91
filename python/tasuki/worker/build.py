"""Builds what a worker is made of, before its threads start: model, pool, engine, transport.

The order matters: what can be refused is refused before the weights are
loaded; a GPU's pool takes what weights and steps leave; CUDA graphs come last,
they hold the pool's addresses.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tasuki.engine.cache_groups import pages_per_block
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.grammar import GrammarCompiler
from tasuki.engine.prefix_cache import blocks_of_chunk
from tasuki.errors import TasukiError
from tasuki.execution.distributed import make_store
from tasuki.execution.runner import ModelRunner
from tasuki.kv.identity import PROTOCOL_VERSION, model_identity
from tasuki.kv.layout import CacheLayout
from tasuki.kv.transport import Transport, create_transport
from tasuki.models.shard import check_ranks
from tasuki.models.spec import ModelSpec
from tasuki.models.spec_reader import read_spec
from tasuki.processor import usable_cores
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.config import DRAFT_TOKENS, WorkerConfig
from tasuki.worker.convert import role_at_start
from tasuki.worker.device import choose_device, choose_dtypes, device_name, dtype_name, network_of
from tasuki.worker.grammar_pool import GrammarPool
from tasuki.worker.hosts import Meeting, nodes_key, split_first
from tasuki.worker.memory import PoolSize, available_bytes, size_pool
from tasuki.worker.rank_messages import PoolShape, RankPlan
from tasuki.worker.rank_parts import RankParts, layout_of, meet
from tasuki.worker.ranks import RankError, Ranks
from tasuki.worker.startup import Phases
from tasuki.worker.state_blocks import fit_states

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """What is settled before the engine thread starts.

    Attributes:
        ranks: The others, if there are any.
        decode_rows: Rows that steps which only decode are padded to; none: they are not.
    """

    engine: Engine
    transport: Transport
    layout: CacheLayout
    identity: bytes
    info: pb.WorkerInfo
    grammars: GrammarPool
    ranks: Ranks | None
    decode_rows: Sequence[int]


def build(
    config: WorkerConfig,
    phases: Phases,
    on_rank_failure: Callable[[RankError], None] = lambda _: None,
) -> Built:
    """Build a worker's parts, and start its other ranks.

    Args:
        config: The settings.
        phases: Of the start.
        on_rank_failure: Called from a thread with the error of a rank that ended, be it
            while this builds or later.

    Raises:
        TasukiError: Settings, device, model, memory or transport do not allow it.
    """
    size = config.tensor_parallel
    device = choose_device(config.device, config.ranks_here)
    spec = read_spec(config.model, trust_remote_code=config.trust_remote_code)
    check_ranks(spec, size)
    threads = max(1, torch.get_num_threads() // config.ranks_here)
    if "OMP_NUM_THREADS" not in os.environ:
        # OpenMP sees no quota of a container, and threads beyond it stop all of them.
        threads = max(1, min(threads, int(usable_cores() / config.ranks_here)))
        torch.set_num_threads(threads)
    if size == 1:
        return _build(config, spec, device, phases, None)
    meeting = None
    if config.nodes:
        meeting = Meeting(*split_first(config.nodes[0]), nodes_key())
        log.info("waiting for the ranks of %s", ", ".join(config.nodes[1:]))
    ranks = Ranks(size, threads, on_rank_failure, meeting, config.ranks_here)
    try:
        return _build(config, spec, device, phases, ranks)
    except Exception as error:
        cause = error if isinstance(error, TasukiError) else ranks.explain(error)
        ranks.close()
        raise cause from None if cause is error else error


def _build(
    config: WorkerConfig,
    spec: ModelSpec,
    device: torch.device,
    phases: Phases,
    ranks: Ranks | None,
) -> Built:
    limits = config.limits(on_cuda=device.type == "cuda")
    with phases.phase("transport"):
        transport = create_transport(config.kv_transport, network=network_of(config, device))
    dtypes = choose_dtypes(config, spec, device)
    limits = fit_states(config, limits, spec, dtypes)
    plan = RankPlan(config, limits, dtypes, device.type)
    one = layout_of(spec, plan)
    if device.type == "cpu":  # there the pool's share is known before the load
        size = _pool_size(plan, spec, one, available_bytes())
    if ranks is not None:
        store = make_store(ranks.size)
        plan = replace(plan, port=store.port)
        ranks.build(plan)
    with phases.phase("ranks"):
        collective = meet(plan)
    parts = RankParts(plan, spec, collective, phases)
    available = parts.available_bytes()
    if ranks is not None:
        available = ranks.least_available(available)
    if available is not None:
        size = _pool_size(plan, spec, one, available * config.tensor_parallel, spare=False)
    if ranks is not None:
        ranks.make_pools(PoolShape(size.num_blocks, size.max_model_len))
    pool, layout = parts.make_pool(size.num_blocks, transport)
    identity = model_identity(
        config.model,
        dtype=dtypes.model,
        kv_dtype=dtypes.kv,
        weights=config.load_format,
        quantization="none" if spec.fp8_blocks else config.quantization,
        kv_scales=parts.kv_scales.exponents,
        states=spec.told_states(dtypes.model),
    )
    attention = parts.attend(pool)
    runner = ModelRunner(parts.model, attention, pool, collective, ranks, len(layout.groups))
    parts.capture(runner, attention, size.max_model_len)
    with phases.phase("transport"):
        transport.register(pool, layout)
    if ranks is not None:
        with phases.phase("ranks"):
            ranks.await_ready()
    return Built(
        Engine(_engine_config(plan, spec, size, layout, identity), runner),
        transport,
        layout,
        identity,
        _info(plan, spec, size, layout, identity, device),
        GrammarPool(GrammarCompiler(config.model, spec.vocab_size, spec.eos_token_ids)),
        ranks,
        runner.decode_rows,
    )


def _pool_size(
    plan: RankPlan, spec: ModelSpec, one: CacheLayout, available: int, spare: bool = True
) -> PoolSize:
    """The pool's size; bytes are those of all ranks.

    Args:
        plan: Settings and limits.
        spec: Of the model.
        one: One block on one rank.
        available: For all ranks' pools.
        spare: See `size_pool`.
    """
    config, block_bytes = plan.config, one.block_bytes * plan.config.tensor_parallel
    size = size_pool(
        block_bytes=block_bytes,
        block_size=plan.limits.block_size,
        model_context=spec.max_position,
        kv_memory=config.kv_memory,
        max_model_len=config.max_model_len,
        available=available,
        spare=spare,
        groups=one.groups,
    )
    log.info(
        "KV pool: %d blocks of %d tokens, %.0f MB (--kv-memory); requests of up to %d tokens"
        " (--max-model-len)",
        size.num_blocks,
        plan.limits.block_size,
        size.num_blocks * block_bytes / 1e6,
        size.max_model_len,
    )
    return size


def _engine_config(
    plan: RankPlan, spec: ModelSpec, size: PoolSize, layout: CacheLayout, identity: bytes
) -> EngineConfig:
    return EngineConfig(
        block_size=plan.limits.block_size,
        groups=layout.groups,
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        max_batched_tokens=plan.limits.max_batched_tokens,
        itl_target_s=plan.config.itl_target_s(on_cuda=plan.device_type == "cuda"),
        longest_step_s=plan.config.longest_step_s,
        max_running_requests=plan.limits.max_running_requests,
        identity=identity,
        vocab_size=spec.vocab_size,
        overlap=plan.device_type == "cuda",
        draft_tokens=DRAFT_TOKENS if plan.config.speculate == "prompt-lookup" else 0,
        step_timeout_s=plan.config.step_timeout_s,
    )


def _info(
    plan: RankPlan,
    spec: ModelSpec,
    size: PoolSize,
    layout: CacheLayout,
    identity: bytes,
    device: torch.device,
) -> pb.WorkerInfo:
    config, limits, dtypes = plan.config, plan.limits, plan.dtypes
    return pb.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        engine_id=uuid.uuid4().hex,
        role=role_at_start(config.role),
        model=config.served_name or config.model.name,
        identity=identity,
        vocab_size=spec.vocab_size,
        max_model_len=size.max_model_len,
        block_size=limits.block_size,
        num_blocks=int(size.num_blocks / pages_per_block(layout.groups)),
        dtype=dtype_name(dtypes.model),
        kv_dtype=dtype_name(dtypes.kv),
        tensor_parallel_size=config.tensor_parallel,
        version=importlib.metadata.version("tasuki"),
        device=device_name(device),
        max_running_sequences=limits.max_running_requests,
        max_batched_tokens=limits.max_batched_tokens,
        kv_event_blocks=blocks_of_chunk(limits.block_size),
    )
