"""From a prompt with pictures to the language model's inputs: processor and towers, on the leader alone.

All of it runs on the engine's one MLX thread, between two steps: processors make MLX arrays themselves.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mesh.mesh.errors import MeshError, SettingsError
from mlx_mesh.mesh.messages import Media
from mlx_mesh.node.engine.features import Features, clear_state, features_of
from mlx_mesh.node.engine.tower_memo import TowerMemo
from mlx_mesh.node.engine.vision_model import load_processor

PICTURE_KEY = 1 << 31
"""Keys of picture tokens begin here; no vocabulary comes near. Below 1 << 32."""

_MARK_NAMES = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
    "image_context_token_id",
    "img_context_token_id",
    "image_pad_token_id",
)


class PictureError(MeshError):
    """The pictures of one request cannot be used; the message says why. `param`: the one at fault, like
    "images[2]", '' when it is not known."""

    code = "invalid_image"

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(PictureError):
    """With its pictures the prompt is longer than the context."""

    code = "context_length_exceeded"


class Pictures:
    """One model's processor and towers."""

    def __init__(self, folder: Path, whole: Any, context_length: int = 0) -> None:
        """`context_length` 0 = not known, and prompts may be of any length."""
        self._folder = folder
        self._whole = whole
        self._context_length = context_length
        self.towers = TowerMemo(whole)
        self._processor: Any = None

    def read(self, media: Media) -> tuple[tuple[int, ...], tuple[int, ...], Features]:
        """The prompt's ids with a token for each embedding, what they are known by in prefix caches, and the
        features. Raises PictureError."""
        if not media.images:
            raise PictureError("The prompt has no picture.")
        inputs = self._process(media)
        try:
            clear_state(self._whole.language_model)
            return self._embed(media, inputs)
        except PictureError:
            raise
        except Exception as error:  # the model's own code: no other rank takes part, so it is this request's
            raise PictureError(f"The model cannot use these pictures: {_first_line(error)}") from error
        finally:
            clear_state(self._whole.language_model)

    def _embed(
        self, media: Media, inputs: dict[str, Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...], Features]:
        ids = np.array(inputs.pop("input_ids")).reshape(-1).tolist()
        if self._context_length and len(ids) >= self._context_length:  # before the towers have the work
            raise PromptTooLong(
                f"The prompt has {len(ids)} tokens with its pictures; the context of {self._context_length} "
                "leaves no room for an answer. Give smaller pictures, or fewer."
            )
        pixels, mask = inputs.pop("pixel_values", None), inputs.pop("attention_mask", None)
        embedded = self._whole.get_input_embeddings(mx.array([ids]), pixels, mask=mask, **inputs)
        features = features_of(embedded.to_dict(), self._whole.language_model)
        mx.eval([x for value in features.fields.values() for x in _arrays(value)])
        marks = self._marks()
        ids = spread(ids, features.length, marks)
        return tuple(ids), keys_of(ids, marks, media, features), features

    def _process(self, media: Media) -> dict[str, Any]:
        from mlx_vlm.utils import load_image, prepare_inputs, should_add_special_tokens

        processor = self._load_processor()
        limits = self._limits(media, processor)
        config = self._whole.config
        images = []
        for at, image in enumerate(media.images):
            try:
                images.append(load_image(io.BytesIO(image)))
            except Exception as error:  # Pillow's readers raise whatever a stranger's file makes them raise
                raise PictureError(f"It cannot be read: {_first_line(error)}", f"images[{at}]") from error
        try:
            inputs = prepare_inputs(
                processor,
                images=images,
                prompts=media.text,
                image_token_index=getattr(config, "image_token_index", None),
                add_special_tokens=should_add_special_tokens(config.model_type, processor),
                **{name: value for name, value in limits.items() if value},
            )
        except Exception as error:  # a processor's own code, over a stranger's file
            raise PictureError(f"The model's processor cannot read them: {_first_line(error)}") from error
        return {name: value for name, value in inputs.items() if value is not None}

    def _limits(self, media: Media, processor: Any) -> dict[str, int]:
        """For processors that scale: what the request wants, but no more pixels than fill the context. Making
        them, only to refuse the prompt, would hold up everybody for minutes."""
        limits = {"min_pixels": media.min_pixels, "max_pixels": media.max_pixels}
        scaler = getattr(processor, "image_processor", None)
        patch, merge = getattr(scaler, "patch_size", None), getattr(scaler, "merge_size", None)
        if self._context_length and isinstance(patch, int) and isinstance(merge, int):
            most = self._context_length * (patch * merge) ** 2
            if media.min_pixels > most:
                raise PromptTooLong(
                    f"min_pixels is {media.min_pixels}; the context of {self._context_length} tokens has "
                    f"room for a picture of less than {most} pixels."
                )
            limits["max_pixels"] = min(media.max_pixels, most)
        return limits

    def _load_processor(self) -> Any:
        if self._processor is None:
            try:
                self._processor = load_processor(self._folder)
            except SettingsError as error:
                raise PictureError(f"The model cannot take pictures: {error}.") from error
        return self._processor

    def _marks(self) -> frozenset[int]:
        """Ids that stand for a picture's tokens, as far as the configs tell."""
        owners = (self._whole.config, self._processor, getattr(self._processor, "tokenizer", None))
        found = (getattr(owner, name, None) for owner in owners for name in _MARK_NAMES)
        return frozenset(value for value in found if isinstance(value, int))


def spread(ids: Sequence[int], length: int, marks: frozenset[int]) -> list[int]:
    """Ids with as many entries as there are embeddings: some models take one mark for a whole picture. The
    new ones stand where the last mark is, or at the end."""
    missing = length - len(ids)
    if missing <= 0:
        return list(ids[:length])
    at = max((i for i, token in enumerate(ids) if token in marks), default=len(ids) - 1)
    return [*ids[:at], *([ids[at]] * missing), *ids[at:]]


def keys_of(ids: Sequence[int], marks: frozenset[int], media: Media, features: Features) -> tuple[int, ...]:
    """What a prompt's tokens are known by: text by its ids, a picture's tokens by its content. Where runs of
    marks are as many as pictures, the content is the file, the number of its tokens, which in some families
    depends on the other pictures, and the place among them; else it is the embedding with its position, which
    is right whatever a family does, but may differ by the other pictures of the prompt."""
    is_mark = [token in marks for token in ids]
    starts = [i for i, mark in enumerate(is_mark) if mark and not (i and is_mark[i - 1])]
    if len(starts) == len(media.images):
        limits = b"%d %d " % (media.min_pixels, media.max_pixels)
        keys = list(ids)
        for start, image in zip(starts, media.images, strict=True):
            num_tokens = next((i for i, mark in enumerate(is_mark[start:]) if not mark), len(ids) - start)
            digest = hashlib.blake2b(limits + b"%d " % num_tokens + image, digest_size=16).digest()
            for place in range(num_tokens):
                keys[start + place] = _key(digest + place.to_bytes(4, "little"))
        return tuple(keys)
    embeds = np.array(features.fields["inputs_embeds"].astype(mx.float32))[0]
    given = features.fields.get("position_ids")
    positions = np.zeros((1, len(ids))) if given is None else np.array(given).reshape(-1, len(ids))
    has_marks = any(is_mark)
    return tuple(
        _key(embeds[i].tobytes() + positions[:, i].tobytes()) if mark or not has_marks else ids[i]
        for i, mark in enumerate(is_mark)
    )


def _key(content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=4).digest()
    return PICTURE_KEY | int.from_bytes(digest, "little") >> 1


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".") + "."


def _arrays(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
