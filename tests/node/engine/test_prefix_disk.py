"""Kept prefixes in files: what comes back is what was kept, and what is wrong with a file makes it a miss."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.messages import GenerateRequest, Save
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.node.engine import prefix_disk
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.engine.prefix_disk import (
    DiskWriter,
    Job,
    PrefixFolder,
    UnusableFile,
    identity_of,
    key_of,
    pack,
    unpack,
)
from mlx_mesh.node.engine.prefix_files import PrefixFiles
from mlx_mesh.node.engine.prefix_planner import PrefixPlanner, Stored
from mlx_mesh.node.engine.prefix_saving import Saving
from mlx_mesh.node.engine.quantised_kv import QuantisedRow

TOKENS = tuple((7 * i) % 90 + 3 for i in range(40))
LIMIT = 1 << 30

Make = Callable[[], list[Any]]


def filled(model: Any, make: Make, num_tokens: int) -> tuple[list[Any], Any]:
    """A cache of the first tokens, and the model's scores for the next one."""
    cache = make()
    model(mx.array([TOKENS[:num_tokens]]), cache=cache)
    mx.eval([part.state for part in cache])
    return cache, model


def scores(model: Any, cache: list[Any], at: int) -> Any:
    return model(mx.array([TOKENS[at : at + 3]]), cache=cache)


def quantised(model: Any) -> list[Any]:
    return [QuantisedRow(group_size=32, bits=4) for _ in make_prompt_cache(model)]


@pytest.fixture
def folder(tmp_path: Path) -> PrefixFolder:
    return PrefixFolder(tmp_path / "prefixes", "model", 0, LIMIT)


def save(folder: PrefixFolder, cache: list[Any], num_kept: int, tokens: tuple[int, ...]) -> None:
    writer = DiskWriter(folder)
    saving = Saving(writer)
    saving.begin(cache, num_kept, tokens)
    saving.close()


@pytest.mark.parametrize(
    "kind", ["llama", "bfloat16", "quantised", "lfm2", "gemma3_text", "vision", "windows"]
)
def test_a_model_goes_on_from_a_file_as_from_the_cache(
    tiny: ModuleType, tiny_vlm: ModuleType, folder: PrefixFolder, tmp_path: Path, kind: str
) -> None:
    config = tiny.CONFIGS.get(kind) or tiny.llama(head_dim=32, num_hidden_layers=3)
    if kind == "gemma3_text":
        config = config | {"sliding_window": 16, "num_hidden_layers": 3, "sliding_window_pattern": 3}
    model = tiny.build(config).model
    if kind in ("vision", "windows"):  # the second one's windows are full
        model = LanguagePart(tiny_vlm.build("qwen2_vl" if kind == "vision" else "gemma3").language_model)
    if kind == "bfloat16":
        model.update({})
        model.set_dtype(mx.bfloat16)
    make = (lambda: quantised(model)) if kind == "quantised" else (lambda: make_prompt_cache(model))
    num_tokens = 30 if kind in ("lfm2", "gemma3_text", "windows") else 24  # the others are cut back to it
    cache, _ = filled(model, make, 30)
    save(folder, cache, 30, TOKENS[:num_tokens])
    expected = scores(model, filled(model, make, num_tokens)[0], num_tokens)

    (path,) = (tmp_path / "prefixes").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    (loaded,) = folder.load(make, LIMIT)
    assert (loaded.key, loaded.tokens) == (key_of(TOKENS[:num_tokens]), TOKENS[:num_tokens])
    assert float(mx.abs(scores(model, loaded.cache, num_tokens) - expected).max()) <= 1e-5


