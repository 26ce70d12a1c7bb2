"""Models on the hub: sizes before weights, only the files of own layers, and errors in words."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.node import hub as hub_module
from mlx_mesh.node.facts import digest_model, gather_facts, gather_here, resolve_model
from mlx_mesh.node.hub import fetch_all, fetch_for_layers, find_complete, locate, parse_hub_id
from mlx_mesh.node.hub_folder import files_of_layers, is_placeholder, read_record

WEIGHTS = [f"model-0000{part}-of-00004.safetensors" for part in (1, 2, 3, 4)]


@pytest.fixture
def published(hub: Any, sharded_model: Path) -> Any:
    hub.folders["org/tiny"] = sharded_model
    return hub


def fetch(folder: Path, start: int, end: int) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    fetch_for_layers(folder, 6, start, end, lambda done, total: told.append((done, total)))
    return told


def test_a_hub_id_may_carry_a_revision() -> None:
    assert parse_hub_id("org/name") == ("org/name", "")
    assert parse_hub_id("org/name@v1.2") == ("org/name", "v1.2")
    assert parse_hub_id("/a/folder") is None and parse_hub_id("just-a-name") is None


def test_sizes_and_digest_of_a_hub_model_come_without_its_weights(
    published: Any, sharded_model: Path
) -> None:
    folder = resolve_model("org/tiny")
    assert digest_model(folder) == digest_model(sharded_model)
    assert all(is_placeholder(folder / name) for name in WEIGHTS)
    for name in WEIGHTS:
        assert (folder / name).stat().st_size == (sharded_model / name).stat().st_size
    facts = gather_facts("org/tiny")
    assert facts.model_error == "" and facts.model_digest == digest_model(sharded_model)


def test_only_headers_are_read_of_files_that_are_larger_than_the_first_read(
    published: Any, sharded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_FIRST_READ_BYTES", 64)
    folder = locate("org/tiny")
    for name in WEIGHTS:
        assert published.sent(name) < 8192 < (sharded_model / name).stat().st_size
    assert read_record(folder) is not None


def test_code_of_a_repository_is_not_even_fetched(published: Any) -> None:
    folder = locate("org/tiny")
    assert published.sent("modeling_llama.py") == 0
    assert not list(folder.glob("*.py"))


def test_a_stage_fetches_the_files_of_its_layers_only(published: Any, sharded_model: Path) -> None:
    folder = locate("org/tiny")
    told = fetch(folder, 0, 2)
    assert [is_placeholder(folder / name) for name in WEIGHTS] == [False, True, True, False]
    for name in (WEIGHTS[0], WEIGHTS[3]):
        assert (folder / name).read_bytes() == (sharded_model / name).read_bytes()
    assert told[-1][0] == told[-1][1] == sum((folder / WEIGHTS[i]).stat().st_size for i in (0, 3))
    assert digest_model(folder) == digest_model(sharded_model)


def test_a_whole_model_fetches_all_files_and_nothing_twice(published: Any) -> None:
    folder = locate("org/tiny")
    fetch(folder, 0, 2)
    before = published.sent(WEIGHTS[0])
    fetch(folder, 0, 6)
    assert not any(is_placeholder(folder / name) for name in WEIGHTS)
    assert published.sent(WEIGHTS[0]) == before


def test_a_complete_cache_is_used_without_a_single_request(published: Any) -> None:
    folder = locate("org/tiny", "main")
    fetch(folder, 0, 6)
    published.requests.clear()
    again = locate("org/tiny")
    fetch(again, 0, 6)
    assert published.requests == []
    assert digest_model(again) == digest_model(folder)


def test_offline_means_no_request(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PreflightError, match=r"hf download org/tiny"):
        locate("org/tiny")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = locate("org/tiny")
    published.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PreflightError, match="forbids to fetch"):
        fetch(folder, 0, 6)
    assert published.requests == []


def test_a_local_folder_asks_nobody(published: Any, sharded_model: Path) -> None:
    assert resolve_model(str(sharded_model)) == sharded_model
    assert fetch(sharded_model, 0, 6) == [] and published.requests == []


def test_an_unknown_model_and_revision_are_told_apart(published: Any) -> None:
    with pytest.raises(PreflightError, match=r"the hub has no model org/none"):
        locate("org/none")
    with pytest.raises(PreflightError, match=r"org/tiny has no revision 'v9'"):
        locate("org/tiny", "v9")


def test_a_gated_model_says_how_to_get_in(published: Any) -> None:
    published.gated.add("org/secret")
    with pytest.raises(PreflightError, match=r"org/secret is gated.*hf auth login"):
        locate("org/secret")


def test_a_hub_that_cannot_be_reached_is_said(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PreflightError, match=r"the hub cannot be reached from .* for org/tiny"):
        locate("org/tiny")


def test_a_repository_without_safetensors_is_refused(hub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    hub.folders["org/gguf"] = folder
    with pytest.raises(PreflightError, match=r"has no model\*\.safetensors"):
        locate("org/gguf")


def test_a_full_disk_is_told_before_anything_is_fetched(
    published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = locate("org/tiny")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    published.requests.clear()
    with pytest.raises(PreflightError, match=r"files of org/tiny .*are missing\. Free some"):
        fetch(folder, 0, 6)
    assert published.requests == []


def test_a_file_that_the_hub_refuses_leaves_the_placeholder(published: Any) -> None:
    folder = locate("org/tiny")
    published.refused.add(WEIGHTS[1])
    with pytest.raises(PreflightError, match=r"org/tiny"):
        fetch(folder, 2, 4)
    assert is_placeholder(folder / WEIGHTS[1])


def test_the_inspect_child_sizes_a_hub_model(published: Any, sharded_model: Path) -> None:
    outputs = []
    for model in ("org/tiny@main", str(sharded_model)):
        done = subprocess.run(
            [sys.executable, "-I", "-m", "mlx_mesh.node.engine.inspect", model],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1]
    assert all(published.sent(name) < 300_000 for name in WEIGHTS)


# ---------------------------------------------------------------- which files

STACK = {
    "a": ["model.layers.0.mlp.weight", "model.layers.1.mlp.weight"],
    "b": ["model.layers.1.attn.weight", "model.layers.2.attn.weight"],
    "c": ["model.layers.3.attn.weight", "model.layers.4.attn.weight"],
    "d": ["model.embed_tokens.weight"],
}


def test_a_file_that_two_stages_share_goes_to_both() -> None:
    assert files_of_layers(STACK, 4, 0, 1) == ["a", "d"]
    assert files_of_layers(STACK, 4, 1, 2) == ["a", "b", "d"]
    assert files_of_layers(STACK, 4, 3, 4) == ["c", "d"]


def test_layers_of_a_vision_tower_are_not_taken_for_the_models_own() -> None:
    tower = {"v": ["vision_tower.layers.0.w", "vision_tower.layers.1.w"]}
    assert "v" in files_of_layers(STACK | tower, 4, 3, 4)
    twin = {"v": [f"vision_tower.layers.{i}.w" for i in range(4)]}
    assert files_of_layers(STACK | twin, 4, 3, 4) == ["a", "b", "c", "d", "v"]


def test_names_that_say_nothing_mean_all_files() -> None:
    names = {"a": ["blob.one"], "b": ["blob.two"], "c": []}
    assert files_of_layers(names, 4, 0, 1) == ["a", "b", "c"]


def test_a_stage_loads_from_its_own_files_what_it_loads_from_the_complete_folder(
    published: Any, sharded_model: Path
) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlx_mesh.mesh.types import Placement, Shard, Sharding
    from mlx_mesh.node.engine.shard import load_shard

    folder = locate("org/tiny")
    fetch(folder, 2, 4)
    assert is_placeholder(folder / WEIGHTS[0]) and is_placeholder(folder / WEIGHTS[2])
    limits = [(4, 6), (2, 4), (0, 2)]
    placement = Placement(
        sharding=Sharding.PIPELINE,
        model_digest="",
        num_layers=6,
        shards=tuple(
            Shard(rank=rank, host="h", start_layer=start, end_layer=end)
            for rank, (start, end) in enumerate(limits)
        ),
    )
    exchange: Any = type("Middle", (), {"rank": 1, "world_size": 3})()
    loaded = [
        load_shard(str(where), placement, 1, exchange, lambda done, total: None)
        for where in (folder, sharded_model)
    ]
    assert loaded[0].weights_bytes == loaded[1].weights_bytes > 0
    for index in (2, 3):
        ours, theirs = (dict(tree_flatten(shard.model.layers[index].parameters())) for shard in loaded)
        for name, array in theirs.items():
            assert mx.array_equal(ours[name], array), name
            assert float(mx.abs(array).max()) > 0


def test_all_of_a_model_is_fetched_once_and_found_again_without_a_request(
    published: Any, sharded_model: Path
) -> None:
    assert find_complete("org/tiny") is None
    folder = locate("org/tiny")
    told: list[tuple[int, int]] = []
    fetch_all(folder, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == sum((sharded_model / name).stat().st_size for name in WEIGHTS)
    num_requests = len(published.requests)
    fetch_all(folder, lambda done, total: pytest.fail("it fetched again"))
    assert find_complete("org/tiny") is not None
    assert len(published.requests) == num_requests
    assert gather_here("org/tiny").model_digest == digest_model(sharded_model)
