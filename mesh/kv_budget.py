"""How much key-value memory running sequences take on each rank, and whether more of them fit. Pure.

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

    def longest_sequence(self, context_length: int) -> int | None:
        """Tokens of the longest sequence that fits when it is alone, a whole number of blocks; None = memory
        sets no limit below the context (0 = unknown context)."""
        blocks = -(-(context_length or UNKNOWN_CONTEXT) // BLOCK_TOKENS)
        if self.short(1, blocks * BLOCK_TOKENS) is None:
            return None
        fits, too_many = 0, blocks
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.short(1, middle * BLOCK_TOKENS) is None:
                fits = middle
            else:
                too_many = middle
        return fits * BLOCK_TOKENS

    def explain(self, num_tokens: int, context_length: int) -> str:
        """Why a sequence of so many tokens can never be served, with numbers, and what to change."""
        rank = self.short(1, num_tokens)
        assert rank is not None and rank.budget_bytes is not None
        return (
            f"A sequence of {num_tokens} tokens needs {format_bytes(rank.bytes_of(1, num_tokens))} of KV "
            f"memory on rank {rank.rank} ({rank.host}), which has {format_bytes(rank.budget_bytes)} for it. "
            f"Sequences of up to {self.longest_sequence(context_length)} tokens, prompt and answer together, "
            f"fit. Shorten the prompt; or serve with more hosts, or a higher memory limit of {rank.host}."
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
        need = need_of(shard.weights_bytes, 0)
        ranks.append(
            RankKv(
                rank=shard.rank,
                host=shard.host,
                budget_bytes=max(0, shard.memory_limit_bytes - need.total)
                if shard.memory_limit_bytes
                else None,
                fixed_bytes=fixed,
                per_token=tuple(sorted(per_token.items())),
            )
        )
    return KvBudget(ranks=tuple(ranks))
