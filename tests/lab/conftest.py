"""The lab's hosts as a fixture."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def load(path: Path) -> ModuleType:
    """A helper module by its path: test folders are no packages."""
    spec = importlib.util.spec_from_file_location(f"lab_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


netlab = load(HERE / "netlab.py")
mac_programs = load(HERE / "mac_programs.py")
pretended = load(HERE.parent / "launcher" / "conftest.py")
fake_python = pretended.fake_python

FISH_LIKE = """#!/bin/sh
# A login shell that is none of sh's kind: it knows words in single quotes and exec, and no more.
[ "$1" = -c ] || exit 100
echo "Welcome to a fish-like shell"
case $2 in *['$&|;()<>`"']*) echo "fish: syntax error in: $2" >&2; exit 127;; esac
exec /bin/sh -c "$2"
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab_reason() -> str:
    return str(netlab.why_not())


@pytest.fixture
def lab(lab_reason: str, tmp_path: Path) -> Iterator[Any]:
    """Three hosts; mac2's shell profile is noisy and moves PATH away, mac3's login shell is like fish."""
    if lab_reason:
        pytest.skip(lab_reason)
    shell = tmp_path / "fish-like"
    shell.write_text(FISH_LIKE)
    shell.chmod(0o755)
    with netlab.Lab(tmp_path / "lab", 3, {"mac3": str(shell)}) as made:
        (made.home("mac2") / ".bashrc").write_text(
            "echo Hello from a profile; echo '{}'; PATH=/nowhere; cd /proc\n"
        )
        yield made


@pytest.fixture
def lab_wheels() -> ModuleType:
    """See wheels.py: a package index in a folder."""
    return load(HERE / "wheels.py")


@pytest.fixture
def mac_lab(lab_reason: str, tmp_path: Path, macs: ModuleType) -> Iterator[Any]:
    """Makes labs of imagined Macs: `mac_lab("tb5-2")`, with a cable wherever they have one."""
    if lab_reason:
        pytest.skip(lab_reason)
    opened = []

    def make(name: str) -> Any:
        made = macs.fixtures()[name]
        lab = netlab.Lab(tmp_path / "lab", len(made))
        lab.__enter__()
        opened.append(lab)
        for host, mac in zip(lab.hosts, made, strict=True):
            services = [
                [service.name, service.port, service.device] for service in macs.report_of(mac).services
            ]
            mac_programs.place(lab.programs(host), macs.transcript(mac), mac.is_bridged, services)
        for (one, port), (other, peer) in made[0].cables:
            lab.join(f"mac{one}", f"en{port + 1}", f"mac{other}", f"en{peer + 1}")
        for host, mac in zip(lab.hosts, made, strict=True):
            give_addresses(lab, host, mac)
        return lab

    yield make
    for lab in opened:
        lab.stop()


def give_addresses(lab: Any, host: str, mac: Any) -> None:
    """Those of an imagined Mac that are special about it, on real interfaces of the lab's host."""
    extra = {} if mac.ethernet == (f"192.168.1.{mac.number}/24",) else {"en0": mac.ethernet}
    extra |= {"bridge0": mac.bridge, "utun4": mac.vpn} | mac.thunderbolt
    for interface, addresses in extra.items():
        if addresses and interface in ("bridge0", "utun4"):
            lab.add_interface(host, interface)
        for address in addresses:
            lab.give_address(host, interface, address)
    if mac.vpn:
        lab.add_route(host, "10.0.0.0/8", "utun4")
