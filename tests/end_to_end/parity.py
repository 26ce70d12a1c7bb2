"""The requests of the parity suite, and answers in a form in which they can be compared. Not a test itself.

Everything is deterministic: greedy or seeded, or refused. What cannot be the same twice (ids, dates, speeds)
is left out of an answer; a stream is put together, because how its pieces are cut depends on timing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{#<tool_call> tool_call.name#}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Tools as Qwen writes them, and reasoning that can be switched."""

USER = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TURNS = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
]


@dataclass(frozen=True)
class Case:
    """One request. `generates`: it takes part in the run of all at the same time."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    streams: bool = False
    generates: bool = True
    is_quick: bool = True


def chat(name: str, is_quick: bool = True, headers: dict[str, str] | None = None, **fields: Any) -> Case:
    body = {"messages": USER, "max_tokens": 6, "temperature": 0, "enable_thinking": False, **fields}
    streams = bool(body.get("stream"))
    return Case(f"chat: {name}", CHAT, body, headers=headers or {}, streams=streams, is_quick=is_quick)


def complete(name: str, is_quick: bool = True, **fields: Any) -> Case:
    body = {"prompt": "One, two,", "max_tokens": 6, "temperature": 0, **fields}
    return Case(
        f"completions: {name}", COMPLETIONS, body, streams=bool(body.get("stream")), is_quick=is_quick
    )


def respond(name: str, is_quick: bool = True, **fields: Any) -> Case:
    body = {"input": "Count.", "max_output_tokens": 6, "temperature": 0, **fields}
    return Case(f"responses: {name}", RESPONSES, body, streams=bool(body.get("stream")), is_quick=is_quick)


def message(name: str, is_quick: bool = True, **fields: Any) -> Case:
    body = {"model": "local", "messages": USER, "max_tokens": 6, "temperature": 0, **fields}
    return Case(f"messages: {name}", MESSAGES, body, streams=bool(body.get("stream")), is_quick=is_quick)


def ollama(name: str, path: str, is_quick: bool = True, **fields: Any) -> Case:
    options = {"temperature": 0, "num_predict": 6, **fields.pop("options", {})}
    given = {"messages": USER, "think": False} if path == OLLAMA_CHAT else {"prompt": "One, two,"}
    body = {"model": "local", **given, "options": options, **fields}
    return Case(f"ollama: {name}", path, body, streams=bool(body.get("stream", True)), is_quick=is_quick)


def refused(name: str, path: str, body: Any, method: str = "POST", is_quick: bool = True) -> Case:
    return Case(f"refused: {name}", path, body, method, generates=False, is_quick=is_quick)


def get(path: str) -> Case:
    return Case(f"GET {path}", path, None, "GET", generates=False)


SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
LONG_TEXT = "a long prompt that many have in common, " * 6

CASES = (
    chat("greedy"),
    chat("streamed", stream=True),
    chat("streamed with usage", stream=True, stream_options={"include_usage": True}, **SAMPLED),
    chat("sampled", **SAMPLED),
    chat("xtc", temperature=1.0, seed=6, xtc_probability=0.5, xtc_threshold=0.1),
    chat("penalties", repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    chat("bias", logit_bias={"70": 5, "71": -100}),
    chat("log-probabilities", logprobs=True, top_logprobs=20),
    chat("log-probabilities streamed", False, logprobs=True, top_logprobs=2, stream=True),
    chat("three choices", n=3, temperature=1.0, seed=7),
    chat("three choices streamed", False, n=3, temperature=1.0, seed=7, stream=True),
    chat("stops", max_tokens=24, stop=list("abcdefghijklmnop")),
    chat("stops streamed", False, max_tokens=24, stop="e", stream=True),
    chat("newer limit", max_tokens=50, max_completion_tokens=5),
    chat("newer limit alone", False, max_tokens=None, max_completion_tokens=5),
    chat("reasoning", enable_thinking=True, max_tokens=10),
    chat("reasoning bounded", False, enable_thinking=True, thinking_budget=3, max_tokens=24),
    chat("reasoning bounded, streamed", enable_thinking=True, thinking_budget=3, max_tokens=24, stream=True),
    chat("reasoning stripped", False, enable_thinking=True, thinking_budget=3, strip_thinking=True),
    chat("schema", max_tokens=80, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    chat("any object", False, max_tokens=12, response_format={"type": "json_object"}),
    chat("expression", False, guided_regex="[a-c]{4}"),
    chat("choice", guided_choice=["red", "green", "blue"], max_tokens=10),
    chat("grammar", False, guided_grammar='start: "x" | "y" start', max_tokens=10),
    chat("forced call", False, max_tokens=90, tools=[ADD], tool_choice=NAMED),
    chat("forced call streamed", max_tokens=40, tools=[ADD], tool_choice="required", stream=True),
    chat("tools that may be called", False, tools=[ADD]),
    chat("turns with a call and its result", messages=TURNS, tools=[ADD], stream=True),
    chat(
        "parts of text", messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    ),
    chat("czech and emoji", False, messages=[{"role": "user", "content": "Ahoj, žluťoučký kůň 🐎 日本"}]),
    chat("conversation", headers={"X-Conversation-Id": "c1"}),
    chat("conversation of metadata", False, metadata={"conversation_id": "c2"}),
    chat("long prompt", messages=[{"role": "user", "content": LONG_TEXT + "One?"}]),
    chat(
        "long prompt again, another end",
        messages=[{"role": "user", "content": LONG_TEXT + "Two?"}],
        stream=True,
        stream_options={"include_usage": True},
    ),
    chat("long prompt, nothing kept", False, cache_salt="other", skip_prefix_cache=True),
    complete("text"),
    complete("streamed", stream=True, **SAMPLED),
    complete("token ids", prompt=[70, 71, 72], return_token_ids=True),
    complete("several prompts", False, prompt=["One", "Two, three", "Four"]),
    complete("echo", False, echo=True),
    complete("log-probabilities", False, logprobs=5),
    complete("best of four", best_of=4, n=2, temperature=1.0, seed=3),
    complete("json", False, guided_json=SCHEMA, max_tokens=80),
    respond("text"),
    respond("streamed", stream=True),
    respond("instructions", False, instructions="Be short.", seed=8, **{"temperature": 0.8, "top_p": 0.9}),
    respond(
        "schema",
        max_output_tokens=30,
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    ),
    respond(
        "forced call",
        False,
        max_output_tokens=90,
        reasoning={"effort": "none"},
        tools=[{"type": "function", "name": "add", "parameters": PARAMETERS}],
        tool_choice="required",
        stream=True,
    ),
    message("text", False),
    message("streamed", stream=True, system="Be short."),
    message(
        "forced call",
        False,
        max_tokens=90,
        tools=[{"name": "add", "input_schema": PARAMETERS}],
        tool_choice={"type": "tool", "name": "add"},
        thinking={"type": "disabled"},
    ),
    message("stops", False, max_tokens=24, stop_sequences=["e", "a"]),
    Case("messages: count", f"{MESSAGES}/count_tokens", {"model": "local", "messages": USER}),
    Case("responses: count", f"{RESPONSES}/input_tokens", {"input": "Count."}, is_quick=False),
    ollama("chat", OLLAMA_CHAT, stream=False),
    ollama("chat streamed", OLLAMA_CHAT, False, format=SCHEMA, options={"num_predict": 80}),
    ollama("generate streamed", OLLAMA_GENERATE),
    ollama("generate", OLLAMA_GENERATE, False, stream=False, raw=True, options={"seed": 4, "temperature": 1}),
    refused("no messages", CHAT, {}),
    refused("empty messages", CHAT, {"messages": []}),
    refused("no tokens", CHAT, {"messages": USER, "max_tokens": 0}),
    refused("a number as text", CHAT, {"messages": USER, "temperature": "0.5"}),
    refused("no JSON", CHAT, "no json"),
    refused("unknown field", CHAT, {"messages": USER, "made_up": 1}),
    refused("field of other servers", CHAT, {"messages": USER, "typical_p": 0.5}),
    refused("image", CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    refused("unknown model", CHAT, {"messages": USER, "model": "nobody/none"}),
    refused("too many choices", CHAT, {"messages": USER, "n": 17}),
    refused("too long", CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}),
    refused("bad expression", CHAT, {"messages": USER, "guided_regex": "("}),
    refused("call without tools", CHAT, {"messages": USER, "tool_choice": "required"}),
    refused("too large a body", CHAT, "x" * 40_000_000, is_quick=False),
    refused("suffix", COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    refused("token that is not", COMPLETIONS, {"prompt": [100_000]}),
    refused("unknown response", RESPONSES, {"input": "a", "previous_response_id": "resp_none"}),
    refused("no limit", MESSAGES, {"model": "local", "messages": USER}),
    refused("no prompt", OLLAMA_GENERATE, {"model": "nobody"}),
    refused("no embedding model", "/v1/embeddings", {"input": "a"}),
    refused("no embedding model of Ollama", "/api/embed", {"model": "local", "input": "a"}),
    refused("nor by its older name", "/api/embeddings", {"model": "local", "prompt": "a"}),
    refused("model on no list", "/v1/models/load", {"model": "nobody/none"}),
    refused("model on no list, older name", "/v1/models/switch", {"model": "nobody/none"}),
    refused("unload with a field that is none", "/v1/models/unload", {"keep": 1}),
    refused("wrong method", CHAT, None, "GET"),
    refused("no such page", "/v1/nothing", {}),
    refused("no such response", f"{RESPONSES}/resp_none", None, "GET"),
    refused("cancel of nothing", "/v1/requests/nothing/cancel", {}),
    get("/v1/models"),
    get("/v1/models/local"),
    get("/v1/models/none"),
    get("/health"),
    get("/ready"),
    get("/openapi.json"),
    get("/v1/capabilities"),
    get("/api/tags"),
    get("/api/version"),
    get("/api/ps"),
    Case("show", "/api/show", {"model": "local"}, generates=False),
)

VOLATILE = {
    *("id", "created", "created_at", "completed_at", "modified_at", "expires_at", "item_id", "response_id"),
    *("call_id", "sequence_number", "system_fingerprint", "timings", "total_duration", "load_duration"),
    *("prompt_eval_duration", "eval_duration", "world_size", "epoch", "obfuscation", "uptime_s"),
    *("tokens_per_second", "prompt_tokens_per_second"),
}
JOINED = {
    *("content", "text", "delta", "reasoning", "reasoning_content", "arguments", "partial_json"),
    *("thinking", "response"),
}
"""Of a stream the texts under these names are put together."""


def ask(client: httpx.Client, case: Case) -> Any:
    """The answer in a form to compare: status, type, and what is in it."""
    content = case.body if isinstance(case.body, str) else json.dumps(case.body)
    response = client.request(
        case.method,
        case.path,
        content=None if case.body is None else content,
        headers={"content-type": "application/json", **case.headers},
    )
    kind = response.headers.get("content-type", "").split(";")[0]
    found: Any = response.text
    if case.streams and response.status_code == 200:
        found = fold(_events(response.text))
    elif kind == "application/json":
        found = clean(response.json())
    return {"status": response.status_code, "type": kind, "answer": found}


def _events(text: str) -> Iterator[Any]:
    """Of server-sent events or lines of JSON."""
    for line in text.splitlines():
        line = line.removeprefix("data: ")
        if line.startswith("{"):
            yield json.loads(line)
        elif line and not line.startswith(":"):
            yield {"line": line}


def clean(value: Any) -> Any:
    """Without what cannot be the same twice."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items() if key not in VOLATILE}
    return [clean(item) for item in value] if isinstance(value, list) else value


