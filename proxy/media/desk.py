"""What this mesh does with pictures, audio and video: whether it takes them, reading them, and putting them
into prompts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mlx_mesh.mesh.messages import ProxyConfig
from mlx_mesh.mesh.types import STILLS
from mlx_mesh.node.client import CoordinatorClient
from mlx_mesh.proxy.errors import RETRY_AFTER_S, ApiError, invalid
from mlx_mesh.proxy.media.addresses import UrlRefused
from mlx_mesh.proxy.media.containers import Container, container_of, kinds, missing_bytes
from mlx_mesh.proxy.media.data_urls import is_data_url, read_base64, read_data_url
from mlx_mesh.proxy.media.decoder import Decoder, can_decode
from mlx_mesh.proxy.media.decoding import Task
from mlx_mesh.proxy.media.fetch import Fetcher, FetchFailed, FileTooLarge
from mlx_mesh.proxy.media.files import can_read, check_file
from mlx_mesh.proxy.media.frame_wish import FrameWish
from mlx_mesh.proxy.media.item import NOUNS, Item, broken, of_kind
from mlx_mesh.proxy.media.known_marks import read_known_marks
from mlx_mesh.proxy.media.limits import (
    DECODE_TURN_S,
    MAX_AUDIO_S,
    MAX_ITEMS,
    MAX_SEQUENCE_BYTES,
    MAX_TOTAL_BYTES,
    NUM_DECODERS,
)
from mlx_mesh.proxy.media.marks import Marks, find_marks
from mlx_mesh.proxy.media.model_files import read_sampling, read_sampling_rate
from mlx_mesh.proxy.media.parts import PartReader
from mlx_mesh.proxy.media.sampling import Sampling
from mlx_mesh.proxy.media.stills import MAX_STILLS
from mlx_mesh.proxy.metrics import Metrics
from mlx_mesh.proxy.tokenizer import ModelTokenizer

T = TypeVar("T")

_NAMES = {"image": "images", "audio": "audio", "video": "video"}
_LIBRARIES = {"image": "Pillow", "audio": "PyAV", "video": "PyAV"}
_FETCHES = 4
"""Files of one request that are fetched at once."""


class MediaDesk:
    """Built once, for one model. Whether that takes media is known when the mesh is ready."""

    def __init__(self, config: ProxyConfig, tokenizer: ModelTokenizer, client: CoordinatorClient) -> None:
        self.fetcher = Fetcher(frozenset(config.allowed_media_domains))
        self.decoder = Decoder()
        # Their own, or prompts of text would wait for pictures to be tokenised.
        self._threads = ThreadPoolExecutor(NUM_DECODERS, thread_name_prefix="pictures")
        self._tokenizer = tokenizer
        self._client = client
        self._marks: dict[tuple[str, ...], Marks] = {}
        self._has_library = {"image": can_read(), "audio": can_decode(), "video": can_decode()}

    def refusal(self, kind: str) -> str:
        """'' or why none of this kind is taken."""
        readiness = self._client.readiness
        name = _NAMES[kind]
        shows_stills = kind == "video" and self.shows_stills
        if kind not in readiness.media and not shows_stills:
            others = [_NAMES[other] for other in NOUNS if other in readiness.media]
            takes = " and ".join(["text", *others])
            return readiness.media_refusals.get(kind, "").rstrip(".") or f"this model takes {takes} only"
        if not self._has_library[kind]:
            return (
                f"this model takes {name}, but {_LIBRARIES[kind]} is missing on the leader: "
                "`pip install 'mlx-mesh[vision]'` there and start the mesh again"
            )
        if ("image" if shows_stills else kind) not in self._found_marks(readiness.media).of:
            return (
                f"this model takes {name}, but its chat template has no place for that; give one that "
                "has with "
                "--chat-template"
            )
        return ""

    @property
    def shows_stills(self) -> bool:
        """Whether videos are shown as pictures."""
        return STILLS in self._client.readiness.media

    @property
    def marks(self) -> Marks:
        """Of the kinds that are taken, and that prompts show as such."""
        found = self._found_marks(self._client.readiness.media)
        return Marks({kind: found.of[kind] for kind in self.kinds[1:] if kind in found.of})

    def _found_marks(self, media: tuple[str, ...]) -> Marks:
        if media not in self._marks:
            known = {
                kind: read_known_marks(self._tokenizer.folder, self._tokenizer.added_tokens, kind)
                for kind in NOUNS
                if kind in media
            }
            self._marks[media] = find_marks(self._tokenizer.render, known)
        return self._marks[media]

    @functools.cached_property
    def sampling_rate(self) -> int:
        """Hz, of the audio that the model takes."""
        return read_sampling_rate(self._tokenizer.folder)

    @functools.cached_property
    def sampling(self) -> Sampling:
        """Of videos, when a request says nothing."""
        found = read_sampling(self._tokenizer.folder)
        if not self.shows_stills:
            return found
        return dataclasses.replace(found, max_frames=min(found.max_frames, MAX_STILLS))

    @property
    def parts(self) -> PartReader:
        """Reads the parts of a request that comes now."""
        return PartReader({kind: why for kind in NOUNS if (why := self.refusal(kind))})

    @property
    def kinds(self) -> tuple[str, ...]:
        """What prompts may be made of."""
        return ("text", *(kind for kind in NOUNS if not self.refusal(kind)))

    async def read(self, items: Sequence[Item], wish: FrameWish, num_choices: int, metrics: Metrics) -> None:
        """Make of each what the engine gets; those that have it stay. `wish`: which frames of videos, where
        the part says nothing. Raises ApiError 400 naming the part."""
        for kind, most in MAX_ITEMS.items():
            here = of_kind(items, kind)
            if len(here) > most:
                raise invalid(
                    f"'{here[most].param}' is {kind} {most + 1} of {len(here)}; a request may have {most}.",
                    param=here[most].param,
                    code=f"too_many_{kind}s",
                )
        new = [item for item in items if not item.is_read]
        fetched = await self._fetch([item for item in new if _is_remote(item)])
        # Of what the engine gets, and what is still as it came.
        total = sum(item.num_bytes for item in items)
        pixels = sum(item.pixels for item in items)
        made: list[Item] = []
        for item in new:
            work = functools.partial(_read, item, fetched.get(id(item)), pixels)
            data, own_pixels = await self._in_thread(item, work)
            pixels += own_pixels
            _check_total(item, total + len(data), num_choices if item.kind == "image" else 1)
            ready = await self._decoded(item, data, wish, MAX_TOTAL_BYTES - total)
            ready.pixels = own_pixels
            total += ready.num_bytes
            _check_total(item, total, num_choices)
            made.append(ready)
        for item, ready in zip(new, made, strict=True):
            item.file, item.video, item.seconds, item.source = ready.file, ready.video, ready.seconds, ""
            item.pixels = ready.pixels
        _count(new, metrics)

    async def _in_thread(self, item: Item, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(DECODE_TURN_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise ApiError(
                503,
                f"'{item.param}' was not read within {DECODE_TURN_S:g} s (DECODE_TURN_S);"
                " others are being read.",
                code="decode_timeout",
                param=item.param,
                retry_after_s=RETRY_AFTER_S,
            ) from None

    async def _decoded(self, item: Item, data: bytes, wish: FrameWish, room: int) -> Item:
        """What is made of a file that was read, in an item of its own: the request may still fail."""
        ready = Item("", item.param, kind=item.kind)
        if item.kind == "image":
            ready.file = data
            return ready
        container = _container(item, data)
        outcome = await self.decoder.decode(
            Task(
                kind=item.kind,
                demuxer=container.demuxer,
                rate=self.sampling_rate if item.kind == "audio" else 0,
                max_seconds=MAX_AUDIO_S,
                sampling=item.wish.over(wish).on(self.sampling),
                max_bytes=room,
            ),
            data,
        )
        if outcome.problem:
            raise broken(item, f"{outcome.problem}.", code=outcome.code)
        ready.file, ready.video, ready.seconds = outcome.wav, outcome.video, outcome.seconds
        if not ready.is_read:
            raise broken(item, "is empty.")
        return ready

    async def _fetch(self, items: Sequence[Item]) -> dict[int, bytes]:
        """By `id` of the item. The first that fails is the request's error, and ends the others."""
        places = asyncio.Semaphore(_FETCHES)
        total = 0

        async def one(item: Item) -> bytes:
            nonlocal total
            async with places:
                try:
                    file = await self.fetcher.fetch(item.source, item.kind, item.inline)
                except UrlRefused as error:
                    raise broken(item, f"{error}.", code="url_not_allowed") from error
                except FileTooLarge as error:
                    raise broken(item, f"{error}.", code="too_large") from error
                except FetchFailed as error:
                    raise broken(item, f"{error}.") from error
                total += len(file)
                _check_total(item, total, 1)
                return file

        tasks = [asyncio.create_task(one(item)) for item in items]
        try:
            files = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {id(item): file for item, file in zip(items, files, strict=True)}


