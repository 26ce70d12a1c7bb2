"""Nothing of anybody is left in a text for strangers, and what a reader needs is."""

from __future__ import annotations

import pytest

from mlx_mesh.mesh.redaction import Redactor, words_of

WORDS = words_of(
    "rank host epoch connected after ready the of is not at from to in user listening ValueError File line "
    "prompt tokens generated proxy model folder cannot be reached error mlx engine started pid digest "
    "macs en0 thunderbolt what capital api key"
)
NAMES = {"studio.local": "host-1", "studio": "host-1", "mary": "user-1", "engine": "host-2"}
REDACTOR = Redactor(NAMES, ["correct-horse-battery"], WORDS)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1 studio] connected after 1.5 s", "[1 host-1] connected after 1.5 …"),
        ("Studio.local cannot be reached from STUDIO", "host-1 cannot be reached from host-1"),
        ("user mary at 10.77.0.2 and 8.8.8.8", "user user-1 at 10.77.0.2 … <ip>"),
        ("summary of primary", "… of …"),  # a name inside a word is none, but these words are not known
        ("/Users/mary/models/x", "~/…"),
        ("in /home/somebody/else", "in ~/…"),
        ("/private/Users/x y", "~ …"),
        ("/root/.cache/model", "~/.…/model"),
        ("/Volumes/Mary's Disk/model", "/disk/model"),
        ("api key: correct-horse-battery", "api key: <key>"),
        ("token hf_abcdefghijklmnop", "… <key>"),
        ("Authorization: Bearer abc.def", "…: <key>"),
        ("http://mary:secret@10.0.0.1/", "…://10.0.0.1/"),
        ("mail someone@example.org to", "… <address> to"),
        ("4C:20:B8:00:11:22 is", "<mac> is"),
        ("fe80::1c2d:3e4f is not fd00::1", "<ip> is not <ip>"),
        ("at 00000000-1111-2222-3333-444444444444", "at <id>"),
        ("SHA256:abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG is", "SHA256:<key> is"),
        ("digest deadbeefdeadbeefdeadbeefdeadbeef", "digest <hex>"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\nmodel\n-----END OPENSSH PRIVATE KEY-----", "<key>"),
        ("card 4111111111111111", "…"),
        ("37 prompt tokens, 7 generated", "37 prompt tokens, 7 generated"),
        ("2026-11-30 04:50:54,718 ready", "2026-11-30 04:50:54,718 ready"),
        ("\x1b[31mmodel\x07", "\x1b[…\x07"),
        ("žluťoučký kůň is 大きい", "… is …"),
    ],
)
def test_what_is_said_of_a_line(text: str, told: str) -> None:
    assert REDACTOR.text(text) == told


@pytest.mark.parametrize(
    "line",
    [
        "prompt: the capital of the host is the model",
        '{"messages": [{"role": "user", "content": "the capital of the host"}]}',
        "ValueError: 'the capital of the host is what the model is'",
        'error at "the capital of the host"',
        "question = the capital of the host",
    ],
)
def test_what_somebody_wrote_goes_even_when_all_of_its_words_are_ours(line: str) -> None:
    assert "capital of the host" not in REDACTOR.text(line)


def test_a_name_that_is_one_of_our_words_is_a_name() -> None:
    assert REDACTOR.text("engine started") == "host-2 started"


def test_a_traceback_can_still_be_read() -> None:
    text = (
        '  File "/Users/mary/.venv/lib/python3.11/mlx/model.py", line 12, in model\nValueError: not reached'
    )
    told = REDACTOR.text(text)
    assert "line 12, in model\nValueError: not reached" in told
    assert "/model.…" in told
    assert "mary" not in told


def test_json_keeps_its_form_and_loses_names_in_keys_and_values() -> None:
    given = {"host": "studio", "studio": [1, True, None, "mary"], "of": {"x": 1.5}}
    assert REDACTOR.value(given) == {"host": "host-1", "host-1": [1, True, None, "user-1"], "of": {"…": 1.5}}


def test_a_long_line_is_cut() -> None:
    assert len(REDACTOR.text("model " * 10_000)) <= 2000
