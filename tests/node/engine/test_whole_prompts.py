"""A prompt that is read in one forward, under a generator that asks for it in chunks."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator

from mlx_mesh.mesh.messages import Admission
from mlx_mesh.mesh.whole_prompt import Widths
from mlx_mesh.node.engine.features import Features, passed_on
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.engine.pictures import Pictures, PromptTooLong
from mlx_mesh.node.engine.prefix_rows import RowPrefixes
from mlx_mesh.node.engine.row_media import RowMedia
from mlx_mesh.node.engine.whole_prompts import WholePrompts, WholeRow


class Echo:
    """Gives each token's number as its only logit, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.language_model = SimpleNamespace(model=SimpleNamespace(norm=None))

    def __call__(self, tokens: Any, cache: list[Any] | None = None) -> Any:
        self.asked += tokens.tolist()
        return tokens[..., None].astype(mx.float32)


def row_of(*ids: int) -> RowMedia:
    media = RowMedia(Features(len(ids), {}, is_whole=True))
    media.whole = [WholeRow(ids)]
    return media


def test_the_first_chunk_reads_all_of_it_and_the_last_token_has_its_logits() -> None:
    echo = Echo()
    model, media = WholePrompts(echo), row_of(5, 6, 7, 8)
    for chunk in ([5, 6], [7]):
        assert model(mx.array([chunk]), cache=[media]).shape == (1, len(chunk), 1)
        media = copy.deepcopy(RowMedia.merge([media.extract(0)]))  # as the generator does in between
    assert model(mx.array([[8]]), cache=[media])[0, -1].item() == 8
    assert echo.asked == [[5, 6, 7, 8]]
    model(mx.array([[9]]), cache=[media])
    model(mx.array([[3]]), cache=[RowMedia()])
    assert echo.asked[1:] == [[9], [3]], "what comes behind it, and other rows, are read as ever"


def test_a_chunk_that_goes_beyond_the_prompt_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="beyond"):
        WholePrompts(Echo())(mx.array([[1, 2, 3]]), cache=[row_of(1, 2)])


class Noting:
    """A language part, and how many tokens it got at a time."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.language_model = part.language_model
        self.lengths: list[int] = []

    def make_cache(self) -> list[Any]:
        return list(self.part.make_cache())

    def __call__(self, tokens: Any, cache: list[Any] | None = None) -> Any:
        self.lengths.append(tokens.shape[1])
        return self.part(tokens, cache=cache)


def answer(part: Any, ids: list[int], features: Features, num_tokens: int) -> list[int]:
    """Greedy tokens of a row that is admitted with these ids, the last of which may be said already."""
    generator = BatchGenerator(WholePrompts(part), prefill_batch_size=1, prefill_step_size=8)
    RowPrefixes(generator).insert(
        Admission(id="row", prompt_ids=tuple(ids), max_tokens=num_tokens, stop_token_ids=()),
        features,
        max_tokens=[num_tokens],
    )
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += [response.token for response in generator.next()[1]]
    generator.close()
    return tokens


@pytest.mark.parametrize("family", ["paligemma", "gemma4#blocks"])
def test_a_row_that_comes_back_goes_on_as_if_it_had_never_left(tiny_vlm: ModuleType, family: str) -> None:
    whole = tiny_vlm.build(family)
    part = LanguagePart(whole.language_model, is_for_one_row=family == "paligemma")
    ids, features = tiny_vlm.features_in(whole, family, tiny_vlm.picture(family))
    assert features.is_whole
    said = answer(part, ids, features, 12)
    assert said == tiny_vlm.reference(whole, family, 12)[1]
    noting = Noting(part)
    assert answer(noting, [*ids, *said[:5]], features, 7) == said[5:]
    behind = noting.lengths[1:]
    assert noting.lengths[0] == features.length
    assert behind == ([1] * len(behind) if features.sees_ahead else [4, *[1] * (len(behind) - 1)])


@pytest.mark.parametrize(
    ("attention", "types", "is_passed_on"),
    [
        ("vision", [0, 1, 1, 0], True),
        ("vision", [0, 2, 0, 3], True),
        ("vision", [0, 3, 3, 0], False),
        (None, [0, 1, 1, 0], False),
    ],
)
def test_which_tokens_see_each_other_goes_to_the_language_model_where_it_asks(
    attention: str | None, types: list[int], is_passed_on: bool
) -> None:
    language_model = SimpleNamespace(config=SimpleNamespace(use_bidirectional_attention=attention))
    found = passed_on({"mm_token_type_ids": mx.array([types]), "input_ids": 1}, language_model)
    assert found.keys() == ({"mm_token_type_ids"} if is_passed_on else set())
    assert passed_on({}, language_model) == {}


def test_how_long_it_may_be_is_checked_before_anything_is_embedded(tiny_vlm: ModuleType) -> None:
    whole = tiny_vlm.build("paligemma")
    pictures = Pictures(Path(), whole, longest_whole=4, reads_whole=True)
    assert pictures.read_text((1, 2, 3, 4)).is_whole
    with pytest.raises(PromptTooLong, match=r"has 5 tokens, and this model reads it in one piece: .* for 4"):
        pictures.read_text((1, 2, 3, 4, 5))


@pytest.mark.long
@pytest.mark.parametrize("family", ["paligemma", "gemma3n", "gemma4#blocks"])
def test_a_forward_needs_no_more_memory_than_is_set_aside_for_it(tiny_vlm: ModuleType, family: str) -> None:
    """Logits of the whole prompt alone would be more than twice as much."""
    num_tokens, hidden, vocabulary = 512, 256, 64_000
    config = copy.deepcopy(tiny_vlm.CONFIGS[family]) | {"hidden_size": hidden, "vocab_size": vocabulary}
    inner: Any = 1024
    config["text_config"] |= {
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "num_attention_heads": 8,
        "head_dim": 32,
        "intermediate_size": [inner] * 9 if family == "gemma3n" else inner,
    }
    part = LanguagePart(tiny_vlm.build(family, config, is_blind=True).language_model)
    fields = {"inputs_embeds": mx.random.normal((1, num_tokens, hidden))}
    if family == "gemma3n":
        fields["per_layer_inputs"] = mx.random.normal((1, num_tokens, 9, 16))
    if family == "gemma4#blocks":
        fields["mm_token_type_ids"] = mx.array([[1] * 8 + [0] * (num_tokens - 8)])
    cache = part.make_cache()
    cache[-1].features = [Features(num_tokens, fields, is_whole=True)]
    cache[-1].whole = [WholeRow((5,) * num_tokens)]
    mx.eval(fields)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    logits = WholePrompts(part)(mx.array([[5] * num_tokens]), cache=cache)
    states = [one.state for one in cache[:-1]]
    mx.eval(logits[:, -1], states)
    kept = sum(int(array.nbytes) for _, array in tree_flatten(states))
    needed = mx.get_peak_memory() - before - kept
    most = Widths.of(config).bytes_of(num_tokens)
    assert 0.4 * most < needed < most < 4 * num_tokens * vocabulary / 2
