"""Builds what a worker is made of, before its threads start: model, pool, engine, transport.

The order matters: what can be refused is refused before the weights are
loaded; a GPU's pool takes what weights and steps leave; CUDA graphs come last,
they hold the pool's addresses.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import uuid
from dataclasses import dataclass

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.select import make_attention
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.runner import ModelRunner
from tasuki.kv.identity import PROTOCOL_VERSION, model_identity
from tasuki.kv.layout import CacheLayout
from tasuki.kv.transport import Transport, create_transport
from tasuki.models.base import CausalModel
from tasuki.models.loader import compile_model, load_model
from tasuki.models.spec import ModelSpec, read_spec
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.config import Limits, WorkerConfig
from tasuki.worker.convert import ROLE_TO_WIRE
from tasuki.worker.device import Dtypes, choose_device, choose_dtypes, dtype_name
from tasuki.worker.memory import PoolSize, available_bytes, size_pool
from tasuki.worker.profile import pool_bytes
from tasuki.worker.startup import Phases

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """What is settled before the first thread starts."""

    engine: Engine
    transport: Transport
    layout: CacheLayout
    identity: bytes
    info: pb.WorkerInfo


def build(config: WorkerConfig, phases: Phases) -> Built:
    """Build a worker's parts.

    Raises:
        TasukiError: Settings, device, model, memory or transport do not allow it.
    """
    device = choose_device(config.device)
    limits = config.limits(on_cuda=device.type == "cuda")
    with phases.phase("transport"):
        transport = create_transport(config.transport, host=config.host)
    spec = read_spec(config.model, trust_remote_code=config.trust_remote_code)
    dtypes = choose_dtypes(config, spec, device)
    layout_of = functools.partial(
        CacheLayout,
        kv_heads=spec.num_kv_heads,
        layers=spec.num_layers,
        block_size=limits.block_size,
        head_dim=spec.head_dim,
        dtype=dtypes.kv,
    )
    if device.type == "cpu":  # there the pool's share is known before the load
        size = _pool_size(config, spec, limits, layout_of(num_blocks=1), available_bytes())
    with phases.phase("weights"):
        model = load_model(
            config.model,
            dtype=dtypes.model,
            device=device,
            trust_remote_code=config.trust_remote_code,
            weights=config.load_format,
        )
    if device.type == "cuda" and not spec.native:
        with phases.phase("compile"):
            compile_model(model)
    attend = functools.partial(_attend, spec, dtypes)
    if device.type == "cuda":
        with phases.phase("profiling"):
            available = pool_bytes(
                model,
                attend,
                lambda blocks: layout_of(num_blocks=blocks).allocate(device),
                limits,
                config.gpu_memory_utilization,
            )
        size = _pool_size(config, spec, limits, layout_of(num_blocks=1), available, spare=False)
    layout = layout_of(num_blocks=size.num_blocks)
    with phases.phase("pool"):
        pool = layout.allocate(device)
    identity = model_identity(
        config.model, dtype=dtypes.model, kv_dtype=dtypes.kv, weights=config.load_format
    )
    with phases.phase("graphs"):
        engine = _engine(model, attend(pool), pool, spec, limits, size, identity)
    with phases.phase("transport"):
        transport.register(pool, layout)
    return Built(
        engine, transport, layout, identity, _info(config, spec, limits, size, identity, dtypes)
    )


def _attend(spec: ModelSpec, dtypes: Dtypes, pool: torch.Tensor) -> AttentionBackend:
    attention, choice = make_attention(pool, spec.num_heads, dtypes.model, spec.sliding_windows)
    log.info("%s", choice)
    return attention


def _pool_size(
    config: WorkerConfig,
    spec: ModelSpec,
    limits: Limits,
    one: CacheLayout,
    available: int,
    spare: bool = True,
) -> PoolSize:
    size = size_pool(
        block_bytes=one.block_bytes,
        block_size=limits.block_size,
        model_context=spec.max_position,
        kv_memory=config.kv_memory,
        max_model_len=config.max_model_len,
        available=available,
        spare=spare,
    )
    log.info(
        "KV pool: %d blocks of %d tokens, %.0f MB (--kv-memory); requests of up to %d tokens"
        " (--max-model-len)",
        size.num_blocks,
        limits.block_size,
        size.num_blocks * one.block_bytes / 1e6,
        size.max_model_len,
    )
    return size


def _engine(
    model: CausalModel,
    attention: AttentionBackend,
    pool: torch.Tensor,
    spec: ModelSpec,
    limits: Limits,
    size: PoolSize,
    identity: bytes,
) -> Engine:
    config = EngineConfig(
        block_size=limits.block_size,
        num_blocks=size.num_blocks,
        max_model_len=size.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        max_running_requests=limits.max_running_requests,
        identity=identity,
        vocab_size=spec.vocab_size,
        overlap=pool.is_cuda,
    )
    runner = ModelRunner(model, attention, pool)
    if pool.is_cuda and attention.capturable:
        runner.capture(
            limits.max_running_requests, size.max_model_len, limits.max_batched_tokens
        )
    return Engine(config, runner)


def _info(
    config: WorkerConfig,
    spec: ModelSpec,
    limits: Limits,
    size: PoolSize,
    identity: bytes,
    dtypes: Dtypes,
) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        engine_id=uuid.uuid4().hex,
        role=ROLE_TO_WIRE[config.role],
        model=config.served_name or config.model.name,
        identity=identity,
        vocab_size=spec.vocab_size,
        max_model_len=size.max_model_len,
        block_size=limits.block_size,
        num_blocks=size.num_blocks,
        dtype=dtype_name(dtypes.model),
        kv_dtype=dtype_name(dtypes.kv),
        tensor_parallel_size=1,
        version=importlib.metadata.version("tasuki"),
    )
