"""What happens after ready: ranks die, freeze and fail; requests go on with the same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import msgspec

from mlx_mesh.mesh.messages import (
    AgentFailed,
    Cancel,
    Chunk,
    Deadlines,
    EpochEnded,
    Failed,
    HostPlan,
    LogLine,
    MeshReady,
    Readiness,
    StatusQuery,
    StatusReply,
)
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.processes import identify


async def next_epoch(leader: Any, epoch: int) -> MeshReady:
    event: MeshReady = await leader.output.wait_for(MeshReady, lambda ready: ready.epoch == epoch)
    return event


async def test_a_killed_engine_costs_a_pause_and_no_request(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        line.submit("a", 60)
        line.submit("b", 40, (9, 9))
        await line.wait_for(Chunk, lambda event: event.chunk.id == "b")
        [victim] = [row.engine_pid for row in (await line.status()).ranks if row.rank == 1]
        os.kill(victim, signal.SIGKILL)
        while sum(1 for e in line.events if isinstance(e, Chunk) and e.chunk.finish_reason) < 2:
            await line.wait_for(Chunk)
        for request_id, prompt, count in (("a", (1, 2, 3), 60), ("b", (9, 9), 40)):
            ids = [
                token
                for event in line.events
                if isinstance(event, Chunk) and event.chunk.id == request_id
                for token in event.chunk.token_ids
            ]
            assert ids == mesh.undisturbed_tokens(count, prompt)
        ended = leader.output.all(EpochEnded)
        assert [event.cause for event in ended] == [
            "rank 1 on mac2, phase ready: its engine was killed by SIGKILL"
        ]
        status = await line.status()
        assert (status.epoch, status.restarts) == (2, 1) and "SIGKILL" in status.epoch_cause
        assert (await next_epoch(leader, 2)).restarted


async def test_a_frozen_engine_is_named_and_killed(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        [frozen] = [row.engine_pid for row in (await line.status()).ranks if row.rank == 1]
        os.kill(frozen, signal.SIGSTOP)
        ended = await leader.output.wait_for(EpochEnded)
        assert "rank 1 on mac2" in ended.cause and "engine_silence_s" in ended.cause
        await next_epoch(leader, 2)
        assert identify(frozen) is None


async def test_a_rank_that_lost_its_peer_is_not_blamed_for_it(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.engine_script = {"1.0.submit": "fail:peer_lost"}
        leader, line = await mesh.up()
        [victim] = [row.engine_pid for row in (await line.status()).ranks if row.rank == 1]
        line.submit("a", 10)
        await leader.output.wait_for(LogLine, lambda log: "peer_lost" in log.line)
        os.kill(victim, signal.SIGKILL)
        assert (await line.answer("a"))[1] == "length"
        assert "rank 1 on mac2" in leader.output.all(EpochEnded)[0].cause


async def test_the_proxy_hears_of_every_change_of_readiness(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        _, line = await mesh.up()
        os.kill((await line.status()).ranks[0].engine_pid, signal.SIGKILL)
        gone = await line.wait_for(Readiness)
        assert not gone.ready and "rank 0 on mac1" in gone.reason
        back = await line.ready()
        assert back.epoch == 2


async def test_requests_that_come_during_a_recovery_wait_for_it(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        _, line = await mesh.up()
        os.kill((await line.status()).ranks[0].engine_pid, signal.SIGKILL)
        await line.wait_for(Readiness, lambda event: not event.ready)
        line.submit("late", 5)
        assert await line.answer("late") == (mesh.undisturbed_tokens(5), "length")


async def test_a_request_cancelled_during_a_recovery_is_not_admitted_again(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        _, line = await mesh.up()
        line.submit("a", 100_000)
        await line.wait_for(Chunk)
        os.kill((await line.status()).ranks[0].engine_pid, signal.SIGKILL)
        await line.wait_for(Readiness, lambda event: not event.ready)
        line.send(Cancel(id="a"))
        assert (await line.answer("a"))[1] == "cancelled"
        await line.ready()
        assert (await line.status()).num_open == 0


async def test_epochs_that_never_complete_a_step_use_up_the_budget(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.max_restarts = 1
        mesh.engine_script = {"*.0.submit": "kill"}
        leader, line = await mesh.up()
        line.submit("a", 10)
        assert await line.answer("a") == ([], "failed: mesh_failed")
        await leader.ended()
        [error] = leader.output.all(AgentFailed)
        assert "rank 0 on mac1" in error.message and "SIGKILL" in error.message
        assert [event.final for event in leader.output.all(EpochEnded)] == [False, True]


async def test_a_request_that_ends_engines_fails_alone_and_the_others_go_on(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.max_restarts = 1
        mesh.max_open = 4
        mesh.engine_script = {"*.0.submit bad": "exit:7", "*.0.submit worse": "fail:memory"}
        leader, line = await mesh.up()
        line.submit("good", 300)
        await line.wait_for(Chunk)
        line.submit("bad", 10)
        line.submit("worse", 10)
        ends: dict[str, str] = {}
        while len(ends) < 3:
            event = await line.next()
            if isinstance(event, Failed):
                ends[event.id] = event.code
            elif isinstance(event, Chunk) and event.chunk.finish_reason:
                ends[event.chunk.id] = event.chunk.finish_reason
        assert ends == {"good": "length", "bad": "request_ends_engine", "worse": "request_ends_engine"}
        ids = [t for e in line.events if isinstance(e, Chunk) for t in e.chunk.token_ids]
        assert ids == mesh.undisturbed_tokens(300)
        assert not leader.output.all(AgentFailed)


async def test_towers_that_never_end_are_found_by_their_deadline_and_the_prompt_is_to_blame(
    run_mesh: Any,
) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, step_floor_s=0.3, media_s=0.9)
        mesh.engine_script = {"*.0.submit bad": "towers"}
        leader, line = await mesh.up()
        line.submit("other", 100)
        await line.wait_for(Chunk)
        line.submit("bad", 5)
        ends: dict[str, str] = {}
        while len(ends) < 2:
            match await line.next():
                case Chunk(chunk=chunk) if chunk.finish_reason is not None:
                    ends[chunk.id] = chunk.finish_reason
                case Failed(id=request_id, code=code):
                    ends[request_id] = code
        assert ends == {"bad": "request_ends_engine", "other": "length"}
        causes = [ended.cause for ended in leader.output.all(EpochEnded)]
        assert len(causes) == 2 and all("media_s is 0.9" in cause and "rank 0" in cause for cause in causes)


async def test_what_frozen_engines_were_doing_is_part_of_the_epochs_cause(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        [frozen] = [row.engine_pid for row in (await line.status()).ranks if row.rank == 0]
        os.kill(frozen, signal.SIGSTOP)
        await next_epoch(leader, 2)
        cause = (await line.status()).epoch_cause
        assert "engine_silence_s" in cause and "rank 1 stood in" in cause and "fake_engine.py" in cause


async def test_a_killed_engine_is_noticed_within_a_second(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = Deadlines()
        leader, line = await mesh.up()
        [victim] = [row.engine_pid for row in (await line.status()).ranks if row.rank == 1]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        ended = await leader.output.wait_for(EpochEnded)
        assert time.monotonic() - killed < 1.0 and "rank 1 on mac2" in ended.cause


async def test_a_frozen_engine_is_noticed_within_four_seconds(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = Deadlines()
        leader, line = await mesh.up()
        [victim] = [row.engine_pid for row in (await line.status()).ranks if row.rank == 1]
        frozen = time.monotonic()
        os.kill(victim, signal.SIGSTOP)
        ended = await leader.output.wait_for(EpochEnded)
        assert time.monotonic() - frozen < 4.0 and "rank 1 on mac2" in ended.cause


async def test_a_step_that_does_not_end_is_noticed_by_its_own_limit(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, step_floor_s=1.0)
        leader, line = await mesh.up()
        began = time.monotonic()
        [victim] = [row.engine_pid for row in (await line.status()).ranks if row.rank == 1]
        os.kill(victim, signal.SIGUSR2)  # the scripted engine says that it is in a step for ever
        ended = await leader.output.wait_for(EpochEnded)
        assert time.monotonic() - began < 2.5
        assert "rank 1 on mac2" in ended.cause and "step_floor_s is 1" in ended.cause


async def test_the_metrics_count_what_happened(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        os.kill((await line.status()).ranks[1].engine_pid, signal.SIGKILL)
        await next_epoch(leader, 2)
        line.send(StatusQuery(id="m", with_metrics=True))
        metrics = (await line.wait_for(StatusReply)).status.metrics
        values = {(m.name, *sorted(m.labels.items())): m.value for m in metrics}
        labels = (("kind", "dead_engine"), ("phase", "ready"), ("who", "rank 1"))
        assert values["mlx_mesh_verdicts_total", *labels] == 1
        assert values["mlx_mesh_epochs_total",] == 2 and values["mlx_mesh_recoveries_total",] == 1
        assert 0 < values["mlx_mesh_recovery_seconds_total",] < 30
        assert (await line.status()).metrics == ()


async def test_ranks_that_disagree_end_the_epoch_and_the_odd_one_is_named(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="mac1"), HostPlan(name="mac2"), HostPlan(name="mac3")]
        mesh.engine_script = {"1.1.digest": "other"}
        leader, line = await mesh.up()
        ended = await leader.output.wait_for(EpochEnded)
        assert "rank 1 on mac2" in ended.cause and "different histories at step 16" in ended.cause
        await next_epoch(leader, 2)
        line.submit("a", 5)
        assert await line.answer("a") == (mesh.undisturbed_tokens(5), "length")


async def test_under_paranoid_no_token_passes_before_all_ranks_agree(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.is_paranoid = True
        mesh.engine_script = {"1.1.digest": "none"}
        leader, line = await mesh.up()
        line.submit("a", 5)
        [victim] = [row.engine_pid for row in (await line.status()).ranks if row.rank == 1]
        await leader.output.wait_for(LogLine, lambda log: log.line == "all tokens sent")
        assert not any(isinstance(event, Chunk) for event in line.events)
        os.kill(victim, signal.SIGKILL)
        assert await line.answer("a") == (mesh.undisturbed_tokens(5), "length")


async def test_completed_steps_keep_the_budget_full(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.max_restarts = 0
        leader, line = await mesh.up()
        for epoch in (2, 3):
            line.submit(f"r{epoch}", 3)
            await line.answer(f"r{epoch}")
            os.kill((await line.status()).ranks[1].engine_pid, signal.SIGKILL)
            await next_epoch(leader, epoch)
            await line.ready()


async def test_a_failed_request_leaves_the_others_alone(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, request_s=1.0)
        _, line = await mesh.up()
        line.submit("long", 100_000)
        assert (await line.answer("long"))[1] == "failed: timeout"
        line.submit("short", 3)
        assert (await line.answer("short"))[1] == "length"


async def test_a_host_that_leaves_and_comes_back_is_taken_in_again(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        line.submit("a", 200)
        await line.wait_for(Chunk)
        follower = mesh.hosts["mac2"]
        follower.process.stop("maintenance", hurry=True)
        await follower.ended()
        ended = await leader.output.wait_for(EpochEnded)
        assert "host mac2" in ended.cause and "maintenance" in ended.cause
        mesh.start("mac2", key="mac2 again")
        await next_epoch(leader, 2)
        while not any(isinstance(e, Chunk) and e.chunk.finish_reason for e in line.events):
            await line.wait_for(Chunk)
        ids = [t for e in line.events if isinstance(e, Chunk) for t in e.chunk.token_ids]
        assert ids == mesh.undisturbed_tokens(200)


async def test_a_dead_proxy_is_replaced_and_its_requests_are_cancelled(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        line.submit("a", 100_000)
        await line.wait_for(Chunk)
        record = (mesh.state / "mac1" / "test" / "agent-mac1.json").read_bytes()
        os.kill(msgspec.json.decode(record)["proxy"]["pid"], signal.SIGKILL)
        await leader.output.wait_for(str, lambda note: "HTTP proxy was killed by SIGKILL" in note)
        fresh = await mesh.connect(leader.output.all(MeshReady)[0].url)
        await fresh.ready()
        assert (await fresh.status()).num_open == 0
        fresh.submit("b", 4)
        assert await fresh.answer("b") == (mesh.undisturbed_tokens(4), "length")
        status = await fresh.status()
        assert status.epoch == 1 and status.ranks[0].phase is Phase.READY


async def test_a_frozen_proxy_is_killed_and_replaced_and_its_requests_are_cancelled(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, proxy_silence_s=2.0)
        leader, line = await mesh.up()
        line.submit("a", 100_000)
        await line.wait_for(Chunk)
        record = (mesh.state / "mac1" / "test" / "agent-mac1.json").read_bytes()
        os.kill(msgspec.json.decode(record)["proxy"]["pid"], signal.SIGSTOP)
        await leader.output.wait_for(
            str, lambda note: "HTTP proxy was silent for 2 s (proxy_silence_s)" in note
        )
        fresh = await mesh.connect(leader.output.all(MeshReady)[0].url)
        await fresh.ready()
        assert (await fresh.status()).num_open == 0
        fresh.submit("b", 4)
        assert await fresh.answer("b") == (mesh.undisturbed_tokens(4), "length")


async def test_a_full_queue_is_refused_with_a_hint_to_come_back(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="local")]
        mesh.max_open = 2
        _, line = await mesh.up()
        for number in range(3):
            line.submit(f"r{number}", 100_000)
        assert await line.answer("r2") == ([], "failed: queue_full")


async def test_a_drain_lets_open_requests_finish_and_takes_no_new_ones(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        line.submit("open", 50)
        await line.wait_for(Chunk)
        leader.process.stop("SIGTERM", hurry=False)
        await leader.output.wait_for(str, lambda note: "may finish" in note)
        line.submit("new", 5)
        answers: dict[str, str] = {}
        while len(answers) < 2:
            event = await line.next()
            if isinstance(event, Chunk) and event.chunk.finish_reason:
                answers[event.chunk.id] = event.chunk.finish_reason
            elif isinstance(event, Failed):
                answers[event.id] = event.code
        assert answers == {"open": "length", "new": "draining"}
        await asyncio.gather(*(host.ended() for host in mesh.hosts.values()))
        assert not any(host.output.all(AgentFailed) for host in mesh.hosts.values())


async def test_a_drain_ends_after_drain_s(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, drain_s=0.5)
        leader, line = await mesh.up()
        line.submit("endless", 100_000)
        await line.wait_for(Chunk)
        leader.process.stop("SIGTERM", hurry=False)
        assert (await line.answer("endless"))[1] == "failed: draining"
        await leader.ended()


async def test_engines_leave_by_the_stop_plan_when_the_mesh_stops(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="local")]
        mesh.coordinator = ""
        mesh.engine_script = {"*.0.stop": "exit:0"}
        leader, _ = await mesh.up()
        leader.process.stop("SIGTERM", hurry=False)
        await leader.ended()
        assert any(log.line == "acting: exit:0" for log in leader.output.all(LogLine))
