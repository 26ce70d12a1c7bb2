"""Prove once per kind of model how it may be divided, and keep the verdict on disk.

The rules' units are tried one by one with the model's real head counts and inner sizes (`probe`). Then a
small random model of the same config - the same pattern of layers, heads, KV groups and experts, but
narrow - runs whole, as a pipeline cut wherever the trace allows, and over two tensor ranks, even and not. A
tensor difference makes every layer be cut linear by linear; if that differs too, nothing is divided. A
pipeline difference drops the cuts that show it. All of it is deterministic, so every host reaches the same
verdict. Of a vision model it is the language part, and it reads a picture beside text (`small_vision`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import msgspec
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.types import Placement, Shard, Sharding
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.probe import divisible_units
from mlx_mesh.node.engine.rehearsal import Rehearsal
from mlx_mesh.node.engine.row_media import reads_alone
from mlx_mesh.node.engine.rules import Proposal, Unit, gathered
from mlx_mesh.node.engine.small import small_configs
from mlx_mesh.node.engine.small_vision import build_small, forward_rows, made_up
from mlx_mesh.node.engine.trace import ModelTrace, TraceError, trace_model
from mlx_mesh.node.engine.vocabulary import vocabulary_units
from mlx_mesh.node.hub import cache_root

_TENSOR_TOLERANCE = 1e-2  # float32 noise can grow in a random model; a wrong division is off by much more
_TENSOR_WEIGHTS = ((1, 1), (1, 2))
_MOST_PARAMETERS = 30_000_000
_SOURCES = (
    "certificate",
    "features",
    "language_part",
    "probe",
    "rehearsal",
    "row_media",
    "rules",
    "rules_mixers",
    "rules_mlp",
    "small",
    "small_vision",
    "sums",
    "tensor",
    "trace",
    "vocabulary",
)


@dataclass(frozen=True, slots=True)
class Certificate:
    """How a model may be divided. `bad_cuts` are legal by the trace and differ in numbers. `note` says what
    was not as expected, or that the small model could not be made; '' = proven."""

    units: tuple[Unit, ...] = ()
    refusals: tuple[str, ...] = ()
    bad_cuts: tuple[int, ...] = ()
    note: str = ""
    vocabulary: tuple[Unit, ...] = ()

    @property
    def proposal(self) -> Proposal:
        return Proposal(list(self.units), list(self.refusals), list(self.vocabulary))


def certify(lazy: LazyModel, trace: ModelTrace | None, cache_folder: Path | None = None) -> Certificate:
    """The certificate of a model, from the cache if it is there. `trace` is None if it cannot be traced."""
    file = (cache_folder or cache_root() / "certificates") / f"{_key(lazy)}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Certificate)
    except (OSError, msgspec.MsgspecError):
        pass  # none yet, or of another format: make it again
    certificate = _certify(lazy, trace)
    _store(file, msgspec.json.encode(certificate))
    return certificate


def _key(lazy: LazyModel) -> str:
    """Changes with the config, the parameters' forms (adapters, quantisation), mlx-lm, and our own rules."""
    digest = hashlib.sha256(json.dumps(lazy.config, sort_keys=True, default=str).encode())
    digest.update(mlx_lm.__version__.encode())
    if reads_alone(lazy.model):
        digest.update(metadata.version("mlx-vlm").encode())
    for name in _SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    for path, array in tree_flatten(lazy.model.parameters()):
        digest.update(f"{path}{array.shape}{array.dtype}".encode())
    return digest.hexdigest()[:32]


