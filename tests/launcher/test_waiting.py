"""A waiting agent: whom it lets in, what it runs for them, and what ends with their connection."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from mlx_mesh.launcher import waiting as waiting_module
from mlx_mesh.launcher.agent_wire import (
    GUEST,
    LAUNCHER,
    PAIR,
    Hello,
    PairAnswer,
    PairRequest,
    read_line,
    write_line,
)
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.paired import connect, greet, prove
from mlx_mesh.launcher.pairing import OneTimeCode, PairingRefused
from mlx_mesh.launcher.pairings import PairedHost, Pairings, fingerprint_of
from mlx_mesh.launcher.programs.processes import started
from mlx_mesh.launcher.remote import Exit, program_source, run, run_program
from mlx_mesh.launcher.ssh import SshHost
from mlx_mesh.launcher.waiting import NotOurs, Waiting, check_program, own_words
from mlx_mesh.mesh.discovery import AgentRoute

SECRET = "a secret of the tests"
LIMIT_S = 20.0


class Host:
    """A waiting agent on loopback, and a launcher with a state folder of its own."""

    def __init__(self, folder: Path, code: OneTimeCode | None, secret: str = "") -> None:
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder / "launcher"), "MLX_MESH_SECRET": ""}
        self.pairings = Pairings({"XDG_STATE_HOME": str(folder / "host")})
        self.said: list[str] = []
        self.waiting = Waiting(
            key=self.pairings.key_of("agent"),
            pairings=self.pairings,
            code=code,
            secret=secret,
            hello=lambda: Hello(strings={"host": "mac2"}),
            say=self.said.append,
        )
        port = self.waiting.listen("127.0.0.1", 0)
        self.waiting.start()
        self.route = AgentRoute(address="127.0.0.1", port=port, key=fingerprint_of(self.waiting.key))

    @property
    def own(self) -> Pairings:
        return Pairings(self.environment)

    def prove(self, by: str, password: str) -> None:
        prove("mac2", self.route, by, password, self.own.key_of("launcher"))

    def pair(self, code: OneTimeCode) -> None:
        self.prove("code", code.code)
        self.own.keep_host(
            PairedHost(name="mac2", key=self.route.key, addresses=("127.0.0.1",), port=1, paired_at=0.0)
        )

    def enter(self) -> SshHost:
        return connect("mac2", self.route, self.environment)

    def heard(self, text: str) -> bool:
        """Whether the host's log has it, soon."""
        return wait_for(lambda: any(text in line for line in self.said))


def wait_for(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(autouse=True)
def quick_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "ACCEPT_S", 0.02)


@pytest.fixture
def code() -> OneTimeCode:
    return OneTimeCode()


@pytest.fixture
def host(tmp_path: Path, code: OneTimeCode) -> Iterator[Host]:
    made = Host(tmp_path, code, SECRET)
    yield made
    made.waiting.stop()


def guest(host: Host) -> paramiko.Transport:
    transport = paramiko.Transport(socket.create_connection((host.route.address, host.route.port)))
    transport.daemon = True
    transport.start_client(timeout=LIMIT_S)
    return transport


# ---------------------------------------------------------------- who comes in


