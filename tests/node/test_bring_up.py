"""From agents to a ready mesh, and every way in which that fails: one message and an exit status."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.errors import ExitCode
from mlx_mesh.mesh.messages import (
    AgentFailed,
    AgentListening,
    AgentStopped,
    EpochEnded,
    HostPlan,
    LogLine,
    MeshReady,
    PhaseReached,
    PlanChosen,
)
from mlx_mesh.mesh.types import Phase, Sharding
from mlx_mesh.node import facts, lifecycle
from mlx_mesh.node.bring_up import common_prefixes


async def failed(host: Any) -> AgentFailed:
    """The host's one error; its process has ended."""
    code = await host.ended()
    errors = host.output.all(AgentFailed)
    assert len(errors) == 1 and errors[0].exit_code == code
    event: AgentFailed = errors[0]
    return event


async def test_two_hosts_come_up_and_answer(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="mac1", layers=(3,)), HostPlan(name="mac2", layers=(1,))]
        leader, line = await mesh.up()
        line.submit("a", 20)
        assert await line.answer("a") == (mesh.undisturbed_tokens(20), "length")
        assert leader.output.all(PlanChosen)[0].placement.sharding is Sharding.PIPELINE
        status = await line.status()
        assert status.ready and status.world_size == 2 and status.epoch == 1
        assert [row.host for row in status.ranks] == ["mac1", "mac2"]
        assert [row.layers for row in status.ranks] == ["1-3", "0-0"]
        assert all(row.phase is Phase.READY and row.weights_bytes == 4096 for row in status.ranks)
        assert all(row.last_heartbeat_s is not None for row in status.ranks)


async def test_one_host_with_two_slots_needs_no_port(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="local", slots=2)]
        mesh.coordinator = ""
        leader, line = await mesh.up()
        assert leader.output.all(AgentListening)[0].coordinator == ""
        assert [row.address for row in (await line.status()).ranks] == ["127.0.0.1"] * 2


async def test_world_size_one_is_the_same_code_without_a_data_group(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="local")]
        mesh.coordinator = ""
        leader, line = await mesh.up()
        line.submit("a", 3)
        assert await line.answer("a") == (mesh.undisturbed_tokens(3), "length")
        assert (await line.status()).sharding is Sharding.NONE
        assert any(log.line == "addresses []" for log in leader.output.all(LogLine))


async def test_each_host_loads_the_model_from_its_own_folder(run_mesh: Any, tmp_path: Path) -> None:
    async with run_mesh() as mesh:
        await mesh.start_leader()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        for file in mesh.model.iterdir():
            (elsewhere / file.name).write_bytes(file.read_bytes())
        mesh.start("mac2", model=str(elsewhere))
        leader = mesh.hosts["mac1"]
        log = await leader.output.wait_for(
            LogLine, lambda event: event.rank == 1 and event.line.startswith("model ")
        )
        assert log.line == f"model {elsewhere}"


