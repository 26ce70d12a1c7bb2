"""Pieces go from a sender's process to a receiver's over real TLS on loopback, and to nobody else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.delivery import Piece, missing_spans, pieces_of
from mlx_mesh.mesh.delivery_orders import (
    Failed,
    HashOrder,
    Offering,
    Peer,
    Received,
    ReceiveOrder,
    Receiving,
    Said,
    SendOrder,
    Source,
)
from mlx_mesh.mesh.errors import ExitCode, MeshError
from mlx_mesh.mesh.part_record import RecordHead
from mlx_mesh.node.delivery import send
from mlx_mesh.node.delivery.certificate import client_context, is_pinned, make_certificate
from mlx_mesh.node.delivery.part_folder import (
    check_source,
    check_target,
    read_part,
    settle_part,
    target_folder,
)
from mlx_mesh.node.delivery.wire import Answer, Hello, read_frame, read_into, send_frame

SIZE = 3_000_000
PIECE = 10_000
MARKER = "told"
TOKEN = "secret-of-this-delivery"
LIMIT_S = 60.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(random.Random(7).randbytes(SIZE))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "secret.txt").write_text("not a file of the model")
    return folder


FILES = {"config.json": 23, "model.safetensors": SIZE}
HEAD = RecordHead(asked="m", digest="d", files=FILES)
ALL = tuple(pieces_of({name: [(0, size)] for name, size in FILES.items()}, PIECE))


class Program:
    """One of the programs, as the launcher starts it."""

    def __init__(self, name: str, order: msgspec.Struct) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-u", "-m", f"mlx_mesh.node.delivery.{name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")
        self.process.stdin.flush()

    def said(self) -> Iterator[Said]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARKER.encode() + b" "):
                yield msgspec.json.decode(line[len(MARKER) + 1 :], type=Said)

    def hear(self, kind: type[Any]) -> Any:
        """The next thing of that kind; whatever else is passed over."""
        for said in self.said():
            if isinstance(said, kind):
                return said
        pytest.fail(
            f"it ended without {kind.__name__}: {self.process.stderr and self.process.stderr.read()!r}"
        )

    def close(self) -> int:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        status = self.process.wait(LIMIT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return status


@contextlib.contextmanager
def running(name: str, order: msgspec.Struct) -> Iterator[Program]:
    program = Program(name, order)
    try:
        yield program
    finally:
        program.process.kill()
        program.close()


def send_order(folder: Path, **changes: Any) -> SendOrder:
    peers = (Peer(host="b", token=TOKEN),)
    order = SendOrder(marker=MARKER, folder=str(folder), files=FILES, addresses=("127.0.0.1",), peers=peers)
    return msgspec.structs.replace(order, **changes)


def receive_order(
    folder: Path, offer: Offering, pieces: tuple[Piece, ...] = ALL, token: str = TOKEN, certificate: str = ""
) -> ReceiveOrder:
    source = Source(
        host="a",
        endpoints=(("127.0.0.1", offer.ports["127.0.0.1"]),),
        certificate=certificate or offer.certificate,
        token=token,
        pieces=pieces,
    )
    return ReceiveOrder(marker=MARKER, folder=str(folder), head=HEAD, sources=(source,))


def place(root: Path) -> Path:
    """Where a delivery of `HEAD` goes."""
    return target_folder("m", str(root))


def same(folder: Path, other: Path) -> bool:
    return all((folder / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def test_a_model_goes_from_process_to_process(source: Path, tmp_path: Path) -> None:
    target = place(tmp_path)
    with running("send", send_order(source)) as sender:
        offer = sender.hear(Offering)
        with running("receive", receive_order(target, offer)) as receiver:
            done = receiver.hear(Received)
            assert receiver.close() == ExitCode.OK
        assert sender.close() == ExitCode.INTERRUPTED  # its stdin ended: it goes at once
    assert same(source, target)
    assert not (target / "secret.txt").exists()
    assert done.num_pieces == len(ALL)
    assert done.num_bytes <= sum(FILES.values()) * 1.02
    record = read_part(target)
    assert record is not None
    assert record.is_whole


class Gate(send.Sender):
    """Gives so many pieces, then holds its breath until it may go on."""

    def __init__(self, order: SendOrder, num_free: int) -> None:
        self.refused: list[str] = []
        super().__init__(order, lambda peer, why: self.refused.append(why))
        self.left = num_free
        self.given: list[Piece] = []
        self.is_at_the_gate = threading.Event()
        self.may_go_on = threading.Event()
        self.lock = threading.Lock()

    def _why_not(self, piece: Piece) -> str:
        with self.lock:
            self.left -= 1
            is_free = self.left >= 0
            self.given.append(piece)
        if not is_free:
            self.is_at_the_gate.set()
            assert self.may_go_on.wait(LIMIT_S)
        return super()._why_not(piece)


@pytest.mark.parametrize("how", ["kill -9", "its launcher is gone"])
def test_a_receiver_that_ends_in_the_middle_goes_on_where_it_was(
    source: Path, tmp_path: Path, how: str
) -> None:
    target, half = place(tmp_path), len(ALL) // 2
    gate = Gate(send_order(source), half)
    offer = gate.listen()
    with running("receive", receive_order(target, offer)) as receiver:
        assert gate.is_at_the_gate.wait(LIMIT_S)
        while receiver.hear(Receiving).done < (half - 10) * PIECE:
            pass
        if how == "kill -9":
            receiver.process.send_signal(signal.SIGKILL)
            assert receiver.process.wait(LIMIT_S) == -signal.SIGKILL
        else:
            assert receiver.close() == ExitCode.INTERRUPTED
    gate.may_go_on.set()
    record, _, num_wrong = settle_part(target)
    assert record is not None
    assert num_wrong == 0
    assert 0.45 * SIZE < record.num_bytes < 0.55 * SIZE
    left = missing_spans({name: [(0, size)] for name, size in FILES.items()}, record.spans())
    order = receive_order(target, offer, tuple(pieces_of(left, PIECE)))
    with running("receive", order) as receiver:
        again = receiver.hear(Received)
        assert receiver.close() == ExitCode.OK
    assert same(source, target)
    assert record.num_bytes + again.num_bytes <= sum(FILES.values()) * 1.05


def test_a_flipped_byte_costs_its_piece_only(source: Path, tmp_path: Path) -> None:
    target = place(tmp_path)
    with running("send", send_order(source)) as sender:
        offer = sender.hear(Offering)
        with running("receive", receive_order(target, offer)) as receiver:
            receiver.hear(Received)
        with (target / "model.safetensors").open("r+b") as file:
            file.seek(SIZE // 2)
            byte = file.read(1)
            file.seek(SIZE // 2)
            file.write(bytes([byte[0] ^ 1]))
        record, _, num_wrong = settle_part(target, verify=True)
        assert record is not None
        assert num_wrong == 1
        left = missing_spans({name: [(0, size)] for name, size in FILES.items()}, record.spans())
        order = receive_order(target, offer, tuple(pieces_of(left, PIECE)))
        with running("receive", order) as receiver:
            again = receiver.hear(Received)
            assert receiver.close() == ExitCode.OK
    assert again.num_pieces == 1
    assert again.num_bytes < PIECE + 1000
    assert same(source, target)


# ---------------------------------------------------------------- who is let in


class Listening:
    """A sender in this process, which is quicker to start."""

    def __init__(self, order: SendOrder) -> None:
        self._refused: queue.Queue[str] = queue.Queue()
        self.offer = send.Sender(order, lambda peer, why: self._refused.put(why)).listen()

    def why(self) -> str:
        """Why it sent the next one away."""
        return self._refused.get(timeout=LIMIT_S)


@pytest.fixture
def sender(source: Path) -> Listening:
    return Listening(send_order(source))


def dial(offer: Offering) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", offer.ports["127.0.0.1"]), timeout=LIMIT_S)
    return client_context(offer.certificate).wrap_socket(raw)


def test_a_wrong_token_is_refused_and_told(sender: Listening, tmp_path: Path) -> None:
    offer = sender.offer
    with running("receive", receive_order(place(tmp_path), offer, token="guessed")) as receiver:
        assert "this token is not known here" in receiver.hear(Failed).message
        assert receiver.close() == ExitCode.FAILED
    assert sender.why() == "its token is wrong"


def test_a_receiver_takes_no_other_certificate(sender: Listening, tmp_path: Path) -> None:
    """Somebody else answers at the sender's address."""
    offer = sender.offer
    other = make_certificate().pem
    with running("receive", receive_order(place(tmp_path), offer, certificate=other)) as receiver:
        failed = receiver.hear(Failed)
        assert "does not have its certificate" in failed.message
        assert failed.lost == "a"
    assert "did not say hello" in sender.why()
    assert read_part(place(tmp_path)) is not None  # nothing was written into it
    assert not any(read_part(place(tmp_path)).pieces)  # type: ignore[union-attr]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 300])
