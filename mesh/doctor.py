"""What is wrong with hosts before a mesh is started, and what to do about it. Pure.

Each check looks at one host (and what it should share with the leader) and gives one finding with its
evidence. Nothing here changes anything, and no advice is carried out by the program.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import msgspec

from mlx_mesh.mesh.capacity import wired_limit_advice
from mlx_mesh.mesh.chips import find_chip
from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.interfaces import LINK_LOCAL, LinkClass, is_foreign
from mlx_mesh.mesh.link_plan import overlapping_subnets, usable_interfaces
from mlx_mesh.mesh.memory import format_bytes
from mlx_mesh.mesh.types import Backend, Versions

MIN_MLX = (0, 32)
"""The first releases in which a dead peer ends a collective instead of keeping everyone at full load."""

CLOCK_S = 30.0
SWAP_BYTES = 2 * 1024**3
DISK_BYTES = 5 * 1024**3
OPEN_FILES = 1024


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # worth knowing; nothing is wrong
    WARN = "warn"  # it works, and could be better or stop working
    FAIL = "fail"  # a mesh cannot start, or would give trouble


class Area(StrEnum):
    """What kind of thing is wrong; each has an exit status of its own."""

    REACH = "reach"
    SOFTWARE = "software"
    MODEL = "model"
    MACHINE = "machine"
    NETWORK = "network"


EXIT_STATUS = {Area.REACH: 20, Area.SOFTWARE: 21, Area.MODEL: 22, Area.MACHINE: 23, Area.NETWORK: 24}
"""Of `mlx-mesh doctor`, by the first failure; 0 when there is none, whatever the warnings."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line: what was looked at, on which host, what was seen, and the fix; '' = nothing is to be done."""

    host: str
    check: str
    area: Area
    level: Level
    evidence: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:4}  {self.host}: {self.check}: {self.evidence}" + (
            f"; {self.fix}" if self.fix else ""
        )


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """One host and its report."""

    name: str
    report: HostReport
    python: str = "python3"
    skew_s: float = 0.0  # its clock minus the launcher's, at the middle of the question
    is_leader: bool = False


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What the hosts are wanted for."""

    backend: Backend = Backend.AUTO
    num_hosts: int = 1
    serve_port: int = 18000
    needs_model: bool = True


Seen = tuple[Level, str, str]  # level, evidence, fix
Check = Callable[[Examined, Examined, Question], Seen]

_CHECKS: list[tuple[str, Area, Check]] = []


def _check(name: str, area: Area) -> Callable[[Check], Check]:
    def keep(function: Check) -> Check:
        _CHECKS.append((name, area, function))
        return function

    return keep


def check_names() -> list[str]:
    """In the order in which they are told."""
    return [name for name, _, _ in _CHECKS]


def examine(hosts: Sequence[Examined], question: Question) -> list[Finding]:
    """All findings, host by host in order, each host's in the order of the checks."""
    leader = next((host for host in hosts if host.is_leader), hosts[0])
    return [
        Finding(host=host.name, check=name, area=area, level=level, evidence=evidence, fix=fix)
        for host in hosts
        for name, area, check in _CHECKS
        for level, evidence, fix in [check(host, leader, question)]
    ]


def first_failure(findings: Sequence[Finding]) -> Finding | None:
    return next((finding for finding in findings if finding.level is Level.FAIL), None)


def exit_status(findings: Sequence[Finding]) -> int:
    """See EXIT_STATUS."""
    failure = first_failure(findings)
    return EXIT_STATUS[failure.area] if failure else 0


def _ok(evidence: str) -> Seen:
    return Level.OK, evidence, ""


# ---------------------------------------------------------------- software


@_check("architecture", Area.SOFTWARE)
def _architecture(host: Examined, leader: Examined, question: Question) -> Seen:
    machine = host.report.facts.machine
    if host.report.is_translated:
        fix = "install a native (arm64) Python there and set `python:` of this host to it"
        return Level.FAIL, f"{host.python} is an Intel program under Rosetta, for which MLX has no GPU", fix
    if host.report.facts.system == "Darwin" and machine != "arm64":
        return Level.FAIL, f"{machine}: MLX needs Apple silicon", "leave this host out"
    return _ok(f"{machine}, native")


