"""Which rank holds which part of a model, and why. A pure function of footprint, hosts and request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlx_mesh.mesh.capacity import HostCapacity, PlacementRequest, Rank, ranks_of
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.memory import ModelMemory, format_bytes, misfit
from mlx_mesh.mesh.partition import split_units
from mlx_mesh.mesh.pipeline_plan import fits_as_pipeline, plan_pipeline, stage_shard
from mlx_mesh.mesh.speed import TENSOR_GAIN_PER_MILLE, PipelineSpeed, Prediction, TensorSpeed
from mlx_mesh.mesh.tensor_plan import (
    attention_shares,
    fits_by_tensor,
    plan_tensor,
    tensor_needs,
    tensor_obstacle,
)
from mlx_mesh.mesh.types import Placement, Shard, Sharding

__all__ = [
    "HostCapacity",
    "PlacementRequest",
    "PlanRow",
    "can_place",
    "format_bytes",
    "plan_placement",
    "plan_rows",
    "predict",
    "split_units",
]


def plan_placement(
    footprint: ModelFootprint, hosts: Sequence[HostCapacity], request: PlacementRequest
) -> Placement:
    """The placement for these hosts. Ranks are numbered over hosts in order, then slots.

    Raises PlacementError, with the numbers and the valid choices, when the model cannot be split or does not
    fit as asked. Equal inputs give equal placements on every machine.
    """
    ranks = ranks_of(hosts)
    if len(ranks) == 1:
        shard = _plan_single(footprint, ranks[0], request)
        return _placement(footprint, Sharding.NONE, (shard,), "one rank holds the whole model")
    match request.sharding:
        case Sharding.PIPELINE:
            shards = plan_pipeline(footprint, ranks, request)
            return _placement(footprint, Sharding.PIPELINE, shards, "pipeline: asked for")
        case Sharding.TENSOR:
            shards = plan_tensor(footprint, ranks, request)
            return _placement(footprint, Sharding.TENSOR, shards, "tensor: asked for")
        case Sharding.AUTO:
            return _plan_auto(footprint, ranks, request)
        case Sharding.NONE:
            raise PlacementError(
                f"Sharding none is for one rank, but the hosts have {len(ranks)}. Use auto, pipeline or "
                "tensor, or one host with one slot."
            )


def _plan_single(footprint: ModelFootprint, rank: Rank, request: PlacementRequest) -> Shard:
    num_layers = footprint.num_layers
    if request.sharding in (Sharding.PIPELINE, Sharding.TENSOR):
        raise PlacementError(
            f"Sharding {request.sharding} needs at least two ranks, but there is one, on {rank.host}. Add a "
            "host or a slot, or use sharding auto."
        )
    if rank.pinned_layers not in (0, num_layers):
        raise PlacementError(
            f"Host {rank.host} is pinned to {rank.pinned_layers} layers, but it is the only rank and the "
            f"model has {num_layers}. Remove `layers`, or add hosts for the others."
        )
    memory = ModelMemory.for_request(footprint, request)
    need = memory.stage(0, num_layers)
    if need.total > rank.memory_bytes:
        raise misfit(
            footprint,
            request,
            [rank],
            [need],
            lambda other: other.stage(0, num_layers).total <= rank.memory_bytes,
        )
    return stage_shard(memory, rank, 0, num_layers)


def _plan_auto(footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest) -> Placement:
    """The faster of pipeline and tensor by predicted time per token; of two nearly equal ones the pipeline,
    and never tensor over a link that nobody knows."""
    try:
        pipeline = plan_pipeline(footprint, ranks, request)
    except PlacementError as no_pipeline:
        if any(rank.pinned_layers for rank in ranks):
            raise  # `layers` asks for a pipeline
        try:
            tensor = plan_tensor(footprint, ranks, request)
        except PlacementError as no_tensor:
            raise PlacementError(
                f"The model cannot be placed on {len(ranks)} ranks.\n"
                f"As a pipeline: {no_pipeline}\nBy tensor: {no_tensor}",
                no_pipeline.missing_bytes or no_tensor.missing_bytes,
            ) from None
        return _placement(
            footprint, Sharding.TENSOR, tensor, f"tensor, because a pipeline is impossible: {no_pipeline}"
        )
    if any(rank.pinned_layers for rank in ranks):
        return _placement(footprint, Sharding.PIPELINE, pipeline, "pipeline, because `layers` pins stages")
    try:
        tensor = plan_tensor(footprint, ranks, request)
    except PlacementError as no_tensor:
        why = tensor_obstacle(footprint, len(ranks)) or str(no_tensor).splitlines()[0]
        return _placement(
            footprint, Sharding.PIPELINE, pipeline, "pipeline, the default", f"tensor is impossible: {why}"
        )
    sharding, reason = _faster(footprint, ranks, request, pipeline, tensor)
    return _placement(footprint, sharding, pipeline if sharding is Sharding.PIPELINE else tensor, reason)


def _faster(
    footprint: ModelFootprint,
    ranks: Sequence[Rank],
    request: PlacementRequest,
    pipeline: Sequence[Shard],
    tensor: Sequence[Shard],
) -> tuple[Sharding, str]:
    speed = TensorSpeed.of(footprint, ranks, request)
    staged = PipelineSpeed.of(footprint, ranks, request)
    in_stages = staged.predict([(shard.start_layer, shard.end_layer) for shard in pipeline])
    divided = speed.predict([shard.weight for shard in tensor])
    if divided is None or in_stages is None:
        unknown = "the link between the hosts is" if speed.link is None else "the hosts' speed is"
        return Sharding.PIPELINE, (
            "pipeline, the default: one exchange a cut and token. Tensor is possible at "
            f"{speed.num_sums} sums a token, but {unknown} unknown; `mlx-mesh bench --probe hosts.yaml` "
            "measures it"
        )
    assert speed.link is not None
    times = (
        f"{in_stages.decode_ns / 1e6:.1f} ms a token by pipeline, {divided.decode_ns / 1e6:.1f} by tensor, "
        f"of which {divided.exchange_ns / 1e6:.1f} for {speed.num_sums} sums over {speed.link.name}"
    )
    if divided.decode_ns >= in_stages.decode_ns:
        return Sharding.PIPELINE, f"pipeline is faster: {times}"
    if divided.decode_ns * 1000 > in_stages.decode_ns * (1000 - TENSOR_GAIN_PER_MILLE):
        return Sharding.PIPELINE, f"pipeline, as tensor is hardly faster: {times}"
    return Sharding.TENSOR, f"tensor is faster: {times}"


def can_place(footprint: ModelFootprint, hosts: Sequence[HostCapacity], request: PlacementRequest) -> bool:
    """Whether there is a placement over several ranks, whatever its sharding; much quicker than to make one.
    Raises PlacementError only for hosts that are none."""
    ranks = ranks_of(hosts)
    return fits_as_pipeline(footprint, ranks, request) or fits_by_tensor(footprint, ranks, request)


def predict(
    placement: Placement, footprint: ModelFootprint, hosts: Sequence[HostCapacity], request: PlacementRequest
) -> Prediction | None:
    """Time per token of a placement that was made for these hosts; None when a speed or link is unknown."""
    ranks = ranks_of(hosts)
    if placement.sharding is Sharding.TENSOR:
        return TensorSpeed.of(footprint, ranks, request).predict([shard.weight for shard in placement.shards])
    stages = [(shard.start_layer, shard.end_layer) for shard in placement.shards]
    return PipelineSpeed.of(footprint, ranks, request).predict(stages)


def _placement(
    footprint: ModelFootprint, sharding: Sharding, shards: tuple[Shard, ...], *reasons: str
) -> Placement:
    return Placement(
        sharding=sharding,
        model_digest=footprint.model_digest,
        num_layers=footprint.num_layers,
        shards=shards,
        reasons=reasons,
    )


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a placement, for a table. `margin_bytes` is what stays free of the limit."""

    rank: int
    host: str
    part: str  # "layers 15-29", "4 of 6 KV groups", "all layers"
    weights_bytes: int
    kv_bytes: int  # for the planned context and sequences
    working_bytes: int
    limit_bytes: int

    @property
    def margin_bytes(self) -> int:
        return self.limit_bytes - self.weights_bytes - self.kv_bytes - self.working_bytes


