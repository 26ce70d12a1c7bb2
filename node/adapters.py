"""The folder of an adapter (LoRA, DoRA or fully trained layers) as mlx-lm's training writes it. Nothing here
imports MLX."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from typing import Any

import msgspec

from mlx_mesh.mesh.errors import SettingsError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapters.safetensors"
KINDS = ("lora", "dora", "full")
_NUMBERS = ("rank", "scale", "dropout")


def resolve_adapter(adapter: str) -> Path:
    """The folder, `~` expanded, once it is plain that it holds an adapter. Raises SettingsError."""
    folder = Path(adapter).expanduser()
    try:
        is_there = folder.is_dir()
    except (OSError, ValueError) as problem:
        raise SettingsError(f"no adapter can be at {adapter[:80]!r} ({problem.args[-1]}).") from problem
    if not is_there:
        raise SettingsError(f"the adapter folder {folder} does not exist on {socket.gethostname()}.")
    _check_files(folder)
    _check_config(folder / CONFIG_NAME)
    return folder.resolve()


def digest_adapter(folder: Path) -> str:
    """Hex SHA-256 over config and weights: two trainings differ in nothing but the bytes of their tensors.
    Raises SettingsError."""
    digest = hashlib.sha256()
    try:
        digest.update(hashlib.sha256((folder / CONFIG_NAME).read_bytes()).digest())
        with (folder / WEIGHTS_NAME).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise SettingsError(f"the adapter in {folder} cannot be read: {error}") from error
    return digest.hexdigest()


def _check_files(folder: Path) -> None:
    if (folder / "adapter_model.safetensors").is_file() and not (folder / WEIGHTS_NAME).is_file():
        raise SettingsError(
            f"{folder} holds an adapter in the form of Hugging Face's PEFT (adapter_model.safetensors). Only "
            f"that of mlx-lm is read, {CONFIG_NAME} with {WEIGHTS_NAME}. Convert it, or fuse it into the "
            "model."
        )
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise SettingsError(f"{folder} has no {name}, so it is not an adapter folder of mlx-lm.")


def _check_config(path: Path) -> None:
    try:
        config: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{path} is no JSON object. Copy the adapter's own file again.")
    kind = config.get("fine_tune_type", "lora")
    if kind not in KINDS:
        raise SettingsError(
            f"{path} says `fine_tune_type: {str(kind)[:40]}`, which mlx-lm does not know; it knows "
            f"{', '.join(KINDS)}."
        )
    if kind == "full":
        return
    if not _is_number(config.get("num_layers")):
        raise SettingsError(f"{path} has no `num_layers`, so it is not of mlx-lm's training.")
    parameters = config.get("lora_parameters")
    missing = [name for name in _NUMBERS if not isinstance(parameters, dict) or name not in parameters]
    if missing:
        raise SettingsError(
            f"{path} has no {', '.join(f'`lora_parameters.{name}`' for name in missing)}, so it is not of "
            "mlx-lm's training."
        )
    assert isinstance(parameters, dict)
    for name in _NUMBERS:
        if not _is_number(parameters[name]):
            raise SettingsError(
                f"{path} says `lora_parameters.{name}: {str(parameters[name])[:40]}`, which is no number."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
