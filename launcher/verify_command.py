"""`mlx-mesh verify`: the same prompts at world size 1 and on a mesh, compared token by token.

Both run as real meshes behind their HTTP endpoint, one after the other: greedy, with log-probabilities. For a
model that the leader cannot hold whole the mesh's answers are recomputed there, a few layers at a time: each
token is compared with what the model says after the tokens before it, which finds the same first difference.

In float32 the texts are the same. In 16 bits a near-tie may fall either way: the first differing token is
shown with how close the two candidates were, and counts as equal when they were closer than the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from mlx_mesh.launcher.api import Api
from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.reference import score_by_layers
from mlx_mesh.launcher.running import api_of
from mlx_mesh.launcher.state import StateFolder, state_root
from mlx_mesh.launcher.up import up
from mlx_mesh.mesh.errors import MeshError, PlacementError
from mlx_mesh.mesh.kv_options import KvOptions
from mlx_mesh.mesh.memory import format_bytes
from mlx_mesh.mesh.reference import Answered, ReferenceScores, Scored
from mlx_mesh.mesh.types import Sharding

Say = Callable[[str], None]

NUM_TOKENS = 32
CHUNK_TOKENS = 128  # of prefill, small so that a short text is several chunks at any sharding
TOLERANCE = 0.05  # of log-probability, when texts differ

_SENTENCE = "The planner weighs every layer, counts every byte, and says in plain words what fits where. "
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    _SENTENCE * 18 + "\nIn short:",  # several prefill chunks
)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. Log-probabilities are compared up to the first different token, that one included."""

    prompt: str  # its beginning
    num_tokens: int
    largest_gap: float
    differs_at: int = -1  # -1 = the same tokens
    tokens: tuple[str, str] = ("", "")  # at that place, one host's first
    near_tie: float = 0.0  # how far apart the two were for one host


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`reference`: what the mesh was compared with."""

    model: str
    reference: str
    prompts: tuple[Compared, ...]
    kv_bits: int = 0  # 0 = keys and values are not quantised
    agreement: tuple[int, int] = (0, 0)  # then: so many of so many tokens are also the unquantised model's
    noise: float = 0.0  # and by so much quantising moves the log-probability of a token at most

    @property
    def largest_gap(self) -> float:
        return max(item.largest_gap for item in self.prompts)

    @property
    def is_same(self) -> bool:
        """Equal tokens, or a tie that may fall either way. Rounding to a few bits makes large differences of
        the smallest ones, up to what it changes itself, so ties are wider then."""
        tolerance = max(TOLERANCE, self.noise)
        return all(item.differs_at < 0 or item.near_tie <= tolerance for item in self.prompts)


def verify(config: LaunchConfig, environment: Mapping[str, str], say: Say, *, by_layers: bool) -> Verdict:
    """Bring up one host, ask, bring it down; then the mesh. Raises MeshError when either does not come up.
    `by_layers`: do not even try to hold the model whole on the leader."""
    leader = replace(config.hosts[0], slots=1, layers=())
    alone = replace(
        config, name=f"{config.name}-verify-1", hosts=(leader,), sharding=Sharding.AUTO, serve_port=0
    )
    mesh = replace(config, name=f"{config.name}-verify-{config.num_ranks}", serve_port=0)
    alone, mesh = (replace(either, prefill_step_size=CHUNK_TOKENS) for either in (alone, mesh))
    expected: list[Any] | None = None
    if not by_layers:
        say(f"Asking {leader.name} alone ...")
        try:
            expected = _ask(alone, environment, say)
        except PlacementError as error:
            say(f"{leader.name} cannot hold it whole, so it is recomputed layer by layer. {_why(error)}")
    say(f"Asking {config.num_ranks} ranks ...")
    answers = _ask(mesh, environment, say)
    quantised: dict[str, Any] = {}
    if config.kv_options.bits:
        say(f"Recomputing the answers on {leader.name} with unquantised keys and values ...")
        plain = replace(alone, kv_options=KvOptions())
        scores = score_by_layers(plain, [_answered(answer) for answer in answers], say)
        quantised = {"kv_bits": config.kv_options.bits, **beside_unquantised(scores, answers)}
    if expected is not None:
        compared = [compare(*item) for item in zip(PROMPTS, expected, answers, strict=True)]
        return Verdict(
            model=config.model,
            reference=f"{leader.name} alone",
            prompts=tuple(compared),
            **quantised,
        )
    say(f"Recomputing the answers on {leader.name}, layer by layer ...")
    scores = score_by_layers(alone, [_answered(answer) for answer in answers], say)
    compared = [compare_scored(*item) for item in zip(PROMPTS, scores.answers, answers, strict=True)]
    reference = (
        f"{leader.name} layer by layer, {scores.num_parts} part{'s' if scores.num_parts > 1 else ''} of at "
        f"most {format_bytes(scores.largest_part_bytes)}"
    )
    return Verdict(
        model=config.model,
        reference=reference,
        prompts=tuple(compared),
        **quantised,
    )


def beside_unquantised(scores: ReferenceScores, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What quantised caches change of the answers: `agreement` and `noise` of a Verdict. Each token is looked
    at after the tokens that are before it. Pure."""
    rows = [
        row
        for scored, answer in zip(scores.answers, answers, strict=True)
        for row in zip(
            *(scored.best_ids, scored.logprobs, answer["token_ids"], answer["token_logprobs"]), strict=True
        )
    ]
    same = sum(best == token for best, _, token, _ in rows)
    noise = max((abs(plain - seen) for _, plain, _, seen in rows), default=0.0)
    return {"agreement": (same, len(rows)), "noise": noise}


