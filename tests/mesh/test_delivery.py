"""Who needs which bytes, and who sends them."""

from __future__ import annotations

import pytest

from mlx_mesh.mesh.delivery import (
    MAX_PIECE_BYTES,
    SPARE_BYTES,
    Holder,
    ModelFile,
    Piece,
    assign,
    missing_spans,
    needed_spans,
    piece_bytes_for,
    pieces_of,
    route_between,
    short_disks,
    size_of,
    stale_files,
    whole_files,
)
from mlx_mesh.mesh.interfaces import Interface, LinkClass
from mlx_mesh.mesh.part_record import (
    KeptPiece,
    RecordHead,
    head_line,
    parse_record,
    piece_line,
    settled_line,
    write_record,
)

FILES = (
    ModelFile(name="config.json", size=40, sha256="c"),
    ModelFile(name="model.safetensors", size=1000),
    ModelFile(name="empty.txt", size=0, sha256="e"),
)


def test_a_host_needs_small_files_whole_and_what_its_ranks_read_of_the_others() -> None:
    ranks = [{"model.safetensors": [(0, 10), (100, 200)]}, {"model.safetensors": [(0, 10), (150, 300)]}]
    assert needed_spans(FILES, ranks) == {
        "config.json": [(0, 40)],
        "model.safetensors": [(0, 10), (100, 300)],
        "empty.txt": [],
    }
    assert size_of(whole_files(FILES)) == 1040


def test_what_is_there_is_not_sent_again() -> None:
    needed = {"a": [(0, 100)], "b": [(0, 50)]}
    assert missing_spans(needed, {"a": [(0, 30), (60, 100)], "b": [(0, 50)]}) == {"a": [(30, 60)]}
    assert missing_spans(needed, {}) == needed


def test_a_small_file_with_other_content_comes_again_and_one_that_is_missing_is_missing_anyway() -> None:
    here = (ModelFile(name="config.json", size=40, sha256="x"),)
    assert stale_files(FILES, here) == {"config.json"}
    assert stale_files(FILES, FILES) == set()


def test_pieces_are_small_files_first_and_never_longer_than_the_limit() -> None:
    spans = {"model.safetensors": [(5, 2 * MAX_PIECE_BYTES + 7)], "tokenizer.json": [(0, 9)]}
    pieces = pieces_of(spans, MAX_PIECE_BYTES)
    assert pieces[0] == Piece("tokenizer.json", 0, 9)
    assert [(p.start, p.end) for p in pieces[1:]] == [
        (5, MAX_PIECE_BYTES),
        (MAX_PIECE_BYTES, 2 * MAX_PIECE_BYTES),
        (2 * MAX_PIECE_BYTES, 2 * MAX_PIECE_BYTES + 7),
    ]


@pytest.mark.parametrize(
    ("num_bytes", "piece"), [(0, 2**18), (270 * 10**6, 2**21), (5 * 10**9, 2**23), (10**12, 2**23)]
)
def test_pieces_are_small_enough_that_those_under_way_are_few_percent(num_bytes: int, piece: int) -> None:
    assert piece_bytes_for(num_bytes) == piece
    assert 2 * piece < 0.05 * num_bytes or num_bytes < 10**7


# ---------------------------------------------------------------- who sends


def ethernet(name: str, address: str, mbits: int = 1000) -> Interface:
    return Interface(name=name, link_class=LinkClass.ETHERNET, addresses=(address,), mbits=mbits, evidence="")


def some(number: int) -> list[Piece]:
    return [Piece("m", i * 10, i * 10 + 10) for i in range(number)]


def test_two_holders_share_the_work_by_the_rate_of_their_links() -> None:
    rates = {("c", "a"): 300, ("c", "b"): 100}
    found, nobody = assign({"c": some(40)}, [Holder(host="a"), Holder(host="b")], rates)
    assert not nobody
    by_sender = {each.sender: len(each.pieces) for each in found}
    assert by_sender["a"] + by_sender["b"] == 40
    assert 28 <= by_sender["a"] <= 32
    assert sorted(p.start for each in found for p in each.pieces) == [i * 10 for i in range(40)]


def test_one_sender_is_not_given_the_work_of_two_receivers_when_there_is_another() -> None:
    rates = {(r, s): 100 for r in "cd" for s in "ab"}
    found, _ = assign({"c": some(10), "d": some(10)}, [Holder(host="a"), Holder(host="b")], rates)
    loads = {sender: sum(len(e.pieces) for e in found if e.sender == sender) for sender in "ab"}
    assert loads == {"a": 10, "b": 10}


