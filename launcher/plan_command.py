"""`mlx-mesh plan`: what a model needs, where it fits and how fast it would be. Starts nothing, loads nothing.

Hosts come from a hostfile (they are asked what they have), from `--memory` and `--chip` (nobody is asked), or
are this machine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from mlx_mesh.launcher.config import (
    Flags,
    anchor_model,
    build_config,
    check_model_name,
    is_hub_id,
    read_hostfile,
)
from mlx_mesh.launcher.measured import read_measurements
from mlx_mesh.launcher.plan import (
    ask_footprint,
    capacity_of,
    inspect_flags,
    limit_advice,
    read_footprint,
)
from mlx_mesh.launcher.preflight import check_hosts, close_all
from mlx_mesh.launcher.remote import LocalHost, run
from mlx_mesh.launcher.text import table
from mlx_mesh.mesh.capacity import HostCapacity, PlacementRequest, mac_usable_bytes
from mlx_mesh.mesh.errors import PreflightError, SettingsError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.kv_options import check_kv_options, with_kv_options
from mlx_mesh.mesh.links import LINKS, Link
from mlx_mesh.mesh.measurements import Measurements, Rates, rates_of, rates_of_chip, slowest_link
from mlx_mesh.mesh.placement import format_bytes
from mlx_mesh.mesh.survey import Option, Survey, survey
from mlx_mesh.mesh.types import Backend, HostFacts, Sharding, VisionMode

FACTS_TIMEOUT_S = 60.0
MOST_NODES = 64
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What the command line asks."""

    model: str
    adapter: str | None = None  # folder
    vision: bool | None = None
    hostfile: str | None = None
    num_nodes: int | None = None
    memory: str = ""  # "64GB" or "128GB,64GB", as the machines are sold
    chip: str = ""
    link: str = ""
    context: str = "4096"
    num_sequences: int = 4
    kv_bits: int | None = None
    kv_group_size: int | None = None
    revision: str = ""
    is_offline: bool = False
    ssh_config: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    survey: Survey
    model: str
    link: str  # '' = unknown
    hosts: tuple[HostCapacity, ...]
    notes: tuple[str, ...]


def answer(question: PlanQuestion, environment: Mapping[str, str]) -> Answer:
    """Raises MeshError: a bad flag, an unreachable host, or a model that cannot be read."""
    model = _model_of(question)
    context = parse_tokens(question.context)
    if question.num_sequences < 1:
        raise SettingsError(f"--sequences {question.num_sequences} is out of range; it must be at least 1.")
    if question.link and question.link not in LINKS:
        raise SettingsError(f"--link {question.link} is not known; use one of {', '.join(LINKS)}.")
    kv_options = check_kv_options(question.kv_bits, question.kv_group_size, None)
    measurements = read_measurements(environment)
    if question.hostfile and not question.memory:
        for flag, given in (("--nodes", question.num_nodes), ("--chip", question.chip)):
            if given:
                raise SettingsError(
                    f"{flag} {given}: the hosts of {question.hostfile} are asked what they have. Leave it "
                    "out; or leave the hostfile out, or add --memory, to plan for hosts that are not asked."
                )
        footprint, hosts, notes, link = _ask_hosts(question, model, measurements, environment)
    else:
        footprint = _ask_here(question, model)
        hosts, notes, link = _imagine_hosts(question, measurements)
    if question.link:
        link = LINKS[question.link]
    request = PlacementRequest(context_tokens=context, num_sequences=question.num_sequences, link=link)
    footprint = with_kv_options(footprint, kv_options)
    found = survey(footprint, hosts, request)
    if link is None and len(hosts) > 1:
        notes = (
            *notes,
            "The link between the hosts is unknown, so nothing that crosses it is predicted: give --link, or "
            "measure it with `mlx-mesh bench --probe hosts.yaml`.",
        )
    return Answer(found, model, link.name if link else "", tuple(hosts), (*dict.fromkeys(notes),))


def parse_tokens(text: str) -> int:
    """'32k' is 32768, '4096' itself. Raises SettingsError."""
    match = re.fullmatch(r"(\d+)\s*([kKmM]?)", text.strip())
    if not match or int(match[1]) < 1:
        raise SettingsError(f"--context {text} is no number of tokens; write it like 32768 or 32k.")
    exponent = {"": 0, "k": 1, "m": 2}[match[2].lower()]
    return int(match[1]) * int(1024**exponent)