def test_a_launcher_with_the_code_is_let_in_from_then_on(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    for _ in range(2):
        remote = host.enter()
        answer = run_program(remote, "/no/such/python", "processes", {"do": "identify", "pids": [1]}, LIMIT_S)
        assert list(answer) == ["1"]
        remote.close()
    assert (
        host.heard("paired with") and host.heard("a launcher came in") and host.heard("the launcher is gone")
    )
    (kept,) = host.pairings.launchers()
    assert kept.key == fingerprint_of(host.own.key_of("launcher")) and kept.address == "127.0.0.1"


def test_a_wrong_code_is_refused_on_both_ends_and_counted(host: Host, code: OneTimeCode) -> None:
    wrong = f"{(int(code.code) + 1) % 10**8:08d}"
    for left in (2, 1, 0):
        with pytest.raises(PairingRefused, match="the code given here is not the one that mac2 has"):
            host.prove("code", wrong)
        assert host.heard(f"does not know the code or secret; {left} tries are left")
    with pytest.raises(PairingRefused, match="mac2 refuses: the code was tried 3 times"):
        host.prove("code", code.code)
    assert host.pairings.launchers() == []
    with pytest.raises(HostFault, match="not paired"):
        host.enter()


def test_a_code_that_was_used_is_refused_on_both_ends(host: Host, code: OneTimeCode) -> None:
    host.prove("code", code.code)
    other = Pairings({"XDG_STATE_HOME": str(host.own.folder / "other")})
    with pytest.raises(PairingRefused, match="mac2 refuses: the code was used already"):
        prove("mac2", host.route, "code", code.code, other.key_of("launcher"))
    assert host.heard("not paired") and host.heard("the code was used already")
    assert len(host.pairings.launchers()) == 1


def test_an_attempt_that_is_given_up_counts_too(host: Host, code: OneTimeCode) -> None:
    transport = guest(host)
    transport.auth_none(GUEST)
    channel = transport.open_session()
    channel.invoke_subsystem(PAIR)
    from spake2 import SPAKE2_A

    begin = SPAKE2_A(b"0").start().hex()
    write_line(channel, PairRequest(by="code", key="QUFB", label="x\x1b[2J", message=begin))
    assert read_line(channel, PairAnswer).proof
    transport.close()
    assert host.heard("2 tries are left") and not any("\x1b" in line for line in host.said)


def test_a_secret_lets_in_whoever_has_it_while_it_is_the_secret(host: Host) -> None:
    host.environment["MLX_MESH_SECRET"] = SECRET
    remote = host.enter()
    remote.close()
    assert host.heard("by secret") and host.pairings.launchers() == [] and host.own.hosts() == []
    host.environment["MLX_MESH_SECRET"] = ""
    with pytest.raises(HostFault, match="not paired with this launcher"):
        host.enter()


def test_another_secret_is_refused_on_both_ends(host: Host) -> None:
    host.environment["MLX_MESH_SECRET"] = "another secret of ours"
    with pytest.raises(HostFault, match="auth: no pairing by MLX_MESH_SECRET") as caught:
        host.enter()
    assert "the same secret" in str(caught.value) and host.heard("does not know the code or secret")
    assert not any(SECRET in line for line in host.said)


@pytest.mark.parametrize(
    ("by", "told"), [("code", "shows no code"), ("secret", "has no secret"), ("x", "not known")]
)
def test_a_host_pairs_only_in_the_way_it_was_told(tmp_path: Path, by: str, told: str) -> None:
    host = Host(tmp_path, None)
    try:
        with pytest.raises(PairingRefused, match=told):
            host.prove(by, "12345678")
        assert host.heard("not paired")
    finally:
        host.waiting.stop()


def test_a_launcher_that_is_not_known_is_refused_on_both_ends(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    host.pairings.forget_launchers()
    with pytest.raises(HostFault, match="auth: it does not know this launcher") as caught:
        host.enter()
    assert "mlx-mesh discover --pair mac2" in str(caught.value)
    assert host.heard("refused a launcher that is not paired with this host (key SHA256:")


def test_another_machine_at_the_address_is_not_trusted(host: Host, code: OneTimeCode, tmp_path: Path) -> None:
    host.pair(code)
    (tmp_path / "impostor").mkdir()
    impostor = Host(tmp_path / "impostor", None, SECRET)
    try:
        host.route = AgentRoute(address="127.0.0.1", port=impostor.route.port, key=host.route.key)
        with pytest.raises(HostFault, match=r"host key: .*another machine answers there"):
            host.enter()
        host.environment["MLX_MESH_SECRET"] = SECRET
        with pytest.raises(HostFault, match="host key"):
            host.enter()
        assert impostor.said == []
    finally:
        impostor.waiting.stop()


def test_who_pairs_with_an_impostor_notices(host: Host, code: OneTimeCode, tmp_path: Path) -> None:
    """It has the key that it announces, but not the code."""
    (tmp_path / "impostor").mkdir()
    impostor = Host(tmp_path / "impostor", OneTimeCode())
    try:
        with pytest.raises(PairingRefused, match="or another program answers there"):
            prove("mac2", impostor.route, "code", code.code, host.own.key_of("launcher"))
    finally:
        impostor.waiting.stop()


def test_a_host_that_is_not_there_is_told(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    host.waiting.stop()
    with pytest.raises(HostFault, match=r"connect: 127\.0\.0\.1 port .*Connection refused"):
        host.enter()


def test_a_port_that_is_no_agent_s_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(HostFault, match="does not speak as an agent does"):
            greet("mac2", "127.0.0.1", port)


def test_a_paired_host_that_moved_is_found_where_it_was_seen_since(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    there = PairedHost(
        name="mac2", key=host.route.key, addresses=("127.0.0.1",), port=host.route.port, paired_at=0.0
    )
    host.route = AgentRoute(address="127.0.0.1", port=9, key=host.route.key)
    with pytest.raises(HostFault, match="port 9: Connection refused"):
        host.enter()
    host.own.keep_host(there)
    host.enter().close()


# ---------------------------------------------------------------- guests


def test_anybody_may_ask_what_is_announced_anyway(host: Host) -> None:
    greeting = greet("mac2", "127.0.0.1", host.route.port)
    assert greeting.hello.strings == {"host": "mac2"} and greeting.key == host.route.key


def test_a_guest_runs_nothing_and_reaches_nothing(host: Host) -> None:
    transport = guest(host)
    transport.auth_none(GUEST)
    channel = transport.open_session()
    with pytest.raises(paramiko.SSHException):
        channel.exec_command("exec 'python' '-I' '-u' '-m' 'mlx_mesh.node' '--launched'")
    with pytest.raises(paramiko.SSHException):
        transport.open_channel("direct-tcpip", ("127.0.0.1", host.route.port), ("127.0.0.1", 0))
    for refused in ("shell", "sftp"):
        channel = transport.open_session()
        with pytest.raises(paramiko.SSHException):
            channel.invoke_shell() if refused == "shell" else channel.invoke_subsystem(refused)
    transport.close()


def test_a_guest_has_few_channels_in_all(host: Host) -> None:
    transport = guest(host)
    transport.auth_none(GUEST)
    for _ in range(waiting_module.MAX_GUEST_CHANNELS):
        transport.open_session().close()
    with pytest.raises(paramiko.ChannelException):
        transport.open_session()
    transport.close()


@pytest.mark.parametrize("user", [LAUNCHER, "root", ""])
def test_nobody_else_comes_in_without_a_key(host: Host, user: str) -> None:
    transport = guest(host)
    with pytest.raises(paramiko.SSHException):
        transport.auth_none(user)
    transport.close()


def test_a_paired_key_is_good_for_one_user_only(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    transport = guest(host)
    with pytest.raises(paramiko.SSHException):
        transport.auth_publickey("root", host.own.key_of("launcher"))
    transport.close()


def test_a_public_key_that_was_overheard_is_no_key(host: Host, code: OneTimeCode) -> None:
    """Who has it asks whether it would do, gets a yes, and cannot sign."""
    host.pair(code)
    public = paramiko.Ed25519Key(data=host.own.key_of("launcher").asbytes())
    transport = guest(host)
    with pytest.raises((paramiko.SSHException, AttributeError, TypeError)):
        transport.auth_publickey(LAUNCHER, public)
    assert not transport.is_authenticated()
    transport.close()


def test_a_guest_that_stays_is_sent_away(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "GUEST_S", 0.1)
    monkeypatch.setattr(waiting_module, "AUTH_S", 0.1)
    transport = guest(host)
    assert wait_for(lambda: not transport.is_active())


def test_noise_at_the_door_changes_nothing(host: Host, code: OneTimeCode) -> None:
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"SSH-2.0-x\r\n" + os.urandom(512)):
        with (
            socket.create_connection((host.route.address, host.route.port)) as sock,
            contextlib.suppress(OSError),
        ):
            sock.sendall(noise)
    host.pair(code)
    host.enter().close()


def test_there_is_room_for_so_many_strangers(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "MAX_STRANGERS", 2)
    sockets = [socket.create_connection((host.route.address, host.route.port)) for _ in range(3)]
    assert host.heard("too many connections are open")
    for sock in sockets:
        sock.close()


# ---------------------------------------------------------------- what is run


@pytest.mark.parametrize(
    "command",
    [
        "exec '/bin/sh' '-c' 'id'",
        "exec 'python' '-I' '-u' '-c' 'print(1)'",
        "exec 'python' '-I' '-u' '-m' 'http.server'",
        "exec 'python' '-I' '-u' '-m' 'mlx_mesh.launcher' 'up'",
        "exec 'python' '-I' '-u' '-m' 'mlx_mesh.node/../x'",
        "exec 'python' '-I' '-u' '-m' 'mlx_mesh.nodes'",
        "exec 'python' '-I' '-u' '-m'",
        "exec 'python' '-I' '-u' '-' '-x'",
        "'python' '-I' '-u' '-m' 'mlx_mesh.node'",
        "exec 'python' '-u' '-m' 'mlx_mesh.node'",
        "exec 'python' '-I' '-u' '-m' 'mlx_mesh.node' ; id'",
        "",
    ],
)
def test_only_mlx_mesh_s_own_commands_are_run(command: str) -> None:
    with pytest.raises(NotOurs):
        own_words(command)


def test_it_is_this_host_s_own_interpreter_that_runs_them() -> None:
    command = "exec '/evil/python' '-I' '-u' '-m' 'mlx_mesh.node.examine' '/m; id' '18000'"
    assert own_words(command) == [
        sys.executable,
        "-I",
        "-u",
        "-m",
        "mlx_mesh.node.examine",
        "/m; id",
        "18000",
    ]
    assert own_words("exec 'x' '-I' '-u' '-'") == [sys.executable, "-I", "-u", "-"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"import os; os.system('id')\n" + text,
        lambda text: text + b"\nprint(1)",
        lambda text: text.replace(b"main('m'", b"main(print(1) or 'm'"),
        lambda text: text.replace(b"main('m'", b"end('m'"),
        lambda text: text.rstrip() + b"('x', 'y')\n",
        lambda text: text.replace(b"main('m'", b"main('m' + 'n'"),
        lambda text: text.replace(b"main('m'", b"main('m\xff'"),
        lambda text: program_source("environment", "m", {"do": "install"}),
        lambda text: text.rpartition(b"\n\nmain(")[0],
        lambda text: text.replace(b"def main", b"def  main"),
        lambda text: b"\n\nmain('a', 'b')\n",
        lambda text: b"",
    ],
)
def test_only_programs_that_this_host_has_are_run(change: Callable[[bytes], bytes]) -> None:
    text = program_source("processes", "m", {"do": "identify", "pids": []})
    check_program(text)
    with pytest.raises(NotOurs):
        check_program(change(text))


def test_a_launcher_is_told_what_was_refused(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    remote = host.enter()
    done = run(remote, ["python", "-I", "-u", "-"], b"print(1)\n", LIMIT_S)
    assert done.exit == Exit(code=126) and "refused: a program" in done.stderr[0] and done.stdout == ()
    with pytest.raises(HostFault, match="runs no command"):
        remote.start(["/bin/sh", "-c", "id"], lambda stream, line: None, lambda exit: None)
    assert host.heard("refused a command that is not mlx-mesh's")
    remote.close()


def test_streams_and_the_exit_status_come_through(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    remote = host.enter()
    done = run(remote, ["python", "-I", "-u", "-m", "mlx_mesh.node.facts", "/no/such/model"], b"", LIMIT_S)
    assert done.exit == Exit(code=0) and '"model_error":"the model folder /no/such/model' in done.stdout[-1]
    done = run(remote, ["python", "-I", "-u", "-m", "mlx_mesh.node.facts"], b"", LIMIT_S)
    assert done.exit == Exit(code=2) and done.stderr[0].startswith("usage:")
    remote.close()


def test_a_connection_that_ends_takes_what_it_started_with_it(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    remote = host.enter()
    ended = threading.Event()
    process = remote.start(
        ["python", "-I", "-u", "-m", "mlx_mesh.node.announce"], lambda *_: None, lambda _: ended.set()
    )
    child = child_of_this(re.compile(r"mlx_mesh\.node\.announce"))
    remote.close()
    assert wait_for(lambda: not started(child)) and wait_for(ended.is_set)
    assert process.wait(LIMIT_S) is not None and host.heard("the launcher is gone")


def test_what_does_not_end_by_itself_is_killed(
    host: Host, code: OneTimeCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = [sys.executable, "-I", "-u", "-c", "import time; time.sleep(600)  # endless"]
    monkeypatch.setattr(waiting_module, "own_words", lambda command: endless)
    monkeypatch.setattr(waiting_module, "END_S", 0.2)
    host.pair(code)
    remote = host.enter()
    remote.start(["python"], lambda *_: None, lambda _: None)
    child = child_of_this(re.compile("# endless"))
    remote.close()
    assert wait_for(lambda: not started(child)) and host.heard("did not end within 0.2 s and is killed")


def test_the_end_of_the_agent_ends_what_it_started(host: Host, code: OneTimeCode) -> None:
    host.pair(code)
    remote = host.enter()
    remote.start(["python", "-I", "-u", "-m", "mlx_mesh.node.announce"], lambda *_: None, lambda _: None)
    child = child_of_this(re.compile(r"mlx_mesh\.node\.announce"))
    host.waiting.stop()
    assert not started(child)
    remote.close()


def child_of_this(command: re.Pattern[str]) -> int:
    """The pid of a child of this process with that command line, once there is one."""
    found: list[int] = []

    def look() -> bool:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and command.search(
                    (entry / "cmdline").read_text().replace("\0", " ")
                ):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[1]) == os.getpid():
                        found.append(int(entry.name))
                        return True
        return False

    if not Path("/proc/self").exists():
        pytest.skip("children are looked for in /proc")
    assert wait_for(look)
    return found[-1]


def test_a_launcher_reaches_the_loopback_of_the_host_and_nothing_else(
    host: Host, code: OneTimeCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.pair(code)
    remote = host.enter()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = remote.connect_to("127.0.0.1", server.getsockname()[1], LIMIT_S)
        far, _ = server.accept()
        near.sendall(b"ping")
        assert far.recv(4) == b"ping"
        far.sendall(b"pong")
        assert near.recv(4) == b"pong"
        far.close()
        assert near.recv(4) == b""
        near.close()
    tried: list[tuple[str, int]] = []

    def connect_to(place: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect_to)
    for place in (("127.0.0.1", 1), ("10.77.0.1", 22), ("example.org", 80), ("0.0.0.0", 22)):
        with pytest.raises(ConnectionRefusedError):
            remote.connect_to(*place, LIMIT_S)
    assert tried == [("127.0.0.1", 1)]
    remote.close()


def test_a_port_that_is_taken_is_told(host: Host) -> None:
    with pytest.raises(Exception, match="another `mlx-mesh agent` waits there"):
        host.waiting.listen("127.0.0.1", host.route.port)
