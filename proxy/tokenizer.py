"""The model's tokenizer and chat template: local files only, no code from the model, no network.

Tokenising and templating run in threads of their own (the tokenizer releases the interpreter lock);
decoding a few tokens is cheap and runs where it is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_mesh.mesh.errors import MeshError, SettingsError
from mlx_mesh.proxy import upstream
from mlx_mesh.proxy.markup import Markup, Region, find_markup
from mlx_mesh.proxy.templates import TemplateReads

T = TypeVar("T")

ENCODE_DEADLINE_S = 60.0
"""For templating and tokenising one prompt, including its wait for a thread."""

NUM_THREADS = 2

_TURN_END_MARKERS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_turn|>")
"""Some models name only <|endoftext|> as their end; where the template uses one of these, it ends a turn."""

_CHARS_PER_TOKEN = 8  # of a first look at a long prompt; real text has 2 to 5


class TokenizerError(MeshError):
    """The tokenizer or the chat template of the model cannot be used; the message names the file."""


class TemplateRefused(MeshError):
    """The chat template does not take these messages; the message is the template's own."""


class PromptTooLong(MeshError):
    """The prompt has `at_least` tokens, more than the limit it was encoded with."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens")
        self.at_least = at_least


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as tokens, and in which region the model goes on."""

    ids: tuple[int, ...]
    region: Region
    text: str = ""  # what was tokenised
    shared_lengths: tuple[int, ...] = ()  # tokens that other prompts are likely to begin with, too
    system_length: int = 0  # of these, up to the end of the system message; 0 = there is none


class EncodeTimeout(MeshError):
    """Tokenising took longer than ENCODE_DEADLINE_S."""


