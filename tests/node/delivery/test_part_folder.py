"""Folders with some of a model's bytes: what may be believed of them, and what is never touched."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.delivery import Piece
from mlx_mesh.mesh.delivery_orders import LookOrder
from mlx_mesh.mesh.errors import MeshError, PreflightError
from mlx_mesh.mesh.part_record import RECORD_NAME, RecordHead
from mlx_mesh.node.delivery import part_folder
from mlx_mesh.node.delivery.look import look, pick_folder, sample_of
from mlx_mesh.node.delivery.part_folder import (
    Busy,
    describe_part,
    open_part,
    read_part,
    settle_part,
    target_folder,
)
from mlx_mesh.node.facts import gather_facts, gather_here

CONFIG = b'{"model_type": "llama"}'
WEIGHTS = bytes(range(250)) * 8
HEAD = RecordHead(
    asked="m", digest="d", files={"config.json": len(CONFIG), "model.safetensors": len(WEIGHTS)}
)
CONFIG_PIECE = Piece("config.json", 0, len(CONFIG))
FIRST, SECOND = Piece("model.safetensors", 0, 1000), Piece("model.safetensors", 1000, 2000)


def put(writer: Any, piece: Piece) -> None:
    data = (CONFIG if piece.file == "config.json" else WEIGHTS)[piece.start : piece.end]
    writer.write(piece, memoryview(data), hashlib.sha256(data).hexdigest())


def fill(folder: Path, *pieces: Piece, settled: bool = True) -> Path:
    with open_part(folder, HEAD) as writer:
        for piece in pieces:
            put(writer, piece)
        if settled:
            writer.settle()
    return folder


def test_files_have_their_true_sizes_and_holes_take_no_space(tmp_path: Path) -> None:
    head = RecordHead(asked="m", digest="d", files={"model.safetensors": 10**9})
    with open_part(tmp_path / "m", head):
        pass
    found = (tmp_path / "m" / "model.safetensors").stat()
    assert found.st_size == 10**9
    assert found.st_blocks * 512 < 10**6


def test_pieces_are_kept_over_openings(tmp_path: Path) -> None:
    folder = fill(tmp_path / "m", CONFIG_PIECE, FIRST)
    fill(folder, SECOND)
    record = read_part(folder)
    assert record is not None
    assert record.is_whole
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_folder_with_another_model_is_emptied_and_one_of_the_user_is_left_alone(
    tmp_path: Path,
) -> None:
    folder = fill(tmp_path / "m", CONFIG_PIECE, FIRST)
    with open_part(folder, RecordHead(asked="m", digest="other", files={"config.json": 3})):
        pass
    assert {path.name for path in folder.iterdir()} == {RECORD_NAME, "config.json"}
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(PreflightError, match="was not made by mlx-mesh"), open_part(mine, HEAD):
        pass
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", ".mlx-mesh-part.jsonl", "a/b", "", "..", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    head = RecordHead(asked="m", digest="d", files={name: 3})
    with pytest.raises(MeshError, match="no file of a model"), open_part(tmp_path / "m", head):
        pass
    assert not (tmp_path / "m").exists()


def test_only_one_delivery_writes_at_a_time(tmp_path: Path) -> None:
    with open_part(tmp_path / "m", HEAD), pytest.raises(Busy, match="another delivery"):
        fill(tmp_path / "m", FIRST)
    fill(tmp_path / "m", FIRST)


def test_what_was_not_settled_is_read_again_and_a_hole_is_found(tmp_path: Path) -> None:
    """As after a power cut: the journal has the line, the file lost the bytes."""
    folder = fill(tmp_path / "m", CONFIG_PIECE, FIRST)
    fill(folder, SECOND, settled=False)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
        file.truncate(2000)
    record, num_right, num_wrong = settle_part(folder)
    assert (num_right, num_wrong) == (0, 1)
    assert record is not None
    assert record.spans()["model.safetensors"] == [(0, 1000)]
    assert record.is_settled


def test_what_was_not_settled_and_is_right_counts(tmp_path: Path) -> None:
    folder = fill(tmp_path / "m", FIRST, SECOND, settled=False)
    record, num_right, num_wrong = settle_part(folder)
    assert (num_right, num_wrong) == (2, 0)
    assert record is not None
    assert record.is_settled


def test_a_flipped_byte_is_found_by_verify_and_costs_its_piece_only(tmp_path: Path) -> None:
    folder = fill(tmp_path / "m", CONFIG_PIECE, FIRST, SECOND)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(1500)
        file.write(b"\xff")
    assert settle_part(folder)[1:] == (0, 0)  # nothing is read without reason
    record, num_right, num_wrong = settle_part(folder, verify=True)
    assert (num_right, num_wrong) == (2, 1)
    assert record is not None
    assert record.spans()["model.safetensors"] == [(0, 1000)]


def test_a_file_that_was_removed_or_cut_is_not_believed_to_be_there(tmp_path: Path) -> None:
    folder = fill(tmp_path / "m", CONFIG_PIECE, FIRST, SECOND)
    (folder / "model.safetensors").write_bytes(b"short")
    record, _, num_wrong = settle_part(folder)
    assert num_wrong == 2
    assert record is not None
    assert record.spans() == {"config.json": [(0, len(CONFIG))], "model.safetensors": []}


def test_a_full_disk_is_told_and_the_journal_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_part(folder, HEAD) as writer:
        put(writer, FIRST)
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(PreflightError, match=r"the disk of .* is full .*run it again"):
            put(writer, SECOND)
        writer.settle()
    record = read_part(folder)
    assert record is not None
    assert record.spans()["model.safetensors"] == [(0, 1000)]


def test_the_journal_has_no_half_line_when_the_disk_fills_up_in_the_middle_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write = tmp_path / "m", os.write
    with open_part(folder, HEAD) as writer:
        put(writer, FIRST)
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        with pytest.raises(PreflightError, match="is full"):
            put(writer, SECOND)
        monkeypatch.undo()
        put(writer, CONFIG_PIECE)
        writer.settle()
    record = read_part(folder)
    assert record is not None
    assert [kept.file for kept in record.pieces] == ["model.safetensors", "config.json"]


# ---------------------------------------------------------------- what a host says that it has


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "modeling.py").write_text("evil = True")
    return folder


def order(tmp_path: Path, *candidates: object, asked: str = "/m", verify: bool = False) -> LookOrder:
    return LookOrder(
        marker="x",
        asked=asked,
        candidates=tuple(map(str, candidates)),
        models=str(tmp_path / "models"),
        verify=verify,
    )


def test_a_complete_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = model(tmp_path / "here")
    holding = look(order(tmp_path, tmp_path / "nowhere", folder))
    assert (holding.state, holding.folder, holding.is_delivered) == ("whole", str(folder), False)
    assert {file.name for file in holding.files} == {"config.json", "tokenizer.json", "model.safetensors"}


def test_an_incomplete_folder_of_the_user_is_not_used_and_not_written_to(tmp_path: Path) -> None:
    folder = model(tmp_path / "here")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001.safetensors"}}')
    holding = look(order(tmp_path, folder))
    assert holding.state == "none"
    assert "is not complete: 1 of 1 weight files are missing" in holding.problem
    assert holding.target.startswith(str(tmp_path / "models" / ".mlx-mesh"))
    assert holding.free_bytes > 0


def test_a_delivered_part_is_told_with_its_bytes_and_used_by_name(tmp_path: Path) -> None:
    target = target_folder("/m", str(tmp_path / "models"))
    fill(target, CONFIG_PIECE, FIRST)
    holding = look(order(tmp_path))
    assert (holding.state, holding.held["model.safetensors"]) == ("part", [(0, 1000)])
    assert pick_folder("/m", [], str(tmp_path / "models")) == str(target)
    assert pick_folder("/other", [], str(tmp_path / "models")) == ""
    assert describe_part(target) == "0.0 MB of 0.0 MB"


def test_a_delivery_that_was_interrupted_before_the_small_files_is_no_model(tmp_path: Path) -> None:
    target = fill(target_folder("/m", str(tmp_path / "models")), FIRST)
    holding = look(order(tmp_path))
    assert (holding.state, holding.problem) == ("none", "its delivery was interrupted")
    assert holding.held["model.safetensors"] == [(0, 1000)]  # it counts for the next one
    assert pick_folder("/m", [], str(tmp_path / "models")) == ""
    assert holding.folder == str(target)


def test_the_users_own_complete_folder_wins_over_what_was_delivered(tmp_path: Path) -> None:
    fill(target_folder("/m", str(tmp_path / "models")), CONFIG_PIECE, FIRST, SECOND)
    folder = model(tmp_path / "here")
    assert look(order(tmp_path, folder)).folder == str(folder)
    assert pick_folder("/m", [str(folder)], str(tmp_path / "models")) == str(folder)


def test_facts_say_that_a_model_is_there_in_part(tmp_path: Path) -> None:
    part = gather_facts(str(fill(tmp_path / "m", CONFIG_PIECE, FIRST)))
    assert part.model_part == "0.0 MB of 0.0 MB"
    assert part.is_delivered
    assert part.model_digest
    whole = gather_facts(str(fill(tmp_path / "m", SECOND)))
    assert (whole.model_part, whole.is_delivered) == ("", True)
    assert whole.model_digest == part.model_digest
    assert gather_facts(str(model(tmp_path / "own"))).is_delivered is False


def test_facts_can_be_gathered_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("mlx_mesh.node.facts.locate", lambda *_: pytest.fail("it asked the hub"))
    assert "is not (or not completely) on" in gather_here("org/no-such-model").model_error


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("org/name", "name"),
        ("org/name@v1", "name"),
        ("/x/y/My Model/", "My_Model"),
        ("~/m", "m"),
        ("/..", "model"),
    ],
)
def test_a_delivery_goes_where_no_other_program_looks_for_models(
    tmp_path: Path, asked: str, name: str
) -> None:
    target = target_folder(asked, str(tmp_path))
    assert target.name == name
    assert target.parents[1] == tmp_path / ".mlx-mesh"
    assert target == target_folder(asked, str(tmp_path))


def test_what_another_delivery_put_there_meanwhile_is_not_overwritten_with_the_old_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look reads the journal; then another model comes, and only then the look has the lock."""
    fill(tmp_path / "m", CONFIG_PIECE, FIRST)
    (tmp_path / "m" / "model.safetensors").write_bytes(b"cut")
    other = RecordHead(asked="m", digest="e", files=HEAD.files)
    real = part_folder._locked

    def late(folder: Path) -> Any:
        monkeypatch.setattr(part_folder, "_locked", real)
        with open_part(folder, other):
            pass
        return real(folder)

    monkeypatch.setattr(part_folder, "_locked", late)
    record, _, _ = settle_part(tmp_path / "m")
    assert record is not None
    assert (record.head.digest, record.pieces) == ("e", ())


def test_what_is_settled_is_on_the_drive_also_where_fsync_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, what: asked.append(what))
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("fsync"))
    fill(tmp_path / "m", FIRST)
    assert asked == [51, 51, 51, 51]  # the new journal and its folder; then the file, the journal


def test_of_a_file_that_is_not_all_there_no_digest_is_told(tmp_path: Path) -> None:
    target = target_folder("m", str(tmp_path))
    fill(target, Piece("config.json", 0, 5), FIRST)
    holding = look(LookOrder(marker="x", asked="m", candidates=(), models=str(tmp_path)))
    assert (holding.state, [file.name for file in holding.files]) == ("none", ["model.safetensors"])


def test_blocks_all_over_a_weight_file_are_looked_at(tmp_path: Path) -> None:
    size = 3 * 2**20
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    before = sample_of(path, size)
    for at in (0, size // 2, size - 1):
        data = bytearray(size)
        data[at - at % 3 : at - at % 3 + 16384] = b"x" * min(16384, size - at + at % 3)
        path.write_bytes(data)
        assert path.stat().st_size == size
        assert sample_of(path, size) != before
    path.write_bytes(b"")
    assert sample_of(path, 0) == hashlib.sha256().hexdigest()
