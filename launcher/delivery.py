"""Bring a model to the hosts of a mesh: who has it, who needs which bytes of it, and a transfer that can be
ended at any moment and goes on where it was.

Senders and receivers are short-lived processes on the hosts. Each pair has a token and a certificate of its
own, made for this delivery; both go over the hosts' SSH sessions only.
"""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import msgspec

from mlx_mesh.launcher.config import LaunchConfig, is_hub_id, model_candidates
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.delivery_process import STALL_S, DeliveryFailed, DeliveryProcess, Heard, ask
from mlx_mesh.launcher.plan import inspect_flags
from mlx_mesh.launcher.preflight import ReadyHost
from mlx_mesh.launcher.remote import CommandTimeout, Exit, run
from mlx_mesh.mesh.delivery import (
    Assignment,
    Holder,
    Holding,
    Piece,
    Route,
    Spans,
    assign,
    gigabytes,
    missing_spans,
    needed_spans,
    pieces_of,
    route_between,
    short_disks,
    size_of,
    stale_files,
    whole_files,
)
from mlx_mesh.mesh.delivery_orders import (
    Failed,
    Fetched,
    FetchOrder,
    Hashes,
    HashOrder,
    Looked,
    LookOrder,
    Offering,
    Peer,
    Reading,
    Received,
    ReceiveOrder,
    Receiving,
    Refused,
    Said,
    SendOrder,
    Source,
)
from mlx_mesh.mesh.errors import MeshError, PlacementError, PreflightError
from mlx_mesh.mesh.interfaces import Interface, is_allowed
from mlx_mesh.mesh.part_record import RecordHead
from mlx_mesh.mesh.types import Placement

NEEDS_TIMEOUT_S = 300.0
FETCH_STALL_S = 600.0  # a hub that gives nothing for so long
OFFER_S = 30.0
TOKEN_BYTES = 32
MAX_STRANGERS = 1000  # that are passed over for a sign of life that may be behind them
MAX_REFUSED = 32  # strangers that are told of, each once
MAX_REPEATS = 3  # of a delivery after which something is missing still, beside one for each host that is lost


@dataclass(frozen=True, slots=True)
class Brought:
    """What a delivery did for one host, in bytes."""

    host: str
    folder: str
    needed: int  # what its ranks read, with small files
    missing: int  # of that, what it did not have
    received: int  # over the network, frames and repetitions included
    seconds: float
    words: str = ""  # from whom, over what


