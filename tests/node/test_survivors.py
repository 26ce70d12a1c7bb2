"""Hosts go for good, come back, are drained and added: requests go on with the same tokens."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec

from mlx_mesh.mesh.messages import (
    AgentFailed,
    AgentStopped,
    ChangeNode,
    Chunk,
    EpochEnded,
    Failed,
    HostPlan,
    MeshDown,
    MeshReady,
    NodeReply,
    PlanChosen,
    Readiness,
    StatusQuery,
    StatusReply,
)

THREE = [HostPlan(name="mac1"), HostPlan(name="mac2"), HostPlan(name="mac3")]
HALF_BYTES = 268_520_000
"""What a rank may use when two of the scripted model's halves fit and the whole does not."""


def impatient(mesh: Any, rejoin_timeout_s: float = 2.0) -> None:
    mesh.deadlines = msgspec.structs.replace(mesh.deadlines, rejoin_timeout_s=rejoin_timeout_s)


async def next_epoch(leader: Any, epoch: int) -> MeshReady:
    event: MeshReady = await leader.output.wait_for(MeshReady, lambda ready: ready.epoch == epoch)
    return event


async def all_tokens(line: Any, request_id: str) -> list[int]:
    """Every token that a request has had since it was sent, once it ended well."""
    while not any(
        isinstance(event, Chunk) and event.chunk.id == request_id and event.chunk.finish_reason == "length"
        for event in line.events
    ):
        event = await line.wait_for((Chunk, Failed))
        assert not isinstance(event, Failed), event
    chunks = [e.chunk for e in line.events if isinstance(e, Chunk) and e.chunk.id == request_id]
    return [token for chunk in chunks for token in chunk.token_ids]


async def change(line: Any, action: Any, host: str) -> NodeReply:
    line.send(ChangeNode(id="n", action=action, host=host))
    reply: NodeReply = await line.wait_for(NodeReply)
    return reply


def lose(mesh: Any, host: str) -> None:
    mesh.hosts[host].process.stop("its power is gone", hurry=True)


async def test_the_survivors_serve_when_a_host_does_not_come_back(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = THREE
        impatient(mesh)
        leader, line = await mesh.up()
        line.submit("a", 60)
        await line.wait_for(Chunk)
        lose(mesh, "mac2")
        gone = await line.wait_for(Readiness)
        assert not gone.ready and "mac2" in gone.reason
        ready = await next_epoch(leader, 2)
        assert ready.world_size == 2 and ready.lineup.startswith("serving with 2 of 3 hosts since 20")
        assert "mac2 is gone (it left: its power is gone)" in ready.lineup
        assert await all_tokens(line, "a") == mesh.undisturbed_tokens(60)
        [told] = [e for e in line.events if isinstance(e, Readiness) and e.ready and e.epoch == 2]
        assert (told.world_size, told.lineup) == (2, ready.lineup)
        status = await line.status()
        assert (status.world_size, status.lineup) == (2, ready.lineup)
        assert [(row.rank, row.host) for row in status.ranks] == [(0, "mac1"), (1, "mac3")]
        assert [(row.host, row.state, row.ranks) for row in status.hosts] == [
            ("mac1", "serving", (0,)),
            ("mac2", "gone", ()),
            ("mac3", "serving", (1,)),
        ]
        assert status.placement is not None and status.placement.world_size == 2
        assert "mac2 did not come back" in status.epoch_cause
        assert leader.output.all(PlanChosen)[-1].placement == status.placement
        line.send(StatusQuery(id="m", with_metrics=True))
        metrics = (await line.wait_for(StatusReply)).status.metrics
        values = {(m.name, *m.labels.values()): m.value for m in metrics}
        assert values["mlx_mesh_hosts",] == 3 and values["mlx_mesh_hosts_serving",] == 2
        assert values["mlx_mesh_host_changes_total", "lost"] == 1


async def test_the_leader_goes_on_alone_and_a_rank_of_a_second_slot_moves_with_its_host(
    run_mesh: Any,
) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="mac1"), HostPlan(name="mac2", slots=2)]
        impatient(mesh)
        leader, line = await mesh.up()
        line.submit("a", 60)
        await line.wait_for(Chunk)
        lose(mesh, "mac2")
        assert (await next_epoch(leader, 2)).world_size == 1
        assert await all_tokens(line, "a") == mesh.undisturbed_tokens(60)
        status = await line.status()
        assert [(row.rank, row.host) for row in status.ranks] == [(0, "mac1")]
        assert status.backend == "none" and status.sharding == "none"


