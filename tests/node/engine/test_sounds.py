"""Audio files become embeddings through each family's own processor, without PyTorch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken

from mlx_mesh.mesh.messages import Media
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.engine.media_keys import PICTURE_KEY
from mlx_mesh.node.engine.pictures import AudioError, Pictures, PromptTooLong
from mlx_mesh.node.engine.sounds import SoundError, waveform

WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "sampling_rate": 16000,
    "return_attention_mask": True,
}
SCALED = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
OMNI_TOKENS = {
    "image_token": "<|image|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
    "vision_bos_token": "<|boi|>",
    "vision_eos_token": "<|eoi|>",
    "audio_bos_token": "<|boa|>",
    "audio_eos_token": "<|eoa|>",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_unified": {
        "processor_config.json": {
            "feature_extractor": {"audio_samples_per_token": 40},
            "audio_ms_per_token": 2.5,
        }
    },
    "qwen3_omni_moe": {"preprocessor_config.json": {**WHISPER, **SCALED}},
    "minicpmo": {"preprocessor_config.json": WHISPER},
    "nemotron_h_nano_omni": {"processor_config.json": {"audio_subsampling_factor": 4}},
    "gemma3n#audio": {
        "processor_config.json": {"audio_seq_length": 6},
        "preprocessor_config.json": {
            "feature_extractor_type": "Gemma3nAudioFeatureExtractor",
            "feature_size": 80,
            "fft_overdrive": True,
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 256, "width": 256},
        },
    },
    "inkling": {"processor_config.json": {"feature_extractor": {"feature_size": 8}, "num_dmel_bins": 4}},
}
MARKS = {
    "nemotron_h_nano_omni": "<so_embedding>",
    "inkling": "<|unused_200053|>",
    "minicpmo": "<audio>./</audio>",
}
OWN_TOKENS = (
    "<so_embedding>",
    "<so_start>",
    "<so_end>",
    "<|unused_200053|>",
    "<unk>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|listen|>",
)


def listener(folder: Path, family: str, alm: ModuleType, tiny_vlm: ModuleType) -> tuple[Pictures, str]:
    """A tiny random model of the family with its real processor, and its mark for a sound."""
    tokenizer = alm._tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in OWN_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    gemma = alm.MARKS if family.startswith("gemma") else {}
    tokens = OMNI_TOKENS if family == "qwen3_omni_moe" else gemma
    settings = {
        "config.json": tiny_vlm.CONFIGS[family],
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<unk>",
            "extra_special_tokens": tokens,
        },
        **FAMILIES[family],
    }
    for name, value in settings.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    whole = tiny_vlm.build(family)
    mark = MARKS.get(family, "<|audio|>")
    mark_id = tokenizer.token_to_id(mark)
    for owner in (whole, whole.config, getattr(whole.config, "thinker_config", None)):
        for name in ("audio_token_id", "sound_context_token_id"):
            if hasattr(owner, name):
                setattr(owner, name, mark_id)
    return Pictures(folder, whole), mark


def heard(pictures: Pictures, text: str, *sounds: bytes) -> tuple[list[Any], tuple[int, ...]]:
    """The rows of each sound among the embeddings, and the keys."""
    ids, keys, features = pictures.read(Media(text=text, audios=sounds))
    rows = np.array(features.fields["inputs_embeds"])[0]
    plain = pictures._whole.get_input_embeddings(_array(ids), None).inputs_embeds
    at = np.flatnonzero(np.any(rows != np.array(plain)[0], axis=-1))
    assert len(at), "no token became a sound"
    parts = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    return [rows[part] for part in parts], keys


def _array(ids: tuple[int, ...]) -> Any:
    import mlx.core as mx

    return mx.array([ids])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "nemotron_h_nano_omni" else [pytest.mark.long])
        for name in FAMILIES
    ],
)
def test_each_of_several_sounds_is_what_it_is_alone(
    family: str, alm: ModuleType, tiny_vlm: ModuleType, tmp_path: Path
) -> None:
    pictures, mark = listener(tmp_path, family, alm, tiny_vlm)
    is_fixed = family == "gemma3n#audio"  # its sounds are of one length, and the last frame sees the padding
    short, long = alm.sound(1, 0.9 if is_fixed else 0.5), alm.sound(2, 0.9)
    (alone_short,), _ = heard(pictures, f"hear {mark} well", short)
    (alone_long,), _ = heard(pictures, f"hear {mark} well", long)
    assert len(alone_short) < len(alone_long) or is_fixed
    for sounds, alone in (
        ((short, long), (alone_short, alone_long)),
        ((long, short), (alone_long, alone_short)),
    ):
        parts, _ = heard(pictures, f"hear {mark} and {mark} well", *sounds)
        assert len(parts) == 2
        for part, one in zip(parts, alone, strict=True):
            # Where Whisper's frames end, they differ with what a sound is padded by.
            assert part.shape == one.shape and np.abs(part - one).max() < 0.05 * np.abs(one).max()
    assert "torch" not in sys.modules


def asked(alm: ModuleType, *sounds: bytes, images: tuple[bytes, ...] = ()) -> Media:
    return Media(text=alm.prompt("?", len(images), len(sounds)), audios=sounds, images=images)


@pytest.fixture
def ears(tiny_alm_folder: Path) -> Pictures:
    return Pictures(tiny_alm_folder, open_lazy(tiny_alm_folder, with_vision=True).whole)


def test_a_sound_is_known_by_its_file_and_a_second_question_about_it_costs_no_pass(
    alm: ModuleType, vlm: ModuleType, ears: Pictures
) -> None:
    def keys(*sounds: bytes, images: tuple[bytes, ...] = ()) -> list[int]:
        found = ears.read(asked(alm, *sounds, images=images))[1]
        return [key for key in found if key >= PICTURE_KEY]

    one, other, long = alm.sound(1), alm.sound(2), alm.sound(1, 0.8)
    assert len(keys(one)) == 10 and len(keys(long)) == 20
    passes = ears.towers.num_passes
    assert keys(one) == keys(one)
    assert ears.towers.num_passes == passes
    assert not set(keys(one)) & set(keys(other)) and not set(keys(one)) & set(keys(long))
    both = keys(one, other)
    assert both == keys(one) + keys(other) and keys(other, one) == keys(other) + keys(one)
    picture = vlm.picture(1)
    assert keys(one, images=(picture,))[-10:] == keys(one)


@pytest.mark.parametrize("num_samples", [6400, 6401, 6560, 6561, 7039, 7040])
def test_each_mark_of_a_sound_has_a_row_of_the_tower(
    alm: ModuleType, ears: Pictures, num_samples: int
) -> None:
    inputs = ears._process(asked(alm, alm.sound(1, num_samples / alm.RATE)))
    _, is_padding = ears._whole.audio_tower(
        mx.array(inputs["input_features"]), ~mx.array(inputs["input_features_mask"]).astype(mx.bool_)
    )
    marks = np.array(inputs["input_ids"]) == ears._whole.config.audio_token_id
    assert marks.sum() == (~np.array(is_padding)).sum()


def test_two_sounds_whatever_their_lengths_are_where_their_marks_are(alm: ModuleType, ears: Pictures) -> None:
    short, long = alm.sound(1, 0.5), alm.sound(2, 0.9)
    (alone_short,), _ = heard(ears, alm.prompt("?", 0, 1), short)
    (alone_long,), _ = heard(ears, alm.prompt("?", 0, 1), long)
    for sounds, alone in (
        ((short, long), (alone_short, alone_long)),
        ((long, short), (alone_long, alone_short)),
    ):
        parts, _ = heard(ears, alm.prompt("?", 0, 2), *sounds)
        assert all(np.abs(part - one).max() < 1e-5 for part, one in zip(parts, alone, strict=True))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda alm: b"no sound at all", "cannot be read as WAV"),
        (lambda alm: alm.sound(1)[:30], "cannot be read as WAV"),
        (lambda alm: alm.sound(1, rate=8000), "at 8000 Hz; .* at 16000 Hz"),
        (lambda alm: alm.sound(1, 0.0), "is empty"),
        (
            lambda alm: alm.sound(1, 4.1),
            r"^audios\[1\] .* lasts 4\.1 s, .* takes 4\.0 s at most; it is refused",
        ),
    ],
)
def test_what_is_no_sound_for_the_model_is_an_error_that_names_it(
    alm: ModuleType, ears: Pictures, spoil: Callable[[ModuleType], bytes], words: str
) -> None:
    with pytest.raises(AudioError, match=words) as caught:
        ears.read(asked(alm, alm.sound(1), spoil(alm)))
    assert (caught.value.param, caught.value.code) == ("audios[1]", "invalid_audio")
    assert ears.towers.num_passes == 0


def test_a_processor_that_would_take_the_first_sound_alone_gets_no_more(
    alm: ModuleType, ears: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(ears._load_processor()), "supports_multiple_audio", False)
    with pytest.raises(AudioError, match="drops the others") as caught:
        ears.read(asked(alm, alm.sound(1), alm.sound(2)))
    assert caught.value.param == "audios[1]"
    assert ears.read(asked(alm, alm.sound(1)))[0]


def test_whatever_the_tower_raises_is_an_error_that_names_the_only_sound(
    alm: ModuleType, vlm: ModuleType, ears: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("it is too loud")

    monkeypatch.setattr(type(ears._whole), "get_input_embeddings", fail)
    with pytest.raises(AudioError, match="too loud") as caught:
        ears.read(asked(alm, alm.sound(1)))
    assert caught.value.param == "audios[0]"
    with pytest.raises(AudioError) as caught:
        ears.read(asked(alm, alm.sound(1), alm.sound(2)))
    assert caught.value.param == ""


def test_a_prompt_that_its_sounds_make_too_long_is_refused_before_the_towers_run(
    alm: ModuleType, tiny_alm_folder: Path
) -> None:
    whole = open_lazy(tiny_alm_folder, with_vision=True).whole
    media = asked(alm, alm.sound(1, 2.0))
    num_tokens = len(Pictures(tiny_alm_folder, whole).read(media)[0])
    ears = Pictures(tiny_alm_folder, whole, context_length=num_tokens)
    with pytest.raises(PromptTooLong, match=f"has {num_tokens} tokens with its audio"):
        ears.read(media)
    assert ears.towers.num_passes == 0


def test_samples_are_what_the_file_says() -> None:
    import io
    import wave

    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(b"\x00\x80\x00\x00\xff\x7f")
    assert waveform(file.getvalue(), 16000).tolist() == [-1.0, 0.0, 32767 / 32768]
    with pytest.raises(SoundError, match="1 channels of 16 bits at 16000 Hz"):
        waveform(file.getvalue(), 24000)


def test_a_model_with_both_towers_tells_both_kinds(tiny_alm_folder: Path) -> None:
    from mlx_mesh.node.engine import inspect

    footprint = inspect.measure_folder(tiny_alm_folder, "")
    assert {"image", "audio"} <= set(footprint.media)
    whole = open_lazy(tiny_alm_folder, with_vision=True).whole
    from mlx.utils import tree_flatten

    towers = (whole.vision_tower, whole.embed_vision, whole.audio_tower, whole.embed_audio)
    assert footprint.tower_bytes == sum(
        int(array.nbytes) for tower in towers for _, array in tree_flatten(tower.parameters())
    )
    assert msgspec.json.decode(msgspec.json.encode(footprint), type=type(footprint)) == footprint
