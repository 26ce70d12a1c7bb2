"""Measure a lazily built model: bytes per layer, KV cache, legal cuts and divisible units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint, TensorFootprint
from mlx_mesh.mesh.tensor_units import DividedBytes, Segment, size_of
from mlx_mesh.node.engine.certificate import certify
from mlx_mesh.node.engine.dependencies import TAIL
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.probe import divisible_units, why_undivided
from mlx_mesh.node.engine.quantised_kv import why_not_quantised
from mlx_mesh.node.engine.rules import Proposal, State, Unit, base_of, module_at
from mlx_mesh.node.engine.tensor import bytes_of_unit
from mlx_mesh.node.engine.trace import CacheSize, ModelTrace, TraceError, trace_model
from mlx_mesh.node.engine.vision_model import tower_arrays
from mlx_mesh.node.engine.vocabulary import gives_logits, is_looked_up
from mlx_mesh.node.vision import media_kinds, why_alone, why_untried, why_whole

_GROWN_TO = (512, 1024)  # tokens; caches grow in steps of 256
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "seq_length")


def measure_certified(lazy: LazyModel, model_digest: str) -> ModelFootprint:
    """The footprint of a model with only those cuts and units that are proven to change nothing."""
    trace, untraced = _trace(lazy)
    certificate = certify(lazy, trace)
    footprint = _measure(lazy, model_digest, trace, untraced, certificate.proposal)
    if not certificate.bad_cuts:
        return footprint
    reason = f"no cut before layer {_spans(list(certificate.bad_cuts))}: tried, it changes the logits"
    return msgspec.structs.replace(
        footprint,
        legal_cuts=tuple(cut for cut in footprint.legal_cuts if cut not in certificate.bad_cuts),
        cut_reason="; ".join(text for text in (footprint.cut_reason, reason) if text),
    )


def measure(lazy: LazyModel, model_digest: str) -> ModelFootprint:
    """The footprint of a model by the trace and the tried units alone. One that cannot be traced has no legal
    cut, and the reason says why."""
    trace, untraced = _trace(lazy)
    return _measure(lazy, model_digest, trace, untraced, divisible_units(lazy, trace))


def _trace(lazy: LazyModel) -> tuple[ModelTrace | None, str]:
    try:
        return trace_model(lazy.model), ""
    except TraceError as error:
        return None, str(error)


def _measure(
    lazy: LazyModel, model_digest: str, trace: ModelTrace | None, untraced: str, proposal: Proposal
) -> ModelFootprint:
    layers = lazy.layers
    sizes = _Sizes()
    layer_bytes = [sizes.take(array for _, array in tree_flatten(layer.parameters())) for layer in layers]
    outside = dict(tree_flatten(lazy.model.parameters()))
    if trace is None:
        embedding, tied = sizes.take(outside.values()), False
        head = every_stage = 0
        caches, problem = _grown_caches(lazy)
        cuts: tuple[int, ...] = ()
        kv_refusal = untraced
        reason, hidden, vocabulary = f"{untraced}{problem}", 0, 0
    else:
        calls = range(len(trace.calls))
        early = set().union(*(trace.parameters[call] for call in calls))
        every_stage = _bytes(outside, set().union(*(trace.parameters[call] for call in calls if call)))
        tied = bool(early & trace.parameters[TAIL])
        embedding = sizes.take(outside[path] for path in early)
        head = sizes.take(outside[path] for path in trace.parameters[TAIL])
        caches = trace.caches
        cuts, reason = _cuts(trace)
        kv_refusal = why_not_quantised(lazy.model, trace)
        hidden = max(
            (
                sum(trace.shapes[ref].nbytes(1, 1) for ref in trace.crossing(position))
                for cut in cuts
                for position in trace.positions_of_cut(cut)
            ),
            default=0,
        )
        vocabulary = trace.logits_shape[-1] if trace.logits_shape else 0
    kinds, refusals = media_kinds(lazy.config) if lazy.whole is not None else ((), {})
    return ModelFootprint(
        model_type=str(lazy.config["model_type"]),
        model_digest=model_digest,
        num_layers=len(layers),
        layers=tuple(
            LayerFootprint(
                weights_bytes=weights,
                kv_bytes_per_token=cache.bytes_per_token,
                fixed_state_bytes=cache.fixed_bytes,
                kv_window=cache.window,
                kv_group_size=cache.group_size,
                kv_itemsize=cache.itemsize,
                **_whole_state(cache, [unit.state for unit in proposal.units if unit.layer == index]),
            )
            for index, (weights, cache) in enumerate(zip(layer_bytes, caches, strict=True))
        ),
        embedding_bytes=embedding,
        head_bytes=head,
        tied_embedding=tied,
        every_stage_bytes=every_stage,
        legal_cuts=cuts,
        cut_reason=reason,
        hidden_bytes_per_token=hidden,
        context_length=_context_length(lazy.config),
        vocab_size=vocabulary,
        tensor=_tensor(lazy, trace, proposal, sum(layer_bytes) + embedding + head, head),
        kv_refusal=kv_refusal,
        media=kinds,
        media_refusals=refusals,
        tower_bytes=_tower_bytes(lazy),
        alone_reason="" if lazy.whole is None else why_alone(lazy.config),
        whole_reason="" if lazy.whole is None else why_whole(lazy.config),
        untried_reason="" if lazy.whole is None else why_untried(lazy.config),
    )


def _tower_bytes(lazy: LazyModel) -> int:
    return 0 if lazy.whole is None else sum(int(array.nbytes) for array in tower_arrays(lazy.whole))


def _grown_caches(lazy: LazyModel) -> tuple[tuple[CacheSize, ...], str]:
    """Of a model whose layers cannot be watched: by how much its caches grow between two lengths, laid over
    the layers in order. Nothing is evaluated. Second: why there is no answer, '' when there is."""
    sizes = []
    try:
        for length in _GROWN_TO:
            caches = make_prompt_cache(lazy.model)
            for step in (length - 1, 1):  # a window drops what it does not keep at the step after a prefill
                lazy.model(mx.zeros((1, step), dtype=mx.uint32), cache=caches)
            sizes.append([int(cache.nbytes) for cache in caches])
    except Exception as error:  # whatever a model's own code raises
        unknown = (CacheSize(0, 0, 0),) * len(lazy.layers)
        return unknown, f"; and the size of its cache is unknown ({type(error).__name__}: {error})"
    found = [[0, 0] for _ in lazy.layers]
    for index, (small, large) in enumerate(zip(*sizes, strict=True)):
        per_token = (large - small) // (_GROWN_TO[1] - _GROWN_TO[0])
        found[index % len(found)][0] += per_token
        found[index % len(found)][1] += small - per_token * _GROWN_TO[0]
    return tuple(CacheSize(per_token, fixed, 0) for per_token, fixed in found), ""


class _Sizes:
    """Counts each array once, however many modules share it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def take(self, arrays: Iterable[Any]) -> int:
        total = 0
        for array in arrays:
            if id(array) not in self._seen:
                self._seen.add(id(array))
                total += int(array.nbytes)
        return total