def _count(items: Sequence[Item], metrics: Metrics) -> None:
    for item in items:
        match item.kind:
            case "image":
                metrics.images.inc()
                metrics.image_bytes.inc(len(item.file))
            case "audio":
                metrics.audio.inc()
                metrics.audio_s.inc(item.seconds)
            case "video" if item.video is not None:
                metrics.videos.inc()
                metrics.video_frames.inc(len(item.video.frames))


def _is_remote(item: Item) -> bool:
    return item.is_url and not is_data_url(item.source)


def _read(item: Item, fetched: bytes | None, pixels: int) -> tuple[bytes, int]:
    """The file, and how many pixels the picture has. `pixels`: of the request's other ones."""
    if fetched is not None:
        data = fetched
    elif item.is_url:
        data = read_data_url(item)
    else:
        data = read_base64(item)
    if item.kind != "image":
        return data, 0
    facts = check_file(item, data, pixels)
    return data, facts.width * facts.height


def _container(item: Item, data: bytes) -> Container:
    """By the file's first bytes. Raises ApiError 400 when they are of no kind that is taken, or not what the
    client says."""
    container = container_of(data)
    if container is None or not container.types_as(item.kind):
        *most, last = (one.name for one in kinds(item.kind))
        raise broken(item, f"is no {item.kind} that can be read: {', '.join(most)} and {last} are.")
    if item.media_type and item.media_type not in container.types_as(item.kind):
        own = container.types_as(item.kind)[0]
        raise broken(item, f"is said to be {item.media_type[:40]}, and its data are {own}.")
    if item.format and item.format not in container.words:
        raise broken(item, f"is said to be {item.format}, and its data are {container.name}.")
    if missing := missing_bytes(data, container):
        raise broken(item, f"is cut off: {missing} bytes of it are missing.")
    return container


def _check_total(item: Item, total: int, num_choices: int) -> None:
    if total > MAX_TOTAL_BYTES:
        raise broken(
            item,
            f"is too much: what this request has beside text has {total} bytes or more; "
            f"{MAX_TOTAL_BYTES} may be.",
            code="too_large",
        )
    if total * num_choices > MAX_SEQUENCE_BYTES:
        raise invalid(
            f"{num_choices} choices with {total} bytes beside text are too much: choices times bytes may be "
            f"{MAX_SEQUENCE_BYTES}.",
            param="n",
        )
