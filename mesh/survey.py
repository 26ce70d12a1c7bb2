"""All ways to place a model on the first one, two, ... of the given hosts, and which one to take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlx_mesh.mesh.capacity import HostCapacity, PlacementRequest, ranks_of
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import WORTH_DIVIDING, ModelFootprint
from mlx_mesh.mesh.memory import ModelMemory, format_bytes
from mlx_mesh.mesh.placement import PlanRow, can_place, plan_placement, plan_rows, predict
from mlx_mesh.mesh.types import STILLS, Sharding

MOST_HOSTS = 32
"""So many hosts like the last one are tried to say how many would do."""

WORTH_NAMING = 1.1
"""A faster way than the recommended one is named from this factor on."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way. `reason` says why it is impossible, or why this split; rates are 0 when unknown."""

    hosts: tuple[str, ...]
    num_ranks: int
    sharding: Sharding
    is_possible: bool
    reason: str
    rows: tuple[PlanRow, ...] = ()
    decode_tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    exchange_ms: float = 0.0  # of a decoded token

    @property
    def least_margin_bytes(self) -> int:
        return min((row.margin_bytes for row in self.rows), default=0)

    @property
    def title(self) -> str:
        if len(self.hosts) == 1 and self.num_ranks == 1:
            return f"{self.hosts[0]} alone"
        return f"{self.sharding} over {', '.join(self.hosts)}"


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What `mlx-mesh plan` prints. `recommended` is an index of `options`, -1 = nothing is possible."""

    model_type: str
    num_layers: int
    weights_bytes: int
    quantization: str
    kv_bytes: int
    context_tokens: int
    num_sequences: int
    options: tuple[Option, ...]
    recommended: int
    recommendation: str
    notes: tuple[str, ...] = ()


def survey(footprint: ModelFootprint, hosts: Sequence[HostCapacity], request: PlacementRequest) -> Survey:
    """Every possibility with its numbers. Raises PlacementError only for hosts that are none."""
    ranks_of(hosts)
    options = [_alone(footprint, host, request) for host in _kinds(hosts)]
    for count in range(1, len(hosts) + 1):
        chosen = hosts[:count]
        if len(ranks_of(chosen)) > 1:
            options += [
                _option(footprint, chosen, request, sharding)
                for sharding in (Sharding.PIPELINE, Sharding.TENSOR)
            ]
    index, text = _recommend(footprint, hosts, request, options)
    context = request.context_for(footprint)
    memory = ModelMemory.of(footprint, context, request.num_sequences)
    return Survey(
        model_type=footprint.model_type,
        num_layers=footprint.num_layers,
        weights_bytes=footprint.weights_bytes,
        quantization=footprint.quantization,
        kv_bytes=memory.kv_before[-1],
        context_tokens=context,
        num_sequences=request.num_sequences,
        options=tuple(options),
        recommended=index,
        recommendation=text,
        notes=_notes(footprint, request),
    )


def hosts_that_hold_all(
    footprint: ModelFootprint, hosts: Sequence[HostCapacity], request: PlacementRequest
) -> list[str]:
    """Names of the hosts on which the whole model fits as one rank."""
    return [host.name for host in hosts if _alone(footprint, host, request).is_possible]


def _kinds(hosts: Sequence[HostCapacity]) -> list[HostCapacity]:
    """One host of each kind: equal ones would make equal rows."""
    kinds: dict[tuple[int, int, int, int], HostCapacity] = {}
    for host in hosts:
        memory = min(host.memory_limit_bytes or host.usable_memory_bytes, host.usable_memory_bytes)
        kinds.setdefault((memory, host.memory_rate, host.matrix_rate, 0), host)
    return list(kinds.values())


def _alone(footprint: ModelFootprint, host: HostCapacity, request: PlacementRequest) -> Option:
    whole = msgspec.structs.replace(host, slots=1, layers=())
    return _option(footprint, [whole], request, Sharding.NONE)


def _option(
    footprint: ModelFootprint, hosts: Sequence[HostCapacity], request: PlacementRequest, sharding: Sharding
) -> Option:
    asked = msgspec.structs.replace(
        request, sharding=Sharding.AUTO if sharding is Sharding.NONE else sharding
    )
    names, num_ranks = tuple(host.name for host in hosts), len(ranks_of(hosts))
    try:
        placement = plan_placement(footprint, hosts, asked)
    except PlacementError as error:
        return Option(
            hosts=names, num_ranks=num_ranks, sharding=sharding, is_possible=False, reason=str(error)
        )
    predicted = predict(placement, footprint, hosts, asked)
    return Option(
        hosts=names,
        num_ranks=num_ranks,
        sharding=sharding,
        is_possible=True,
        reason="; ".join(placement.reasons),
        rows=plan_rows(placement, footprint, asked),
        decode_tokens_per_s=predicted.decode_tokens_per_s if predicted else 0.0,
        prefill_tokens_per_s=predicted.prefill_tokens_per_s if predicted else 0.0,
        exchange_ms=predicted.exchange_ns / 1e6 if predicted else 0.0,
    )


# ---------------------------------------------------------------- which one


def _recommend(
    footprint: ModelFootprint,
    hosts: Sequence[HostCapacity],
    request: PlacementRequest,
    options: Sequence[Option],
) -> tuple[int, str]:
    possible = [index for index, option in enumerate(options) if option.is_possible]
    if not possible:
        return -1, _nothing_fits(footprint, hosts, request, options)
    fastest = max(possible, key=lambda index: options[index].decode_tokens_per_s)
    single = [index for index in possible if options[index].sharding is Sharding.NONE]
    if single:
        best = max(single, key=lambda index: (options[index].decode_tokens_per_s, -index))
        text = f"it fits on one host: use {options[best].hosts[0]} alone"
        if options[fastest].decode_tokens_per_s > WORTH_NAMING * options[best].decode_tokens_per_s > 0:
            factor = options[fastest].decode_tokens_per_s / options[best].decode_tokens_per_s
            text += f" ({options[fastest].title} is predicted to be {factor:.1f} times as fast)"
        return best, text
    if options[fastest].decode_tokens_per_s:
        index, why = _as_auto_does(footprint, hosts, request, options, possible)
        return index, f"{options[index].title}: the fastest that fits{why}"
    fewest = min(options[index].num_ranks for index in possible)
    here = [index for index in possible if options[index].num_ranks == fewest]
    best = next((index for index in here if options[index].sharding is Sharding.PIPELINE), here[0])
    return best, (
        f"{options[best].title}: the fewest hosts that hold it. Chip or link are unknown, so no speed is "
        "predicted and the sharding is the one that sends least"
    )


def _as_auto_does(
    footprint: ModelFootprint,
    hosts: Sequence[HostCapacity],
    request: PlacementRequest,
    options: Sequence[Option],
    possible: Sequence[int],
) -> tuple[int, str]:
    """The fastest of those that sharding auto would choose on their hosts, and its reason."""
    by_name = {host.name: host for host in hosts}
    auto = msgspec.structs.replace(request, sharding=Sharding.AUTO)
    chosen: dict[int, str] = {}
    for index in possible:
        option = options[index]
        placement = plan_placement(footprint, [by_name[name] for name in option.hosts], auto)
        if placement.sharding is option.sharding:
            chosen[index] = f" ({placement.reasons[0]})" if placement.reasons else ""
    best = max(chosen or possible, key=lambda index: (options[index].decode_tokens_per_s, -index))
    return best, chosen.get(best, "")


def _nothing_fits(
    footprint: ModelFootprint,
    hosts: Sequence[HostCapacity],
    request: PlacementRequest,
    options: Sequence[Option],
) -> str:
    more = [
        msgspec.structs.replace(hosts[-1], name=f"{hosts[-1].name}+{number}", layers=())
        for number in range(1, MOST_HOSTS)
    ]
    plain = [msgspec.structs.replace(host, layers=()) for host in hosts]
    for count in range(1, len(more) + 1):
        if len(plain) + count > MOST_HOSTS:
            break
        if not can_place(footprint, [*plain, *more[:count]], request):
            continue
        kind = format_bytes(hosts[-1].rank_memory_bytes * hosts[-1].slots)
        return (
            f"nothing fits. {count} more host{'s' if count > 1 else ''} with {kind} of usable memory like "
            f"{hosts[-1].name} would do. {_last(options)}"
        )
    return f"nothing fits, and more hosts like {hosts[-1].name} do not help. {_last(options)}"


def _last(options: Sequence[Option]) -> str:
    """What the option with most ranks lacks."""
    most = max(options, key=lambda option: (option.num_ranks, option.sharding is Sharding.PIPELINE))
    return f"{most.title}: {' '.join(most.reason.splitlines())}".rstrip(".")


def _notes(footprint: ModelFootprint, request: PlacementRequest) -> tuple[str, ...]:
    notes = []
    if footprint.cut_reason:
        notes.append(f"Cuts: {footprint.cut_reason}.")
    if footprint.tensor.replicated_parts and not footprint.tensor.reason:
        parts = ", ".join(footprint.tensor.replicated_parts[:4])
        notes.append(
            f"By tensor, {format_bytes(footprint.tensor.replicated_bytes)} stay whole on every rank: {parts}."
        )
    if not footprint.tensor.reason and footprint.tensor.divided:
        notes.append(_vocabulary_note(footprint))
    if footprint.media:
        kinds = " and ".join("frames of videos" if kind == STILLS else kind for kind in footprint.media)
        notes.append(f"Takes {kinds}: the towers ({format_bytes(footprint.tower_bytes)}) are on rank 0.")
    elif why := footprint.media_refusals.get("image"):
        notes.append(f"Takes text only: {why}.")
    if footprint.alone_reason:
        notes.append(f"Serves one sequence at a time: {footprint.alone_reason}.")
    if footprint.whole_reason:
        notes.append(f"Reads each prompt in one piece: {footprint.whole_reason}.")
    if footprint.untried_reason:
        notes.append(f"Untried: {footprint.untried_reason}.")
    if request.context_tokens > request.context_for(footprint):
        notes.append(
            f"The model's own context is {footprint.context_length} tokens, so no more than that is planned."
        )
    if request.link is not None and request.link.caveat and not request.link.is_measured:
        notes.append(f"Link {request.link.name}: {request.link.caveat}.")
    return tuple(notes)


def _vocabulary_note(footprint: ModelFootprint) -> str:
    """Whether embedding and output head are divided by tensor, and by which rule."""
    divided = footprint.tensor.vocabulary_bytes
    whole = footprint.weights_bytes
    rule = f"from {100 // WORTH_DIVIDING} % of the model on"
    if not divided:
        return (
            f"By tensor, embedding and output head stay whole: they are divided by vocabulary {rule}, where "
            "a small model shows the same logits."
        )
    return (
        f"By tensor, {format_bytes(divided)} of embedding and output head ({100 * divided / whole:.1f} % of "
        f"the model) are divided by vocabulary, {rule}; the leader gathers "
        f"{footprint.tensor.logits_bytes / 1e6:.1f} MB of logits a token."
    )
