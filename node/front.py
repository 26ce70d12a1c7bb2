"""The proxy child on the leader: started before anything is loaded, and started again when it dies or is
frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from socket import socket

import msgspec

from mlx_mesh.mesh.errors import BringUpError, ExitCode, MeshError, ProtocolError
from mlx_mesh.mesh.messages import (
    PROXY_BEAT_S,
    ProxyBeat,
    ProxyConfig,
    ProxyEvent,
    ProxyReady,
    ProxyRequest,
)
from mlx_mesh.node.children import Child, child_environment
from mlx_mesh.node.pipe import AsyncPipe
from mlx_mesh.node.processes import ProcessId, describe_exit

MAX_SHORT_LIVES = 3
"""So many proxies in a row that died young mean that the next one would too."""

SHORT_LIFE_S = 10.0
_RESTART_S = 0.5
_EXIT_S = 10.0
"""From the end of its pipe to its own: Python takes long to tear down on a busy host."""

_NUM_LINES = 15


class ProxyFailed(MeshError):
    """The proxy ended with an error that the next one would meet too; the exit status is the proxy's."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Front:
    """Keeps one proxy running on the listening socket, and passes its requests on. The socket stays open in
    this process, so that connections wait in its backlog while a proxy is replaced."""

    def __init__(
        self,
        *,
        program: Sequence[str],
        config: ProxyConfig,
        listen: socket,
        start_s: float,
        silence_s: float,
        on_request: Callable[[ProxyRequest], None],
        on_lost: Callable[[str], None],
        on_line: Callable[[str], None],
        on_change: Callable[[ProcessId], None],
    ) -> None:
        """`start_s`: a proxy must say ProxyReady within; `silence_s`: and from then on never be silent for
        longer; `on_lost`: it ended, with how; its open requests are lost with it."""
        self._program = tuple(program)
        self._config = msgspec.structs.replace(config, listen_fd=listen.fileno())
        self._listen = listen
        self._start_s = start_s
        self._silence_s = silence_s
        self._on_request = on_request
        self._on_lost = on_lost
        self._on_line = on_line
        self._on_change = on_change
        self._decoder = msgspec.msgpack.Decoder(ProxyRequest)
        self._child: Child | None = None
        self._pipe: AsyncPipe[ProxyRequest] | None = None
        self._greeting: Callable[[], ProxyEvent] | None = None
        self._is_stopping = self._is_replacing = False
        self._num_silent = 0  # ticks since it was heard
        self.is_ready = False
        """A proxy accepts connections now."""

    def greet_with(self, greeting: Callable[[], ProxyEvent]) -> None:
        """What every new proxy hears first."""
        self._greeting = greeting

    def send(self, event: ProxyEvent) -> None:
        """To the proxy, if there is one."""
        if self._pipe is not None:
            self._pipe.send(event)

    async def run(self) -> None:
        """Until `stop`. Raises ProxyFailed when a proxy says that it cannot serve this model or these
        settings, BringUpError when proxies keep dying at once."""
        num_short_lives = 0
        loop = asyncio.get_running_loop()
        while not self._is_stopping:
            born = loop.time()
            how = await self._live_once()
            if self._is_stopping:
                return
            if self._is_replacing:
                self._is_replacing = False
                continue
            num_short_lives = num_short_lives + 1 if loop.time() - born < SHORT_LIFE_S else 0
            self._on_lost(how)
            if num_short_lives >= MAX_SHORT_LIVES:
                raise BringUpError(f"the HTTP proxy {how}, {num_short_lives} times in a row. {self._words()}")
            await asyncio.sleep(_RESTART_S)

    async def _live_once(self) -> str:
        """One proxy's life; returns how it ended, in words."""
        try:
            child, sock = await Child.start(
                self._program,
                self._on_line,
                environment=child_environment(),
                pass_fds=(self._listen.fileno(),),
            )
        except OSError as error:
            return f"cannot be started: {error}"
        self._child = child
        pipe = await AsyncPipe.open(sock, self._decoder)
        self._on_change(child.identity)
        pipe.send(self._config)
        if self._greeting is not None:
            pipe.send(self._greeting())
        self._pipe = pipe
        problem, was_ready = "", False
        try:
            problem = await self._listen_to(pipe)
        finally:
            was_ready = self.is_ready
            self.is_ready = False
            self._pipe = None
            await pipe.close()
        if self._is_stopping or self._is_replacing:  # it has its time
            return describe_exit(await child.wait())
        if problem:
            await child.kill()
            return problem
        # Without its pipe it serves nobody.
        is_killed = not await child.has_ended(_EXIT_S)
        code = await child.kill()
        if is_killed:
            return f"closed its pipe but did not end within {_EXIT_S:g} s, and was killed"
        if not was_ready and code in (ExitCode.USAGE, ExitCode.PREFLIGHT):
            raise ProxyFailed(f"the HTTP proxy {describe_exit(code)}. {self._words()}", ExitCode(code))
        return describe_exit(code)

    async def _listen_to(self, pipe: AsyncPipe[ProxyRequest]) -> str:
        """Pass requests on until the end; returns why it must be killed, '' when it ended by itself."""
        watch: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._start_s) as limit:
                while (request := await pipe.receive()) is not None:
                    self._num_silent = 0
                    if isinstance(request, ProxyReady) and watch is None:
                        self.is_ready = True
                        limit.reschedule(None)
                        watch = asyncio.create_task(self._watch(limit), name="proxy silence")
                    if not isinstance(request, ProxyBeat):
                        self._on_request(request)
        except TimeoutError:
            if self.is_ready:
                return f"was silent for {self._silence_s:g} s (proxy_silence_s): it hung or was stopped"
            return f"did not accept connections within {self._start_s:g} s (spawn_s)"
        except ProtocolError as error:
            return f"sent nonsense ({error})"
        finally:
            if watch is not None:
                watch.cancel()
        return ""

    async def _watch(self, limit: asyncio.Timeout) -> None:
        """Let `limit` expire once the proxy is silent. Ticks of this loop are counted, not time: when this
        process slept, the proxy's heartbeats are still to be read."""
        tick_s = min(PROXY_BEAT_S, self._silence_s / 4)
        while (self._num_silent + 1) * tick_s <= self._silence_s:
            await asyncio.sleep(tick_s)
            self._num_silent += 1
        limit.reschedule(asyncio.get_running_loop().time())

    def _words(self) -> str:
        lines = list(self._child.last_lines)[-_NUM_LINES:] if self._child is not None else []
        return "\n  ".join(["Its last lines:", *lines]) if lines else "It said nothing."

    async def replace(self, config: ProxyConfig, stop_s: float) -> None:
        """Go on with a proxy that has these settings; the one that runs may finish what it is writing."""
        self._config = msgspec.structs.replace(config, listen_fd=self._listen.fileno())
        if self._child is not None and self._pipe is not None:
            self._is_replacing = True
            await self._child.stop(stop_s)

    async def stop(self, stop_s: float) -> None:
        """End the proxy: TERM lets it finish its answers."""
        self._is_stopping = True
        if self._child is not None:
            await self._child.stop(stop_s)
