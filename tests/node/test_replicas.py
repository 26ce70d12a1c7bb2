"""Several replicas of scripted engines behind one front end: who gets what, and what a failure touches."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.errors import ExitCode
from mlx_mesh.mesh.messages import (
    Cancel,
    ChangeNode,
    Chunk,
    EpochEnded,
    GenerateRequest,
    HostPlan,
    MeshDown,
    MeshReady,
    MeshStatus,
    NodeReply,
    Readiness,
    ResetPrefixes,
    StatusQuery,
    StatusReply,
    Submit,
    SwitchModel,
    UnloadModel,
)
from mlx_mesh.node import recovery

LONG = 200
"""Tokens of an answer that is still being made when something happens to it."""


def two_replicas(mesh: Any) -> None:
    mesh.num_replicas = 2
    mesh.plans = [HostPlan(name="mac1"), HostPlan(name="mac2", replica=1)]


async def submit(line: Any, request_id: str, conversation: str = "", max_tokens: int = 3) -> None:
    request = GenerateRequest(
        id=request_id, prompt_ids=(1, 2, 3), max_tokens=max_tokens, conversation=conversation
    )
    line.send(Submit(request=request))
    await line.wait_for(Chunk, lambda event: event.chunk.id == request_id and event.chunk.token_ids)


async def status(line: Any) -> MeshStatus:
    found = await line.status()
    assert isinstance(found, MeshStatus)
    return found


def engine_of(found: MeshStatus, replica: int) -> int:
    [pid] = [row.engine_pid for row in found.ranks if row.replica == replica]
    return pid


async def test_both_come_up_as_one_mesh_and_conversations_stay_apart(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        two_replicas(mesh)
        leader, line = await mesh.up()
        [ready] = leader.output.all(MeshReady)
        assert ready.world_size == 2 and not ready.lineup
        for name in ("a", "b", "a", "b", "b"):
            request_id = f"{name}{len(line.events)}"
            await submit(line, request_id, name)
            assert await line.answer(request_id) == (mesh.undisturbed_tokens(3)[-2:], "length")
        found = await status(line)
        assert [(row.replica, row.ready, row.hosts) for row in found.replicas] == [
            (1, True, ("mac1",)),
            (2, True, ("mac2",)),
        ]
        assert [row.num_requests for row in found.replicas] == [
            {"load": 1, "conversation": 1},
            {"load": 1, "conversation": 2},
        ]
        assert [(row.rank, row.replica, row.is_leader) for row in found.ranks] == [(0, 1, True), (1, 2, True)]
        assert (found.world_size, found.ready, found.lineup) == (1, True, "")
        line.send(StatusQuery(id="m", with_metrics=True))
        metrics = (await line.wait_for(StatusReply)).status.metrics
        labels = {(m.name, m.labels.get("replica"), m.labels.get("rank")) for m in metrics}
        assert {("mlx_mesh_rank_step", "1", "0"), ("mlx_mesh_rank_step", "2", "1")} <= labels
        assert {m.value for m in metrics if m.name == "mlx_mesh_replicas_ready"} == {2.0}
        assert (mesh.state / "mac1" / "test" / "logs" / "rank-1.log").is_file()
        line.send(ResetPrefixes(id="r"))
        assert (await line.wait_for(NodeReply)).error == ""
        line.send(ChangeNode(id="d", action="drain", host="mac2"))
        refused = await line.wait_for(NodeReply)
        assert refused.error == "does_not_fit" and "None of its hosts is there" in refused.message


async def test_a_dead_replicas_request_goes_on_in_the_other_one_and_nothing_else_notices(
    run_mesh: Any,
) -> None:
    async with run_mesh() as mesh:
        two_replicas(mesh)
        leader, line = await mesh.up()
        for old in ("old", "older"):  # one on each
            await submit(line, old, old)
            await line.wait_for(
                Chunk, lambda event, old=old: event.chunk.id == old and event.chunk.finish_reason
            )
        await submit(line, "there", "b", LONG)
        await submit(line, "here", "a", LONG)
        before = await status(line)
        places = {row.replica: row.num_open for row in before.replicas}
        assert places == {1: 1, 2: 1}
        os.kill(engine_of(before, 1), signal.SIGKILL)  # the one that got the first request
        tokens: dict[str, list[int]] = {"there": [], "here": []}
        ends: dict[str, str] = {}
        for event in line.events:
            if isinstance(event, Chunk) and event.chunk.id in tokens:
                tokens[event.chunk.id].extend(event.chunk.token_ids)
        fallen = None
        while len(ends) < 2:
            event = await line.next()
            if isinstance(event, Chunk):
                tokens[event.chunk.id].extend(event.chunk.token_ids)
                if event.chunk.finish_reason:
                    ends[event.chunk.id] = event.chunk.finish_reason
            elif isinstance(event, Readiness):
                fallen = fallen or event
        assert ends == {"there": "length", "here": "length"}
        assert tokens["there"] == tokens["here"] == mesh.undisturbed_tokens(LONG)
        assert fallen is not None and fallen.ready and fallen.num_ready == 1
        assert "serving with 1 of 2 replicas: replica 1" in fallen.lineup
        assert "1 open requests of replica 1 go on in others" in leader.output.text()
        [ended] = leader.output.all(EpochEnded)
        assert ended.cause.startswith("replica 1: ") and not ended.final
        again = await leader.output.wait_for(MeshReady, lambda event: event.restarted)
        assert again.lineup == "replica 1"
        after = await status(line)
        assert [(row.ready, row.epoch) for row in after.replicas] == [(True, 2), (True, 1)]
        assert engine_of(after, 2) == engine_of(before, 2)
        await submit(line, "new", "old")  # what was known of the first one's caches is forgotten
        assert all("conversation" not in row.num_requests for row in (await status(line)).replicas)


async def test_a_replica_that_fails_too_often_rests_and_is_tried_again(
    run_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "REST_S", 0.5)
    async with run_mesh() as mesh:
        two_replicas(mesh)
        mesh.engine_script["2.0.load"] = "fail:config"  # only the one that is killed has a second epoch
        leader, line = await mesh.up()
        os.kill(engine_of(await status(line), 2), signal.SIGKILL)
        down = await leader.output.wait_for(MeshDown)
        assert "up without replica 2, which is down" in down.reason and "scripted config" in down.reason
        await submit(line, "a", "c")
        assert (await line.answer("a"))[1] == "length"
        await leader.output.wait_for(MeshReady, lambda event: event.epoch == 3)
        assert not any(event.final for event in leader.output.all(EpochEnded))
        assert all(row.ready for row in (await status(line)).replicas)


async def test_with_no_replica_left_requests_wait_for_the_first_that_comes_back(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        two_replicas(mesh)
        _, line = await mesh.up()
        await submit(line, "a", "a", LONG)
        before = await status(line)
        for replica in (1, 2):
            os.kill(engine_of(before, replica), signal.SIGKILL)
        away = await line.wait_for(Readiness, lambda event: not event.ready)
        assert "replica 1: " in away.reason and "replica 2: " in away.reason
        line.submit("b", 3)
        seen = sum(len(e.chunk.token_ids) for e in line.events if isinstance(e, Chunk))
        rest, end = await line.answer("a")
        assert end == "length" and rest == mesh.undisturbed_tokens(LONG)[seen:]


async def test_a_cancelled_request_ends_where_it_runs(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        two_replicas(mesh)
        _, line = await mesh.up()
        for request_id in ("a", "b"):
            await submit(line, request_id, request_id, 100_000)
        line.send(Cancel(id="b"))
        assert (await line.answer("b"))[1] == "cancelled"
        assert {row.replica: row.num_open for row in (await status(line)).replicas} == {1: 1, 2: 0}


async def test_open_requests_of_all_replicas_may_finish_when_the_mesh_is_stopped(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        two_replicas(mesh)
        leader, line = await mesh.up()
        for request_id in ("a", "b"):
            await submit(line, request_id, request_id, 60)
        leader.process.stop("enough", hurry=False)
        ends: dict[str, str] = {}
        while len(ends) < 2:
            event = await line.next()
            if isinstance(event, Chunk) and event.chunk.finish_reason:
                ends[event.chunk.id] = event.chunk.finish_reason
        assert ends == {"a": "length", "b": "length"}
        assert await leader.ended() is ExitCode.OK


async def test_a_replica_that_does_not_come_up_ends_the_start_and_is_named(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        two_replicas(mesh)
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, join_s=1.0)
        leader = await mesh.start_leader()  # nobody starts mac2
        assert await leader.ended() is ExitCode.BRING_UP
        assert "mac2" in leader.output.text() and not leader.output.all(MeshReady)


async def test_a_model_is_unloaded_and_loaded_in_all_replicas(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        two_replicas(mesh)
        _, line = await mesh.up()
        line.send(UnloadModel(id="u"))
        assert (await line.wait_for(NodeReply)).is_changing
        await line.wait_for(Readiness, lambda event: event.code == "model_unloaded")
        assert [row.engine_pid for row in (await status(line)).ranks] == [0, 0]
        line.send(SwitchModel(id="s", model="other"))
        assert (await line.wait_for(NodeReply)).error == "model_not_allowed"
        line.send(SwitchModel(id="s", model=""))
        assert (await line.wait_for(NodeReply)).is_changing
        await line.wait_for(Readiness, lambda event: event.num_ready == 2)
        await submit(line, "a", "a")
        assert (await line.answer("a"))[1] == "length"


async def test_a_replica_whose_host_goes_away_is_back_with_it_and_its_requests_go_on_elsewhere(
    run_mesh: Any,
) -> None:
    async with run_mesh() as mesh:
        two_replicas(mesh)
        _, line = await mesh.up()
        for request_id in ("a", "b"):
            await submit(line, request_id, request_id, LONG)
        mesh.hosts["mac2"].process.stop("its host goes away", hurry=True)
        ends: dict[str, str] = {}
        while len(ends) < 2:
            event = await line.next()
            if isinstance(event, Chunk) and event.chunk.finish_reason:
                ends[event.chunk.id] = event.chunk.finish_reason
        assert ends == {"a": "length", "b": "length"}
        first, second = (await status(line)).replicas
        assert first.ready and not second.ready and "mac2" in second.reason
        line.submit("c", 3)
        assert (await line.answer("c"))[1] == "length"
        mesh.start("mac2", key="mac2 again")
        both = await line.wait_for(Readiness, lambda event: event.num_ready == 2)
        assert both.ready and not both.lineup