def parse_ram(text: str) -> list[int]:
    """Bytes of '64GB' or '128GB,64GB'. Memory is sold in powers of two, so GB means GiB here. Raises
    SettingsError."""
    sizes = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip())
        if not match or not match[2]:
            raise SettingsError(f"--memory {part.strip()!r} is no size; write it like 64GB, or 128GB,64GB.")
        sizes.append(int(float(match[1]) * 1024 ** _POWERS[match[2].upper()]))
        if sizes[-1] < 1024**3:
            raise SettingsError(f"--memory {part.strip()} is under 1 GB; no host has so little.")
    return sizes


# ---------------------------------------------------------------- where from


def _model_of(question: PlanQuestion) -> str:
    check_model_name(question.model)
    model = anchor_model(question.model, Path.cwd())
    if not question.revision:
        return model
    if not is_hub_id(model):
        raise SettingsError(f"--revision is for models on the hub; {model} is a folder.")
    return f"{model}@{question.revision}"


def _ask_hosts(
    question: PlanQuestion, model: str, measurements: Measurements, environment: Mapping[str, str]
) -> tuple[ModelFootprint, list[HostCapacity], tuple[str, ...], Link | None]:
    """What the hosts of the hostfile say, as `up` asks them."""
    assert question.hostfile is not None
    flags = Flags(
        model=model,
        adapter=question.adapter,
        vision=question.vision,
        ssh_config=question.ssh_config,
        is_offline=question.is_offline,
    )
    config = build_config(read_hostfile(question.hostfile), flags, {})
    preflight = check_hosts(config)
    try:
        ready = preflight.hosts
        facts = [host.facts for host in ready]
        notes = [
            f"{host.entry.name}: {note}"
            for host in ready
            if (note := rates_of(host.facts, measurements).note)
        ]
        notes += limit_advice(ready)
        footprint = read_footprint(ready[0], is_offline=question.is_offline, vision=config.vision)
        return (
            footprint,
            [capacity_of(host, measurements) for host in ready],
            (*preflight.warnings, *notes),
            slowest_link(facts, measurements, config.backend),
        )
    finally:
        close_all(preflight.hosts)


def _ask_here(question: PlanQuestion, model: str) -> ModelFootprint:
    adapter = str(Path(question.adapter).expanduser().absolute()) if question.adapter else ""
    vision = VisionMode.of(question.vision)
    flags = inspect_flags(adapter, is_offline=question.is_offline, vision=vision)
    return ask_footprint(LocalHost("this machine"), sys.executable, model, *flags)


def _imagine_hosts(
    question: PlanQuestion, measurements: Measurements
) -> tuple[list[HostCapacity], tuple[str, ...], Link | None]:
    """Hosts of which only memory and chip are given, or so many like this machine."""
    notes: list[str] = []
    if question.num_nodes is not None and not 1 <= question.num_nodes <= MOST_NODES:
        raise SettingsError(f"--nodes {question.num_nodes} is out of range; it is 1 to {MOST_NODES}.")
    entries = read_hostfile(question.hostfile).hosts if question.hostfile else ()
    facts: list[HostFacts] = []
    if question.memory:
        usable = [mac_usable_bytes(size) for size in parse_ram(question.memory)]
        count = question.num_nodes or len(entries) or len(usable)
        usable = _spread("--memory", usable, count)
        notes.append(
            "Usable memory is what macOS lets the GPU wire by default; `iogpu.wired_limit_mb` can raise it."
        )
        if not question.chip:
            notes.append("No chip is given, so no speed is predicted: add --chip, like --chip 'M4 Max'.")
    else:
        facts = [_facts_here()] * (question.num_nodes or 1)
        usable = [fact.usable_memory_bytes for fact in facts]
        count = len(usable)
        if question.num_nodes:
            notes.append(f"Hosts are taken to be like this machine ({facts[0].chip or 'unknown chip'}).")
    rates = [Rates()] * count
    if question.chip:
        chips = _spread("--chip", [part.strip() for part in question.chip.split(",")], count)
        rates = [rates_of_chip(chip) for chip in chips]
    elif facts:
        rates = [rates_of(fact, measurements) for fact in facts]
    notes += [rate.note for rate in rates if rate.note]
    names = [entry.name for entry in entries] or [f"host{index + 1}" for index in range(count)]
    if facts and count == 1:
        names = [facts[0].hostname]
    hosts = [
        HostCapacity(
            name=names[index] if index < len(names) else f"host{index + 1}",
            slots=entries[index].slots if index < len(entries) else 1,
            usable_memory_bytes=usable[index],
            layers=entries[index].layers if index < len(entries) else (),
            memory_limit_bytes=entries[index].memory_limit_bytes if index < len(entries) else 0,
            memory_rate=rates[index].memory_rate,
            matrix_rate=rates[index].matrix_rate,
        )
        for index in range(count)
    ]
    link = slowest_link(facts, measurements, Backend.AUTO) if len(facts) > 1 else None
    return hosts, tuple(notes), link


