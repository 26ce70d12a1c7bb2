"""`python -m mlx_mesh.node.engine.inspect MODEL`: print the model's footprint as JSON. Reads no weight.

MODEL is a local folder or a hub id; `--adapter-path` names an adapter's folder. Exit status 0 and one JSON
object on stdout, or one line on stderr and 3 when model or adapter are not there, 2 or 4 when they cannot be
used. Answers are kept in mlx-mesh's cache folder by the digests of
model and adapter, mlx-lm's version and this program's text: what was seen before needs no MLX.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from mlx_mesh.mesh import footprint as footprint_module
from mlx_mesh.mesh.errors import ExitCode, MeshError, PreflightError, SettingsError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.types import VisionMode
from mlx_mesh.node import vision as vision_module
from mlx_mesh.node.adapters import digest_adapter, resolve_adapter
from mlx_mesh.node.facts import digest_model, resolve_model
from mlx_mesh.node.hub import cache_root
from mlx_mesh.node.vision import choose_vision, no_media

_NUM_KEPT = 200


def inspect_model(model: str, adapter: str = "") -> ModelFootprint:
    """The footprint of a local folder or hub id with the adapter of a folder. Raises MeshError when they are
    no usable model and adapter."""
    folder = resolve_model(model)
    return measure_folder(folder, digest_model(folder), resolve_adapter(adapter) if adapter else "")


def measure_folder(
    folder: Path, digest: str, adapter: Path | str = "", vision: VisionMode = VisionMode.AUTO
) -> ModelFootprint:
    """Build the model lazily and measure it: with its towers when it has any, and `vision` allows."""
    from mlx_mesh.node.engine.activity import activity, chosen_experts, quantization_of
    from mlx_mesh.node.engine.footprints import measure_certified
    from mlx_mesh.node.engine.loader import open_lazy

    with_vision, refusal = choose_vision(folder, vision, has_adapter=bool(adapter))
    if with_vision and (problem := _processor_problem(folder)):
        if vision is VisionMode.ON:
            raise SettingsError(f"{folder} cannot take pictures: {problem}.")
        with_vision, refusal = False, problem
    try:
        lazy = open_lazy(folder, adapter, with_vision=with_vision)
    except SettingsError as error:
        if not refusal:
            raise
        raise SettingsError(f"{error} With its tower it is not served: {refusal}.") from error
    chosen = chosen_experts(lazy.config)
    active = [activity(layer, chosen) for layer in lazy.layers]  # measuring may hook the layers
    measured = measure_certified(lazy, digest)
    layers = tuple(
        msgspec.structs.replace(layer, active_bytes=num_bytes, active_parameters=num_parameters)
        for layer, (num_bytes, num_parameters) in zip(measured.layers, active, strict=True)
    )
    return msgspec.structs.replace(
        measured,
        layers=layers,
        quantization=quantization_of(lazy.config),
        media_refusals=measured.media_refusals if with_vision else no_media(refusal),
    )


def _processor_problem(folder: Path) -> str:
    from mlx_mesh.node.engine.vision_model import load_processor

    try:
        load_processor(folder)
    except SettingsError as error:
        return str(error)
    return ""


def kept_footprint(model: str, adapter: str = "", vision: VisionMode = VisionMode.AUTO) -> ModelFootprint:
    """As `inspect_model`, from the cache when the same model was measured before."""
    folder = resolve_model(model)
    digest = digest_model(folder)
    try:
        added = resolve_adapter(adapter) if adapter else None
    except SettingsError as error:  # the model is not to blame, and `up` finds the same on its hosts
        raise PreflightError(str(error)) from error
    question = f"{digest}{digest_adapter(added) if added else ''}{vision.value}"
    kept = cache_root() / "footprints" / f"{_key(question)}.json"
    try:
        return msgspec.json.decode(kept.read_bytes(), type=ModelFootprint)
    except (OSError, msgspec.MsgspecError):
        footprint = measure_folder(folder, digest, added or "", vision)
        # What is lacking for the towers may be there the next time.
        if footprint.media or not footprint.media_refusals or vision is VisionMode.OFF:
            with contextlib.suppress(OSError):  # a home that cannot be written to only costs time
                _keep(kept, msgspec.json.encode(footprint))
        return footprint


def _key(digest: str) -> str:
    text = hashlib.sha256(digest.encode())
    for package in ("mlx-lm", "mlx-vlm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            text.update(metadata.version(package).encode())
    sources = [
        *sorted(Path(__file__).parent.glob("*.py")),
        Path(footprint_module.__file__),
        Path(vision_module.__file__),
    ]
    for source in sources:
        text.update(source.read_bytes())
    return text.hexdigest()[:40]


def _keep(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)
    kept = sorted(path.parent.glob("*.json"), key=lambda entry: entry.stat().st_mtime)
    for old in kept[:-_NUM_KEPT]:
        old.unlink(missing_ok=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlx_mesh.node.engine.inspect")
    parser.add_argument("model")
    parser.add_argument("--adapter-path", default="")
    parser.add_argument(
        "--vision", choices=[mode.value for mode in VisionMode], default=VisionMode.AUTO.value
    )
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        vision = VisionMode(arguments.vision)
        footprint = kept_footprint(arguments.model, arguments.adapter_path, vision)
    except MeshError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        known = (ExitCode.USAGE, ExitCode.PREFLIGHT, ExitCode.PLACEMENT)
        return error.exit_code if error.exit_code in known else ExitCode.USAGE
    sys.stdout.write(msgspec.json.encode(footprint).decode() + "\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
