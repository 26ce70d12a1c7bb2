"""What a rank reads is known before it reads, to the byte; and a folder that lacks it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mesh.mesh.delivery import Piece
from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.mesh.part_record import RECORD_NAME, KeptPiece, RecordHead, write_record
from mlx_mesh.mesh.spans import Span, subtract, total
from mlx_mesh.mesh.types import Placement
from mlx_mesh.node.delivery.part_folder import hash_piece
from mlx_mesh.node.engine.loader import open_lazy, read_headers
from mlx_mesh.node.engine.needs import needs_of
from mlx_mesh.node.engine.shard import load_shard
from mlx_mesh.node.engine.sources import Sources

Needs = Mapping[str, Sequence[Span]]

NOBODY: Any = None  # it is refused before anything is exchanged


def poison_the_rest(folder: Path, needs: Needs) -> None:
    """Overwrite every byte that is not needed with those of a NaN."""
    for file in folder.glob("model*.safetensors"):
        with file.open("r+b") as stream:
            for start, end in subtract([(0, file.stat().st_size)], needs.get(file.name, ())):
                stream.seek(start)
                stream.write(b"\xff" * (end - start))


def parameters_of(shards: list[Any]) -> list[dict[str, Any]]:
    return [dict(tree_flatten(shard.model.parameters())) for shard in shards]


def load(tiny: ModuleType, simulator: ModuleType, folders: list[Path], placement: Placement) -> list[Any]:
    """The logits of rank 0, and all shards."""
    shards: list[Any] = [None] * placement.world_size

    def body(rank: int, exchange: Any) -> Any:
        shards[rank] = load_shard(str(folders[rank]), placement, rank, exchange, tiny.ignore_progress)
        return tiny.forward(shards[rank].model)

    return [simulator.Simulator(placement.world_size).run(body)[0], shards]


PLACEMENTS = {
    "pipeline": lambda tiny: tiny.stages(6, [2, 4]),
    "uneven": lambda tiny: tiny.stages(6, [1]),
    "tensor": lambda tiny: tiny.slices(6, [1, 1]),
    "tensor 2:1": lambda tiny: tiny.slices(6, [2, 1]),
}


@pytest.mark.parametrize("plan", PLACEMENTS)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_with_nothing_but_what_it_needs_a_rank_computes_the_same(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path, plan: str, changes: dict[str, Any]
) -> None:
    config, placement = tiny.llama(**changes), PLACEMENTS[plan](tiny)
    reference = tiny.forward(tiny.build(config).model)
    folders = []
    for rank in range(placement.world_size):
        (tmp_path / str(rank)).mkdir()
        folder = tiny.save(config, tmp_path / str(rank), 2)
        poison_the_rest(folder, needs_of(folder, placement, rank))
        folders.append(folder)
    logits, _ = load(tiny, simulator, folders, placement)
    assert tiny.gap(logits, reference) < 1e-4


def test_a_stage_needs_its_own_bytes_and_headers_and_no_more(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path
) -> None:
    placement = tiny.stages(6, [2, 4])
    folder = tiny.save(tiny.llama(tie_word_embeddings=False), tmp_path, 3)
    headers = sum(open_lazy(folder).header_sizes.values())
    _, shards = load(tiny, simulator, [folder] * 3, placement)
    for rank, shard in enumerate(shards):
        needs = needs_of(folder, placement, rank)
        assert set(needs) == {file.name for file in folder.glob("model*.safetensors")}
        assert sum(map(total, needs.values())) == shard.weights_bytes + headers


def test_experts_that_the_loader_stacks_are_traced_to_the_tensors_they_come_from(
    tiny: ModuleType, tmp_path: Path
) -> None:
    """Stored one by one, as models come from their makers."""
    names = {f"e.{index}": mx.full((2,), index) for index in range(4)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {**names, "other": mx.zeros((2,))})
    given = mx.load(str(tmp_path / "model.safetensors"))
    stacked = mx.stack([given[name] for name in names]).transpose(1, 0) + 1
    part = mx.split(given["other"], 2)[0]
    sources = Sources(given)
    assert sources.of([stacked]) == set(names)
    assert sources.of([part, given["e.1"]]) == {"other", "e.1"}
    assert sources.of([mx.zeros((2,))]) == set()
    assert sources.read_already == set()


def test_a_tensor_that_is_read_while_the_model_is_built_is_needed_by_everybody(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"a": mx.ones((2,)), "b": mx.ones((2,))})
    given = mx.load(str(tmp_path / "x.safetensors"))
    mx.eval(given["a"] * 2)
    assert Sources(given).read_already == {"a"}


def test_more_tensors_than_one_call_takes(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {str(i): mx.zeros((1,)) for i in range(2100)})
    given = mx.load(str(tmp_path / "x.safetensors"))
    sources = Sources(given)
    assert sources.of([given[str(i)] + 1 for i in range(2000)]) == {str(i) for i in range(2000)}


# ---------------------------------------------------------------- folders with holes


def cut_down(folder: Path, needs: Needs, *, settled: bool = True) -> None:
    """Make a folder what a delivery of these spans would have made: holes elsewhere, and a journal."""
    files = [path for path in folder.iterdir() if path.is_file()]
    pieces = []
    for file in files:
        size = file.stat().st_size
        spans = needs.get(file.name, [(0, size)])
        data = file.read_bytes()
        with file.open("wb") as stream:
            stream.truncate(size)
            for start, end in spans:
                stream.seek(start)
                stream.write(data[start:end])
        pieces += [
            KeptPiece(file.name, a, b, hash_piece(folder, Piece(file.name, a, b))) for a, b in spans if b > a
        ]
    head = RecordHead(asked="m", digest="d", files={file.name: file.stat().st_size for file in files})
    record = write_record(head, pieces)
    (folder / RECORD_NAME).write_bytes(
        record if settled else record.rpartition(b"\n")[0].rpartition(b"\n")[0]
    )


def test_a_part_serves_the_plan_that_it_was_made_for_and_no_other(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path
) -> None:
    config, placement = tiny.llama(), tiny.stages(6, [2])
    reference = tiny.forward(tiny.build(config).model)
    whole = tiny.save(config, tmp_path)
    (tmp_path / "part").mkdir()
    part = tiny.save(config, tmp_path / "part")
    cut_down(part, needs_of(whole, placement, 1))
    logits, _ = load(tiny, simulator, [whole, part], placement)
    assert tiny.gap(logits, reference) == 0.0
    for other in (tiny.stages(6, [3]), tiny.slices(6, [1, 1]), tiny.stages(6, [2, 4])):
        with pytest.raises(PreflightError, match=r"rank 1 .* needs .*mlx-mesh sync"):
            load(tiny, simulator, [whole, part, whole], other)
    with pytest.raises(PreflightError, match=r"rank 0 .* does not have"):
        load_shard(str(part), tiny.whole(6), 0, NOBODY, tiny.ignore_progress)


def test_a_part_that_is_not_known_to_be_on_the_disk_is_not_loaded(tiny: ModuleType, tmp_path: Path) -> None:
    folder, placement = tiny.save(tiny.llama(), tmp_path), tiny.stages(6, [2])
    cut_down(folder, needs_of(folder, placement, 1), settled=False)
    with pytest.raises(PreflightError, match="does not have"):
        load_shard(str(folder), placement, 1, NOBODY, tiny.ignore_progress)


def test_a_part_with_everything_is_a_model_like_any_other(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path
) -> None:
    folder = tiny.save(tiny.llama(), tmp_path)
    cut_down(
        folder, {name.path.name: [(0, name.path.stat().st_size)] for name in read_headers(folder).values()}
    )
    logits, _ = load(tiny, simulator, [folder], tiny.whole(6))
    assert tiny.gap(logits, tiny.forward(tiny.build(tiny.llama()).model)) == 0.0


def test_the_program_tells_the_needs_of_all_ranks(
    tiny: ModuleType, tmp_path: Path, capsysbinary: Any, monkeypatch: Any
) -> None:
    import io
    import sys

    import msgspec

    from mlx_mesh.node.engine import needs

    folder, placement = tiny.save(tiny.llama(), tmp_path), tiny.stages(6, [2])
    stdin = io.TextIOWrapper(io.BytesIO(msgspec.json.encode(placement) + b"\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert needs.main([str(folder)]) == 0
    told = json.loads(capsysbinary.readouterr().out)
    for rank in range(2):
        expected = needs_of(folder, placement, rank)
        assert {name: [tuple(span) for span in spans] for name, spans in told[rank].items()} == expected
