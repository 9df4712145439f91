"""One step's work in the form the model takes: flat tokens and where their KV lives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much a step with prompts in it may have at most, to run in a CUDA graph.

    Attributes:
        tokens: decodes, prompts and padding.
        decodes: leading sequences with one token.
        chunks: the other sequences.
        width: blocks of a sequence.
    """

    tokens: int
    decodes: int
    chunks: int
    width: int


@dataclass(slots=True)
class Batch:
    """The input of one forward pass over several sequences, decodes and chunks mixed.

    Sequences are ordered with single-token (decode) sequences first; there are
    `num_decodes` of them. T is the number of tokens, S of sequences, W the
    widest block table. Host-side lists mirror what planning needs without a
    device read.

    With a `bucket` the batch lies in the static tensors that a CUDA graph reads:
    decodes only, T = S = R = bucket and `logits_rows` all of them in order; W is
    that of the longest sequence there may be. The first `num_decodes` rows are
    real and have entries in the lists. The rest is padding: any token and
    position that exist, slot -1 (nothing is written), a table of block 0; what
    comes out for them is read by nobody.

    With `limits` the batch lies so too, but may have prompts in it: T is one of
    a few numbers, the tokens beyond those of the lists are padding, and sequences,
    blocks and logits are as many as the step has, up to the limits.

    Attributes:
        tokens: [T] int64, device.
        positions: [T] int64, device; position in the sequence.
        slots: [T] int64, device; block id x block_size + offset, where each token's KV goes;
            -1: nowhere. Of the first cache group, as the tables are.
        block_tables: [S, W] int32, device; unused entries repeat the sequence's first block.
        query_lens: tokens of each sequence in this step.
        context_lens: tokens of each sequence in the cache after this step.
        logits_rows: [R] int64, device; rows of [T] whose logits are wanted.
        num_decodes: how many leading sequences have a query length of 1.
        bucket: rows of a padded decode batch; None: not padded.
        limits: of all steps in graphs that may have prompts in them; None: it is none.
        more_groups: slots and tables of the other cache groups, in order.
        cuts: where layers keep a state: for each sequence, after how many of its tokens in this
            step the state goes to a page; the last is all of them. None: there are no states.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    logits_rows: torch.Tensor
    num_decodes: int
    bucket: int | None = None
    limits: StepLimits | None = None
    more_groups: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    cuts: list[list[int]] | None = None

    def of_group(self, group: int) -> Batch:
        """The batch with the slots and tables of a cache group as its own."""
        if group == 0:
            return self
        slots, block_tables = self.more_groups[group - 1]
        return replace(self, slots=slots, block_tables=block_tables, more_groups=())


def groups_of(
    slots: torch.Tensor, tables: torch.Tensor, tokens: int, rows: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Slots [T] and tables [S, W] of each cache group, of arrays that have them all.

    Args:
        slots: [G x T].
        tables: [G x S x W].
        tokens: T.
        rows: S.
    """
    groups = slots.shape[0] // tokens
    per_group = tables.view(groups, rows, -1)
    return list(zip(slots.view(groups, tokens).unbind(), per_group.unbind(), strict=True))
