"""A hostfile written for people: what was found of each host, as text that `parse_hostfile` reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.interfaces import Interface, LinkClass
from mlx_mesh.mesh.link_plan import links_between, may_meet, usable_interfaces


@dataclass(frozen=True, slots=True)
class FoundHost:
    """One host that answered. `ssh` is '' for this machine."""

    name: str
    ssh: str
    user: str
    python: str
    report: HostReport

    @property
    def interfaces(self) -> tuple[str, tuple[Interface, ...]]:
        return self.name, self.report.facts.interfaces


def host_name(target: str, taken: Sequence[str]) -> str:
    """A short name for an SSH target: "mac2.local" -> mac2. An address stays whole; a second one of the same
    name gets a number."""
    first = target if re.fullmatch(r"[\d.]+", target) else target.partition(".")[0]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", first).strip("._-")[:50] or "host"
    number = 2
    while name.lower() in (other.lower() for other in taken):
        name = f"{name.rpartition('-')[0] if number > 2 else name}-{number}"
        number += 1
    return name


def describe(host: FoundHost) -> str:
    """Chip, memory and system in a few words."""
    facts, report = host.report.facts, host.report
    system = f"macOS {report.os_version} ({report.os_build})" if report.os_version else facts.system
    chip = facts.chip if facts.chip not in ("", "none") else facts.machine
    # In the units of Apple's labels, which are powers of two.
    memory = f"{facts.memory_bytes / 2**30:.0f} GB"
    return f"{chip}, {memory}, {system}, Python {facts.versions.python}"


def describe_links(hosts: Sequence[FoundHost]) -> list[str]:
    """A line for each pair of hosts: the link that a mesh would use, or what they have instead."""
    return [
        f"{one.name} - {other.name}: {_link(one, other)}"
        for index, one in enumerate(hosts)
        for other in hosts[index + 1 :]
    ]


def _link(one: FoundHost, other: FoundHost) -> str:
    links = links_between(one.interfaces, other.interfaces, allow_wifi=True)
    cable = cable_between(one.interfaces[1], other.interfaces[1])
    unused = ""
    if cable is not None and not any(link.link_class is LinkClass.THUNDERBOLT for link in links):
        ends = f"{cable[0].name} and {cable[1].name}"
        unused = f"; the Thunderbolt cable ({ends}) has no addresses of its own yet: `mlx-mesh net plan`"
    if links:
        best = links[0]
        return (
            f"{best.link_class}, {best.dials.interface} {best.dials.address} and {best.listens.interface} "
            f"{best.listens.address}{unused}"
        )
    return f"no network in common{unused}"


def cable_between(
    here: Sequence[Interface], there: Sequence[Interface]
) -> tuple[Interface, Interface] | None:
    """The two ends of the first Thunderbolt cable that joins two hosts, whether it has addresses or not."""
    for port in sorted(here, key=lambda port: port.name):
        for peer in there:
            if port.own_id and peer.own_id and port.peer_id and may_meet(port, peer):
                return port, peer
    return None


def hostfile_text(hosts: Sequence[FoundHost], *, name: str, model: str, made_by: str) -> str:
    """The first host leads. Interpreters that all share stand in `defaults`; addresses are left out, since
    they are looked up at each start."""
    common = hosts[0].python if all(host.python == hosts[0].python for host in hosts) else ""
    lines = [f"# Written by `{made_by}`. All keys: docs/hostfile.md.", f"name: {_word(name)}"]
    if model:
        lines.append(f"model: {_word(model)}")
    else:
        lines.append("# model: mlx-community/Qwen3-30B-A3B-4bit     # a hub id or a folder; or say --model")
    if common:
        lines.append(f"defaults: {{python: {_word(common)}}}")
    lines += ["", *(f"# {line}" for line in describe_links(hosts))]
    lines.append("hosts:")
    for host in hosts:
        fields = {"name": host.name, **({"ssh": host.ssh} if host.ssh else {"local": "true"})}
        if host.user:
            fields["user"] = host.user
        if not common:
            fields["python"] = host.python
        lines.append(f"  # {describe(host)}: {_usable(host)}")
        words = (f"{key}: {value if key == 'local' else _word(value)}" for key, value in fields.items())
        lines.append(f"  - {{{', '.join(words)}}}")
    return "\n".join(lines) + "\n"


def _usable(host: FoundHost) -> str:
    names = [i.what for i in usable_interfaces(host.report.facts.interfaces, allow_wifi=True) if i.addresses]
    return ", ".join(names) or "no network"


def _word(text: str) -> str:
    """As YAML reads it back: in quotes unless it is plain."""
    if re.fullmatch(r"[A-Za-z/][A-Za-z0-9/._-]*", text) and text.lower() not in _YAML_WORDS:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_YAML_WORDS = ("yes", "no", "true", "false", "on", "off", "null", "y", "n")
