"""What is an adapter's folder, and what is refused, each with the file and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.node.adapters import digest_adapter, resolve_adapter

GOOD: dict[str, Any] = {
    "fine_tune_type": "lora",
    "num_layers": 4,
    "lora_parameters": {"rank": 4, "scale": 8.0, "dropout": 0.0},
}


def write(folder: Path, config: object, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapters.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize(
    "config", [GOOD, GOOD | {"fine_tune_type": "dora"}, {"fine_tune_type": "full", "num_layers": 4}]
)
def test_the_kinds_that_mlx_lm_trains_are_taken(tmp_path: Path, config: dict[str, Any]) -> None:
    assert resolve_adapter(str(write(tmp_path / "a", config))) == (tmp_path / "a").resolve()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            GOOD | {"fine_tune_type": "ia3"},
            r"adapter_config\.json says `fine_tune_type: ia3`.*lora, dora, full",
        ),
        (GOOD | {"num_layers": "all"}, r"no `num_layers`"),
        (
            GOOD | {"lora_parameters": {"rank": 4, "alpha": 8}},
            r"no `lora_parameters\.scale`, `lora_p.*dropout`",
        ),
        (
            GOOD | {"lora_parameters": {"rank": "4", "scale": 1, "dropout": 0}},
            r"rank: 4`, which is no number",
        ),
        ([1, 2], "no JSON object"),
    ],
)
def test_a_config_that_cannot_be_meant_is_named(tmp_path: Path, config: object, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        resolve_adapter(str(write(tmp_path / "a", config)))


def test_a_missing_folder_and_the_form_of_another_library_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist on"):
        resolve_adapter(str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match=r"has no adapter_config\.json"):
        resolve_adapter(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(SettingsError, match="PEFT"):
        resolve_adapter(str(tmp_path))


def test_the_digest_changes_with_every_byte(tmp_path: Path) -> None:
    seen = {
        digest_adapter(write(tmp_path / "a", config, weights))
        for config, weights in [(GOOD, b"one"), (GOOD, b"two"), (GOOD | {"num_layers": 3}, b"one")]
    }
    assert len(seen) == 3
    assert digest_adapter(write(tmp_path / "b", GOOD, b"one")) in seen
