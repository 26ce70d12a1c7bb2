"""Who takes part, by the coordinator's books: no process, and time only by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.messages import ChangeNode, Deadlines, HostPlan, MeshConfig, NodeReply
from mlx_mesh.mesh.survivors import Serve, StayDown, WaitFor
from mlx_mesh.mesh.types import Placement, Sharding
from mlx_mesh.node.gathering import place_model
from mlx_mesh.node.lineup import Lineup
from mlx_mesh.node.roster import Roster


class Books:
    """A mesh of three hosts that was ready with all of them; every model fits."""

    def __init__(self, seat_all: Callable[[Roster], None]) -> None:
        plans = tuple(HostPlan(name=name) for name in ("mac1", "mac2", "mac3"))
        self.roster = Roster(MeshConfig(name="m", hosts=plans, elastic=True))
        self.now = 0.0
        self._seat_all = seat_all
        place: Callable[..., Any] = lambda hosts: None  # noqa: E731
        self.lineup = Lineup(self.roster, Deadlines(), place=place, now=lambda: self.now)
        seat_all(self.roster)
        self.lineup.note_ready()

    def lose(self, index: int) -> None:
        member = self.roster.seats[index].member
        assert member is not None
        member.lost, member.beat_at = "its power is gone", self.now

    def join_all(self) -> None:
        self._seat_all(self.roster)

    def settle(self) -> str:
        """Leave the epoch and go on with whoever is chosen, as far as loading."""
        decision = self.lineup.decide()
        assert isinstance(decision, Serve), decision
        words = self.lineup.settle(decision)
        self.roster.place(decision.hosts)
        return words

    def ask(self, action: Any, host: str) -> NodeReply:
        return self.lineup.change(ChangeNode(id="n", action=action, host=host))


@pytest.fixture
def books(seat_all: Any) -> Books:
    return Books(seat_all)


def given_up(books: Books) -> None:
    """mac3 stayed away and the others serve."""
    books.lose(2)
    assert isinstance(books.lineup.decide(), WaitFor)
    books.now += 100.0
    assert books.settle().startswith("mac3 did not come back")
    books.lineup.note_ready()


def test_a_host_that_is_lost_before_the_epoch_is_left_for_it_is_a_standby_again_at_once(books: Books) -> None:
    given_up(books)
    books.join_all()
    books.now += 100.0
    assert books.lineup.wants() == "mac3 came back"
    books.lose(2)
    assert books.settle() == "" and not books.roster.seats[2].is_wanted


def test_a_host_that_is_lost_while_it_loads_is_a_standby_again_at_once(books: Books) -> None:
    given_up(books)
    books.join_all()
    books.now += 100.0
    assert books.lineup.wants() and books.settle() == "mac3 is back"
    books.lose(2)
    assert books.settle().startswith("mac3 did not come back")
    books.join_all()
    assert books.settle() == "mac3 is back"
    books.lineup.note_ready()
    books.lose(2)  # now it has served: it is waited for
    assert books.lineup.decide() == WaitFor((2,), Deadlines().rejoin_timeout_s)


def test_a_drain_that_is_still_to_be_done_is_asked_for_again_with_the_same_answer(books: Books) -> None:
    first = books.ask("drain", "mac2")
    assert first.is_changing and books.ask("drain", "mac2") == first
    assert books.lineup.wants() == "mac2 is drained"
    assert books.settle() == "mac2 was drained"
    again = books.ask("drain", "mac2")
    assert not again.is_changing and "does not serve anyway" in again.message
    added = books.ask("add", "mac2")
    assert added.is_changing and books.ask("add", "mac2") == added
    assert books.settle() == "mac2 was added"
    again = books.ask("add", "mac2")
    assert not again.is_changing and "serves already" in again.message


def test_a_drain_that_is_taken_back_in_time_changes_nothing(books: Books) -> None:
    assert books.ask("drain", "mac2").is_changing and books.ask("add", "mac2").is_changing
    assert books.lineup.wants() and books.settle() == ""
    assert [seat.ranks for seat in books.roster.seats] == [(0,), (1,), (2,)]


def test_with_parts_of_the_model_a_lost_host_is_waited_for_and_then_the_mesh_stays_down(
    seat_all: Callable[[Roster], None],
) -> None:
    """However many hosts are left: each has only what the one plan needs."""
    plans = tuple(HostPlan(name=name) for name in ("mac1", "mac2", "mac3"))
    planned = Placement(sharding=Sharding.PIPELINE, model_digest="d", num_layers=3, shards=())
    roster = Roster(MeshConfig(name="m", hosts=plans, planned=(planned,)))
    seat_all(roster)
    for _, member in roster.members():
        facts = msgspec.structs.replace(member.join.facts, model_digest="d", model_part="1 of 3 GB")
        member.join = msgspec.structs.replace(member.join, facts=facts)
    footprint: Any = SimpleNamespace(model_digest="d")
    now = [0.0]
    lineup = Lineup(
        roster,
        Deadlines(),
        place=lambda hosts: place_model(roster, footprint, hosts),
        now=lambda: now[0],
    )
    assert lineup.decide() == Serve((0, 1, 2))
    assert place_model(roster, footprint, (0, 1, 2)) is planned
    lineup.note_ready()
    assert {row.model_part for row in lineup.rows()} == {"1 of 3 GB"}
    lost = roster.seats[2].member
    assert lost is not None
    lost.lost = "its power is gone"
    now[0] = Deadlines().rejoin_timeout_s - 1.0
    decision = lineup.decide()
    assert isinstance(decision, WaitFor)
    now[0] += 2.0
    decision = lineup.decide()
    assert isinstance(decision, StayDown)
    told = lineup.describe_wait(decision)
    assert "mac1 has only 1 of 3 GB" in told and "mlx-mesh sync --full" in told and "mac3" in told