async def test_a_mesh_that_does_not_fit_any_more_stays_down_and_starts_when_the_host_is_back(
    run_mesh: Any,
) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name=f"mac{n}", memory_limit_bytes=HALF_BYTES) for n in (1, 2)]
        impatient(mesh)
        leader, line = await mesh.up()
        line.submit("a", 100_000)
        await line.wait_for(Chunk)
        lose(mesh, "mac2")
        failed = await line.wait_for(Failed)
        assert (failed.id, failed.code) == ("a", "not_ready") and failed.retry_after_s == 30
        assert "0 MB are missing (mac1 0 MB)" in failed.message and "mac2" in failed.message
        down = await leader.output.wait_for(MeshDown)
        assert down.reason.startswith("down: ") and not leader.output.all(AgentFailed)
        line.submit("b", 5)
        assert await line.answer("b") == ([], "failed: not_ready")
        status = await line.status()
        assert not status.ready and status.reason == down.reason
        mesh.start("mac2", key="mac2 again")
        await next_epoch(leader, 2)
        await line.ready()
        line.submit("c", 5)
        assert await line.answer("c") == (mesh.undisturbed_tokens(5), "length")
        assert (await line.status()).lineup == ""


async def test_an_elastic_mesh_takes_a_host_in_again_and_requests_go_on(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = THREE
        mesh.is_elastic = True
        impatient(mesh)
        leader, line = await mesh.up()
        lose(mesh, "mac3")
        await next_epoch(leader, 2)
        line.submit("a", 250)
        await line.wait_for(Chunk)
        mesh.start("mac3", key="mac3 again")
        assert (await next_epoch(leader, 3)).world_size == 3
        assert await all_tokens(line, "a") == mesh.undisturbed_tokens(250)
        status = await line.status()
        assert status.lineup == "" and status.epoch_cause == "mac3 is back"
        assert status.restarts == 1  # nothing broke the second time
        assert [event.cause for event in leader.output.all(EpochEnded)][1:] == ["mac3 came back"]


async def test_a_rank_that_is_started_by_hand_again_is_taken_in_by_an_elastic_mesh(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="mac1"), HostPlan(name="")]  # known by its rank only
        mesh.is_elastic = True
        impatient(mesh)
        leader = await mesh.start_leader(ranks=(0,), world_size=2)
        mesh.start("box-r1", ranks=(1,), world_size=2)
        await leader.output.wait_for(MeshReady)
        lose(mesh, "box-r1")
        assert (await next_epoch(leader, 2)).world_size == 1
        mesh.start("box-r1", key="again", ranks=(1,), world_size=2)
        assert (await next_epoch(leader, 3)).world_size == 2