@_check("mlx version", Area.SOFTWARE)
def _mlx_version(host: Examined, leader: Examined, question: Question) -> Seen:
    mlx, wanted = host.report.facts.versions.mlx, leader.report.facts.versions.mlx
    if _numbers(mlx) < MIN_MLX:
        text = ".".join(map(str, MIN_MLX))
        why = f"mlx {mlx or 'none'} is older than {text}, with which a dead rank would hang the others"
        return Level.FAIL, why, f"run there: {host.python} -m pip install --upgrade mlx"
    return _same(host, "mlx", mlx, wanted, leader)


@_check("mlx-lm version", Area.SOFTWARE)
def _mlx_lm_version(host: Examined, leader: Examined, question: Question) -> Seen:
    return _same(
        host, "mlx-lm", host.report.facts.versions.mlx_lm, leader.report.facts.versions.mlx_lm, leader
    )


@_check("mlx-mesh version", Area.SOFTWARE)
def _mesh_version(host: Examined, leader: Examined, question: Question) -> Seen:
    own, its = _release(leader.report.facts.versions), _release(host.report.facts.versions)
    return _same(host, "mlx-mesh", its, own, leader)


def install_fix(host: str) -> str:
    """How to put this mlx-mesh on a host: no index has it."""
    return f"put this one there: `mlx-mesh init {host} --install -o -`"


def _release(versions: Versions) -> str:
    return f"{versions.mlx_mesh} (protocol {versions.protocol})"


def _same(host: Examined, package: str, has: str, wanted: str, leader: Examined) -> Seen:
    if has == wanted:
        return _ok(f"{package} {has}")
    fix = f"run there: {host.python} -m pip install {package}=={wanted.partition(' ')[0]}"
    if package == "mlx-mesh":
        fix = install_fix(host.name)
    return Level.FAIL, f"{package} {has or 'is not installed'}, {leader.name} has {wanted}", fix


@_check("python version", Area.SOFTWARE)
def _python_version(host: Examined, leader: Examined, question: Question) -> Seen:
    own, its = leader.report.facts.versions.python, host.report.facts.versions.python
    if own.split(".")[:2] != its.split(".")[:2]:
        return Level.WARN, f"Python {its}, {leader.name} has {own}; the same one is better tested", ""
    return _ok(f"Python {its}")


@_check("system", Area.SOFTWARE)
def _system(host: Examined, leader: Examined, question: Question) -> Seen:
    own, its = leader.report, host.report
    if not its.os_version:
        return _ok(its.facts.system)
    text = f"macOS {its.os_version} ({its.os_build})"
    if own.os_build and its.os_build != own.os_build:
        seen = f"{text}, {leader.name} has {own.os_version} ({own.os_build})"
        if question.backend in (Backend.JACCL, Backend.JACCL_RING):
            return (
                Level.FAIL,
                f"{seen}: RDMA ports of different builds may not find each other",
                "update both",
            )
        return Level.WARN, f"{seen}; RDMA would need the same build", ""
    if _numbers(its.os_version) < (14, 0):
        return Level.FAIL, f"{text}: MLX needs macOS 14 or newer", "update macOS"
    return _ok(text)


@_check("fast synch", Area.SOFTWARE)
def _fast_synch(host: Examined, leader: Examined, question: Question) -> Seen:
    if host.report.fast_synch not in ("", "0"):
        seen = f"MLX_METAL_FAST_SYNCH={host.report.fast_synch} is set, with which MLX can lock up the GPU"
        return Level.WARN, seen, "remove it from the shell's profile there"
    return _ok("MLX_METAL_FAST_SYNCH is not set")


