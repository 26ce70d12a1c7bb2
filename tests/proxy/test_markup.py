"""Tags and calls of every family: found as mlx-lm finds them, read the same however the text is cut."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.messages import GenerateRequest, TokenChunk
from mlx_mesh.proxy import upstream
from mlx_mesh.proxy.assembler import Assembler, NewSequence
from mlx_mesh.proxy.markup import Markup, Region, _named_in
from mlx_mesh.proxy.pieces import CallPiece, Collected, EndPiece, Piece, collect
from mlx_mesh.proxy.splitter import Calls, Found, Splitter, Stretch
from mlx_mesh.proxy.tokenizer import ModelTokenizer

HERE = Path(__file__).parent


_spec = importlib.util.spec_from_file_location("proxy_families", HERE / "families.py")
assert _spec and _spec.loader
families: Any = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("proxy_families", families)
_spec.loader.exec_module(families)
ModelWith = Callable[..., ModelTokenizer]

HERMES = Markup(
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    upstream.load("tool_parsers.json_tools").parse_tool_call,
    "json_tools",
)
CALL = f"<tool_call>{families.JSON_CALL}</tool_call>"
TEXTS = [
    f"Let me see.\n\n{CALL}\n{CALL}\n",
    f"<think>\nHm, 1 < 2 </thin\n</think>\n\nSo:\n{CALL}",
    f"<think>a{CALL}",
    "<think>never ends",
    "an <thin line, a <tool_cal of  ",
    '<tool_call>{"name": broken</tool_call> and on',
    '<tool_call>{"name": "get_weather", "arguments": {"ci',
    "<think>x<tool_call>oops</tool_call>y</think>z",
    f"</think> {CALL} after\n\n{CALL}",
    "  leading and trailing  ",
]


def split(markup: Markup, region: Region, cuts: Sequence[str], is_cut: bool = False) -> list[Any]:
    """What comes out, with neighbours of one region joined, so that only content counts."""
    splitter = Splitter(markup, region, (families.WEATHER,))
    found: list[Found] = [one for text in cuts for one in splitter.add(text)] + splitter.finish(is_cut)
    joined: list[Any] = []
    for one in found:
        if isinstance(one, Calls):
            joined.append([(call.name, json.loads(call.arguments)) for call in one.calls])
        elif joined and isinstance(joined[-1], tuple) and joined[-1][0] is one.region:
            joined[-1] = (one.region, joined[-1][1] + one.text)
        else:
            joined.append((one.region, one.text))
    return joined


def model_of(name: str, model_with: ModelWith) -> ModelTokenizer:
    family = families.FAMILIES[name]
    return model_with(families.template_of(family), family.special, **dict(family.settings))


def test_every_parser_that_mlx_lm_ships_has_a_case_here() -> None:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "tool_parsers"
    shipped = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert shipped == set(families.FAMILIES) - {"harmony"}


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_the_family_is_recognised_and_its_call_is_read_token_by_token(
    model_with: ModelWith, name: str
) -> None:
    """The whole way: tokens, special ones among them, to a call."""
    model = model_of(name, model_with)
    assert (model.markup.family, model.takes_tools) == (name, True)
    before = "" if model.markup.initial is Region.HEADER else "Let me see.\n\n"
    ids = model.plain_ids(before + families.FAMILIES[name].call)
    for per_chunk in (1, 7, len(ids)):
        answer, _ = run(model, ids, per_chunk=per_chunk)
        assert answer.text == before.strip()
        (call,) = answer.calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", families.ARGUMENTS)
        assert answer.end == EndPiece("tool_calls")


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_a_call_that_is_cut_off_comes_back_as_text_and_never_raises(model_with: ModelWith, name: str) -> None:
    """Cut at every token. Nothing is lost: what is not part of a complete call is in the text."""
    model = model_of(name, model_with)
    family = families.FAMILIES[name]
    ids = model.plain_ids(family.call)
    for num in range(len(ids)):
        for reason in ("length", "stop"):
            answer, pieces = run(model, ids[:num], reason)
            if model.markup.call_end and reason == "length":
                assert not answer.calls
            if not answer.calls:
                assert answer.end.finish_reason == reason
                if model.markup.initial is Region.ANSWER:
                    shown = model._tokenizer.decode(list(ids[:num]), skip_special_tokens=False)
                    assert answer.text == shown.rstrip("\N{REPLACEMENT CHARACTER}")
            assert sum(isinstance(piece, EndPiece) for piece in pieces) == 1


def run(
    model: ModelTokenizer,
    ids: Sequence[int],
    reason: str = "stop",
    per_chunk: int = 1,
    region: Region | None = None,
    **options: Any,
) -> tuple[Collected, list[Piece]]:
    sequence = NewSequence(
        request=GenerateRequest(id="x", prompt_ids=(1,), max_tokens=1000),
        markup=model.markup,
        region=model.markup.initial if region is None else region,
        **{"tools": (families.WEATHER,), **options},
    )
    assembler = Assembler(model, sequence)
    pieces: list[Piece] = []
    for at in range(0, len(ids), per_chunk):
        pieces += assembler.add(TokenChunk(id="x", token_ids=tuple(ids[at : at + per_chunk])))
        if pieces and isinstance(pieces[-1], EndPiece):
            return collect(pieces), pieces
    pieces += assembler.add(TokenChunk(id="x", finish_reason=reason))  # type: ignore[arg-type]
    return collect(pieces), pieces


@pytest.mark.parametrize("region", [Region.ANSWER, Region.REASONING])
@pytest.mark.parametrize("text", TEXTS)
def test_every_single_cut_gives_the_same(text: str, region: Region) -> None:
    for is_cut in (False, True):
        whole = split(HERMES, region, [text], is_cut)
        assert split(HERMES, region, list(text), is_cut) == whole
        for at in range(len(text)):
            assert split(HERMES, region, [text[:at], text[at:]], is_cut) == whole


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, " ", "\n", "ab", "<", "</t"]
        )
    ),
    st.lists(st.integers(0, 200)),
)
def test_any_cutting_of_any_text_gives_the_same(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    marks = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(marks)]
    assert split(HERMES, Region.ANSWER, pieces) == split(HERMES, Region.ANSWER, [text])


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet='<tool_call>{}"/ thinkxyz\n', max_size=60))
def test_text_without_tags_is_kept_to_the_letter(text: str) -> None:
    if any(tag in text for tag in ("<think>", "</think>", "<tool_call>")):
        return
    assert "".join(one[1] for one in split(HERMES, Region.ANSWER, list(text))) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            TEXTS[0],
            [(Region.ANSWER, "Let me see."), *2 * [[("get_weather", families.ARGUMENTS)]]],
        ),
        (
            TEXTS[1],
            [
                (Region.REASONING, "Hm, 1 < 2 </thin"),
                (Region.ANSWER, "So:"),
                [("get_weather", families.ARGUMENTS)],
            ],
        ),
        (TEXTS[5], [(Region.ANSWER, TEXTS[5])]),
        ("So:\n" + TEXTS[5], [(Region.ANSWER, "So:\n" + TEXTS[5])]),
        (TEXTS[7], [(Region.REASONING, "x<tool_call>oops</tool_call>y"), (Region.ANSWER, "z")]),
        (TEXTS[9], [(Region.ANSWER, TEXTS[9])]),
    ],
)
def test_regions_and_their_white_space(text: str, expected: list[Any]) -> None:
    assert split(HERMES, Region.ANSWER, [text]) == expected


def test_nothing_that_may_become_a_tag_is_given_out_early() -> None:
    splitter = Splitter(HERMES, Region.REASONING, ())
    shown = ""
    for char in "thought</thi":
        shown += "".join(one.text for one in splitter.add(char) if isinstance(one, Stretch))
    assert shown == "thought"
    assert [one for one in splitter.add("nk>done")] == [Stretch(Region.ANSWER, "done", 15)]


def test_a_call_of_endless_length_is_given_back_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_mesh.proxy.splitter.MAX_CALL_CHARS", 50)
    text = "<tool_call>" + "x" * 60 + "</tool_call> and on"
    assert split(HERMES, Region.ANSWER, list(text)) == [(Region.ANSWER, text)]


@pytest.mark.parametrize(
    "said",
    [
        "[]",
        "null",
        "5",
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "get_weather", "arguments": [1]}',
        '{"name": "get_weather", "arguments": "not json"}',
        '{"name": "two words", "arguments": {}}',
        "[" * 100_000,
    ],
)
def test_a_malformed_call_is_text(said: str) -> None:
    text = f"<tool_call>{said}</tool_call>"
    assert split(HERMES, Region.ANSWER, [text]) == [(Region.ANSWER, text)]


def test_arguments_may_be_text_or_absent_or_under_another_name() -> None:
    for said, expected in (
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', {"a": 1}),
        ('{"name": "f", "arguments": null}', {}),
    ):
        assert split(HERMES, Region.ANSWER, [f"<tool_call>{said}</tool_call>"]) == [[("f", expected)]]


def test_several_calls_in_one_section_and_ids_of_the_model(model_with: ModelWith) -> None:
    model = model_of("kimi_k2", model_with)
    one = "<|tool_call_begin|>functions.get_weather:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{one.format(0)}{one.format(1)}<|tool_calls_section_end|>"
    answer, pieces = run(model, model.plain_ids(text))
    assert [call.id for call in answer.calls] == ["functions.get_weather:0", "functions.get_weather:1"]
    assert [piece.number for piece in pieces if isinstance(piece, CallPiece)] == [0, 1]
    answer, _ = run(model, model.plain_ids(text), one_call=True)
    assert len(answer.calls) == 1 and answer.end == EndPiece("tool_calls")


def test_harmony_channels_are_reasoning_and_answer(model_with: ModelWith) -> None:
    model = model_of("harmony", model_with)
    said = (
        "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello!"
    )
    answer, _ = run(model, model.plain_ids(said))
    assert (answer.reasoning, answer.text, answer.calls) == ("They greet.", "Hello!", ())
    answer, _ = run(model, model.plain_ids(said), tools=())
    assert (answer.reasoning, answer.text) == ("They greet.", "Hello!")


@pytest.mark.parametrize(
    ("template", "special", "tags"),
    [
        ("{{'<think></think>'}}", (), ("<think>", "</think>")),
        ("", ("<think>", "</think>"), ("<think>", "</think>")),
        ("", ("<longcat_think>", "</longcat_think>"), ("<longcat_think>", "</longcat_think>")),
        ("", ("<|channel>", "<channel|>"), ("<|channel>thought", "<channel|>")),
        (
            "",
            ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
            ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ),
        ("{#[THINK][/THINK]#}", ("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
        ("no tags", (), ("", "")),
    ],
)
def test_reasoning_tags_come_from_vocabulary_or_template(
    model_with: ModelWith, template: str, special: tuple[str, ...], tags: tuple[str, str]
) -> None:
    model = model_with(template + families.TURNS, special)
    assert (model.markup.think_start, model.markup.think_end) == tags
    if tags[0]:
        ids = model.plain_ids(f"{tags[0]}\nwhy\n{tags[1]}\n\nso")
        answer, _ = run(model, ids, tools=())
        assert (answer.reasoning, answer.text) == ("why", "so")


def test_stop_strings_end_answers_and_not_reasoning_or_calls(model_with: ModelWith) -> None:
    model = model_with(families.template_of(families.FAMILIES["json_tools"]) + "{#<think></think>#}")
    ids = model.plain_ids("<think>one END two</think>three END four")
    answer, _ = run(model, ids, stop_strings=("END",))
    assert (answer.reasoning, answer.text, answer.end) == ("one END two", "three ", EndPiece("stop", "END"))
    call = CALL.replace("Praha, ČR", "END")
    answer, _ = run(model, model.plain_ids(f"EN{call}D"), stop_strings=("END",))
    assert (answer.text, len(answer.calls), answer.end) == ("END", 1, EndPiece("tool_calls"))


def test_tokens_are_counted_as_reasoning_or_answer(model_with: ModelWith) -> None:
    model = model_with(families.template_of(families.FAMILIES["json_tools"]) + "{#<think></think>#}")
    reasoning, said = model.plain_ids("<think>because of this</think>"), model.plain_ids("yes it is")
    sequence = NewSequence(
        request=GenerateRequest(id="x", prompt_ids=(1,), max_tokens=1000), markup=model.markup
    )
    assembler = Assembler(model, sequence)
    pieces = assembler.add(TokenChunk(id="x", token_ids=(*reasoning, *said), finish_reason="stop"))
    answer = collect(pieces)
    assert assembler.tally.completion_tokens == len(reasoning) + len(said)
    assert assembler.tally.reasoning_tokens == len(reasoning)
    assert [token.token_id for token in answer.tokens] == list(said)
    assert answer.tokens[0].start == 0 and answer.tokens[-1].start < len("yes it is")


def test_the_parsers_come_without_mlx(tmp_path: Path) -> None:
    """In a process of its own: another test of this one may have loaded it."""
    program = """
import sys
from mlx_mesh.proxy import upstream
for name in sys.argv[1:]:
    assert callable(upstream.load("tool_parsers." + name).parse_tool_call)
upstream.load("tokenizer_utils")
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"mlx", "mlx_lm", "mlx_vlm", "torch"})
assert not loaded, loaded
"""
    names = sorted(set(families.FAMILIES) - {"harmony"})
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TRANSFORMERS_VERBOSITY": "error"}
    result = subprocess.run(
        [sys.executable, "-I", "-c", program, *names],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_a_parser_that_mlx_lm_does_not_have_is_named(model_with: ModelWith) -> None:
    with pytest.raises(SettingsError, match=r"no tool_parsers\.not_yet_written"):
        model_with(families.TURNS, (), tool_parser_type="not_yet_written")


def test_special_tokens_are_found_in_a_parsers_regular_expressions() -> None:
    special = {"<|call_part|>": 7, "[ARGS]": 8, "<|other|>": 9}
    found = _named_in(r"re.compile(r'<\|call_part\|>(.*)\[ARGS\]')", special)
    assert found == {7: "<|call_part|>", 8: "[ARGS]"}
