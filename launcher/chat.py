"""A chat in the terminal, over the mesh's HTTP."""

from __future__ import annotations

import base64
import contextlib
import mimetypes
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mlx_mesh.launcher.api import Api, ApiError, BadQuestion
from mlx_mesh.launcher.text import harmless

PATH = "/v1/chat/completions"

MAX_FILE_BYTES = 20 * 1024 * 1024
MAX_PIPED_CHARS = 8 * 1024 * 1024

HELP = (
    "Ctrl-C stops an answer, /new (Ctrl-N) begins anew, image:/path, audio:/path and video:/path send a "
    "file, /help says this, Ctrl-D ends."
)

_COMMAND = re.compile(r"/[a-z]+$")
_FILE = re.compile(r"(?:^|(?<=\s))(image|audio|video):(?:\"([^\"]+)\"|(\S+))")
_FILE_WORD = re.compile(r"(?:^|(?<=\s))(image|audio|video):(\S*)", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)
_MAX_SHOWN = 200
_EXAMPLES = {"image": ".png or .jpg", "audio": ".wav or .mp3", "video": ".mp4 or .webm"}


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What goes with every question; None = the server's default."""

    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None


@dataclass(slots=True)
class Speed:
    """Of the last answer, as the client saw it. Seconds; tokens as the server counts them."""

    first_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0

    def __str__(self) -> str:
        decode_s = self.total_s - self.first_s
        rate = (
            f", {(self.num_tokens - 1) / decode_s:.1f} tokens/s"
            if self.num_tokens > 1 and decode_s > 0
            else ""
        )
        return f"{self.num_tokens} tokens, the first after {self.first_s:.2f} s{rate}"


class Chat:
    """One conversation. It is told whole with every question."""

    def __init__(self, api: Api, settings: ChatSettings) -> None:
        self._api = api
        self._settings = settings
        self._messages: list[dict[str, Any]] = []
        self._model = first_model(api)
        self.speed = Speed()
        self.forget()

    def forget(self) -> None:
        """Begin a new conversation."""
        system = self._settings.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> Iterator[str]:
        """Pieces of the answer. A question that fails is forgotten. Raises ApiError, also for a file that
        cannot be read."""
        messages = [*self._messages, {"role": "user", "content": content_of(question)}]
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._settings.max_tokens is not None:
            body["max_tokens"] = self._settings.max_tokens
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        answer = ""
        self.speed = Speed()
        began = time.monotonic()
        for event in self._api.stream(PATH, body):
            if usage := event.get("usage"):
                self.speed.num_tokens = int(usage.get("completion_tokens", 0))
            for choice in event.get("choices", []):
                delta = choice.get("delta", {})
                piece = delta.get("content") or ""
                if piece or delta.get("reasoning_content"):
                    self.speed.first_s = self.speed.first_s or time.monotonic() - began
                answer += piece
                if piece:
                    yield piece
        self.speed.total_s = time.monotonic() - began
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def content_of(question: str) -> str | list[dict[str, Any]]:
    """The question as the API takes it: `image:/path` or `image:"/a path"` anywhere in it, and the same with
    audio and video, becomes the file itself, so that the server needs none. Raises ApiError."""
    files = _FILE.findall(question)
    for kind, rest in _FILE_WORD.findall(_FILE.sub("", question)):
        if _looks_like_file(rest):
            raise BadQuestion(
                f"{kind}:{rest[:_MAX_SHOWN]} would be sent as text: write {kind.lower()}: in lower case to "
                "send that file."
            )
    if not files:
        return question
    parts = [_part(kind, quoted, plain) for kind, quoted, plain in files]
    text = " ".join(_FILE.sub("", question).split())
    return [*parts, {"type": "text", "text": text}] if text else parts


def file_note(question: str) -> str:
    """'' or that something in it may be meant as a file, and goes as text."""
    words = [
        f"{kind}:{rest}"[:_MAX_SHOWN]
        for kind, rest in _FILE_WORD.findall(_FILE.sub("", question))
        if not _looks_like_file(rest)  # then it is refused
    ]
    if not words:
        return ""
    kind = words[0].partition(":")[0].lower()
    return (
        f"{words[0]!r} is sent as text, and no file with it. A file is sent by {kind}:/path, in lower case "
        "and without a space behind the colon."
    )