@_check("fast matrix library", Area.SOFTWARE)
def _openblas(host: Examined, leader: Examined, question: Question) -> Seen:
    if host.report.has_openblas is False:
        seen = "no OpenBLAS: MLX's own routines for the CPU are many times slower"
        return Level.WARN, seen, "run there: apt-get install libopenblas0-pthread"
    return _ok("not needed" if host.report.has_openblas is None else "OpenBLAS is there")


# ---------------------------------------------------------------- the model


@_check("model", Area.MODEL)
def _model(host: Examined, leader: Examined, question: Question) -> Seen:
    facts = host.report.facts
    if not question.needs_model:
        return _ok("none was asked for")
    if not facts.model_digest:
        seen = facts.model_error.rstrip(".") or "it is not there"
        return Level.FAIL, seen, "`mlx-mesh sync` or `up` brings it there; or set `models:` of this host"
    own = leader.report.facts.model_digest
    if own and facts.model_digest != own:
        seen = f"it differs from {leader.name}'s ({facts.model_digest[:12]} and {own[:12]})"
        return Level.FAIL, seen, "copy the same config and weight files to both"
    return _ok(f"digest {facts.model_digest[:12]}")


@_check("tokenizer", Area.MODEL)
def _tokenizer(host: Examined, leader: Examined, question: Question) -> Seen:
    problem = host.report.facts.tokenizer_error.rstrip(".")
    if problem and host.is_leader and question.needs_model:
        return Level.FAIL, problem, "the first host serves HTTP and needs the tokenizer's files"
    return _ok("there" if not problem else "not needed on this host")


@_check("adapter", Area.MODEL)
def _adapter(host: Examined, leader: Examined, question: Question) -> Seen:
    facts, own = host.report.facts, leader.report.facts.adapter_digest
    if facts.adapter_error:
        return Level.FAIL, facts.adapter_error.rstrip("."), "copy the adapter's folder there"
    if facts.adapter_digest != own:
        return Level.FAIL, f"it differs from {leader.name}'s", "copy the same adapter folder to both"
    return _ok(f"digest {own[:12]}" if own else "none was asked for")


@_check("disk", Area.MODEL)
def _disk(host: Examined, leader: Examined, question: Question) -> Seen:
    free = format_bytes(host.report.disk_free_bytes)
    if host.report.disk_free_bytes < DISK_BYTES:
        return Level.WARN, f"{free} are free where models are kept", "make room before a model is fetched"
    return _ok(f"{free} free")


# ---------------------------------------------------------------- the machine


@_check("chip", Area.MACHINE)
def _chip(host: Examined, leader: Examined, question: Question) -> Seen:
    chip = host.report.facts.chip
    if find_chip(chip) is None:
        return (
            Level.NOTE,
            f"{chip or 'unknown'}: no speeds are known, so none is predicted",
            "`mlx-mesh bench --probe`",
        )
    return _ok(chip)


@_check("memory", Area.MACHINE)
def _memory(host: Examined, leader: Examined, question: Question) -> Seen:
    facts = host.report.facts
    text = f"{format_bytes(facts.usable_memory_bytes)} of {format_bytes(facts.memory_bytes)} for the model"
    if facts.usable_memory_bytes <= 0:
        return Level.FAIL, "no memory is left for a model", "end what uses it, see `top`"
    advice = wired_limit_advice(host.name, facts.memory_bytes, facts.usable_memory_bytes)
    if facts.system == "Darwin" and advice:
        return Level.NOTE, text, advice.rstrip(".")
    return _ok(text)


@_check("swap", Area.MACHINE)
def _swap(host: Examined, leader: Examined, question: Question) -> Seen:
    used = host.report.swap_used_bytes
    if used > SWAP_BYTES:
        return (
            Level.WARN,
            f"{format_bytes(used)} of swap are in use",
            "end programs that hold memory, or reboot",
        )
    return _ok(f"{format_bytes(used)} used")


