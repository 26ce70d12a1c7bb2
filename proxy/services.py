"""What every request handler works with, built once at start."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mlx_mesh.mesh.messages import ProxyConfig
from mlx_mesh.node.client import CoordinatorClient
from mlx_mesh.proxy.conversation import Conversations
from mlx_mesh.proxy.errors import ApiError, not_ready, shutting_down
from mlx_mesh.proxy.grammar_check import GrammarChecker
from mlx_mesh.proxy.media.desk import MediaDesk
from mlx_mesh.proxy.metrics import Metrics
from mlx_mesh.proxy.open_answers import OpenAnswers
from mlx_mesh.proxy.response_store import ResponseStore
from mlx_mesh.proxy.tokenizer import ModelTokenizer

ANY_MODEL = ("local", "default")
"""The names that mean whatever is served."""


@dataclass(frozen=True, slots=True)
class Services:
    config: ProxyConfig
    client: CoordinatorClient
    tokenizer: ModelTokenizer
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))
    open_answers: OpenAnswers = field(default_factory=OpenAnswers)
    responses: ResponseStore = field(default_factory=ResponseStore)
    conversations: Conversations = field(default_factory=Conversations)
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    media: MediaDesk = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "media", MediaDesk(self.config, self.tokenizer, self.client))

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers: changes with what may change a seeded answer."""
        return f"mlx-mesh-{self.config.version}-{self.client.readiness.world_size}"

    @property
    def listed_models(self) -> tuple[str, ...]:
        """The served model under each of its public names, its own first."""
        return tuple(dict.fromkeys((self.config.model_id, *self.config.served_model_names)))

    @property
    def accepted_names(self) -> tuple[str, ...]:
        """Every name by which a request may call the model: also the last part of its id, and its folder."""
        base_name = self.config.model_id.rstrip("/").rpartition("/")[2]
        return tuple(dict.fromkeys((*self.listed_models, base_name, *ANY_MODEL, self.config.model)))

    @property
    def embedding_names(self) -> tuple[str, ...]:
        """Every name by which a request may call the embedding model; () when there is none."""
        model = self.config.embedding_model
        return tuple(dict.fromkeys((model, model.rpartition("/")[2]))) if model else ()

    def require_embedding_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless there is one and this names it; None is whatever there is."""
        if not self.embedding_names:
            raise ApiError(
                404,
                "No embedding model is served here. Start the mesh with --embedding-model FOLDER "
                "(docs/cli.md says which models can be used).",
                code="no_embedding_model",
                param="model",
            )
        if name is not None and name not in self.embedding_names:
            raise ApiError(
                404,
                f"The model '{name}' makes no embeddings here; {self.config.embedding_model} does.",
                code="model_not_found",
                param="model",
            )

    def require_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless this names the served model."""
        if name in self.embedding_names:
            raise ApiError(
                404,
                f"The model '{name}' makes embeddings only, at /v1/embeddings.",
                code="model_not_found",
                param="model",
            )
        if name is not None and name not in self.accepted_names:
            raise ApiError(
                404,
                f"The model '{name}' is not served here; this is {', '.join(self.listed_models)}.",
                code="model_not_found",
                param="model",
            )

    @property
    def not_ready_reason(self) -> str:
        """'' when requests are taken. Requests that are already open survive a recovery anyway."""
        if self.client.draining:
            return "the mesh is shutting down"
        readiness = self.client.readiness
        return "" if readiness.ready else readiness.reason or "no reason was given"

    def require_ready(self) -> None:
        """Raises ApiError 503 with the reason."""
        if self.client.draining:
            raise shutting_down()
        if reason := self.not_ready_reason:
            raise not_ready(reason, self.client.readiness.code)
