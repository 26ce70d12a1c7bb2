"""What `up` does between the check of the hosts and the start of anything: find the model, plan, and bring it
to the hosts that lack it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.delivery import Brought, Delivery
from mlx_mesh.launcher.link_notes import link_notes
from mlx_mesh.launcher.plan import make_plans
from mlx_mesh.launcher.preflight import ReadyHost
from mlx_mesh.launcher.status import KEPT_PLAN
from mlx_mesh.mesh.delivery import gigabytes, size_of
from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.mesh.types import Placement


@dataclass(frozen=True, slots=True)
class Ready:
    """Hosts that have what the plan of each replica needs. `planned`: set when some have no more."""

    hosts: tuple[ReadyHost, ...]
    planned: tuple[Placement, ...] = ()


def lacks_something(config: LaunchConfig, hosts: Sequence[ReadyHost]) -> bool:
    """Whether a host may have to be brought something: it has no model, another one, or what was brought to
    it, which may be a part, or from before the model was trained on."""
    digests = {host.facts.model_digest for host in hosts}
    return len({host.machine for host in hosts}) > 1 and (
        "" in digests
        or len(digests) > 1
        or any(host.facts.is_delivered or host.facts.model_part for host in hosts)
    )


def plan_and_bring(
    config: LaunchConfig, hosts: Sequence[ReadyHost], console: Console, *, is_dry: bool = False
) -> Ready:
    """The plan, told aloud, and the model on every host. `is_dry`: says what would be brought, and brings
    nothing. Raises MeshError."""
    if not lacks_something(config, hosts):
        show_plans(config, hosts, console)
        return Ready(tuple(hosts))
    delivery = Delivery(config, hosts, console)
    delivery.look()
    if not delivery.find(may_fetch=not is_dry and config.brings_model):
        if not config.brings_model:
            raise PreflightError(_never(["no host has the model"]))
        show_plans(config, hosts, console)
        console.say(f"{hosts[0].entry.name} would fetch {config.model} from the hub, once for all hosts.")
        return Ready(tuple(hosts))
    placements = show_plans(config, hosts, console, delivery.source)
    missing = delivery.missing(delivery.needs(placements))
    lacking = {name: size_of(spans) for name, spans in missing.items() if size_of(spans)}
    told = [f"{name}: lacks {gigabytes(num)} of {config.model}" for name, num in lacking.items()]
    if lacking and not config.brings_model:
        raise PreflightError(_never(told))
    if is_dry:
        for line in told:
            console.say(f"  {line}; it would be brought from {delivery.reference}")
        return Ready(tuple(hosts))
    if lacking:
        console.say(f"Bringing the model to {', '.join(lacking)} (--sync never forbids it):")
        tell_brought(delivery.bring(placements), console)
    brought = tuple(with_model(host, delivery) for host in hosts)
    parts = [f"{host.entry.name} ({host.facts.model_part})" for host in brought if host.facts.model_part]
    is_partial = bool(parts)
    if parts:
        console.say(f"Parts of the model only on {', '.join(parts)}: {KEPT_PLAN}.")
    return Ready(brought, placements if is_partial else ())


def with_model(host: ReadyHost, delivery: Delivery) -> ReadyHost:
    """The host with what a delivery brought it."""
    holding = delivery.holdings[host.machine]
    if not holding.is_delivered:
        return host
    total = sum(file.size for file in delivery.holdings[delivery.reference].files)
    part = f"{gigabytes(size_of(holding.held))} of {gigabytes(total)}" if holding.state == "part" else ""
    facts = msgspec.structs.replace(
        host.facts, model_digest=holding.digest, model_error="", model_part=part, is_delivered=True
    )
    return replace(host, model=holding.folder, facts=facts)


def tell_brought(brought: Sequence[Brought], console: Console) -> None:
    for each in brought:
        if each.received:
            console.say(
                f"  {each.host}: received {gigabytes(each.received)} for the {gigabytes(each.missing)} that "
                f"it lacked, in {each.seconds:.1f} s, {each.words} -> {each.folder}"
            )


def show_plans(
    config: LaunchConfig, hosts: Sequence[ReadyHost], console: Console, source: ReadyHost | None = None
) -> tuple[Placement, ...]:
    """One for each replica."""
    what = f"{config.model} with adapter {config.adapter}" if config.adapter else config.model
    plans = make_plans(config, hosts, source)
    for replica, plan in enumerate(plans):
        named = (
            f"{what} (replica {replica + 1} of {config.num_replicas})" if config.num_replicas > 1 else what
        )
        console.plan(plan.placement, plan.rows, named, str(config.backend))
        members = [host for host in hosts if host.entry.replica == replica]
        for note in (*plan.notes, *link_notes(config, members)):
            console.say(f"  {note}")
    return tuple(plan.placement for plan in plans)


def _never(lines: Sequence[str]) -> str:
    """What is missing where nothing may be brought."""
    fix = "`mlx-mesh sync MODEL hosts.yaml` brings it, as `up` does without --sync never"
    return "\n".join(f"{line}; {fix}" for line in lines)