def fold(events: Iterator[Any]) -> dict[str, Any]:
    """A stream as one object: texts joined, other values in order, each once in a row."""
    found: dict[str, list[Any]] = {}
    for event in events:
        for path, value in _leaves(clean(event), ""):
            values = found.setdefault(path, [])
            if path.rsplit(".", 1)[-1] in JOINED and isinstance(value, str):
                values[:] = ["".join(map(str, values)) + value]
            elif "logprobs" in path or not values or values[-1] != value:
                values.append(value)
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            if path == ".choices" and isinstance(item, dict):  # in which order they speak depends on timing
                number = item["index"]
                item = {key: part for key, part in item.items() if key != "index"}
            # And so does how many tokens come in an event.
            yield from _leaves(item, f"{path}[{'*' if 'logprobs' in path else number}]")
    else:
        yield path, value


def without_cache(value: Any) -> Any:
    """Without how much of a prompt was known already, which depends on what ran before (Anthropic's
    `input_tokens` are those that were not)."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if "cache" not in key and "input_tokens" not in key}
        return {key: without_cache(item) for key, item in kept.items()}
    return [without_cache(item) for item in value] if isinstance(value, list) else value


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two answers differ; floats may by the noise of another order of sums."""
    if isinstance(one, float) and isinstance(other, float):
        return [] if math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3) else [f"{path}: {one} {other}"]
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted(one.keys() | other.keys())
        return [
            text for name in names for text in differences(one.get(name), other.get(name), f"{path}.{name}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for at, (a, b) in pairs for text in differences(a, b, f"{path}[{at}]")]
    return [] if one == other else [f"{path}: {str(one)[:200]} | {str(other)[:200]}"]


# ---------------------------------------------------------------- more than one request


def stored_responses(client: httpx.Client) -> Any:
    """A conversation by ids: go on, look, delete, look again."""
    first = client.post(RESPONSES, json={"input": "a", "max_output_tokens": 4, "temperature": 0}).json()
    again = {"input": "b", "previous_response_id": first["id"], "max_output_tokens": 4, "temperature": 0}
    second = client.post(RESPONSES, json=again).json()
    where = f"{RESPONSES}/{second['id']}"
    seen = [client.get(where), client.get(f"{where}/input_items"), client.delete(where), client.get(where)]
    found = [(answer.status_code, clean(answer.json())) for answer in seen]
    return json.loads(
        json.dumps([clean(second), found]).replace(second["id"], "ID").replace(first["id"], "ID")
    )


def disconnect(client: httpx.Client) -> Any:
    """Five clients leave in the middle; the next request is served as ever."""
    body = {"messages": USER, "max_tokens": 1500, "temperature": 0, "stream": True}
    for seed in range(5):
        with client.stream("POST", CHAT, json={**body, "seed": seed}) as response:
            next(response.iter_text())
    return ask(client, CASES[0])


def cancel(client: httpx.Client) -> Any:
    """By the request's own id, from another connection."""
    body = {"messages": USER, "max_tokens": 1500, "temperature": 0, "stream": True}
    with client.stream("POST", CHAT, json=body, headers={"x-request-id": "to-cancel"}) as response:
        pieces = response.iter_lines()
        next(pieces)
        told = client.post("/v1/requests/to-cancel/cancel").status_code
        last = [line for line in pieces if "error" in line or "DONE" in line]
    return [told, [clean(json.loads(line.removeprefix("data: "))) for line in last if "error" in line]]


def metrics(client: httpx.Client) -> Any:
    """Names of what is counted."""
    lines = client.get("/metrics").text.splitlines()
    return sorted(line for line in lines if line.startswith("# TYPE"))


def cluster(client: httpx.Client) -> Any:
    """The form of what is said of the mesh, and who says how many they are."""
    status = client.get("/v1/cluster/status")
    nodes = client.get("/v1/cluster/nodes").json()
    size = status.json()["world_size"]
    assert status.headers["x-mlx-mesh-world-size"] == str(size) == str(len(nodes["ranks"]))
    return [sorted(status.json()), sorted(nodes), sorted(nodes["ranks"][0])]


def caches(client: httpx.Client) -> Any:
    """The form of what is said of kept prompts (the figures are as old as a heartbeat), and a reset."""
    stats, other = client.get("/v1/cache/stats").json(), client.get("/v1/kv_cache/stats").json()
    reset = client.post("/v1/cache/reset")
    return [sorted(stats), sorted(stats["ranks"][0]), sorted(other), reset.status_code, clean(reset.json())]


def same_prompt_twice(client: httpx.Client) -> Any:
    """https://github.com/jundot/omlx/issues/919: the second answer says what was known, in both modes."""
    body = {"messages": [{"role": "user", "content": "Again and again. " * 8}], "max_tokens": 4}
    body |= {"temperature": 0, "enable_thinking": False}
    client.post(CHAT, json=body)
    whole = client.post(CHAT, json=body).json()["usage"]
    more = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = list(_events(client.post(CHAT, json=body | more).text))[-2]["usage"]
    known = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (whole, streamed)]
    assert min(known) > whole["prompt_tokens"] - 3, (known, whole)
    return known


def one_end(client: httpx.Client) -> Any:
    """https://github.com/waybarrios/vllm-mlx/issues/628: a stream that ends by end-of-text says so once."""
    body = {"prompt": "Which?", "guided_choice": ["red"], "stream": True, "temperature": 0, "max_tokens": 9}
    events = list(_events(client.post(COMPLETIONS, json=body).text))
    ends = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert [end for end in ends if end] == ["stop"] and events[-1] == {"line": "[DONE]"}, events
    found = fold(iter(events))
    assert found[".choices[0].text"] == ["red"], found
    return found


def billing_line(client: httpx.Client) -> Any:
    """https://github.com/waybarrios/vllm-mlx/pull/277: a line of every turn is no part of a prompt."""
    found = []
    for turn in ("a1", "b2"):
        system = (
            f"x-anthropic-billing-header: cch={turn};\nYou are a careful agent who reads all files twice."
        )
        body = {"model": "local", "system": system, "messages": USER, "max_tokens": 3, "temperature": 0}
        found.append(client.post(MESSAGES, json=body).json())
    usage = found[1]["usage"]
    assert usage["input_tokens"] < 4 < usage["cache_read_input_tokens"], usage
    return clean(found)


def only_a_call(client: httpx.Client) -> Any:
    """https://github.com/Blaizzy/mlx-vlm/issues/1785: a turn of nothing but a tool's use, and its result."""
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}}
    turns = [
        *USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "5"}]},
    ]
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    body = {"model": "local", "messages": turns, "tools": tools, "max_tokens": 4, "temperature": 0}
    answer = client.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    return clean(answer.json())


