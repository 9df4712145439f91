"""What layers with a state ask of the settings: blocks large enough for it, and no drafts."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from tasuki.engine.cache_groups import layers_of_page
from tasuki.models.attending import cache_groups
from tasuki.models.spec import ModelSpec
from tasuki.worker.config import ConfigError, Limits, WorkerConfig
from tasuki.worker.device import Dtypes

log = logging.getLogger(__name__)

_WORD_BYTES = 8  # states are read and written in these


def fit_states(config: WorkerConfig, limits: Limits, spec: ModelSpec, dtypes: Dtypes) -> Limits:
    """The limits with blocks that hold a state, if layers of the model keep one.

    A page has a block's KV or the states of as many layers. Where no block size is asked for it
    is the least multiple of the device's usual one that has room for both.

    Raises:
        ConfigError: The block size that is asked for is too small, or drafts are asked for.
    """
    if not spec.states:
        return limits
    if config.speculate != "none":
        raise ConfigError(
            f"speculate is {config.speculate}, and layers of {spec.architecture} keep a state,"
            " which a rejected draft cannot be taken out of: leave out --speculate"
        )
    groups = cache_groups(spec, dtypes.model)
    elements = layers_of_page(groups) * spec.kv_planes * spec.num_kv_heads * spec.head_dim
    token_bytes = elements * dtypes.kv.itemsize
    largest = max(len(group.layers) * group.state_bytes for group in groups)
    step = math.lcm(limits.block_size if config.block_size is None else 1, _aligned(token_bytes))
    least = -(-largest // (token_bytes * step)) * step
    if config.block_size is None:
        log.info("blocks of %d tokens: as large as a state of %d bytes", least, largest)
        return replace(limits, block_size=least)
    if config.block_size < least or config.block_size % step:
        raise ConfigError(
            f"block-size is {config.block_size}: a block of {spec.architecture} must hold a state"
            f" of {largest} bytes, and takes {token_bytes} bytes a token: use a multiple of {step}"
            f" from {least} on, or leave it out"
        )
    return limits


def _aligned(token_bytes: int) -> int:
    """The fewest tokens of a block that is a whole number of words."""
    return _WORD_BYTES // math.gcd(token_bytes, _WORD_BYTES)
