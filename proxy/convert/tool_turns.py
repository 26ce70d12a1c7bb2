"""Tool results as the stricter templates want them."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from mlx_mesh.proxy.tokenizer import ModelTokenizer

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def for_template(messages: list[dict[str, Any]], tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
    """Every tool turn gets the name of the function that it answers (Gemma's templates read it; OpenAI's
    clients send only the id), and Mistral's templates get ids of the only form that they take."""
    names = {
        call.get("id"): call["function"].get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), dict)
    }
    is_mistral = tokenizer.markup.family == "mistral"
    turns = []
    for message in messages:
        turn = dict(message)
        call_id = turn.get("tool_call_id")
        if turn["role"] == "tool" and "name" not in turn and names.get(call_id):
            turn["name"] = names[call_id]
        if is_mistral:
            if isinstance(call_id, str):
                turn["tool_call_id"] = _mistral_id(call_id)
            if turn.get("tool_calls"):
                turn["tool_calls"] = [
                    {**call, "id": _mistral_id(str(call.get("id", "")))} for call in turn["tool_calls"]
                ]
        turns.append(turn)
    return turns


def _mistral_id(call_id: str) -> str:
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
