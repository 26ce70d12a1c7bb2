"""Real signals to real ranks of a busy mesh, over and over: see scripts/chaos.py for what is checked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_chaos(tokenizer: Path, *arguments: str, within_s: float) -> None:
    run_script("chaos.py", tokenizer, *arguments, within_s=within_s)


def run_script(name: str, tokenizer: Path, *arguments: str, within_s: float) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), "--tokenizer", str(tokenizer), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within_s,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout


@pytest.mark.two_rank
@pytest.mark.real_model
@pytest.mark.timeout(700)
def test_three_recoveries_cost_no_request_and_no_token(smollm2: Path) -> None:
    run_chaos(smollm2, "--recoveries", "3", "--limit-s", "420", within_s=660)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_hundred_recoveries_cost_no_request_and_no_token(smollm2: Path) -> None:
    run_chaos(smollm2, "--recoveries", "200", "--limit-s", "6000", "--seed", "2", within_s=7000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_recoveries_of_a_real_model_cost_no_request_and_no_token(smollm2: Path) -> None:
    arguments = ("--model", str(smollm2), "--recoveries", "20", "--limit-s", "2400", "--seed", "3")
    run_chaos(smollm2, *arguments, within_s=3300)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_half_an_hour_of_mixed_load_makes_nothing_grow(smollm2: Path) -> None:
    run_script("soak.py", smollm2, "--minutes", "30", within_s=2400)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_chaos_run_that_is_ended_ends_its_mesh(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--tokenizer", str(smollm2)]
    log = tmp_path / "log"
    with log.open("w") as output:
        run = subprocess.Popen([*command, "--ranks", "2"], stdout=output, stderr=output)
        deadline = time.monotonic() + 200
        while "ready after" not in log.read_text():
            assert run.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(90) == 1
    assert "ended by SIGTERM" in log.read_text() and "left running" not in log.read_text()