async def test_without_elastic_a_host_that_came_back_waits_until_it_is_added(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        impatient(mesh)
        leader, line = await mesh.up()
        lose(mesh, "mac2")
        await next_epoch(leader, 2)
        refused = await change(line, "add", "mac2")
        assert refused.error == "host_not_here" and "its power is gone" in refused.message
        back = mesh.start("mac2", key="mac2 again")
        await back.output.wait_for(str, lambda note: "waits to be taken in" in note)
        status = await line.status()
        assert [row.state for row in status.hosts] == ["serving", "standby"]
        assert "mac2 is a standby" in status.lineup and "node add mac2" in status.hosts[1].detail
        line.submit("a", 250)
        await line.wait_for(Chunk)
        reply = await change(line, "add", "mac2")
        assert reply.is_changing and reply.epoch == 2 and not reply.error
        assert (await next_epoch(leader, 3)).world_size == 2
        assert await all_tokens(line, "a") == mesh.undisturbed_tokens(250)
        assert (await line.status()).epoch_cause == "mac2 was added"


async def test_a_drained_host_gives_its_part_away_and_stays_out_until_it_is_added(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = THREE
        mesh.is_elastic = True
        leader, line = await mesh.up()
        line.submit("a", 150)
        await line.wait_for(Chunk)
        assert (await change(line, "drain", "mac2")).is_changing
        assert (await next_epoch(leader, 2)).world_size == 2
        status = await line.status()
        assert "mac2 is drained" in status.lineup and status.epoch_cause == "mac2 was drained"
        assert status.hosts[1].state == "drained" and not mesh.hosts["mac2"].task.done()
        again = await change(line, "drain", "mac2")
        assert not again.error and not again.is_changing
        assert (await change(line, "add", "mac2")).is_changing
        assert (await next_epoch(leader, 3)).world_size == 3
        assert await all_tokens(line, "a") == mesh.undisturbed_tokens(150)


async def test_a_drain_that_the_model_would_not_survive_is_refused(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name=f"mac{n}", memory_limit_bytes=HALF_BYTES) for n in (1, 2)]
        _, line = await mesh.up()
        refused = await change(line, "drain", "mac2")
        assert refused.error == "does_not_fit" and "are missing (mac1" in refused.message
        assert (await change(line, "drain", "mac1")).error == "host_leads"
        assert (await change(line, "drain", "mac7")).error == "host_not_found"
        status = await line.status()
        assert status.ready and status.epoch == 1 and status.lineup == ""


async def test_a_host_that_comes_back_with_another_model_is_refused_and_the_mesh_goes_on(
    run_mesh: Any, tmp_path: Any
) -> None:
    async with run_mesh() as mesh:
        impatient(mesh)
        leader, line = await mesh.up()
        lose(mesh, "mac2")
        await next_epoch(leader, 2)
        other = tmp_path / "other"
        other.mkdir()
        for path in mesh.model.iterdir():
            (other / path.name).write_bytes(path.read_bytes() + b" ")
        wrong = mesh.start("mac2", key="mac2 again", model=str(other))
        await wrong.ended()
        [error] = wrong.output.all(AgentFailed)
        assert "another model" in error.message
        status = await line.status()
        assert status.ready and status.epoch == 2


async def test_a_standby_that_leaves_disturbs_nobody_and_goes_down_with_the_mesh(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = THREE
        leader, line = await mesh.up()
        for host in ("mac2", "mac3"):
            await change(line, "drain", host)
        await leader.output.wait_for(MeshReady, lambda ready: ready.world_size == 1)
        epoch = (await line.status()).epoch
        lose(mesh, "mac2")
        await mesh.hosts["mac2"].ended()
        line.submit("a", 5)
        assert (await line.answer("a"))[1] == "length"
        status = await line.status()
        assert status.epoch == epoch and status.hosts[1].state == "gone"
        leader.process.stop("SIGTERM", hurry=False)
        await mesh.hosts["mac3"].ended()
        [stopped] = mesh.hosts["mac3"].output.all(AgentStopped)
        assert stopped.by_coordinator


async def test_a_host_whose_engines_end_again_and_again_is_given_up_and_not_the_mesh(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = THREE
        mesh.max_restarts = 1
        mesh.engine_script = {"2.1.load": "exit:7", "3.1.load": "exit:7"}
        leader, line = await mesh.up()
        line.submit("a", 60)
        await line.wait_for(Chunk)
        os.kill((await line.status()).ranks[1].engine_pid, signal.SIGKILL)
        ready = await leader.output.wait_for(MeshReady, lambda ready: ready.epoch > 1)
        assert ready.world_size == 2 and "mac2 failed (rank 1 on mac2" in ready.lineup
        assert await all_tokens(line, "a") == mesh.undisturbed_tokens(60)
        status = await line.status()
        assert [row.state for row in status.hosts] == ["serving", "failed", "serving"]
        assert "status 7" in status.hosts[1].detail and "node add mac2" in status.hosts[1].detail
        assert (await change(line, "add", "mac2")).is_changing
        assert (await leader.output.wait_for(MeshReady, lambda ready: ready.epoch > 4)).world_size == 3


async def test_a_broken_link_between_the_leader_and_a_host_costs_the_host_and_not_the_mesh(
    run_mesh: Any,
) -> None:
    async with run_mesh() as mesh:
        mesh.max_restarts = 0
        mesh.engine_script = {"1.*.submit": "fail:peer_lost"}
        leader, line = await mesh.up()
        line.submit("a", 5)
        ready = await next_epoch(leader, 2)
        assert ready.world_size == 1 and "mac2 failed (rank 0 on mac1" in ready.lineup
        assert await all_tokens(line, "a") == mesh.undisturbed_tokens(5)
