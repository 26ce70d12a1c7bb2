"""How much key-value memory running sequences take on each rank, and whether more of them fit. Pure.

What pictures of running prompts have become is counted in the same bytes, as `taken`: the leader has it all
for as long as the request is open, the other ranks while they read the prompt, and some of it to the end.
So is what the forward of a prompt needs that is read in one piece, while it is read.

Rows of a batch are padded to the longest one and caches grow in blocks, so a batch of n sequences costs as
much as n sequences of its longest length. The tightest rank decides for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.memory import format_bytes, need_of, part_of
from mlx_mesh.mesh.types import Placement, Sharding

BLOCK_TOKENS = 256
"""mlx-lm's caches grow by so many tokens."""

MEDIA_BYTES = 256 * 1024 * 1024
"""What the leader keeps at most of what towers made of pictures: some dozens of pictures."""

MEDIA_PART = 8
"""And at most one part of so many of its memory for sequences."""

UNKNOWN_CONTEXT = 1 << 24
"""Tokens that are taken for the longest sequence of a model that does not say how long its context is."""


class RankKv(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's cost of sequences, and what it has for them."""

    rank: int
    host: str
    # What its memory limit leaves beside weights and working memory; None = no limit.
    budget_bytes: int | None
    fixed_bytes: int  # of a sequence, whatever its length (SSM and convolution states)
    per_token: tuple[tuple[int, int], ...]  # (window in tokens, 0 = the whole context; bytes per token)
    media_bytes: int = 0  # set aside, beside the budget, for what towers made of pictures

    def bytes_of(self, num_rows: int, longest: int) -> int:
        """Of so many sequences, the longest of which has so many tokens."""
        padded = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
        row = sum(size * (min(padded, window) if window else padded) for window, size in self.per_token)
        return num_rows * (self.fixed_bytes + row)


class KvBudget(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks, by number."""

    ranks: tuple[RankKv, ...] = ()

    def short(self, num_rows: int, longest: int, taken: Sequence[int] = ()) -> RankKv | None:
        """The rank that lacks most for these rows; None = they fit. `taken`: bytes that are not free on each
        rank, () = none."""
        missing = {
            rank: rank.bytes_of(num_rows, longest) + (taken[at] if taken else 0) - rank.budget_bytes
            for at, rank in enumerate(self.ranks)
            if rank.budget_bytes is not None
        }
        worst = max(missing, key=missing.__getitem__, default=None)
        return worst if worst is not None and missing[worst] > 0 else None

    def longest_sequence(self, context_length: int, taken: Sequence[int] = ()) -> int | None:
        """Tokens of the longest sequence that fits when it is alone, a whole number of blocks; None = memory
        sets no limit below the context (0 = unknown context). `taken`: see short."""
        blocks = -(-(context_length or UNKNOWN_CONTEXT) // BLOCK_TOKENS)
        if self.short(1, blocks * BLOCK_TOKENS, taken) is None:
            return None
        fits, too_many = 0, blocks
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.short(1, middle * BLOCK_TOKENS, taken) is None:
                fits = middle
            else:
                too_many = middle
        return fits * BLOCK_TOKENS

    def explain(self, num_tokens: int, context_length: int, taken: Sequence[int] = ()) -> str:
        """Why a sequence of so many tokens can never be served, with numbers, and what to change. `taken`:
        by rank, by what its pictures became."""
        rank = self.short(1, num_tokens, taken)
        assert rank is not None and rank.budget_bytes is not None
        of_pictures = taken[self.ranks.index(rank)] if taken else 0
        also = f", and its pictures {format_bytes(of_pictures)}," if of_pictures else ""
        return (
            f"A sequence of {num_tokens} tokens needs {format_bytes(rank.bytes_of(1, num_tokens))} of KV "
            f"memory{also} on rank {rank.rank} ({rank.host}), which has {format_bytes(rank.budget_bytes)} "
            f"for it. Sequences of up to {self.longest_sequence(context_length, taken)} tokens, prompt and "
            "answer together, fit. Shorten the prompt"
            f"{', or give fewer or smaller pictures' if also else ''}; or serve with more hosts, or a higher "
            f"memory limit of {rank.host}."
        )

    def why_not_read(self, num_tokens: int, taken: Sequence[int]) -> str:
        """Why a prompt of so many tokens that is read in one piece never fits, with numbers; '' when it does.
        `taken`: by rank, by that forward and by what its pictures became."""
        rank = self.short(1, num_tokens, taken)
        if rank is None or rank.budget_bytes is None:
            return ""
        kept = format_bytes(rank.bytes_of(1, num_tokens))
        return (
            f"This model reads the prompt of {num_tokens} tokens in one piece: that takes "
            f"{format_bytes(taken[self.ranks.index(rank)])} beside {kept} of KV memory on rank {rank.rank} "
            f"({rank.host}), which has {format_bytes(rank.budget_bytes)} for both. Shorten the prompt; or "
            f"serve with a higher memory limit of {rank.host}."
        )


def kv_budget(footprint: ModelFootprint, placement: Placement) -> KvBudget:
    """What this placement leaves for running sequences on each rank."""
    shards = placement.shards
    is_tensor = placement.sharding is Sharding.TENSOR
    weights = [shard.weight for shard in shards]
    kv_parts = footprint.tensor.kv_parts(weights) if is_tensor else [(1, 1)] * len(shards)
    state_parts = footprint.tensor.state_parts(weights) if is_tensor else [(1, 1)] * len(shards)
    ranks = []
    for shard, kv_part, state_part in zip(shards, kv_parts, state_parts, strict=True):
        layers = footprint.layers[shard.start_layer : shard.end_layer]
        per_token: Counter[int] = Counter()
        fixed = 0
        for layer in layers:
            whole, state = (layer.whole_kv_bytes_per_token, layer.whole_state_bytes) if is_tensor else (0, 0)
            per_token[layer.kv_window] += whole + part_of(layer.kv_bytes_per_token - whole, *kv_part)
            fixed += state + part_of(layer.fixed_state_bytes - state, *state_part)
        budget: int | None = None
        if shard.memory_limit_bytes:
            budget = max(0, shard.memory_limit_bytes - need_of(shard.weights_bytes, 0).total)
        media = 0
        if shard.rank == 0 and footprint.media:
            media = MEDIA_BYTES if budget is None else min(MEDIA_BYTES, budget // MEDIA_PART)
            budget = None if budget is None else budget - media
        ranks.append(
            RankKv(
                rank=shard.rank,
                host=shard.host,
                budget_bytes=budget,
                media_bytes=media,
                fixed_bytes=fixed,
                per_token=tuple(sorted(per_token.items())),
            )
        )
    return KvBudget(ranks=tuple(ranks))
