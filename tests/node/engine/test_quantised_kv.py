"""Quantised caches in batches: row by row mlx-lm's, and a sequence's tokens whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache

from mlx_mesh.mesh.kv_options import KV_BITS, KV_GROUP_SIZES, KvOptions
from mlx_mesh.node.engine.quantised_kv import (
    BatchQuantisedKVCache,
    QuantisedRow,
    quantised_caches,
    why_not_quantised,
)
from mlx_mesh.node.engine.shard import shard_model
from mlx_mesh.node.engine.trace import trace_model

HEADS = 2
FOUR_BITS = KvOptions(bits=4, group_size=32)
CHUNK = 8  # tokens of a prefill chunk


def numbers(seed: int, rows: int, length: int, width: int) -> tuple[Any, Any]:
    key = mx.random.key(seed)
    return tuple(mx.random.normal((rows, HEADS, length, width), key=k) for k in mx.random.split(key))


def filled(length: int, seed: int, bits: int = 4, width: int = 64) -> QuantisedRow:
    row = QuantisedRow(group_size=32, bits=bits)
    if length:
        row.update_and_fetch(*numbers(seed, 1, length, width))
    return row


def contents(cache: Any, row: int = 0) -> Any:
    """All numbers of one sequence, dequantised: (heads, tokens, keys beside values)."""
    one = cache.extract(row) if hasattr(cache, "extract") else cache
    both = [
        mx.dequantize(*(x[..., : one.offset, :] for x in packed), group_size=one.group_size, bits=one.bits)
        for packed in (one.keys, one.values)
    ]
    return mx.concatenate(both, axis=-1)[0]


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("group_size", KV_GROUP_SIZES)
def test_a_row_holds_what_mlx_quantises_also_when_it_grows(bits: int, group_size: int) -> None:
    row = QuantisedRow(group_size=group_size, bits=bits)
    given = [numbers(seed, 1, length, 128) for seed, length in enumerate((5, 1, 254, 1))]
    for keys, values in given:
        mine = row.update_and_fetch(keys, values)
    for packed, plain in zip(mine, zip(*given, strict=True), strict=True):
        expected = mx.quantize(mx.concatenate(plain, axis=2), group_size=group_size, bits=bits)
        assert all(mx.array_equal(a, b) for a, b in zip(packed, expected, strict=True))
    assert row.keys is not None
    assert (row.offset, row.keys[0].shape[2]) == (261, 6 + 256)


def test_a_row_attends_as_mlx_lms_own_cache_does() -> None:
    mine, theirs = QuantisedRow(group_size=32, bits=4), QuantizedKVCache(group_size=32, bits=4)
    for seed, length in enumerate((6, 1, 3)):
        keys, values = numbers(seed, 1, length, 64)
        queries = mx.random.normal((1, 2 * HEADS, length, 64), key=mx.random.key(seed))
        outputs = []
        for cache in (mine, theirs):
            mask = cache.make_mask(length, return_array=False, window_size=None)
            held = cache.update_and_fetch(keys, values)
            asked = mx.array(queries)  # mlx-lm scales it in place
            outputs.append(scaled_dot_product_attention(asked, *held, cache=cache, scale=0.1, mask=mask))
        assert mx.array_equal(*outputs)
    assert mine.nbytes == theirs.nbytes
    again = QuantisedRow.from_state(mine.state)
    assert mx.array_equal(contents(again), contents(theirs))


def test_rows_keep_their_numbers_through_merge_extend_filter_and_trim() -> None:
    lengths = (3, 0, 7)
    rows = [filled(length, seed) for seed, length in enumerate(lengths)]
    wanted = [contents(row) if row.offset else None for row in rows]
    batch = rows[0].merge(rows)
    assert (batch.size(), batch.offset.tolist(), batch.left_padding.tolist()) == (7, [3, 0, 7], [4, 7, 0])
    later = QuantisedRow.merge([filled(300, 5), filled(2, 6)])
    later_wanted = [contents(later, 0), contents(later, 1)]
    batch.extend(later)
    assert batch.offset.tolist() == [3, 0, 7, 300, 2]
    new = numbers(9, 5, 1, 64)
    batch.update_and_fetch(*new)
    assert batch.trim(1) == 1
    for row, want in ((0, wanted[0]), (2, wanted[2]), (3, later_wanted[0]), (4, later_wanted[1])):
        assert mx.array_equal(contents(batch, row), want)
    batch.filter([4, 2])
    assert (batch.offset.tolist(), batch.left_padding.tolist(), batch.size()) == ([2, 7], [5, 0], 7)
    assert mx.array_equal(contents(batch, 0), later_wanted[1])
    assert mx.array_equal(contents(batch, 1), wanted[2])
    again = BatchQuantisedKVCache.from_state(batch.state)
    assert mx.array_equal(contents(again, 1), wanted[2])
    assert again.nbytes == batch.nbytes > 0


def test_batches_without_content_grow_together() -> None:
    batch = QuantisedRow.merge([filled(0, 0), filled(0, 1)])
    batch.extend(QuantisedRow.merge([filled(0, 2)]))
    assert batch.empty() and batch.nbytes == 0 and batch.offset.tolist() == [0, 0, 0]
    batch.extend(QuantisedRow.merge([filled(4, 3)]))
    assert batch.offset.tolist() == [0, 0, 0, 4]
    assert mx.array_equal(contents(batch, 3), contents(filled(4, 3)))


def test_padding_on_the_right_of_a_prefill_ends_on_the_left() -> None:
    batch = QuantisedRow.merge([filled(2, 0), filled(5, 1)])
    batch.prepare(lengths=[4, 1], right_padding=[0, 3])
    keys, values = numbers(7, 2, 4, 64)
    batch.update_and_fetch(keys, values)
    batch.finalize()
    assert (batch.offset.tolist(), batch.left_padding.tolist(), batch.size()) == ([6, 6], [3, 3], 9)
    for row, (start, kept) in enumerate(((filled(2, 0), 4), (filled(5, 1), 1))):
        start.update_and_fetch(*(x[row : row + 1, :, :kept] for x in (keys, values)))
        assert mx.array_equal(contents(batch, row), contents(start))


# ---------------------------------------------------------------- whole models


def config(tiny: ModuleType, **changes: Any) -> dict[str, Any]:
    return tiny.llama(head_dim=32, num_hidden_layers=4, **changes)  # type: ignore[no-any-return]


def sequences() -> list[list[int]]:
    """Of 3 to 21 tokens: some are longer than a prefill chunk."""
    return [[(7 * i + 3 * p) % 97 for i in range(n)] for p, n in enumerate((3, 21, 11, 14))]


def alone_by_mlx_lm(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of mlx-lm's own generator over its own quantised caches, from the first token on."""
    caches = [QuantizedKVCache(group_size=32, bits=4) for _ in model.layers]
    steps = generate_step(
        mx.array(prompt), model, max_tokens=num_tokens, prompt_cache=caches, prefill_step_size=CHUNK
    )
    return [token for token, _ in steps]


