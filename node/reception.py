"""One front end, the replicas of the model behind it, and who gets which request.

Each replica is a coordinator with hosts, epochs and a journal of its own; what breaks in one does not touch
the others. With one replica everything passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from socket import socket
from typing import Any

import msgspec

from mlx_mesh.mesh.messages import (
    AgentConfig,
    Cancel,
    ChangeNode,
    Embed,
    EpochEnded,
    LauncherEvent,
    MeshDown,
    MeshReady,
    MeshStatus,
    NodeReply,
    ProxyConfig,
    ProxyEvent,
    ProxyRequest,
    Readiness,
    ResetPrefixes,
    ScanNetwork,
    StatusQuery,
    StatusReply,
    Submit,
    SwitchModel,
    UnloadModel,
)
from mlx_mesh.mesh.replicas import config_of
from mlx_mesh.mesh.routing import Load, Prompt, Router
from mlx_mesh.node.channel import AgentsChannel
from mlx_mesh.node.children import Programs
from mlx_mesh.node.coordinator import Coordinator
from mlx_mesh.node.embedder import Embedder
from mlx_mesh.node.front import Front, ProxyFailed
from mlx_mesh.node.inspection import Inspector
from mlx_mesh.node.logs import RankLogs
from mlx_mesh.node.output import Output
from mlx_mesh.node.processes import ProcessId
from mlx_mesh.node.replica_status import merge_readiness, merge_status, replica_metrics
from mlx_mesh.node.scans import Scans
from mlx_mesh.node.shared_channel import SharedChannel


class Reception:
    """`run` once; `stop` from anywhere in the same loop."""

    def __init__(
        self,
        config: AgentConfig,
        channel: AgentsChannel,
        *,
        local_peer: bytes,
        model: Path | None,
        programs: Programs,
        listen: socket,
        url: str,
        output: Output,
        logs: RankLogs,
        on_proxy: Callable[[ProcessId], None],
        embedder: Embedder | None = None,
    ) -> None:
        """`local_peer`: identity of the agent in this process, which outlives the mesh; `model`: the
        folder on this host, None when it is missing (the agent's facts say why); `embedder`: the child for
        embeddings, not started yet, if there is to be one."""
        assert config.mesh is not None
        mesh = config.mesh
        self._model = model
        self._output = output
        self._deadlines = mesh.deadlines
        self._num_replicas = mesh.num_replicas
        self._router = Router(mesh.num_replicas)
        self._num_places = mesh.max_sequences
        self._helpers: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._was_ready: set[int] = set()
        self._told_ready: set[int] = set()
        self._embedder = embedder
        replica_of = {host.name: host.replica for host in mesh.hosts}
        self._shared = (
            SharedChannel(channel, mesh.num_replicas, lambda join: replica_of.get(join.host, 0))
            if mesh.num_replicas > 1
            else None
        )
        inspector = Inspector(programs.inspect)
        self._places = [_Place(self, at) for at in range(mesh.num_replicas)]
        self._replicas = [
            Coordinator(
                msgspec.structs.replace(config, mesh=config_of(mesh, at)),
                channel if self._shared is None else self._shared.parts[at],
                local_peer=local_peer,
                model=model,
                inspector=inspector,
                front=self._places[at],
                url=url,
                output=output if self._shared is None else _ReplicaOutput(output, self, at),
                logs=logs,
            )
            for at in range(mesh.num_replicas)
        ]
        self._readiness = self._merged_readiness()
        self.front = Front(
            program=programs.proxy,
            config=self._replicas[0].proxy_config(),
            listen=listen,
            start_s=self._deadlines.spawn_s,
            silence_s=self._deadlines.proxy_silence_s,
            on_request=self._hear,
            on_lost=self._lost_proxy,
            on_line=lambda line: self._replicas[0].log(f"proxy: {line}"),
            on_change=on_proxy,
        )
        self.front.greet_with(lambda: self._readiness)
        self._scans = Scans(self.front.send)
        if embedder is not None:
            embedder.attach(self.front.send, lambda line: self._replicas[0].log(f"embedder: {line}"))

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Until the mesh is stopped (returns) or cannot go on (raises MeshError). Nothing of it is left on
        any host that answers, and the open requests have their answer."""
        self._startup()
        lives = [asyncio.create_task(replica.run(), name="coordinator") for replica in self._replicas]
        try:
            await asyncio.wait(lives, return_when=asyncio.FIRST_EXCEPTION)
            for life in lives:
                if life.done() and (error := life.exception()) is not None:
                    self._end_others(str(error))
        finally:
            for life in lives:
                if not self._is_stopping:
                    life.cancel()
            ends = await asyncio.gather(*lives, return_exceptions=True)
            await self._shutdown()
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def stop(self, reason: str, *, hurry: bool, is_failure: bool = False) -> None:
        """Ask for the end: open requests may finish within drain_s, or not at all when in a hurry.
        `is_failure`: it is no wish of the user's, and clients are told so."""
        self._is_stopping = True
        for replica in self._replicas:
            replica.stop(reason, hurry=hurry, is_failure=is_failure)

    def _end_others(self, reason: str) -> None:
        if self._num_replicas > 1:
            self._output.note(f"a replica cannot go on, and no other one serves: {reason}")
        self.stop(reason, hurry=True, is_failure=True)

    def _startup(self) -> None:
        if self._shared is not None:
            self._help(self._shared.run(), "shared channel")
        if self._model is not None:
            self._help(self.front.run(), "proxy")
            if self._embedder is not None:
                self._help(self._embedder.run(), "embedder")

    def _help(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._helper_done)
        self._helpers.append(task)

    def _helper_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, ProxyFailed) and self._replicas[0].take_front_failure(str(error)):
            self._help(self.front.run(), "proxy")
            return
        for replica in self._replicas:
            replica.fail(error)

    async def _shutdown(self) -> None:
        """After the replicas, whose requests have their answers."""
        await self.front.stop(self._deadlines.stop_s)
        await self._scans.stop()
        if self._embedder is not None:
            await self._embedder.stop()
        for helper in reversed(self._helpers):
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)

    # ------------------------------------------------------------ from the proxy

    def _hear(self, request: ProxyRequest) -> None:
        match request:
            case Submit(request=generate):
                prompt = Prompt(
                    generate.prompt_ids,
                    generate.conversation,
                    generate.cache_salt,
                    keeps=not generate.skip_prefix_cache,
                )
                holder = self._holder_of(generate.id)
                at = self._router.choose(prompt, self._loads()) if holder is None else holder
                self._replicas[at].desk.hear(request)
            case Cancel(id=request_id):
                if self._embedder is not None:
                    self._embedder.cancel(request_id)
                if (holder := self._holder_of(request_id)) is not None:
                    self._replicas[holder].desk.hear(request)
            case Embed():
                if self._embedder is not None:
                    self._embedder.submit(request)
            case StatusQuery(id=query_id):
                self.front.send(StatusReply(id=query_id, status=self.status(request.with_metrics)))
            case ChangeNode():
                self.front.send(self._change_node(request))
            case ResetPrefixes(id=query_id):
                self.front.send(self._reset_prefixes(query_id))
            case UnloadModel():
                self._answer([replica.order_unload(request) for replica in self._replicas])
            case SwitchModel():
                replies = [replica.order_load(request) for replica in self._replicas]
                known = [reply for reply in replies if reply is not None]
                if known:
                    self._answer(known)
                else:
                    self._replicas[0].order_switch(request)
            case ScanNetwork():
                self._scans.hear(request)
            case _:
                pass

    def _answer(self, replies: Sequence[NodeReply]) -> None:
        """One for all: what changes counts before what is refused."""
        self.front.send(min(replies, key=lambda reply: (not reply.is_changing, bool(reply.error))))

    def _holder_of(self, request_id: str) -> int | None:
        """The replica that has this request open."""
        return next((at for at, one in enumerate(self._replicas) if request_id in one.desk.journal), None)

    def _loads(self) -> list[Load | None]:
        return [
            Load(len(one.desk.journal), self._num_places, one.desk.is_ready) if one.desk.is_open else None
            for one in self._replicas
        ]

    def _lost_proxy(self, how: str) -> None:
        num_open = sum(len(replica.desk.journal) for replica in self._replicas)
        self._output.note(f"the HTTP proxy {how}; {num_open} open requests are lost with it")
        self.forget_clients()

    def forget_clients(self) -> None:
        """The proxy is another one now, or will be."""
        for replica in self._replicas:
            replica.desk.lost_proxy()
        if self._embedder is not None:
            self._embedder.forget_clients()

    def _change_node(self, request: ChangeNode) -> NodeReply:
        for replica in self._replicas:
            if replica.has_host(request.host):
                return replica.change_node(request)
        reply = self._replicas[0].change_node(request)
        if self._num_replicas > 1 and reply.error == "host_not_found":
            names = ", ".join(name for replica in self._replicas for name in replica.host_names)
            message = f"{request.host} is no host of this mesh; it has {names}."
            reply = msgspec.structs.replace(reply, message=message)
        return reply

    def _reset_prefixes(self, query_id: str) -> NodeReply:
        """On all that are ready; one that is not begins with nothing anyway."""
        ready = [replica for replica in self._replicas if replica.desk.is_ready] or self._replicas[:1]
        self._router.forget_all()
        replies = [replica.desk.reset_prefixes(query_id) for replica in ready]
        return replies[0]

    # ------------------------------------------------------------ from the replicas

    def hear_replica(self, at: int, event: ProxyEvent) -> None:
        """What a replica has for the proxy."""
        match event:
            case Readiness():
                if not event.ready:
                    self._router.forget(at)  # its next engines keep nothing
                else:
                    self._was_ready.add(at)
                    for other, replica in enumerate(self._replicas):
                        if not replica.desk.is_ready:
                            self.rescue(other)
                self._announce()
            case _:
                self.front.send(event)

    def _announce(self) -> None:
        readiness = self._merged_readiness()
        if readiness != self._readiness:
            self._readiness = readiness
            self.front.send(readiness)

    def _merged_readiness(self) -> Readiness:
        return merge_readiness(
            [replica.desk.readiness for replica in self._replicas],
            is_complete=len(self._was_ready) == self._num_replicas,
        )

    def rescue(self, at: int) -> int:
        """Let other replicas go on with the open requests of one that has no engine now. Those that may have
        ended it stay there. Returns how many went."""
        count = 0
        for request_id in self._replicas[at].desk.journal.blameless():
            loads = self._loads()
            loads[at] = None
            able = [one for one, load in enumerate(loads) if load is not None and load.is_ready]
            if not able:
                break
            entry = self._replicas[at].desk.journal.give(request_id)
            request = entry.request
            prompt = Prompt(request.prompt_ids, request.conversation, request.cache_salt)
            self._replicas[self._router.choose(prompt, loads)].desk.adopt(entry)
            count += 1
        if count:
            self._output.note(f"{count} open requests of replica {at + 1} go on in others")
        return count

    def others_serve(self, at: int) -> bool:
        return any(one.desk.will_serve for other, one in enumerate(self._replicas) if other != at)

    def tell(self, at: int, event: LauncherEvent) -> None:
        """What one of several replicas says to the launcher."""
        name = f"replica {at + 1}"
        match event:
            case MeshReady():
                was_complete = len(self._told_ready) == self._num_replicas
                self._told_ready.add(at)
                if was_complete:
                    lineup = f"{name}, {event.lineup}" if event.lineup else name
                    self._output.event(msgspec.structs.replace(event, lineup=lineup))
                elif len(self._told_ready) == self._num_replicas:
                    size = sum(len(replica.roster.ranks) for replica in self._replicas)
                    self._output.event(msgspec.structs.replace(event, restarted=False, world_size=size))
                else:
                    self._output.note(f"{name} is ready")
            case EpochEnded():
                self._output.event(msgspec.structs.replace(event, cause=f"{name}: {event.cause}"))
            case MeshDown():
                self._output.event(MeshDown(reason=f"up without {name}, which is {event.reason}"))
            case _:
                self._output.event(event)

    # ------------------------------------------------------------ telling

    def status(self, with_metrics: bool = False) -> MeshStatus:
        """From heartbeats only."""
        found = merge_status(
            [replica.status(with_metrics) for replica in self._replicas],
            self._merged_readiness(),
            self._router.counts,
        )
        embedding = self._embedder.status() if self._embedder is not None else None
        metrics = found.metrics
        if with_metrics and self._num_replicas > 1:
            metrics += replica_metrics(self._merged_readiness(), self._router.counts)
        if with_metrics and self._embedder is not None:
            metrics += self._embedder.metrics()
        return msgspec.structs.replace(found, embedding=embedding, metrics=metrics)


class _Place:
    """What one replica sees of the front end."""

    def __init__(self, reception: Reception, at: int) -> None:
        self._reception = reception
        self._at = at

    @property
    def is_ready(self) -> bool:
        return self._reception.front.is_ready

    def send(self, event: ProxyEvent) -> None:
        self._reception.hear_replica(self._at, event)

    async def replace(self, config: ProxyConfig, stop_s: float) -> None:
        await self._reception.front.replace(config, stop_s)
        self._reception.forget_clients()

    def rescue(self) -> int:
        return self._reception.rescue(self._at)

    def others_serve(self) -> bool:
        return self._reception.others_serve(self._at)


class _ReplicaOutput(Output):
    """Says of which replica a line is."""

    def __init__(self, inner: Output, reception: Reception, at: int) -> None:
        super().__init__("")
        self._inner, self._reception, self._at = inner, reception, at

    def event(self, event: LauncherEvent) -> None:
        self._reception.tell(self._at, event)

    def note(self, text: str) -> None:
        self._inner.note(f"replica {self._at + 1}: {text}")
