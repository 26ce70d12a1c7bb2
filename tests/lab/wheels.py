"""A package index in a folder, for hosts that reach none: every package that mlx-mesh needs, by its real name
and version, empty but for one that leads to this environment's own copies."""

from __future__ import annotations

import re
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path


def fill(folder: Path) -> None:
    folder.mkdir()
    for requirement in metadata.requires("mlx-mesh") or []:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is not None and "extra ==" not in requirement:
            site = sysconfig.get_path("purelib") if name[0] == "mlx" else ""
            _make(folder, name[0], metadata.version(name[0]), site)


def _make(folder: Path, name: str, version: str, site: str) -> None:
    tag = f"{name.replace('-', '_')}-{version}"
    about = f"{tag}.dist-info"
    files = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if site:
        files["lab_packages.pth"] = f"{site}\n"
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(folder / f"{tag}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def use(home: Path, folder: Path) -> None:
    """pip finds it, and nothing else, for the user with that home."""
    settings = home / ".config" / "pip"
    settings.mkdir(parents=True)
    (settings / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {folder}\n")
