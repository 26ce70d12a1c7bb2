"""The chat in the terminal, over a scripted API."""

from __future__ import annotations

import base64
import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_mesh.launcher import chat as chat_module
from mlx_mesh.launcher.api import Api, ApiError, BadQuestion
from mlx_mesh.launcher.chat import (
    MAX_PIPED_CHARS,
    Chat,
    ChatSettings,
    Speed,
    ask_once,
    content_of,
    converse,
    file_note,
    piped_question,
)


class ScriptedApi:
    """Says "fine <n>" to the n-th question; `bodies` are the questions."""

    url = "http://mesh"

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def get(self, path: str) -> Any:
        return {"data": [{"id": "tiny"}]}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        for piece in ("fine ", f"\x1b[2J{len(self.bodies)}"):
            yield {"choices": [{"delta": {"content": piece}}]}
        yield {"choices": [], "usage": {"completion_tokens": 2}}


@pytest.fixture
def api() -> ScriptedApi:
    return ScriptedApi()


@pytest.fixture
def chat(api: ScriptedApi) -> Chat:
    return Chat(cast(Api, api), ChatSettings(system="Be short.", temperature=0.0, max_tokens=7))


def typed(monkeypatch: pytest.MonkeyPatch, chat: Chat, *lines: str) -> str:
    """What the terminal shows when these lines are typed and then Ctrl-D."""
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    converse(chat, out)
    return out.getvalue()


def test_each_question_is_asked_with_the_conversation_before_it(
    api: ScriptedApi, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = typed(monkeypatch, chat, "one", "", "two")
    assert "fine 1" in shown and "fine 2" in shown and "\x1b" not in shown, (
        "a model must not steer the terminal"
    )
    assert "[2 tokens, the first after " in shown
    turns = [(turn["role"], turn["content"]) for turn in api.bodies[1]["messages"]]
    assert turns == [
        ("system", "Be short."),
        ("user", "one"),
        ("assistant", "fine \x1b[2J1"),
        ("user", "two"),
    ]
    assert (api.bodies[1]["temperature"], api.bodies[1]["max_tokens"]) == (0.0, 7)


def test_new_forgets_the_conversation_but_not_the_system_text(
    api: ScriptedApi, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, chat, "one", "/new", "two")
    assert [turn["content"] for turn in api.bodies[1]["messages"]] == ["Be short.", "two"]


def test_a_question_that_failed_is_forgotten_and_the_chat_goes_on(
    api: ScriptedApi, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = typed(monkeypatch, chat, "look at image:/no/such.png please", "two")
    assert "/no/such.png cannot be read" in shown and "fine 1" in shown
    assert [turn["content"] for turn in api.bodies[0]["messages"]] == ["Be short.", "two"]


def test_an_image_is_sent_itself_and_not_its_path(tmp_path: Path) -> None:
    image = tmp_path / "a cat.png"
    image.write_bytes(b"\x89PNG")
    parts = content_of(f'what is image:"{image}" ?')
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
    assert parts == [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is ?"}]
    assert content_of("an image: of what?") == "an image: of what?"
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ApiError, match="no image by its name"):
        content_of(f"image:{tmp_path}/notes.txt")


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("Image:/tmp/a.png ?", "Image:/tmp/a.png would be sent as text: write image: in lower case"),
        ("what is VIDEO:a.mp4", "VIDEO:a.mp4 would be sent as text: write video:"),
        ("image:https://example.org/a.png", r"image:https://example.org/a.png is a URL; .* files .* API"),
        ("image:/tmp/a.png, what", r'/tmp/a.png, is no image .* white space; .*: image:"/tmp/a.png"$'),
        ("image:/tmp/my pic.png", r'/tmp/my is no image .* white space; .*: image:"/tmp/my file.png"$'),
        (
            "audio:/no/such.wav ?",
            r'cannot be read \(No such file.* white space; .*: audio:"/tmp/my file.wav"$',
        ),
        ('image:"/no/such.png" ?', r"cannot be read \(No such file or directory\)\.$"),
    ],
)
def test_what_is_no_file_that_can_be_sent_is_told_how_to_be_one(question: str, why: str) -> None:
    with pytest.raises(BadQuestion, match=why):
        content_of(question)


