"""What a host has: its Python, the packages, the model, and HostFacts when mlx-mesh can tell them.

Readable by Python 3.7, so that an old interpreter can say that it is old.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NEEDED = ("mlx_mesh", "mlx", "mlx_lm", "msgspec", "zmq", "fastapi", "uvicorn", "transformers")
IMPORT_TIMEOUT_S = 60


def pick_model(candidates: list[str], fallback: str) -> str:
    """The first candidate that is a folder here, else the fallback (a hub id, or a path that is missing)."""
    for candidate in candidates:
        path = Path(candidate).expanduser()
        if path.is_dir():
            return str(path)
    return str(Path(fallback).expanduser()) if fallback.startswith("~") else fallback


def find_model(asked: Any) -> str:
    """The same by mlx-mesh's own rules, which know complete folders from others, and delivered ones."""
    try:
        look = importlib.import_module("mlx_mesh.node.delivery.look")
        found = look.pick_folder(asked["model"], asked["models"], asked.get("models_folder", ""))
    except Exception:  # an older one, or a folder that cannot be judged: the facts say what is wrong
        found = ""
    return str(found) or pick_model(asked["models"], asked["model"])


def missing_modules() -> list[str]:
    found = []
    for name in NEEDED:
        try:
            there = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            there = False
        if not there:
            found.append(name)
    return found


def mlx_fault() -> str:
    """Why `mlx.core` cannot be imported here, '' when it can. In a process of its own: it may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", "import mlx.core"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=IMPORT_TIMEOUT_S,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return f"importing mlx.core took more than {IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"importing mlx.core ended with status {done.returncode}"


def facts_of(model: str, adapter: str, embedding: str, asks_hub: bool) -> tuple[Any, str]:
    """HostFacts as plain data, or why there are none."""
    try:
        msgspec = importlib.import_module("msgspec")
        facts = importlib.import_module("mlx_mesh.node.facts")
        gather = facts.gather_facts if asks_hub else getattr(facts, "gather_here", facts.gather_facts)
        found = gather(model, *([adapter, embedding] if adapter or embedding else []))
        return json.loads(msgspec.json.encode(found)), ""
    except Exception as error:  # whatever is wrong there is to be told here
        return None, f"{type(error).__name__}: {error}"


def main(marker: str, request: str) -> None:
    asked = json.loads(request)
    os.chdir("/")
    if asked.get("offline"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    answer: dict[str, Any] = {
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "ssh_connection": os.environ.get("SSH_CONNECTION", ""),
        "missing": [],
        "model": "",
        "adapter": "",
        "embedding": "",
        "mlx_fault": "",
        "facts": None,
        "facts_error": "",
    }
    if sys.version_info[:2] >= tuple(asked["min_python"]):
        answer["missing"] = missing_modules()
        if not answer["missing"]:
            answer["model"] = find_model(asked)
            answer["mlx_fault"] = mlx_fault()
            answer["adapter"] = pick_model(asked.get("adapters", []), asked.get("adapter", ""))
            answer["embedding"] = pick_model(asked.get("embeddings", []), asked.get("embedding", ""))
            answer["facts"], answer["facts_error"] = facts_of(
                answer["model"], answer["adapter"], answer["embedding"], asked.get("asks_hub", True)
            )
    sys.stdout.write(f"\n{marker} {json.dumps(answer)}\n")
    sys.stdout.flush()
