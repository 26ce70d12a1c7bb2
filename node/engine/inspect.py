"""`python -m mlx_mesh.node.engine.inspect MODEL`: print the model's footprint as JSON. Reads no weight.

MODEL is a local folder or a hub id in the local cache. Exit status 0 and one JSON object on stdout, or 2 and
one line on stderr.
"""

from __future__ import annotations

import sys

import msgspec

from mlx_mesh.mesh.errors import ExitCode, MeshError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.facts import digest_model, resolve_model


def inspect_model(model: str) -> ModelFootprint:
    """The footprint of a local folder or cached hub id. Raises MeshError when it is no usable model."""
    folder = resolve_model(model)
    lazy = open_lazy(folder)
    return measure(lazy, digest_model(folder))


def main(argv: list[str]) -> int:
    models = [arg for arg in argv if arg != "--json"]
    if len(models) != 1 or models[0].startswith("-"):
        print("usage: python -m mlx_mesh.node.engine.inspect MODEL [--json]", file=sys.stderr)
        return ExitCode.USAGE
    try:
        footprint = inspect_model(models[0])
    except MeshError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code if error.exit_code in (ExitCode.USAGE, ExitCode.PLACEMENT) else ExitCode.USAGE
    sys.stdout.write(msgspec.json.encode(footprint).decode() + "\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
