"""Whatever stands where a part should: a part, or a 400 that names a field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.media.addresses import UrlRefused, read_url
from mlx_mesh.proxy.media.item import Item, blamed, item_part, items_of, joined, text_part
from mlx_mesh.proxy.media.parts import PartReader

READER = PartReader({})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.just("data:image/png;base64,aGk="),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "url", "source", "data", "media_type", "detail", "image_url", "text"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
KINDS = st.sampled_from(["image_url", "input_image", "text", "image", "base64", "url", "file", None, 5])
PARTS = st.dictionaries(
    st.sampled_from(["image_url", "detail", "text", "file_id", "source"]), JSON, max_size=4
)


URL = "a URL, like data:image/png;base64,…."


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"type": "image_url"},
            f"'p[0].image_url': its field 'url' is missing; the picture stands there as {URL}",
        ),
        ({"type": "image_url", "image_url": {"uri": "x"}}, "'p[0].image_url': its field 'url' is missing;"),
        ({"type": "image_url", "image_url": {"url": ""}}, "'p[0].image_url': its field 'url' is empty;"),
        ({"type": "image_url", "image_url": {"url": 5}}, "'p[0].image_url': its field 'url' is no text;"),
        ({"type": "image_url", "image_url": ""}, "'p[0].image_url': it is empty;"),
        ({"type": "input_image"}, f"'p[0].image_url': it is missing; the picture stands there as {URL}"),
        (
            {"type": "audio_url"},
            "'p[0].audio_url': its field 'url' is missing; the audio stands there as a URL",
        ),
        ({"type": "video"}, "'p[0].video': its field 'url' is missing;"),
        ({"type": "input_audio", "input_audio": {}}, "'p[0].input_audio.data': it is missing;"),
    ],
)
def test_what_is_missing_is_named(part: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        READER.openai([part], "p")
    assert words in str(caught.value)


def test_an_anthropic_url_is_told_of_the_sources_of_that_dialect() -> None:
    item = READER.anthropic_image(
        {"type": "image", "source": {"type": "url", "url": "https://a.example/x"}}, "p"
    )
    with pytest.raises(UrlRefused, match='takes files as sources of type "base64" only'):
        read_url(item.source, frozenset(), item.inline)


@given(PARTS, KINDS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_any_part_is_read_or_refused(part: dict[str, Any], kind: Any) -> None:
    for read in (
        lambda: READER.openai([{"type": kind, **part}], "p"),
        lambda: READER.anthropic_image({**part, "type": "image"}, "p"),
        lambda: READER.ollama("x", [part.get("source")], "p"),
    ):
        try:
            read()
        except ApiError as error:
            assert error.status == 400 and error.param is not None and error.param.startswith("p")


def test_texts_side_by_side_are_lines_and_pictures_part_them() -> None:
    one, two = Item("a", "p[1]"), Item("b", "p[4]")
    parts = [text_part("x"), item_part(one), text_part("y"), text_part("z"), item_part(two)]
    content = joined(parts)
    assert content == [text_part("x"), item_part(one), text_part("y\nz"), item_part(two)]
    assert items_of([{"content": "text"}, {"content": content}, {}]) == [one, two]
    assert joined([text_part("x"), text_part("y")]) == "x\ny" and joined([]) == ""


@pytest.mark.parametrize(
    ("param", "params", "named"),
    [
        ("images[1]", ("a", "b"), "b"),
        ("images[2]", ("a", "b"), ""),
        ("", ("a",), "a"),
        ("", ("a", "b"), ""),
        ("", (), ""),
        ("something", ("a",), "a"),
    ],
)
def test_which_part_the_engine_means(param: str, params: tuple[str, ...], named: str) -> None:
    assert blamed(param, {"image": params}) == named
