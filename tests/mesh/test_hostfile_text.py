"""hosts.yaml as `init` writes it: read back, it says what was found."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from mlx_mesh.mesh.hostfile import parse_hostfile
from mlx_mesh.mesh.hostfile_text import FoundHost, describe_links, host_name, hostfile_text

PYTHON = "~/.venvs/mlx-mesh/bin/python"


@pytest.fixture
def pair(macs: ModuleType) -> list[FoundHost]:
    made = macs.mesh_of(macs.Mac(), 2, macs.full_mesh(2))
    return [
        FoundHost("mac1", "", "", PYTHON, macs.report_of(made[0])),
        FoundHost("mac2", "mac2.local", "anna", PYTHON, macs.report_of(made[1])),
    ]


def test_what_is_written_is_read_back(pair: list[FoundHost]) -> None:
    text = hostfile_text(pair, name="studio", model="org/name@main", made_by="mlx-mesh init mac2.local")
    read = parse_hostfile(text)
    assert (read.name, read.model) == ("studio", "org/name@main")
    assert [(h.name, h.ssh, h.user, h.python, h.is_local) for h in read.hosts] == [
        ("mac1", "", "", PYTHON, True),
        ("mac2", "mac2.local", "anna", PYTHON, False),
    ]
    assert "# Apple M4 Pro, 64 GB, macOS 26.2 (25C56), Python 3.12.1: en0 (Ethernet)" in text
    assert not any(host.addresses for host in read.hosts)  # they change; hosts are looked up by name


def test_interpreters_that_differ_stand_with_their_hosts_and_odd_words_in_quotes(
    pair: list[FoundHost],
) -> None:
    other = replace(pair[1], python='/opt/my "py"/bin/python', name="10.0.0.7", ssh="10.0.0.7")
    read = parse_hostfile(hostfile_text([pair[0], other], name="on", model="", made_by="x"))
    assert (read.name, read.model) == ("on", "")
    assert [(h.name, h.python) for h in read.hosts] == [("mac1", PYTHON), ("10.0.0.7", other.python)]


def test_the_link_that_a_mesh_would_use_is_named(pair: list[FoundHost], macs: ModuleType) -> None:
    (line,) = describe_links(pair)
    assert line.startswith(
        "mac1 - mac2: ethernet, en0 192.168.1.1 and en0 192.168.1.2; the Thunderbolt cable"
    )
    assert "(en2 and en2) has no addresses of its own yet: `mlx-mesh net plan`" in line
    made = macs.mesh_of(macs.Mac(), 2, macs.full_mesh(2))
    ready = [
        replace(host, report=macs.report_of(replace(mac, thunderbolt={"en2": (address,)})))
        for host, mac, address in zip(pair, made, ("10.0.0.1/30", "10.0.0.2/30"), strict=True)
    ]
    assert describe_links(ready) == ["mac1 - mac2: thunderbolt, en2 10.0.0.1 and en2 10.0.0.2"]
    apart = [replace(host, report=macs.report_of(macs.Mac(number=n))) for n, host in enumerate(pair, 7)]
    apart[1] = replace(apart[1], report=macs.report_of(macs.Mac(number=9, ethernet=("10.3.0.1/24",))))
    assert describe_links(apart) == ["mac1 - mac2: no network in common"]


@pytest.mark.parametrize(
    ("target", "taken", "name"),
    [
        ("mac2.local", [], "mac2"),
        ("10.0.0.7", [], "10.0.0.7"),
        ("mac.a", ["mac"], "mac-2"),
        ("MAC.b", ["mac", "mac-2"], "MAC-3"),
        ("_", [], "host"),
        ("my mac%1.local", [], "my-mac-1"),
    ],
)
def test_names_are_short_and_no_two_alike(target: str, taken: list[str], name: str) -> None:
    assert host_name(target, taken) == name