def plan_rows(
    placement: Placement, footprint: ModelFootprint, request: PlacementRequest
) -> tuple[PlanRow, ...]:
    """What the plan's table shows, a row per rank. `request` is the one that the placement was made for."""
    memory = ModelMemory.for_request(footprint, request)
    if placement.sharding is Sharding.TENSOR:
        weights = [shard.weight for shard in placement.shards]
        needs = tensor_needs(memory, weights)
        parts = _tensor_parts(footprint, weights)
    else:
        needs = [memory.stage(shard.start_layer, shard.end_layer) for shard in placement.shards]
        parts = [_stage_part(shard, placement.num_layers) for shard in placement.shards]
    return tuple(
        PlanRow(
            rank=shard.rank,
            host=shard.host,
            part=part,
            weights_bytes=need.weights,
            kv_bytes=need.kv,
            working_bytes=need.working,
            limit_bytes=shard.memory_limit_bytes,
        )
        for shard, need, part in zip(placement.shards, needs, parts, strict=True)
    )


def _stage_part(shard: Shard, num_layers: int) -> str:
    if shard.end_layer - shard.start_layer == num_layers:
        return "all layers"
    if shard.end_layer - shard.start_layer == 1:
        return f"layer {shard.start_layer}"
    return f"layers {shard.start_layer}-{shard.end_layer - 1}"


def _tensor_parts(footprint: ModelFootprint, weights: Sequence[int]) -> list[str]:
    num_groups, total = footprint.tensor.attention_units, sum(weights)
    if not num_groups:
        return [f"{weight} of {total} parts of the MLP" for weight in weights]
    return [f"{share} of {num_groups} KV groups" for share in attention_shares(footprint, weights)]