def test_who_speaks_no_tls_is_sent_away(sender: Listening, said: bytes) -> None:
    offer = sender.offer
    with socket.create_connection(("127.0.0.1", offer.ports["127.0.0.1"]), timeout=LIMIT_S) as raw:
        with contextlib.suppress(OSError):  # it may be quicker than we are
            raw.sendall(said)
            raw.shutdown(socket.SHUT_WR)
        assert "did not say hello" in sender.why()
    with dial(offer) as connection:  # and it still serves others
        send_frame(connection, Hello(token=TOKEN))
        assert read_frame(connection, Answer) is not None


def test_a_message_that_is_too_long_to_be_one_is_not_waited_for(sender: Listening) -> None:
    with dial(sender.offer) as connection:
        connection.sendall((2**30).to_bytes(4, "big"))
        assert "a message of 1073741824 bytes" in sender.why()


def test_only_the_very_certificate_is_the_right_one(sender: Listening) -> None:
    with dial(sender.offer) as connection:
        assert is_pinned(connection, sender.offer.certificate)
        assert not is_pinned(connection, make_certificate().pem)


def test_nothing_is_given_before_the_token(sender: Listening) -> None:
    offer = sender.offer
    with dial(offer) as connection:
        send_frame(connection, Piece("config.json", 0, 5))
        answer = read_frame(connection, Answer)
        assert answer is not None
        assert answer[0].refusal
        assert read_frame(connection, Answer) is None
    assert sender.why() == "its token is wrong"


