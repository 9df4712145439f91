"""torch.compile for the fallback: one decoder layer is compiled, and serves as every layer.

A whole model as one graph takes minutes to compile and gains little on it. What
would tell layers apart (their index, their weights) is kept out of a layer's
graph, so there are two graphs for each kind of layer: one for any number of
tokens, and one for a single token. There GEMMs are our own kernel's (`one_row_op`);
inductor tunes those that it does not take, hardly more than the reading of weights.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._inductor.async_compile import shutdown_compile_workers

from tasuki.models.fallback import FallbackModel

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 512  # what kernels are tuned for


def compile_layers(
    model: FallbackModel,
    backend: str | Callable[..., Any] = "inductor",
) -> bool:
    """Compile the model's layers now, check what they compute, and use them if it is right.

    It takes some seconds, and less where torch finds its cache.

    Args:
        model: As loaded.
        backend: of torch.compile.

    Returns:
        Whether it is compiled now; if not, the log says why.
    """
    begin_s = time.monotonic()
    layers = _layers(model)
    compiled: dict[type, Callable[..., Any]] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = _compiled(kind, backend)
        layer.forward = functools.partial(compiled[kind], layer)
    try:
        if not layers:
            raise LookupError("its layers are not in a list")
        model.trial.warm_up(model, min(_WARM_UP_TOKENS, model.spec.max_position - 1))
        model.trial.check(model)
    except Exception as error:  # of torch's compiler, whatever it is
        for layer in layers:
            del layer.forward
        reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
        log.warning("%s runs without torch.compile, slower: %s", model.spec.architecture, reason)
        return False
    finally:
        shutdown_compile_workers()  # a process for every core, of hundreds of MB each
    log.info(
        "%s has no fast path: torch compiled its layers in %.1f s",
        model.spec.architecture,
        time.monotonic() - begin_s,
    )
    return True


def _compiled(kind: type[nn.Module], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a kind of layer, compiled twice when it first runs."""
    tuned = {"coordinate_descent_tuning": True} if backend == "inductor" else None
    compile_ = functools.partial(torch.compile, fullgraph=True, dynamic=True, backend=backend)
    many, single = compile_(kind.forward), compile_(kind.forward, options=tuned)

    def forward(layer: nn.Module, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        run = single if hidden_states.shape[1] == 1 else many
        return run(layer, hidden_states, *args, **options)

    return forward


def _layers(model: FallbackModel) -> list[nn.Module]:
    """The decoder layers: the list of modules that has as many as there are layers."""
    for module in model.module.modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.spec.num_layers:
            return list(module)
    return []
