"""Which replica gets a request."""

from __future__ import annotations

import pytest

from mlx_mesh.mesh import routing
from mlx_mesh.mesh.routing import SLACK, Load, Prompt, Router

LONG = tuple(range(400))
IDLE = Load(0, 4)


def choose(router: Router, prompt: Prompt, *num_open: int | None) -> int:
    return router.choose(prompt, [None if n is None else Load(n, 4) for n in num_open])


def test_the_least_busy_replica_is_taken_and_of_equals_the_one_that_waited_longest() -> None:
    router = Router(3)
    assert choose(router, Prompt((1,)), 2, 1, 3) == 1
    assert [choose(router, Prompt((1,)), 0, 0, 0) for _ in range(4)] == [0, 2, 1, 0]


def test_a_conversation_stays_where_it_is_while_that_replica_has_a_place() -> None:
    router = Router(2)
    talk = Prompt((1, 2), conversation="c")
    assert choose(router, talk, 0, 1) == 0
    assert choose(router, talk, 3, 0) == 0
    assert choose(router, talk, 4, 0) == 1, "it would wait there, and nobody is here"
    assert choose(router, talk, 0, 3) == 1, "what it has is here now"


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    router = Router(2)
    assert choose(router, Prompt(LONG), 1, 0) == 1
    assert choose(router, Prompt((*LONG, 7, 8)), 0, SLACK) == 1
    assert choose(router, Prompt((5, *LONG)), 0, SLACK) == 0
    assert router.counts == {(1, "load"): 1, (1, "prefix"): 1, (0, "load"): 1}


def test_a_prefix_that_all_have_in_common_does_not_put_all_on_one_replica() -> None:
    router = Router(2)
    assert choose(router, Prompt(LONG), 0, 0) == 0
    assert choose(router, Prompt(LONG), SLACK + 1, 0) == 1


def test_the_longest_known_beginning_wins() -> None:
    router = Router(2)
    choose(router, Prompt(LONG[:128]), 0, 9)
    choose(router, Prompt((*LONG[:64], 9, *LONG[65:])), 9, 0)
    assert choose(router, Prompt(LONG), 1, 0) == 0


def test_requests_with_different_salts_have_nothing_in_common() -> None:
    router = Router(2)
    choose(router, Prompt(LONG, salt="a"), 0, 1)
    assert choose(router, Prompt(LONG, salt="b"), 1, 0) == 1


def test_what_keeps_nothing_is_not_looked_for_and_not_remembered() -> None:
    router = Router(2)
    choose(router, Prompt(LONG, keeps=False), 0, 1)
    choose(router, Prompt(LONG), 1, 0)
    assert choose(router, Prompt(LONG, keeps=False), 0, 1) == 0


def test_a_replica_that_takes_nothing_is_passed_over_even_by_its_conversations() -> None:
    router = Router(2)
    talk = Prompt(LONG, conversation="c")
    assert choose(router, talk, 0, 1) == 0
    assert choose(router, talk, None, 3) == 1
    assert choose(router, talk, None, None) == 0, "its refusal says why"


def test_one_that_is_ready_wins_over_one_that_is_on_its_way() -> None:
    router = Router(2)
    coming = Load(0, 4, is_ready=False)
    assert router.choose(Prompt(LONG), [coming, Load(3, 4)]) == 1
    assert router.choose(Prompt(LONG), [coming, None]) == 0


def test_a_replica_that_began_anew_has_nothing() -> None:
    router = Router(2)
    choose(router, Prompt(LONG, conversation="c"), 0, 1)
    router.forget(0)
    assert choose(router, Prompt(LONG, conversation="c"), 1, 0) == 1


def test_what_is_remembered_is_bounded_and_beginnings_are_forgotten_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "MAX_BLOCKS", 4)
    monkeypatch.setattr(routing, "MAX_CONVERSATIONS", 2)
    router = Router(2)
    choose(router, Prompt(LONG), 0, 1)  # six blocks
    assert choose(router, Prompt(LONG[:64]), 1, 0) == 0
    for name in "abc":
        choose(router, Prompt((1,), conversation=name), 0, 9)
    assert choose(router, Prompt((1,), conversation="a"), 1, 0) == 1
    assert choose(router, Prompt((1,), conversation="c"), 1, 0) == 0
