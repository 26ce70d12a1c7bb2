"""From a prompt with media to the language model's inputs: processor and towers, on the leader alone.

All of it runs on the engine's one MLX thread, between two steps: processors make MLX arrays themselves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mesh.mesh.errors import MeshError, SettingsError
from mlx_mesh.mesh.kv_budget import MEDIA_BYTES
from mlx_mesh.mesh.messages import Media
from mlx_mesh.mesh.whole_prompt import LONGEST, Widths
from mlx_mesh.node.engine.features import Features, clear_state, features_of, passed_on
from mlx_mesh.node.engine.media_keys import Items, keys_of, runs_of, spread
from mlx_mesh.node.engine.picture_sizes import (
    Bounds,
    least_tokens,
    most_opened,
    opened,
    own_most,
    picture_pixels_per_token,
    scales_itself,
)
from mlx_mesh.node.engine.sounds import (
    READ_APART,
    SoundError,
    embed_apart,
    longest_sound,
    sampling_rate,
    waveform,
    with_whole_end,
)
from mlx_mesh.node.engine.text_start import nothing_added, without_what_is_added
from mlx_mesh.node.engine.tower_memo import TowerMemo
from mlx_mesh.node.engine.videos import content_of, frames_of, joined, most_frames, pixels_per_token
from mlx_mesh.node.engine.vision_model import load_processor
from mlx_mesh.node.engine.whole_prompts import has_no_chunks
from mlx_mesh.node.vision import ONE_PICTURE

_MARK_NAMES = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
    "image_context_token_id",
    "img_context_token_id",
    "image_pad_token_id",
)

_AUDIO_MARK_NAMES = ("audio_token_id", "audio_token_index", "sound_context_token_id")

_VIDEO_MARK_NAMES = ("video_token_id", "video_token_index")

_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What processors make of a text without media."""

_OF_AUDIO = ("audio", "input_features", "sound")
"""Parts of the names of what they make of audio."""


class PictureError(MeshError):
    """What one request has beside text cannot be used; the message says why. `param`: the one at fault, like
    "images[2]", '' when it is not known."""

    code = "invalid_image"

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class VideoError(PictureError):
    """It is the videos that cannot be used; `param` is like "videos[0]"."""

    code = "invalid_video"


class AudioError(PictureError):
    """It is the audio that cannot be used; `param` is like "audios[0]"."""

    code = "invalid_audio"


class PromptTooLong(PictureError):
    """With its media the prompt is longer than the context."""

    code = "context_length_exceeded"


