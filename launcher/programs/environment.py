"""A Python environment on a host: what it is ("look"), or make it and put mlx-mesh in ("install").

Each step of an install is an answer as it is done. What is there already is used, so that an install that was
cut off goes on. Readable by Python 3.8.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

NAMES = ("mlx", "mlx-lm", "mlx-mesh")
ASK_S = 20


def said(words: list[str]) -> str:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=ASK_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""


def look() -> dict[str, Any]:
    """This interpreter, and the packages in its environment ('' = not there)."""
    system = said(["uname", "-s"]) or platform.system()
    versions, digest = {}, ""
    for name in NAMES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    if versions["mlx-mesh"]:
        origin = metadata.distribution("mlx-mesh").read_text("direct_url.json") or "{}"
        digest = json.loads(origin).get("archive_info", {}).get("hash", "").replace("sha256=", "")
    return {
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "system": system,
        "machine": (said(["uname", "-m"]) if system == "Darwin" else "") or platform.machine(),
        "is_translated": system == "Darwin" and said(["sysctl", "-n", "sysctl.proc_translated"]) == "1",
        "versions": versions,
        "wheel": digest,
    }


class Failed(Exception):
    """A step did not work: (step, what was said)."""


def run(step: str, words: list[str], say: Any) -> None:
    """A command; pip's lines about what it fetches are passed on."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))
        },
    )
    lines = []
    assert process.stdout is not None
    for raw in process.stdout:
        line = raw.decode("utf-8", "replace").strip()
        if line:
            lines.append(line)
        if line.startswith(("Downloading", "Building", "Installing")):
            say(step, line[:200])
    if process.wait() != 0:
        raise Failed(step, " | ".join(lines[-4:]) or f"it ended with status {process.returncode}")


def install(asked: dict[str, Any], say: Any) -> None:
    folder = Path(asked["folder"]).expanduser()
    python = folder / "bin" / "python"
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
        raise Failed("environment", f"{folder} is there and is no Python environment")
    if not python.exists() or said([str(python), "-I", "-c", "import pip; print(1)"]) != "1":
        run("environment", [sys.executable, "-I", "-m", "venv", "--clear", str(folder)], say)
        say("environment", f"made {folder} with {sys.executable}")
    else:
        say("environment", f"{folder} is there")
    is_mac = (said(["uname", "-s"]) or platform.system()) == "Darwin"
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    extra = "" if is_mac else ("[cuda13]" if has_gpu else "[cpu]")
    holder = tempfile.mkdtemp(prefix="mlx-mesh-")
    try:
        wheel = Path(holder) / asked["wheel_name"]
        wheel.write_bytes(base64.b64decode(asked["wheel"]))
        pip = [str(python), "-I", "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
        pip.append("--disable-pip-version-check")
        run("packages", [*pip, f"{wheel}{extra}", *asked["pins"]], say)
        # pip leaves a package of the same version as it is, whatever is in it.
        run("packages", [*pip, "--force-reinstall", "--no-deps", "--quiet", str(wheel)], say)
        say("packages", "installed")
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def main(marker: str, request: str) -> None:
    asked = json.loads(request)
    os.chdir("/")

    def say(step: str, text: str) -> None:
        answer({"step": step, "text": text})

    def answer(told: dict[str, Any]) -> None:
        sys.stdout.write(f"\n{marker} {json.dumps(told)}\n")
        sys.stdout.flush()

    if asked["do"] == "look":
        answer(look())
        return
    try:
        install(asked, say)
    except Failed as failure:
        answer({"step": failure.args[0], "failed": failure.args[1]})
    except OSError as error:
        answer({"step": "environment", "failed": str(error)})
