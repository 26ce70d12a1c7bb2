"""Children and their ends: heard, stopped, killed, and never mistaken for somebody else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.errors import AlreadyRunningError
from mlx_mesh.node import processes
from mlx_mesh.node.blas import engine_environment, find_openblas, parse_ldconfig
from mlx_mesh.node.children import LAST_LINES, Child, child_environment
from mlx_mesh.node.run_file import RunFile, safe_name, state_root

WITHIN_S = 20.0


async def start(code: str, lines: list[str]) -> tuple[Child, socket.socket]:
    """A child that runs `code`; its --fd is argv[2]."""
    return await Child.start(
        [sys.executable, "-I", "-u", "-c", code], lines.append, environment=child_environment()
    )


async def test_a_child_has_its_end_of_a_socket_pair_and_is_heard_line_by_line() -> None:
    lines: list[str] = []
    code = (
        "import os,socket,sys; s=socket.socket(fileno=int(sys.argv[2]));"
        "print('got', s.recv(9).decode());"
        "print('a\\rb'); os.write(2, b'\\xff bad\\nno newline');"
        "print(os.getcwd(), os.getsid(0) == os.getpid())"
    )
    child, ours = await start(code, lines)
    with ours:
        ours.sendall(b"a message")
        async with asyncio.timeout(WITHIN_S):
            assert await child.wait() == 0
    assert lines == ["got a message", "a", "b", "\ufffd bad", "no newline/ True"]


async def test_only_the_last_lines_are_kept_and_long_ones_are_cut() -> None:
    child, ours = await start("[print(i) for i in range(1000)]; print('x' * 100_000)", [])
    with ours:
        await asyncio.wait_for(child.wait(), WITHIN_S)
    assert len(child.last_lines) == LAST_LINES
    assert all(len(line) <= 70_000 for line in child.last_lines)


async def test_a_child_that_ignores_term_is_killed_after_its_time() -> None:
    lines: list[str] = []
    code = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
        "time.sleep(60)"
    )
    child, ours = await start(code, lines)
    with ours:
        async with asyncio.timeout(WITHIN_S):
            while not lines:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await child.stop(0.2) == -signal.SIGKILL


async def test_a_stopped_child_can_be_killed_with_its_own_children() -> None:
    lines: list[str] = []
    code = (
        "import os,signal,subprocess,sys; p=subprocess.Popen(['sleep','60']); print(p.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    child, ours = await start(code, lines)
    with ours:
        async with asyncio.timeout(WITHIN_S):
            while not lines:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            grandchild = processes.identify(int(lines[0]))
            assert grandchild is not None
            await child.kill()
            while processes.is_alive(grandchild):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_program_that_does_not_exist_is_an_error_and_leaves_no_descriptor() -> None:
    with pytest.raises(OSError):
        await Child.start(["/nowhere/python"], print, environment={})


def test_a_child_sees_no_foreign_rank_no_secret_and_no_dangerous_switch(monkeypatch: Any) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MLX_METAL_FAST_SYNCH",
        "MLX_MESH_SECRET",
        "PYTHONPATH",
        "PAIRED_HOST",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HOME_GROWN", "kept")
    environment = child_environment({"LD_PRELOAD": "lib"})
    assert environment["HOME_GROWN"] == "kept" and environment["LD_PRELOAD"] == "lib"
    assert not {"RANK", "WORLD_SIZE", "PAIRED_HOST", "PYTHONPATH"} & environment.keys()
    assert not any(name.startswith("MLX_") for name in environment)


# ---------------------------------------------------------------- OpenBLAS


def test_openblas_is_found_where_distributions_put_it(tmp_path: Path) -> None:
    assert find_openblas(tmp_path) == ""
    for place in ("usr/lib64", "usr/lib/x86_64-linux-gnu/openblas-pthread"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "libopenblas.so.0").touch()
        assert find_openblas(tmp_path) == str(tmp_path / place / "libopenblas.so.0")


def test_ldconfig_knows_other_places() -> None:
    output = "2 libs found\n\tlibopenblas.so.0 (libc6,x86-64) => /opt/lib/libopenblas.so.0\n"
    assert parse_ldconfig(output) == "/opt/lib/libopenblas.so.0"
    assert parse_ldconfig("libblas.so.3 (libc6) => /x\n") == ""


def test_what_the_user_preloads_and_sets_stays() -> None:
    assert engine_environment("", {"LD_PRELOAD": "x"}) == {}
    assert engine_environment("/b", {}) == {"LD_PRELOAD": "/b", "OPENBLAS_NUM_THREADS": "1"}
    mine = engine_environment("/b", {"LD_PRELOAD": "/a", "OPENBLAS_NUM_THREADS": "4"})
    assert mine == {"LD_PRELOAD": "/b:/a", "OPENBLAS_NUM_THREADS": "4"}


# ---------------------------------------------------------------- processes and run files


def test_a_stat_line_is_read_behind_a_hostile_name() -> None:
    stat = "42 (a) b) S " + " ".join(str(number) for number in range(4, 30))
    assert processes.parse_stat(stat) == ("S", "22")


def test_a_pid_with_another_start_time_is_another_process() -> None:
    me = processes.identify(os.getpid())
    assert me is not None and processes.is_alive(me)
    assert not processes.is_alive(processes.ProcessId(pid=me.pid, start_time="then"))


async def test_a_zombie_is_gone() -> None:
    child = await asyncio.create_subprocess_exec("true")
    await child.wait()
    assert processes.identify(child.pid) is None


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with status 3"), (-9, "was killed by SIGKILL"), (-250, "signal 250")]
)
def test_exits_have_words(code: int, words: str) -> None:
    assert words in processes.describe_exit(code)


def test_a_run_file_is_taken_once_and_given_back(tmp_path: Path) -> None:
    run_file, notes = RunFile.claim(tmp_path, "mesh", "mac1", "run")
    assert notes == []
    run_file.update(url="http://127.0.0.1:1")
    with pytest.raises(AlreadyRunningError, match=rf"at http://127.0.0.1:1: agent mac1, pid {os.getpid()}"):
        RunFile.claim(tmp_path, "mesh", "mac1", "other")
    RunFile.claim(tmp_path, "mesh", "mac2", "run")[0].release()
    run_file.release()
    RunFile.claim(tmp_path, "mesh", "mac1", "other")[0].release()


def test_a_damaged_run_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "agent-mac1.json").write_text("{")
    RunFile.claim(tmp_path, "mesh", "mac1", "run")[0].release()


def test_names_become_one_part_of_a_path() -> None:
    assert safe_name("../up down") == "_up_down" and safe_name("studio.lan") == "studio.lan"


def test_the_state_folder_follows_xdg(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_root() == tmp_path / "mlx-mesh"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_root() == Path.home() / ".local" / "state" / "mlx-mesh"
