"""The parts of a message, in each dialect: text, or a picture, audio or video that is still to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.media.containers import CONTAINERS
from mlx_mesh.proxy.media.data_urls import is_data_url
from mlx_mesh.proxy.media.frame_wish import FRAME_NAMES, FrameWish
from mlx_mesh.proxy.media.item import NOUNS, Item, item_part, joined, like, text_part

Content = str | list[dict[str, Any]]
"""Of a turn: text, or texts and items in order."""

DETAILS = ("auto", "low", "high", "original")
AUDIO_FORMATS = tuple(dict.fromkeys(word for container in CONTAINERS for word in container.words))

_TEXTS = ("text", "input_text", "output_text", "refusal")
_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
}
"""OpenAI's parts, vLLM's, and what mlx-vlm's server takes beside them."""

_NEAR = {"audio": "audio", "image": "image"}
"""Parts that are not taken under these names, and whose reason they are told first."""

_TAKEN = {"image": "images", "audio": "audio", "video": "videos"}

_OF_WHOLE_PROMPT = ("min_pixels", "max_pixels")
_NAMES = {
    "image": {"image_url": ("url", "detail"), "detail": ()},
    "audio": {"input_audio": ("data", "format"), "audio_url": ("url",)},
    "video": {"video_url": ("url",), "video": ("url",), **dict.fromkeys(FRAME_NAMES, ())},
}
"""By kind: what a part may say beside its type, and what is in it."""

_OF_EVERY_PART = ("type", "file_id", "cache_control", "prompt_cache_breakpoint")
"""The last two are hints for caches, and change no answer."""
_TEXT_ONLY = "this model takes text only"