SCRIPTS: tuple[Callable[[httpx.Client], Any], ...] = (
    stored_responses,
    same_prompt_twice,
    one_end,
    billing_line,
    only_a_call,
    disconnect,
    cancel,
    metrics,
    cluster,
    caches,
)
"""After the cases, in this order."""

ELSEWHERE = frozenset({"/v1/cluster/nodes/{host}/drain", "/v1/cluster/nodes/{host}/add", "/v1/cluster/scan"})
"""Paths that change the mesh itself or look for others on the network; others test them."""


def paths_without_a_case(document: dict[str, Any]) -> list[str]:
    """Of an OpenAPI document: paths that nothing here asks for."""
    asked = {case.path for case in CASES} | {"/metrics", "/v1/cluster/status", "/v1/cluster/nodes"}
    asked |= {"/v1/cache/stats", "/v1/cache/reset", "/v1/kv_cache/stats"}
    asked |= {f"{RESPONSES}/{{response_id}}/input_items", f"{RESPONSES}/{{response_id}}/cancel"}

    def is_asked(path: str) -> bool:
        if path in asked or path in ELSEWHERE:
            return True
        head, _, tail = path.partition("{")
        end = tail.partition("}")[2]
        return bool(tail) and any(one.startswith(head) and one.endswith(end) for one in asked)

    return sorted(path for path in document["paths"] if not is_asked(path))