def _store(file: Path, content: bytes) -> None:
    """Whole or not at all: several ranks may write at once. A cache that cannot be written is none."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(content)
        Path(part.name).replace(file)
    except OSError:
        return


def _certify(lazy: LazyModel, trace: ModelTrace | None) -> Certificate:
    proposal = divisible_units(lazy, trace)
    small = _small_model(lazy)
    if small is None:
        note = "no small model of this config can be made: its parts were tried one by one, never together"
        return Certificate(tuple(proposal.units), tuple(proposal.refusals), (), note)
    reference = small.reference
    bad_cuts, notes = _bad_cuts(small, reference, trace)
    if small.note:
        notes.append(small.note)
    units, refusals = tuple(proposal.units), list(proposal.refusals)
    small_lazy = small()
    own = divisible_units(small_lazy, small.trace)
    own.vocabulary = vocabulary_units(small_lazy, small.trace, [unit.path for unit in proposal.vocabulary])
    gap = _tensor_gap(small, own, reference) if own.units else 0.0
    if gap > _TENSOR_TOLERANCE and own.vocabulary:
        own.vocabulary, proposal.vocabulary = [], []
        notes.append(f"divided by vocabulary the whole model differs by {gap:.1g}")
        gap = _tensor_gap(small, own, reference)
    if gap > _TENSOR_TOLERANCE:
        notes.append(f"divided by heads and columns the whole model differs by {gap:.1g}")
        by_linear = Proposal(_gathered_only(small_lazy))
        if _tensor_gap(small, by_linear, reference) > _TENSOR_TOLERANCE:
            units = ()
            refusals.append("layers.0.all: the whole model differs when it is divided")
        else:
            units = tuple(_gathered_only(lazy))
            refusals.append("layers.0.mixers: the whole model differs when they are divided by heads")
    return Certificate(units, tuple(refusals), bad_cuts, "; ".join(notes), tuple(proposal.vocabulary))


def _gathered_only(lazy: LazyModel) -> list[Unit]:
    return [unit for index, layer in enumerate(lazy.layers) for unit in gathered(index, layer, [])]


@dataclass(frozen=True, slots=True)
class _Small:
    """A small random model: called, it makes one, the same at each call. `reference` are its logits."""

    build: Callable[[], LazyModel]
    trace: ModelTrace | None
    forward: Callable[[Any], list[Any]]
    reference: list[Any]
    note: str = ""

    def __call__(self) -> LazyModel:
        return self.build()


def _small_model(lazy: LazyModel) -> _Small | None:
    """None when no narrowing of the config works."""
    for config in small_configs(lazy.config):
        try:
            weights = _weights(_build(lazy, config, None))
            build = functools.partial(_build, lazy, config, weights)
            if not reads_alone(lazy.model):
                return _Small(build, _trace_or_none(build()), _forward, _forward(build()))
            return _small_vision(build, config)
        except Exception:
            continue  # sizes that the model does not accept
    return None


def _small_vision(build: Callable[[], LazyModel], config: dict[str, Any]) -> _Small:
    """With a picture, where one can be made up for the family, else with text alone."""
    note = "a picture's features cannot be made up"
    picture = made_up(build().model, config)
    if picture is not None:
        try:
            forward = functools.partial(forward_rows, picture=picture)
            return _Small(build, _trace_or_none(build()), forward, forward(build().model))
        except Exception as error:  # whatever a model's own code says of it
            note = f"a made-up picture is not accepted ({type(error).__name__}: {error})"
    forward = functools.partial(forward_rows, picture=None)
    reference = forward(build().model)
    return _Small(build, _trace_or_none(build()), forward, reference, f"tried with text alone: {note}")


def _build(lazy: LazyModel, config: dict[str, Any], weights: list[tuple[str, Any]] | None) -> LazyModel:
    """A model of `config` with these weights, which all copies share; None: as it is made, lazy."""
    model: Any
    if reads_alone(lazy.model):
        model = build_small(config)
    else:
        model_class, args_class = mlx_lm.utils._get_classes(config)
        model = model_class(args_class.from_dict(config))
    model.eval()
    if weights is not None:
        model.update(tree_unflatten(weights))
    return LazyModel(lazy.folder, model, config, {})


def _weights(lazy: LazyModel) -> list[tuple[str, Any]]:
    """Random weights for a model, the same at each call."""
    shapes = tree_flatten(lazy.model.parameters())
    if sum(array.size for _, array in shapes) > _MOST_PARAMETERS:
        raise ValueError("too large")
    key = mx.random.key(7)
    weights = []
    for path, array in shapes:
        if mx.issubdtype(array.dtype, mx.floating):
            key, mine = mx.random.split(key)
            fan = array.shape[-1] if array.ndim > 1 else 400
            centre = 1.0 if array.ndim == 1 and "norm" in path else 0.0
            weights.append((path, centre + mx.random.normal(array.shape, key=mine) * fan**-0.5))
    mx.eval([array for _, array in weights])
    return weights


def _trace_or_none(lazy: LazyModel) -> ModelTrace | None:
    try:
        return trace_model(lazy.model)
    except TraceError:
        return None


def _forward(lazy: LazyModel | Any) -> list[Any]:
    """Logits of a prefill in two chunks and two decoded tokens."""
    model = lazy.model if isinstance(lazy, LazyModel) else lazy
    cache = make_prompt_cache(model)
    outputs = []
    for first, last in ((0, 6), (6, 11), (11, 12), (12, 13)):
        tokens = ((mx.arange(first, last) * 37 + 11) % 61)[None]
        outputs.append(model(tokens, cache=cache))
    mx.eval(outputs)
    return outputs


def _gap(outputs: list[Any], reference: list[Any]) -> float:
    gaps = [
        float((mx.abs(a - b).max() / mx.abs(b).max()).item()) for a, b in zip(outputs, reference, strict=True)
    ]
    return max(gap if gap == gap else float("inf") for gap in gaps)


def _tensor_gap(small: _Small, proposal: Proposal, reference: list[Any]) -> float:
    """The largest difference over equal and uneven shares."""
    num_layers = len(small().layers)
    gaps = []
    for weights in _TENSOR_WEIGHTS:
        shards = tuple(
            Shard(rank=rank, host="", start_layer=0, end_layer=num_layers, weight=weight)
            for rank, weight in enumerate(weights)
        )
        placement = Placement(sharding=Sharding.TENSOR, model_digest="", num_layers=num_layers, shards=shards)
        gaps.append(_divided_gap(small, placement, proposal, reference))
    return max(gaps)


def _pipeline_gap(small: _Small, cuts: tuple[int, ...], reference: list[Any]) -> float:
    num_layers = len(small().layers)
    edges = (0, *cuts, num_layers)
    spans = list(itertools.pairwise(edges))[::-1]
    shards = tuple(Shard(rank=r, host="", start_layer=a, end_layer=b) for r, (a, b) in enumerate(spans))
    placement = Placement(sharding=Sharding.PIPELINE, model_digest="", num_layers=num_layers, shards=shards)
    return _divided_gap(small, placement, None, reference)


def _divided_gap(
    small: _Small, placement: Placement, proposal: Proposal | None, reference: list[Any]
) -> float:
    from mlx_mesh.node.engine.shard import shard_model  # it imports this module

    def body(rank: int, exchange: Any) -> list[Any]:
        model = shard_model(
            small(), placement, rank, exchange, lambda *_: None, proposal=proposal, trace=small.trace
        ).model
        return small.forward(model)

    try:
        return _gap(Rehearsal(placement.world_size).run(body)[0], reference)
    except Exception:
        return float("inf")


def _bad_cuts(
    small: _Small, reference: list[Any], trace: ModelTrace | None
) -> tuple[tuple[int, ...], list[str]]:
    """Cuts of the real model that differ, found by those of the small one, which has the same layers or the
    first few of them."""
    small_trace = small.trace
    if trace is None or small_trace is None:
        return (), []
    legal = tuple(cut for cut in range(1, small_trace.num_layers) if not small_trace.why_not(cut))
    if not legal or _pipeline_gap(small, legal, reference) == 0.0:
        return (), []
    bad = tuple(cut for cut in legal if _pipeline_gap(small, (cut,), reference) != 0.0)
    if not bad:
        return (), []
    if small_trace.num_layers != trace.num_layers:
        bad = tuple(range(1, trace.num_layers))
    return bad, ["a pipeline cut at some layers differs from the whole model"]