def _silence_libraries() -> None:
    """No advice on missing frameworks, no telemetry, no hub. Must come before the first import."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TRANSFORMERS_OFFLINE="1",
        TRANSFORMERS_NO_ADVISORY_WARNINGS="1",
        TRANSFORMERS_VERBOSITY="critical",
        TOKENIZERS_PARALLELISM="false",
    )


class ModelTokenizer:
    """One model's tokenizer. `load` takes a second or two (imports); `close` ends the threads."""

    def __init__(self, tokenizer: Any, folder: Path, chat_template: str = "") -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
        if self._backend is not None:
            # tokenizer.json may carry both; they would cut prompts or fill them up.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._slow_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._byte_alphabet = _byte_alphabet() if _is_byte_level(self._backend) else None
        added = tokenizer.added_tokens_decoder
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(tokenizer.all_special_ids) | {
            i for i, token in added.items() if token.special
        }
        self.vocab_size: int = len(tokenizer)
        self.can_constrain = (folder / "tokenizer.json").is_file()  # what the engine's grammars read
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.chat_template, self.chat_template_error = _chat_template(tokenizer, folder, chat_template)
        self._reads_lists_only = False
        self._python_template = None if chat_template else _python_template(tokenizer)
        if self._python_template is not None:
            self.chat_template, self.chat_template_error = None, ""
        self.end_token_ids = self._end_token_ids(folder)
        special = {
            name: i for i, token in added.items() if i in self._special_ids and (name := token.content)
        }
        text = self.chat_template or (self._python_template.source if self._python_template else "")
        self.template_reads = TemplateReads(
            self.chat_template or "", more=("enable_thinking",) if self._python_template else ()
        )
        self.markup: Markup = find_markup(tokenizer, text, special)
        if not self.chat_template_error:
            self.chat_template_error = self._try_template()

    @classmethod
    def load(cls, model: str, chat_template: str = "") -> ModelTokenizer:
        """Read the tokenizer in the local folder `model`. `chat_template` (text, or a file) overrides the
        model's. Raises TokenizerError."""
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise TokenizerError(
                f"{folder} is not a folder; the proxy reads the tokenizer from the model folder"
            )
        _silence_libraries()
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                clean_up_tokenization_spaces=False,
            )
        except Exception as error:  # the library raises anything, from KeyError to ImportError
            if "trust_remote_code" in str(error):
                raise TokenizerError(
                    f"the tokenizer in {folder} wants to run code of its own (`auto_map` in "
                    "tokenizer_config.json), and no code from model folders is run here. Use a version "
                    "of the model with a tokenizer.json and a `tokenizer_class` that transformers has"
                ) from error
            raise TokenizerError(
                f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}. "
                "The folder needs tokenizer.json (or the model family's own file) and tokenizer_config.json"
            ) from error
        return cls(tokenizer, folder, chat_template)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ text to tokens

    async def encode(self, text: str, *, limit: int) -> tuple[int, ...]:
        """Tokens of a plain prompt, with what the tokenizer puts around it (BOS). `limit` 0 = none.
        Raises PromptTooLong, soon also for a huge text, and EncodeTimeout."""
        return await self.in_thread(lambda: self._encode(text, add_special=True, limit=limit))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        limit: int,
        template_options: dict[str, Any] | None = None,
        is_shared: Callable[[str], bool] = bool,
    ) -> EncodedChat:
        """Tokens of the rendered chat template, with the opening of the assistant's turn. `is_shared`:
        whether a beginning of the prompt may count as one that others share. Raises TemplateRefused, too."""

        def render_and_encode() -> EncodedChat:
            text = self.render(messages, template_options)
            markup = self.markup
            region = Region.REASONING if markup.is_opened_by(text) else markup.initial
            if (template_options or {}).get("continue_final_message"):
                region = Region.ANSWER
            ids = self._encode(text, add_special=False, limit=limit)
            shared = self._shared_lengths(messages, template_options, text, ids, is_shared)
            has_system = bool(messages) and messages[0].get("role") == "system"
            system_length = shared[0] if has_system and len(shared) > 1 else 0
            return EncodedChat(ids, region, text, shared, system_length)

        return await self.in_thread(render_and_encode)

    def _shared_lengths(
        self,
        messages: list[dict[str, Any]],
        template_options: dict[str, Any] | None,
        text: str,
        ids: tuple[int, ...],
        is_shared: Callable[[str], bool],
    ) -> tuple[int, ...]:
        """Where prompts of the same application part, and those of the same conversation: behind the system
        message, and before the opening of the assistant's turn. Hints: nothing is wrong when a template
        hides them."""
        beginnings: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        if messages and messages[0].get("role") == "system":
            stranger = [messages[0], {"role": "user", "content": "\N{OBJECT REPLACEMENT CHARACTER}"}]
            beginnings.append((stranger, {}))
        beginnings.append((messages, {"add_generation_prompt": False}))
        lengths = []
        for some, changes in beginnings:
            try:
                other = self.render(some, {**(template_options or {}), **changes})
            except TemplateRefused:
                continue
            common = text[: _num_common(text, other)]
            if not is_shared(common):
                continue
            lengths.append(_tokens_within(common, text, ids, self.plain_ids))
        return tuple(sorted({length for length in lengths if 0 < length < len(ids)}))

    @property
    def added_tokens(self) -> list[tuple[int, str]]:
        """Ids and texts of tokens beside the vocabulary proper: special ones, and marks of media."""
        return [(token_id, text) for text, token_id in self._added.items()]

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model, and its calls can be read."""
        return self.markup.has_calls and self.template_reads.variable("tools")

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Tokens of a short text as it stands inside another."""
        return self._encode_all(text, add_special=False)

    def render(self, messages: list[dict[str, Any]], template_options: dict[str, Any] | None = None) -> str:
        """The prompt text of a conversation. Raises TemplateRefused."""
        if self.chat_template is None and self._python_template is None:
            raise TemplateRefused(self.chat_template_error)
        options = {"add_generation_prompt": True, **(template_options or {})}
        if self._reads_lists_only:
            messages = [_as_list(message) for message in messages]
        try:
            if self._python_template is not None:
                return str(self._python_template.apply(messages, **options))
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self.chat_template,
                tokenize=False,
                **options,
            )
        except Exception as error:  # templates are programs of the model's authors
            raise TemplateRefused(f"the model's chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, *, add_special: bool, limit: int) -> tuple[int, ...]:
        first_look = limit * _CHARS_PER_TOKEN + 1024
        if limit and len(text) > 2 * first_look:
            # Cutting the text changes a few tokens at the cut, not the verdict on megabytes of it.
            at_least = len(self._encode_all(text[:first_look], add_special)) - 64
            if at_least > limit:
                raise PromptTooLong(at_least)
        ids = self._encode_all(text, add_special)
        if limit and len(ids) > limit:
            raise PromptTooLong(len(ids))
        return ids

    def _encode_all(self, text: str, add_special: bool) -> tuple[int, ...]:
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=add_special).ids)
        with self._slow_lock:  # tokenizers in Python are not thread-safe
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Work that would hold up the event loop. Raises EncodeTimeout."""
        try:
            async with asyncio.timeout(ENCODE_DEADLINE_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise EncodeTimeout(f"the prompt was not tokenised within {ENCODE_DEADLINE_S:g} s") from error

    # ------------------------------------------------------------ tokens to text

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, exactly as the tokenizer joins it."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=True))
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token inside a text; b'' for a special or unknown one."""
        return b"" if token_id in self._special_ids else self.raw_token_bytes(token_id)

    def raw_token_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, with a special token's own name."""
        token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None
        if token is None:
            return b""
        if token in self._added:
            return str(token).encode()
        if self._byte_alphabet is not None:
            return b"".join(self._byte_alphabet.get(char, char.encode()) for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def special_token_id(self, text: str) -> int | None:
        """The id of a token that never shows in text and is written like this."""
        token_id = self._added.get(text)
        return token_id if token_id in self._special_ids else None

    # ------------------------------------------------------------ at start

    def _end_token_ids(self, folder: Path) -> tuple[int, ...]:
        """Every id that ends a text: from generation_config.json, config.json, the tokenizer, and a turn
        marker that the chat template uses."""
        found: dict[int, None] = {}
        config = _read_json(folder / "config.json")
        for source in (
            _read_json(folder / "generation_config.json"),
            config,
            config.get("text_config") or {},
        ):
            ids = source.get("eos_token_id")
            for token_id in ids if isinstance(ids, list) else [ids]:
                if isinstance(token_id, int):
                    found[token_id] = None
        if self._tokenizer.eos_token_id is not None:
            found[int(self._tokenizer.eos_token_id)] = None
        for marker in _TURN_END_MARKERS:
            if marker in self._added and marker in (self.chat_template or ""):
                found[self._added[marker]] = None
        return tuple(found)

    def _try_template(self) -> str:
        """'' or why the template cannot render even the simplest conversation. Some templates of models with
        pictures show a text only when it stands in a list."""
        said = "Hello"
        try:
            is_shown = said in self.render([{"role": "user", "content": said}])
            refusal = ""
        except TemplateRefused as error:
            is_shown, refusal = False, str(error)
        if not is_shown:
            with contextlib.suppress(TemplateRefused):
                if said in self.render([_as_list({"role": "user", "content": said})]):
                    self._reads_lists_only, refusal = True, ""
        return refusal


def _as_list(message: dict[str, Any]) -> dict[str, Any]:
    """A turn whose text stands in a list, under both names that templates read."""
    text = message.get("content")
    if not isinstance(text, str):
        return message
    return {**message, "content": [{"type": "text", "text": text, "content": text}] if text else []}


@dataclass(frozen=True, slots=True)
class _PythonTemplate:
    """A chat template that is a function of mlx-lm, for families that have none in Jinja."""

    apply: Callable[..., Any]
    source: str


def _python_template(tokenizer: Any) -> _PythonTemplate | None:
    name = tokenizer.init_kwargs.get("chat_template_type")
    if not name:
        return None
    module = upstream.load(f"chat_templates.{name}")
    return _PythonTemplate(module.apply_chat_template, inspect.getsource(module))


def _chat_template(tokenizer: Any, folder: Path, override: str) -> tuple[str | None, str]:
    """The template's text, or None and why there is none. Raises SettingsError for a bad override."""
    if override:
        if "{{" in override or "{%" in override:
            return override, ""
        try:
            return Path(override).expanduser().read_text(encoding="utf-8"), ""
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"the chat template {override!r} is neither a Jinja text nor a readable file: {error}"
            ) from error
    of_processor = _processor_template(folder)
    try:
        own = str(tokenizer.get_chat_template())
        # The processor's is the one with places for images, where the two differ in that.
        return (of_processor if "image" in of_processor and "image" not in own else own), ""
    except (ValueError, AttributeError) as error:
        if of_processor:
            return of_processor, ""
        reason = (
            f"the model in {folder} has no chat template ({error}); give one with --chat-template, "
            "or use /v1/completions"
        )
        return None, reason


