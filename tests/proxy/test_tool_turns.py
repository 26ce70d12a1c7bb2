"""Earlier calls and results as the stricter templates want them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mlx_mesh.proxy.convert.tool_turns import for_template
from mlx_mesh.proxy.tokenizer import ModelTokenizer


def turns_of(call_id: str) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": {}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": call_id},
        {"role": "tool", "content": "6", "tool_call_id": "of nobody"},
        {"role": "tool", "content": "7", "tool_call_id": call_id, "name": "given"},
    ]


def test_results_get_the_name_of_the_function_that_they_answer(thinker: ModelTokenizer) -> None:
    before = turns_of("call_1")
    after = for_template(before, thinker)
    assert [turn.get("name") for turn in after] == [None, "add", None, "given"]
    assert before == turns_of("call_1"), "the caller's turns are left alone"
    assert after[0] == before[0]


def test_mistrals_templates_get_ids_of_nine_letters_that_still_match(
    model_with: Callable[..., ModelTokenizer], families: Any
) -> None:
    mistral = families.FAMILIES["mistral"]
    model = model_with(families.template_of(mistral), mistral.special)
    after = for_template(turns_of("call_0123456789abcdef"), model)
    new_id = after[0]["tool_calls"][0]["id"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", new_id) and after[1]["tool_call_id"] == new_id
    assert for_template(turns_of("abcDEF123"), model)[1]["tool_call_id"] == "abcDEF123"
