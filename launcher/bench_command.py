"""`mlx-mesh bench --probe`: each host's memory and matrix rate, each link's round trip and bandwidth.

Takes seconds. What was measured is kept in the state folder, and `plan` and `up` use it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.measured import keep_measurements
from mlx_mesh.launcher.preflight import ReadyHost, check_hosts, close_all
from mlx_mesh.launcher.remote import run, run_program, stream_program
from mlx_mesh.launcher.text import table
from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.mesh.measurements import HostMeasurement, LinkMeasurement, Measurements, host_key, link_key

RATES_TIMEOUT_S = 120.0
LINK_TIMEOUT_S = 60.0
NUM_TRIPS = 200
NUM_CHUNKS = 64  # of 1 MiB


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured; `faults` are measurements that did not come about."""

    measurements: Measurements
    hosts: dict[str, HostMeasurement]  # by the host's name in the mesh
    links: dict[str, LinkMeasurement]  # "mac1 - mac2"
    faults: tuple[str, ...]


def probe(config: LaunchConfig, environment: Mapping[str, str], say: Callable[[str], None]) -> Probe:
    """Measure and keep. Raises MeshError when hosts cannot be reached."""
    hosts = check_hosts(config).hosts
    faults: list[str] = []
    by_name: dict[str, HostMeasurement] = {}
    by_pair: dict[str, LinkMeasurement] = {}
    keys: dict[str, str] = {}
    try:
        for host in hosts:
            say(f"Measuring {host.entry.name} ...")
            try:
                by_name[host.entry.name] = measure_host(host)
            except MeshError as error:
                faults.append(str(error))
        for one, other in itertools.combinations(hosts, 2):
            pair = f"{one.entry.name} - {other.entry.name}"
            say(f"Measuring the link {pair} ...")
            try:
                by_pair[pair] = measure_link(one, other)
                keys[pair] = link_key(one.facts, other.facts)
            except MeshError as error:
                faults.append(f"link {pair}: {error}")
    finally:
        close_all(hosts)
    found = Measurements(
        hosts={host_key(h.facts): by_name[h.entry.name] for h in hosts if h.entry.name in by_name},
        links={keys[pair]: link for pair, link in by_pair.items()},
    )
    keep_measurements(environment, found)
    return Probe(found, by_name, by_pair, tuple(faults))


def measure_host(host: ReadyHost) -> HostMeasurement:
    """Raises MeshError."""
    words = [host.python, "-I", "-u", "-m", "mlx_mesh.node.rates"]
    completed = run(host.remote, words, b"", RATES_TIMEOUT_S)
    for line in reversed(completed.stdout):
        if line.startswith("{") and completed.exit.code == 0:
            told = json.loads(line)
            return HostMeasurement(memory_rate=int(told["memory_rate"]), matrix_rate=int(told["matrix_rate"]))
    raise MeshError(f"{host.entry.name} could not be measured: {completed.last_words() or completed.exit}")


def measure_link(one: ReadyHost, other: ReadyHost) -> LinkMeasurement:
    """Both directions; the slower one counts. Raises MeshError."""
    there, back = _one_way(one, other), _one_way(other, one)
    return LinkMeasurement(
        rtt_ns=max(there.rtt_ns, back.rtt_ns), bandwidth=min(there.bandwidth, back.bandwidth)
    )


def _one_way(server: ReadyHost, client: ReadyHost) -> LinkMeasurement:
    size = {"address": server.address, "num_trips": NUM_TRIPS, "num_chunks": NUM_CHUNKS}
    answers = stream_program(server.remote, server.python, "echo_link", {"do": "serve", **size})
    try:
        port = next((int(item["port"]) for item in answers if item), 0)
        request = {"do": "measure", "port": port, **size}
        told = run_program(client.remote, client.python, "echo_link", request, LINK_TIMEOUT_S)
    finally:
        answers.close()  # type: ignore[attr-defined]
    return LinkMeasurement(rtt_ns=int(told["rtt_ns"]), bandwidth=int(told["bandwidth"]))


def lines(found: Probe) -> list[str]:
    """For people."""
    out: list[str] = []
    if found.hosts:
        rows = [
            [name, f"{host.memory_rate / 1e9:.1f} GB/s", f"{host.matrix_rate / 1e12:.2f} TFLOP/s"]
            for name, host in found.hosts.items()
        ]
        out += table(["host", "memory", "matrix"], rows)
    if found.links:
        rows = [
            [name, f"{link.rtt_ns / 1e6:.3f} ms", f"{link.bandwidth / 1e9:.2f} GB/s"]
            for name, link in found.links.items()
        ]
        out += ["", *table(["link", "round trip", "bandwidth"], rows)]
    return out
