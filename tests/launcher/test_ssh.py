"""Real SSH to a server on loopback: every way in which it can go wrong names its step and the repair."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_mesh.launcher import known_hosts, ssh_connect
from mlx_mesh.launcher.cli import main
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.remote import CommandTimeout, Exit, run, run_program
from mlx_mesh.launcher.ssh import SshHost, find_route

StartSshd = Callable[..., "Sshd"]


class Sshd:  # the shape of conftest's, for the type checker
    folder: Path
    port: int
    host_key: Path
    user_key: Path
    known_hosts: Path
    config: Path
    process: subprocess.Popen[bytes]

    def add_host(self, alias: str, *lines: str, port: int | None = None, host_name: str = "") -> None: ...

    def public_host_key(self) -> str:
        raise NotImplementedError


@contextmanager
def connected(sshd: Sshd, alias: str = "box", user: str = "") -> Iterator[SshHost]:
    host = SshHost.connect("mac1", find_route("mac1", alias, user, str(sshd.config)))
    try:
        yield host
    finally:
        host.close()


def refused(sshd: Sshd, alias: str = "box", user: str = "") -> HostFault:
    with pytest.raises(HostFault) as caught, connected(sshd, alias, user):
        pass
    assert caught.value.host == "mac1"
    return caught.value


def test_a_command_runs_and_its_streams_and_status_come_back(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    with connected(sshd) as host:
        done = run(host, ["/bin/sh", "-c", "cat; echo err >&2; exit 3"], b"given\n", 30)
        assert (done.stdout, done.stderr, done.exit) == (("given",), ("err",), Exit(code=3))
        assert (host.local_address, host.peer_address) == ("127.0.0.1", "127.0.0.1")


def test_words_arrive_as_they_are_whatever_they_contain(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    words = ["a b", "$HOME", "`id`", "*", "x;y", '"q"', "#c", "&&", "(", "~", "é"]
    with connected(sshd) as host:
        done = run(host, ["/usr/bin/printf", "%s|", *words], b"", 30)
    assert done.stdout == ("|".join(words) + "|",)


def test_a_leading_tilde_is_the_home_folder_of_the_host(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    with connected(sshd) as host:
        done = run(host, ["/usr/bin/printf", "%s", "~/with space/x"], b"", 30)
    assert done.stdout == (str(Path("~").expanduser() / "with space/x"),)


def test_a_word_that_shells_read_differently_is_refused(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    with connected(sshd) as host, pytest.raises(HostFault, match="which shells read in different ways"):
        run(host, ["/bin/echo", "it's"], b"", 30)


def test_a_profile_that_prints_and_changes_path_does_not_disturb_a_program(
    start_sshd: StartSshd, tmp_path: Path
) -> None:
    (tmp_path / ".bashrc").write_text('echo "Welcome!"; echo "{}"; echo oops >&2; PATH=/nowhere; cd /proc\n')
    sshd = start_sshd("a", f"SetEnv HOME={tmp_path}")
    sshd.add_host("box")
    with connected(sshd) as host:
        heard = run(host, ["/bin/pwd"], b"", 30)
        if "Welcome!" not in heard.stdout:
            pytest.skip("the login shell here is not bash, which reads .bashrc under sshd")
        answer = run_program(host, sys.executable, "processes", {"do": "identify", "pids": [os.getpid()]}, 30)
    assert answer[str(os.getpid())]


def test_a_command_that_is_late_is_given_up(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    with connected(sshd) as host, pytest.raises(CommandTimeout, match=r"did not answer within 0\.5 s"):
        run(host, ["/bin/sleep", "5"], b"", 0.5)


def run_trust(command: str, fingerprint: str) -> None:
    """The printed command, with the fingerprint that a person would have compared."""
    program, *words = shlex.split(command)
    assert program == "mlx-mesh"
    assert main([*words, "--fingerprint", fingerprint]) == 0


def test_an_unknown_host_key_is_refused_and_the_printed_command_repairs_it(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    sshd.known_hosts.write_text("")
    fault = refused(sshd)
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", f"{sshd.host_key}.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert fault.step == "host key"
    assert "UNKNOWN host key" in fault.seen and "CHANGED" not in fault.seen and fingerprint in fault.seen
    assert sshd.known_hosts.read_text() == ""  # nothing was accepted silently
    run_trust(fault.fix.partition("add it: ")[2], fingerprint)
    with connected(sshd):
        pass


def test_a_changed_host_key_is_refused_and_the_printed_commands_repair_it(start_sshd: StartSshd) -> None:
    sshd, other = start_sshd("a"), start_sshd("b")
    sshd.add_host("box")
    sshd.known_hosts.write_text(
        f"# comment\n[127.0.0.1]:{sshd.port} {' '.join(other.public_host_key().split()[:2])}\n"
    )
    fault = refused(sshd)
    assert fault.step == "host key"
    assert "CHANGED host key" in fault.seen and f"{sshd.known_hosts} line 2" in fault.seen
    forget, _, add = fault.fix.partition("forget the old key: ")[2].partition(" and add the new one: ")
    words = shlex.split(forget)
    assert words[:2] == ["ssh-keygen", "-R"]
    subprocess.run(words, check=True, capture_output=True)
    assert "UNKNOWN" in refused(sshd).seen
    run_trust(add, str(known_hosts.fingerprint(sshd.public_host_key().split()[1])))
    with connected(sshd):
        pass


def test_a_revoked_host_key_is_refused_even_when_it_is_known(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    key = " ".join(sshd.public_host_key().split()[:2])
    sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {key}\n@revoked * {key}\n")
    assert "REVOKED host key" in refused(sshd).seen


def test_a_host_key_is_found_by_its_alias(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box", "HostKeyAlias studio")
    assert "studio is in no known_hosts file" in refused(sshd).seen
    sshd.known_hosts.write_text(f"studio {' '.join(sshd.public_host_key().split()[:2])}\n")
    with connected(sshd):
        pass


def test_a_host_known_by_another_key_type_only_is_asked_for_that_type(
    start_sshd: StartSshd, tmp_path: Path
) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(tmp_path / "rsa")], check=True
    )
    sshd = start_sshd("a", f"HostKey {tmp_path / 'rsa'}")
    sshd.add_host("box")
    public = (tmp_path / "rsa.pub").read_text().split()
    sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {public[0]} {public[1]}\n")
    with connected(sshd):
        pass


def test_a_wrong_key_is_told_with_its_file_and_how_to_install_it(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    (sshd.folder / "authorized_keys").write_text("")
    fault = refused(sshd)
    assert fault.step == "auth"
    assert f"refused {sshd.user_key}" in fault.seen and "SHA256:" in fault.seen
    assert "ssh-copy-id" in fault.fix


def test_a_host_without_any_key_to_offer_says_so(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    for path in (sshd.user_key, Path(f"{sshd.user_key}.pub")):
        path.unlink()
    assert "there is no key to offer" in refused(sshd).seen


def test_a_key_with_a_passphrase_is_not_asked_for_and_ssh_add_is_named(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(sshd.user_key)], check=True, stdout=-3
    )
    fault = refused(sshd)
    assert fault.step == "auth" and f"ssh-add {sshd.user_key}" in fault.seen


def test_a_host_that_takes_passwords_only_is_refused_by_that_name(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a", "PasswordAuthentication yes", "PubkeyAuthentication no")
    sshd.add_host("box")
    fault = refused(sshd)
    assert fault.step == "auth" and "only password" in fault.seen and "never asked for" in fault.fix


def test_a_second_factor_is_refused_by_its_name(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a", "PasswordAuthentication yes", "AuthenticationMethods publickey,password")
    sshd.add_host("box")
    fault = refused(sshd)
    assert fault.step == "auth" and "also asks for password" in fault.seen


def test_keys_of_an_agent_are_used(start_sshd: StartSshd, tmp_path: Path) -> None:
    if shutil.which("ssh-agent") is None:
        pytest.skip("needs ssh-agent")
    sshd = start_sshd("a")
    where = Path("/tmp") / f"mlx-mesh-agent-{os.getpid()}"  # socket paths are short
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(where)], stdout=subprocess.DEVNULL)
    try:
        wait_until(where.exists)
        environment = {**os.environ, "SSH_AUTH_SOCK": str(where)}
        subprocess.run(["ssh-add", "-q", str(sshd.user_key)], env=environment, check=True)
        sshd.user_key.unlink()  # only the agent has it now
        sshd.add_host("box", f"IdentityAgent {where}", "IdentitiesOnly yes")
        sshd.add_host(
            "other", f"IdentityAgent {where}", f"IdentityFile {tmp_path}/none", "IdentitiesOnly yes"
        )
        with connected(sshd) as host:
            assert run(host, ["/bin/echo", "in"], b"", 30).stdout == ("in",)
        Path(f"{sshd.user_key}.pub").rename(tmp_path / "moved.pub")  # now nothing names the agent's key
        assert "there is no key to offer" in refused(sshd, "other").seen
    finally:
        agent.kill()
        agent.wait()
        where.unlink(missing_ok=True)


def test_a_name_that_has_no_address_fails_at_resolve(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box", host_name="no-such-host.invalid")
    fault = refused(sshd)
    assert fault.step == "resolve" and "no-such-host.invalid" in fault.seen


def test_a_port_where_nobody_listens_fails_at_connect(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sshd.add_host("box", port=sock.getsockname()[1])
        fault = refused(sshd)
    assert fault.step == "connect" and "refused" in fault.seen and "Remote Login" in fault.fix


def test_a_server_that_speaks_no_ssh_fails_at_connect_within_its_deadline(
    start_sshd: StartSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_mesh.launcher.ssh_connect.BANNER_TIMEOUT_S", 0.5)
    sshd = start_sshd("a")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sshd.add_host("box", port=silent.getsockname()[1])
        fault = refused(sshd)
    assert fault.step == "connect" and "does not speak SSH" in fault.seen


def test_a_jump_host_is_passed_and_its_key_is_checked_too(start_sshd: StartSshd) -> None:
    first, second, target = start_sshd("a"), start_sshd("b"), start_sshd("c")
    first.add_host("one")
    for other, name, jump in ((second, "two", "one"), (target, "box", "one,two")):
        with first.config.open("a") as file:
            other.config = first.config
            del file
        other.add_host(name, f"ProxyJump {jump}")
    with connected(first) as host:
        assert run(host, ["/bin/echo", "there"], b"", 30).stdout == ("there",)
        assert host.peer_address == ""  # the address behind a jump means nothing here
    second.known_hosts.write_text("")
    fault = refused(first)
    assert fault.step == "host key" and fault.seen.startswith("two: UNKNOWN")


def test_a_jump_host_that_cannot_reach_the_target_is_told(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("one")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sshd.add_host("box", "ProxyJump one", port=sock.getsockname()[1])
        fault = refused(sshd)
    assert fault.step == "connect" and "the jump host cannot reach" in fault.seen


def test_a_jump_that_leads_to_itself_is_refused(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box", "ProxyJump box")
    fault = refused(sshd)
    assert fault.step == "settings" and "itself" in fault.seen


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ProxyCommand nc %h %p", "ProxyCommand"),
        ("CertificateFile /x-cert.pub", "CertificateFile"),
        ("PubkeyAuthentication no", "PubkeyAuthentication is off"),
        ("PreferredAuthentications password", "leaves out publickey"),
        ("PKCS11Provider /lib/x.so", "PKCS11Provider"),
        ("KnownHostsCommand /bin/true", "KnownHostsCommand"),
        ("RevokedHostKeys /x", "RevokedHostKeys"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(start_sshd: StartSshd, line: str, words: str) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box", line)
    fault = refused(sshd)
    assert fault.step == "settings" and words in fault.seen


def test_strict_host_key_checking_no_accepts_nothing(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box", "StrictHostKeyChecking no")
    sshd.known_hosts.write_text("")
    assert refused(sshd).step == "host key"


def test_without_an_ssh_program_the_settings_are_read_all_the_same(
    start_sshd: StartSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    with monkeypatch.context() as patch:
        patch.setattr("mlx_mesh.launcher.ssh_config.shutil.which", lambda name: None)
        with connected(sshd) as host:
            assert run(host, ["/bin/echo", "in"], b"", 30).stdout == ("in",)
        sshd.config.write_text("Include other\n" + sshd.config.read_text())
        assert "Include" in refused(sshd).seen


def test_a_settings_file_that_ssh_cannot_read_is_told(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.config.write_text("Host box\n  NoSuchOption yes\n")
    fault = refused(sshd)
    assert fault.step == "settings" and "nosuchoption" in fault.seen.lower()


def test_a_server_that_is_stopped_is_noticed_by_the_keepalive(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box", "ServerAliveInterval 1", "ServerAliveCountMax 1")
    with connected(sshd) as host:
        ended: list[Exit] = []
        seen = threading.Event()

        def on_exit(exit: Exit) -> None:
            ended.append(exit)
            seen.set()

        said = threading.Event()
        host.start(["/bin/sh", "-c", "echo $PPID; sleep 30"], lambda stream, line: said.set(), on_exit)
        assert said.wait(10)
        stopped = sessions_of(sshd.process.pid)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            started_at = time.monotonic()
            assert seen.wait(10)
            assert "no answer for 1 s" in ended[0].lost
            assert time.monotonic() - started_at < 6
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)


def test_a_connection_that_the_server_drops_is_a_lost_one(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    with connected(sshd) as host:
        said, ended = threading.Event(), threading.Event()
        exits: list[Exit] = []

        def on_exit(exit: Exit) -> None:
            exits.append(exit)
            ended.set()

        process = host.start(["/bin/sh", "-c", "echo in; sleep 30"], lambda stream, line: said.set(), on_exit)
        assert said.wait(10)
        for pid in sessions_of(sshd.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert ended.wait(10)
        assert exits[0].lost and process.wait(1) == exits[0]


def test_a_stream_through_the_host_reaches_what_it_can_reach(start_sshd: StartSshd) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")
    with socket.create_server(("127.0.0.1", 0)) as server, connected(sshd) as host:
        near = host.connect_to("127.0.0.1", server.getsockname()[1], 10)
        far, _ = server.accept()
        with near, far:
            near.sendall(b"ping")
            assert far.recv(10) == b"ping"
            far.sendall(b"pong")
            assert near.recv(10) == b"pong"
            far.close()
            assert near.recv(10) == b""
        with pytest.raises(OSError, match="cannot reach"):
            host.connect_to("127.0.0.1", free_port(), 10)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def sessions_of(pid: int) -> list[int]:
    """The processes of the server's connections: its children and theirs."""
    found: list[int] = []
    for child in map(int, subprocess.run(["pgrep", "-P", str(pid)], capture_output=True).stdout.split()):
        found += [child, *sessions_of(child)]
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("system", "is_routed", "said"),
    [
        ("Darwin", True, "Local Network privacy refuses it"),
        ("Darwin", False, "check the cable"),
        ("Linux", True, "check the cable"),
    ],
)
def test_no_route_where_there_is_one_is_macs_privacy(
    system: str, is_routed: bool, said: str, start_sshd: StartSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = start_sshd("a")
    sshd.add_host("box")

    def refuse(*args: object, **more: object) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(ssh_connect, "has_route", lambda address: is_routed)
    fault = refused(sshd)
    assert fault.step == "connect" and said in fault.fix
