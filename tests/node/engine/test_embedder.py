"""Embedding models: vectors against a plain reading of the weights, and turns of requests."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_mesh.mesh.embedding_memory import BATCH_TOKENS
from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.messages import Embed
from mlx_mesh.node.engine.embedder import Jobs, Refusal
from mlx_mesh.node.engine.encoders import Encoder

TEXTS = ["a", "some words", "another text, long"]


def by_hand(folder: Path, ids: Sequence[int], pooling: str) -> Any:
    """The unit vector of one input, in float64 and without any batching."""
    w = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    gelu = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(2):
        at = f"encoder.layer.{layer}."
        heads = [
            linear(x, f"{at}attention.self.{part}").reshape(len(ids), 2, 8).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        ]
        scores = heads[0] @ heads[1].transpose(0, 2, 1) / math.sqrt(8)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ heads[2]
        mixed = mixed.transpose(1, 0, 2).reshape(len(ids), 16)
        x = norm(linear(mixed, f"{at}attention.output.dense") + x, f"{at}attention.output.LayerNorm")
        inner = gelu(linear(x, f"{at}intermediate.dense"))
        x = norm(linear(inner, f"{at}output.dense") + x, f"{at}output.LayerNorm")
    vector = x.mean(0) if pooling == "mean" else x[0]
    return vector / np.linalg.norm(vector)


def with_pooling(folder: Path, target: Path, mode: str) -> Path:
    shutil.copytree(folder, target)
    (target / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "pooling_mode_max": False}))
    return target


@pytest.mark.parametrize(("mode", "pooling"), [("mean_tokens", "mean"), ("cls_token", "cls")])
def test_vectors_are_berts_whatever_else_is_in_the_batch(
    tiny_bert: Path, tmp_path: Path, mode: str, pooling: str
) -> None:
    encoder = Encoder(with_pooling(tiny_bert, tmp_path / "bert", f"pooling_mode_{mode}"))
    ids = encoder.tokenize(TEXTS)
    assert [len(one) for one in ids] == [3, 12, 20]  # the file's own limit of 8 tokens is not used
    together = encoder.embed(ids)
    for row, one in zip(together, ids, strict=True):
        assert np.abs(row - by_hand(tiny_bert, one, pooling)).max() < 1e-5
        assert np.abs(row - encoder.embed([one])[0]).max() < 1e-6


def test_a_decoders_vector_is_its_last_tokens_state(tiny_llama: Path) -> None:
    from mlx_lm.utils import load_model

    encoder = Encoder(tiny_llama)
    ids = encoder.tokenize(TEXTS)
    import mlx.core as mx

    model, _ = load_model(tiny_llama)
    for row, one in zip(encoder.embed(ids), ids, strict=True):
        state = np.array(model.model(mx.array([one]))[0, -1])
        assert np.abs(row - state / np.linalg.norm(state)).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("config.json", {"model_type": "gemma3_text"}, "gemma3_text"),
        ("config.json", {"hidden_size": 17}, "do not fit"),
        ("config.json", {"position_embedding_type": "relative_key"}, "positions"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "pooling"),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "Dense"),
    ],
)
def test_what_a_folder_asks_for_and_is_not_known_is_refused(
    tiny_bert: Path, tmp_path: Path, name: str, change: Any, words: str
) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "bert"))
    path = folder / name
    old = json.loads(path.read_text()) if path.is_file() else None
    path.write_text(json.dumps(old | change if isinstance(old, dict) else change))
    with pytest.raises(SettingsError, match=words):
        Encoder(folder)


def test_requests_take_turns_and_share_batches(tiny_bert: Path) -> None:
    encoder = Encoder(tiny_bert)
    jobs = Jobs(encoder)
    jobs.add(Embed(id="large", inputs=("a text of twenty",) * 300))
    jobs.add(Embed(id="small", inputs=("b", "c")))
    first = jobs.next_batch()
    assert [job.request.id for job, _ in first][:5] == ["large", "small", "large", "small", "large"]
    assert len(first) * 18 <= BATCH_TOKENS
    jobs = Jobs(encoder)
    jobs.add(Embed(id="large", inputs=("a text of twenty",) * 300))
    jobs.add(Embed(id="small", inputs=("b", "c")))
    jobs.add(Embed(id="gone", inputs=("d",) * 5))
    jobs.drop("gone")
    order = []
    while len(jobs):
        order += [(done.id, len(done.vectors) // 64) for done in jobs.run_batch()]
    assert order == [("small", 2), ("large", 300)]


def test_dimensions_are_the_first_ones_at_unit_length(tiny_bert: Path) -> None:
    jobs = Jobs(Encoder(tiny_bert))
    jobs.add(Embed(id="whole", inputs=("x",)))
    jobs.add(Embed(id="part", inputs=("x",), dimensions=4))
    answers = {answer.id: np.frombuffer(answer.vectors, "<f4") for answer in jobs.run_batch()}
    expected = answers["whole"][:4] / np.linalg.norm(answers["whole"][:4])
    assert np.abs(answers["part"] - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (Embed(id="r", inputs=("x" * 23,)), "context_length_exceeded", "input"),
        (Embed(id="r", inputs=((1, 2, 260),)), "invalid_value", "input"),
        (Embed(id="r", inputs=("x",), dimensions=17), "invalid_value", "dimensions"),
        (Embed(id="r", inputs=((3,) * 24,) * 13_000), "context_length_exceeded", "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused_with_numbers(
    tiny_bert: Path, request_: Embed, code: str, param: str
) -> None:
    with pytest.raises(Refusal) as refused:
        Jobs(Encoder(tiny_bert)).add(request_)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_truncation_keeps_the_end_token(tiny_bert: Path) -> None:
    jobs = Jobs(Encoder(tiny_bert))
    jobs.add(Embed(id="r", inputs=("x" * 40,), truncate=True))
    ((job, _),) = jobs.next_batch()
    assert len(job.ids[0]) == 24 and job.ids[0][0] == 0 and job.ids[0][-1] == 1
