"""Tokens to text: no character is ever split, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from mlx_mesh.proxy.detokenizer import REPLACEMENT, Detokenizer
from mlx_mesh.proxy.tokenizer import ModelTokenizer

IdsOf = Callable[[str], list[int]]

TEXTS = [
    "plain words, and more",
    "你好，世界 — žluťoučký kůň",
    "family 👩‍👩‍👧‍👦 flag 🇨🇿 skin 👍🏽",
    "한국어 العربية עברית",
    "tabs\tand\n\nlines",
    "  leading and  double  spaces ",
    "",
]


def pieces(decoder: ModelTokenizer, ids: list[int], prompt_tail: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(decoder, prompt_tail)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_pieces_join_to_the_text_without_replacement_characters(
    tokenizer: ModelTokenizer, ids_of: IdsOf, text: str
) -> None:
    ids = ids_of(text)
    got = pieces(tokenizer, ids)
    assert not any(REPLACEMENT in piece for piece in got)
    assert "".join(got) == tokenizer.decode(ids) == text


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back(tokenizer: ModelTokenizer, ids_of: IdsOf, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert "".join(pieces(tokenizer, ids_of(text))) == tokenizer.decode(ids_of(text))


@given(st.lists(st.integers(min_value=0, max_value=329), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_tokens_join_to_their_decoding_apart_from_an_unfinished_last_character(
    tokenizer: ModelTokenizer, ids: list[int]
) -> None:
    joined = "".join(pieces(tokenizer, ids))
    whole = tokenizer.decode(ids)
    assert joined == whole or (joined == whole[:-1] and whole[-1] == REPLACEMENT)


def test_a_character_comes_with_its_last_token(tokenizer: ModelTokenizer, ids_of: IdsOf) -> None:
    ids = ids_of("a好b")
    assert len(ids) == 5  # the tiny vocabulary has no Chinese
    assert pieces(tokenizer, ids) == ["a", "", "", "好", "b", ""]


def test_a_character_that_is_cut_off_is_dropped_and_what_came_before_it_kept(
    tokenizer: ModelTokenizer, ids_of: IdsOf
) -> None:
    assert "".join(pieces(tokenizer, ids_of("ok 好")[:-1])) == "ok "


def test_a_replacement_character_that_the_model_means_is_kept(
    tokenizer: ModelTokenizer, ids_of: IdsOf
) -> None:
    assert "".join(pieces(tokenizer, ids_of(f"bad {REPLACEMENT}"))) == f"bad {REPLACEMENT}"
    assert "".join(pieces(tokenizer, ids_of(f"{REPLACEMENT} ok"))) == f"{REPLACEMENT} ok"


def test_bytes_that_are_no_text_do_not_hold_back_what_follows(
    tokenizer: ModelTokenizer, ids_of: IdsOf
) -> None:
    lone = ids_of("好")[1]  # a continuation byte
    detokenizer = Detokenizer(tokenizer)
    held = "".join(detokenizer.add(lone) for _ in range(50))
    assert set(held) == {REPLACEMENT} and len(held) > 20
    rest = "".join(detokenizer.add(token_id) for token_id in ids_of("fine"))
    assert rest.endswith("fine")


def test_special_tokens_are_not_shown(tokenizer: ModelTokenizer, ids_of: IdsOf) -> None:
    ids = [*ids_of("one"), 1, 2, 1, *ids_of(" two")]
    assert "".join(pieces(tokenizer, ids)) == "one two"


# ---------------------------------------------------------------- SentencePiece's way


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelTokenizer]:
    """Words begin with a low line, unknown characters are byte tokens, a leading space is dropped."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    letters = "abcdefghijklmnopqrstuvwxyz\N{LOWER ONE EIGHTH BLOCK}"
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {name: at for at, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    loaded = ModelTokenizer.load(str(folder))
    yield loaded
    loaded.close()


def sentencepiece_ids(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return list(tokenizer._encode(text, add_special=False, limit=0))


@pytest.mark.parametrize("text", ["hello there", "你好 žluť 👍🏽 end", "a 👩‍👩‍👧", "x  y"])
def test_byte_tokens_join_to_characters(sentencepiece: ModelTokenizer, text: str) -> None:
    ids = sentencepiece_ids(sentencepiece, text)
    got = pieces(sentencepiece, ids)
    assert not any(REPLACEMENT in piece for piece in got)
    assert "".join(got) == sentencepiece.decode(ids) == text


def test_an_unfinished_run_of_byte_tokens_loses_only_its_last_character(
    sentencepiece: ModelTokenizer,
) -> None:
    ids = sentencepiece_ids(sentencepiece, "ok 你好")[:-1]
    got = pieces(sentencepiece, ids)
    assert "".join(got) == "ok 你"


def test_a_completion_keeps_the_space_that_a_decoder_drops_at_the_start(
    sentencepiece: ModelTokenizer,
) -> None:
    prompt = tuple(sentencepiece_ids(sentencepiece, "one"))
    ids = sentencepiece_ids(sentencepiece, "two")  # begins with a low line
    assert "".join(pieces(sentencepiece, ids)) == "two"
    assert "".join(pieces(sentencepiece, ids, prompt)) == " two"


def test_special_tokens_between_words_do_not_cost_the_space(sentencepiece: ModelTokenizer) -> None:
    one, two = (sentencepiece_ids(sentencepiece, text) for text in ("one", "two"))
    assert "".join(pieces(sentencepiece, [*one, 1, 2, 1, *two])) == "one two"