def _spread(flag: str, values: list[T], count: int) -> list[T]:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise SettingsError(
            f"{flag} names {len(values)} hosts, but there are {count}; give one, or one each."
        )
    return values


def _facts_here() -> HostFacts:
    """Without a model: its absence is told by the inspect child."""
    words = [sys.executable, "-I", "-u", "-m", "mlx_mesh.node.facts", "."]
    completed = run(LocalHost("this machine"), words, b"", FACTS_TIMEOUT_S)
    for line in reversed(completed.stdout):
        if line.startswith("{"):
            return msgspec.json.decode(line, type=HostFacts)
    raise PreflightError(
        f"This machine cannot tell what it has: {completed.last_words() or completed.exit}. Give --memory."
    )


# ---------------------------------------------------------------- what is printed


def as_json(found: Answer) -> str:
    """One object; field names as in the data types, with what is derived beside them."""
    data = msgspec.to_builtins(found.survey)
    for option, plain in zip(found.survey.options, data["options"], strict=True):
        plain["title"] = option.title
        for row, plain_row in zip(option.rows, plain["rows"], strict=True):
            plain_row["margin_bytes"] = row.margin_bytes
    data |= {
        "model": found.model,
        "link": found.link or None,
        "notes": [*found.survey.notes, *found.notes],
        "hosts": msgspec.to_builtins(found.hosts),
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=1).decode()


def lines(found: Answer) -> list[str]:
    """For people."""
    what = found.survey
    weights = format_bytes(what.weights_bytes) + (f", {what.quantization}" if what.quantization else "")
    out = [
        f"{found.model}: {what.model_type}, {what.num_layers} layers, weights {weights}",
        f"KV cache for {what.num_sequences} sequence{'s' if what.num_sequences > 1 else ''} of "
        f"{what.context_tokens} tokens: {format_bytes(what.kv_bytes)}",
        "",
    ]
    headers = ["hosts", "sharding", "largest share", "least free", "decode", "prefill", ""]
    out += [f"  {line}" for line in table(headers, [_row(option) for option in what.options])]
    out += ["", f"Recommended: {what.recommendation}."]
    if what.recommended >= 0:
        out += [f"  {line}" for line in rank_table(what.options[what.recommended])]
    notes = [*what.notes, *found.notes]
    return [*out, "", *notes] if notes else out


def rank_table(option: Option) -> list[str]:
    headers = ["rank", "host", "part", "weights", "KV", "working", "limit", "free"]
    cells = [
        [
            str(row.rank),
            row.host,
            row.part,
            *map(format_bytes, (row.weights_bytes, row.kv_bytes, row.working_bytes, row.limit_bytes)),
            format_bytes(row.margin_bytes),
        ]
        for row in option.rows
    ]
    return table(headers, cells)


def _row(option: Option) -> list[str]:
    names = option.hosts[0] if len(option.hosts) == 1 else str(len(option.hosts))
    if option.num_ranks > len(option.hosts):
        names += f" ({option.num_ranks} ranks)"
    sharding = "-" if option.sharding is Sharding.NONE else str(option.sharding)
    if not option.is_possible:
        return [names, sharding, "-", "-", "-", "-", _short(option.reason)]
    decode, prefill = option.decode_tokens_per_s, option.prefill_tokens_per_s
    return [
        names,
        sharding,
        format_bytes(max(row.weights_bytes + row.kv_bytes + row.working_bytes for row in option.rows)),
        format_bytes(option.least_margin_bytes),
        f"{decode:.1f} tok/s" if decode else "-",
        f"{prefill:.0f} tok/s" if prefill else "-",
        "fits",
    ]


def _short(reason: str) -> str:
    """The line of a refusal that has the number."""
    told = reason.splitlines()
    short = [line for line in told if "missing" in line]
    text = short[0] if short else told[0]
    return f"no: {text}"


def problems(found: Answer) -> Sequence[str]:
    """Why nothing is possible; () when something is."""
    return () if found.survey.recommended >= 0 else (found.survey.recommendation,)
