"""The same tokens for every way to split a model, alone and in a batch. This is what the engine is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.kv_budget import BLOCK_TOKENS, KvBudget, RankKv
from mlx_mesh.mesh.messages import GenerateRequest, Heartbeat, SamplingParams
from mlx_mesh.mesh.types import Sharding

pytestmark = pytest.mark.two_rank

NUM_LAYERS = 6
NUM_TOKENS = 64
SPLITS = {
    "none": (Sharding.NONE, [1]),
    "pipeline 2": (Sharding.PIPELINE, [3, 3]),
    "pipeline 3 uneven": (Sharding.PIPELINE, [1, 3, 2]),
    "tensor 2": (Sharding.TENSOR, [1, 1]),
}


def prompts() -> list[tuple[int, ...]]:
    """Eight different ones, from 3 to 45 tokens: some are longer than a prefill chunk of 16."""
    return [tuple((7 * i + 11 * k) % 317 + 3 for k in range(3 + 6 * i)) for i in range(8)]


def requests(prefix: str, temperature: float) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            id=f"{prefix}{i}",
            prompt_ids=prompt,
            max_tokens=NUM_TOKENS,
            sampling=SamplingParams(temperature=temperature, top_p=0.95, seed=100 + i),
        )
        for i, prompt in enumerate(prompts())
    ]


def answers(mesh: Any, rows: list[GenerateRequest]) -> list[list[int]]:
    mesh.submit(*rows)
    return [mesh.answer(row.id).token_ids for row in rows]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[list[int]]]:
    """Greedy: what mlx-lm's own generator gives with its own model. Seeded: what the first split gives."""
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.utils import load_model

    model, _ = load_model(tiny_llama)
    greedy = []
    for prompt in prompts():
        generator = BatchGenerator(model)
        generator.insert([list(prompt)], max_tokens=[NUM_TOKENS])
        tokens: list[int] = []
        while len(tokens) < NUM_TOKENS:
            tokens += [response.token for response in generator.next()[1]]
        generator.close()
        greedy.append(tokens)
    return {"greedy": greedy, "seeded": []}


@pytest.fixture(scope="module")
def first_logprobs() -> list[list[float]]:
    """Of one answer, by each split in its turn."""
    return []


def talk_on(mesh: Any) -> None:
    """The second turn of a long conversation begins with the first one, and says the same as without."""

    def turn(name: str, prompt: tuple[int, ...], **fields: Any) -> GenerateRequest:
        greedy = SamplingParams(temperature=0.0)
        return GenerateRequest(id=name, prompt_ids=prompt, max_tokens=8, sampling=greedy, **fields)

    first = tuple((7 * i * i + 3 * i) % 313 + 4 for i in range(600))
    (said,) = answers(mesh, [turn("turn 1", first)])
    second = (*first, *said, *((5 * i) % 311 + 5 for i in range(40)))
    mesh.submit(turn("turn 2", second))
    warm = mesh.answer("turn 2")
    assert warm.cached_tokens == len(first) + len(said)
    mesh.submit(turn("cold", second, skip_prefix_cache=True))
    cold = mesh.answer("cold")
    assert (cold.token_ids, cold.cached_tokens) == (warm.token_ids, 0)


@pytest.fixture(
    scope="module",
    params=["none", pytest.param("pipeline 2", marks=pytest.mark.long), "pipeline 3 uneven", "tensor 2"],
)
def mesh(request: pytest.FixtureRequest, bench: Any, tiny_llama: Path) -> Iterator[Any]:
    """One for all tests of a split; in the end every rank ends well."""
    sharding, stages = SPLITS[request.param]
    with bench.mesh(len(stages)) as made:
        made.connect()
        made.load(tiny_llama, bench.split(sharding, NUM_LAYERS, stages), prefill_step_size=16)
        yield made
        assert made.stop() == [0] * len(stages)


def test_64_tokens_are_the_same_alone_and_in_a_batch_of_8(
    mesh: Any, expected: dict[str, list[list[int]]]
) -> None:
    assert answers(mesh, requests("batch ", 0.0)) == expected["greedy"]
    for row in requests("alone ", 0.0)[::3]:
        assert answers(mesh, [row]) == [expected["greedy"][int(row.id[-1])]]

    seeded = answers(mesh, requests("seeded batch ", 0.9))
    expected["seeded"] = expected["seeded"] or seeded
    assert seeded == expected["seeded"]
    for row in requests("seeded alone ", 0.9)[::3]:
        assert answers(mesh, [row]) == [seeded[int(row.id[-1])]]
    assert seeded != expected["greedy"]
    talk_on(mesh)


