"""Who takes part, by the coordinator's books: no process, and time only by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlx_mesh.mesh.messages import ChangeNode, Deadlines, HostPlan, MeshConfig, NodeReply
from mlx_mesh.mesh.survivors import Serve, WaitFor
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
