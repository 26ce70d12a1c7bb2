"""`mlx-mesh agent`: announce this host, and wait for launchers until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from mlx_mesh.launcher.agent_wire import Hello
from mlx_mesh.launcher.pairing import CODE_LIFE_S, CODE_TRIES, SECRET_VARIABLE, OneTimeCode, check_secret
from mlx_mesh.launcher.pairings import PairedLauncher, Pairings, fingerprint_of
from mlx_mesh.launcher.remote import Exit, LocalHost, LocalProcess, Stream
from mlx_mesh.launcher.waiting import Waiting
from mlx_mesh.mesh.discovery import AGENT_PORT
from mlx_mesh.mesh.errors import ExitCode, MeshError, SettingsError
from mlx_mesh.mesh.interfaces import check_rules

ANNOUNCED_S = 30.0
"""After this without a word of the announcer, the agent says that it waits all the same."""

GOODBYE_S = 8.0


@dataclass(frozen=True, slots=True)
class AgentOptions:
    port: int = AGENT_PORT
    shows_code: bool = False
    interfaces: tuple[str, ...] = ()
    is_quiet_on_network: bool = False  # does not announce itself


class _Announced(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the announcer."""

    strings: dict[str, str] = {}
    on: tuple[str, ...] = ()
    error: str = ""


def wait_here(options: AgentOptions, environment: Mapping[str, str], say: Callable[[str], None]) -> ExitCode:
    """Until TERM, INT or HUP. Raises SettingsError."""
    if not 0 <= options.port <= 65535:
        raise SettingsError(f"--port {options.port} is out of range; it must be 0 (a free one) to 65535.")
    for problem in check_rules(options.interfaces):
        raise SettingsError(f"--interface {problem}.")
    pairings = Pairings(environment)
    secret = check_secret(environment.get(SECRET_VARIABLE, ""))
    code = OneTimeCode() if options.shows_code else None
    if code is None and not secret and not pairings.launchers():
        raise SettingsError(
            "Nobody could use this agent: it knows no launcher yet. Run `mlx-mesh agent --pair`, which shows "
            f"a code for the launcher, or set the launcher's {SECRET_VARIABLE}."
        )
    key = pairings.key_of("agent")
    announcer = _Announcer(say)
    lock = threading.Lock()

    def tell(text: str) -> None:
        with lock:
            say(text)

    waiting = Waiting(
        key=key,
        pairings=pairings,
        code=code,
        secret=secret,
        hello=announcer.hello,
        say=tell,
        on_paired=lambda launcher: _stays(launcher, tell),
    )
    port = waiting.listen("0.0.0.0", options.port)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    waiting.start()
    try:
        announcer.start(port, fingerprint_of(key), options)
        tell(f"Waiting on port {port} (key {fingerprint_of(key)}). Ctrl-C ends it.")
        if code is not None:
            tell(
                f"Code for one launcher, good for {CODE_LIFE_S / 60:g} minutes and {CODE_TRIES} tries: "
                f"{code.shown}\nThere: mlx-mesh discover --pair {announcer.name()}"
            )
        while not stop.wait(0.5):  # a signal does not wake a wait without an end
            if not announcer.is_alive:
                raise MeshError(f"The announcer ended: {announcer.last_words}.")
    finally:
        tell("Stopping ...")
        announcer.stop()
        waiting.stop()
    return ExitCode.OK


def _stays(launcher: PairedLauncher, tell: Callable[[str], None]) -> None:
    tell(f"{launcher.label} may run ranks here from now on. `mlx-mesh agent --forget` takes that back.")


class _Announcer:
    """The node's announcer, as a child."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._process: LocalProcess | None = None
        self._latest = _Announced(error="it has not looked at its interfaces yet")
        self._first = threading.Event()
        self.last_words = "it said nothing"

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.wait(0.0) is None

    def hello(self) -> Hello:
        return Hello(strings=self._latest.strings, error=self._latest.error)

    def name(self) -> str:
        """Of this host, once it was announced."""
        self._first.wait(ANNOUNCED_S)
        return self._latest.strings.get("host", "THIS-HOST")

    def start(self, port: int, key: str, options: AgentOptions) -> None:
        words = [sys.executable, "-I", "-u", "-m", "mlx_mesh.node.announce"]
        self._process = LocalHost("this host").start(words, self._on_line, self._on_exit)
        wish = {
            "role": "agent",
            "port": port,
            "key": key,
            "interfaces": options.interfaces,
            "is_silent": options.is_quiet_on_network,
        }
        self._process.send(msgspec.json.encode(wish) + b"\n")

    def _on_line(self, stream: Stream, line: str) -> None:
        if stream != "stdout" or not line.startswith("{"):
            self.last_words = line
            self._say(f"announcer: {line}")
            return
        told = msgspec.json.decode(line, type=_Announced)
        if told.error:
            self._say(f"Not announced: {told.error}. `mlx-mesh discover --address` still finds this host.")
        elif told.on:
            self._say(f"Announced as {told.strings.get('host')} on {', '.join(told.on)}.")
        self._latest = told
        self._first.set()

    def _on_exit(self, exit: Exit) -> None:
        self._first.set()

    def stop(self) -> None:
        if self._process is not None:
            self._process.close_stdin()
            if self._process.wait(GOODBYE_S) is None:
                self._process.kill()


def forget(environment: Mapping[str, str]) -> str:
    """No launcher is let in any more."""
    gone = Pairings(environment).forget_launchers()
    return f"Forgot {', '.join(launcher.label for launcher in gone)}." if gone else "No launcher was paired."
