"""The model's tokenizer: local, quiet, and exact about ends, templates and limits."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.proxy.templates import TemplateReads
from mlx_mesh.proxy.tokenizer import ModelTokenizer, PromptTooLong, TemplateRefused, TokenizerError

Variant = Callable[..., ModelTokenizer]


@pytest.fixture
def variant(model_folder: Path, tmp_path: Path) -> Iterator[Variant]:
    """The tiny model with some files changed: name -> new text, or None to remove it."""
    loaded: list[ModelTokenizer] = []

    def make(chat_template: str = "", **files: str | None) -> ModelTokenizer:
        folder = tmp_path / f"model-{len(loaded)}"
        shutil.copytree(model_folder, folder)
        for name, text in files.items():
            path = folder / name.replace("__", ".")
            path.unlink() if text is None else path.write_text(text)
        loaded.append(ModelTokenizer.load(str(folder), chat_template))
        return loaded[-1]

    yield make
    for tokenizer in loaded:
        tokenizer.close()


def test_the_template_is_rendered_with_the_opening_of_the_assistants_turn(tokenizer: ModelTokenizer) -> None:
    text = tokenizer.render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = asyncio.run(tokenizer.encode_chat([{"role": "user", "content": "hi"}], limit=0)).ids
    assert ids[0] == tokenizer.special_token_id("<|im_start|>")
    assert ids.count(1) == 2 and ids.count(2) == 1  # markers are tokens, and nothing was put around


def test_ends_of_text_come_from_all_files_and_from_the_templates_turn_marker(variant: Variant) -> None:
    tokenizer = variant(generation_config__json=json.dumps({"eos_token_id": [5, 7]}))
    assert tokenizer.end_token_ids == (5, 7, 0, 2)  # generation_config, config, and <|im_end|>
    without_marker = variant(chat_template="{{ messages[0].content }}")
    assert without_marker.end_token_ids == (0,)


def test_a_template_that_refuses_says_why(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(TemplateRefused, match="no such turn"):
        tokenizer.render([{"role": "forbidden", "content": ""}])


def test_a_model_without_a_template_loads_and_says_what_to_do(variant: Variant) -> None:
    tokenizer = variant(chat_template__jinja=None)
    assert "has no chat template" in tokenizer.chat_template_error
    assert "/v1/completions" in tokenizer.chat_template_error
    with pytest.raises(TemplateRefused, match="has no chat template"):
        tokenizer.render([{"role": "user", "content": "hi"}])


def test_a_broken_template_is_found_at_start(variant: Variant) -> None:
    assert "refuses" in variant(chat_template__jinja="{% for m in %}").chat_template_error


def test_the_template_can_be_overridden_by_text_or_file(variant: Variant, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("F{{ messages[0].content }}")
    assert variant("T{{ messages[0].content }}").render([{"role": "user", "content": "x"}]) == "Tx"
    assert variant(str(file)).render([{"role": "user", "content": "x"}]) == "Fx"
    with pytest.raises(SettingsError, match=r"neither a Jinja text nor a readable file"):
        variant("/no/such/file.jinja")


def test_truncation_and_padding_written_in_the_tokenizers_file_do_not_apply(
    variant: Variant, model_folder: Path
) -> None:
    content = json.loads((model_folder / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    tokenizer = variant(tokenizer__json=json.dumps(content))
    assert len(asyncio.run(tokenizer.encode("x" * 50, limit=0))) == 50


def test_a_prompt_over_the_limit_is_refused_with_its_length(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(PromptTooLong) as raised:
        asyncio.run(tokenizer.encode("xyxz" * 10, limit=8))
    assert raised.value.at_least > 8


def test_megabytes_over_the_limit_are_refused_without_reading_them_all(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode_all = ModelTokenizer._encode_all

    def counting(self: ModelTokenizer, text: str, add_special: bool) -> tuple[int, ...]:
        sizes.append(len(text))
        return encode_all(self, text, add_special)

    monkeypatch.setattr(ModelTokenizer, "_encode_all", counting)
    with pytest.raises(PromptTooLong):
        tokenizer._encode("many words " * 1_000_000, add_special=False, limit=512)
    assert sum(sizes) < 10_000


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"is not a folder"):
        ModelTokenizer.load(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        ModelTokenizer.load(str(tmp_path))


def test_code_of_the_model_is_not_run(variant: Variant, tmp_path: Path) -> None:
    settings = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "eos_token": "<|endoftext|>",
    }
    with pytest.raises(TokenizerError, match="wants to run code of its own"):
        variant(tokenizer_config__json=json.dumps(settings))


def test_bytes_of_tokens(tokenizer: ModelTokenizer) -> None:
    ids = asyncio.run(tokenizer.encode(" 好<|im_end|>", limit=0))
    assert b"".join(tokenizer.raw_token_bytes(token_id) for token_id in ids) == " 好<|im_end|>".encode()
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.raw_token_bytes(99_999) == b""


def test_loading_is_silent_offline_and_without_mlx(model_folder: Path, tmp_path: Path) -> None:
    """In a process of its own: the libraries read their settings at import."""
    program = f"""
