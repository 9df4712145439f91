"""One rank's parts, built in stages that all ranks take together: model, pool, attention.

    load ▶ measure (GPU) ▶ pool ▶ attention ▶ graphs ▶ transport

The stages of different ranks run at the same time, and their collectives join
them: what is done here is done by all.
"""

from __future__ import annotations

import logging

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.kv_scales import FP8, UNSCALED, KvScales
from tasuki.engine.cache_groups import layers_of_page
from tasuki.execution.collective import ALONE, Collective
from tasuki.execution.executor import Executor
from tasuki.execution.runner import ModelRunner
from tasuki.execution.sampler import JointLogits
from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import interface_of_host
from tasuki.kv.transport import Transport
from tasuki.models.attending import attention_for, cache_groups
from tasuki.models.base import CausalModel
from tasuki.models.loader import compile_model, load_model
from tasuki.models.shard import Shard
from tasuki.models.spec import ModelSpec
from tasuki.worker.kv_calibration import scales_for
from tasuki.worker.profile import pool_bytes
from tasuki.worker.rank_messages import RankPlan
from tasuki.worker.startup import Phases

log = logging.getLogger(__name__)


def rank_device(plan: RankPlan) -> torch.device:
    """Where a rank computes."""
    if plan.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(plan.device_type, plan.device_index)


def meet(plan: RankPlan) -> Collective:
    """Join the other ranks, if there are any."""
    size = plan.config.tensor_parallel
    if size == 1:
        return ALONE
    from tasuki.execution.distributed import join

    config = plan.config
    if not config.nodes:
        return join(plan.rank, size, plan.port, rank_device(plan), config.all_reduce)
    interface = interface_of_host(config.reachable_host)
    return join(plan.rank, size, plan.port, rank_device(plan), "nccl", interface)


def layout_of(spec: ModelSpec, plan: RankPlan, num_blocks: int = 1) -> CacheLayout:
    """The layout of a rank's pool; blocks of all ranks are of the same size."""
    shard = Shard(spec, plan.rank, plan.config.tensor_parallel)
    groups = cache_groups(spec, plan.dtypes.model)
    return CacheLayout(
        num_blocks=num_blocks,
        kv_heads=shard.local.num_kv_heads,
        layers=layers_of_page(groups),
        groups=groups,
        block_size=plan.limits.block_size,
        head_dim=spec.head_dim,
        dtype=plan.dtypes.kv,
        first_kv_head=shard.first_kv_head,
        planes=spec.kv_planes,
    )


class RankParts:
    """What a rank computes with.

    Args:
        plan: What it is built from.
        spec: Of the whole model.
        collective: Joins the ranks.
        phases: Of this rank's start.

    Attributes:
        model: Loaded.
        kv_scales: Of an fp8 cache, the same on all ranks.
    """

    def __init__(
        self, plan: RankPlan, spec: ModelSpec, collective: Collective, phases: Phases
    ) -> None:
        self._plan, self._spec, self._phases = plan, spec, phases
        self._whole = JointLogits(collective, spec.vocab_size).whole
        self._device = rank_device(plan)
        with phases.phase("weights"):
            self.model: CausalModel = load_model(
                plan.config.model,
                dtype=plan.dtypes.model,
                device=self._device,
                trust_remote_code=plan.config.trust_remote_code,
                weights=plan.config.load_format,
                quantization=plan.config.quantization,
                kv_dtype=plan.dtypes.kv,
                collective=collective,
                longest=plan.config.max_model_len,
            )
            self.kv_scales = self._scales(collective)
        with phases.phase("dispatch"):
            if plan.config.dispatch != "default":
                from tasuki.models.dispatch.settle import settle  # imports Triton

                settle(self.model, plan.config.dispatch, collective)
        # As it is, a model of transformers may well wait for the device in a step.
        self._capturable = spec.native
        if self._device.type == "cuda" and not spec.native:
            with phases.phase("compile"):
                self._capturable = compile_model(self.model)

    def _scales(self, collective: Collective) -> KvScales:
        config, dtypes = self._plan.config, self._plan.dtypes
        if dtypes.kv != FP8:
            return UNSCALED
        folder = None if config.load_format == "dummy" else config.model
        return scales_for(self.model, folder, dtypes.model, self._device, collective)

    def available_bytes(self) -> int | None:
        """What the pool may take of this rank's GPU; None on the CPU, which ranks share.

        Raises:
            ConfigError: Nothing is left.
        """
        if self._device.type == "cpu":
            return None
        with self._phases.phase("profiling"):
            return pool_bytes(
                self.model,
                self.attend,
                lambda blocks: layout_of(self._spec, self._plan, blocks).allocate(self._device),
                self._plan.limits,
                self._plan.config.gpu_memory_utilization,
                self._whole,
            )

    def make_pool(self, num_blocks: int, transport: Transport) -> tuple[torch.Tensor, CacheLayout]:
        """The pool of so many blocks, where `transport` can move it.

        Raises:
            TransportError: It cannot move memory of this rank's device.
        """
        layout = layout_of(self._spec, self._plan, num_blocks)
        with self._phases.phase("pool"):
            return transport.allocate(layout, self._device), layout

    def attend(self, pool: torch.Tensor) -> AttentionBackend:
        """Attention over a pool."""
        dtype = self._plan.dtypes.model
        attention, choice = attention_for(self.model, pool, dtype, self.kv_scales)
        log.info("%s", choice)
        return attention

    def capture(
        self, executor: Executor | ModelRunner, attention: AttentionBackend, longest: int
    ) -> None:
        """Record CUDA graphs, where there are any; all ranks do so at the same time."""
        if not attention.pool.is_cuda:
            return
        with self._phases.phase("graphs"):
            if self._capturable and attention.capturable:
                limits = self._plan.limits
                executor.capture(limits.max_running_requests, longest, limits.max_batched_tokens)
            else:
                log.warning("no CUDA graphs: steps of few tokens take several times as long")
