"""The engine's settings: resolved once, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.engine.cache_groups import ONE_GROUP, CacheGroup, longest_blocks
from tasuki.engine.errors import EngineConfigError
from tasuki.engine.prefix_cache import blocks_of_chunk

IDENTITY_BYTES = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine may use.

    Attributes:
        num_blocks: Pages in the pool; at least twice what one request of
            maximal length takes, so that pulls and own work cannot starve
            each other.
        max_model_len: Tokens of a sequence, prompt plus output.
        vocab_size: Token ids are below it.
        block_size: Tokens in a block.
        groups: What the model's layers keep; a block takes a page for each.
        max_batched_tokens: Tokens of one step, at most. Decodes always run;
            prefill chunks get what they leave, and never less than a block.
        itl_target_s: Duration of a step that decodes and computes prompts, so of the
            gap between two tokens; four times that while many prompts wait
            (`step_size.py`). None: steps are bounded in tokens only.
        longest_step_s: Duration of a step that only computes prompts, at most; applies
            with `itl_target_s`.
        max_running_requests: Sequences (choices count one each) that may generate here at once:
            own ones start while fewer do in all, pulled ones come while fewer are pulled.
        growth_headroom_tokens: Room for output that a decode leg's credit
            asks for beyond its prompt, per choice.
        identity: 16 bytes of model, weights and KV format; salts block hashes.
        prefix_caching: Whether finished blocks are kept for reuse.
        overlap: Launch a step before the one before it is collected. Hides the
            host's work where a device computes; where the host itself does, a
            row that turns out void is wasted, and nothing is gained.
        draft_tokens: Tokens of a row's prompt-lookup draft, at most (`drafts.py`); 0: no drafts.
            A draft follows the last token, so there are none where steps overlap.
        step_timeout_s: After so long a step counts as hung, unless it is expected to
            take long (`StepRates.limit_s`).
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    block_size: int = 16
    groups: tuple[CacheGroup, ...] = ONE_GROUP
    max_batched_tokens: int = 512
    itl_target_s: float | None = None
    longest_step_s: float = 1.0
    max_running_requests: int = 128
    growth_headroom_tokens: int = 64
    identity: bytes = bytes(IDENTITY_BYTES)
    prefix_caching: bool = True
    overlap: bool = False
    draft_tokens: int = 0
    step_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse settings that could not serve one request.

        Raises:
            EngineConfigError: With the value, the limit and the remedy.
        """
        for name in (
            "num_blocks",
            "vocab_size",
            "block_size",
            "max_batched_tokens",
            "max_running_requests",
        ):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        for name in ("itl_target_s", "longest_step_s"):
            if (seconds := getattr(self, name)) is not None and not seconds > 0.0:
                raise EngineConfigError(f"{name} is {seconds}, must be above 0")
        if self.max_model_len < 2:
            raise EngineConfigError(
                f"max_model_len is {self.max_model_len}: use 2 or more, for a prompt token and an"
                " output token"
            )
        if self.draft_tokens < 0 or (self.draft_tokens and self.overlap):
            raise EngineConfigError(
                f"draft_tokens is {self.draft_tokens} and overlap {self.overlap}: drafts need steps"
                " that do not overlap, as on the CPU; leave out --speculate"
            )
        if self.draft_tokens and self.has_state:
            raise EngineConfigError(
                f"draft_tokens is {self.draft_tokens}, and layers of the model keep a state: a"
                " rejected draft would have to be taken out of it; leave out --speculate"
            )
        if self.groups[0].has_state:
            raise EngineConfigError(
                "the first cache group keeps a state: put one that keeps KV first"
            )
        if self.growth_headroom_tokens < 0:
            raise EngineConfigError(
                f"growth_headroom_tokens is {self.growth_headroom_tokens}, must not be negative"
            )
        if len(self.identity) != IDENTITY_BYTES:
            raise EngineConfigError(
                f"identity has {len(self.identity)} bytes, must have {IDENTITY_BYTES}"
            )
        if self.num_blocks < self.min_blocks:
            longest = longest_blocks(self.groups, self.num_blocks // 2) * self.block_size
            raise EngineConfigError(
                f"num_blocks is {self.num_blocks}, but two requests of max_model_len "
                f"{self.max_model_len} tokens need {self.min_blocks} blocks of {self.block_size} "
                f"tokens: give the cache more memory (--kv-memory) or set --max-model-len to "
                f"{longest} or less"
            )

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a chunk, the unit in which routers know the prefix cache."""
        return blocks_of_chunk(self.block_size)

    @property
    def slides(self) -> bool:
        """Whether some layers keep less than the whole sequence."""
        return not all(group.keeps_all for group in self.groups)

    @property
    def has_state(self) -> bool:
        """Whether some layers keep a state."""
        return any(group.has_state for group in self.groups)

    @property
    def max_request_blocks(self) -> int:
        """Pages of one sequence of maximal length, while its prompt is computed."""
        return self.pages_for(self.max_model_len)

    @property
    def min_blocks(self) -> int:
        """The smallest pool that `max_model_len` allows."""
        return 2 * self.max_request_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks of so many tokens; each takes a page for each group that keeps it."""
        return -(-tokens // self.block_size)

    def pages_for(self, tokens: int) -> int:
        """Pages of a sequence of so many tokens while its prompt is computed."""
        return self.pages_between(0, self.blocks_for(tokens))

    def pages_between(self, begin: int, end: int) -> int:
        """Pages of the blocks from `begin` on of a prompt of `end` blocks."""
        return sum(group.num_pages(begin, end) for group in self.groups)

    def pages_kept(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens needs for those that follow."""
        end = self.blocks_for(tokens)
        firsts = self.first_blocks(tokens)
        return sum(
            group.num_pages(first, end) for group, first in zip(self.groups, firsts, strict=True)
        )

    def first_blocks(self, tokens: int) -> list[int]:
        """For each group, the first block that a sequence of so many tokens needs."""
        return [group.first_block(tokens, self.block_size) for group in self.groups]
