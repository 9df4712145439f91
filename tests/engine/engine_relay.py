"""Engines that hand requests to one another: a handoff without wire, threads or clock.

Every step of it happens at a moment that a seeded generator picks, so credits,
chunks, pulls, aborts and ends interleave in every order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from engine_fakes import Rig

from tasuki.engine.api import (
    FirstToken,
    Leg,
    LegEndReason,
    LegTimings,
    RequestSpec,
)


@dataclass
class Handoff:
    """One split attempt: what both sides know."""

    source: int
    target: int
    state: str = "wanted"  # credited, assigned, started, over
    computing: bool = False  # before credit or after
    wanted: list[tuple[int, int, int]] = field(default_factory=list)  # token, group, our block
    announced: dict[tuple[int, int], int] = field(default_factory=dict)  # token, group: theirs
    tokens: int = 0  # announced
    pulled: int = 0
    first_tokens: tuple[FirstToken, ...] | None = None


class Relay:
    """Rigs and the handoffs between them."""

    def __init__(self, rigs: list[Rig], seed: int, impatience: float = 0.01) -> None:
        self.rigs = rigs
        self.impatience = impatience  # how often a prefill is admitted without credit
        self.random = random.Random(seed)
        self.handoffs: dict[str, Handoff] = {}
        self.quarantined: list[tuple[int, list[int]]] = []
        self.refused: list[str] = []
        self.returned: list[str] = []
        self._started: list[str] = []
        self.started_ahead = 0
        for rig in rigs:
            rig.engine.on_started = self._started.extend

    def submit(self, spec: RequestSpec, source: int, target: int) -> None:
        """Place a request; on one engine when source is target."""
        if source == target:
            self.rigs[source].engine.submit(spec)
            return
        for leg, index in ((Leg.PREFILL, source), (Leg.DECODE, target)):
            self.rigs[index].engine.submit(replace(spec, leg=leg))
        self.handoffs[spec.request_id] = Handoff(source, target)

    def abort(self, request_id: str) -> None:
        """A router's abort, at every engine."""
        for rig in self.rigs:
            rig.engine.abort(request_id)
        handoff = self.handoffs.get(request_id)
        if handoff is not None:
            self.drop(request_id, handoff, LegEndReason.ABORTED)

    def drop(self, request_id: str, handoff: Handoff, reason: LegEndReason) -> None:
        """Both sides give a handoff up; unfinished pulls leave their targets quarantined."""
        if handoff.state == "assigned":
            writing = [block for _, _, block in handoff.wanted[handoff.pulled :]]
            writing = writing[: self.random.randint(0, len(writing))]
            if writing:
                self.quarantined.append((handoff.target, writing))
            target = self.rigs[handoff.target].engine
            target.end_decode_leg(request_id, reason, "dropped", writing)
        else:
            self.rigs[handoff.target].engine.end_decode_leg(request_id, reason)
        self.rigs[handoff.source].engine.end_prefill_leg(request_id, reason)
        handoff.state = "over"

    def turn(self) -> bool:
        """One event somewhere; False when nothing is left to happen."""
        moves = [(self._step, index) for index, r in enumerate(self.rigs) if r.engine.has_work()]
        moves += [(self._advance, name) for name, h in self.handoffs.items() if h.state != "over"]
        if self.quarantined:
            moves.append((self._end_quarantine, None))
        if not moves:
            return False
        move, argument = self.random.choice(moves)
        move(argument)
        for rig in self.rigs:
            rig.engine.check()
        return True

    def drain(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError(f"something never ends: {self.handoffs}")

    def _step(self, index: int) -> None:
        result = self.rigs[index].step()
        self._assign_started()
        for announced in result.announced:
            handoff = self.handoffs[announced.request_id]
            assert announced.first_token == handoff.tokens
            handoff.tokens = announced.end_token
            size = self.rigs[index].engine.config.block_size
            for part in announced.parts:
                for number, block in enumerate(part.blocks):
                    token = part.first_token + number * size
                    assert (token, part.group) not in handoff.announced
                    handoff.announced[token, part.group] = block
        for prefilled in result.prefilled:
            handoff = self.handoffs[prefilled.request_id]
            assert prefilled.tokens == handoff.tokens
            handoff.first_tokens = tuple(prefilled.first_tokens)
        for end in result.ended:
            handoff = self.handoffs.get(end.request_id)
            if end.reason is LegEndReason.RETURNED:
                self.returned.append(end.request_id)
            if handoff is not None and handoff.state != "over" and index == handoff.source:
                if end.reason is LegEndReason.FINISHED:
                    self.drop(end.request_id, handoff, LegEndReason.FINISHED)
            elif handoff is not None and handoff.state == "started":
                handoff.state = "over"

    def _assign_started(self) -> None:
        while self._started:
            request_id = self._started.pop(0)
            handoff = self.handoffs[request_id]
            handoff.computing = True
            if handoff.state == "credited":
                self._assign(request_id, handoff)
            else:
                self.started_ahead += 1

    def _assign(self, request_id: str, handoff: Handoff) -> None:
        assignment = self.rigs[handoff.target].engine.assign(request_id)
        if assignment is None:
            self.refused.append(request_id)
            self.drop(request_id, handoff, LegEndReason.REFUSED)
            return
        handoff.state = "assigned"
        handoff.wanted = sorted(
            (token, part.group, block)
            for part in assignment.parts
            for number, block in enumerate(part.blocks)
            if (token := part.first_token + number * assignment.block_size)
            >= assignment.prefix_tokens
        )

    def _advance(self, request_id: str) -> None:
        """The next thing that this handoff waits for, if it can happen."""
        handoff = self.handoffs[request_id]
        target, source = self.rigs[handoff.target], self.rigs[handoff.source]
        if handoff.state == "wanted" and (
            target.engine.may_credit(request_id) or self.random.random() < self.impatience
        ):  # a prefill that starts without credit may be refused
            handoff.state = "credited"
            source.engine.admit(request_id)
            if handoff.computing:
                self._assign(request_id, handoff)
        elif handoff.state == "assigned":
            if handoff.pulled < len(handoff.wanted):
                token, group, ours = handoff.wanted[handoff.pulled]
                theirs = handoff.announced.get((token, group))
                if theirs is not None:
                    target.pool[ours].copy_(source.pool[theirs])
                    handoff.pulled += 1
            elif handoff.first_tokens is not None:
                target.engine.start_decode(request_id, handoff.first_tokens, LegTimings())
                source.engine.end_prefill_leg(request_id, LegEndReason.HANDED_OFF)
                handoff.state = "started"

    def _end_quarantine(self, _: None) -> None:
        index, blocks = self.quarantined.pop(self.random.randrange(len(self.quarantined)))
        rig = self.rigs[index]
        for block in blocks:  # the late write that quarantine is for
            rig.pool[block] = 1e6
        rig.engine.free_quarantined(blocks)

    def tokens(self, request_id: str, choice: int) -> list[int]:
        """Tokens of a choice over all engines, ordered and deduplicated by position."""
        found: dict[int, int] = {}
        for rig in self.rigs:
            for output in rig.outputs[request_id, choice]:
                for offset, token in enumerate(output.tokens):
                    assert found.setdefault(output.position + offset, token) == token
        positions = sorted(found)
        assert positions == list(range(positions[0], positions[0] + len(found))) if found else True
        return [found[position] for position in positions]