async def test_the_followers_log_is_in_a_file_on_the_leader_with_rank_and_host(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        await mesh.up()
        text = (mesh.state / "mac1" / "test" / "logs" / "rank-1.log").read_text()
        assert "[1 mac2] engine of rank 1 in epoch 1" in text


async def test_a_missing_host_is_named_after_join_s(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, join_s=1.0)
        error = await failed(await mesh.start_leader())
        assert error.exit_code == ExitCode.BRING_UP
        assert error.message.startswith("rank 1 (host mac2) did not join within 1 s (join_s).")
        assert mesh.coordinator in error.message


async def test_a_follower_without_a_coordinator_ends_after_join_s(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, join_s=1.0)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            mesh.coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        error = await failed(mesh.start("mac2"))
        assert error.exit_code == ExitCode.BRING_UP
        assert mesh.coordinator in error.message and "nothing answers" in error.message


async def test_the_follower_may_be_started_first(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            mesh.coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        mesh.start("mac2")
        await mesh.hosts["mac2"].output.wait_for(object)
        leader = mesh.start("mac1")
        await leader.output.wait_for(MeshReady)


async def test_an_agent_with_another_secret_does_not_get_in(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, join_s=2.0)
        leader = await mesh.start_leader()
        stranger = mesh.start("mac2", secret="another secret, long enough too")
        assert "handshake failed" in (await failed(stranger)).message
        assert "failed the handshake" in (await failed(leader)).message


async def test_different_versions_are_a_table_of_hosts(run_mesh: Any, monkeypatch: Any) -> None:
    async with run_mesh() as mesh:
        leader = await mesh.start_leader()
        real = facts.gather_facts

        def older(*asked: str) -> Any:
            true = real(*asked)
            versions = msgspec.structs.replace(true.versions, mlx="0.31.0")
            return msgspec.structs.replace(true, versions=versions)

        await leader.output.wait_for(str, lambda note: note.startswith("joined"))
        monkeypatch.setattr(lifecycle, "gather_facts", older)
        follower = mesh.start("mac2")
        error = await failed(leader)
        assert error.exit_code == ExitCode.PREFLIGHT
        assert "mac1" in error.message and "mac2" in error.message and "0.31.0" in error.message
        assert await follower.ended() == ExitCode.PREFLIGHT
        assert not follower.output.all(AgentFailed) and follower.output.all(AgentStopped)


async def test_different_models_are_a_table_of_hosts(run_mesh: Any, tmp_path: Path) -> None:
    async with run_mesh() as mesh:
        other = tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_text("{}")
        (other / "model.safetensors").write_bytes(b"w")
        leader = await mesh.start_leader()
        mesh.start("mac2", model=str(other))
        error = await failed(leader)
        assert error.exit_code == ExitCode.PREFLIGHT and "different models" in error.message


async def test_an_adapter_that_one_host_lacks_or_has_otherwise_names_the_hosts(
    run_mesh: Any, tmp_path: Path
) -> None:
    config = '{"num_layers": 2, "lora_parameters": {"rank": 4, "scale": 1, "dropout": 0}}'
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(config)
        (tmp_path / name / "adapters.safetensors").write_text(name)
    for adapter, words in (
        (str(tmp_path / "nowhere"), f"mac2: the adapter folder {tmp_path / 'nowhere'} does not exist"),
        (str(tmp_path / "two"), "the hosts have different adapters"),
        ("", "(none)"),
    ):
        async with run_mesh() as mesh:
            leader = await mesh.start_leader(adapter=str(tmp_path / "one"))
            mesh.start("mac2", adapter=adapter)
            error = await failed(leader)
            assert error.exit_code == ExitCode.PREFLIGHT and words in error.message


async def test_a_missing_model_folder_names_host_and_folder(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader = await mesh.start_leader()
        mesh.start("mac2", model="/nowhere/model")
        error = await failed(leader)
        assert error.exit_code == ExitCode.PREFLIGHT
        assert "mac2: the model folder /nowhere/model does not exist" in error.message


async def test_a_model_that_cannot_be_inspected_is_told_in_the_childs_words(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        (mesh.model / "broken").touch()
        error = await failed(await mesh.start_leader())
        assert error.exit_code == ExitCode.PLACEMENT and "this model has no layers" in error.message


async def test_more_ranks_than_layers_are_refused_before_anything_is_loaded(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="mac1", slots=5)]
        leader = await mesh.start_leader()
        assert (await failed(leader)).exit_code == ExitCode.PLACEMENT
        assert "epoch 1" not in leader.output.text()


async def test_an_address_that_the_host_does_not_have_is_refused(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.plans = [HostPlan(name="mac1"), HostPlan(name="mac2", address="10.99.0.7")]
        leader = await mesh.start_leader()
        mesh.start("mac2")
        error = await failed(leader)
        assert error.exit_code == ExitCode.BRING_UP
        assert "host mac2" in error.message and "10.99.0.7" in error.message


async def test_a_taken_http_port_is_told_with_its_holder_before_anything_is_loaded(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            mesh.serve_port = taken.getsockname()[1]
            leader = mesh.start("mac1")
            error = await failed(leader)
        assert error.exit_code == ExitCode.PREFLIGHT
        assert f"127.0.0.1:{mesh.serve_port}" in error.message and "in use" in error.message
        assert not leader.output.all(AgentListening)


async def test_a_taken_coordinator_port_is_told(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            mesh.coordinator = f"127.0.0.1:{taken.getsockname()[1]}"
            error = await failed(mesh.start("mac1"))
        assert error.exit_code == ExitCode.BRING_UP and "in use" in error.message


async def test_a_host_that_is_not_expected_is_refused(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        await mesh.start_leader()
        error = await failed(mesh.start("mac9"))
        assert "mac9" in error.message and "not expected" in error.message and "mac2" in error.message


async def test_a_second_agent_of_a_live_host_is_refused_and_the_mesh_goes_on(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        _, line = await mesh.up()
        error = await failed(mesh.start("mac2", key="impostor"))
        assert "is in mesh test already" in error.message
        line.submit("a", 2)
        assert (await line.answer("a"))[1] == "length"


async def test_a_different_world_size_is_refused_with_both_numbers(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        await mesh.start_leader()
        error = await failed(mesh.start("mac2", world_size=3))
        assert "world size 3" in error.message and "has 2" in error.message


@pytest.mark.parametrize("announce", [True, False])
async def test_an_agent_that_is_told_to_announces_its_mesh_until_it_ends(
    run_mesh: Any, monkeypatch: pytest.MonkeyPatch, announce: bool
) -> None:
    log: list[str] = []

    class Announcer:
        def stop(self) -> None:
            log.append("goodbye")

    def start(mesh: str) -> Announcer:
        log.append(mesh)
        return Announcer()

    monkeypatch.setattr(lifecycle, "_announce", start)
    async with run_mesh() as mesh:
        await mesh.start_leader(announce=announce)
    assert log == (["test", "goodbye"] if announce else [])


async def test_a_second_run_of_a_live_mesh_on_this_host_is_refused_with_its_url(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, _ = await mesh.up()
        url = leader.output.all(MeshReady)[0].url
        second = lifecycle.AgentProcess(
            mesh.config("mac1"),
            programs=mesh.programs,
            state=mesh.state / "mac1",
            output=(out := type(leader.output)()),
        )
        assert await second.run() == ExitCode.ALREADY_RUNNING
        assert url in out.all(AgentFailed)[0].message


@pytest.mark.parametrize(
    ("point", "limit", "phase"),
    [
        ("spawn", "spawn_s", "starting"),
        ("load", "load_stall_s", "loading"),
        ("warm_up", "warmup_s", "warming"),
    ],
)
async def test_a_rank_that_hangs_is_named_with_phase_and_deadline(
    run_mesh: Any, point: str, limit: str, phase: str
) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, **{limit: 2.5})
        mesh.engine_script = {f"*.1.{point}": "hang"}
        leader = await mesh.start_leader()
        follower = mesh.start("mac2")
        error = await failed(leader)
        assert error.exit_code == ExitCode.BRING_UP
        assert f"rank 1 on mac2, phase {phase}" in error.message and f"{limit} = 2.5 s" in error.message
        assert "acting: hang" in error.message  # the guilty rank's last lines
        assert len(leader.output.all(EpochEnded)) == 1
        assert await follower.ended() == ExitCode.BRING_UP


async def test_a_connection_that_fails_once_is_retried_on_new_ports_and_said_aloud(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, connect_s=1.0)
        mesh.engine_script = {"1.1.connect": "hang"}
        leader, line = await mesh.up()
        first, *_, last = [
            log.line
            for log in leader.output.all(LogLine)
            if log.rank == 0 and log.line.startswith("addresses")
        ]
        assert first != last
        assert "new engines on new ports" in leader.output.text()
        assert leader.output.all(EpochEnded)[0].final is False
        assert (await line.status()).epoch == 2


async def test_a_connection_that_fails_twice_is_final(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(mesh.deadlines, connect_s=1.0)
        mesh.engine_script = {"*.0.connect": "fail:stray_peer"}
        leader = await mesh.start_leader()
        mesh.start("mac2")
        error = await failed(leader)
        assert "rank 0 on mac1" in error.message and "scripted stray_peer" in error.message
        assert "try 2" in error.message
        assert [ended.final for ended in leader.output.all(EpochEnded)] == [False, True]


async def test_a_deterministic_failure_is_not_retried(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.engine_script = {"*.1.load": "fail:memory"}
        leader = await mesh.start_leader()
        mesh.start("mac2")
        error = await failed(leader)
        assert "rank 1 on mac2, phase loading: scripted memory" in error.message
        assert len(leader.output.all(EpochEnded)) == 1


async def test_an_engine_that_loads_other_versions_is_refused(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.engine_script = {"1.1.spawn": "version:2"}
        leader = await mesh.start_leader()
        mesh.start("mac2")
        error = await failed(leader)
        assert error.exit_code == ExitCode.PREFLIGHT
        assert "loaded different versions" in error.message and "rank 1 on mac2" in error.message


async def test_an_engine_that_sends_nonsense_is_killed_and_told(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.engine_script = {"*.1.load": "garbage"}
        leader = await mesh.start_leader()
        mesh.start("mac2")
        assert "unreadable message" in (await failed(leader)).message


async def test_a_proxy_that_keeps_dying_ends_the_mesh_with_its_last_lines(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.proxy_script = {"start": "exit:1"}
        leader = await mesh.start_leader()
        error = await failed(leader)
        assert "HTTP proxy ended with status 1, 3 times in a row" in error.message
        assert "the proxy has a problem" in error.message


async def test_a_proxy_that_cannot_serve_this_model_is_started_once_and_its_own_status_is_told(
    run_mesh: Any,
) -> None:
    async with run_mesh() as mesh:
        mesh.proxy_script = {"start": "exit:3"}
        leader = await mesh.start_leader()
        error = await failed(leader)
        assert error.exit_code == ExitCode.PREFLIGHT
        assert "HTTP proxy ended with status 3. Its last lines:" in error.message
        assert "the proxy has a problem" in error.message
        assert len([log for log in leader.output.all(LogLine) if "proxy serves" in log.line]) == 1


async def test_a_leader_without_a_tokenizer_ends_at_once(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        (mesh.model / "tokenizer.json").unlink()
        error = await failed(mesh.start("mac1"))
        assert error.exit_code == ExitCode.PREFLIGHT and "has no tokenizer" in error.message


async def test_a_follower_needs_no_tokenizer(run_mesh: Any, tmp_path: Path) -> None:
    async with run_mesh() as mesh:
        bare = shutil.copytree(mesh.model, tmp_path / "bare")
        (bare / "tokenizer.json").unlink()
        leader = await mesh.start_leader()
        mesh.start("mac2", model=str(bare))
        await leader.output.wait_for(MeshReady)


async def test_http_answers_while_the_model_loads(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader = await mesh.start_leader()  # nobody else joins
        await leader.output.wait_for(LogLine, lambda log: "proxy serves" in log.line)
        record = (mesh.state / "mac1" / "test" / "agent-mac1.json").read_text()
        line = await mesh.connect(msgspec.json.decode(record)["url"])
        line.submit("a", 3)
        assert await line.answer("a") == ([], "failed: not_ready")


async def test_an_engine_program_that_cannot_be_started_is_told(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.engine_program = ("/nowhere/python",)
        leader = await mesh.start_leader()
        mesh.start("mac2")
        assert "cannot start /nowhere/python" in (await failed(leader)).message


async def test_nothing_is_left_in_the_state_folder_but_logs(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        leader, _ = await mesh.up()
        leader.process.stop("enough", hurry=False)
        await asyncio.gather(*(host.ended() for host in mesh.hosts.values()))
        left = sorted(path.name for path in mesh.state.rglob("*") if path.is_file())
        assert left == ["rank-0.log", "rank-1.log"]


def test_only_prefixes_that_every_rank_has_read_are_used_in_the_leaders_order() -> None:
    def rank(*keys: str) -> Any:
        return SimpleNamespace(reached={Phase.LOADED: PhaseReached(phase=Phase.LOADED, prefixes=keys)})

    roster: Any = SimpleNamespace(ranks=[rank("c", "a", "b"), rank("a", "b", "c", "d"), rank("b", "c")])
    assert common_prefixes(roster) == ("c", "b")
    roster.ranks.append(rank())
    assert common_prefixes(roster) == ()