@_check("open files", Area.MACHINE)
def _open_files(host: Examined, leader: Examined, question: Question) -> Seen:
    limit = host.report.max_open_files
    if 0 < limit < OPEN_FILES:
        return (
            Level.WARN,
            f"at most {limit} open files, which many clients at once can use up",
            "ulimit -n 4096",
        )
    return _ok(f"up to {limit}" if limit else "no limit")


@_check("http port", Area.MACHINE)
def _http_port(host: Examined, leader: Examined, question: Question) -> Seen:
    if not host.is_leader:
        return _ok("not needed on this host")
    if host.report.port_holder:
        seen = f"port {question.serve_port} is taken by {host.report.port_holder}"
        return Level.FAIL, seen, "end it, or choose another with --port"
    return _ok(f"port {question.serve_port} is free")


@_check("data ports", Area.MACHINE)
def _data_ports(host: Examined, leader: Examined, question: Question) -> Seen:
    if not host.report.has_data_ports:
        return Level.FAIL, "no port between 20000 and 31999 can be listened on", "see what limits this user"
    return _ok("20000 to 31999 can be listened on")


@_check("left over", Area.MACHINE)
def _leftovers(host: Examined, leader: Examined, question: Question) -> Seen:
    if host.report.leftovers:
        fix = "the next start ends them; or `mlx-mesh down`"
        return Level.WARN, f"ranks of a mesh that is gone still run: {', '.join(host.report.leftovers)}", fix
    return _ok("no rank of an earlier mesh")


@_check("sleep", Area.MACHINE)
def _sleep(host: Examined, leader: Examined, question: Question) -> Seen:
    minutes = host.report.sleep_minutes
    if minutes:
        seen = f"it sleeps after {minutes} idle minutes, and nothing wakes it over Thunderbolt"
        return Level.WARN, seen, "`sudo pmset -a sleep 0` there"
    return _ok("never" if minutes == 0 else "the system does not say")


@_check("power", Area.MACHINE)
def _power(host: Examined, leader: Examined, question: Question) -> Seen:
    if host.report.is_on_battery:
        return Level.WARN, "it runs on battery, on which macOS sleeps whatever holds it awake", "plug it in"
    return _ok("not on battery")


@_check("lid", Area.MACHINE)
def _lid(host: Examined, leader: Examined, question: Question) -> Seen:
    if host.report.is_lid_closed:
        return Level.WARN, "its lid is closed, with which it sleeps unless a display is attached", "open it"
    return _ok("not closed")


@_check("clock", Area.MACHINE)
def _clock(host: Examined, leader: Examined, question: Question) -> Seen:
    if abs(host.skew_s) > CLOCK_S:
        seen = (
            f"its clock differs by {host.skew_s:+.0f} s from this machine's: logs cannot be laid side by side"
        )
        return Level.WARN, seen, "switch on network time there"
    return _ok(f"{host.skew_s:+.1f} s")


# ---------------------------------------------------------------- the network


@_check("interfaces", Area.NETWORK)
def _interfaces(host: Examined, leader: Examined, question: Question) -> Seen:
    usable = [i for i in usable_interfaces(host.report.facts.interfaces, allow_wifi=True) if i.addresses]
    if question.num_hosts == 1:
        return _ok("one host needs none")
    if not usable:
        return Level.FAIL, "no interface that other hosts could reach has an IPv4 address", "connect a cable"
    if all(interface.link_class is LinkClass.WIFI for interface in usable):
        seen = f"only Wi-Fi: {', '.join(i.what for i in usable)}"
        return Level.FAIL, seen, "connect a cable, or start with --allow-wifi"
    return _ok(", ".join(interface.what for interface in usable))


@_check("subnets", Area.NETWORK)
def _subnets(host: Examined, leader: Examined, question: Question) -> Seen:
    found = overlapping_subnets(host.name, host.report.facts.interfaces)
    if found:
        seen = found[0].partition(": ")[2]
        return Level.FAIL, seen, "give the cable a subnet of its own (`mlx-mesh net plan`)"
    return _ok("none overlaps")


