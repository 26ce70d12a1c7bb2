"""`python -I -u -m mlx_mesh.node.engine.embedder --fd N`: the embedding model, a child of the leader's agent.

N is an inherited socket to the agent: EmbedderConfig comes first, then EmbedderCommand; reports go back. Its
end of file ends this process at once. Inputs of all open requests are computed in common batches, in turns,
so that a large request does not hold up a small one. Exit status: see failure.EXIT_STATUS.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from mlx_mesh.mesh.embedding_memory import BATCH_TOKENS
from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    Embed,
    Embedded,
    EmbedderCommand,
    EmbedderConfig,
    EmbedderReady,
    EmbedderStep,
    EmbedRefused,
)
from mlx_mesh.node.engine.backend import import_mlx
from mlx_mesh.node.engine.birth import born
from mlx_mesh.node.engine.failure import EXIT_AGENT_GONE, EXIT_STATUS, describe
from mlx_mesh.node.pipe import BlockingPipe

if TYPE_CHECKING:
    from mlx_mesh.node.engine.encoders import Encoder

MAX_REQUEST_TOKENS = 300_000
"""OpenAI's own limit for one request."""


class Refusal(Exception):
    """Why a request cannot be served; `code` and `param` as OpenAI's clients know them."""

    def __init__(self, message: str, code: str, param: str) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(slots=True)
class Job:
    """An open request. `vectors[i]` is None until input i is computed."""

    request: Embed
    ids: list[list[int]]
    vectors: list[Any] = field(default_factory=list)
    num_taken: int = 0

    @property
    def is_taken(self) -> bool:
        return self.num_taken == len(self.ids)


class Jobs:
    """The open requests and whose turn it is. Pure but for the encoder."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._turns: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, request: Embed) -> None:
        """Raises Refusal."""
        self._turns.append(Job(request, ids := inputs_of(request, self._encoder), [None] * len(ids)))

    def drop(self, request_id: str) -> None:
        self._turns = deque(job for job in self._turns if job.request.id != request_id)

    def next_batch(self) -> list[tuple[Job, int]]:
        """Inputs of one batch, one of each request in turn, until the padded batch would be too large."""
        batch: list[tuple[Job, int]] = []
        longest = 0
        waiting = deque(job for job in self._turns if not job.is_taken)
        while waiting:
            job = waiting.popleft()
            longest = max(longest, len(job.ids[job.num_taken]))
            if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
                break
            batch.append((job, job.num_taken))
            job.num_taken += 1
            if not job.is_taken:
                waiting.append(job)
        return batch

    def run_batch(self) -> list[Embedded]:
        """Compute one batch; the requests that are complete with it."""
        batch = self.next_batch()
        rows = self._encoder.embed([job.ids[at] for job, at in batch])
        for (job, at), row in zip(batch, rows, strict=True):
            job.vectors[at] = row
        done = [job for job in self._turns if job.is_taken]
        self._turns = deque(job for job in self._turns if not job.is_taken)
        return [answer_of(job) for job in done]


def inputs_of(request: Embed, encoder: Encoder) -> list[list[int]]:
    """Token ids of each input. Raises Refusal."""
    if request.dimensions > encoder.num_dimensions:
        raise Refusal(
            f"Invalid 'dimensions': this model's vectors have {encoder.num_dimensions}.",
            "invalid_value",
            "dimensions",
        )
    size = (request.dimensions or encoder.num_dimensions) * 4 * len(request.inputs)
    if size > MAX_FRAME_BYTES // 2:
        raise Refusal("The answer would be too large; send fewer inputs.", "invalid_value", "input")
    texts = iter(encoder.tokenize([one for one in request.inputs if isinstance(one, str)]))
    ids = [next(texts) if isinstance(one, str) else list(one) for one in request.inputs]
    for at, one in enumerate(ids):
        if not one or not all(0 <= token_id < encoder.vocab_size for token_id in one):
            what = "has a token id outside the vocabulary" if one else "is empty"
            raise Refusal(f"Invalid 'input': input {at} {what}.", "invalid_value", "input")
        if len(one) > encoder.max_tokens:
            if not request.truncate:
                raise Refusal(
                    f"Input {at} has {len(one)} tokens; this embedding model takes up to "
                    f"{encoder.max_tokens}.",
                    "context_length_exceeded",
                    "input",
                )
            ids[at] = encoder.cut(one)
    if (total := sum(map(len, ids))) > MAX_REQUEST_TOKENS:
        raise Refusal(
            f"The inputs have {total} tokens together; at most {MAX_REQUEST_TOKENS} in one request.",
            "context_length_exceeded",
            "input",
        )
    return ids


def answer_of(job: Job) -> Embedded:
    import numpy as np  # with MLX, after the pipe is watched

    vectors = np.stack(job.vectors).astype("<f4")
    if 0 < job.request.dimensions < vectors.shape[1]:  # of unit length again, as OpenAI's are
        vectors = vectors[:, : job.request.dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return Embedded(
        id=job.request.id,
        num_dimensions=vectors.shape[1],
        vectors=np.ascontiguousarray(vectors, dtype="<f4").tobytes(),
        num_tokens=sum(map(len, job.ids)),
    )


def main(arguments: list[str] | None = None) -> int:
    """The whole life of an embedder; returns its exit status."""
    sock = born("mlx_mesh.node.engine.embedder", "Embeddings.", arguments)
    config = BlockingPipe(sock, msgspec.msgpack.Decoder(EmbedderConfig)).receive()
    if config is None:
        return EXIT_AGENT_GONE
    pipe: BlockingPipe[EmbedderCommand] = BlockingPipe(sock, msgspec.msgpack.Decoder(EmbedderCommand))
    commands: queue.SimpleQueue[EmbedderCommand] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, commands), name="commands", daemon=True).start()
    try:
        import_mlx()
        from mlx_mesh.node.engine.encoders import Encoder

        encoder = Encoder(Path(config.model))
        pipe.send(
            EmbedderReady(
                num_dimensions=encoder.num_dimensions,
                max_tokens=encoder.max_tokens,
                weights_bytes=encoder.weights_bytes,
            )
        )
        _serve(Jobs(encoder), pipe, commands)
    except BaseException as error:  # the outermost frame
        why = describe(error)
        if why.kind != "config":
            traceback.print_exc()
        print(f"embedder: {why}", file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS[why.kind])


def _serve(jobs: Jobs, pipe: BlockingPipe[EmbedderCommand], commands: queue.SimpleQueue[Any]) -> NoReturn:
    """For ever."""
    while True:
        while not len(jobs) or not commands.empty():
            command = commands.get()
            if isinstance(command, Cancel):
                jobs.drop(command.id)
                continue
            try:
                jobs.add(command)
            except Refusal as refusal:
                pipe.send(
                    EmbedRefused(id=command.id, code=refusal.code, message=str(refusal), param=refusal.param)
                )
        _send_all(pipe, jobs.run_batch())


def _send_all(pipe: BlockingPipe[EmbedderCommand], answers: Sequence[Embedded]) -> None:
    pipe.send(EmbedderStep())
    for answer in answers:
        pipe.send(answer)


def _read(pipe: BlockingPipe[EmbedderCommand], commands: queue.SimpleQueue[EmbedderCommand]) -> None:
    try:
        while (command := pipe.receive()) is not None:
            commands.put(command)
    except (OSError, ProtocolError) as error:
        print(f"embedder: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_AGENT_GONE)


if __name__ == "__main__":
    sys.exit(main())
