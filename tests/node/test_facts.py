"""What a host says of itself; the parsers on recorded output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from mlx_mesh.mesh.capacity import mac_usable_bytes
from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.mesh.types import HostFacts
from mlx_mesh.node import facts

GIB = 1024**3
MEMINFO = "MemTotal:       24684096 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"


@pytest.mark.parametrize(
    ("memory", "limit_mb", "usable"),
    [
        (24 * GIB, 0, 16 * GIB),
        (64 * GIB, 0, 48 * GIB),
        (64 * GIB, 57344, 56 * GIB),
        (64 * GIB, 10**6, 64 * GIB),
    ],
)
def test_a_mac_may_use_what_its_gpu_may_wire(memory: int, limit_mb: int, usable: int) -> None:
    assert mac_usable_bytes(memory, limit_mb) == usable


def test_linux_may_use_what_is_available() -> None:
    assert facts.parse_meminfo(MEMINFO) == (24684096 * 1024, 20000000 * 1024)
    assert facts.parse_meminfo("") == (0, 0)


def test_a_container_has_its_own_limit() -> None:
    assert facts.parse_cgroup_limit("max\n") == 0
    assert facts.parse_cgroup_limit("1073741824\n") == GIB


def test_the_chip_is_the_first_model_name() -> None:
    assert facts.parse_cpuinfo("processor: 0\nmodel name\t: AMD EPYC\nmodel name\t: other\n") == "AMD EPYC"
    assert facts.parse_cpuinfo("CPU implementer : 0x41\n") == ""


def test_loopback_is_among_the_addresses() -> None:
    assert "127.0.0.1" in facts.own_addresses()


def test_the_digest_changes_with_every_part_of_the_model(model: Path) -> None:
    seen = {facts.digest_model(model)}
    assert facts.digest_model(model) in seen
    (model / "config.json").write_text('{"model_type": "other"}')
    seen.add(facts.digest_model(model))
    (model / "model.safetensors").write_bytes(b"longer weights")
    seen.add(facts.digest_model(model))
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    seen.add(facts.digest_model(model))
    (model / "model-2.safetensors").write_bytes(b"w")
    seen.add(facts.digest_model(model))
    assert len(seen) == 5


def test_a_folder_that_is_only_half_there_names_what_is_missing(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    )
    with pytest.raises(PreflightError, match=r"1 of 2 weight files are missing \(model-2.safetensors\)"):
        facts.digest_model(model)


def test_a_folder_without_weights_is_told(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(PreflightError, match=r"no model\*\.safetensors"):
        facts.digest_model(model)


def test_a_model_is_a_folder_or_in_the_hub_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert facts.resolve_model(str(model)) == model
    with pytest.raises(PreflightError, match="does not exist"):
        facts.resolve_model(str(tmp_path / "none"))
    with pytest.raises(PreflightError, match="not a model folder"):
        facts.resolve_model(str(tmp_path))
    with pytest.raises(PreflightError, match="hf download nobody/nothing-of-this-name"):
        facts.resolve_model("nobody/nothing-of-this-name")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer.json": "{}"}, "tokenizer.json is not a tokenizer: it has no `model`"),
        ({"tokenizer.json": '{"model": '}, "tokenizer.json cannot be read"),
        ({"tokenizer.model": "x", "tokenizer_config.json": "[]"}, "tokenizer_config.json cannot be read"),
        ({"tokenizer.json": '{"model": {}}'}, ""),
        ({"tokenizer.model": "x"}, ""),
        ({"qwen.tiktoken": "x"}, ""),
        ({"tokenizer_config.json": "{}"}, ""),
    ],
)
def test_a_tokenizer_that_is_missing_or_broken_is_told(
    model: Path, files: dict[str, str], words: str
) -> None:
    (model / "tokenizer.json").unlink()
    for name, text in files.items():
        (model / name).write_text(text)
    found = facts.gather_facts(str(model))
    assert found.model_digest  # a follower can use it
    assert words in found.tokenizer_error and bool(words) == bool(found.tokenizer_error)


def test_a_name_that_is_too_long_for_a_path_is_told() -> None:
    assert "no model can be at" in facts.gather_facts("/" + "x" * 5000).model_error


def test_a_missing_model_is_a_fact_and_no_error() -> None:
    found = facts.gather_facts("/nowhere/model")
    assert found.model_digest == "" and "/nowhere/model" in found.model_error


def test_the_command_prints_the_facts_as_its_last_line_without_importing_mlx(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-X", "importtime", "-m", "mlx_mesh.node.facts", str(model)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=HostFacts)
    assert found.model_digest == facts.digest_model(model) and found.versions.mlx
    assert not any(line.endswith(" mlx.core") for line in done.stderr.splitlines())


def test_a_rank_whose_folder_has_another_model_than_the_leaders_says_so(tmp_path: Path) -> None:
    for name, size in (("leader", 8), ("follower", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    digest = facts.digest_model(tmp_path / "leader")
    facts.check_same_model(tmp_path / "leader", digest)
    with pytest.raises(PreflightError, match="another one than on the leader"):
        facts.check_same_model(tmp_path / "follower", digest)


def test_models_of_the_hub_are_compared_by_commit(tmp_path: Path) -> None:
    folders = [tmp_path / "models--org--m" / "snapshots" / commit for commit in ("1" * 40, "2" * 40)]
    for folder in (*folders, tmp_path / "plain"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"1234")
    digests = [facts.digest_with_revision(folder) for folder in folders]
    assert digests[0] != digests[1] and facts.digest_model(folders[0]) == facts.digest_model(folders[1])
    facts.check_same_model(folders[0], digests[0])
    with pytest.raises(PreflightError, match="commit 111111111111 of this model, the leader 222222222222"):
        facts.check_same_model(folders[0], digests[1])
    plain = facts.digest_with_revision(tmp_path / "plain")
    assert plain == facts.digest_model(tmp_path / "plain")