@_check("default route", Area.NETWORK)
def _default_route(host: Examined, leader: Examined, question: Question) -> Seen:
    kinds = {i.name: i for i in host.report.facts.interfaces}
    defaults = [route.interface for route in host.report.routes if route.network == "0.0.0.0/0"]
    over = [n for n in defaults if n in kinds and kinds[n].link_class is LinkClass.THUNDERBOLT]
    if over:
        seen = f"the default route goes over {kinds[over[0]].what}: the internet is looked for in the cable"
        return Level.FAIL, seen, "remove the router's address from that service, or switch its DHCP off"
    return _ok(", ".join(defaults) or "none")


@_check("vpn", Area.NETWORK)
def _vpn(host: Examined, leader: Examined, question: Question) -> Seen:
    """A tunnel's route that covers a cable's network: by itself the cable's own route wins, but VPN programs
    take such routes away, or filter what is not theirs."""
    kinds = {i.name: i for i in host.report.facts.interfaces}
    cables = [
        (i, ipaddress.ip_interface(text).network)
        for i in kinds.values()
        if i.link_class is LinkClass.THUNDERBOLT and i.is_active
        for text in i.addresses
        if ipaddress.ip_interface(text).ip not in LINK_LOCAL
    ]
    for route in host.report.routes:
        network = ipaddress.ip_network(route.network)
        if network.prefixlen <= 1 or not is_foreign(route.interface):
            continue
        for cable, own in cables:
            if own.overlaps(network):
                seen = f"the route {network} of {route.interface} covers {cable.what} ({own})"
                return Level.WARN, seen, "if links fail while the VPN is on: `mlx-mesh net plan` with it on"
    return _ok("no tunnel's route covers a cable")


@_check("bridge", Area.NETWORK)
def _bridge(host: Examined, leader: Examined, question: Question) -> Seen:
    bridged = [i for i in host.report.facts.interfaces if i.bridge and i.link_class is LinkClass.THUNDERBOLT]
    bridges = {i.bridge for i in bridged}
    leased = bridges.intersection(host.report.dhcp)
    if leased:
        seen = f"{leased.pop()} holds a DHCP lease: names and the internet may go over the cable"
        return Level.FAIL, seen, "set that service to a manual or self-assigned address"
    if not bridged:
        return _ok("no Thunderbolt port is a member of a bridge")
    seen = f"{', '.join(i.name for i in bridged)} are members of {bridged[0].bridge}"
    fix = 'to use the ports one by one: networksetup -setnetworkserviceenabled "Thunderbolt Bridge" off'
    if question.backend in (Backend.JACCL, Backend.JACCL_RING):
        return Level.FAIL, f"{seen}, and RDMA cannot use such ports", fix
    if question.num_hosts > 2:
        return Level.WARN, f"{seen}: with a loop of cables frames go round for ever", fix
    return Level.NOTE, f"{seen}; the ring works over the bridge", fix


@_check("mtu", Area.NETWORK)
def _mtu(host: Examined, leader: Examined, question: Question) -> Seen:
    own = {i.mtu for i in usable_interfaces(leader.report.facts.interfaces, allow_wifi=False) if i.addresses}
    odd = [
        i
        for i in usable_interfaces(host.report.facts.interfaces, allow_wifi=False)
        if i.addresses and i.mtu and own and i.mtu not in own
    ]
    if odd:
        seen = f"{odd[0].what} has MTU {odd[0].mtu}, {leader.name} has {', '.join(map(str, sorted(own)))}"
        return Level.WARN, seen, "set the same MTU on both ends, else large packets are lost in silence"
    return _ok("as the leader's")


@_check("firewall", Area.NETWORK)
def _firewall(host: Examined, leader: Examined, question: Question) -> Seen:
    state = host.report.firewall
    tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    if state == "all":
        return (
            Level.FAIL,
            "the firewall blocks all incoming connections",
            "allow incoming ones in System Settings",
        )
    if state == "on":
        fix = f"if links fail: sudo {tool} --add {host.python} and --unblockapp {host.python}"
        return Level.WARN, "the firewall is on, and asks on that Mac's own screen", fix
    return _ok(state or "the system does not say")


