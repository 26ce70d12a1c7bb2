"""Pairing: who knows the code comes in, once; who does not learns nothing and is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_mesh.launcher import pairing
from mlx_mesh.launcher.pairing import (
    CODE_LIFE_S,
    CODE_TRIES,
    SECRET_FAILURES,
    SECRET_PAUSE_S,
    HostSide,
    LauncherSide,
    OneTimeCode,
    PairingRefused,
    SharedSecret,
    binding,
    check_code,
    check_secret,
)
from mlx_mesh.launcher.pairings import PairedHost, PairedLauncher, Pairings, fingerprint_of
from mlx_mesh.mesh.errors import SettingsError

BOUND = binding(b"host key", b"launcher key", b"session")


def meet(launcher: LauncherSide, host: HostSide) -> None:
    """Both sides of the exchange. Raises PairingRefused."""
    host.check(launcher.check(*host.answer(launcher.begin())))


def test_both_sides_that_know_the_code_agree() -> None:
    meet(LauncherSide("12345678", BOUND), HostSide("12345678", BOUND))


def test_another_code_is_refused_by_the_launcher_before_it_proves_anything() -> None:
    launcher, host = LauncherSide("12345678", BOUND), HostSide("12345679", BOUND)
    message, proof = host.answer(launcher.begin())
    with pytest.raises(PairingRefused, match="not the one that the host has"):
        launcher.check(message, proof)
    with pytest.raises(PairingRefused, match="does not know"):
        host.check(b"")


@pytest.mark.parametrize(
    "other",
    [
        binding(b"attacker's key", b"launcher key", b"session"),
        binding(b"host key", b"attacker's key", b"session"),
        binding(b"host key", b"launcher key", b"another session"),
        binding(b"host keyl", b"auncher key", b"session"),
    ],
)
def test_nobody_in_the_middle_can_pass_a_pairing_on(other: bytes) -> None:
    with pytest.raises(PairingRefused):
        meet(LauncherSide("12345678", BOUND), HostSide("12345678", other))


def test_a_recorded_proof_is_good_for_nothing() -> None:
    launcher, host = LauncherSide("12345678", BOUND), HostSide("12345678", BOUND)
    begin = launcher.begin()
    proof = launcher.check(*host.answer(begin))
    host.check(proof)
    again = HostSide("12345678", BOUND)
    again.answer(begin)
    with pytest.raises(PairingRefused):
        again.check(proof)


def test_the_host_s_own_proof_is_no_proof_of_the_launcher() -> None:
    host = HostSide("12345678", BOUND)
    _, proof = host.answer(LauncherSide("12345678", BOUND).begin())
    with pytest.raises(PairingRefused):
        host.check(proof)


@pytest.mark.parametrize(
    "message", [b"", b"A", b"A" + b"\xff" * 32, b"B" + b"\0" * 32, b"S" * 33, bytes(range(64))]
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(PairingRefused):
        HostSide("12345678", BOUND).answer(message)


def test_nothing_can_be_checked_before_it_was_answered() -> None:
    with pytest.raises(PairingRefused):
        HostSide("12345678", BOUND).check(b"\0" * 32)


# ---------------------------------------------------------------- the code


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_code_is_good_once() -> None:
    code = OneTimeCode(Clock())
    assert code.begin() == code.code and len(code.code) == 8 and code.shown.replace("-", "") == code.code
    code.use()
    with pytest.raises(PairingRefused, match="was used already"):
        code.begin()


def test_of_two_attempts_at_once_the_second_one_is_late() -> None:
    code = OneTimeCode(Clock())
    code.begin()
    code.begin()
    code.use()
    with pytest.raises(PairingRefused, match="was used already"):
        code.use()


def test_a_code_is_good_for_few_tries_whether_they_end_or_not() -> None:
    code = OneTimeCode(Clock())
    for _ in range(CODE_TRIES):
        code.begin()
    with pytest.raises(PairingRefused, match=f"tried {CODE_TRIES} times"):
        code.begin()
    code.use()  # the last of the three may be right


@pytest.mark.parametrize("act", [OneTimeCode.begin, OneTimeCode.use])
def test_a_code_is_good_for_some_minutes(act: Callable[[OneTimeCode], object]) -> None:
    clock = Clock()
    code = OneTimeCode(clock)
    clock.now += CODE_LIFE_S + 1
    with pytest.raises(PairingRefused, match="good for 10 minutes"):
        act(code)


def test_codes_differ() -> None:
    assert len({OneTimeCode().code for _ in range(50)}) > 45


@pytest.mark.parametrize("typed", ["1234-5678", " 12345678\n", "1234 5678"])
def test_a_code_may_be_typed_as_it_is_shown(typed: str) -> None:
    assert check_code(typed) == "12345678"


@pytest.mark.parametrize("typed", ["", "1234", "123456789", "1234-567a", "١٢٣٤٥٦٧٨"])
def test_what_is_no_code_is_refused_here(typed: str) -> None:
    with pytest.raises(SettingsError, match="8 digits"):
        check_code(typed)


def test_a_secret_stands_few_wrong_guesses_a_minute() -> None:
    clock = Clock()
    secret = SharedSecret("s" * 20, clock)
    for _ in range(SECRET_FAILURES):
        assert secret.begin() == "s" * 20
        secret.failed()
    with pytest.raises(PairingRefused, match="wrong secrets"):
        secret.begin()
    clock.now += SECRET_PAUSE_S
    secret.begin()


def test_guesses_of_a_secret_count_while_they_are_under_way() -> None:
    secret = SharedSecret("s" * 20, Clock())
    for _ in range(SECRET_FAILURES):
        secret.begin()
    with pytest.raises(PairingRefused, match="under way"):
        secret.begin()
    secret.use()
    secret.begin()


def test_a_short_secret_is_refused() -> None:
    assert check_secret("") == "" and check_secret("x" * 16) == "x" * 16
    with pytest.raises(SettingsError, match="at least 16"):
        check_secret("short")


def test_the_package_is_not_loaded_before_somebody_pairs() -> None:
    assert not hasattr(pairing, "SPAKE2_A")


# ---------------------------------------------------------------- what is kept


@pytest.fixture
def kept(tmp_path: Path) -> Pairings:
    return Pairings({"XDG_STATE_HOME": str(tmp_path)})


def test_keys_are_made_once_and_for_this_user_only(kept: Pairings) -> None:
    first, again = kept.key_of("agent"), kept.key_of("agent")
    assert first.asbytes() == again.asbytes() != kept.key_of("launcher").asbytes()
    assert (kept.folder / "agent_key").stat().st_mode & 0o777 == 0o600
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in kept.folder.iterdir()} == {"agent_key", "launcher_key"}


def test_a_key_that_others_can_read_is_not_used(kept: Pairings) -> None:
    kept.key_of("agent")
    (kept.folder / "agent_key").chmod(0o640)
    with pytest.raises(SettingsError, match="chmod 600"):
        kept.key_of("agent")


def test_a_broken_key_is_told(kept: Pairings) -> None:
    kept.key_of("agent")
    (kept.folder / "agent_key").write_text("nonsense")
    with pytest.raises(SettingsError, match="must then be paired again"):
        kept.key_of("agent")


def paired_host(name: str, key: str) -> PairedHost:
    return PairedHost(name=name, key=key, addresses=("10.0.0.1",), port=17864, paired_at=1.0)


def test_hosts_are_kept_by_key_and_forgotten_by_name(kept: Pairings) -> None:
    assert kept.hosts() == [] and kept.forget_host("mac1") == []
    kept.keep_host(paired_host("mac1", "SHA256:a"))
    kept.keep_host(paired_host("mac2", "SHA256:b"))
    kept.keep_host(paired_host("renamed", "SHA256:a"))
    assert [(host.name, host.key) for host in kept.hosts()] == [("renamed", "SHA256:a"), ("mac2", "SHA256:b")]
    assert (kept.folder / "hosts.json").stat().st_mode & 0o777 == 0o600
    assert [host.name for host in kept.forget_host("renamed")] == ["renamed"]
    assert [host.name for host in kept.forget_host("SHA256:b")] == ["mac2"] and kept.hosts() == []


def test_launchers_are_all_forgotten_at_once(kept: Pairings) -> None:
    key = fingerprint_of(kept.key_of("launcher"))
    kept.keep_launcher(PairedLauncher(label="me@mac1", key=key, address="10.0.0.1", paired_at=1.0))
    assert [launcher.key for launcher in kept.launchers()] == [key]
    assert [launcher.label for launcher in kept.forget_launchers()] == ["me@mac1"] and kept.launchers() == []


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]"])
def test_a_list_that_cannot_be_read_trusts_nobody_and_says_so(kept: Pairings, text: str) -> None:
    kept.keep_host(paired_host("mac1", "SHA256:a"))
    (kept.folder / "hosts.json").write_text(text)
    with pytest.raises(SettingsError, match="pair again"):
        kept.hosts()


def test_there_is_an_end_to_what_is_kept(kept: Pairings) -> None:
    with pytest.raises(SettingsError, match="64 is the limit"):
        for number in range(70):
            kept.keep_host(paired_host(f"mac{number}", f"SHA256:{number}"))
    assert len(kept.hosts()) == 64