class Pictures:
    """One model's processor and towers."""

    def __init__(
        self,
        folder: Path,
        whole: Any,
        context_length: int = 0,
        memo_bytes: int = MEDIA_BYTES,
        *,
        longest_whole: int = LONGEST,
        widths: Widths | None = None,
        reads_whole: bool = False,
    ) -> None:
        """`context_length` 0 = not known, and prompts may be of any length; `memo_bytes`: of the towers'
        memory; `longest_whole`: tokens of the longest prompt that may be read in one piece; `widths`: what
        memory that takes, None = it is not counted; `reads_whole`: all prompts are, text alone as well."""
        self._folder = folder
        self._whole = whole
        self._context_length = context_length
        self._longest_whole = longest_whole
        self._widths = widths
        self.reads_whole = reads_whole
        self.towers = TowerMemo(whole, memo_bytes)
        self._processor: Any = None

    def read(self, media: Media) -> tuple[tuple[int, ...], tuple[int, ...], Features]:
        """The prompt's ids with a token for each embedding, what they are known by in prefix caches, and the
        features. Raises PictureError."""
        if not (media.images or media.audios or media.videos):
            raise PictureError("The prompt has no picture.")
        if len(media.images) > 1 and (why := ONE_PICTURE.get(self._whole.config.model_type)):
            raise PictureError(f"This model takes one picture in a prompt: {why}.", "images[1]")
        inputs = self._process(media)
        try:
            clear_state(self._whole.language_model)
            return self._embed(media, inputs)
        except PictureError:
            raise
        except Exception as error:  # the model's own code: no other rank takes part, so it is this request's
            raise _error(media, f"The model cannot use {_named(media)}: {_first_line(error)}") from error
        finally:
            clear_state(self._whole.language_model)

    def read_text(self, ids: tuple[int, ...]) -> Features:
        """The features of a prompt of text alone that is read in one piece. Raises PictureError."""
        self._check_whole(len(ids))
        try:
            clear_state(self._whole.language_model)
            embedded = self._whole.get_input_embeddings(mx.array([list(ids)]), None)
            features = features_of(embedded.to_dict(), self._whole.language_model)
        finally:
            clear_state(self._whole.language_model)
        mx.eval([x for value in features.fields.values() for x in _arrays(value)])
        return replace(features, is_whole=True, sees_ahead=True)

    def bytes_to_read(self, features: Features) -> int:
        """What each rank needs besides while it reads this prompt, if that is in one piece; else 0: chunks
        are counted with the model."""
        if self._widths is None or not features.is_whole:
            return 0
        return self._widths.bytes_of(features.length)

    def _check_whole(self, num_tokens: int) -> None:
        if num_tokens > self._longest_whole:
            raise PromptTooLong(
                f"The prompt has {num_tokens} tokens, and this model reads it in one piece: there is memory "
                f"for {self._longest_whole}. Shorten it; or serve with more memory."
            )

    def _embed(
        self, media: Media, inputs: dict[str, Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...], Features]:
        rows = np.array(inputs.pop("input_ids"))
        if rows.ndim > 1 and len(rows) != 1:
            raise PictureError(f"The model's processor makes {len(rows)} prompts of this one.")
        ids = rows.reshape(-1).tolist()
        if self._context_length and len(ids) >= self._context_length:  # before the towers have the work
            raise PromptTooLong(
                f"The prompt has {len(ids)} tokens with its {_named(media)}; the context of "
                f"{self._context_length} leaves no room for an answer. Give smaller ones, or fewer."
            )
        marks = self._marks(_MARK_NAMES)
        kinds = [Items(marks, tuple(_limits_of(media) + image for image in media.images))]
        if media.audios:
            longest = b"%d " % max(map(len, media.audios))  # all are padded to it
            contents = tuple(longest + audio for audio in media.audios)
            kinds.append(Items(self._marks(_AUDIO_MARK_NAMES), contents))
        if media.videos:
            kinds.append(self._videos(ids, media, inputs))
        given = ids
        if "image_grid_thw" in inputs and "video_grid_thw" in inputs:
            merge = self._processor.image_processor.merge_size
            given, inputs = joined(ids, inputs, marks, self._marks(_VIDEO_MARK_NAMES), merge=merge)
        given_on = passed_on(inputs, self._whole.language_model)
        is_whole = self.reads_whole or bool(given_on) or has_no_chunks(self._whole, given, inputs)
        if is_whole:
            self._check_whole(len(given))
        mask = inputs.pop("attention_mask", None)
        runs = runs_of(ids, self._marks(_AUDIO_MARK_NAMES))
        if self._whole.config.model_type in READ_APART and len(media.audios) > 1:
            if len(runs) != len(media.audios):  # mlx-vlm's own way would give one of them what is another's
                raise AudioError(f"The prompt has {len(runs)} places for {len(media.audios)} sounds.")
            embedded = embed_apart(self._whole, given, runs, {**inputs, "mask": mask})
        else:
            pixels = inputs.pop("pixel_values", None)
            embedded = self._whole.get_input_embeddings(mx.array([given]), pixels, mask=mask, **inputs)
        features = features_of({**embedded.to_dict(), **given_on}, self._whole.language_model)
        features = replace(features, is_whole=is_whole, sees_ahead=self.reads_whole)
        mx.eval([x for value in features.fields.values() for x in _arrays(value)])
        ids = spread(ids, features.length, frozenset().union(*(kind.marks for kind in kinds)))
        return tuple(ids), keys_of(ids, kinds, features), features

    def _videos(self, ids: list[int], media: Media, inputs: dict[str, Any]) -> Items:
        """What the prompt's runs of video marks stand for: a video each, or a part of one, where frames have
        marks of their own."""
        marks = self._marks(_VIDEO_MARK_NAMES)
        contents = [b"%d " % media.max_pixels + content_of(video) for video in media.videos]
        grids = inputs.get("video_grid_thw")
        told = inputs.get("num_frames_per_video") if grids is None else np.array(grids)[:, 0]
        parts = None if told is None else np.array(told).reshape(-1).tolist()
        if parts is not None and len(runs_of(ids, marks)) == sum(parts) != len(contents):
            contents = [
                content + b" %d" % part
                for content, num_parts in zip(contents, parts, strict=True)
                for part in range(num_parts)
            ]
        return Items(marks, tuple(contents))

    def _process(self, media: Media) -> dict[str, Any]:
        """What the model's own processor makes of it."""
        processor = self._load_processor()
        bounds = self._bounds(media, processor)
        given = {**bounds.asked, **self._opened(media, bounds, processor)}
        try:
            inputs = self._prepared(processor, media.text, given)
            ids = np.array(inputs["input_ids"]).reshape(-1).tolist()
            text = without_what_is_added(processor, media.text, ids)
            inputs = inputs if text == media.text else self._prepared(processor, text, given)
        except Exception as error:  # a processor's own code, over a stranger's file
            what = f"The model's processor cannot read the {_named(media)}: {_first_line(error)}"
            raise _error(media, what) from error
        if left_out := _left_out(media, inputs):
            raise _error(
                media,
                f"The model's processor ({type(processor).__name__}) leaves the {left_out} out. Copy the "
                "model's processor_config.json and preprocessor_config.json to the leader's folder.",
            )
        return inputs

    def _prepared(self, processor: Any, text: str, given: dict[str, Any]) -> dict[str, Any]:
        from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

        config = self._whole.config
        with nothing_added(processor, text):
            inputs = prepare_inputs(
                processor,
                prompts=text,
                image_token_index=getattr(config, "image_token_index", None),
                add_special_tokens=should_add_special_tokens(config.model_type, processor),
                **given,
            )
        return {name: value for name, value in inputs.items() if value is not None}

    def _opened(self, media: Media, bounds: Bounds, processor: Any) -> dict[str, list[Any]]:
        """All files decoded, by the names that mlx-vlm has for their kinds; only kinds that there are."""
        images = []
        for at, image in enumerate(media.images):
            try:
                images.append(opened(image, bounds.opened, bounds.edge))
            except Exception as error:  # Pillow's readers raise whatever a stranger's file makes them raise
                raise PictureError(
                    f"images[{at}] cannot be read: {_first_line(error)}", f"images[{at}]"
                ) from error
        videos, most = [], most_frames(processor)
        for at, video in enumerate(media.videos):
            if most and len(video.frames) > most:
                raise VideoError(
                    f"videos[{at}] is {len(video.frames)} frames; the model's processor takes {most} of a "
                    "video and leaves the others out. Ask for fewer (max_frames, fps).",
                    f"videos[{at}]",
                )
            try:
                videos.append(frames_of(video, media.max_pixels))
            except Exception as error:
                raise VideoError(
                    f"videos[{at}] cannot be read: {_first_line(error)}", f"videos[{at}]"
                ) from error
        kinds = {
            "images": images,
            "audio": self._sounds(media, processor),
            "videos": [frames for frames, _ in videos],
            "video_metadata": [sampled for _, sampled in videos],
        }
        return {name: value for name, value in kinds.items() if value}

    def _sounds(self, media: Media, processor: Any) -> list[Any]:
        if not media.audios:
            return []
        rate, longest = sampling_rate(processor), longest_sound(processor)
        sounds = []
        for at, audio in enumerate(media.audios):
            try:
                samples = waveform(audio, rate, longest)
            except SoundError as error:
                raise AudioError(f"audios[{at}] cannot be used: {error}.", f"audios[{at}]") from error
            sounds.append(with_whole_end(samples, self._whole.config.model_type))
        if len(sounds) > 1 and not getattr(processor, "supports_multiple_audio", False):
            raise AudioError("The model's processor takes one audio and drops the others.", "audios[1]")
        return sounds

    def _bounds(self, media: Media, processor: Any) -> Bounds:
        """What the request wants, but no more pixels than fill the context: making them, only to refuse the
        prompt, would hold up everybody for minutes."""
        per_token = picture_pixels_per_token(processor)
        scales = scales_itself(self._whole.config.model_type)
        most = self._context_length * per_token
        if most and media.min_pixels > most:
            raise PromptTooLong(
                f"min_pixels is {media.min_pixels}; the context of {self._context_length} tokens has "
                f"room for a picture of less than {most} pixels."
            )
        wanted = media.max_pixels if per_token else 0  # what has a fixed size would only be blurred
        wanted = wanted or own_most(processor)
        bound = min(filter(None, (wanted, most)), default=0)
        if most and scales:
            least = least_tokens(media.images, per_token, media.min_pixels, bound)
            if least >= self._context_length:
                raise PromptTooLong(
                    f"The {len(media.images)} pictures have at least {least} tokens; the context has room "
                    f"for {self._context_length}, prompt and answer together. Give smaller ones, or fewer."
                )
        asked = {"min_pixels": media.min_pixels}
        if bound != own_most(processor):
            asked["max_pixels"] = bound
        asked = {name: value for name, value in asked.items() if value} if scales else {}
        return Bounds(asked, most_opened(scales, bound), math.isqrt(max(0, per_token - 1)) + 1)

    def _load_processor(self) -> Any:
        if self._processor is None:
            try:
                self._processor = load_processor(self._folder)
            except SettingsError as error:
                raise PictureError(f"The model cannot take pictures: {error}.") from error
            self._bound_videos()
        return self._processor

    def _bound_videos(self) -> None:
        """As in `_limits`. A video's bound is of all its frames, and no argument of a processor's call."""
        per_token = pixels_per_token(self._processor)
        if self._context_length and per_token:
            scaler = self._processor.video_processor
            scaler.max_pixels = min(scaler.max_pixels, self._context_length * per_token)

    def _marks(self, names: tuple[str, ...]) -> frozenset[int]:
        """Ids that stand for the tokens of one kind, as far as the configs tell."""
        config, processor = self._whole.config, self._processor
        thinker = getattr(config, "thinker_config", None)
        owners = (config, thinker, processor, getattr(processor, "tokenizer", None))
        found = (getattr(owner, name, None) for owner in owners for name in names)
        return frozenset(value for value in found if isinstance(value, int))


def _limits_of(media: Media) -> bytes:
    return b"%d %d " % (media.min_pixels, media.max_pixels)


def _left_out(media: Media, inputs: dict[str, Any]) -> str:
    """What of it a processor took and did not read: some are a tokenizer alone when their settings are
    missing, or have no part for audio then, and say nothing. '' = all is there."""
    if inputs.keys() <= _OF_TEXT:
        return _named(media)
    heard = [name for name in inputs if any(part in name for part in _OF_AUDIO)]
    return "audio" if media.audios and not heard else ""


def _named(media: Media) -> str:
    kinds = {"pictures": media.images, "audio": media.audios, "videos": media.videos}
    return " and ".join(name for name, items in kinds.items() if items)


def _error(media: Media, message: str) -> PictureError:
    """Of all of them, or of the only one."""
    kinds = {"images": PictureError, "audios": AudioError, "videos": VideoError}
    held = [name for name in kinds if getattr(media, name)]
    if len(held) > 1:
        return PictureError(message)
    return kinds[held[0]](message, f"{held[0]}[0]" if len(getattr(media, held[0])) == 1 else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".") + "."


def _arrays(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