class Delivery:
    """One model, one set of hosts. `look`, then `find`, then `missing` or `bring`."""

    def __init__(self, config: LaunchConfig, hosts: Sequence[ReadyHost], console: Console) -> None:
        self._config = config
        self._hosts: dict[str, ReadyHost] = {}  # of several members on one machine the first
        for host in hosts:
            self._hosts.setdefault(host.machine, host)
        self._machines = {host.entry.name: host.machine for host in hosts}
        self._console = console
        self._keys = {name: index for index, name in enumerate(self._hosts)}
        self.holdings: dict[str, Holding] = {}
        self.reference = ""  # the host whose files count
        self.refused: list[str] = []
        self._verifies = False
        self.seconds: dict[str, float] = {}  # that receivers were at work, by host

    # ------------------------------------------------------------ who has it

    def look(self, *, verify: bool = False) -> None:
        """Ask all hosts at once. Raises PreflightError with a line for each that cannot answer."""
        self._verifies = self._verifies or verify
        heard: queue.Queue[tuple[str, Said]] = queue.Queue()

        def look_at(host: ReadyHost) -> Holding | MeshError:
            def order(marker: str) -> LookOrder:
                candidates = tuple(model_candidates(self._config.model, host.entry.models))
                asked, models = self._config.model, host.entry.models
                return LookOrder(
                    marker=marker, asked=asked, candidates=candidates, models=models, verify=verify
                )

            name = host.entry.name
            try:
                said = ask(
                    name, host.remote, host.python, "look", order, lambda said: heard.put((name, said))
                )
            except MeshError as error:
                return error
            return said.holding if isinstance(said, Looked) else DeliveryFailed(f"{name}: no answer")

        with ThreadPoolExecutor(len(self._hosts)) as pool:
            work = {name: pool.submit(look_at, host) for name, host in self._hosts.items()}
            while not all(item.done() for item in work.values()) or not heard.empty():
                try:
                    name, said = heard.get(timeout=0.1)
                except queue.Empty:
                    continue
                if isinstance(said, Reading):
                    self._show(name, "reading again", said.done, said.total)
        self._console.finish_progress()
        answers = {name: item.result() for name, item in work.items()}
        errors = [str(answer) for answer in answers.values() if isinstance(answer, MeshError)]
        if errors:
            raise PreflightError("\n".join(errors))
        self.holdings = {name: each for name, each in answers.items() if isinstance(each, Holding)}
        for name, holding in self.holdings.items():
            if holding.num_damaged:
                self._console.warn(
                    f"{name}: {holding.num_damaged} pieces in {holding.folder} are not what was received; "
                    "they are fetched again"
                )

    def find(self, *, may_fetch: bool = True) -> str:
        """The host whose files count: of the user's own complete folders the first, then one that was
        delivered as a whole, then a part. When no host has anything, and it may, one host fetches the model
        from the hub. '' when it may not. Raises PreflightError."""
        order = [
            name
            for wanted in (("whole", False), ("whole", True), ("part", True))
            for name, holding in self.holdings.items()
            if (holding.state, holding.is_delivered) == wanted
        ]
        if order:
            self.reference = order[0]
            self._check_same()
        elif may_fetch:
            self.reference = self._fetch()
        return self.reference

    def _check_same(self) -> None:
        """Two complete folders of the user's own with different models are not ours to choose between."""
        wanted = self.holdings[self.reference]
        others = [
            f"{name}: model: {holding.folder} differs from {self.reference}'s {wanted.folder} "
            f"({_difference(wanted, holding)}); remove the wrong one, and it is brought"
            for name, holding in self.holdings.items()
            if holding.state == "whole"
            and not holding.is_delivered
            and (
                holding.digest != wanted.digest
                or (stale_files(wanted.files, holding.files) and not self._verifies)  # `compare` tells more
            )
        ]
        if others and not wanted.is_delivered:
            raise PreflightError("\n".join(others))

    def _fetch(self) -> str:
        """From the hub, by the first host that can."""
        model = self._config.model
        problems = [f"{name}: model: {holding.problem}" for name, holding in self.holdings.items()]
        if not is_hub_id(model):
            raise PreflightError("\n".join([*problems, "Copy the model's folder to one of these hosts."]))
        if self._config.is_offline:
            raise PreflightError(
                "\n".join([*problems, "No host has the model, and --offline forbids to ask the hub."])
            )
        failed: list[str] = []
        for name, host in self._hosts.items():
            self._console.say(f"No host has {model}: {name} fetches it from the hub, once for all.")

            def show(said: Said, name: str = name) -> None:
                if isinstance(said, Reading):
                    self._show(name, "fetching", said.done, said.total)

            def order(marker: str) -> FetchOrder:
                return FetchOrder(marker=marker, model=model)

            try:
                said = ask(name, host.remote, host.python, "fetch", order, show, FETCH_STALL_S)
            except MeshError as error:
                self._console.finish_progress()
                self._console.warn(str(error))
                failed.append(str(error))
                continue
            self._console.finish_progress()
            if isinstance(said, Fetched):
                self.look()
                if self.holdings[name].state == "whole":
                    return name
                failed.append(f"{name}: {said.folder} is not complete: {self.holdings[name].problem}")
        raise PreflightError("\n".join(failed))

    # ------------------------------------------------------------ what is missing

    @property
    def source(self) -> ReadyHost:
        """The reference, with its folder as its model."""
        host = self._hosts[self.reference]
        holding = self.holdings[self.reference]
        return replace(host, model=holding.folder) if holding.folder else host

    def needs(self, placements: Sequence[Placement]) -> dict[str, Spans]:
        """By host, of all replicas' placements; () = whole files. Raises MeshError."""
        reference = self.holdings[self.reference]
        if not placements:
            if reference.state != "whole":
                raise PreflightError(
                    f"no host has the whole model; {self.reference} has "
                    f"{gigabytes(size_of(reference.held))} of it. Without --full a part is enough"
                )
            return {name: whole_files(reference.files) for name in self._hosts}
        of_ranks: dict[str, list[Spans]] = {name: [] for name in self._hosts}
        for placement in placements:
            by_rank = self._needs_of_ranks(placement)
            for shard in placement.shards:
                of_ranks[self._machines[shard.host]].append(by_rank[shard.rank])
        return {name: needed_spans(reference.files, spans) for name, spans in of_ranks.items()}

    def _needs_of_ranks(self, placement: Placement) -> list[Spans]:
        source = self.source
        words = [source.python, "-I", "-u", "-m", "mlx_mesh.node.engine.needs", source.model]
        words += inspect_flags(source.adapter, is_offline=self._config.is_offline, vision=self._config.vision)
        try:
            completed = run(source.remote, words, msgspec.json.encode(placement) + b"\n", NEEDS_TIMEOUT_S)
        except CommandTimeout as error:
            raise PlacementError(str(error)) from error
        for line in reversed(completed.stdout):
            if completed.exit.code == 0 and line.startswith("["):
                return msgspec.json.decode(line, type=list[Spans])
        raise PlacementError(
            f"{self.reference} cannot tell which bytes each rank reads: "
            f"{completed.last_words() or completed.exit}"
        )

    def missing(self, needs: dict[str, Spans]) -> dict[str, Spans]:
        """Of each host; {} for one that has what it needs."""
        reference = self.holdings[self.reference]
        found: dict[str, Spans] = {}
        for name, needed in needs.items():
            holding = self.holdings[name]
            if holding.state == "whole" and holding.digest == reference.digest:
                found[name] = {}
                if not holding.is_delivered:
                    continue
            same = holding.digest == reference.digest
            found[name] = missing_spans(needed, holding.held if same else {})
            for file in stale_files(reference.files, holding.files) if same else ():
                found[name][file] = needed[file]
        return found

    # ------------------------------------------------------------ the transfer

    def bring(self, placements: Sequence[Placement]) -> list[Brought]:
        """Every host has what it needs afterwards; see `needs`. Raises PreflightError;
        what has come is kept then, and the next delivery goes on from there."""
        needs = self.needs(placements)
        lost: set[str] = set()
        received = dict.fromkeys(self._hosts, 0)
        first: dict[str, Spans] | None = None
        words: dict[str, str] = {}
        tries = 0
        while True:
            missing = self.missing(needs)
            first = first or missing
            if not any(missing.values()):
                break
            tries += 1
            if tries > len(self._hosts) + MAX_REPEATS:
                raise PreflightError(
                    f"{self.reference}: the model in {self.holdings[self.reference].folder} changes while it "
                    "is sent; run it again when the folder is complete"
                )
            self._check_disks(missing)
            try:
                self._transfer(missing, lost, received, words)
            except DeliveryFailed as error:
                others = [name for name in self.holdings if name != error.lost and name not in lost]
                if not error.lost or not any(self.holdings[name].files for name in others):
                    raise
                lost.add(error.lost)
                self._console.warn(f"{error}; trying the other hosts that have it")
            self.look()
        return [
            Brought(
                host=name,
                folder=self.holdings[name].folder,
                needed=size_of(needs[name]),
                missing=size_of(first[name]),
                received=received[name],
                seconds=self.seconds.get(name, 0.0),
                words=words.get(name, ""),
            )
            for name in self._hosts
        ]

    def _check_disks(self, missing: dict[str, Spans]) -> None:
        free = {name: holding.free_bytes for name, holding in self.holdings.items()}
        short = short_disks(
            {name: size_of(spans) for name, spans in missing.items()}, free, self._config.model
        )
        if short:
            raise PreflightError("\n".join(short))

    def _holders(self, lost: set[str]) -> list[Holder]:
        wanted = self.holdings[self.reference]
        return [
            Holder(
                host=name,
                interfaces=_usable(host),
                address=host.address,
                held=_held_as(wanted, self.holdings[name]),
            )
            for name, host in self._hosts.items()
            if self.holdings[name].digest == wanted.digest and name not in lost
        ]

    def _transfer(
        self, missing: dict[str, Spans], lost: set[str], received: dict[str, int], words: dict[str, str]
    ) -> None:
        holders = self._holders(lost)
        receivers = {
            name: Holder(host=name, interfaces=_usable(host), address=host.address)
            for name, host in self._hosts.items()
            if missing[name]
        }
        routes = {
            (receiver, sender.host): route_between(receivers[receiver], sender)
            for receiver in receivers
            for sender in holders
            if sender.host != receiver
        }
        assignments, nobody = assign(
            {name: pieces_of(missing[name]) for name in receivers},
            holders,
            {pair: route.rate for pair, route in routes.items()},
        )
        if nobody:
            raise PreflightError(
                "\n".join(
                    f"{name}: model: {gigabytes(sum(piece.size for piece in pieces))} that it needs are on "
                    "no host that can be reached. Put the model's complete folder on one of them"
                    for name, pieces in nobody.items()
                )
            )
        for assignment in assignments:
            words[assignment.receiver] = self._words_of(assignments, routes, assignment.receiver)
        _Transfer(self, assignments, routes).run(received)

    def _words_of(
        self, assignments: Sequence[Assignment], routes: dict[tuple[str, str], Route], receiver: str
    ) -> str:
        return ", ".join(
            f"from {each.sender}"
            + (f" over {route.words}" if (route := routes[receiver, each.sender]).words else "")
            for each in assignments
            if each.receiver == receiver
        )

    def _show(self, name: str, what: str, done: int, total: int, detail: str = "") -> None:
        self._console.transfer(self._keys[name], name, what, done, total, detail)

    # ------------------------------------------------------------ copies that were there before

    def compare(self, needs: dict[str, Spans]) -> None:
        """Read what the hosts have in folders of their own, and compare it with the reference's. Raises
        PreflightError that names file and bytes of each difference."""
        own = [
            name
            for name, holding in self.holdings.items()
            if name != self.reference and holding.state == "whole" and not holding.is_delivered
        ]
        if not own:
            return
        pieces = pieces_of({file: spans for name in own for file, spans in needs[name].items()})
        with ThreadPoolExecutor(len(own) + 1) as pool:
            names = [self.reference, *own]
            found = dict(zip(names, pool.map(lambda name: self._hashes(name, pieces), names), strict=True))
        self._console.finish_progress()
        faults = []
        for name in own:
            for piece, mine, wanted in zip(pieces, found[name], found[self.reference], strict=True):
                if mine != wanted:
                    faults.append(
                        f"{name}: model: bytes {piece.start} to {piece.end} of "
                        f"{PurePosixPath(self.holdings[name].folder) / piece.file} are not those of "
                        f"{self.reference}; copy the file again, or remove the folder, and it is brought"
                    )
        if faults:
            raise PreflightError("\n".join(faults))

    def _hashes(self, name: str, pieces: Sequence[Piece]) -> tuple[str, ...]:
        host, folder = self._hosts[name], self.holdings[name].folder
        said = ask(
            name,
            host.remote,
            host.python,
            "hashes",
            lambda marker: HashOrder(marker=marker, folder=folder, pieces=tuple(pieces)),
        )
        if not isinstance(said, Hashes):
            raise DeliveryFailed(f"{name}: no digests came")
        return said.sha256


