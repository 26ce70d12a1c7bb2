"""An engine that fails on order: `python -m mlx_mesh.node.engine.faulty --faults SPEC,SPEC --fd N`.

Started instead of the plain engine by `mlx-mesh up --sim N --fault SPEC`, and by nothing else. It is the
plain engine with its own classes wrapped at the moments that mesh.faults names; no plain engine imports this.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mlx_mesh.mesh.faults import Fault, FaultKind, Moment, faults_of
from mlx_mesh.mesh.messages import EngineConfig, PhaseReached, StepPlan
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.engine import __main__ as plain
from mlx_mesh.node.engine.report import Reporter

_IDLE_POLL_S = 0.05


class Saboteur:
    """Counts moments and strikes when a fault is due; each fault strikes once per process."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._due: list[Fault] = []
        self._num_seen: dict[Moment, int] = {}
        self._num_to_drop = 0
        self._must_corrupt = False
        self.phase = Phase.STARTING

    def learn(self, config: EngineConfig) -> None:
        """Only now is it known which rank and epoch this is."""
        self._due = list(faults_of(self._texts, config.rank, config.epoch))

    def at(self, moment: Moment) -> None:
        """This rank is at such a moment now."""
        seen = self._num_seen.get(moment, 0)
        self._num_seen[moment] = seen + 1
        self.strike(moment, seen)

    def strike(self, moment: Moment, count: int) -> None:
        for fault in [f for f in self._due if f.moment is moment and count >= f.count]:
            self._due.remove(fault)
            print(f"fault: {fault.kind} at {moment}, as ordered", file=sys.stderr, flush=True)
            self._do(fault)

    def waits_for(self, moment: Moment) -> bool:
        return any(fault.moment is moment for fault in self._due)

    def takes_message(self) -> bool:
        """Whether the message in hand is lost."""
        if not self._num_to_drop:
            return False
        self._num_to_drop -= 1
        print("fault: a message is lost, as ordered", file=sys.stderr, flush=True)
        return True

    def takes_truth(self) -> bool:
        """Whether the numbers in hand are to be falsified."""
        must, self._must_corrupt = self._must_corrupt, False
        return must

    def _do(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.FREEZE:
                os.kill(os.getpid(), signal.SIGSTOP)
            case FaultKind.DELAY:
                time.sleep(fault.value)
            case FaultKind.DROP:
                self._num_to_drop += 1
            case FaultKind.CORRUPT:
                self._must_corrupt = True
            case FaultKind.MEMORY:
                _cap_memory(int(fault.value))


def _cap_memory(more_bytes: int) -> None:
    """From now on this process gets only so many bytes more than it has, used or free. Linux: RLIMIT_DATA
    counts writable memory; address space would also count what malloc has set aside for threads."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmData:"))
    limit = int(kilobytes) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def sabotage_reports(saboteur: Saboteur) -> None:
    """Bring-up's moments: a phase begins, a layer is loaded."""
    enter, reached, progress, send = Reporter.enter, Reporter.reached, Reporter.progress, Reporter.send
    moments = {Phase.CONNECTING: Moment.CONNECT, Phase.WARMING: Moment.WARM_UP}

    def faulty_enter(self: Reporter, phase: Phase) -> None:
        enter(self, phase)
        saboteur.phase = phase
        if phase in moments:
            saboteur.at(moments[phase])

    def faulty_reached(self: Reporter, phase: Phase, **more: Any) -> None:
        reached(self, phase, **more)
        saboteur.phase = phase

    def faulty_progress(self: Reporter, done: int, total: int) -> None:
        progress(self, done, total)
        if self.phase is Phase.LOADING:
            saboteur.at(Moment.LOAD)

    def faulty_send(self: Reporter, report: Any) -> None:
        if isinstance(report, PhaseReached):
            if saboteur.takes_message():
                return
            if report.phase is Phase.LOADED and saboteur.takes_truth():
                return self._pipe._sock.sendall(b"\x00\x00\x00\x03abc")
        send(self, report)

    Reporter.enter = faulty_enter  # type: ignore[method-assign]
    Reporter.reached = faulty_reached  # type: ignore[method-assign]
    Reporter.progress = faulty_progress  # type: ignore[method-assign]
    Reporter.send = faulty_send  # type: ignore[method-assign]


def watch_idleness(saboteur: Saboteur, reporter: Reporter) -> None:
    """In a thread: strike after so many seconds without a row."""
    idle_since: float | None = None
    while saboteur.waits_for(Moment.IDLE):
        is_idle = reporter.phase is Phase.READY and not reporter.num_sequences and reporter.busy_since is None
        now = time.monotonic()
        idle_since = (idle_since or now) if is_idle else None
        if idle_since is not None:
            saboteur.strike(Moment.IDLE, int(now - idle_since))
        time.sleep(_IDLE_POLL_S)


def sabotage_steps(saboteur: Saboteur) -> None:
    """After the import of MLX: what ranks tell each other."""
    import mlx.core as mx

    from mlx_mesh.node.engine import group, loop, pictures, plans, tower_memo
    from mlx_mesh.node.engine.exchanges import RingExchange

    apply, broadcast = loop.Generation.apply, RingExchange.broadcast_ids
    send, recv = RingExchange.send, RingExchange.recv
    publish, take = plans.PlanPublisher.publish, plans.PlanReceiver.next
    rank_code = group.rank_code

    def faulty_apply(self: Any, plan: StepPlan, request_of: Any = None) -> None:
        apply(self, plan, request_of)
        if self.num_rows and saboteur.phase is Phase.READY:
            saboteur.at(Moment.PREFILL if self._prompt_left else Moment.DECODE)

    def falsified(x: Any) -> Any:
        is_checked = saboteur.phase is Phase.WARMING and saboteur.takes_truth()
        return x + mx.ones_like(x) if is_checked else x

    def faulty_broadcast(self: Any, ids: Any, num_rows: int, after: list[Any]) -> Any:
        true = broadcast(self, ids, num_rows, after)
        return (true + 1) % 128 if saboteur.takes_truth() else true

    read, call_tower = pictures.Pictures.read, tower_memo.TowerMemo.call

    def faulty_read(self: Any, media: Any) -> Any:
        saboteur.at(Moment.PICTURES)
        return read(self, media)

    def faulty_tower(self: Any, number: int, original: Any, args: Any, kwargs: Any) -> Any:
        saboteur.at(Moment.TOWER)
        return call_tower(self, number, original, args, kwargs)

    def faulty_publish(self: Any, plan: StepPlan) -> None:
        if _has_features(plan):
            saboteur.at(Moment.FEATURES)
        if saboteur.takes_message():
            self._step = plan.step
        else:
            publish(self, plan)

    def faulty_take(self: Any) -> StepPlan:
        if saboteur.takes_message():
            self._socket.recv_multipart()
        plan = take(self)
        if _has_features(plan):
            saboteur.at(Moment.FEATURES)
        return plan

    loop.Generation.apply = faulty_apply  # type: ignore[method-assign]
    RingExchange.broadcast_ids = faulty_broadcast  # type: ignore[method-assign]
    RingExchange.send = lambda self, x, to: send(self, falsified(x), to)  # type: ignore[method-assign]
    RingExchange.recv = lambda self, *what: falsified(recv(self, *what))  # type: ignore[method-assign]
    plans.PlanPublisher.publish = faulty_publish  # type: ignore[method-assign]
    plans.PlanReceiver.next = faulty_take  # type: ignore[method-assign]
    pictures.Pictures.read = faulty_read  # type: ignore[method-assign]
    tower_memo.TowerMemo.call = faulty_tower  # type: ignore[method-assign]
    group.rank_code = lambda rank, epoch: rank_code(rank, epoch) + saboteur.takes_truth()


def _has_features(plan: StepPlan) -> bool:
    return any(admission.features for admission in plan.admit)


def main(arguments: list[str]) -> int:
    """The plain engine's whole life, with faults."""
    at = arguments.index("--faults")
    saboteur = Saboteur(tuple(arguments[at + 1].split(",")))
    read_config, startup = plain.read_config, plain.startup

    def faulty_read_config(sock: socket.socket) -> EngineConfig:
        config = read_config(sock)
        saboteur.learn(config)
        return config

    def faulty_startup(config: EngineConfig, sock: socket.socket, reporter: Reporter) -> plain.Engine:
        engine = startup(config, sock, reporter)
        sabotage_steps(saboteur)
        threading.Thread(target=watch_idleness, args=(saboteur, reporter), daemon=True).start()
        return engine

    plain.read_config, plain.startup = faulty_read_config, faulty_startup
    sabotage_reports(saboteur)
    return plain.main(arguments[:at] + arguments[at + 2 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
