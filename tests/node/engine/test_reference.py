"""A model recomputed a few layers at a time says what the whole model says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.reference import Answered, ReferenceTask
from mlx_mesh.node.engine import reference
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.loader import open_lazy

PROMPTS = (tuple((7 * k + 3) % 90 for k in range(40)), (5, 6, 7))


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Footprints without the certificate, which takes seconds and changes nothing here."""

    def footprint(model: str, adapter: str = "", *_: object) -> ModelFootprint:
        return measure(open_lazy(model, adapter), "")

    monkeypatch.setattr(reference, "kept_footprint", footprint)


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, by chunks of 16 and single steps."""
    cache = make_prompt_cache(model)
    tokens: list[int] = []
    logprobs: list[float] = []
    for start in range(0, len(prompt), 16):
        logits = model(mx.array([prompt[start : start + 16]]), cache=cache)
    while len(tokens) < count:
        rows = logits[0, -1]
        tokens.append(int(mx.argmax(rows)))
        logprobs.append(float(rows[tokens[-1]] - mx.logsumexp(rows)))
        logits = model(mx.array([tokens[-1:]]), cache=cache)
    return tokens, logprobs


# Plain; shared keys and values over cuts; recurrent layers; a latent cache with experts.
@pytest.mark.parametrize("family", ["llama", "gemma3n", "qwen3_next", "deepseek_v3"])
def test_every_token_and_logprob_is_the_whole_models(
    tiny: ModuleType, tmp_path: Path, unproven: None, family: str
) -> None:
    config = tiny.CONFIGS[family]
    folder = tiny.save(config, tmp_path)
    whole = open_lazy(folder).model
    expected = [greedy(whole, prompt, 6) for prompt in PROMPTS]
    answers = tuple(
        Answered(prompt_ids=prompt, answer_ids=tuple(tokens))
        for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)
    )
    said: list[str] = []
    found = reference.score_answers(
        str(folder), "", ReferenceTask(answers=answers, memory_bytes=1), said.append
    )
    footprint = measure(open_lazy(folder), "")
    assert found.num_parts == len(said) == len(footprint.legal_cuts) + 1 > 1
    assert found.largest_part_bytes < footprint.weights_bytes
    for scored, (tokens, logprobs) in zip(found.answers, expected, strict=True):
        assert list(scored.best_ids) == tokens
        assert scored.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert scored.best_logprobs == scored.logprobs


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `unproven`, of models with towers."""

    def footprint(model: str, *_: object) -> ModelFootprint:
        return measure(open_lazy(model, with_vision=True), "")

    monkeypatch.setattr(reference, "kept_footprint", footprint)


def test_the_text_of_a_model_that_sees_is_recomputed(vlm: ModuleType, tmp_path: Path, seeing: None) -> None:
    folder = str(vlm.save(tmp_path))
    tokens, logprobs = greedy(open_lazy(folder, with_vision=True).model, PROMPTS[0], 6)
    answers = (Answered(prompt_ids=PROMPTS[0], answer_ids=tuple(tokens)),)
    task = ReferenceTask(answers=answers, memory_bytes=1)
    found = reference.score_answers(folder, "", task, lambda _: None)
    assert found.num_parts == vlm.NUM_LAYERS
    assert list(found.answers[0].best_ids) == tokens
    assert found.answers[0].logprobs == pytest.approx(logprobs, abs=1e-4)


def test_what_is_read_in_one_piece_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3n", "vision_config": {}}')
    footprint = SimpleNamespace(media=("image",))
    monkeypatch.setattr(reference, "kept_footprint", lambda *_: footprint)
    monkeypatch.setattr(reference, "load_shard", None)
    task = ReferenceTask(answers=(), memory_bytes=1)
    with pytest.raises(SettingsError, match=r"sees later ones.*without --layer-by-layer"):
        reference.score_answers(str(tmp_path), "", task, lambda _: None)


def test_a_wrong_token_is_scored_below_the_right_one(
    tiny: ModuleType, tmp_path: Path, unproven: None
) -> None:
    folder = tiny.save(tiny.llama(), tmp_path)
    tokens, _ = greedy(open_lazy(folder).model, PROMPTS[0], 4)
    wrong = (tokens[0], (tokens[1] + 1) % 90, *tokens[2:])
    task = ReferenceTask(answers=(Answered(prompt_ids=PROMPTS[0], answer_ids=wrong),), memory_bytes=10**9)
    found = reference.score_answers(str(folder), "", task, lambda _: None)
    assert found.num_parts == 1
    (scored,) = found.answers
    assert list(scored.best_ids[:2]) == tokens[:2]
    assert scored.logprobs[0] == scored.best_logprobs[0] and scored.logprobs[1] < scored.best_logprobs[1]