def test_late_arrivals_cancels_stops_and_resumed_requests_disturb_nobody(
    mesh: Any, bench: Any, expected: dict[str, list[list[int]]]
) -> None:
    greedy = expected["greedy"]
    cold = {"skip_prefix_cache": True}  # other tests have asked the same
    rows = [msgspec.structs.replace(row, **cold) for row in requests("r", 0.0)]
    mesh.submit(rows[0], rows[1], rows[2])
    mesh.wait_for_tokens("r0", 5)
    mesh.submit(rows[3], rows[7])  # r7's prefill takes several chunks between the others' steps
    mesh.cancel("r1")
    mesh.cancel("r7")
    mesh.cancel("nobody")
    stop_at = greedy[4][20]
    mesh.submit(
        bench.greedy("stops", rows[4].prompt_ids, NUM_TOKENS, stop_token_ids=(stop_at,), **cold),
        bench.greedy("resumed", rows[5].prompt_ids, NUM_TOKENS, sent_ids=tuple(greedy[5][:30]), **cold),
        bench.greedy("empty", [], 5),
        bench.greedy("foreign", [5000], 5),
        bench.greedy("one", rows[6].prompt_ids, 1, **cold),
    )
    for number in (0, 2, 3):
        answer = mesh.answer(f"r{number}")
        assert (answer.token_ids, answer.finish_reason) == (greedy[number], "length")
    for number in (1, 7):
        answer = mesh.answer(f"r{number}")
        assert answer.finish_reason == "cancelled"
        assert answer.token_ids == greedy[number][: len(answer.token_ids)]
        assert len(answer.token_ids) < NUM_TOKENS
    stopped = mesh.answer("stops")
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == greedy[4][: greedy[4].index(stop_at)]
    assert mesh.answer("resumed").token_ids == greedy[5][30:]
    assert mesh.answer("one").token_ids == greedy[6][:1]
    assert mesh.answer("empty").failure.code == "empty_prompt"
    assert mesh.answer("foreign").failure.code == "invalid_token"
    assert answers(mesh, requests("again", 0.0)[1:2]) == [greedy[1]]


def test_logprobs_cross_no_cut_and_are_the_same(
    mesh: Any, bench: Any, first_logprobs: list[list[float]]
) -> None:
    mesh.submit(bench.greedy("with logprobs", [5, 6, 7], 8, logprobs=3))
    answer = mesh.answer("with logprobs")
    assert [p.top[0][0] for p in answer.logprobs] == answer.token_ids
    assert [len(p.top) for p in answer.logprobs] == [3] * 8
    first_logprobs.append([p.logprob for p in answer.logprobs])
    assert first_logprobs[-1] == pytest.approx(first_logprobs[0], abs=1e-5)


def test_the_collective_form_of_the_exchange_gives_the_same_tokens(
    bench: Any, tiny_llama: Path, expected: dict[str, list[list[int]]]
) -> None:
    """What nccl and jaccl use, here over the ring."""
    swap = "import mlx_mesh.node.engine.group as group; group.RingExchange = group.CollectiveExchange"
    for name in ("pipeline 2", "tensor 2"):
        sharding, stages = SPLITS[name]
        with bench.mesh(2, codes=[swap] * 2) as mesh:
            mesh.connect()
            mesh.load(tiny_llama, bench.split(sharding, NUM_LAYERS, stages), prefill_step_size=16)
            assert answers(mesh, requests("r", 0.0)[:4]) == expected["greedy"][:4]
            assert mesh.stop() == [0, 0]


def test_rows_that_had_to_make_room_go_on_with_the_same_tokens(bench: Any, tiny_llama: Path) -> None:
    """Memory for two rows of two blocks on rank 1: together they outgrow it, and the newer one waits."""
    free = RankKv(rank=0, host="a", budget_bytes=None, fixed_bytes=0, per_token=((0, 1),))
    tight = RankKv(rank=1, host="b", budget_bytes=4 * BLOCK_TOKENS, fixed_bytes=0, per_token=((0, 1),))
    sampling = SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.5)
    rows = [
        bench.greedy("old", [3 + i % 90 for i in range(250)], 280),
        msgspec.structs.replace(
            bench.greedy("new", [5 + i % 70 for i in range(250)], 280), sampling=sampling, logprobs=1
        ),
    ]
    with bench.mesh(2) as mesh:
        mesh.connect()
        placement = bench.split(Sharding.PIPELINE, NUM_LAYERS, [3, 3])
        mesh.load(tiny_llama, placement, kv=KvBudget(ranks=(free, tight)))
        alone = [answers(mesh, [msgspec.structs.replace(row, id=f"{row.id} alone")])[0] for row in rows]
        assert answers(mesh, rows) == alone
        assert len(mesh.answer("new").logprobs) == 280
        mesh.leader.wait_for_kind(Heartbeat, lambda beat: beat.num_preempted == 1)
        assert mesh.stop() == [0, 0]