@pytest.mark.parametrize("question", ["image: ?", "image: /tmp/a.png", "see\nVideo:", "Audio:loud"])
def test_words_like_those_of_files_go_as_text_with_a_note(
    question: str, api: ScriptedApi, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, notes = io.StringIO(), io.StringIO()
    ask_once(chat, question, out, notes)
    assert "is sent as text, and no file with it" in notes.getvalue() and "sent" not in out.getvalue()
    assert api.bodies[0]["messages"][1]["content"] == question
    assert "is sent as text, and no file with it" in typed(monkeypatch, chat, question)
    assert not file_note("an image, as in imago:x or (image:y)")


def test_audio_and_video_are_sent_like_images(tmp_path: Path) -> None:
    for name in ("a.wav", "b c.mp4"):
        (tmp_path / name).write_bytes(b"RIFF")
    sent = content_of(f'audio:{tmp_path}/a.wav and video:"{tmp_path}/b c.mp4" say?')
    assert isinstance(sent, list)
    assert [part["type"] for part in sent] == ["audio_url", "video_url", "text"]
    assert sent[0]["audio_url"]["url"].endswith(";base64,UklGRg==")
    assert sent[1]["video_url"]["url"] == "data:video/mp4;base64,UklGRg=="
    with pytest.raises(ApiError, match=r"no audio by its name; give a \.wav or \.mp3"):
        content_of(f"audio:{tmp_path}/x.png")


def test_an_image_goes_with_one_question_and_stays_in_the_conversation(
    api: ScriptedApi, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cat.png").write_bytes(b"\x89PNG")
    ask_once(chat, f"image:{tmp_path}/cat.png what?", io.StringIO())
    typed(monkeypatch, chat, "and?")
    image = api.bodies[0]["messages"][1]["content"][0]
    assert image["image_url"]["url"] == "data:image/png;base64,iVBORw=="
    assert api.bodies[1]["messages"][1]["content"][0] == image  # the server keeps nothing
    with pytest.raises(ApiError, match=r"none.png cannot be read \(No such file"):
        ask_once(chat, f"image:{tmp_path}/none.png", io.StringIO())
    monkeypatch.setattr(chat_module, "MAX_FILE_BYTES", 3)
    with pytest.raises(ApiError, match="4 bytes; at most 3"):
        ask_once(chat, f"image:{tmp_path}/cat.png", io.StringIO())


def test_what_is_piped_in_is_one_question() -> None:
    assert piped_question(io.StringIO("\nfirst\nsecond\n")) == "first\nsecond"
    with pytest.raises(ApiError, match="Nothing was asked"):
        piped_question(io.StringIO(" \n"))
    with pytest.raises(ApiError, match="characters were piped in"):
        piped_question(io.StringIO("x" * (MAX_PIPED_CHARS + 1)))


def test_speed_counts_from_the_first_token_on() -> None:
    assert (
        str(Speed(first_s=1.0, total_s=3.0, num_tokens=21))
        == "21 tokens, the first after 1.00 s, 10.0 tokens/s"
    )
    assert str(Speed(first_s=1.0, total_s=1.0, num_tokens=1)) == "1 tokens, the first after 1.00 s"


TALK = """
import sys
from mlx_mesh.launcher import chat
class Told:
    def ask(self, question):
        print("ASKED", repr(question)); yield ""
    speed = ""
    def forget(self): print("FORGOTTEN")
print("READY", flush=True)
chat.converse(Told(), sys.stdout)
"""


def test_ctrl_n_begins_anew_in_a_terminal() -> None:
    terminal, inner = pty.openpty()
    talk = subprocess.Popen([sys.executable, "-I", "-c", TALK], stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    os.set_blocking(terminal, False)
    seen = b""

    def read_until(words: bytes) -> None:
        """What comes up to these words is done with."""
        nonlocal seen
        give_up = time.monotonic() + 20
        while words not in seen:
            assert select.select([terminal], [], [], max(0.0, give_up - time.monotonic()))[0], seen
            seen += os.read(terminal, 1024)
        seen = seen.partition(words)[2]

    try:
        read_until(b"> ")
        os.write(terminal, b"half a question\x0e")
        read_until(b"FORGOTTEN")
        read_until(b"> ")  # the terminal takes keys for a question again
        os.write(terminal, b"/help\n")
        read_until(b"/new (Ctrl-N) begins anew")
        os.write(terminal, b"/quit\n")
        read_until(b"[/quit is not known.")
        os.write(terminal, b"hello\n")
        read_until(b"ASKED 'hello'")
        read_until(b"> ")
        os.write(terminal, b"\x04")
        assert talk.wait(20) == 0
    finally:
        talk.kill()
        talk.wait()
        os.close(terminal)