@_check("helpers", Area.NETWORK)
def _helpers(host: Examined, leader: Examined, question: Question) -> Seen:
    if host.report.helpers:
        seen = f"another program's daemon changes Thunderbolt networks: {', '.join(host.report.helpers)}"
        return Level.WARN, seen, "stop it while a mesh runs"
    return _ok("none is known")


@_check("thunderbolt", Area.NETWORK)
def _thunderbolt(host: Examined, leader: Examined, question: Question) -> Seen:
    ports = [i for i in host.report.facts.interfaces if i.own_id]
    if not ports:
        return _ok("no port that tells of itself")
    generation = max(port.generation for port in ports)
    joined = [port for port in ports if port.peer_id]
    slow = [port for port in joined if 0 < port.mbits < 80_000 and generation >= 5]
    if slow:
        seen = f"{slow[0].what} is linked at {slow[0].mbits // 1000} Gb/s on a Thunderbolt {generation} Mac"
        return Level.WARN, seen, "use a Thunderbolt 5 cable, and a Thunderbolt 5 port at the other end"
    text = f"Thunderbolt {generation}, {len(joined)} of {len(ports)} ports lead to another Mac"
    beside_ethernet = [p for p in joined if p.name == "en2"] if _is_studio(host.report) else []
    if beside_ethernet and question.backend is not Backend.RING:
        return (
            Level.WARN,
            f"{text}; the port next to Ethernet (en2) is said to have no RDMA on a Studio",
            "use another",
        )
    return _ok(text)


def _is_studio(report: HostReport) -> bool:
    return report.hardware_model in ("Mac13,1", "Mac13,2", "Mac14,13", "Mac14,14", "Mac15,14", "Mac16,9")


@_check("rdma", Area.NETWORK)
def _rdma(host: Examined, leader: Examined, question: Question) -> Seen:
    ports = [i for i in host.report.facts.interfaces if i.own_id]
    level = Level.FAIL if question.backend in (Backend.JACCL, Backend.JACCL_RING) else Level.NOTE
    if not ports:
        return (
            (level, "no Thunderbolt port, so no RDMA", "use backend ring")
            if level is Level.FAIL
            else _ok("none")
        )
    if max(port.generation for port in ports) < 5:
        seen = "Thunderbolt 4 or older has no RDMA, whatever devices are listed; the ring is used"
        return level, seen, "use backend ring" if level is Level.FAIL else ""
    if host.report.rdma_status == "disabled" or not any(port.rdma for port in ports):
        fix = "optional: at that Mac, in Recovery's Terminal, `rdma_ctl enable`; it cannot be done from afar"
        return level, "RDMA is not enabled; the ring is used", fix
    return _ok(f"enabled, {sum(bool(port.rdma) for port in ports)} devices")


# ---------------------------------------------------------------- all hosts together


def duplicates(hosts: Sequence[tuple[Examined, str]]) -> Iterator[Finding]:
    """Hosts, with the fingerprint of the SSH host key each ('' = this machine), that look like one machine:
    the same hardware id, or the same key, as after a disk was copied: SSH cannot tell such hosts apart."""
    for index, (host, key) in enumerate(hosts):
        for earlier, its_key in hosts[:index]:
            uuid = host.report.hardware_uuid
            if uuid and uuid == earlier.report.hardware_uuid:
                seen = f"it has the same hardware id as {earlier.name}: both names are one machine"
                fix = "remove one of them; for several ranks on one machine use `slots: N`"
            elif key and key == its_key:
                seen = f"it has the same SSH host key as {earlier.name}, maybe copied with its disk"
                fix = "make new host keys on one of them: sudo rm /etc/ssh/ssh_host_*; sudo ssh-keygen -A"
            else:
                continue
            yield Finding(
                host=host.name, check="identity", area=Area.REACH, level=Level.FAIL, evidence=seen, fix=fix
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "26.2" -> (26, 2)."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)