import socket, sys
def refuse(*args, **kwargs): raise AssertionError("network")
socket.getaddrinfo = socket.socket.connect = refuse
import mlx_mesh.proxy.app, mlx_mesh.proxy.__main__
from mlx_mesh.proxy.tokenizer import ModelTokenizer
tokenizer = ModelTokenizer.load({str(model_folder)!r})
assert tokenizer.render([{{"role": "user", "content": "x"}}])
tokenizer.close()
loaded = sorted({{name.partition(".")[0] for name in sys.modules}} & {{"mlx", "mlx_lm", "mlx_vlm", "torch"}})
assert not loaded, loaded
"""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-I", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir()), "the libraries wrote into the home folder"


def test_a_template_in_python_of_mlx_lm_is_used_where_the_settings_name_it(
    model_with: Callable[..., ModelTokenizer],
) -> None:
    model = model_with("unused", (), chat_template_type="deepseek_v32")
    turns = [{"role": "user", "content": "hi"}]
    text = model.render(turns)
    assert "hi" in text and "unused" not in text
    assert not model.chat_template_error
    assert model.markup.think_end == "</think>"
    texts = {
        model.render([{"role": "user", "content": "hi"}], {"enable_thinking": on}) for on in (True, False)
    }
    assert len(texts) == 2 and model.template_reads.variable("enable_thinking")


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        ("{% if enable_thinking %}a{% endif %}", {"enable_thinking"}),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", {"thinking"}),
        ("{# tools #} You are thinking with tools. {{ m.tools }}", set()),
        ("{% generation %}{{ tools }}{% endgeneration %}", {"tools"}),
        ("{% for t in tools %}{% break %}{% endfor %}", {"tools"}),
        ("{% set tools = none %}{{ tools }}", set()),
        ("{% some_extension tools %}", {"tools"}),
    ],
)
def test_only_variables_of_a_template_are_taken_for_settings(template: str, variables: set[str]) -> None:
    reads = TemplateReads(template)
    found = {name for name in ("enable_thinking", "thinking", "tools") if reads.variable(name)}
    assert found == variables


def test_fields_of_messages_are_found_in_both_spellings() -> None:
    reads = TemplateReads("{{ m.reasoning_content }}{{ m['thinking'] }} reasoning")
    assert [name for name in ("reasoning_content", "thinking", "reasoning") if reads.field(name)] == [
        "reasoning_content",
        "thinking",
    ]


@pytest.mark.parametrize("has_system", [True, False])
@pytest.mark.parametrize("question", ["hi", "tell me all that you know of foxes and dogs " * 8])
def test_where_other_prompts_are_likely_to_go_on_differently_is_told(
    tokenizer: ModelTokenizer, has_system: bool, question: str
) -> None:
    messages = [{"role": "system", "content": "You are a lamp."}, {"role": "user", "content": question}]
    encoded = asyncio.run(tokenizer.encode_chat(messages[not has_system :], limit=0))
    opening = len(tokenizer.plain_ids("<|im_start|>assistant\n"))
    before_answer = len(encoded.ids) - opening
    if not has_system:
        assert (encoded.system_length, encoded.shared_lengths) == (0, (before_answer,))
        return
    system = tokenizer.plain_ids("<|im_start|>system\nYou are a lamp.<|im_end|>\n<|im_start|>user\n")
    assert encoded.ids[: encoded.system_length] == system
    assert encoded.shared_lengths == (len(system), before_answer)