@pytest.mark.parametrize(
    "piece",
    [
        Piece("secret.txt", 0, 5),
        Piece("../source/config.json", 0, 5),
        Piece("config.json", 0, 24),
        Piece("config.json", 5, 5),
        Piece("config.json", -5, 5),
        Piece("model.safetensors", 0, 2**40),
    ],
)
def test_what_is_not_offered_is_refused(sender: Listening, piece: Piece) -> None:
    offer = sender.offer
    with dial(offer) as connection:
        send_frame(connection, Hello(token=TOKEN))
        read_frame(connection, Answer)
        send_frame(connection, piece)
        answer = read_frame(connection, Answer)
        assert answer is not None
        assert answer[0].refusal
        send_frame(connection, Piece("config.json", 0, 23))  # the connection goes on
        answer = read_frame(connection, Answer)
        assert answer is not None
        data = bytearray(23)
        read_into(connection, memoryview(data))
        assert hashlib.sha256(data).digest() == answer[0].sha256


def test_a_part_gives_what_it_has_and_no_hole(source: Path) -> None:
    offer = Listening(send_order(source, held={"model.safetensors": [(0, 100)]})).offer
    with dial(offer) as connection:
        send_frame(connection, Hello(token=TOKEN))
        read_frame(connection, Answer)
        send_frame(connection, Piece("model.safetensors", 50, 150))
        answer = read_frame(connection, Answer)
        assert answer is not None
        assert "are not here" in answer[0].refusal