def tokens_in_turn(model: Any, new_caches: Callable[[], list[Any]], exchange: Any) -> dict[int, list[int]]:
    """The second prompt is cancelled after 9 steps, the last one comes after 4."""

    def sampler(logprobs: Any) -> Any:
        own = mx.argmax(logprobs, axis=-1) if exchange.rank == 0 else None
        return exchange.broadcast_ids(own, logprobs.shape[0], [logprobs])

    generator = BatchGenerator(model, sampler=sampler, prefill_step_size=CHUNK)
    tokens: dict[int, list[int]] = {}
    for step in range(24):
        if step in (0, 4):
            for prompt in sequences()[:3] if step == 0 else sequences()[3:]:
                generator.insert([prompt], max_tokens=[12], caches=[new_caches()])
        if step == 9:
            generator.remove([1])
        for response in generator.next()[1]:
            tokens.setdefault(response.uid, []).append(response.token)
    mx.synchronize(generator.stream)
    return tokens


@pytest.mark.parametrize("sharding", ["none", "pipeline 2", "pipeline 3", "tensor 2", "tensor 2:1"])
def test_every_split_gives_mlx_lms_tokens_whoever_comes_and_goes(
    tiny: ModuleType, simulator: ModuleType, sharding: str
) -> None:
    model = tiny.build(config(tiny)).model
    expected = [alone_by_mlx_lm(model, prompt, 12) for prompt in sequences()]
    placement = {
        "none": tiny.whole(4),
        "pipeline 2": tiny.stages(4, [3]),
        "pipeline 3": tiny.stages(4, [1, 2]),
        "tensor 2": tiny.slices(4, [1, 1]),
        "tensor 2:1": tiny.slices(4, [2, 1]),
    }[sharding]

    def body(rank: int, exchange: Any) -> Any:
        shard = shard_model(
            tiny.build(config(tiny)), placement, rank, exchange, tiny.ignore_progress, kv=FOUR_BITS
        )
        assert shard.new_caches is not None
        kinds = [isinstance(cache, QuantisedRow) for cache in shard.new_caches()]
        return tokens_in_turn(shard.model, shard.new_caches, exchange), kinds

    results = simulator.Simulator(placement.world_size).run(body)
    for tokens, _ in results:
        assert {uid: tokens[uid] for uid in (0, 2, 3)} == {uid: expected[uid] for uid in (0, 2, 3)}
        assert tokens[1] == expected[1][: len(tokens[1])] != expected[1]
    if "pipeline" in sharding:  # a ghost's cache stays plain
        held = [sum(kinds) for _, kinds in results]
        assert held == [shard.end_layer - shard.start_layer for shard in placement.shards]


