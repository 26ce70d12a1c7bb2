"""`python -m mlx_mesh.node.engine.inspect MODEL`: print the model's footprint as JSON. Reads no weight.

MODEL is a local folder or a hub id. Exit status 0 and one JSON object on stdout, or 2 and one line on stderr.
Answers are kept in mlx-mesh's cache folder by the model's digest, mlx-lm's version and this program's text: a
model that was seen before is answered without importing MLX.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from mlx_mesh.mesh import footprint as footprint_module
from mlx_mesh.mesh.errors import ExitCode, MeshError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.node.facts import digest_model, resolve_model
from mlx_mesh.node.hub import cache_root

_NUM_KEPT = 200


def inspect_model(model: str) -> ModelFootprint:
    """The footprint of a local folder or hub id. Raises MeshError when it is no usable model."""
    folder = resolve_model(model)
    return measure_folder(folder, digest_model(folder))


def measure_folder(folder: Path, digest: str) -> ModelFootprint:
    """Build the model lazily and measure it."""
    from mlx_mesh.node.engine.activity import activity, chosen_experts, quantization_of
    from mlx_mesh.node.engine.footprints import measure_certified
    from mlx_mesh.node.engine.loader import open_lazy

    lazy = open_lazy(folder)
    chosen = chosen_experts(lazy.config)
    active = [activity(layer, chosen) for layer in lazy.layers]  # measuring may hook the layers
    measured = measure_certified(lazy, digest)
    layers = tuple(
        msgspec.structs.replace(layer, active_bytes=num_bytes, active_parameters=num_parameters)
        for layer, (num_bytes, num_parameters) in zip(measured.layers, active, strict=True)
    )
    return msgspec.structs.replace(measured, layers=layers, quantization=quantization_of(lazy.config))


def kept_footprint(model: str) -> ModelFootprint:
    """As `inspect_model`, from the cache when the same model was measured before."""
    folder = resolve_model(model)
    digest = digest_model(folder)
    kept = cache_root() / "footprints" / f"{_key(digest)}.json"
    try:
        return msgspec.json.decode(kept.read_bytes(), type=ModelFootprint)
    except (OSError, msgspec.MsgspecError):
        footprint = measure_folder(folder, digest)
        with contextlib.suppress(OSError):  # a home that cannot be written to only costs time
            _keep(kept, msgspec.json.encode(footprint))
        return footprint


def _key(digest: str) -> str:
    text = hashlib.sha256(digest.encode())
    text.update(metadata.version("mlx-lm").encode())
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(footprint_module.__file__)]
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
    words = [arg for arg in argv if arg not in ("--json", "--offline")]
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: python -m mlx_mesh.node.engine.inspect MODEL [--json] [--offline]", file=sys.stderr)
        return ExitCode.USAGE
    if "--offline" in argv:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        footprint = kept_footprint(words[0])
    except MeshError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code if error.exit_code in (ExitCode.USAGE, ExitCode.PLACEMENT) else ExitCode.USAGE
    sys.stdout.write(msgspec.json.encode(footprint).decode() + "\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
