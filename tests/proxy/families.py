"""A call as each family of models writes it. Not a test: used by several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": "Praha, ČR", "days": 3}


@dataclass(frozen=True)
class Family:
    """`template` has what the family is known by; `special` are special tokens; `call` calls get_weather
    with ARGUMENTS."""

    template: str
    call: str
    special: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()


JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Praha, ČR", "days": 3}}'

FAMILIES = {
    "json_tools": Family("<tool_call> tool_call.name", f"<tool_call>\n{JSON_CALL}\n</tool_call>"),
    "qwen3_coder": Family(
        "<tool_call>\n<function=",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPraha, ČR\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm47": Family(
        "<arg_key>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Praha, ČR</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "laguna": Family(
        "",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Praha, ČR</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        (("tool_parser_type", "laguna"),),
    ),
    "longcat": Family(
        "<longcat_tool_call>",
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Praha, ČR</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
    ),
    "minimax_m2": Family(
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Praha, ČR</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "minicpm5": Family(
        '<function name="x"><param name="y">',
        '<function name="get_weather"><param name="city">Praha, ČR</param>'
        '<param name="days">3</param></function>',
    ),
    "mistral": Family(
        "[TOOL_CALLS]",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Praha, ČR", "days": 3}',
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    "kimi_k2": Family(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Praha, ČR", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "kimi_k3": Family(
        "",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Praha, ČR<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="integer"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
    "gemma4": Family(
        "<|tool_call><tool_call|>",
        '<|tool_call>call:get_weather{city:<|"|>Praha, ČR<|"|>,days:3}<tool_call|>',
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "function_gemma": Family(
        "<start_function_call>",
        "<start_function_call>call:get_weather{city:<escape>Praha, ČR<escape>,days:3}<end_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "pythonic": Family(
        "<|tool_call_start|>",
        '<|tool_call_start|>[get_weather(city="Praha, ČR", days=3)]<|tool_call_end|>',
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "muse_spark": Family(
        "<atem:function_calls>",
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Praha, ČR</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
    "harmony": Family(
        "<|start|><|channel|><|message|>",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Praha, ČR", "days": 3}<|call|>',
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>"),
    ),
}

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


def template_of(family: Family, opening: str = "") -> str:
    """A chat template that has the family's marks, shows tools, and may open the reasoning."""
    marks = "{% if tools %}{{ tools | tojson }}{% endif %}{#" + family.template + "#}"
    return marks + TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n" + opening + "{% endif %}"


THINKING = (
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)
