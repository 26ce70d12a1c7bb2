"""Real signals to real ranks of a busy mesh, over and over: see scripts/chaos.py for what is checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_chaos(tokenizer: Path, *arguments: str, within_s: float) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--tokenizer", str(tokenizer), *arguments],
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
def test_twelve_recoveries_cost_no_request_and_no_token(smollm2: Path) -> None:
    run_chaos(smollm2, "--recoveries", "12", "--limit-s", "420", within_s=660)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_hundred_recoveries_cost_no_request_and_no_token(smollm2: Path) -> None:
    run_chaos(smollm2, "--recoveries", "200", "--limit-s", "6000", "--seed", "2", within_s=7000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_recoveries_of_a_real_model_cost_no_request_and_no_token(smollm2: Path) -> None:
    arguments = ("--model", str(smollm2), "--recoveries", "20", "--limit-s", "2400", "--seed", "3")
    run_chaos(smollm2, *arguments, within_s=3300)
