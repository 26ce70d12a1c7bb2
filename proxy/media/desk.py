"""What this mesh does with pictures: whether it takes them, reading them, and putting them into prompts."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from mlx_mesh.mesh.messages import ProxyConfig
from mlx_mesh.node.client import CoordinatorClient
from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.media.addresses import UrlRefused
from mlx_mesh.proxy.media.data_urls import is_data_url, read_base64, read_data_url
from mlx_mesh.proxy.media.fetch import Fetcher, FetchFailed, FileTooLarge
from mlx_mesh.proxy.media.files import can_read, check_file
from mlx_mesh.proxy.media.known_marks import read_known_marks
from mlx_mesh.proxy.media.limits import MAX_IMAGES, MAX_SEQUENCE_BYTES, MAX_TOTAL_BYTES
from mlx_mesh.proxy.media.marks import ImageMark, find_mark
from mlx_mesh.proxy.media.parts import PartReader
from mlx_mesh.proxy.media.picture import Picture, broken
from mlx_mesh.proxy.metrics import Metrics
from mlx_mesh.proxy.tokenizer import ModelTokenizer

_INSTALL = (
    "this model takes images, but Pillow is missing on the leader: `pip install 'mlx-mesh[vision]'` there "
    "and start the mesh again"
)
_NO_PLACE = (
    "this model takes images, but its chat template has no place for one; give one that has with "
    "--chat-template"
)
_FETCHES = 4
"""Pictures of one request that are fetched at once."""


class MediaDesk:
    """Built once, for one model. Whether that takes images is known when the mesh is ready."""

    def __init__(self, config: ProxyConfig, tokenizer: ModelTokenizer, client: CoordinatorClient) -> None:
        self.fetcher = Fetcher(frozenset(config.allowed_media_domains))
        self._tokenizer = tokenizer
        self._client = client
        self._missing = "" if can_read() else _INSTALL

    @property
    def refusal(self) -> str:
        """'' or why no images are taken."""
        readiness = self._client.readiness
        if "image" not in readiness.media:
            return readiness.media_refusals.get("image", "").rstrip(".") or "this model takes text only"
        if self._missing:
            return self._missing
        return "" if self._found_mark is not None else _NO_PLACE

    @property
    def mark(self) -> ImageMark | None:
        """None where no images are taken."""
        return None if self.refusal else self._found_mark

    @functools.cached_property
    def _found_mark(self) -> ImageMark | None:
        known = read_known_marks(self._tokenizer.folder, self._tokenizer.added_tokens)
        return find_mark(self._tokenizer.render, known)

    @property
    def parts(self) -> PartReader:
        """Reads the parts of a request that comes now."""
        return PartReader(self.refusal)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What prompts may be made of."""
        return ("text",) if self.refusal else ("text", "image")

    async def read(self, pictures: Sequence[Picture], num_choices: int, metrics: Metrics) -> None:
        """Fill in `file` of each; those that have it stay. Raises ApiError 400 naming the part."""
        if len(pictures) > MAX_IMAGES:
            first = pictures[MAX_IMAGES]
            raise broken(
                first,
                f"is image {MAX_IMAGES + 1} of {len(pictures)}; a request may have {MAX_IMAGES}.",
                code="too_many_images",
            )
        new = [picture for picture in pictures if not picture.file]
        fetched = await self._fetch([picture for picture in new if _is_remote(picture)])
        total = sum(len(picture.file) for picture in pictures)
        files: list[tuple[Picture, bytes]] = []
        for picture in new:
            given = fetched.get(id(picture))
            data = await self._tokenizer.in_thread(functools.partial(_read, picture, given))
            total += len(data)
            _check_total(picture, total, num_choices)
            files.append((picture, data))
        for picture, data in files:
            picture.file, picture.source = data, ""
        metrics.images.inc(len(files))
        metrics.image_bytes.inc(sum(len(data) for _, data in files))

    async def _fetch(self, pictures: Sequence[Picture]) -> dict[int, bytes]:
        """By `id` of the picture. The first that fails is the request's error, and ends the others."""
        places = asyncio.Semaphore(_FETCHES)
        total = 0

        async def one(picture: Picture) -> bytes:
            nonlocal total
            async with places:
                try:
                    file = await self.fetcher.fetch(picture.source)
                except UrlRefused as error:
                    raise broken(picture, f"{error}.", code="image_url_not_allowed") from error
                except FileTooLarge as error:
                    raise broken(picture, f"{error}.", code="image_too_large") from error
                except FetchFailed as error:
                    raise broken(picture, f"{error}.") from error
                total += len(file)
                _check_total(picture, total, 1)
                return file

        tasks = [asyncio.create_task(one(picture)) for picture in pictures]
        try:
            files = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {id(picture): file for picture, file in zip(pictures, files, strict=True)}


def _is_remote(picture: Picture) -> bool:
    return picture.is_url and not is_data_url(picture.source)


def _read(picture: Picture, fetched: bytes | None) -> bytes:
    if fetched is not None:
        data = fetched
    elif picture.is_url:
        data = read_data_url(picture)
    else:
        data = read_base64(picture)
    check_file(picture, data)
    return data


def _check_total(picture: Picture, total: int, num_choices: int) -> None:
    if total > MAX_TOTAL_BYTES:
        raise broken(
            picture,
            f"is too much: the images of this request have {total} bytes or more; {MAX_TOTAL_BYTES} may be.",
            code="image_too_large",
        )
    if total * num_choices > MAX_SEQUENCE_BYTES:
        raise invalid(
            f"{num_choices} choices with {total} bytes of images are too much: choices times bytes may be "
            f"{MAX_SEQUENCE_BYTES}.",
            param="n",
        )
