"""Python environments on hosts: find the one with mlx-mesh, or make it.

Nothing depends on a host's PATH: interpreters are looked for where Python's own installers, Homebrew, uv,
pyenv and systems put them.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.own_wheel import Wheel
from mlx_mesh.launcher.remote import (
    CommandTimeout,
    ProgramFailed,
    RemoteHost,
    new_marker,
    run,
    run_program,
    stream_program,
)

HOME_FOLDER = "~/.venvs/mlx-mesh"
LOOK_S = 60.0
INSTALL_TIMEOUT_S = 1800.0
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What each host gets: this machine's."""

    wheel: Wheel
    mlx: str
    mlx_lm: str
    mlx_mesh: str
    minor: str = MINOR  # of Python

    def is_met_by(self, seen: dict[str, Any]) -> bool:
        """By an environment as the `look` program tells of it. One that was made in another way than by us
        has no record of a wheel; there the version has to do."""
        versions = seen["versions"]
        return (
            (versions.get("mlx"), versions.get("mlx-lm"), versions.get("mlx-mesh"))
            == (self.mlx, self.mlx_lm, self.mlx_mesh)
            and _minor(seen) == self.minor
            and seen["wheel"] in ("", self.wheel.digest)
        )


def wanted_here(wheel: Wheel) -> Wanted:
    return Wanted(
        wheel=wheel,
        mlx=metadata.version("mlx"),
        mlx_lm=metadata.version("mlx-lm"),
        mlx_mesh=metadata.version("mlx-mesh"),
    )


def folder_of(python: str) -> str:
    """The environment of an interpreter's path; '' when it is none's."""
    folder, _, program = python.rpartition("/bin/")
    return folder if program in ("python", "python3", f"python{MINOR}") else ""


def find_environment(host: RemoteHost, given: str) -> str:
    """The interpreter with mlx-mesh on a host: the given one, else the usual place, else the same path as
    here. Raises HostFault."""
    if given:
        return given
    places = list(dict.fromkeys([f"{HOME_FOLDER}/bin/python", sys.executable]))
    there = _those_there(host, places)
    if there:
        return next(place for place in places if place in there)
    raise HostFault(
        host.name,
        "interpreter",
        f"there is no mlx-mesh at {' or '.join(places)}",
        "install it with `mlx-mesh init --install`, or name its interpreter with --python",
    )


def install(host: RemoteHost, folder: str, wanted: Wanted, say: Say) -> None:
    """See to it that an environment has what is wanted; one that has it is left alone. Raises HostFault."""
    python = f"{folder}/bin/python"
    if _those_there(host, [python]):
        try:
            seen = look(host, python)
        except HostFault:  # it is broken: made again
            seen = None
        if seen is not None:
            _refuse_foreign(host.name, python, seen)
            if wanted.is_met_by(seen):
                say(f"{host.name}: {folder} has the same versions already; left as it is")
                return
    base = _find_base(host, wanted.minor)
    say(f"{host.name}: Python {wanted.minor} at {base}")
    request = {
        "do": "install",
        "folder": folder,
        "wheel_name": wanted.wheel.name,
        "wheel": base64.b64encode(wanted.wheel.data).decode(),
        "pins": [f"mlx=={wanted.mlx}", f"mlx-lm=={wanted.mlx_lm}"],
    }
    _install(host, base, request, say)
    seen = look(host, python)
    if not wanted.is_met_by(seen):
        raise HostFault(
            host.name,
            "version",
            f"after the install {python} has {seen['versions']}",
            f"remove {folder} there and try again",
        )


def _install(host: RemoteHost, base: str, request: dict[str, Any], say: Say) -> None:
    deadline = time.monotonic() + INSTALL_TIMEOUT_S
    try:
        for answer in stream_program(host, base, "environment", request):
            if time.monotonic() > deadline:
                raise HostFault(
                    host.name,
                    "import",
                    f"the install took more than {INSTALL_TIMEOUT_S:g} s",
                    "see how it reaches the package index, and run the same command again: it goes on",
                )
            if answer is not None and "failed" in answer:
                raise _failed(host.name, base, answer)
            if answer is not None:
                say(f"{host.name}: {answer['step']}: {answer['text']}")
    except ProgramFailed as error:
        raise HostFault(
            host.name,
            "import",
            f"the install was cut off ({error.completed.exit}; {error.completed.last_words()})",
            "run the same command again: it goes on where it was",
        ) from error


