"""The phases of bring-up, one function each: connect, load, warm up. Each reports its end to the agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mesh.mesh.kv_budget import MEDIA_BYTES
from mlx_mesh.mesh.messages import (
    Connect,
    EngineConfig,
    GenerateRequest,
    JoinPlans,
    Load,
    SamplingParams,
    WarmUp,
)
from mlx_mesh.mesh.prefix_settings import PrefixCounters, limits_of
from mlx_mesh.mesh.types import Phase, Sharding
from mlx_mesh.mesh.whole_prompt import Widths, longest_in_one_piece
from mlx_mesh.node.engine.commands import Commands
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.grammar import Grammars
from mlx_mesh.node.engine.group import DataGroup, form_group
from mlx_mesh.node.engine.loop import Follower, Generation, Leader, NoFollowers
from mlx_mesh.node.engine.pictures import Pictures
from mlx_mesh.node.engine.plans import PlanPublisher, PlanReceiver, lost_engine
from mlx_mesh.node.engine.prefix_files import PrefixFiles, open_files
from mlx_mesh.node.engine.prefix_planner import PrefixPlanner, Stored
from mlx_mesh.node.engine.report import Reporter
from mlx_mesh.node.engine.scheduler import Scheduler
from mlx_mesh.node.engine.shard import LoadedShard, check_cuts, load_shard
from mlx_mesh.node.facts import check_same_model
from mlx_mesh.node.hub import fetch_for_layers
from mlx_mesh.node.vision import why_whole

PREFILL_STEP_SIZE = {Sharding.NONE: 2048, Sharding.TENSOR: 2048, Sharding.PIPELINE: 512}
"""Tokens of one prefill chunk when Load does not say. A pipeline wants several chunks under way at once."""

WARM_UP_REQUEST = GenerateRequest(
    id="warm-up", prompt_ids=(0,) * 8, max_tokens=1, sampling=SamplingParams(temperature=0.0)
)


OnFatal = Callable[[EngineError], None]
"""Reports and ends the process, from any thread: the main one may hang in a collective for ever."""


@dataclass(slots=True)
class Channels:
    """What CONNECTED stands for: the data group, and this rank's end of the plan channel."""

    group: DataGroup
    plans: PlanPublisher | PlanReceiver | None = None  # None: world size 1

    def close(self) -> None:
        if self.plans is not None:
            self.plans.close()


def connect(config: EngineConfig, commands: Commands, reporter: Reporter, on_fatal: OnFatal) -> Channels:
    """Form the data group and, on the leader, bind the plan channel."""
    command = commands.expect(Connect)
    if (command.epoch, command.rank, command.world_size) != (config.epoch, config.rank, config.world_size):
        raise EngineError(
            "internal",
            f"Connect names rank {command.rank} of {command.world_size}, epoch {command.epoch}; this engine "
            f"is rank {config.rank} of {config.world_size}, epoch {config.epoch}.",
        )
    reporter.enter(Phase.CONNECTING)
    reporter.send(reporter.heartbeat())  # the last one until the group is there, see HeartbeatThread
    channels = Channels(form_group(command, lambda message: on_fatal(EngineError("stray_peer", message))))
    if config.world_size > 1 and config.rank == 0:
        channels.plans = publisher = PlanPublisher(config, lambda rank: on_fatal(lost_engine(rank)))
        reporter.reached(Phase.CONNECTED, plan_endpoint=publisher.endpoint, link=channels.group.measured)
    else:
        reporter.reached(Phase.CONNECTED, link=channels.group.measured)
    return channels


def join_plans(config: EngineConfig, channels: Channels, commands: Commands, on_fatal: OnFatal) -> None:
    """On a follower: go to the leader's plan channel."""
    if config.rank > 0:
        endpoint = commands.expect(JoinPlans).endpoint
        channels.plans = PlanReceiver(config, endpoint, lambda rank: on_fatal(lost_engine(rank)))