def test_a_part_sends_what_it_has_and_nobody_sends_to_itself() -> None:
    part = Holder(host="c", held={"m": [(0, 55)]})
    found, nobody = assign({"c": some(10), "d": some(10)}, [part], {})
    assert [(e.receiver, e.sender, len(e.pieces)) for e in found] == [("d", "c", 5)]
    assert {name: len(pieces) for name, pieces in nobody.items()} == {"c": 10, "d": 5}


def test_the_best_link_is_dialled_first_and_the_known_address_last() -> None:
    slow, fast = ethernet("en0", "10.0.0.1/24"), ethernet("en1", "10.1.0.1/24", mbits=10_000)
    sender = Holder(host="a", interfaces=(slow, fast), address="192.168.7.1")
    receiver = Holder(
        host="b", interfaces=(ethernet("en0", "10.0.0.2/24"), ethernet("en1", "10.1.0.2/24", mbits=10_000))
    )
    route = route_between(receiver, sender)
    assert route.addresses == ("10.1.0.1", "10.0.0.1", "192.168.7.1")
    assert route.words == "en1 (ethernet)"
    assert route.rate == 10_000 * 125_000
    assert route_between(Holder(host="c"), sender).addresses == ("192.168.7.1",)


def test_wifi_will_do_for_a_delivery() -> None:
    air = [
        Interface(name="en0", link_class=LinkClass.WIFI, addresses=(f"10.0.0.{i}/24",), evidence="")
        for i in (1, 2)
    ]
    route = route_between(Holder(host="b", interfaces=(air[1],)), Holder(host="a", interfaces=(air[0],)))
    assert route.addresses == ("10.0.0.1",)


def test_disks_that_are_too_small_are_told_with_figures() -> None:
    gb = 10**9
    (line,) = short_disks({"a": 5 * gb, "b": 5 * gb, "c": 0}, {"a": 5 * gb, "b": 9 * gb, "c": 0}, "M")
    assert line.startswith("a: needs 5.00 GB more of M and its disk has 5.00 GB free; ")
    assert f"{SPARE_BYTES / 1e6:.1f} MB are missing" in line


# ---------------------------------------------------------------- the journal

HEAD = RecordHead(asked="m", digest="d", files={"config.json": 4, "model.safetensors": 100})
PIECES = [KeptPiece("config.json", 0, 4, "1"), KeptPiece("model.safetensors", 0, 60, "2")]


def test_a_journal_tells_what_is_there_and_whether_it_is_all() -> None:
    record = parse_record(write_record(HEAD, PIECES))
    assert record.head == HEAD
    assert record.is_settled
    assert not record.is_whole
    assert record.has_small_files
    assert record.spans() == {"config.json": [(0, 4)], "model.safetensors": [(0, 60)]}
    whole = [*PIECES, KeptPiece("model.safetensors", 60, 100, "3")]
    assert parse_record(write_record(HEAD, whole)).is_whole
    assert not parse_record(write_record(HEAD, PIECES[1:])).has_small_files


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_journal_that_was_cut_off_anywhere_tells_what_is_before_it(cut: int) -> None:
    data = write_record(HEAD, PIECES[:1]) + piece_line(PIECES[1])
    record = parse_record(data[: len(data) - cut] if cut < len(piece_line(PIECES[1])) else data)
    assert record.pieces[0] == PIECES[0]
    assert record.num_settled == 1
    if cut < len(piece_line(PIECES[1])):
        assert len(record.pieces) == 1
    else:
        assert not record.is_settled


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}\n",
        b"nonsense\n",
        head_line(HEAD) + b"nonsense\n",
        head_line(HEAD) + settled_line(1),
        head_line(HEAD) + piece_line(KeptPiece("config.json", 0, 5, "1")),
        head_line(HEAD) + piece_line(KeptPiece("other", 0, 1, "1")),
        head_line(HEAD) + piece_line(KeptPiece("config.json", 3, 3, "1")),
        head_line(RecordHead(asked="m", digest="d", files={}, version=9)),
    ],
)
def test_what_is_no_journal_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_record(data)


def test_weights_whose_samples_differ_come_again_and_unknown_ones_do_not() -> None:
    def weights(sample: str) -> tuple[ModelFile, ...]:
        return (ModelFile(name="model.safetensors", size=9, sample=sample),)

    assert stale_files(weights("a"), weights("b")) == {"model.safetensors"}
    assert stale_files(weights("a"), weights("a")) == stale_files(weights("a"), weights("")) == set()
