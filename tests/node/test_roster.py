"""The coordinator's books: who sits where, and what counts as a sign of life."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.interfaces import Interface, LinkClass
from mlx_mesh.mesh.messages import (
    AgentBeat,
    EngineFailed,
    EngineHello,
    Heartbeat,
    HostPlan,
    Join,
    MeshConfig,
    PhaseReached,
    Progress,
    RankExited,
)
from mlx_mesh.mesh.topology import AddressPlan
from mlx_mesh.mesh.types import PROTOCOL_VERSION, Backend, HostFacts, Phase, Versions
from mlx_mesh.node.gathering import backend_of, mismatch, plan_links
from mlx_mesh.node.roster import Member, RankRecord, Roster, Seat
from mlx_mesh.node.status import rank_rows

VERSIONS = Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3")
FACTS = HostFacts(
    hostname="box",
    system="Linux",
    machine="x86_64",
    chip="chip",
    memory_bytes=8,
    usable_memory_bytes=8,
    addresses=("127.0.0.1",),
    versions=VERSIONS,
)


def join(host: str, **changes: Any) -> Join:
    base = Join(
        protocol=PROTOCOL_VERSION,
        mesh_name="m",
        host=host,
        agent_pid=1,
        slots=1,
        ranks=(),
        world_size=0,
        address="127.0.0.1",
        facts=FACTS,
    )
    return msgspec.structs.replace(base, **changes)


def roster(*plans: HostPlan, **changes: Any) -> Roster:
    return Roster(
        MeshConfig(name="m", hosts=plans or (HostPlan(name="mac1"), HostPlan(name="mac2")), **changes)
    )


BEAT = Heartbeat(phase=Phase.READY, step=4, layer=2)


# ---------------------------------------------------------------- seats


def test_ranks_are_numbered_over_hosts_then_slots() -> None:
    books = roster(HostPlan(name="a", slots=2), HostPlan(name="b"))
    assert [seat.ranks for seat in books.seats] == [(0, 1), (2,)]
    assert [books.host_of(rank) for rank in range(3)] == ["a", "a", "b"]


def test_a_host_sits_where_its_name_is_planned() -> None:
    seat = roster().choose_seat(join("mac2"))
    assert isinstance(seat, Seat) and seat.ranks == (1,)


def test_by_hand_a_host_sits_where_its_rank_is() -> None:
    books = roster(HostPlan(name=""), HostPlan(name=""))
    seat = books.choose_seat(join("anything", ranks=(1,), world_size=2))
    assert isinstance(seat, Seat) and seat.ranks == (1,)
    seat.member = Member(peer=b"p", join=join("anything", ranks=(1,)), beat_at=0.0)
    assert books.host_of(1) == "anything"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 99}, "speaks protocol 99"),
        ({"mesh_name": "other"}, "not other"),
        ({"world_size": 3}, "expects world size 3, the coordinator has 2"),
        ({"host": "mac9"}, "mac9 is not expected"),
        ({"ranks": (0,)}, "with rank 0 is not expected"),
        ({"slots": 2}, "offers 2 slots, the plan has 1"),
    ],
)
def test_an_agent_that_does_not_fit_is_told_why(changes: dict[str, Any], words: str) -> None:
    refusal = roster().choose_seat(join(**({"host": "mac2"} | changes)))
    assert isinstance(refusal, str) and words in refusal


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ({}, ""),
        ({"model_digest": "other"}, "another model"),
        ({"model_error": "no such folder"}, "mac2: no such folder"),
        ({"adapter_digest": "other"}, "another adapter"),
        ({"adapter_digest": "", "adapter_error": "no such adapter"}, "mac2: no such adapter"),
        ({"versions": msgspec.structs.replace(VERSIONS, mlx="2")}, "other versions"),
    ],
)
def test_a_host_that_comes_later_must_have_what_the_leader_has(later: Any, words: str) -> None:
    facts = msgspec.structs.replace(FACTS, model_digest="model", adapter_digest="adapter")
    books = roster()
    books.seats[0].member = Member(peer=b"1", join=join("mac1", facts=facts), beat_at=0.0)
    found = mismatch(books, join("mac2", facts=msgspec.structs.replace(facts, **later)))
    assert words in found and bool(found) == bool(words)


# ---------------------------------------------------------------- ranks


def test_reports_move_a_rank_forward() -> None:
    record = RankRecord(rank=0)
    record.take(EngineHello(pid=1, versions=VERSIONS), 1.0)
    assert (record.phase, record.moved_at) == (Phase.IMPORTED, 1.0)
    record.take(PhaseReached(phase=Phase.CONNECTED), 2.0)
    record.take(Progress(phase=Phase.LOADING, done=1, total=9), 3.0)
    assert (record.phase, record.moved_at) == (Phase.CONNECTED, 3.0)


def test_a_heartbeat_that_was_sent_before_a_phase_began_does_not_turn_it_back() -> None:
    record = RankRecord(rank=0)
    record.enter(Phase.LOADING, 1.0)
    record.take(Heartbeat(phase=Phase.CONNECTED, step=0), 2.0)
    assert record.phase == Phase.LOADING
    record.take(Heartbeat(phase=Phase.READY, step=0), 3.0)
    assert str(record.phase) == "ready"


def test_a_step_or_a_layer_is_progress_and_a_repeated_heartbeat_is_none() -> None:
    record = RankRecord(rank=0)
    record.take(BEAT, 1.0)
    record.take(BEAT, 5.0)
    assert record.moved_at == 1.0
    record.take(msgspec.structs.replace(BEAT, layer=3), 6.0)
    assert record.moved_at == 6.0


def test_the_first_report_after_a_long_connection_is_a_sign_of_life() -> None:
    """mx.distributed.init lets no heartbeat through; the rank is not frozen the moment it is connected."""
    books = roster(HostPlan(name="mac1"))
    seat = books.seats[0]
    seat.member = member = Member(peer=b"p", join=join("mac1"), beat_at=0.0)
    record = books.ranks[0]
    record.take(Heartbeat(phase=Phase.IMPORTED, step=0), 0.0)
    record.enter(Phase.CONNECTING, 0.0)
    for second in range(1, 9):
        books.note_agent_beat(seat, member, AgentBeat(seq=second), float(second))
    [view] = books.rank_views(8.0)
    assert view.heartbeat_age_s is None
    record.take(PhaseReached(phase=Phase.CONNECTED), 8.0)
    [view] = books.rank_views(8.5)
    assert view.heartbeat_age_s == 0.5 and view.agent_beats_since == 0


def test_busy_time_goes_on_between_heartbeats() -> None:
    books = roster(HostPlan(name="mac1"))
    books.ranks[0].take(msgspec.structs.replace(BEAT, busy=True, busy_s=10.0), 100.0)
    assert books.rank_views(102.0)[0].busy_s == 12.0


@pytest.mark.parametrize(
    ("exit_code", "number", "expected", "words"),
    [
        (3, None, False, "ended with status 3"),
        (None, 9, False, "was killed by SIGKILL"),
        (None, 9, True, "was killed by SIGKILL, stopped by its agent"),
    ],
)
def test_an_exit_has_words(exit_code: int | None, number: int | None, expected: bool, words: str) -> None:
    record = RankRecord(rank=0)
    record.exit = RankExited(epoch=1, rank=0, exit_code=exit_code, signal=number, expected=expected)
    assert record.exit_words() == words
    assert record.was_killed == (number == 9 and not expected)


def test_a_new_epoch_knows_nothing_of_the_last_one() -> None:
    books = roster()
    seat = books.seats[1]
    seat.member = Member(peer=b"p", join=join("mac2"), beat_at=0.0, broke_epoch="it joined again")
    books.ranks[1].take(BEAT, 1.0)
    books.begin_epoch("it broke", 2.0)
    assert books.epoch.number == 1 and books.epoch.is_open
    assert books.ranks[1].beat is None and seat.member.broke_epoch == ""


def test_a_lost_member_is_missing_and_still_known_by_its_words() -> None:
    books = roster()
    seat = books.seats[1]
    seat.member = Member(peer=b"p", join=join("mac2"), beat_at=0.0, lost="it left")
    assert books.find(b"p") is None and seat in books.missing()
    assert [view.lost for view in books.agent_views(1.0)] == ["it left"]


# ---------------------------------------------------------------- status


def test_a_row_shows_heartbeats_and_both_rank_numbers() -> None:
    books = roster(server_rank=1)
    books.seats[0].member = Member(peer=b"p", join=join("mac1"), beat_at=0.0)
    books.ranks[0].take(BEAT, 1.0)
    rows = rank_rows(books, None, AddressPlan(data={"mac1": "10.0.0.1"}), epoch=3, now=1.5)
    assert [(row.rank, row.user_rank) for row in rows] == [(0, 1), (1, 0)]
    assert (rows[0].step, rows[0].last_heartbeat_s, rows[0].address) == (4, 0.5, "10.0.0.1")
    assert rows[1].last_heartbeat_s is None and rows[1].detail == "waiting for its agent"


def test_a_failed_rank_says_so_whatever_it_reached() -> None:
    books = roster()
    books.ranks[0].take(BEAT, 1.0)
    books.ranks[0].take(EngineFailed(phase=Phase.READY, kind="memory", message="no memory"), 2.0)
    row = rank_rows(books, None, AddressPlan(), epoch=1, now=3.0)[0]
    assert row.phase is Phase.FAILED


# ---------------------------------------------------------------- links


def on_two_networks(number: int) -> HostFacts:
    """A slow Ethernet and a Thunderbolt cable."""
    kinds = {"en0": LinkClass.ETHERNET, "en2": LinkClass.THUNDERBOLT}
    nets = {"en0": f"10.0.0.{number}", "en2": f"10.9.0.{number}"}
    return msgspec.structs.replace(
        FACTS,
        addresses=tuple(nets.values()),
        interfaces=tuple(
            Interface(name=name, link_class=kinds[name], evidence=name, addresses=(f"{nets[name]}/24",))
            for name in kinds
        ),
    )


@pytest.mark.parametrize(("rules", "interface"), [((), "en2"), (("^en2",), "en0"), (("en0",), "en0")])
def test_the_links_of_an_epoch_keep_to_the_rules_of_each_host(rules: tuple[str, ...], interface: str) -> None:
    books = roster(HostPlan(name="mac1", interfaces=rules), HostPlan(name="mac2", interfaces=rules))
    for number, seat in enumerate(books.seats, 1):
        joined = join(seat.host, address=f"10.0.0.{number}", facts=on_two_networks(number))
        seat.member = Member(peer=b"p%d" % number, join=joined, beat_at=0.0)
    plan = plan_links(books, Backend.RING)
    assert {link.listens.interface for link in plan.links.values()} == {interface}
    assert backend_of(books).reason == "mac1 has no Thunderbolt port that tells of itself"


def test_what_an_agent_tells_of_its_host_is_in_the_books() -> None:
    books = roster()
    seat = books.seats[1]
    member = Member(peer=b"p", join=join("mac2"), beat_at=0.0)
    seat.member = member
    beat = AgentBeat(seq=1, awake="by caffeinate (pid 7)", events=("05:10: it slept",))
    books.note_agent_beat(seat, member, beat, 1.0)
    assert (member.awake, member.events) == ("by caffeinate (pid 7)", ("05:10: it slept",))
