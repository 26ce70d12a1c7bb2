"""What `verify` asks of the process that recomputes a mesh's answers a few layers at a time."""

from __future__ import annotations

import msgspec

from mlx_mesh.mesh.kv_options import KvOptions


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the tokens that the mesh generated after it."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class ReferenceTask(msgspec.Struct, frozen=True, kw_only=True):
    """`memory_bytes`: of weights in memory at a time; always at least what lies between two legal cuts."""

    answers: tuple[Answered, ...]
    memory_bytes: int
    kv_options: KvOptions = KvOptions()


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """For each token of one answer, with all tokens before it as the mesh had them: the model's likeliest
    token, and log-probabilities of that and of the mesh's."""

    best_ids: tuple[int, ...]
    best_logprobs: tuple[float, ...]
    logprobs: tuple[float, ...]


class ReferenceScores(msgspec.Struct, frozen=True, kw_only=True):
    answers: tuple[Scored, ...]
    num_parts: int  # into which the model was cut
    largest_part_bytes: int
