"""Another model in a running mesh: all ranks or none, and the old one comes back when it does not come up."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.errors import ExitCode, PlacementError
from mlx_mesh.mesh.messages import (
    Chunk,
    EpochEnded,
    Failed,
    MeshReady,
    NodeReply,
    Readiness,
    SwitchModel,
    UnloadModel,
)
from mlx_mesh.node import model_changes, served_model
from mlx_mesh.node.facts import digest_model
from mlx_mesh.node.processes import identify
from mlx_mesh.node.switching import refusal


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    """A second folder that looks like a model."""
    return Path(shutil.copytree(model, tmp_path / "other"))


async def up(mesh: Any, *allowed: Path) -> tuple[Any, Any]:
    """Both hosts of a mesh that may load these."""
    plain = mesh.mesh_config
    mesh.mesh_config = lambda: msgspec.structs.replace(plain(), allowed_models=tuple(map(str, allowed)))
    leader, line = await mesh.up()
    return leader, line


async def order(line: Any, model: Path) -> NodeReply:
    line.send(SwitchModel(id="s", model=str(model)))
    reply: NodeReply = await line.wait_for(NodeReply)
    return reply


async def next_ready(mesh: Any, leader: Any, epoch: int) -> Any:
    ready = await leader.output.wait_for(MeshReady, lambda event: event.epoch == epoch)
    line = await mesh.connect(ready.url)
    await line.ready()
    return line


async def unload(line: Any) -> NodeReply:
    line.send(UnloadModel(id="u"))
    reply: NodeReply = await line.wait_for(NodeReply)
    return reply


async def test_an_unloaded_model_leaves_no_engine_and_comes_back_when_it_is_asked_for(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        engines = [row.engine_pid for row in (await line.status()).ranks]
        line.submit("open", 60)
        assert (await unload(line)).is_changing
        again = await unload(line)
        assert (again.is_changing, again.error) == (False, "")
        line.submit("late", 3)
        late = await line.wait_for(Failed)
        assert (late.code, late.retry_after_s) == ("model_unloaded", 0) and "/v1/models/load" in late.message
        ids, how = await line.answer("open")
        assert (ids[-1], how) == (mesh.undisturbed_tokens(60)[-1], "length")
        away = await line.wait_for(Readiness, lambda event: event.code == "model_unloaded")
        assert not away.ready and "was unloaded by a request" in away.reason
        assert not any(identify(pid) for pid in engines)
        rows = (await line.status()).ranks
        assert [(row.engine_pid, row.memory_bytes, row.phase) for row in rows] == [(0, 0, "stopped")] * 2
        assert (await order(line, Path("local"))).is_changing
        await line.ready()
        status = await line.status()
        assert (status.epoch, status.restarts, status.code) == (2, 0, "")
        line.submit("next", 3)
        assert (await line.answer("next"))[1] == "length"
        assert (await order(line, Path("local"))).message == "model is served."
        assert not leader.output.all(EpochEnded)[0].final


async def test_another_model_may_be_loaded_while_none_is(run_mesh: Any, other: Path) -> None:
    async with run_mesh() as mesh:
        leader, line = await up(mesh, other)
        assert (await unload(line)).is_changing
        await line.wait_for(Readiness, lambda event: event.code == "model_unloaded")
        assert (await order(line, other)).is_changing
        line = await next_ready(mesh, leader, 2)
        assert (await line.status()).model == "other"


async def test_an_engine_that_dies_while_its_model_is_unloaded_changes_nothing(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        line.submit("open", 100_000)
        await line.wait_for(Chunk)
        assert (await unload(line)).is_changing
        os.kill((await line.status()).ranks[1].engine_pid, signal.SIGKILL)
        assert (await line.answer("open"))[1] == "failed: model_unloaded"
        await line.wait_for(Readiness, lambda event: event.code == "model_unloaded")
        leader.process.stop("enough", hurry=False)
        assert await leader.ended() is ExitCode.OK


def test_only_allowed_models_and_one_at_a_time() -> None:
    assert refusal("x", "first", (), False)[0] == "model_not_allowed"
    assert refusal("x", "first", ("y",), False)[0] == "model_not_allowed"
    assert refusal("y", "first", ("y",), True)[0] == "switch_in_progress"
    assert refusal("y", "first", ("y",), False) == refusal("first", "first", ("y",), False) == ("", "")


async def test_an_open_answer_finishes_new_ones_are_told_to_wait_and_the_other_model_serves(
    run_mesh: Any, other: Path, model: Path
) -> None:
    async with run_mesh() as mesh:
        leader, line = await up(mesh, other)
        line.submit("open", 150)
        reply = await order(line, other)
        assert (reply.error, reply.is_changing) == ("", True)
        line.submit("late", 3)
        late = await line.wait_for(Failed)
        assert (late.id, late.code, late.retry_after_s > 0) == ("late", "switching_model", True)
        ids, how = await line.answer("open")
        assert (ids[-1], how) == (mesh.undisturbed_tokens(150)[-1], "length")
        line = await next_ready(mesh, leader, 2)
        status = await line.status()
        assert (status.model, status.switch) == ("other", f"{other} is served")
        logs = mesh.state / "mac1" / "test" / "logs"
        assert "proxy serves other" in (logs / "rank-0.log").read_text()
        assert all(f"digest {digest_model(other)}" in path.read_text() for path in logs.glob("rank-?.log"))
        line.submit("next", 3)
        assert (await line.answer("next"))[1] == "length"
        back = await order(line, model)
        assert back.is_changing
        line = await next_ready(mesh, leader, 3)
        assert (await line.status()).model == "model"


async def test_a_model_that_one_rank_cannot_load_brings_the_old_one_back(run_mesh: Any, other: Path) -> None:
    async with run_mesh() as mesh:
        mesh.engine_script["2.1.load"] = "fail:config"
        leader, line = await up(mesh, other)
        assert (await order(line, other)).is_changing
        line = await next_ready(mesh, leader, 3)
        status = await line.status()
        assert status.model == "model" and "did not come up" in status.switch
        line.submit("next", 3)
        assert (await line.answer("next"))[1] == "length"


async def test_a_front_end_that_refuses_the_new_models_text_brings_the_old_one_back(
    run_mesh: Any, other: Path
) -> None:
    async with run_mesh() as mesh:
        mesh.proxy_script["start other"] = "exit:2"
        leader, line = await up(mesh, other)
        assert (await order(line, other)).is_changing
        await leader.output.wait_for(MeshReady, lambda event: event.epoch >= 2)
        line = await mesh.connect((await leader.output.wait_for(MeshReady)).url)
        await line.ready()
        status = await line.status()
        assert status.model == "model" and "the proxy has a problem" in status.switch
        line.submit("next", 3)
        assert (await line.answer("next"))[1] == "length"


async def test_a_rank_that_dies_before_a_switch_begins_costs_the_switch_and_no_request(
    run_mesh: Any, other: Path
) -> None:
    async with run_mesh() as mesh:
        leader, line = await up(mesh, other)
        victim = (await line.status()).ranks[1].engine_pid
        line.submit("open", 120)
        assert (await order(line, other)).is_changing
        os.kill(victim, signal.SIGKILL)
        ids, how = await line.answer("open")
        assert (ids[-1], how) == (mesh.undisturbed_tokens(120)[-1], "length")
        await leader.output.wait_for(MeshReady, lambda event: event.epoch == 2)
        status = await line.status()
        assert status.model == "model" and "is not loaded" in status.switch
        line.submit("next", 3)
        assert (await line.answer("next"))[1] == "length"


async def test_what_cannot_be_loaded_is_refused_and_the_old_model_serves_on(
    run_mesh: Any, other: Path, tmp_path: Path
) -> None:
    (other / "broken").touch()
    missing = tmp_path / "missing"
    async with run_mesh() as mesh:
        _, line = await up(mesh, other, missing)
        for asked, code in ((other, "model_does_not_fit"), (missing, "model_unusable")):
            reply = await order(line, asked)
            assert (reply.error, reply.is_changing) == (code, False), reply
        reply = await order(line, tmp_path / "stranger")
        assert reply.error == "model_not_allowed"
        line.submit("next", 3)
        assert (await line.answer("next"))[1] == "length"
        assert (await line.status()).epoch == 1


async def test_a_model_whose_caches_cannot_be_kept_as_the_mesh_keeps_them_is_refused(
    run_mesh: Any, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_mesh() as mesh:
        _, line = await up(mesh, other)

        def refuse(footprint: Any, options: Any) -> Any:
            raise PlacementError("its keys and values cannot be quantised")

        monkeypatch.setattr(served_model, "with_kv_options", refuse)
        reply = await order(line, other)
        assert (reply.error, reply.is_changing) == ("model_does_not_fit", False)
        assert "quantised" in reply.message


async def test_what_goes_wrong_while_a_model_is_looked_at_ends_no_mesh(
    run_mesh: Any, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> str:
        raise PermissionError("not for you")

    async with run_mesh() as mesh:
        _, line = await up(mesh, other)
        monkeypatch.setattr(model_changes, "tokenizer_problem", broken)
        reply = await order(line, other)
        assert (reply.error, reply.message) == ("model_unusable", "not for you")
        line.submit("next", 3)
        assert (await line.answer("next"))[1] == "length"
