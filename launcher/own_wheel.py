"""This package as a wheel, made of its own files as they are installed here: another host gets exactly what
runs on this one, from an index or not, from a wheel or a clone.

The same files always give the same bytes, so that a host's record of what it installed (PEP 610) tells
whether it has them.
"""

from __future__ import annotations

import base64
import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import mlx_mesh
from mlx_mesh.mesh.errors import MeshError

_EPOCH = (1980, 1, 1, 0, 0, 0)
_LEFT_OUT = (".pyc", ".pyo", ".so", ".DS_Store")


@dataclass(frozen=True, slots=True)
class Wheel:
    name: str  # of the file
    data: bytes

    @property
    def digest(self) -> str:
        return sha256(self.data).hexdigest()


def pack_wheel() -> Wheel:
    """Raises MeshError when this package is not installed in a way that can be told."""
    try:
        distribution = metadata.distribution("mlx-mesh")
    except metadata.PackageNotFoundError as error:
        raise MeshError(
            "This mlx-mesh is not installed as a package, so it cannot be carried to other hosts. Install it "
            "with pip first."
        ) from error
    tag = f"mlx_mesh-{distribution.version}"
    about = f"{tag}.dist-info"
    files = dict(_package_files())
    # A clone may tell of itself in setuptools' own form, which is the same text under another name.
    told = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    files[f"{about}/METADATA"] = told.encode()
    files[f"{about}/entry_points.txt"] = (distribution.read_text("entry_points.txt") or "").encode()
    files[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: mlx-mesh\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if not told:
        raise MeshError("This mlx-mesh has no METADATA, so it cannot be carried to other hosts.")
    rows = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in sorted(files.items())]
    record = f"{about}/RECORD"
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, data)
    return Wheel(f"{tag}-py3-none-any.whl", packed.getvalue())


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Name in the wheel -> bytes. In a clone the folders are links, which are followed."""
    root = Path(mlx_mesh.__file__).parent
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in names:
            if not name.endswith(_LEFT_OUT):
                path = Path(folder) / name
                yield f"mlx_mesh/{path.relative_to(root).as_posix()}", path.read_bytes()


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(sha256(data).digest()).decode().rstrip("=")