def test_caches_that_a_file_cannot_bring_back_are_refused() -> None:
    from mlx_vlm.models.cache import ChunkedKVCache, RotatingKVCache

    keys = mx.zeros((1, 1, 12, 4))
    chunked, window = ChunkedKVCache(8), RotatingKVCache(8)
    for cache in (chunked, window):
        cache.update_and_fetch(keys, keys)
    packed = pack([window])
    arrays = {str(number): array for number, array in enumerate(packed.arrays)}
    assert unpack(packed.forms, arrays, [RotatingKVCache(8)], 12)[0].offset == 12
    with pytest.raises(UnusableFile, match="how long"):  # as files were before
        unpack([packed.forms[0][:2]], arrays, [RotatingKVCache(8)], 12)
    pack([chunked])
    chunked.maybe_trim_front()
    with pytest.raises(UnusableFile, match="last chunk"):
        pack([chunked])


def small(value: float = 1.0, size: int = 4) -> Any:
    """A cache of one layer that needs no model."""
    (cache,) = make_small()
    keys = mx.full((1, 1, size, 4), value)
    cache.state = (keys, keys, size)
    return [cache]


def make_small() -> list[Any]:
    from mlx_lm.models.cache import KVCache

    return [KVCache()]


@pytest.mark.parametrize("harm", ["cut", "flipped", "renamed", "empty", "no header"])
def test_a_file_that_is_not_what_was_written_is_removed_and_said(
    folder: PrefixFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    save(folder, small(), 4, TOKENS[:4])
    (path,) = (tmp_path / "prefixes").iterdir()
    raw = bytearray(path.read_bytes())
    if harm == "flipped":
        raw[-3] ^= 1
    path.write_bytes({"cut": bytes(raw[:-5]), "empty": b"", "no header": b"\xff" * 64}.get(harm, bytes(raw)))
    if harm == "renamed":
        path.rename(path.with_name(path.name.replace(key_of(TOKENS[:4]), key_of(TOKENS[:5]))))
    assert folder.load(make_small, LIMIT) == []
    assert list((tmp_path / "prefixes").iterdir()) == []
    assert "cannot be used" in capsys.readouterr().err


def test_files_of_another_rank_or_model_are_not_read_and_other_caches_are_no_match(tmp_path: Path) -> None:
    save(PrefixFolder(tmp_path, "model", 0, LIMIT), small(), 4, TOKENS[:4])
    assert PrefixFolder(tmp_path, "model", 1, LIMIT).load(make_small, LIMIT) == []
    assert PrefixFolder(tmp_path, "other", 0, LIMIT).load(make_small, LIMIT) == []
    assert len(PrefixFolder(tmp_path, "model", 0, LIMIT).load(make_small, LIMIT)) == 1
    with pytest.raises(UnusableFile, match="other kinds"):
        unpack(pack(small()).forms, {}, [QuantisedRow(group_size=32, bits=4)], 8)


def test_the_least_recently_used_files_go_when_there_are_too_many_bytes(tmp_path: Path) -> None:
    folder = PrefixFolder(tmp_path, "model", 0, LIMIT)
    for at in range(3):
        save(folder, small(), 4, TOKENS[at : at + 4])
        os.utime(folder._path(key_of(TOKENS[at : at + 4])), (100 + at, 100 + at))
    save(folder, small(), 4, TOKENS[:4])  # it is there: only touched
    size = folder._path(key_of(TOKENS[:4])).stat().st_size
    save(PrefixFolder(tmp_path, "other", 0, 3 * size), small(), 4, TOKENS[9:13])
    assert [one.tokens for one in folder.load(make_small, LIMIT)] == [TOKENS[:4], TOKENS[2:6]]
    assert [one.tokens for one in folder.load(make_small, size)] == [TOKENS[:4]]


def test_a_folder_that_cannot_be_written_is_said_and_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = DiskWriter(PrefixFolder(tmp_path / "file", "model", 0, LIMIT))
    for at in range(4):
        packed = pack(small())
        mx.eval(packed.arrays)
        writer.write(Job(TOKENS[at : at + 4], packed))
    writer.close()
    said = capsys.readouterr().err
    assert said.count("cannot be written") == prefix_disk.MAX_FAILURES
    assert "no other will be tried" in said


def test_whatever_goes_wrong_with_one_file_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = PrefixFolder(tmp_path, "model", 0, LIMIT)
    write, problems = PrefixFolder.write, iter([ValueError("odd"), MemoryError()])

    def failing(self: PrefixFolder, job: Job) -> None:
        if (problem := next(problems, None)) is not None and job.tokens[0] == TOKENS[0]:
            raise problem
        write(self, job)

    monkeypatch.setattr(PrefixFolder, "write", failing)
    save(folder, small(), 4, TOKENS[:4])
    assert "cannot be written: odd" in capsys.readouterr().err
    save(folder, small(), 4, TOKENS[1:5])
    read: list[str] = []
    assert len(folder.load(make_small, LIMIT, lambda: read.append("one"))) == len(read) == 1


def test_a_models_identity_changes_with_its_files_and_with_the_plan(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = identity_of(str(tmp_path), "", "pipeline")
    assert identity_of(str(tmp_path), "", "pipeline") == first
    assert identity_of(str(tmp_path), "", "tensor") != first
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert identity_of(str(tmp_path), "", "pipeline") != first


def test_models_of_other_folders_are_others_though_names_sizes_and_times_are_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
        os.utime(tmp_path / name / "model.safetensors", (1, 1))
    assert identity_of(str(tmp_path / "a"), "") != identity_of(str(tmp_path / "b"), "")


def test_a_cache_that_no_file_can_keep_is_said_once_and_ends_nothing(
    folder: PrefixFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    class Odd:
        state = object()

        def is_trimmable(self) -> bool:
            return True

    saving = Saving(DiskWriter(folder))
    for at in range(2):
        saving.begin([Odd()], 4, TOKENS[at : at + 4])
    saving.close()
    assert capsys.readouterr().err.count("nothing is kept on disk") == 1


def test_what_was_read_from_files_is_not_held_twice(tmp_path: Path) -> None:
    save(folder := PrefixFolder(tmp_path, "model", 0, LIMIT), small(), 4, TOKENS[:4])
    files = PrefixFiles(folder.load(make_small, LIMIT))
    (taken,) = files.take([key_of(TOKENS[:4])])
    array = weakref.ref(taken.cache[0])
    del taken
    assert array() is None  # evicted now


@pytest.mark.parametrize("can_cut", [True, False])
def test_each_system_prompt_is_saved_once_an_epoch_from_an_entry_that_has_it(can_cut: bool) -> None:
    settings = PrefixSettings(folder="/somewhere", max_system_tokens=30)
    planner = PrefixPlanner(settings, KvBudget(), can_cut=can_cut)

    def ask(name: str, system_tokens: int, **fields: Any) -> tuple[Save, ...]:
        request = GenerateRequest(
            id=name,
            prompt_ids=TOKENS,
            max_tokens=1,
            system_tokens=system_tokens,
            cache_points=(20,),
            **fields,
        )
        part = planner.admit(request, TOKENS)
        points = [(part.entry, len(TOKENS)), *((entry, point) for point, entry in part.checkpoints)]
        planner.ended(name)
        planner.stored([Stored(entry, TOKENS[:length], can_cut, 1) for entry, length in points])
        assert points
        saves = planner.take_saves()
        planner.take_evictions()
        return saves

    assert ask("too long", 31) == ()
    assert ask("salted", 20, cache_salt="s") == ()
    (saved,) = ask("a", 20)
    assert saved.tokens == TOKENS[:20]
    assert ask("again", 20) == ()


def test_what_was_read_from_files_is_found_like_what_was_kept() -> None:
    planner = PrefixPlanner(PrefixSettings(), KvBudget(), can_cut=True)
    planner.begin_with([Stored(1, TOKENS[:20], True, 5), Stored(2, TOKENS[5:25], True, 5)])
    request = GenerateRequest(id="a", prompt_ids=TOKENS, max_tokens=1)
    part = planner.admit(request, TOKENS)
    assert (part.reuse, part.num_reused, part.entry) == (1, 20, 3)
