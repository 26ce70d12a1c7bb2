"""The engine children of one host: one per rank, all of the same epoch, none outliving it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import (
    AgentMessage,
    EngineCommand,
    EngineConfig,
    EngineReport,
    RankExited,
    RankLog,
    RankReport,
    RankStarted,
)
from mlx_mesh.node.children import Child
from mlx_mesh.node.pipe import AsyncPipe
from mlx_mesh.node.processes import ProcessId, is_stopped

_EXIT_S = 2.0
"""An engine that closed its pipe must be gone within this, else it is killed."""


@dataclass(slots=True)
class _Engine:
    rank: int
    child: Child
    pipe: AsyncPipe[EngineReport]
    listener: asyncio.Task[None] | None = None
    is_stopping: bool = False


class Engines:
    """Starts, hears, commands and ends them. Everything that happens goes out through `report`."""

    def __init__(
        self,
        *,
        program: Sequence[str],
        environment: Mapping[str, str],
        host: str,
        secret: str,
        report: Callable[[AgentMessage], object],
        on_change: Callable[[dict[int, ProcessId]], None],
    ) -> None:
        self._program = tuple(program)
        self._environment = dict(environment)
        self._host = host
        self._secret = secret
        self._report = report
        self._on_change = on_change
        self._engines: dict[int, _Engine] = {}
        self._decoder = msgspec.msgpack.Decoder(EngineReport)
        self.epoch = 0
        """The epoch of the running engines; 0 = none was started yet."""

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose engine runs."""
        return tuple(self._engines)

    def stopped_ranks(self) -> tuple[int, ...]:
        """Ranks whose engine process is stopped by a signal or a debugger; only Linux tells."""
        return tuple(rank for rank, engine in self._engines.items() if is_stopped(engine.child.pid))

    async def start(
        self,
        epoch: int,
        ranks: Sequence[int],
        world_size: int,
        plan_address: str,
        heartbeat_interval_s: float,
    ) -> None:
        """One engine per rank; those of any other epoch must have been stopped. A program that cannot be
        started is reported as an exit."""
        assert not self._engines, "stop the last epoch first"
        self.epoch = epoch
        for rank in ranks:
            config = EngineConfig(
                epoch=epoch,
                rank=rank,
                world_size=world_size,
                host=self._host,
                secret=self._secret,
                plan_address=plan_address,
                heartbeat_interval_s=heartbeat_interval_s,
            )
            await self._start_one(config)
        self._announce()

    async def _start_one(self, config: EngineConfig) -> None:
        rank = config.rank
        try:
            child, sock = await Child.start(
                self._program,
                lambda line: self._report(RankLog(rank=rank, line=line)),
                environment=self._environment,
            )
        except OSError as error:
            problem = f"cannot start {self._program[0]}: {error}"
            self._report(
                RankExited(
                    epoch=config.epoch,
                    rank=rank,
                    exit_code=127,
                    signal=None,
                    expected=False,
                    last_lines=(problem,),
                )
            )
            return
        try:
            pipe = await AsyncPipe.open(sock, self._decoder)
        except BaseException:  # cancelled: nobody would know of this child
            await child.kill()
            raise
        pipe.send(config)
        engine = self._engines[rank] = _Engine(rank=rank, child=child, pipe=pipe)
        self._report(RankStarted(epoch=config.epoch, rank=rank, pid=child.pid))
        engine.listener = asyncio.create_task(
            self._listen(engine, config.epoch), name=f"engine of rank {rank}"
        )

    def command(self, epoch: int, rank: int, command: EngineCommand) -> bool:
        """Hand a command to an engine; False when it is not there (any more)."""
        engine = self._engines.get(rank)
        if engine is None or epoch != self.epoch:
            return False
        engine.pipe.send(command)
        return True

    async def stop(self, *, gently: bool, stop_s: float, dump: bool = False) -> None:
        """End all engines and return when they are gone: TERM and `stop_s` first when `gently`, else KILL.
        `dump`: have each print its stacks before."""
        engines = list(self._engines.values())
        if dump:
            await asyncio.gather(*(engine.child.print_stacks() for engine in engines))
        for engine in engines:
            engine.is_stopping = True
        await asyncio.gather(
            *(engine.child.stop(stop_s) if gently else engine.child.kill() for engine in engines)
        )
        listeners = [engine.listener for engine in engines if engine.listener is not None]
        await asyncio.gather(*listeners, return_exceptions=True)

    async def _listen(self, engine: _Engine, epoch: int) -> None:
        """Forward reports until the engine is gone, then say how it ended."""
        problem = ""
        try:
            while (report := await engine.pipe.receive()) is not None:
                self._report(RankReport(epoch=epoch, rank=engine.rank, report=report))
        except ProtocolError as error:
            problem = str(error)
        code = await engine.child.wait_or_kill(0.0 if problem else _EXIT_S)
        await engine.pipe.close()
        del self._engines[engine.rank]
        self._announce()
        self._report(
            RankExited(
                epoch=epoch,
                rank=engine.rank,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                expected=engine.is_stopping,
                last_lines=(*engine.child.last_lines, *((problem,) if problem else ())),
            )
        )

    def _announce(self) -> None:
        self._on_change({rank: engine.child.identity for rank, engine in self._engines.items()})