def _looks_like_file(rest: str) -> bool:
    """Of what stands behind `Image:`: texts have such words, too."""
    media_type = mimetypes.guess_type(rest)[0] or ""
    return rest.startswith(("/", "~", "./", '"')) or media_type.startswith(("image/", "audio/", "video/"))


def _part(kind: str, quoted: str, plain: str) -> dict[str, Any]:
    """Audio as vLLM's part: OpenAI's wants its format by a name of its own."""
    if _URL.match(quoted or plain):
        raise BadQuestion(
            f"{kind}:{(quoted or plain)[:_MAX_SHOWN]} is a URL; the chat sends files of this machine only, "
            f"like {kind}:/path. Give URLs to the API itself, as {kind}_url in a request to {PATH}."
        )
    url = _data_url(kind, Path(quoted or plain), "" if quoted else _hint(kind, plain))
    name = f"{kind}_url"
    return {"type": name, name: {"url": url}}


def _hint(kind: str, plain: str) -> str:
    """What is to be done when the path is not the one that was meant."""
    meant = plain.strip('"').rstrip(",;:.?!)")
    example = meant if meant != plain and meant else f"/tmp/my file{_EXAMPLES[kind].split()[0]}"
    return f' The path goes on to the next white space; with quotes it ends at them: {kind}:"{example}"'


def _data_url(kind: str, path: Path, hint: str) -> str:
    """Sound often comes in files that are called video. `hint`: said when there is no such file."""
    media_type = mimetypes.guess_type(path.name)[0] or ""
    if not media_type.startswith(("audio/", "video/") if kind != "image" else "image/"):
        raise BadQuestion(f"{path} is no {kind} by its name; give a {_EXAMPLES[kind]}, for example.{hint}")
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise BadQuestion(f"{path} cannot be read ({error.strerror}).{hint}") from error
    if len(data) > MAX_FILE_BYTES:
        raise BadQuestion(f"{path} has {len(data)} bytes; at most {MAX_FILE_BYTES} are sent.")
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def first_model(api: Api) -> str:
    """The id of the served model. Raises ApiError."""
    models = api.get("/v1/models").get("data", [])
    if not models:
        raise ApiError(f"{api.url} serves no model yet. See `mlx-mesh status`.")
    return str(models[0]["id"])


def piped_question(source: TextIO) -> str:
    """All that was piped in, as one question. Raises ApiError."""
    piped = source.read(MAX_PIPED_CHARS + 1)
    if len(piped) > MAX_PIPED_CHARS:
        raise BadQuestion(f"More than {MAX_PIPED_CHARS} characters were piped in; a question is shorter.")
    if not piped.strip():
        raise BadQuestion("Nothing was asked: neither --prompt nor a text on standard input.")
    return piped.strip()


def ask_once(chat: Chat, prompt: str, out: TextIO, notes: TextIO | None = None) -> None:
    """Print one answer as it comes; what there is to say of the prompt goes to `notes`. Raises ApiError."""
    if notes is not None and (note := file_note(prompt)):
        _write(notes, f"{note}\n")
    for piece in chat.ask(prompt):
        _write(out, piece)
    _write(out, "\n")


def converse(chat: Chat, out: TextIO) -> None:
    """Read questions until end of file. Ctrl-C ends an answer, or the chat when there is none."""
    _edit_lines()
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _write(out, "\n")
            return
        if question == "/new":
            chat.forget()
            _write(out, "[a new conversation]\n")
        elif question == "/help":
            _write(out, f"[{HELP}]\n")
        elif _COMMAND.match(question):
            _write(out, f"[{question} is not known. {HELP}]\n")
        elif question:
            _answer(chat, question, out)


def _answer(chat: Chat, question: str, out: TextIO) -> None:
    if note := file_note(question):
        _write(out, f"[{note}]\n")
    try:
        ask_once(chat, question, out)
        _write(out, f"[{chat.speed}]\n")
    except KeyboardInterrupt:
        _write(out, "\n[stopped]\n")
    except ApiError as error:
        _write(out, f"\n[{error}]\n")


def _edit_lines() -> None:
    """Arrow keys, earlier questions, and Ctrl-N, where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline

        if "libedit" in (readline.__doc__ or ""):
            return  # macOS: it binds keys in another language; /new works
        readline.parse_and_bind('"\\C-n": "\\C-a\\C-k/new\\n"')


def _write(out: TextIO, text: str) -> None:
    """A model must not steer the terminal."""
    out.write("\n".join(harmless(line) for line in text.split("\n")))
    out.flush()
