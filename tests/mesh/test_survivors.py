"""Who serves when hosts are missing, come back, are drained or added."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_mesh.mesh.survivors import (
    Fits,
    HostView,
    Refusal,
    Serve,
    StayDown,
    WaitFor,
    check_add,
    check_drain,
    choose,
    describe_lineup,
    describe_wait,
    growth,
    settle_time_s,
    state_of,
)

LIMIT_S = 60.0
MAC1, MAC2, MAC3 = (HostView(index, f"mac{index + 1}", is_here=True, here_s=100.0) for index in range(3))


def gone(host: HostView, seconds: float, *, is_wanted: bool = True) -> HostView:
    return replace(host, is_here=False, gone_s=seconds, why_gone="it sleeps", is_wanted=is_wanted)


def standby(host: HostView, here_s: float = 100.0, num_lost: int = 1) -> HostView:
    return replace(host, is_wanted=False, here_s=here_s, num_lost=num_lost)


def drained(host: HostView) -> HostView:
    return replace(host, is_wanted=False, is_drained=True)


def needs(num_hosts: int) -> Fits:
    """A model that needs so many hosts."""
    return lambda hosts: "" if len(hosts) >= num_hosts else f"{num_hosts - len(hosts)} GB are missing."


def decide(*hosts: HostView, fits: Fits = needs(1), elastic: bool = False) -> Serve | WaitFor | StayDown:  # noqa: B008
    return choose(hosts, fits, LIMIT_S, elastic=elastic)


# ---------------------------------------------------------------- the next epoch


def test_all_hosts_serve_while_all_are_there() -> None:
    assert decide(MAC1, MAC2, MAC3) == Serve((0, 1, 2))


def test_a_missing_host_is_waited_for_until_rejoin_timeout_s() -> None:
    assert decide(MAC1, gone(MAC2, 20.0), MAC3) == WaitFor((1,), 40.0)
    assert decide(MAC1, gone(MAC2, 61.0), MAC3) == Serve((0, 2))


def test_a_host_that_goes_away_while_it_is_taken_in_is_not_waited_for() -> None:
    assert decide(MAC1, replace(gone(MAC2, 1.0), has_served=False), MAC3) == Serve((0, 2))
    both = (replace(gone(MAC2, 1.0), has_served=False), gone(MAC3, 20.0))
    assert decide(MAC1, *both) == WaitFor((2,), 40.0)
    assert isinstance(decide(MAC1, both[0], MAC3, fits=needs(3)), StayDown)


def test_the_wait_is_for_the_last_one_that_may_come_and_ends_with_the_first_that_is_given_up() -> None:
    assert decide(MAC1, gone(MAC2, 20.0), gone(MAC3, 50.0)) == WaitFor((1, 2), 10.0)
    assert decide(MAC1, gone(MAC2, 20.0), gone(MAC3, 61.0)) == WaitFor((1,), 40.0)


def test_the_leader_alone_serves_when_the_model_fits_there() -> None:
    assert decide(MAC1, gone(MAC2, 99.0), gone(MAC3, 99.0)) == Serve((0,))


def test_the_mesh_stays_down_when_the_model_does_not_fit_and_says_what_is_missing() -> None:
    decision = decide(MAC1, gone(MAC2, 99.0), gone(MAC3, 99.0), fits=needs(2))
    assert decision == StayDown((1, 2), "1 GB are missing.")


def test_a_mesh_that_is_down_starts_when_one_comes_back_with_whom_it_fits() -> None:
    assert decide(MAC1, MAC2, gone(MAC3, 999.0), fits=needs(2)) == Serve((0, 1))


def test_a_host_that_came_back_late_does_not_serve_unless_the_mesh_is_elastic() -> None:
    assert decide(MAC1, standby(MAC2), MAC3) == Serve((0, 2))
    assert decide(MAC1, standby(MAC2), MAC3, elastic=True) == Serve((0, 1, 2))


def test_a_standby_is_taken_in_rather_than_staying_down() -> None:
    assert decide(MAC1, standby(MAC2), gone(MAC3, 99.0), fits=needs(2)) == Serve((0, 1))


def test_a_drained_host_is_never_taken_in_by_itself() -> None:
    hosts = (MAC1, drained(MAC2), gone(MAC3, 99.0))
    assert decide(*hosts, elastic=True) == Serve((0,))
    assert decide(*hosts, fits=needs(2), elastic=True) == StayDown((2,), "1 GB are missing.")


def test_an_elastic_mesh_goes_on_without_a_standby_with_whom_the_model_cannot_be_split() -> None:
    def fits(hosts: tuple[int, ...]) -> str:
        return "3 ranks, 2 layers" if len(hosts) > 2 else ""

    assert decide(MAC1, standby(MAC2), MAC3, fits=fits, elastic=True) == Serve((0, 2))


def test_the_reason_to_stay_down_is_the_smallest_that_is_missing() -> None:
    decision = decide(MAC1, standby(MAC2), gone(MAC3, 99.0), fits=needs(3))
    assert decision == StayDown((2,), "1 GB are missing.")


# ---------------------------------------------------------------- growing again


def test_a_standby_is_taken_in_when_it_has_been_there_for_a_while() -> None:
    assert growth((MAC1, standby(MAC2, 2.9), MAC3), needs(1), 3.0) == ()
    assert growth((MAC1, standby(MAC2, 3.0), MAC3), needs(1), 3.0) == (1,)


def test_a_host_that_comes_and_goes_is_taken_in_later_each_time() -> None:
    times = [settle_time_s(standby(MAC2, num_lost=count), 3.0) for count in (0, 1, 2, 3, 99)]
    assert times == [3.0, 3.0, 6.0, 12.0, 192.0]


@pytest.mark.parametrize(
    "host", [gone(MAC2, 5.0, is_wanted=False), drained(MAC2), replace(standby(MAC2), failure="it crashes")]
)
def test_who_is_gone_drained_or_failed_is_not_taken_in(host: HostView) -> None:
    assert growth((MAC1, host, MAC3), needs(1), 3.0) == ()


def test_nobody_is_taken_in_with_whom_the_model_cannot_be_placed() -> None:
    assert growth((MAC1, standby(MAC2)), lambda hosts: "no", 3.0) == ()


# ---------------------------------------------------------------- drain and add


def refusal(check: object, *hosts: HostView, name: str, fits: Fits = needs(1)) -> tuple[str, str]:  # noqa: B008
    with pytest.raises(Refusal) as caught:
        check(hosts, name, fits)  # type: ignore[operator]
    return caught.value.code, str(caught.value)


def test_a_host_can_be_drained_when_the_model_fits_on_the_others() -> None:
    assert check_drain((MAC1, MAC2, MAC3), "mac2", needs(2)) == MAC2


def test_a_drain_is_refused_with_what_would_be_missing() -> None:
    code, words = refusal(check_drain, MAC1, MAC2, MAC3, name="mac2", fits=needs(3))
    assert code == "does_not_fit" and words == "Without mac2 the model cannot be served. 1 GB are missing."


def test_the_leader_cannot_be_drained() -> None:
    code, words = refusal(check_drain, MAC1, MAC2, name="mac1")
    assert code == "host_leads" and "mlx-mesh down" in words


@pytest.mark.parametrize("check", [check_drain, check_add])
def test_a_host_that_nobody_knows_is_told_with_those_that_are_known(check: object) -> None:
    code, words = refusal(check, MAC1, MAC2, name="mac9")
    assert code == "host_not_found" and "mac1, mac2" in words


def test_a_host_that_is_waited_for_can_be_drained_and_is_not_waited_for_then() -> None:
    missing = gone(MAC2, 5.0)
    assert check_drain((MAC1, missing, MAC3), "mac2", needs(2)) == missing
    assert decide(MAC1, replace(missing, is_wanted=False, is_drained=True), MAC3) == Serve((0, 2))


def test_a_drained_host_and_a_standby_can_be_added() -> None:
    for host in (drained(MAC2), standby(MAC2)):
        assert check_add((MAC1, host, MAC3), "mac2", needs(3)) == host


def test_a_host_that_is_not_there_cannot_be_added() -> None:
    code, words = refusal(check_add, MAC1, gone(MAC2, 99.0, is_wanted=False), name="mac2")
    assert code == "host_not_here" and "it sleeps" in words


def test_a_host_with_which_the_model_cannot_be_placed_is_not_added() -> None:
    code, words = refusal(check_add, MAC1, standby(MAC2), name="mac2", fits=lambda hosts: "2 layers only.")
    assert code == "does_not_fit" and "2 layers only." in words


# ---------------------------------------------------------------- words


def test_a_mesh_without_one_of_its_hosts_says_so_with_the_reason_and_since_when() -> None:
    assert describe_lineup((MAC1, MAC2, MAC3), "noon") == ""
    hosts = (MAC1, gone(MAC2, 99.0, is_wanted=False), drained(MAC3))
    assert describe_lineup(hosts, "noon") == (
        "serving with 1 of 3 hosts since noon: mac2 is gone (it sleeps), mac3 is drained"
    )
    assert [state_of(host) for host in (*hosts, standby(MAC2))] == ["serving", "gone", "drained", "standby"]
    failed = replace(standby(MAC2), failure="it crashes")
    assert describe_lineup((MAC1, failed, MAC3), "noon").endswith("mac2 failed (it crashes)")


def test_a_mesh_that_waits_or_is_down_says_for_whom_and_why() -> None:
    hosts = (MAC1, gone(MAC2, 20.0), MAC3)
    words = describe_wait(hosts, WaitFor((1,), 40.0), LIMIT_S)
    assert words == (
        "waiting for mac2 (it sleeps), up to 60 s (rejoin_timeout_s) since the last sign of life"
    )
    words = describe_wait(hosts, StayDown((1,), "1 GB are missing."), LIMIT_S)
    assert words.startswith("down: ") and "1 GB are missing." in words and "mac2" in words