def _failed(host: str, base: str, answer: dict[str, Any]) -> HostFault:
    said = str(answer["failed"])
    if answer["step"] == "environment":
        fix = "remove that folder, or name another one with --python"
        if "returned non-zero" in said:
            fix = f"see there what `{base} -m venv DIR` says"
        if "ensurepip is not available" in said:
            fix = f"run there: apt-get install python{MINOR}-venv"
        return HostFault(host, "interpreter", f"{base} makes no environment ({said})", fix)
    fix = (
        "see whether that host reaches a package index (its pip.conf counts), and run the same command again"
    )
    return HostFault(host, "import", f"pip: {said}", fix)


def look(host: RemoteHost, python: str) -> dict[str, Any]:
    """What an interpreter is. Raises HostFault."""
    try:
        return run_program(host, python, "environment", {"do": "look"}, LOOK_S)
    except (ProgramFailed, CommandTimeout) as error:
        raise HostFault(
            host.name, "interpreter", f"{python} does not run ({error})", "name another one with --python"
        ) from error


def _refuse_foreign(host: str, python: str, seen: dict[str, Any]) -> None:
    if seen["system"] == "Darwin" and (seen["is_translated"] or seen["machine"] != "arm64"):
        raise HostFault(
            host,
            "interpreter",
            f"{python} is an Intel program ({seen['machine']}), for which MLX has no GPU",
            f"install a native (arm64) Python {MINOR} there, from python.org or Homebrew in /opt/homebrew",
        )


def _find_base(host: RemoteHost, minor: str) -> str:
    """A Python of that minor version that may make environments. Raises HostFault."""
    found = []
    refused: HostFault | None = None
    for python in _those_there(host, _base_places(minor)):
        try:
            seen = look(host, python)
            _refuse_foreign(host.name, python, seen)
        except HostFault as fault:
            refused = refused or fault
            continue
        if _minor(seen) == minor:
            return python
        found.append(f"{python} ({'.'.join(map(str, seen['python']))})")
    if refused is not None:
        raise refused
    raise HostFault(
        host.name,
        "interpreter",
        f"there is no Python {minor}, which this machine has"
        + (f", only {', '.join(found)}" if found else ""),
        f"install it there: from python.org, `brew install python@{minor}`, or the system's packages",
    )


def _base_places(minor: str) -> list[str]:
    name = f"python{minor}"
    here = Path(getattr(sys, "_base_executable", "") or sys.executable)
    return [
        f"/opt/homebrew/bin/{name}",
        f"/Library/Frameworks/Python.framework/Versions/{minor}/bin/{name}",
        f"/usr/local/bin/{name}",
        f"~/.local/bin/{name}",
        f"~/.local/share/uv/python/cpython-{minor}*/bin/{name}",
        f"~/.pyenv/versions/{minor}*/bin/{name}",
        f"/usr/bin/{name}",
        str(here),
    ]


def _those_there(host: RemoteHost, places: list[str]) -> list[str]:
    """Of paths with `~` and `*`, those that are programs on a host, in order. Asked of /bin/sh, which every
    system has at that place; the login shell only starts it. Raises HostFault."""
    marker = new_marker()
    patterns = " ".join(_for_sh(place) for place in places)
    script = (
        f'echo "{marker} $HOME"\n'
        f'for p in {patterns}; do [ -x "$p" ] && [ ! -d "$p" ] && echo "{marker} $p"; done; exit 0\n'
    )
    try:
        done = run(host, ["/bin/sh", "-s"], script.encode(), LOOK_S)
    except CommandTimeout as error:
        raise HostFault(
            host.name, "interpreter", str(error), "see whether a shell profile waits there"
        ) from error
    told = [line.removeprefix(f"{marker} ") for line in done.stdout if line.startswith(f"{marker} ")]
    home, found = (told[0], told[1:]) if told else ("", [])
    return [
        f"~{path.removeprefix(home)}" if home and path.startswith(f"{home}/") else path
        for path in dict.fromkeys(found)
    ]


def _for_sh(place: str) -> str:
    """A pattern for sh: everything but `~/` in front and `*` is literal."""
    home, rest = ('"$HOME"/', place[2:]) if place.startswith("~/") else ("", place)
    parts = ["'" + part.replace("'", "'\\''") + "'" if part else "" for part in rest.split("*")]
    return home + "*".join(parts)


def _minor(seen: dict[str, Any]) -> str:
    return ".".join(map(str, seen["python"][:2]))