def _why(error: PlacementError) -> str:
    """The line of a refusal that has the number."""
    told = str(error).splitlines()
    return next((line for line in told if "missing" in line), told[0]).strip()


def _answered(answer: Mapping[str, Any]) -> Answered:
    return Answered(prompt_ids=tuple(answer["prompt_token_ids"]), answer_ids=tuple(answer["token_ids"]))


def compare_scored(prompt: str, scored: Scored, answer: Mapping[str, Any]) -> Compared:
    """The mesh's answer beside what the model says after the same tokens. Pure."""
    gap, count = 0.0, len(answer["token_ids"])
    rows = zip(
        answer["token_ids"],
        answer["tokens"],
        answer["token_logprobs"],
        scored.best_ids,
        scored.best_logprobs,
        scored.logprobs,
        strict=True,
    )
    for index, (token_id, text, seen, best, best_logprob, logprob) in enumerate(rows):
        gap = max(gap, abs(seen - logprob))
        if best != token_id:
            return Compared(
                prompt=prompt[:40],
                num_tokens=count,
                largest_gap=gap,
                differs_at=index,
                tokens=(f"token {best}", text),
                near_tie=best_logprob - logprob,
            )
    return Compared(prompt=prompt[:40], num_tokens=count, largest_gap=gap)


