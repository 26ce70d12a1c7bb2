"""The archive for a bug report: what is in it, and what must be nowhere in it."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.launcher import report as module
from mlx_mesh.launcher.cli import main
from mlx_mesh.launcher.report import Part, write
from mlx_mesh.mesh.errors import ExitCode, SettingsError

PLANTED = (
    "zebra-station",  # a host
    "zebra-station.example.net",
    "wilhelmina",  # a user
    "/Users/wilhelmina/Secret Project",
    "hf_QWERTYUIOPasdfghjkl",
    "sk-planted-api-key-1234567890",
    "my-very-own-key-0123456789",
    "Tell me how to bake rhubarb crumble",
    "rhubarb",
    "93.184.216.34",
    "A8:20:66:12:34:56",
)


def texts(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        assert all((m.uid, m.gid, m.uname, m.gname, m.mtime) == (0, 0, "", "", 0) for m in members)
        found = {}
        for member in members:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("mlx-mesh-report/")] = file.read().decode()
        return found


@pytest.fixture
def planted(
    tmp_path: Path, fake_python: Callable[..., Any], state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A mesh that ran on a host of that name, and whose files are full of what is nobody's business."""
    fake = fake_python("a")
    fake.set_facts(hostname="zebra-station.example.net", addresses=["127.0.0.1", "93.184.216.34"])
    logs = state_home / "mlx-mesh" / "wilhelminas-mesh" / "logs"
    logs.mkdir(parents=True)
    lines = [
        "2026-11-30 04:50:40,517 [0 zebra-station] epoch 1: its engine started (pid 19224)",
        "2026-11-30 04:50:41,517 [0 zebra-station] Tell me how to bake rhubarb crumble",
        '2026-11-30 04:50:42,517 [0 zebra-station] {"prompt": "Tell me how to bake rhubarb crumble"}',
        "2026-11-30 04:50:43,517 [0 zebra-station] key my-very-own-key-0123456789 hf_QWERTYUIOPasdfghjkl",
        "2026-11-30 04:50:44,517 [0 zebra-station] sk-planted-api-key-1234567890 A8:20:66:12:34:56",
        "2026-11-30 04:50:45,517 [0 zebra-station] /Users/wilhelmina/Secret Project/model 93.184.216.34",
    ]
    (logs / "rank-0.log").write_text("\n".join(lines) + "\n")
    (logs.parent / "launcher.log").write_text("zebra-station: rhubarb\n[0 zebra-station] loading 3/16\n")
    monkeypatch.setenv("MLX_MESH_API_KEY", "my-very-own-key-0123456789")
    hostfile = tmp_path / "hosts.yaml"
    hostfile.write_text(
        "name: wilhelminas-mesh\nmodel: /Users/wilhelmina/Secret Project/SmolLM2-135M\n"
        f"hosts:\n  - {{name: zebra-station, local: true, python: {fake.python}}}\n"
    )
    return hostfile


def test_nothing_that_was_planted_is_in_the_archive(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.tar.gz"
    assert main(["report", str(planted), "--output", str(path)]) == ExitCode.OK
    found = texts(path)
    everything = "\n".join(found.values()).lower()
    assert [each for each in PLANTED if each.lower() in everything] == []
    log = found["logs/rank-0.log"]
    assert "2026-11-30 04:50:40,517 [0 host-1] epoch 1: its engine started (pid 19224)" in log
    assert len(log.splitlines()) == 6
    assert "[0 host-1] loading 3/16" in found["launcher.log"]
    assert {"versions.txt", "hosts.json", "plan.txt", "doctor.txt", "status.txt", "hostfile.txt"} <= set(
        found
    )
    assert '"mlx": "0.32.4"' in found["hosts.json"]
    assert "layers 0-3" in found["plan.txt"] or "all layers" in found["plan.txt"]
    assert "No mesh named mesh-1 runs here" in found["status.txt"]
    shown = capsys.readouterr().out
    for name in found:
        assert name in shown
    assert "Look at it before you send it" in shown


def test_it_is_made_also_when_a_host_cannot_be_reached(planted: Path, tmp_path: Path) -> None:
    planted.write_text(planted.read_text().replace("python: /", "python: /no/such"))
    path = tmp_path / "report.tar.gz"
    assert main(["report", str(planted), "--output", str(path)]) == ExitCode.OK
    found = texts(path)
    assert "not all hosts are ready" in found["hosts.txt"]
    assert "host-1: interpreter" in found["doctor.txt"]


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    path.write_text("mine")
    with pytest.raises(SettingsError, match=r"cannot be written .* Give another --output"):
        write(path, [Part("a.txt", "x")])
    assert path.read_text() == "mine"


def test_a_mesh_that_is_not_known_is_refused(state_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del state_home
    config, folder = module.target_of(None, None, None, {})
    assert (config.name, [host.is_local for host in config.hosts]) == ("report", [True])
    assert folder.name == "report"


def test_the_vocabulary_has_our_words_and_not_those_of_a_cook(state_home: Path) -> None:
    del state_home
    config, _ = module.target_of(None, "/x/SmolLM2", None, {})
    words = module.vocabulary(config)
    assert {"epoch", "coordinator", "thunderbolt", "valueerror", "smollm2", ["generate", "step"][0]} <= words
    assert not {"rhubarb", "crumble", "wilhelmina"} & words
