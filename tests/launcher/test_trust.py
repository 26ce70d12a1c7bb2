"""`mlx-mesh trust`: what is shown, who is asked, and what is written, with real SSH servers on loopback."""

from __future__ import annotations

import io
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.launcher.cli import main
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.ssh import SshHost, find_route
from mlx_mesh.launcher.trust_command import trust
from mlx_mesh.mesh.errors import ExitCode, SettingsError

StartSshd = Callable[..., Any]


def fingerprint_of(path: Path) -> str:
    done = subprocess.run(["ssh-keygen", "-lf", str(path)], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


@pytest.fixture
def box(start_sshd: StartSshd) -> Any:
    sshd = start_sshd("a")
    sshd.known_hosts.unlink()
    sshd.add_host("box")
    return sshd


def connects(sshd: Any) -> bool:
    SshHost.connect("box", find_route("box", "box", "", str(sshd.config))).close()
    return True


@pytest.mark.parametrize(("answer", "is_recorded"), [("yes\n", True), ("no\n", False), ("", False)])
def test_a_person_is_shown_the_fingerprint_and_asked(
    box: Any, answer: str, is_recorded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    try:
        trust("box", config_file=str(box.config), ask=io.StringIO(answer), say=said.append)
    except SettingsError as refusal:
        assert not is_recorded and "was not recorded" in str(refusal)
    assert f"ssh-ed25519 {fingerprint_of(Path(f'{box.host_key}.pub'))}" in said[0]
    assert "Is it the same?" in capsys.readouterr().out
    assert box.known_hosts.exists() == is_recorded
    if is_recorded:
        assert connects(box) and stat.S_IMODE(box.known_hosts.stat().st_mode) == 0o600


def test_without_a_person_nothing_is_recorded_and_both_flags_are_named(box: Any) -> None:
    with pytest.raises(SettingsError, match=r"--fingerprint SHA256:\S+, or --yes"):
        trust("box", config_file=str(box.config))
    assert not box.known_hosts.exists()


def test_yes_and_the_right_fingerprint_record_it_and_another_one_does_not(
    box: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trust", "box", "--ssh-config", str(box.config)]
    assert main([*words, "--fingerprint", "SHA256:nothing"]) == ExitCode.PREFLIGHT
    told = capsys.readouterr().err
    assert "SHA256:nothing was asked for" in told and fingerprint_of(Path(f"{box.host_key}.pub")) in told
    assert not box.known_hosts.exists()
    assert main([*words, "--yes"]) == 0 and connects(box)
    written = box.known_hosts.read_text()
    assert main([*words, "--fingerprint", fingerprint_of(Path(f"{box.host_key}.pub"))]) == 0
    assert "is known" in capsys.readouterr().out
    assert main([*words, "--fingerprint", "SHA256:nothing"]) == ExitCode.PREFLIGHT  # known, and not that one
    assert box.known_hosts.read_text() == written


def test_a_changed_key_is_refused_with_both_fingerprints_whatever_is_said(
    box: Any, start_sshd: StartSshd
) -> None:
    other = start_sshd("b")
    line = f"[127.0.0.1]:{box.port} {' '.join(other.public_host_key().split()[:2])}\n"
    box.known_hosts.write_text(line)
    shown, recorded = (fingerprint_of(Path(f"{sshd.host_key}.pub")) for sshd in (box, other))
    for flags in ({"is_sure": True}, {"wanted": shown}):
        with pytest.raises(HostFault, match="CHANGED host key") as caught:
            trust("box", config_file=str(box.config), **flags)
        assert shown in str(caught.value) and recorded in str(caught.value)
    assert box.known_hosts.read_text() == line


def test_a_key_of_another_type_is_no_second_key_by_itself(
    box: Any, tmp_path: Path, start_sshd: StartSshd
) -> None:
    """A stranger in the middle has no key of the recorded type, and would show one of another."""
    rsa = tmp_path / "rsa"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(rsa)], check=True, timeout=60
    )
    line = f"[127.0.0.1]:{box.port} {' '.join(Path(f'{rsa}.pub').read_text().split()[:2])}\n"
    box.known_hosts.write_text(line)
    with pytest.raises(HostFault, match=r"another key of this host is recorded .* has only its ssh-rsa key"):
        trust("box", config_file=str(box.config), is_sure=True)
    assert box.known_hosts.read_text() == line
    trust("box", config_file=str(box.config), wanted=fingerprint_of(Path(f"{box.host_key}.pub")))
    assert box.known_hosts.read_text().startswith(line) and connects(box)


def test_names_are_hashed_where_the_settings_say_so_and_a_line_without_an_end_stays_whole(
    start_sshd: StartSshd,
) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box", "HashKnownHosts yes")
    sshd.known_hosts.write_text("elsewhere ssh-ed25519 AAAA")
    trust("box", config_file=str(sshd.config), is_sure=True)
    first, second = sshd.known_hosts.read_text().splitlines()
    assert first == "elsewhere ssh-ed25519 AAAA" and second.startswith("|1|") and connects(sshd)
    if shutil.which("ssh-keygen"):
        found = subprocess.run(
            ["ssh-keygen", "-F", f"[127.0.0.1]:{sshd.port}", "-f", str(sshd.known_hosts)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stderr


def test_a_host_that_is_not_there_and_a_bad_name_are_told_as_anywhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trust", "nowhere.invalid", "--yes"]) == ExitCode.PREFLIGHT
    assert "nowhere.invalid: resolve: " in capsys.readouterr().err
    assert main(["trust", "ssh://box", "--yes"]) == ExitCode.USAGE
    assert main(["trust", "a", "b", "--fingerprint", "SHA256:x"]) == ExitCode.USAGE
    assert main(["trust", "a", "--fingerprint", "MD5:x"]) == ExitCode.USAGE
