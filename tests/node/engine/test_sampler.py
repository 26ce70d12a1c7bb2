"""The leader's choice of tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils as upstream
import msgspec
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.llama import Model, ModelArgs

from mlx_mesh.mesh.messages import GenerateRequest, SamplingParams
from mlx_mesh.node.engine.exchanges import SoloExchange
from mlx_mesh.node.engine.sampler import (
    LeaderSampler,
    RowProcessor,
    exclude_top,
    filter_logits,
    is_plain_greedy,
    noise_key,
    penalise,
    xtc_applies,
)

VOCAB = 97


def random_logits(seed: int, vocab: int = VOCAB) -> Any:
    return mx.random.normal((1, vocab), key=mx.random.key(seed)) * 3


def request(
    request_id: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    logprobs: int | None = None,
    **sampling: Any,
) -> GenerateRequest:
    return GenerateRequest(
        id=request_id,
        prompt_ids=prompt,
        max_tokens=100,
        sampling=SamplingParams(**sampling),
        logprobs=logprobs,
    )


def choose(row: GenerateRequest, tokens: list[int], logits: Any) -> int:
    sampler = LeaderSampler(SoloExchange())
    scores = RowProcessor(row, sampler)(mx.array(tokens, mx.int32), logits)
    return int(sampler(scores).item())


def kept(logits: Any) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.array(logits[0]))).tolist())


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.5])
def test_xtc_leaves_out_what_mlx_lm_leaves_out(threshold: float) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        special = [int(mx.argmax(logits).item())] if seed % 2 else []
        theirs = upstream.apply_xtc(logits, 1.0, threshold, special)
        assert kept(exclude_top(logits, threshold, tuple(special))) == kept(theirs)


def test_xtc_applies_as_often_as_asked_and_always_at_the_same_positions() -> None:
    sampling = SamplingParams(xtc_probability=0.3, seed=4)
    positions = [at for at in range(2000) if xtc_applies(sampling, at)]
    assert 500 < len(positions) < 700
    assert positions == [at for at in range(2000) if xtc_applies(sampling, at)]
    assert positions != [
        at for at in range(2000) if xtc_applies(SamplingParams(xtc_probability=0.3, seed=5), at)
    ]
    assert not any(xtc_applies(SamplingParams(seed=4), at) for at in range(100))
    logits = random_logits(1)
    usual = choose(request(seed=4, temperature=0.01), [1, 2, 3], logits)
    other = choose(
        request(seed=4, temperature=0.01, xtc_probability=1.0, xtc_threshold=0.01), [1, 2, 3], logits
    )
    assert usual == int(mx.argmax(logits).item()) != other


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_mlx_lm_keeps(top_p: float) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        theirs = upstream.apply_top_p(logits - mx.logsumexp(logits), top_p)
        assert kept(filter_logits(logits, top_p=top_p)) == kept(theirs)


@pytest.mark.parametrize("top_k", [1, 5, 96])
def test_top_k_keeps_what_mlx_lm_keeps(top_k: int) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        assert kept(filter_logits(logits, top_k=top_k)) == kept(upstream.apply_top_k(logits, top_k))


def test_top_k_of_the_whole_vocabulary_or_more_keeps_everything() -> None:
    logits = random_logits(0)
    assert len(kept(filter_logits(logits, top_k=VOCAB))) == VOCAB
    assert len(kept(filter_logits(logits, top_k=10 * VOCAB))) == VOCAB


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_keeps_what_mlx_lm_keeps(min_p: float) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        assert kept(filter_logits(logits, min_p=min_p)) == kept(upstream.apply_min_p(logits, min_p))


def test_filters_together_keep_what_mlx_lm_keeps_by_applying_them_in_turn() -> None:
    for seed in range(20):
        logits = random_logits(seed)
        theirs = logits - mx.logsumexp(logits)
        theirs = upstream.apply_top_k(upstream.apply_min_p(upstream.apply_top_p(theirs, 0.9), 0.02), 7)
        assert kept(filter_logits(logits, top_p=0.9, top_k=7, min_p=0.02)) == kept(theirs)


def test_top_p_zero_keeps_the_best_token_only() -> None:
    logits = random_logits(3)
    assert kept(filter_logits(logits, top_p=0.0)) == {int(mx.argmax(logits).item())}


def test_equal_logits_at_a_threshold_stay_together() -> None:
    logits = mx.array([[2.0, 1.0, 1.0, 0.0]])
    assert kept(filter_logits(logits, top_k=2)) == {0, 1, 2}


# ---------------------------------------------------------------- penalties


def test_repetition_penalty_is_that_of_mlx_lm() -> None:
    tokens = mx.array([4, 9, 9, 30, 31], mx.int32)
    logits = random_logits(1)
    theirs = upstream.make_repetition_penalty(1.3, 3)(tokens, mx.array(logits))
    ours = penalise(logits, tokens, 5, SamplingParams(repetition_penalty=1.3, repetition_context_size=3))
    assert mx.allclose(ours, theirs).item()
    assert not mx.allclose(ours, random_logits(1)).item()


def test_presence_and_frequency_count_generated_tokens_and_not_the_prompt() -> None:
    tokens = mx.array([4, 5, 7, 7, 8], mx.int32)
    logits = mx.zeros((1, 10))
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    changed = penalise(logits, tokens, 2, sampling)[0].tolist()
    assert changed == [0, 0, 0, 0, 0, 0, 0, -1.0, -0.75, 0]


def test_logit_bias_is_added_to_the_named_tokens() -> None:
    changed = penalise(
        mx.zeros((1, 4)), mx.array([], mx.int32), 0, SamplingParams(logit_bias={2: 5.0, 0: -1.0})
    )
    assert changed[0].tolist() == [-1.0, 0.0, 5.0, 0.0]


def test_a_banned_token_is_never_chosen() -> None:
    logits = random_logits(0)
    best = int(mx.argmax(logits).item())
    greedy_row = request(temperature=0.0, logit_bias={best: -100.0})
    assert choose(greedy_row, [1, 2, 3], logits) != best


# ---------------------------------------------------------------- choice


def test_temperature_zero_takes_the_best_token_whatever_the_seed() -> None:
    logits = random_logits(5)
    best = int(mx.argmax(logits).item())
    for seed in range(5):
        assert choose(request(temperature=0.0, seed=seed, logprobs=0), [1, 2, 3], logits) == best


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = random_logits(5)
    best = int(mx.argmax(logits).item())
    assert choose(request(temperature=1e-30, seed=1), [1, 2, 3], logits) == best


def test_the_noise_depends_on_seed_and_position_only() -> None:
    assert noise_key(7, 12).tolist() == noise_key(7, 12).tolist()
    keys = {tuple(noise_key(s, p).tolist()) for s in (-1, 0, 1, 2**63) for p in (0, 1, 2)}
    assert len(keys) == 12


def test_samples_follow_the_distribution() -> None:
    logits = mx.array([[1.0, 0.0, -1.0, 2.0, 0.5]])
    temperature = 0.7
    num_draws = 2000
    row = request(temperature=temperature, seed=11)
    sampler = LeaderSampler(SoloExchange())
    processor = RowProcessor(row, sampler)
    choices = mx.stack(
        [sampler(processor(mx.zeros((position,), mx.int32), logits)) for position in range(num_draws)]
    )
    counts = np.bincount(np.array(choices).ravel(), minlength=5)
    expected = np.array(mx.softmax(logits[0] / temperature)) * num_draws
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 23.5  # 4 degrees of freedom: exceeded once in 10 000 seeds


def test_noise_of_a_millionth_in_the_logits_does_not_change_samples() -> None:
    changed = 0
    for position in range(300):
        logits = random_logits(position, 2000)
        noise = 1e-6 * mx.random.normal(logits.shape, key=mx.random.key(10_000 + position))
        row = request(temperature=1.0, seed=3)
        tokens = [1] * (position + 1)
        changed += choose(row, tokens, logits) != choose(row, tokens, logits + noise)
    assert changed == 0


def test_sixteen_bit_logits_are_sampled_in_float32() -> None:
    sampler = LeaderSampler(SoloExchange())
    scores = RowProcessor(request(temperature=1.0), sampler)(
        mx.array([1], mx.int32), random_logits(0).astype(mx.bfloat16)
    )
    assert scores.dtype == mx.float32


def test_only_bare_greedy_rows_go_without_a_processor() -> None:
    sampler = LeaderSampler(SoloExchange())
    assert is_plain_greedy(request(temperature=0.0, top_p=0.5, seed=4))
    assert sampler.processors(request(temperature=0.0)) == []
    for special in (
        request(temperature=0.1),
        request(temperature=0.0, logprobs=0),
        request(temperature=0.0, logit_bias={1: 1.0}),
        request(temperature=0.0, repetition_penalty=1.1),
        request(temperature=0.0, presence_penalty=0.1),
        request(temperature=0.0, frequency_penalty=-0.1),
    ):
        assert len(sampler.processors(special)) == 1


# ---------------------------------------------------------------- logprobs


def test_logprobs_are_the_models_before_temperature_penalties_and_filters() -> None:
    logits = random_logits(8)
    sampler = LeaderSampler(SoloExchange())
    row = request(temperature=0.3, top_k=4, presence_penalty=1.0, logit_bias={5: 50.0}, logprobs=3)
    processor = RowProcessor(row, sampler)
    token = int(sampler(processor(mx.array([1, 2, 3], mx.int32), logits)).item())
    noted = processor.take_logprobs(token)
    expected = np.array(logits[0] - mx.logsumexp(logits))
    best = np.argsort(-expected)[:3]
    assert token == 5
    assert noted is not None
    assert noted.logprob == pytest.approx(expected[5], abs=1e-5)
    assert [i for i, _ in noted.top] == best.tolist()
    assert [value for _, value in noted.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_logprobs_zero_gives_the_chosen_token_without_alternatives() -> None:
    sampler = LeaderSampler(SoloExchange())
    processor = RowProcessor(request(temperature=0.0, logprobs=0), sampler)
    token = int(sampler(processor(mx.array([1], mx.int32), random_logits(0))).item())
    noted = processor.take_logprobs(token)
    assert noted is not None
    assert noted.logprob < 0
    assert noted.top == ()


def test_a_row_without_logprobs_notes_nothing() -> None:
    sampler = LeaderSampler(SoloExchange())
    processor = RowProcessor(request(temperature=1.0), sampler)
    sampler(processor(mx.array([1], mx.int32), random_logits(0)))
    assert processor.take_logprobs(0) is None


# ---------------------------------------------------------------- in the generator


@pytest.fixture(scope="module")
def model() -> Any:
    mx.random.seed(0)
    args = ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    model = Model(args)
    mx.eval(model.parameters())
    return model


def generate(model: Any, rows: list[GenerateRequest], num_tokens: int, late: int = 0) -> dict[str, list[int]]:
    """Tokens by request; the last `late` rows are inserted after a few steps."""
    sampler = LeaderSampler(SoloExchange())
    generator = BatchGenerator(model, sampler=sampler)
    ids: dict[int, str] = {}
    tokens: dict[str, list[int]] = {row.id: list(row.sent_ids) for row in rows}

    def insert(some: list[GenerateRequest]) -> None:
        for row in some:
            (uid,) = generator.insert(
                [list(row.prompt_ids + row.sent_ids)],
                max_tokens=[num_tokens - len(row.sent_ids)],
                logits_processors=[sampler.processors(row)],
            )
            ids[uid] = row.id

    insert(rows[: len(rows) - late])
    step = 0
    while True:
        if step == 4:
            insert(rows[len(rows) - late :])
        prompts, responses = generator.next()
        step += 1
        for response in responses:
            tokens[ids[response.uid]].append(response.token)
        if not prompts and not responses and step > 4:
            generator.close()
            return tokens


def mixed_rows() -> list[GenerateRequest]:
    return [
        request("greedy", (5, 6, 7), temperature=0.0),
        request("hot", (5, 6, 7), temperature=1.2, seed=1),
        request("nucleus", (9, 8, 7, 6, 5), temperature=0.8, top_p=0.9, seed=2),
        request("punished", (1, 1, 1, 1), temperature=0.9, frequency_penalty=0.7, top_k=20, seed=1),
        request("told", (30, 31), temperature=0.0, logprobs=2),
        request("hot again", (5, 6, 7), temperature=1.2, seed=99),
    ]


def test_tokens_do_not_depend_on_the_batch_its_order_or_late_arrivals(model: Any) -> None:
    rows = mixed_rows()
    alone = {row.id: generate(model, [row], 24)[row.id] for row in rows}
    assert generate(model, rows, 24) == alone
    assert generate(model, rows[::-1], 24) == alone
    assert generate(model, rows, 24, late=3) == alone
    assert alone["hot"] != alone["hot again"]


def test_tokens_go_on_the_same_after_a_restart(model: Any) -> None:
    for row in mixed_rows():
        whole = generate(model, [row], 24)[row.id]
        for cut in (1, 9, 23):
            resumed = msgspec.structs.replace(row, sent_ids=tuple(whole[:cut]))
            assert generate(model, [resumed], 24)[row.id] == whole