def _difference(wanted: Holding, other: Holding) -> str:
    if wanted.digest != other.digest:
        return f"{other.digest[:12]} and {wanted.digest[:12]}"
    return f"other bytes in {', '.join(sorted(stale_files(wanted.files, other.files)))}"


def _held_as(wanted: Holding, holding: Holding) -> Spans | None:
    """What a host can send of the reference's model; None = everything."""
    stale = stale_files(wanted.files, holding.files)
    if holding.state == "whole" and not stale:
        return None
    held = whole_files(holding.files) if holding.state == "whole" else holding.held
    told = {file.name for file in holding.files}  # a sender refuses the others
    return {name: spans for name, spans in held.items() if name in told - stale}


def _usable(host: ReadyHost) -> tuple[Interface, ...]:
    """The interfaces that the user lets data go over."""
    return tuple(each for each in host.facts.interfaces if is_allowed(each.name, host.entry.interfaces))


class _Transfer:
    """Senders, then receivers, until all of these have what they were told to fetch."""

    def __init__(
        self,
        delivery: Delivery,
        assignments: Sequence[Assignment],
        routes: dict[tuple[str, str], Route],
    ) -> None:
        self._delivery = delivery
        self._assignments = assignments
        self._routes = routes
        self._tokens = {(each.receiver, each.sender): secrets.token_hex(TOKEN_BYTES) for each in assignments}
        self._heard: queue.Queue[Heard] = queue.Queue()
        self._processes: list[DeliveryProcess] = []
        self._offers: dict[str, Offering] = {}
        self._waiting: dict[str, DeliveryProcess] = {}  # receivers that are not done
        self._started_at: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._num_strangers = 0  # since a host was due to say something

    def run(self, received: dict[str, int]) -> None:
        """Raises DeliveryFailed for the first host that cannot go on; nothing is left running."""
        try:
            for sender in dict.fromkeys(each.sender for each in self._assignments):
                self._start_sender(sender)
            self._wait_for_offers()
            for receiver in dict.fromkeys(each.receiver for each in self._assignments):
                self._start_receiver(receiver)
            while self._waiting:
                self._take(received)
        finally:
            for process in reversed(self._processes):
                process.close()
            self._delivery._console.finish_progress()

    def _start(self, name: str, program: str, order: Callable[[str], msgspec.Struct]) -> DeliveryProcess:
        host = self._delivery._hosts[name]
        process = DeliveryProcess(name, host.remote, host.python, program, order, self._heard)
        self._processes.append(process)
        return process

    def _start_sender(self, sender: str) -> None:
        holding = self._delivery.holdings[sender]
        receivers = [each.receiver for each in self._assignments if each.sender == sender]
        addresses = dict.fromkeys(
            address for receiver in receivers for address in self._routes[receiver, sender].addresses
        )
        peers = tuple(Peer(host=name, token=self._tokens[name, sender]) for name in receivers)
        files = {file.name: file.size for file in holding.files}
        self._start(
            sender,
            "send",
            lambda marker: SendOrder(
                marker=marker,
                folder=holding.folder,
                files=files,
                addresses=tuple(addresses),
                peers=peers,
                held=None if holding.state == "whole" else holding.held,
            ),
        )

    def _wait_for_offers(self) -> None:
        wanted = {each.sender for each in self._assignments}
        until = time.monotonic() + OFFER_S
        while not wanted <= set(self._offers):
            try:
                heard = self._heard.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                late = ", ".join(sorted(wanted - set(self._offers)))
                raise DeliveryFailed(f"{late}: the sender did not start within {OFFER_S:g} s") from None
            if isinstance(heard.said, Offering):
                self._offers[heard.host] = heard.said
            elif isinstance(heard.said, Failed):
                raise DeliveryFailed(f"{heard.host}: {heard.said.message}", lost=heard.host)
            elif isinstance(heard.said, Exit):
                raise DeliveryFailed(
                    f"{heard.host}: the sender ended ({heard.said}) {self._last_words(heard.host)}",
                    lost=heard.host,
                )

    def _start_receiver(self, receiver: str) -> None:
        delivery = self._delivery
        reference, holding = delivery.holdings[delivery.reference], delivery.holdings[receiver]
        sources = tuple(
            Source(
                host=each.sender,
                endpoints=tuple(
                    (address, self._offers[each.sender].ports[address])
                    for address in self._routes[receiver, each.sender].addresses
                ),
                certificate=self._offers[each.sender].certificate,
                token=self._tokens[receiver, each.sender],
                pieces=each.pieces,
            )
            for each in self._assignments
            if each.receiver == receiver
        )
        head = RecordHead(
            asked=delivery._config.model,
            digest=reference.digest,
            files={file.name: file.size for file in reference.files},
            samples={file.name: file.sample for file in reference.files if file.sample},
        )
        again = (
            tuple(stale_files(reference.files, holding.files)) if holding.digest == reference.digest else ()
        )
        self._started_at[receiver] = self._heard_at[receiver] = time.monotonic()
        self._waiting[receiver] = self._start(
            receiver,
            "receive",
            lambda marker: ReceiveOrder(
                marker=marker, folder=holding.target, head=head, sources=sources, again=again
            ),
        )

    def _take(self, received: dict[str, int]) -> None:
        delivery = self._delivery
        silent = min(self._waiting, key=lambda name: self._heard_at[name])
        left_s = self._heard_at[silent] + STALL_S - time.monotonic()
        try:
            if self._num_strangers > MAX_STRANGERS:
                raise queue.Empty
            heard = self._heard.get(timeout=max(0.0, left_s))
        except queue.Empty:
            raise DeliveryFailed(f"{silent}: nothing came for {STALL_S:g} s") from None
        said = heard.said
        if isinstance(said, Refused):  # strangers are no sign of life
            self._num_strangers += left_s <= 0
        else:
            self._num_strangers, self._heard_at[heard.host] = 0, time.monotonic()
        if isinstance(said, Receiving):
            seconds = max(0.001, time.monotonic() - self._started_at[heard.host])
            detail = f"{said.done / 1e6 / seconds:.0f} MB/s" + (f" from {said.via}" if said.via else "")
            delivery._show(heard.host, "receiving", said.done, said.total, detail)
        elif isinstance(said, Received):
            received[heard.host] += said.num_bytes
            delivery.seconds[heard.host] = delivery.seconds.get(heard.host, 0.0) + said.seconds
            self._waiting.pop(heard.host, None)
        elif isinstance(said, Refused):
            text = f"{heard.host}: refused {said.peer}: {said.why}"
            if text not in delivery.refused and len(delivery.refused) < MAX_REFUSED:
                delivery.refused.append(text)
                delivery._console.warn(text)
        elif isinstance(said, Failed):
            raise DeliveryFailed(f"{heard.host}: {said.message}", said.lost)
        elif isinstance(said, Exit) and heard.host in self._waiting:
            words = self._last_words(heard.host)
            raise DeliveryFailed(f"{heard.host}: the receiver ended ({said}) {words}".rstrip())

    def _last_words(self, host: str) -> str:
        return " | ".join(filter(None, (each.words() for each in self._processes if each.host == host)))
