"""Answers of a given form: what the engine is told to match, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlx_mesh.proxy import grammar_check
from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.grammars import CAN_FORCE_CALLS, Calls, NotConstrainable, json_part, whole_grammar
from mlx_mesh.proxy.markup import Region
from mlx_mesh.proxy.tokenizer import ModelTokenizer

CHAT = "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}
ADA = '{"name": "Ada", "age": 36}'

Matches = Callable[[str, str], bool]


@pytest.fixture(scope="session")
def matches_with() -> Callable[[ModelTokenizer], Matches]:
    """Of a model: whether a text is a whole answer under a grammar."""

    def of(model: ModelTokenizer) -> Matches:
        assert model._backend is not None
        vocabulary = LLTokenizer(model._backend.to_str(), eos_token=list(model.end_token_ids))

        def matches(grammar: str, text: str) -> bool:
            matcher = LLMatcher(vocabulary, grammar)
            ids = list(model.plain_ids(text))
            return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

        return matches

    return of


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
            ADA,
            "{}",
        ),
        ({"guided_json": PERSON}, ADA, '{"name": "Augusta", "age": 36}'),
        ({"guided_json": '{"type": "integer"}'}, "36", "x"),
        ({"guided_regex": "[a-c]{2}/x"}, "ab/x", "abc/x"),
        ({"guided_choice": ["yes", 'no "really"']}, 'no "really"', "maybe"),
        ({"guided_grammar": 'start: "a" rest\nrest: /b+/'}, "abb", "ac"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes", "no"),
    ],
)
def test_a_form_becomes_a_grammar_that_exactly_such_answers_match(
    plain_front: Any, tokenizer: ModelTokenizer, matches_with: Any, fields: Any, good: str, bad: str
) -> None:
    matches = matches_with(tokenizer)
    for path, prompt in (
        (CHAT, {"messages": [{"role": "user", "content": "?"}]}),
        ("/v1/completions", {"prompt": "?"}),
    ):
        assert plain_front.post(path, {**prompt, **fields}).status_code == 200
        grammar = plain_front.coordinator.requests[-1].grammar
        assert matches(grammar, good) and not matches(grammar, bad) and not matches(grammar, good + "{")


def test_every_dialect_has_its_own_way_to_say_it(
    plain_front: Any, tokenizer: ModelTokenizer, matches_with: Any
) -> None:
    matches = matches_with(tokenizer)
    turn = {"messages": [{"role": "user", "content": "?"}]}
    schema = {"type": "json_schema", "schema": PERSON}
    bodies = [
        ("/v1/responses", {"input": "?", "text": {"format": {**schema, "name": "p"}}}),
        ("/v1/messages", {**turn, "model": "local", "max_tokens": 5, "output_config": {"format": schema}}),
        ("/api/chat", {**turn, "model": "local", "format": PERSON}),
        ("/api/generate", {"prompt": "?", "model": "local", "format": PERSON}),
        ("/api/generate", {"prompt": "?", "raw": True, "model": "local", "format": PERSON}),
    ]
    for path, body in bodies:
        assert plain_front.post(path, body).status_code == 200, path
        assert matches(plain_front.coordinator.requests[-1].grammar, ADA), path


def test_plain_requests_have_no_grammar(plain_front: Any) -> None:
    assert plain_front.chat(response_format={"type": "text"}).status_code == 200
    assert plain_front.coordinator.requests[-1].grammar == ""


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guided_regex": "a("}, "guided_regex", "invalid_grammar"),
        ({"guided_regex": 5}, "guided_regex", "invalid_value"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar", "invalid_grammar"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": {"type": "object", "not": {}}}, "guided_json", "invalid_grammar"),
        ({"guided_json": {"type": "string", "description": "x" * 600_000}}, "guided_json", "invalid_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "unsupported_parameter"),
    ],
)
def test_a_form_that_cannot_be_is_refused_before_anything_is_generated(
    plain_front: Any, fields: Any, param: str, code: str
) -> None:
    before = len(plain_front.coordinator.requests)
    response = plain_front.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
    assert len(plain_front.coordinator.requests) == before


def chained(num_rules: int, name: str) -> str:
    """A grammar that is as deep as it has rules."""
    rules = [f"{name}{at}: {name}{at + 1}" for at in range(num_rules)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{num_rules}: "a"'])


@pytest.mark.parametrize("name", ["r", "T"])
def test_a_grammar_that_overflows_a_stack_costs_its_own_request_only(plain_front: Any, name: str) -> None:
    response = plain_front.chat(guided_grammar=chained(12_000, name))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_grammar")
    assert "make it simpler" in error["message"]
    assert plain_front.chat(guided_grammar=chained(20, name)).status_code == 200


def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_CHILD", [sys.executable, "-I", "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(grammar_check, "CHECK_S", 0.2)
    problem = asyncio.run(grammar_check.GrammarChecker().problem_of("start: /a/"))
    assert problem == "it takes longer than 0.2 s to compile; make it simpler."


def test_a_schema_that_was_seen_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def ask(grammar: str) -> str:
        asked.append(grammar)
        return "bad" if grammar == "b" else ""

    async def run() -> list[str]:
        checker = grammar_check.GrammarChecker()
        return [await checker.problem_of(grammar) for grammar in ("a", "b", "a", "b")]

    monkeypatch.setattr(grammar_check, "_ask_child", ask)
    assert asyncio.run(run()) == ["", "bad", "", "bad"] and asked == ["a", "b"]


def test_whose_turn_does_not_come_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(grammar: str) -> str:
        await asyncio.Event().wait()
        return ""

    async def run() -> None:
        checker = grammar_check.GrammarChecker()
        others = [
            asyncio.create_task(checker.problem_of(str(at))) for at in range(grammar_check.NUM_TOGETHER)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await checker.problem_of("mine")
        assert (refused.value.status, refused.value.code) == (503, "grammar_check_timeout")
        assert refused.value.retry_after_s
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    monkeypatch.setattr(grammar_check, "_ask_child", never)
    monkeypatch.setattr(grammar_check, "TURN_S", 0.05)
    asyncio.run(run())


# ---------------------------------------------------------------- reasoning and calls


@pytest.mark.parametrize(
    ("region", "good", "bad"),
    [
        (
            Region.REASONING,
            ("Let me < think\n</think>\n\n" + ADA,),
            (ADA, "</think> no", "a</think>b</think>" + ADA),
        ),
        (Region.ANSWER, (ADA, "<think>So</think>\n" + ADA), ("So</think>" + ADA, "<think>So" + ADA)),
    ],
)
def test_the_form_begins_after_the_reasoning(
    thinker: ModelTokenizer, matches_with: Any, region: Region, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    grammar = whole_grammar(thinker.markup, region, thinker.special_token_id, json_part(PERSON), None)
    matches = matches_with(thinker)
    assert all(matches(grammar, text) for text in good)
    assert not any(matches(grammar, text) for text in bad)


@pytest.mark.parametrize("name", sorted(CAN_FORCE_CALLS))
def test_a_forced_call_is_what_the_family_writes_and_its_parser_reads(
    model_with: Callable[..., ModelTokenizer], families: Any, matches_with: Any, name: str
) -> None:
    family = families.FAMILIES[name]
    model = model_with(families.template_of(family), family.special, **dict(family.settings))
    matches = matches_with(model)
    region = model.markup.initial
    call = family.call.removesuffix("<|call|>")  # an end of text, where a model has it

    def grammar(only_one: bool) -> str:
        calls = Calls((families.WEATHER,), only_one)
        return whole_grammar(model.markup, region, model.special_token_id, None, calls)

    assert matches(grammar(True), call)
    assert not matches(grammar(True), call.replace("get_weather", "get_whether"))
    assert not matches(grammar(True), call.replace("city", "town"))
    assert not matches(grammar(True), call.replace("3", "three"))
    assert not matches(grammar(True), "It is sunny.")
    if name not in ("harmony", "kimi_k2"):  # one message, or one section, is one answer there
        assert matches(grammar(False), call + call) and not matches(grammar(True), call + call)


@pytest.mark.parametrize(
    ("choice", "allows_rain", "allows_answer"),
    [
        ("required", True, False),
        ({"type": "function", "function": {"name": "get_weather"}}, False, False),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"name": "get_weather"}]},
            },
            False,
            False,
        ),
        ("auto", True, True),
    ],
)
def test_tool_choice_and_a_form_together(
    start_front: Any,
    saying: Any,
    thinker: ModelTokenizer,
    families: Any,
    matches_with: Any,
    choice: Any,
    allows_rain: bool,
    allows_answer: bool,
) -> None:
    front = start_front(saying(thinker.plain_ids("x")), model=thinker)
    rain = {**families.WEATHER, "function": {**families.WEATHER["function"], "name": "get_rain"}}
    response = front.chat(
        tools=[families.WEATHER, rain], tool_choice=choice, guided_json=PERSON, enable_thinking=False
    )
    assert response.status_code == 200, response.text
    grammar = front.coordinator.requests[-1].grammar
    matches = matches_with(thinker)
    call = families.FAMILIES["json_tools"].call
    assert matches(grammar, call)
    assert matches(grammar, call.replace("get_weather", "get_rain")) == allows_rain
    assert matches(grammar, ADA) == allows_answer


def test_anthropics_names_force_a_call_too(
    start_front: Any, saying: Any, thinker: ModelTokenizer, families: Any, matches_with: Any
) -> None:
    front = start_front(saying(thinker.plain_ids("x")), model=thinker)
    weather = families.WEATHER["function"]
    tool = {"name": "get_weather", "input_schema": weather["parameters"]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        body = {"model": "local", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
        thinking = {"type": "disabled"}
        reply = front.post(
            "/v1/messages", {**body, "tools": [tool], "tool_choice": choice, "thinking": thinking}
        )
        assert reply.status_code == 200, reply.text
        grammar = front.coordinator.requests[-1].grammar
        assert matches_with(thinker)(grammar, families.FAMILIES["json_tools"].call)
        assert not matches_with(thinker)(grammar, "no call")


def test_calls_in_a_form_that_is_not_known_well_enough_are_not_forced(
    start_front: Any, saying: Any, model_with: Any, families: Any
) -> None:
    family = families.FAMILIES["pythonic"]
    model = model_with(families.template_of(family), family.special)
    front = start_front(saying(model.plain_ids("x")), model=model)
    response = front.chat(tools=[families.WEATHER], tool_choice="required")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_parameter") and "pythonic" in error[
        "message"
    ]


@pytest.mark.parametrize("wrong", [{"properties": ["a"]}, {"required": 5}])
def test_parameters_that_are_no_schema_are_refused_where_they_are_written_one_by_one(
    model_with: Callable[..., ModelTokenizer], families: Any, wrong: dict[str, Any]
) -> None:
    family = families.FAMILIES["qwen3_coder"]
    model = model_with(families.template_of(family), family.special, **dict(family.settings))
    weather = families.WEATHER["function"]
    tool = {"type": "function", "function": {**weather, "parameters": {**weather["parameters"], **wrong}}}
    with pytest.raises(NotConstrainable, match="get_weather are no JSON schema"):
        whole_grammar(model.markup, model.markup.initial, model.special_token_id, None, Calls((tool,)))