def load(
    config: EngineConfig, channels: Channels, commands: Commands, reporter: Reporter
) -> tuple[Load, LoadedShard, PrefixFiles]:
    """Read this rank's share of the weights, and its part of prefixes that were kept before."""
    command = commands.expect(Load)
    group, placement = channels.group, command.placement
    if placement.world_size != config.world_size:
        raise EngineError(
            "internal", f"The placement has {placement.world_size} ranks, the mesh has {config.world_size}."
        )
    if placement.sharding is Sharding.PIPELINE and group.world_size > 2 and not group.has_neighbour_sends:
        raise EngineError(
            "config",
            f"A pipeline over {group.world_size} ranks needs sends between neighbours, which "
            f"{group.backend.value} does not offer here. Use `backend: ring` or `sharding: tensor`.",
        )
    reporter.enter(Phase.LOADING)
    if command.model_digest:
        check_same_model(Path(command.model), command.model_digest)
    limit_bytes = placement.shards[config.rank].memory_limit_bytes
    if limit_bytes:
        mx.set_memory_limit(limit_bytes)
    here = placement.shards[config.rank]
    fetch_for_layers(
        Path(command.model),
        placement.num_layers,
        here.start_layer,
        here.end_layer,
        lambda done, total: reporter.progress(0, placement.num_layers),
    )
    shard = load_shard(
        command.model,
        placement,
        config.rank,
        group.exchange,
        reporter.progress,
        reporter.entered_layer,
        command.adapter,
        command.kv_options,
        with_vision=command.with_vision,
    )
    reporter.is_paranoid = command.is_paranoid
    num_layers = placement.num_layers
    files = open_files(config, command, shard, lambda: reporter.progress(num_layers, num_layers))
    reporter.reached(
        Phase.LOADED,
        weights_bytes=shard.weights_bytes,
        plan_digest=placement.digest(),
        prefixes=tuple(one.key for one in files.loaded),
    )
    return command, shard, files


def warm_up(
    config: EngineConfig,
    channels: Channels,
    command: Load,
    shard: LoadedShard,
    files: PrefixFiles,
    commands: Commands,
    reporter: Reporter,
) -> Leader | Follower:
    """Check the exchange over every cut, then take one request through the loop on all ranks."""
    prefixes = commands.expect(WarmUp).prefixes
    reporter.enter(Phase.WARMING)
    group, sharding = channels.group, command.placement.sharding
    if group.world_size > 1:
        check_cuts(shard, group.exchange)
    generation = Generation(
        shard.model,
        group.exchange,
        max_sequences=command.max_sequences,
        prefill_step_size=command.prefill_step_size or PREFILL_STEP_SIZE[sharding],
        is_leader=config.rank == 0,
        new_caches=shard.new_caches,
    )
    kept = generation.begin_with(files.take(prefixes), files.saving)
    if config.rank == 0:
        pictures = None
        if shard.whole is not None:
            memo_bytes = command.kv.ranks[0].media_bytes if command.kv.ranks else MEDIA_BYTES
            widths = Widths.of(shard.config)
            pictures = Pictures(
                Path(command.model),
                shard.whole,
                command.context_length,
                memo_bytes,
                longest_whole=longest_in_one_piece(command.kv, widths),
                widths=widths,
                reads_whole=bool(why_whole(shard.config)),
            )
        loop: Leader | Follower = _leader(config, channels, command, generation, kept, reporter, pictures)
    else:
        loop = _follower(config, channels, command, generation, reporter)
    reporter.reached(Phase.READY)
    return loop


def _leader(
    config: EngineConfig,
    channels: Channels,
    command: Load,
    generation: Generation,
    kept: Sequence[Stored],
    reporter: Reporter,
    pictures: Pictures | None,
) -> Leader:
    plans: Any = NoFollowers()
    plans_ahead = 0
    if isinstance(channels.plans, PlanPublisher):
        plans = channels.plans
        plans.wait_for_followers()
        plans_ahead = config.world_size - 1 if command.placement.sharding is Sharding.PIPELINE else 1
    planner = PrefixPlanner(command.prefix, command.kv, can_cut=generation.can_always_cut)
    planner.begin_with(kept)
    scheduler = Scheduler(
        config.epoch,
        max_sequences=command.max_sequences,
        context_length=command.context_length,
        kv=command.kv,
        prefixes=planner,
    )
    grammars = Grammars(command.model)
    leader = Leader(
        generation,
        scheduler,
        plans,
        reporter,
        plans_ahead=plans_ahead,
        grammars=grammars,
        pictures=pictures,
    )
    leader.warm_up(WARM_UP_REQUEST)
    return leader


def _follower(
    config: EngineConfig, channels: Channels, command: Load, generation: Generation, reporter: Reporter
) -> Follower:
    assert isinstance(channels.plans, PlanReceiver)
    limits = limits_of(command.prefix, command.kv)
    reporter.prefix = PrefixCounters(limit_bytes=limits[min(config.rank, len(limits) - 1)])
    follower = Follower(generation, channels.plans, reporter)
    follower.warm_up()
    return follower