@pytest.mark.parametrize("num_sent", [1, 7, 11])
def test_a_sequence_that_is_computed_again_goes_on_with_the_same_tokens(
    tiny: ModuleType, num_sent: int
) -> None:
    model = tiny.build(config(tiny)).model
    trace = trace_model(model)
    for prompt in sequences()[:2]:
        whole = alone_by_mlx_lm(model, prompt, 12)
        generator = BatchGenerator(model, prefill_step_size=CHUNK)
        caches = quantised_caches(model, trace, FOUR_BITS, range(4))
        generator.insert([prompt + whole[:num_sent]], max_tokens=[12 - num_sent], caches=[caches])
        tokens: list[int] = []
        while len(tokens) < 12 - num_sent:
            tokens += [response.token for response in generator.next()[1]]
        assert tokens == whole[num_sent:]
        generator.close()


def test_windows_and_states_are_left_as_they_are(tiny: ModuleType) -> None:
    model = tiny.build(config(tiny, **{**tiny.SLIDING, "layer_types": tiny.SLIDING["layer_types"][:4]})).model
    trace = trace_model(model)
    caches = quantised_caches(model, trace, FOUR_BITS, range(4))
    assert [type(cache).__name__ for cache in caches] == [
        *("RotatingKVCache", "RotatingKVCache", "QuantisedRow", "RotatingKVCache")
    ]


REFUSED = {
    "gemma2": "its attention does not take them",  # its own softmax
    "gpt_oss": "sinks",
    "kimi_k25": "its attention does not take them",  # latents
    "gpt2": "the size of its heads is no multiple of any group size",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_quantised_is_known_before_anything_is_loaded(tiny: ModuleType, kind: str) -> None:
    model = tiny.build(tiny.CONFIGS[kind]).model
    assert REFUSED[kind] in why_not_quantised(model, trace_model(model))


def test_a_model_that_can_be_quantised_has_no_reason_against_it(tiny: ModuleType) -> None:
    for kind in ("qwen3_next", "gemma3n", "nanbeige"):
        model = tiny.build(tiny.CONFIGS[kind]).model
        assert why_not_quantised(model, trace_model(model)) == ""
