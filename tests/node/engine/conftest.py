"""The engine tests' helpers: `simulator` runs N ranks in one process, `tiny` makes random models."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    unique = f"engine_tests_{name}"
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, Path(__file__).parent / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[unique] = module
        spec.loader.exec_module(module)
    return sys.modules[unique]


@pytest.fixture(scope="session")
def simulator() -> ModuleType:
    """N ranks in one process: `simulator.Simulator(n).run(body)`."""
    return _load("simulator")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Tiny random models, placements over them, and a forward to compare."""
    return _load("tiny")


@pytest.fixture(scope="session")
def tiny_vlm() -> ModuleType:
    """Tiny random vision-language models, a picture for each, and what mlx-vlm makes of it."""
    return _load("tiny_vlm")


@pytest.fixture(scope="session")
def vlm_folders() -> ModuleType:
    """Such models as complete folders, with processors and templates like those of their families."""
    return _load("vlm_folders")
