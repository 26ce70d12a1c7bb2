"""Engines start without transformers, and nobody else notices."""

from __future__ import annotations

import subprocess
import sys

ENGINE = """
import sys
from mlx_mesh.node.engine.light import import_mlx_lm
import_mlx_lm()
from mlx_mesh.node.engine import inspect, phases
assert "transformers" not in sys.modules, "something else imports it"
import transformers
assert transformers.AutoTokenizer.from_pretrained and transformers.__version__
"""
OTHER_NAMES = """
import mlx_mesh.node.engine.light as light
light._NAMES = {"transformers": ("AutoTokenizer",)}
light.import_mlx_lm()
import mlx_lm.tokenizer_utils, transformers
assert mlx_lm.tokenizer_utils.AutoTokenizer is transformers.AutoTokenizer
"""


def test_an_engine_imports_no_transformers_until_somebody_wants_the_real_one() -> None:
    run(ENGINE)


def test_a_version_of_mlx_lm_that_takes_more_gets_the_real_one() -> None:
    run(OTHER_NAMES)


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