def _processor_template(folder: Path) -> str:
    """The chat template that a model with pictures keeps beside its processor; '' = none."""
    for name in ("chat_template.json", "processor_config.json"):
        template = _read_json(folder / name).get("chat_template")
        if isinstance(template, str) and template:
            return template
    return ""


def _tokens_within(
    beginning: str, text: str, ids: tuple[int, ...], encode: Callable[[str], tuple[int, ...]]
) -> int:
    """How many of a text's first tokens are those of its beginning; only the shorter part is tokenised."""
    if 2 * len(beginning) <= len(text):
        return _num_common(encode(beginning), ids)
    return len(ids) - _num_common(encode(text[len(beginning) :])[::-1], ids[::-1])


def _num_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items two sequences begin with alike; by halves, because these may be long."""
    same, differ = 0, min(len(a), len(b)) + 1
    while differ - same > 1:
        middle = (same + differ) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            differ = middle
    return same


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when the file is absent. Raises TokenizerError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _is_byte_level(backend: Any) -> bool:
    """Whether token texts are written in GPT-2's alphabet of 256 printable characters."""
    return (
        backend is not None and backend.decoder is not None and b"ByteLevel" in backend.decoder.__getstate__()
    )


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's alphabet: printable Latin-1 characters are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet.update({chr(256 + at): bytes([byte]) for at, byte in enumerate(others)})
    return alphabet