def compare(prompt: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Compared:
    """Two answers' `logprobs` objects of /v1/completions. Pure."""
    gap = 0.0
    pairs = zip(one["tokens"], other["tokens"], one["token_logprobs"], other["token_logprobs"], strict=False)
    count = max(len(one["tokens"]), len(other["tokens"]))
    for index, (token, seen, logprob, seen_logprob) in enumerate(pairs):
        if token != seen:
            likely = (one.get("top_logprobs") or [{}] * count)[index]
            return Compared(
                prompt=prompt[:40],
                num_tokens=count,
                largest_gap=gap,
                differs_at=index,
                tokens=(token, seen),
                near_tie=logprob - likely[seen] if seen in likely else float("inf"),
            )
        gap = max(gap, abs(logprob - seen_logprob), _gap_of_best(one, other, index))
    lengths = len(one["tokens"]), len(other["tokens"])
    if lengths[0] != lengths[1]:
        return Compared(
            prompt=prompt[:40],
            num_tokens=count,
            largest_gap=gap,
            differs_at=min(lengths),
            tokens=("(end)", "more") if lengths[0] < lengths[1] else ("more", "(end)"),
            near_tie=float("inf"),
        )
    return Compared(prompt=prompt[:40], num_tokens=count, largest_gap=gap)


def _gap_of_best(one: Mapping[str, Any], other: Mapping[str, Any], index: int) -> float:
    """Over the likeliest tokens that both name at this place."""
    mine, theirs = (
        (answer.get("top_logprobs") or {}) and answer["top_logprobs"][index] for answer in (one, other)
    )
    return max((abs(mine[token] - theirs[token]) for token in mine if token in theirs), default=0.0)


def lines(verdict: Verdict) -> list[str]:
    """For people."""
    out = []
    for item in verdict.prompts:
        beginning = " ".join(item.prompt.split())
        if item.differs_at < 0:
            out.append(f"same {item.num_tokens} tokens, largest gap {item.largest_gap:.2e}: {beginning!r}")
        else:
            one, other = item.tokens
            out.append(
                f"differs at token {item.differs_at}: {one!r} expected, {other!r} on the mesh; there they "
                f"should be {item.near_tie:.3g} apart; largest gap {item.largest_gap:.2e}: {beginning!r}"
            )
    what = "The mesh answers as one host does" if verdict.is_same else "The mesh does NOT answer as one host"
    if verdict.kv_bits:
        same, count = verdict.agreement
        out.append(
            f"Of {count} tokens with keys and values of {verdict.kv_bits} bits, {same} "
            f"({100 * same / max(1, count):.1f} %) are also the likeliest without. Quantising moves the "
            f"log-probability of a token by up to {verdict.noise:.2g}; ties within that may fall either way."
        )
    return [
        *out,
        f"{what} ({verdict.reference}); the largest gap of log-probability is {verdict.largest_gap:.2e}.",
    ]


def _ask(config: LaunchConfig, environment: Mapping[str, str], say: Say) -> list[Any]:
    """Bring a mesh up, ask everything, bring it down."""
    answers: list[Any] = []
    problems: list[Exception] = []
    folder = StateFolder(state_root(environment), config.name)

    def ask(url: str) -> None:
        try:
            with api_of(folder.read_running(), None, environment) as api:
                answers.extend(_complete(api, prompt) for prompt in PROMPTS)
        except Exception as error:  # carried to the caller's thread
            problems.append(error)

    up(config, folder, _Quiet(say), task=ask)
    if problems:
        raise problems[0]
    if len(answers) != len(PROMPTS):
        raise MeshError(f"{config.name} was stopped before all prompts were answered.")
    return answers


def _complete(api: Api, prompt: str) -> dict[str, list[Any]]:
    """The `logprobs` object of an answer with the token ids, put together from its stream."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "logprobs": 5,
        "stream": True,
        "skip_prefix_cache": True,  # all of it is to be computed
    }
    body |= {"return_token_ids": True}
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    found |= {"token_ids": [], "prompt_token_ids": []}
    for event in api.stream("/v1/completions", body):
        for choice in event.get("choices", []):
            for key, values in (choice | (choice.get("logprobs") or {})).items():
                if key in found and values:
                    found[key] += values
    if not found["tokens"]:
        raise MeshError(f"{api.url} returned no log-probabilities to compare.")
    return found


class _Quiet(Console):
    """Only warnings, and that it is ready."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def say(self, text: str) -> None:
        if text.startswith("warning:"):
            self._say(text)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Not here."""

    def progress(self, *args: Any, **kwargs: Any) -> None:
        """Not here."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """What went wrong is in the error; the ranks' logs are in files."""

    def ready(self, name: str, url: str, summary: str, hints: Sequence[str]) -> None:
        self._say(f"  {summary}")
