"""`mlx-mesh net plan --apply`: what is run, what is noted, and what is left to a host's user."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_mesh.launcher import net_command
from mlx_mesh.launcher.asking import Answer
from mlx_mesh.launcher.net_command import Notes, apply_host, cable_reached_over, lines, sudo, undo_of
from mlx_mesh.launcher.remote import LocalHost
from mlx_mesh.mesh.doctor import Examined
from mlx_mesh.mesh.errors import ExitCode, MeshError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.net_plan import HostSteps, NetPlan, Step, plan_network

SUDO = """#!/bin/sh
# Stands for sudo: notes what it runs; "refuse" beside it makes it ask, and "fail" names what does not work.
here=${0%/*}
[ "$1" = -n ] || { echo "sudo would ask here" >&2; exit 9; }
shift
[ ! -e "$here/refuse" ] || { echo "sudo: a password is required" >&2; exit 1; }
echo "$*" >> "$here/calls"
[ "$*" != "$(cat "$here/fail" 2>/dev/null)" ] || { echo "** Error: no such service" >&2; exit 4; }
"""


@pytest.fixture
def box(tmp_path: Path) -> tuple[LocalHost, Path]:
    """This machine with a sudo of its own, in a folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sudo").write_text(SUDO)
    (folder / "sudo").chmod(0o755)
    return LocalHost("mac1", {"PATH": f"{folder}:/usr/bin:/bin"}), folder


def step(number: int) -> Step:
    return Step(words=("do", f"it {number}"), undo=("undo", f"it {number}"), why=f"why {number}")


STEPS = HostSteps(host="mac1", steps=(step(1), step(2), step(3)))


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def noted(notes: Notes) -> list[str]:
    return [" ".join(done.words) for done in notes.read().get("id", [])]


def test_steps_are_run_in_order_and_noted_with_their_undo(
    box: tuple[LocalHost, Path], tmp_path: Path
) -> None:
    host, folder = box
    notes = Notes(tmp_path / "state" / "net-undo.json")
    assert apply_host(host, STEPS, "id", notes, is_undo=False) == []
    assert calls(folder) == ["true", "do it 1", "do it 2", "do it 3"]
    assert notes.read() == {"id": list(STEPS.steps)}


def test_where_sudo_asks_nothing_is_run_and_the_user_is_told(
    box: tuple[LocalHost, Path], tmp_path: Path
) -> None:
    host, folder = box
    (folder / "refuse").touch()
    notes = Notes(tmp_path / "net-undo.json")
    (told,) = apply_host(host, STEPS, "id", notes, is_undo=False)
    assert "a password is required" in told and "by hand" in told
    assert calls(folder) == [] and notes.read() == {}


def test_a_step_that_fails_ends_it_there_and_the_rest_is_told(
    box: tuple[LocalHost, Path], tmp_path: Path
) -> None:
    host, folder = box
    (folder / "fail").write_text("do it 2")
    notes = Notes(tmp_path / "net-undo.json")
    (told,) = apply_host(host, STEPS, "id", notes, is_undo=False)
    assert "no such service" in told and told.endswith("Left to do there: sudo do 'it 2'; sudo do 'it 3'")
    assert noted(notes) == ["do it 1"]


def answers_of(macs: ModuleType, made: Sequence[object]) -> list[Answer]:
    return [
        Answer(
            HostEntry(name=f"mac{number}", ssh=f"mac{number}"),
            (),
            Examined(name=f"mac{number}", report=macs.report_of(mac), is_leader=number == 1),
        )
        for number, mac in enumerate(made, 1)
    ]


def test_an_undo_takes_back_what_was_noted_newest_first_and_forgets_it(
    box: tuple[LocalHost, Path], tmp_path: Path, macs: ModuleType
) -> None:
    host, folder = box
    answers = answers_of(macs, macs.mesh_of(macs.Mac(), 2, macs.full_mesh(2)))
    assert answers[0].examined is not None
    key = answers[0].examined.report.hardware_uuid
    notes = Notes(tmp_path / "net-undo.json")
    apply_host(host, STEPS, key, notes, is_undo=False)
    plan = undo_of(answers, notes)
    assert [s.command for s in plan.hosts[0].steps] == [f"sudo undo 'it {n}'" for n in (3, 2, 1)]
    assert plan.hosts[1].steps == ()
    (folder / "fail").write_text("undo it 2")
    assert apply_host(host, plan.hosts[0], key, notes, is_undo=True)
    assert notes.read() == {key: [step(1), step(2)]}  # goes on there the next time
    (folder / "fail").unlink()
    assert apply_host(host, undo_of(answers, notes).hosts[0], key, notes, is_undo=True) == []
    assert notes.read() == {} and undo_of(answers, notes).is_done


def test_notes_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "net-undo.json").write_text("{")
    with pytest.raises(MeshError, match=r"net-undo\.json.* cannot be read"):
        Notes(tmp_path / "net-undo.json").read()


def test_macs_own_errors_with_status_0_count(box: tuple[LocalHost, Path]) -> None:
    """networksetup prints some of its errors and ends well."""
    host, folder = box
    (folder / "sudo").write_text("#!/bin/sh\necho '** Error: The parameters were not valid.'\n")
    assert "not valid" in sudo(host, ["networksetup", "-setmanual"])


def test_the_cable_over_which_a_host_is_reached_is_not_taken_away_from_under_it(macs: ModuleType) -> None:
    report = macs.report_of(macs.Mac(is_bridged=True, bridge=("169.254.2.2/16",)))
    assert cable_reached_over("169.254.2.2", report) == "bridge0 (Thunderbolt Bridge)"
    assert cable_reached_over("192.168.1.1", report) == cable_reached_over("", report) == ""


def test_people_see_cables_commands_reasons_and_the_way_back(macs: ModuleType) -> None:
    made = macs.mesh_of(macs.Mac(is_bridged=True), 2, macs.full_mesh(2))
    plan = plan_network([(f"mac{mac.number}", macs.report_of(mac)) for mac in made])
    text = "\n".join(lines(plan, is_undo=False))
    assert "cable: mac1 en2 10.201.77.1/30 - mac2 en2 10.201.77.2/30" in text
    assert "on mac2, in this order:" in text and "members of bridge0" in text
    assert text.count("to undo:") == 2 and "Bridge' on" in text
    assert lines(NetPlan(), is_undo=False) == ["Nothing is to be done."]


def test_commands_that_would_cut_off_their_own_connection_are_left_to_the_user(
    macs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = answers_of(macs, [macs.Mac(is_bridged=True, bridge=("169.254.2.2/16",))])
    remote = SimpleNamespace(peer_address="169.254.2.2")
    monkeypatch.setattr(net_command, "_opened", lambda *_: contextlib.nullcontext(remote))
    monkeypatch.setattr(net_command, "apply_host", lambda *_, **__: pytest.fail("it was carried out"))
    config: Any = SimpleNamespace(hosts=[answer.entry for answer in answers], ssh_config="")
    plan = NetPlan(hosts=(STEPS,))
    status = net_command._apply(plan, answers, config, Notes(tmp_path / "n"), is_undo=False)
    assert status == ExitCode.PREFLIGHT
    assert "mac1 is reached over bridge0 (Thunderbolt Bridge)" in capsys.readouterr().out
