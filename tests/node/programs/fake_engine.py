"""An engine without MLX: it speaks the engine's pipe protocol and misbehaves on request.

    fake_engine.py --script FILE --fd N

FILE is JSON: {"EPOCH.RANK.POINT": ACTION}, where EPOCH and RANK may be "*", POINT is one of spawn connect
load warm_up submit "submit ID" stop digest, and ACTION is hang, towers (for ever), freeze, exit:STATUS, kill,
fail:KIND, garbage or version:TEXT; of digest it is what the rank says of its history. SIGUSR2: it says that a
step does not end.
Tokens are a pure function of the prompt and the position, so that a test knows the undisturbed answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from mlx_mesh.mesh.messages import (
    Cancel,
    Connect,
    EngineCommand,
    EngineConfig,
    EngineFailed,
    EngineHello,
    GenerateRequest,
    Heartbeat,
    JoinPlans,
    Load,
    PhaseReached,
    Progress,
    StepDigest,
    StopEngine,
    Submit,
    TokenChunk,
    Tokens,
    WarmUp,
)
from mlx_mesh.mesh.types import Phase, Versions
from mlx_mesh.node.pipe import BlockingPipe

STEP_S = 0.01


def token(prompt_ids: tuple[int, ...], position: int) -> int:
    """The token at `position` of the answer."""
    return (sum(prompt_ids) * 31 + position * 7) % 1000


class FakeEngine:
    def __init__(self, sock: socket.socket, script: dict[str, str]) -> None:
        self.script = script
        first = BlockingPipe(sock, msgspec.msgpack.Decoder(EngineConfig))
        config = first.receive()
        assert config is not None
        self.config = config
        self.pipe: BlockingPipe[Any] = BlockingPipe(sock, msgspec.msgpack.Decoder(EngineCommand))
        self.sock = sock
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.phase = Phase.STARTING
        self.step = 0
        self.running: dict[str, tuple[GenerateRequest, int]] = {}
        self.is_stuck = self.is_paranoid = self.reads_media = False
        self.stuck_since = 0.0

    def act(self, point: str) -> None:
        for epoch in (self.config.epoch, "*"):
            for rank in (self.config.rank, "*"):
                if action := self.script.get(f"{epoch}.{rank}.{point}"):
                    self.do(action)
                    return

    def do(self, action: str) -> None:
        name, _, argument = action.partition(":")
        print(f"acting: {action}", flush=True)
        if name == "hang":
            threading.Event().wait()
        elif name == "towers":
            self.reads_media = True
            self.get_stuck()
            threading.Event().wait()
        elif name == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "exit":
            os._exit(int(argument))
        elif name == "fail":
            self.pipe.send(EngineFailed(phase=self.phase, kind=argument, message=f"scripted {argument}"))  # type: ignore[arg-type]
            os._exit(1)
        elif name == "garbage":
            self.sock.sendall(b"\x00\x00\x00\x03abc")

    def version(self) -> str:
        action = self.script.get(f"{self.config.epoch}.{self.config.rank}.spawn", "")
        return action.removeprefix("version:") if action.startswith("version:") else "1"

    def read(self) -> None:
        with contextlib.suppress(OSError):
            while (command := self.pipe.receive()) is not None:
                self.commands.put(command)
        os._exit(9)

    def beat(self) -> None:
        while True:
            self.pipe.send(
                Heartbeat(
                    phase=self.phase,
                    step=self.step,
                    num_sequences=len(self.running),
                    memory_bytes=1000,
                    expected_s=0.01,
                    reads_media=self.reads_media,
                    busy=self.is_stuck,
                    busy_s=time.monotonic() - self.stuck_since if self.is_stuck else 0.0,
                    digests=()
                    if self.phase is not Phase.READY or self.is_paranoid
                    else ((16, self.digest()),),
                )
            )
            time.sleep(self.config.heartbeat_interval_s)

    def digest(self) -> str:
        """All ranks have the same history, except for one that is scripted."""
        return self.script.get(f"{self.config.epoch}.{self.config.rank}.digest", "same")

    def get_stuck(self, *_: object) -> None:
        self.stuck_since = time.monotonic()
        self.is_stuck = True

    def reached(self, phase: Phase, **more: Any) -> None:
        self.phase = phase
        self.pipe.send(PhaseReached(phase=phase, **more))

    def run(self) -> None:
        print(f"engine of rank {self.config.rank} in epoch {self.config.epoch}", flush=True)
        threading.Thread(target=self.read, daemon=True).start()
        self.act("spawn")
        version = self.version()
        versions = Versions(mlx_mesh=version, mlx="1", mlx_lm="1", python="3")
        self.pipe.send(EngineHello(pid=os.getpid(), versions=versions))
        self.phase = Phase.IMPORTED
        threading.Thread(target=self.beat, daemon=True).start()
        while True:
            command = self.next_command()
            if command is not None:
                self.obey(command)
            elif self.running:
                self.generate()

    def next_command(self) -> Any:
        if not self.running:
            return self.commands.get()
        try:
            return self.commands.get(timeout=STEP_S)
        except queue.Empty:
            return None

    def obey(self, command: Any) -> None:
        match command:
            case Connect():
                self.phase = Phase.CONNECTING
                print("addresses", json.dumps(command.addresses), flush=True)
                self.act("connect")
                endpoint = "tcp://127.0.0.1:1" if command.rank == 0 else ""
                self.reached(Phase.CONNECTED, plan_endpoint=endpoint)
            case JoinPlans():
                print("plans", command.endpoint, flush=True)
            case Load():
                self.phase = Phase.LOADING
                self.is_paranoid = command.is_paranoid
                print("model", command.model, flush=True)
                print("digest", command.model_digest or "is not compared", flush=True)
                self.pipe.send(Progress(phase=Phase.LOADING, done=1, total=2))
                self.act("load")
                self.reached(Phase.LOADED, weights_bytes=4096)
            case WarmUp():
                self.phase = Phase.WARMING
                self.act("warm_up")
                self.reached(Phase.READY)
                if self.is_paranoid and self.config.rank and self.digest() != "none":
                    for step in range(200):
                        self.pipe.send(StepDigest(step=step + 1, digest=str(step)))
            case Submit(request=request):
                self.running[request.id] = (request, len(request.sent_ids))
                self.pipe.send(Tokens(step=self.step, chunks=(), admitted=(request.id,)))
                self.act("submit")
                self.act(f"submit {request.id}")
            case Cancel(id=request_id):
                if self.running.pop(request_id, None):
                    self.send([TokenChunk(id=request_id, finish_reason="cancelled")])
            case StopEngine():
                self.act("stop")
                os._exit(0)

    def generate(self) -> None:
        self.step += 1
        chunks = []
        for request_id, (request, position) in list(self.running.items()):
            ids = (token(request.prompt_ids, position),)
            is_last = position + 1 >= request.max_tokens
            chunks.append(
                TokenChunk(id=request_id, token_ids=ids, finish_reason="length" if is_last else None)
            )
            if is_last:
                del self.running[request_id]
            else:
                self.running[request_id] = (request, position + 1)
        self.send(chunks)

    def send(self, chunks: list[TokenChunk]) -> None:
        if self.is_paranoid:
            self.pipe.send(StepDigest(step=self.step, digest=str(self.step - 1)))
        self.pipe.send(Tokens(step=self.step, chunks=tuple(chunks)))
        if not self.running:
            print("all tokens sent", flush=True)


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    scripted = json.loads(Path(arguments["--script"]).read_text())
    engine = FakeEngine(socket.socket(fileno=int(arguments["--fd"])), scripted)
    signal.signal(signal.SIGUSR2, engine.get_stuck)
    engine.run()