def test_neither_token_nor_key_is_in_a_command_line_or_an_environment(source: Path) -> None:
    with running("send", send_order(source)) as program:
        program.hear(Offering)
        proc = Path(f"/proc/{program.process.pid}")
        if not proc.exists():
            pytest.skip("needs /proc")
        for name in ("cmdline", "environ"):
            assert TOKEN.encode() not in (proc / name).read_bytes()
        opened = [str(link.readlink()) for link in (proc / "fd").iterdir()]
        assert not [path for path in opened if path.endswith(".pem")]


def test_a_piece_that_came_damaged_is_not_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's disk gives other bytes than it hashed."""
    real, target = hashlib.sha256, place(tmp_path)
    monkeypatch.setattr(hashlib, "sha256", lambda data: real(bytes(data) + b"!"))
    gate = Gate(send_order(source), 10_000)
    with running("receive", receive_order(target, gate.listen(), ALL[:3])) as receiver:
        assert "came with another SHA-256" in receiver.hear(Failed).message
    record = read_part(target)
    assert record is not None
    assert record.pieces == ()


def test_a_file_that_changes_while_it_is_sent_is_refused(source: Path) -> None:
    """Old bytes and new ones must not come together, whether it is written to or replaced."""
    offer = Listening(send_order(source)).offer
    with dial(offer) as connection:
        send_frame(connection, Hello(token=TOKEN))
        read_frame(connection, Answer)
        send_frame(connection, Piece("model.safetensors", 0, 10))
        first = read_frame(connection, Answer)
        assert first is not None
        assert first[0].refusal == ""
        read_into(connection, memoryview(bytearray(10)))
        with (source / "model.safetensors").open("r+b") as file:
            file.write(b"!")
        send_frame(connection, Piece("model.safetensors", 10, 20))
        second = read_frame(connection, Answer)
        assert second is not None
        assert "was changed while it was being sent" in second[0].refusal
    (source / "new").write_bytes((source / "config.json").read_bytes())
    (source / "new").replace(source / "config.json")
    with dial(offer) as connection:
        send_frame(connection, Hello(token=TOKEN))
        read_frame(connection, Answer)
        send_frame(connection, Piece("config.json", 0, 10))
        answer = read_frame(connection, Answer)
        assert answer is not None
        assert "was changed" in answer[0].refusal


@pytest.mark.parametrize(
    "name", ["evil.plist", "../config.json", ".mlx-mesh-part.jsonl", "x/config.json", "a.py"]
)
def test_who_may_deliver_writes_only_what_belongs_to_a_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(MeshError, match="no file of a model"):
        check_target(place(tmp_path), msgspec.structs.replace(HEAD, files={name: 3}))


@pytest.mark.parametrize("where", [".", "LaunchAgents", ".mlx-mesh/x", ".mlx-mesh/0123456789ab/m"])
def test_who_may_deliver_writes_only_where_deliveries_go(tmp_path: Path, where: str) -> None:
    with pytest.raises(MeshError, match="not where models are delivered"):
        check_target(tmp_path / where, HEAD)
    check_target(place(tmp_path), HEAD)


def test_a_receiver_and_a_sender_look_at_what_they_are_told(source: Path, tmp_path: Path) -> None:
    offer = Offering(ports={"127.0.0.1": 1}, certificate="")
    with running("receive", receive_order(tmp_path / "agents", offer)) as receiver:
        assert "not where models are delivered" in receiver.hear(Failed).message
    assert not (tmp_path / "agents").exists()
    with running("send", send_order(source, files={"id_ed25519": 5})) as sender:
        assert "no file of a model" in sender.hear(Failed).message
    order = HashOrder(marker=MARKER, folder=str(source), pieces=(Piece("id_ed25519", 0, 5),))
    with running("hashes", order) as hashes:
        assert "no file of a model" in hashes.hear(Failed).message
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.json").write_text("{}")
    with pytest.raises(MeshError, match="no model's folder"):
        check_source(tmp_path / "home", ["config.json"])


def test_an_order_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "mlx_mesh.node.delivery.receive"],
        input=json.dumps({"marker": "m"}).encode() + b"\n",
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == ExitCode.USAGE
    assert b"install the same mlx-mesh" in done.stderr