def _bytes(arrays: dict[str, Any], paths: set[str]) -> int:
    return sum(int(arrays[path].nbytes) for path in paths)


def _cuts(trace: ModelTrace) -> tuple[tuple[int, ...], str]:
    """The legal cuts, and one sentence on the others."""
    reasons = {cut: trace.why_not(cut) for cut in range(1, trace.num_layers)}
    legal = tuple(cut for cut, reason in reasons.items() if not reason)
    forbidden: dict[str, list[int]] = {}
    for cut, reason in reasons.items():
        if reason:
            forbidden.setdefault(reason, []).append(cut)
    texts = [f"no cut before layer {_spans(cuts)}: {reason}" for reason, cuts in forbidden.items()]
    return legal, "; ".join(texts)


def _spans(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _context_length(config: dict[str, Any]) -> int:
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            value = part.get(key) if isinstance(part, dict) else None
            if isinstance(value, int) and value > 0:
                return value
    return 0


def _tensor(
    lazy: LazyModel, trace: ModelTrace | None, proposal: Proposal, all_bytes: int, head_bytes: int
) -> TensorFootprint:
    """The most ranks are those of the layer that divides least, so that every layer is divided that far."""
    divided = []
    sums = {"attention": 0, "mlp": 0}
    most: dict[str, int] = {}
    kv_groups, kv, fixed = [], [], []
    for unit in proposal.units:
        kind = "attention" if unit.kind == "attention" else "mlp"
        for part in _parts(lazy.layers[unit.layer], unit):
            divided.append(part)
            sums[kind] += part.total
        ranks = max(len(unit.division.edges), len(unit.division.fine_edges)) - 1
        most[kind] = min(most.get(kind, ranks), ranks)
        if unit.state.kv > unit.state.whole_kv or unit.state.fixed > unit.state.whole_fixed:
            kv_groups.append(unit.num_units)
            in_layer = [other.state for other in proposal.units if other.layer == unit.layer]
            cache = trace.caches[unit.layer] if trace else CacheSize(0, 0, 0)
            itemsize = cache.itemsize if cache.group_size else 0
            kv += [
                msgspec.structs.replace(part, kv_itemsize=itemsize)
                for part in _divided_state(unit, cache.bytes_per_token, in_layer)
            ]
            fixed += _divided_state(unit, cache.fixed_bytes, in_layer, is_fixed=True)
    vocabulary = [part for unit in proposal.vocabulary for part in _parts(lazy.model, unit)]
    heads = [unit for unit in proposal.vocabulary if trace and gives_logits(unit, trace)]
    in_vocabulary = sum(part.total for part in vocabulary)
    leader = 0 if heads or trace is None else head_bytes
    return TensorFootprint(
        attention_units=most.get("attention", 0),
        attention_bytes=sums["attention"],
        mlp_units=most.get("mlp", 0),
        mlp_bytes=sums["mlp"],
        replicated_bytes=all_bytes - sums["attention"] - sums["mlp"] - in_vocabulary - leader,
        reason="" if most else why_undivided(proposal),
        replicated_parts=_short(proposal.refusals),
        divided=_counted([*divided, *vocabulary]),
        kv_groups=min(kv_groups, default=0),
        kv_divided=_counted(kv),
        state_divided=_counted(fixed),
        sums_per_token=sum(unit.num_collectives for unit in proposal.units),
        leader_bytes=leader,
        vocabulary_bytes=in_vocabulary,
        vocabulary_read_bytes=sum(part.total for unit in heads for part in _parts(lazy.model, unit)),
        num_lookups=sum(is_looked_up(unit, trace) for unit in proposal.vocabulary) if trace else 0,
        logits_bytes=sum(_logits_bytes(lazy.model, unit) for unit in heads),
        tower_bytes=_tower_bytes(lazy),
    )


def _counted(parts: Iterable[DividedBytes]) -> tuple[DividedBytes, ...]:
    """Equal ones once, with their number."""
    counts = Counter(parts)
    return tuple(msgspec.structs.replace(part, times=times) for part, times in counts.items())


def _divided_state(
    unit: Unit, layer_bytes: int, states: list[State], is_fixed: bool = False
) -> list[DividedBytes]:
    """What a unit divides of its layer's caches: keys and values of one token by KV heads, or fixed states of
    one sequence by heads. `states`: of all units of the layer."""
    state = unit.state
    own = state.fixed - state.whole_fixed if is_fixed else state.kv - state.whole_kv
    if not own:
        return []
    mine = layer_bytes * own // sum(other.fixed if is_fixed else other.kv for other in states)
    layout = (Segment(unit.num_heads, 1),) if is_fixed else unit.kv_heads
    return [DividedBytes(unit.division, layout, -(-mine // size_of(layout)))]


def _whole_state(cache: CacheSize, states: list[State]) -> dict[str, int]:
    """What every tensor rank keeps of a layer's cache: what its units do not divide."""
    kv, fixed = sum(state.kv for state in states), sum(state.fixed for state in states)
    whole_kv = sum(state.whole_kv for state in states)
    whole_fixed = sum(state.whole_fixed for state in states)
    return {
        "whole_kv_bytes_per_token": _part(cache.bytes_per_token, whole_kv, kv),
        "whole_state_bytes": _part(cache.fixed_bytes, whole_fixed, fixed),
    }


def _part(size: int, whole: int, measured: int) -> int:
    return -(-size * whole // measured) if measured else size


def _parts(root: Any, unit: Unit) -> list[DividedBytes]:
    return bytes_of_unit(module_at(root, unit.path), unit)


def _logits_bytes(model: Any, unit: Unit) -> int:
    """Of one token; logits have the type of the head's numbers."""
    head = base_of(module_at(model, unit.path))
    numbers = head.get("scales", head["weight"])
    itemsize = numbers.dtype.size if mx.issubdtype(numbers.dtype, mx.floating) else 2
    return int(head["weight"].shape[0] * itemsize)


def _short(refusals: list[str]) -> tuple[str, ...]:
    """One entry per kind of part: the first layer's, with how many layers have the same."""
    by_text: dict[str, int] = {}
    for refusal in refusals:
        _, _, rest = refusal.split(".", 2)
        by_text[rest] = by_text.get(rest, 0) + 1
    return tuple(f"{text} (in {count} layers)" for text, count in by_text.items())
