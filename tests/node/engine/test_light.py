"""Engines start without transformers and huggingface_hub, and nobody else notices."""

from __future__ import annotations

import subprocess
import sys

ENGINE = """
import sys
from mlx_mesh.node.engine.light import import_mlx_lm
import_mlx_lm()
from mlx_mesh.node.engine import inspect, phases
for name in ("transformers", "huggingface_hub"):
    assert name not in sys.modules, f"something else imports {name}"
import huggingface_hub, transformers
assert huggingface_hub.snapshot_download.__module__.startswith("huggingface_hub.")
assert transformers.AutoTokenizer.from_pretrained and transformers.__version__
"""
AFTER_A_HUB = """
import sys, huggingface_hub
from mlx_mesh.node.engine.light import import_mlx_lm
import_mlx_lm()
assert "transformers" not in sys.modules
assert sys.modules["mlx_lm.utils"].snapshot_download is huggingface_hub.snapshot_download
"""
OTHER_NAMES = """
import mlx_mesh.node.engine.light as light
light._NAMES = {"transformers": ("AutoTokenizer",)}
light.import_mlx_lm()
import mlx_lm.tokenizer_utils, transformers
assert mlx_lm.tokenizer_utils.AutoTokenizer is transformers.AutoTokenizer
"""


def test_an_engine_imports_neither_until_somebody_wants_the_real_one() -> None:
    run(ENGINE)


def test_what_is_already_there_stays() -> None:
    run(AFTER_A_HUB)


def test_a_version_of_mlx_lm_that_takes_more_gets_the_real_one() -> None:
    run(OTHER_NAMES)


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
