"""`python -m mlx_mesh.node.engine.reference MODEL`: a mesh's answers scored without ever holding the whole
model. ReferenceTask as JSON on stdin; ReferenceScores as JSON, the last line on stdout.

The model is cut into pipeline stages that fit, which run one after the other: load a stage, send every prompt
through it, keep what would cross the cut, drop it. A pipeline computes what the model computes, bit for bit,
so this is the answer of one host, also for a model that fits on none.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.errors import ExitCode, MeshError, SettingsError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.memory import ModelMemory
from mlx_mesh.mesh.reference import Answered, ReferenceScores, ReferenceTask, Scored
from mlx_mesh.mesh.types import Placement, Shard, Sharding, VisionMode
from mlx_mesh.node.blas import engine_environment, find_openblas, is_wanted
from mlx_mesh.node.engine.inspect import kept_footprint
from mlx_mesh.node.engine.shard import LoadedShard, load_shard
from mlx_mesh.node.facts import resolve_model
from mlx_mesh.node.hub import fetch_for_layers
from mlx_mesh.node.vision import read_config, why_whole

Say = Callable[[str], None]


def score_answers(
    model: str, adapter: str, task: ReferenceTask, say: Say, vision: VisionMode = VisionMode.AUTO
) -> ReferenceScores:
    """Raises MeshError when the model cannot be used or cut."""
    folder = resolve_model(model)
    footprint = kept_footprint(model, adapter, vision)
    if footprint.media and (why := why_whole(read_config(folder))):
        raise SettingsError(
            f"Prompts of this model are read in one piece: {why}. That cannot be recomputed layer by layer. "
            "Verify it on a leader that holds it whole, without --layer-by-layer."
        )
    placement = stages_within(footprint, task.memory_bytes)
    num_stages = placement.world_size
    crossing: dict[tuple[int, int], deque[Any]] = {}
    scores: tuple[Scored, ...] = ()
    largest = 0
    for rank in reversed(range(num_stages)):
        here = placement.shards[rank]
        fetch_for_layers(folder, placement.num_layers, here.start_layer, here.end_layer, lambda *_: None)
        shard = load_shard(
            str(folder),
            placement,
            rank,
            StoredExchange(rank, num_stages, crossing),
            _silent,
            adapter=adapter,
            kv=task.kv_options,
            with_vision=bool(footprint.media),
        )
        largest = max(largest, shard.weights_bytes)
        outputs = [_run(shard, answered, crossing) for answered in task.answers]
        if rank == 0:
            scores = tuple(
                _scored(logits, answered) for logits, answered in zip(outputs, task.answers, strict=True)
            )
        del shard, outputs
        mx.clear_cache()
        say(f"layers {here.start_layer} to {here.end_layer - 1} of {placement.num_layers} done")
    return ReferenceScores(answers=scores, num_parts=num_stages, largest_part_bytes=largest)


def stages_within(footprint: ModelFootprint, memory_bytes: int) -> Placement:
    """The fewest stages of at most so many bytes of weights, cut at legal cuts; a stage that no cut divides
    may be larger."""
    memory = ModelMemory.of(footprint, 1, 1)
    cuts, start = [0], 0
    ends = [*sorted(footprint.legal_cuts), footprint.num_layers]
    for end, following in zip(ends, [*ends[1:], 0], strict=True):
        if not following:
            cuts.append(end)
        elif memory.stage(start, following).weights > memory_bytes:
            cuts.append(end)
            start = end
    stages = list(itertools.pairwise(cuts))[::-1]
    return Placement(
        sharding=Sharding.PIPELINE if len(stages) > 1 else Sharding.NONE,
        model_digest=footprint.model_digest,
        num_layers=footprint.num_layers,
        shards=tuple(
            Shard(rank=rank, host="here", start_layer=first, end_layer=end)
            for rank, (first, end) in enumerate(stages)
        ),
    )


class StoredExchange:
    """The Exchange protocol between stages that run one after the other: what is sent waits in `crossing`."""

    def __init__(self, rank: int, world_size: int, crossing: dict[tuple[int, int], deque[Any]]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._crossing = crossing

    def send(self, x: Any, to: int) -> Any:
        kept = mx.stop_gradient(x)  # another object: the model may change its own in place
        self._crossing.setdefault((self.rank, to), deque()).append(kept)
        return kept

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Any:
        waiting = self._crossing.get((source, self.rank))
        if not waiting:
            raise SettingsError(
                "This model needs values of later layers in earlier ones, so it cannot run layer by layer. "
                "Verify it on a leader that holds it whole."
            )
        x = waiting.popleft()
        assert tuple(x.shape) == tuple(shape) and x.dtype == dtype, (x.shape, x.dtype, shape, dtype)
        return x

    def all_sum(self, x: Any) -> Any:
        raise AssertionError("stages sum nothing")

    def all_gather(self, x: Any) -> Any:
        raise AssertionError("stages gather nothing")

    def broadcast_ids(self, ids: Any | None, num_rows: int, after: list[Any]) -> Any:
        raise AssertionError("nothing is sampled here")


def _run(shard: LoadedShard, answered: Answered, crossing: dict[tuple[int, int], deque[Any]]) -> Any:
    """One sequence through one stage, as one prefill; evaluated, so that the stage can go."""
    tokens = mx.array([(*answered.prompt_ids, *answered.answer_ids[:-1])])
    caches = shard.new_caches() if shard.new_caches is not None else make_prompt_cache(shard.model)
    out = shard.model(tokens, cache=caches)
    mx.eval([out, *(x for waiting in crossing.values() for x in waiting)])
    return out


def _scored(logits: Any, answered: Answered) -> Scored:
    """`logits`: (1, tokens, vocabulary)."""
    num_answers = len(answered.answer_ids)
    rows = logits[0, -num_answers:].astype(mx.float32)
    logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    best = mx.argmax(logprobs, axis=-1)
    chosen = mx.take_along_axis(logprobs, mx.array(answered.answer_ids)[:, None], axis=-1)[:, 0]
    best_logprobs = mx.take_along_axis(logprobs, best[:, None], axis=-1)[:, 0]
    return Scored(
        best_ids=tuple(best.tolist()),
        best_logprobs=tuple(best_logprobs.tolist()),
        logprobs=tuple(chosen.tolist()),
    )


def _silent(done: int, total: int) -> None:
    """Stages are told when they are done."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlx_mesh.node.engine.reference")
    parser.add_argument("model")
    parser.add_argument("--adapter-path", default="")
    parser.add_argument(
        "--vision", choices=[mode.value for mode in VisionMode], default=VisionMode.AUTO.value
    )
    parser.add_argument("--offline", action="store_true")
    arguments = parser.parse_args(list(argv))
    if arguments.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    library = find_openblas() if is_wanted() else ""
    if library and library not in os.environ.get("LD_PRELOAD", ""):  # nobody can preload for himself
        again = [sys.executable, "-I", "-u", "-m", "mlx_mesh.node.engine.reference", *argv]
        os.execve(sys.executable, again, {**os.environ, **engine_environment(library)})
    try:
        task = msgspec.json.decode(sys.stdin.buffer.readline(), type=ReferenceTask)
        scores = score_answers(
            arguments.model,
            arguments.adapter_path,
            task,
            lambda text: print(text, flush=True),
            VisionMode(arguments.vision),
        )
    except MeshError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    print(msgspec.json.encode(scores).decode(), flush=True)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
