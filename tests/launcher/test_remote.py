"""Processes on this machine, lines, and programs sent over stdin."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlx_mesh.launcher import remote
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.programs.processes import end, started
from mlx_mesh.launcher.remote import (
    Exit,
    LineSplitter,
    LocalHost,
    ProgramFailed,
    clean_environment,
    expand_home,
    run,
    run_program,
    stream_program,
)


def test_a_command_runs_in_a_neutral_folder_with_its_own_streams() -> None:
    done = run(LocalHost("here"), ["/bin/sh", "-c", "pwd; cat; echo err >&2; exit 4"], b"in", 30)
    assert (done.stdout, done.stderr, done.exit) == (("/", "in"), ("err",), Exit(code=4))


def test_a_process_ended_by_a_signal_says_which() -> None:
    done = run(LocalHost("here"), ["/bin/sh", "-c", "kill -9 $$"], b"", 30)
    assert done.exit == Exit(signal=9) and "SIGKILL" in str(done.exit)


def test_an_interpreter_that_is_not_there_is_a_fault_with_the_fix() -> None:
    with pytest.raises(
        HostFault, match=r"here: interpreter: /no/python cannot be started .*set `python:"
    ) as caught:
        run(LocalHost("here"), ["/no/python"], b"", 30)
    assert caught.value.step == "interpreter"


def test_a_process_does_not_get_the_terminals_signals() -> None:
    done = run(
        LocalHost("here"),
        [sys.executable, "-I", "-c", "import os; print(os.getsid(0) == os.getpid())"],
        b"",
        30,
    )
    assert done.stdout == ("True",)


def test_secrets_and_rank_variables_do_not_reach_a_child() -> None:
    given = {
        "PATH": "/bin",
        "HOME": "/h",
        "MLX_MESH_API_KEY": "k",
        "RANK": "1",
        "MLX_RANK": "0",
        "PYTHONPATH": "/x",
    }
    assert clean_environment(given) == {"PATH": "/bin", "HOME": "/h"}


def test_only_a_leading_tilde_is_a_home_folder() -> None:
    assert expand_home("~/x") == f"{Path.home()}/x"
    assert expand_home("~x") == "~x" and expand_home("a~/x") == "a~/x"


def test_lines_are_put_together_and_long_ones_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_LINE_BYTES", 8)
    said: list[str] = []
    splitter = LineSplitter("stdout", lambda stream, line: said.append(line))
    for part in (b"on", b"e\r\ntw", b"o\n\n", b"0123456789", b"\xff end"):
        splitter.feed(part)
    splitter.finish()
    assert said == ["one", "two", "", "01234567", "89� end"]


def test_a_program_answers_behind_its_marker() -> None:
    answer = run_program(
        LocalHost("here"),
        sys.executable,
        "processes",
        {"do": "identify", "pids": [os.getpid(), 2**22 + 1]},
        30,
    )
    assert answer == {str(os.getpid()): started(os.getpid()), str(2**22 + 1): ""}


def test_a_program_that_fails_says_its_last_words() -> None:
    with pytest.raises(ProgramFailed, match=r"here: processes gave no answer.*KeyError"):
        run_program(LocalHost("here"), sys.executable, "processes", {"do": "identify"}, 30)


def test_a_process_is_ended_only_when_it_is_still_the_same() -> None:
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    since = started(child.pid)
    reaper = threading.Thread(target=child.wait)
    reaper.start()
    assert end(child.pid, "another time", 1, 1) == "other"
    assert end(child.pid, since, 5, 5) == "ended"
    reaper.join()
    assert end(child.pid, since, 1, 1) == "gone"
    assert child.stdin is not None
    child.stdin.close()


def test_a_process_that_ignores_term_is_killed() -> None:
    code = "import signal, sys; signal.signal(15, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    reaper = threading.Thread(target=child.wait)
    reaper.start()
    assert end(child.pid, started(child.pid), 0.3, 5) == "killed"
    reaper.join()
    child.stdin.close()
    child.stdout.close()


def test_logs_are_followed_over_a_rotation(state_home: Path) -> None:
    logs = state_home / "mlx-mesh" / "m" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("".join(f"old {number}\n" for number in range(100)))
    (logs / "rank-0.log.1").write_text("older\n")
    (logs / "rank-1.log").write_text("other rank\n")
    request = {"name": "m", "rank": 0, "num_lines": 2, "follow": True}
    answers = stream_program(LocalHost("here"), sys.executable, "tail_log", request)
    seen: list[object] = []

    def until(wanted: object) -> None:
        for answer in answers:
            if answer is not None:
                seen.append(answer.get("line", "summary"))
                if seen[-1] == wanted:
                    return

    until("summary")
    assert seen == ["old 98", "old 99", "summary"]
    with (logs / "rank-0.log").open("a") as file:
        file.write("new\n")
    until("new")
    (logs / "rank-0.log").rename(logs / "rank-0.log.1")
    (logs / "rank-0.log").write_text("after rotation\n")
    until("after rotation")
    answers.close()  # type: ignore[attr-defined]
