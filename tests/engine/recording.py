"""A recorder that computes again what CUDA would replay; results stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.forward import Body
from tasuki.engine.recorder import AttentionCall, Outputs, Pieces, Replay


class _PieceEndedError(Exception):
    """The piece has ended."""


class _Pieceful:
    """Attention for one piece of a body: hands back what attention gave before it, then stops."""

    def __init__(self, pool: torch.Tensor, outs: list[torch.Tensor], after: int) -> None:
        self.pool = pool
        self._outs = outs
        self._after = after  # attentions
        self.calls: list[tuple[Any, ...]] = []

    def plan(self, batch: object) -> None:
        raise AssertionError("pieces are not planned")

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        written: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append((layer, query, key, value, scale, sliding_window, written))
        if len(self.calls) > self._after:
            raise _PieceEndedError
        return self._outs[len(self.calls) - 1]


class Recorder:
    """`tasuki.engine.recorder.Recorder` without CUDA: counts what it replays."""

    def __init__(self) -> None:
        self.replays = 0  # whole graphs
        self.pieces_run = 0

    def whole(self, work: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        outputs = work()

        def replay() -> None:
            self.replays += 1
            for target, value in zip(outputs, work(), strict=True):
                target.copy_(value)

        return replay, outputs

    def pieces(
        self, work: Callable[[AttentionBackend], Body], attention: AttentionBackend
    ) -> Pieces:
        outs: list[torch.Tensor] = []
        parts: list[tuple[Replay, AttentionCall]] = []
        layers = attention.pool.shape[2]

        def piece(index: int) -> tuple[Any, ...]:
            """What the attention after piece `index` is given."""
            stand_in = _Pieceful(attention.pool, outs, index)
            try:
                work(stand_in)  # type: ignore[arg-type]
            except _PieceEndedError:
                return stand_in.calls[-1]
            raise AssertionError("fewer attentions than layers")

        for index in range(layers):
            layer, query, key, value, scale, window, written = piece(index)
            outs.append(torch.full(query.shape, float("nan"), dtype=query.dtype))
            statics = [query.clone(), key.clone(), value.clone()]
            call = AttentionCall(layer, *statics, scale, window, written, outs[index])

            def replay(index: int = index, statics: list[torch.Tensor] = statics) -> None:
                self.pieces_run += 1
                for target, source in zip(statics, piece(index)[1:4], strict=True):
                    target.copy_(source)

            parts.append((replay, call))

        body = work(_Pieceful(attention.pool, outs, layers))  # type: ignore[arg-type]

        class Run(Pieces):
            """What the body leaves lies where it lay."""

            def run(self, attention: AttentionBackend) -> Body:
                super().run(attention)
                residual, _ = work(_Pieceful(attention.pool, outs, layers))  # type: ignore[arg-type]
                body[0].copy_(residual)
                return body

        return Run(tuple(parts), (body[0], outs[-1].view(body[1].shape)))
