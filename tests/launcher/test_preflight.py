"""What preflight finds out about hosts, and how it tells several faults together."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_mesh.launcher.addresses import SeenAddresses, choose_addresses
from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.preflight import (
    Named,
    backend_faults,
    check_hosts,
    close_all,
    compare_hosts,
    read_answer,
)
from mlx_mesh.mesh.errors import ExitCode, PreflightError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.types import Backend, HostFacts, Versions

FACTS = HostFacts(
    hostname="h",
    system="Linux",
    machine="x",
    chip="",
    memory_bytes=1,
    usable_memory_bytes=1,
    addresses=("127.0.0.1", "10.0.0.1"),
    versions=Versions(mlx_mesh="1", mlx="2", mlx_lm="3", python="3.11.4"),
    model_digest="d1",
)


def answer(**changes: Any) -> dict[str, Any]:
    return {
        "python": [3, 11, 4],
        "executable": "/p",
        "ssh_connection": "",
        "missing": [],
        "model": "/m",
        "mlx_fault": "",
        "facts": msgspec.to_builtins(FACTS),
        "facts_error": "",
        **changes,
    }


# ---------------------------------------------------------------- one host's answer


def test_a_good_answer_becomes_facts() -> None:
    assert read_answer(answer(), "mac2", "/p", "m") == FACTS


@pytest.mark.parametrize(
    ("changes", "step", "words"),
    [
        ({"python": [3, 9, 6]}, "interpreter", "/p is Python 3.9.6; mlx-mesh needs Python 3.11"),
        ({"missing": ["mlx_mesh", "zmq"]}, "import", "mlx-mesh init mac2 --install"),
        ({"missing": ["mlx_lm"]}, "import", "/p -m pip install mlx-lm"),
        (
            {"mlx_fault": "ImportError: libmlx.so"},
            "import",
            "cannot import mlx.core (ImportError: libmlx.so)",
        ),
        ({"facts": None, "facts_error": "AttributeError: x"}, "import", "may be too old"),
        ({"facts": {"hostname": "h"}}, "version", "too old or too new"),
    ],
)
def test_a_bad_answer_names_the_first_failing_step_and_the_fix(
    changes: dict[str, Any], step: str, words: str
) -> None:
    with pytest.raises(HostFault) as caught:
        read_answer(answer(**changes), "mac2", "/p", "m")
    assert caught.value.step == step
    assert str(caught.value).startswith(f"mac2: {step}: ") and words in str(caught.value)


def test_a_missing_model_is_told_in_the_hosts_own_words() -> None:
    facts = msgspec.structs.replace(FACTS, model_digest="", model_error="the folder /m does not exist on h.")
    with pytest.raises(HostFault, match=r"mac2: model: the folder /m does not exist") as caught:
        read_answer(answer(facts=msgspec.to_builtins(facts)), "mac2", "/p", "org/m")
    assert "models:" in caught.value.fix


# ---------------------------------------------------------------- hosts side by side


def compare(*facts: HostFacts) -> tuple[list[str], list[str]]:
    names = [Named(f"mac{index}", f"/p{index}", "/m") for index in range(1, len(facts) + 1)]
    faults, warnings = compare_hosts(facts, names)
    return [str(fault) for fault in faults], warnings


@pytest.mark.parametrize(
    ("backend", "system", "words"),
    [
        (Backend.JACCL, "Linux", ["jaccl needs RDMA over Thunderbolt between Macs; this is Linux"]),
        (Backend.JACCL_RING, "Linux", ["jaccl-ring needs RDMA"]),
        (Backend.NCCL, "Darwin", ["nccl needs NVIDIA GPUs on Linux; this is Darwin"]),
        (Backend.JACCL, "Darwin", []),
        (Backend.NCCL, "Linux", []),
        (Backend.RING, "Linux", []),
        (Backend.AUTO, "Linux", []),
    ],
)
def test_a_backend_that_a_host_cannot_have_is_refused_before_anything_starts(
    backend: Backend, system: str, words: list[str]
) -> None:
    faults = backend_faults({"mac1": msgspec.structs.replace(FACTS, system=system)}, backend)
    assert len(faults) == len(words)
    for fault, word in zip(faults, words, strict=True):
        assert str(fault).startswith("mac1: backend: ") and word in str(fault)


def versioned(**changes: Any) -> HostFacts:
    return msgspec.structs.replace(FACTS, versions=msgspec.structs.replace(FACTS.versions, **changes))


def test_equal_hosts_pass() -> None:
    assert compare(FACTS, FACTS, FACTS) == ([], [])


@pytest.mark.parametrize(
    ("field", "package"), [("mlx", "mlx"), ("mlx_lm", "mlx-lm"), ("mlx_mesh", "mlx-mesh")]
)
def test_a_different_version_blocks_with_the_pip_command_of_that_host(field: str, package: str) -> None:
    (fault,), _ = compare(FACTS, versioned(**{field: "0.9"}))
    wanted = getattr(FACTS.versions, field)
    assert fault.startswith(f"mac2: version: it has {package} 0.9, mac1 has {wanted}; ")
    pip = f"run there: /p2 -m pip install {package}=={wanted}"
    assert fault.endswith("`mlx-mesh init mac2 --install -o -`" if package == "mlx-mesh" else pip)


def test_a_different_protocol_blocks_on_the_host_that_differs_from_the_launcher() -> None:
    (fault,), _ = compare(versioned(protocol=99), FACTS)
    assert fault.startswith("mac1: version: it speaks protocol 99")


def test_a_different_python_minor_only_warns_and_a_micro_does_not() -> None:
    assert compare(FACTS, versioned(python="3.11.9")) == ([], [])
    faults, warnings = compare(FACTS, versioned(python="3.13.0"))
    assert not faults and "mac2 runs Python 3.13.0" in warnings[0]


def test_a_different_model_blocks() -> None:
    (fault,), _ = compare(FACTS, msgspec.structs.replace(FACTS, model_digest="d2"))
    assert fault.startswith("mac2: model: its /m differs from mac1's /m")


def test_a_different_adapter_blocks_and_a_missing_one_is_told_in_the_hosts_own_words() -> None:
    (fault,), _ = compare(FACTS, msgspec.structs.replace(FACTS, adapter_digest="a2"))
    assert fault.startswith("mac2: adapter: its adapter ")
    facts = msgspec.structs.replace(FACTS, adapter_error="the adapter folder /a does not exist on h.")
    with pytest.raises(HostFault, match=r"mac2: adapter: the adapter folder /a does not exist on h; copy"):
        read_answer(answer(facts=msgspec.to_builtins(facts)), "mac2", "/p", "m")


# ---------------------------------------------------------------- addresses


def seen(
    name: str, *own: str, given: tuple[str, ...] = (), reached: str = "", towards: str = ""
) -> SeenAddresses:
    return SeenAddresses(
        HostEntry(name=name, ssh=name, addresses=given), ("127.0.0.1", *own), reached, towards
    )


def test_one_host_alone_uses_its_loopback() -> None:
    assert choose_addresses([seen("a", "10.0.0.1")]) == ({"a": "127.0.0.1"}, [])


def test_a_given_address_wins_and_must_be_the_hosts_own() -> None:
    chosen, faults = choose_addresses(
        [seen("a", "10.0.0.1", "10.9.0.1", given=("10.9.0.1",)), seen("b", "10.0.0.2", reached="10.0.0.2")]
    )
    assert (chosen, faults) == ({"a": "10.9.0.1", "b": "10.0.0.2"}, [])
    _, (fault,) = choose_addresses([seen("a", "10.0.0.1", given=("10.77.0.9",)), seen("b", "10.0.0.2")])
    assert str(fault).startswith(
        "a: address: the hostfile gives it 10.77.0.9, which it does not have; it has 127.0.0.1, 10.0.0.1"
    )


def test_without_a_given_one_the_address_of_the_ssh_connection_is_used() -> None:
    chosen, _ = choose_addresses(
        [
            seen("a", "10.0.0.1", "10.9.0.1", towards="10.9.0.1"),
            seen("b", "10.0.0.2", "10.9.0.2", reached="10.9.0.2"),
        ]
    )
    assert chosen == {"a": "10.9.0.1", "b": "10.9.0.2"}


def test_an_address_that_cannot_be_told_asks_for_addresses() -> None:
    _, (fault,) = choose_addresses([seen("a", "10.0.0.1", "10.9.0.1"), seen("b", "10.0.0.2")])
    assert fault.host == "a" and "add `addresses: [...]`" in fault.fix


def test_a_loopback_among_other_hosts_is_a_fault_and_all_on_loopback_is_not() -> None:
    _, (fault,) = choose_addresses([seen("a", reached="127.0.0.1"), seen("b", "10.0.0.2")])
    assert "its loopback" in fault.seen
    _, faults = choose_addresses([seen("a", reached="127.0.0.1"), seen("b", reached="127.0.0.1")])
    assert faults == []


def test_two_names_of_one_machine_are_a_fault() -> None:
    _, (fault,) = choose_addresses([seen("a", "10.0.0.1"), seen("b", "10.0.0.1")])
    assert "both are one machine" in fault.seen and "slots: N" in fault.fix


# ---------------------------------------------------------------- real processes


def config_of(*hosts: HostEntry, ssh_config: str = "") -> LaunchConfig:
    return LaunchConfig(name="m", model="/m", hosts=hosts, ssh_config=ssh_config)


def test_a_local_host_is_asked_and_stays_open(fake_python: Callable[..., Any]) -> None:
    fake = fake_python("a")
    preflight = check_hosts(config_of(HostEntry(name="here", python=fake.python)))
    (host,) = preflight.hosts
    assert (host.model, host.address, host.facts.hostname) == ("/m", "127.0.0.1", "pretended")
    close_all(preflight.hosts)


def test_a_model_in_the_hosts_models_folder_is_found(fake_python: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    entry = HostEntry(name="here", python=fake_python("a").python, models=str(tmp_path / "models"))
    preflight = check_hosts(replace(config_of(entry), model="org/m"))
    assert preflight.hosts[0].model == str(tmp_path / "models" / "m")
    close_all(preflight.hosts)


def test_every_host_is_told_at_its_first_failing_step_and_all_are_told_together(
    fake_python: Callable[..., Any], start_sshd: Callable[..., Any]
) -> None:
    sshd, stranger = start_sshd("a"), start_sshd("b")
    good, old = fake_python("good"), fake_python("old")
    old.set_facts(model_digest="", model_error="no model here")
    bare = fake_python("bare", without=("mlx_mesh",))
    for alias in ("good", "bare", "old", "gone", "none", "text"):
        sshd.add_host(alias)
    sshd.add_host("lost", host_name="no-such-host.invalid")
    sshd.add_host("unknown", f"UserKnownHostsFile {sshd.folder}/empty", port=stranger.port)
    hosts = [
        HostEntry(name="good", ssh="good", python=good.python),
        HostEntry(name="bare", ssh="bare", python=bare.python),
        HostEntry(name="old", ssh="old", python=old.python),
        HostEntry(name="none", ssh="none", python="/no/such/python"),
        HostEntry(name="text", ssh="text", python=str(sshd.config)),
        HostEntry(name="lost", ssh="lost", python=good.python),
        HostEntry(name="unknown", ssh="unknown", python=good.python),
    ]
    with pytest.raises(PreflightError) as caught:
        check_hosts(config_of(*hosts, ssh_config=str(sshd.config)))
    assert caught.value.exit_code is ExitCode.PREFLIGHT
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["bare", "import"],
        ["old", "model"],
        ["none", "interpreter"],
        ["text", "interpreter"],
        ["lost", "resolve"],
        ["unknown", "host key"],
    ]
    assert f"{bare.python} has no module mlx_mesh; put this one there: `mlx-mesh init bare" in lines[0]
    assert "/no/such/python cannot be started" in lines[2] and "127" in lines[2]


def test_versions_over_hosts_are_compared(
    fake_python: Callable[..., Any], start_sshd: Callable[..., Any]
) -> None:
    sshd, new, old = start_sshd("a"), fake_python("new"), fake_python("old")
    old.set_facts(
        versions={"mlx_mesh": "0.1.0", "mlx": "0.31.2", "mlx_lm": "0.32.2", "python": "3.11.4", "protocol": 1}
    )
    sshd.add_host("box")
    hosts = (
        HostEntry(name="mac1", python=new.python, addresses=("127.0.0.1",)),
        HostEntry(name="mac2", ssh="box", python=old.python, addresses=("127.0.0.1",)),
    )
    with pytest.raises(
        PreflightError, match=r"^mac2: version: it has mlx 0\.31\.2, mac1 has 0\.32\.4; run there"
    ):
        check_hosts(config_of(*hosts, ssh_config=str(sshd.config)))


def test_the_real_program_can_ask_this_very_environment(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"^here: model: .*does not exist"):
        check_hosts(
            replace(config_of(HostEntry(name="here", python=sys.executable)), model=str(tmp_path / "none"))
        )


def test_nothing_is_left_when_a_host_fails(
    fake_python: Callable[..., Any], start_sshd: Callable[..., Any]
) -> None:
    sshd, fake = start_sshd("a"), fake_python("a")
    sshd.add_host("box")
    before = threading.active_count()
    hosts = (
        HostEntry(name="mac1", ssh="box", python=fake.python),
        HostEntry(name="mac2", ssh="box", user="nobody", python=fake.python),
    )
    with pytest.raises(PreflightError, match="mac2: auth"):
        check_hosts(config_of(*hosts, ssh_config=str(sshd.config)))
    assert threading.active_count() == before