@dataclass(frozen=True, slots=True)
class PartReader:
    """`refusals`: by kind, why this mesh takes none; kinds that are not in it are taken. Methods raise
    ApiError 400 that names the part."""

    refusals: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(NOUNS, _TEXT_ONLY))

    def openai(
        self, content: str | Sequence[dict[str, Any]] | None, param: str, *, may_show: bool = True
    ) -> Content:
        """Content of chat completions and responses. `may_show`: the turn is one that may have media."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = []
        for at, part in enumerate(content):
            here = f"{param}[{at}]"
            name = part.get("type", "text")
            kind = _KINDS.get(name) if isinstance(name, str) else None
            if kind is not None:
                self.require(here, kind, name, may_show)
                item = _READERS[kind](part, name, here)
                _check_names(part, kind, here)
                parts.append(item_part(item))
                continue
            if name not in _TEXTS:
                raise self.unsupported(here, name)
            text = part.get("refusal" if name == "refusal" else "text")
            if text is not None and not isinstance(text, str):
                raise invalid(f"Invalid '{here}.text': it must be a string.", param=f"{here}.text")
            parts.append(text_part(text or ""))
        return joined(parts)

    def anthropic_image(self, block: dict[str, Any], param: str) -> Item:
        """A block of type image."""
        self.require(param, "image", "image", may_show=True)
        source = block.get("source")
        here = f"{param}.source"
        if not isinstance(source, dict):
            raise invalid(f"Invalid '{here}': it must be an object.", param=here, code="invalid_image")
        match source.get("type"):
            case "base64":
                media_type = source.get("media_type")
                if not isinstance(media_type, str) or not media_type:
                    raise invalid(f"Invalid '{here}.media_type': like image/png.", param=f"{here}.media_type")
                data = _text(source.get("data"), f"{here}.data", "image")
                return Item(data, here, is_url=False, media_type=media_type.lower())
            case "url":
                url = _text(source.get("url"), f"{here}.url", "image", is_url=True)
                return Item(url, here, inline='sources of type "base64"')
        raise invalid(
            f"Invalid '{here}.type': base64 or url; no files are stored here.", param=f"{here}.type"
        )

    def ollama(self, text: str, images: Sequence[Any], param: str, *, may_show: bool = True) -> Content:
        """Ollama puts pictures beside the text; they stand before it."""
        if not images:
            return text
        self.require(param, "image", "image", may_show)
        parts = []
        for at, data in enumerate(images):
            here = f"{param}[{at}]"
            parts.append(item_part(Item(_text(data, here, "image"), here, is_url=False)))
        return joined([*parts, text_part(text)] if text else parts)

    def require(self, param: str, kind: str, name: Any, may_show: bool) -> None:
        if self.refusals.get(kind):
            raise self.unsupported(param, name)
        if not may_show:
            noun = NOUNS[kind]
            article = "an" if noun[0] in "aeiou" else "a"
            raise invalid(
                f"'{param}' is {article} {noun}; those stand in the user's turns and in tool results.",
                param=param,
                code="unsupported_media",
            )

    def unsupported(self, param: str, name: Any, instead: str = "") -> ApiError:
        """Of a part that is neither text nor, where they are taken, media. `instead`: what the dialect says
        of it where the model takes it."""
        name = str(name)
        why = self.refusals.get(_KINDS.get(name) or _NEAR.get(name, ""), "")
        return invalid(
            f"'{param}' has type {name[:40]!r}; {why or instead or self._takes(name)}.",
            param=param,
            code="unsupported_media",
        )

    def _takes(self, name: str) -> str:
        kinds = [noun for kind, noun in _TAKEN.items() if not self.refusals.get(kind)]
        if not kinds:
            return self.refusals.get("image") or _TEXT_ONLY
        if name in NOUNS:
            return f"that comes as {' or '.join(part for part, kind in _KINDS.items() if kind == name)}"
        return f"this model takes {', '.join(['text', *kinds[:-1]])} and {kinds[-1]} only"


def _image(part: dict[str, Any], name: str, param: str) -> Item:
    """`image_url` is a URL or `{url, detail}`; of an input_image a URL, with `detail` beside it."""
    here = f"{param}.image_url"
    given = part.get("image_url")
    detail = part.get("detail")
    if name == "input_image" and given is None:
        _refuse_stored(part, param, "picture")
    if isinstance(given, dict):
        detail = given.get("detail", detail)
    if detail is None:
        detail = "auto"
    if detail not in DETAILS:
        raise invalid(f"Invalid '{here}.detail': {', '.join(DETAILS)}.", param=f"{here}.detail")
    return Item(_url(part, "image_url", here, "image"), here, detail=detail)


def _audio(part: dict[str, Any], name: str, param: str) -> Item:
    """`input_audio` is `{data, format}`, of which mlx-vlm's server takes a data URL as `data`, too;
    `audio_url` a URL or `{url}`."""
    here = f"{param}.{name}"
    given = part.get(name)
    if name == "audio_url":
        return Item(_url(part, name, here, "audio"), here, kind="audio")
    if not isinstance(given, dict):
        _refuse_stored(part, param, "audio")
        raise invalid(f"Invalid '{here}': an object with data and format.", param=here, code="invalid_audio")
    word = given.get("format")
    if word is not None and word not in AUDIO_FORMATS:
        raise invalid(
            f"Invalid '{here}.format': {', '.join(AUDIO_FORMATS)}.",
            param=f"{here}.format",
            code="invalid_audio",
        )
    data = _text(given.get("data"), f"{here}.data", "audio")
    return Item(data, here, kind="audio", is_url=is_data_url(data), format=word or "")


def _video(part: dict[str, Any], name: str, param: str) -> Item:
    """A URL or `{url}`, as `video_url` or, except in a part of that type, as `video`. Which frames, beside
    it."""
    field = "video_url" if name == "video_url" or (part.get("video_url") is not None) else "video"
    here = f"{param}.{field}"
    given = part.get(field)
    if given is None:
        _refuse_stored(part, param, "video")
    if isinstance(given, list):
        raise invalid(
            f"'{here}' is a list; a video comes as one file, and pictures as parts of their own.",
            param=here,
            code="unsupported_media",
        )
    wish = FrameWish.read({key: part[key] for key in FRAME_NAMES if key in part}, param)
    return Item(_url(part, field, here, "video"), here, kind="video", wish=wish)


_READERS = {"image": _image, "audio": _audio, "video": _video}


def _check_names(part: dict[str, Any], kind: str, param: str) -> None:
    """Nothing that a part says is passed over."""
    known: dict[str, tuple[str, ...]] = {**dict.fromkeys(_OF_EVERY_PART, ()), **_NAMES[kind]}
    unknown = [name for name in part if name not in known]
    for name, inner in known.items():
        if isinstance(part.get(name), dict) and inner:
            unknown += [
                f"{name}.{key}" for key in part[name] if key not in inner and part[name][key] is not None
            ]
    for name in unknown:
        if part.get(name, name) is not None:
            advice = " It stands beside the messages." if name.rpartition(".")[2] in _OF_WHOLE_PROMPT else ""
            raise invalid(
                f"'{param}.{name[:80]}' is not supported here.{advice}",
                param=f"{param}.{name[:80]}",
                code="unsupported_parameter",
            )


def _refuse_stored(part: dict[str, Any], param: str, noun: str) -> None:
    if part.get("file_id") is not None:
        raise invalid(
            f"'{param}.file_id' is not supported here: no files are stored. Send the {noun} as a data URL.",
            param=f"{param}.file_id",
            code="unsupported_media",
        )


def _url(part: dict[str, Any], field: str, param: str, kind: str) -> str:
    """Of a part's field, which `param` names: a URL, or `{url}`."""
    given = part.get(field)
    if isinstance(given, dict):
        return _text(given.get("url"), param, kind, is_url=True, inner="url")
    is_object = given is None and part.get("type") == field  # OpenAI's form of such a part
    return _text(given, param, kind, is_url=True, inner="url" if is_object else "")


def _text(value: Any, param: str, kind: str, *, is_url: bool = False, inner: str = "") -> str:
    """`inner`: the field of `param` that it is; '' = that is the text itself."""
    if isinstance(value, str) and value:
        return value
    what = f"its field '{inner}'" if inner else "it"
    seen = "is missing" if value is None else "is empty" if value == "" else "is no text"
    form = f"a URL, like {like(kind)}" if is_url else "a text of base64"
    raise invalid(
        f"Invalid '{param}': {what} {seen}; the {NOUNS[kind]} stands there as {form}.",
        param=param,
        code=f"invalid_{kind}",
    )
