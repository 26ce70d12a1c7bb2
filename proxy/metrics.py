"""Counters of this process in Prometheus' text format, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mlx_mesh.node.client import CoordinatorClient

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (1, 2, 5, 10, 20, 40, 80, 160, 320)


class Metrics:
    """Names start with mlx_mesh_; nothing is labelled by user, prompt or model input."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._registry = CollectorRegistry()
        self.http_requests = Counter(
            "mlx_mesh_http_requests",
            "Answers by route and status",
            ("route", "status"),
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "mlx_mesh_prompt_tokens", "Prompt tokens of generated answers", registry=self._registry
        )
        self.cached_tokens = Counter(
            "mlx_mesh_cached_prompt_tokens", "Of these, taken from a cache", registry=self._registry
        )
        self.completion_tokens = Counter(
            "mlx_mesh_completion_tokens", "Generated tokens given to clients", registry=self._registry
        )
        self.images = Counter(
            "mlx_mesh_images", "Images of requests that were read and found good", registry=self._registry
        )
        self.image_bytes = Counter("mlx_mesh_image_bytes", "Bytes of their files", registry=self._registry)
        self.audio = Counter(
            "mlx_mesh_audio", "Audio files of requests that were decoded", registry=self._registry
        )
        self.audio_s = Counter("mlx_mesh_audio_seconds", "How long they are", registry=self._registry)
        self.videos = Counter(
            "mlx_mesh_videos", "Videos of requests that were decoded", registry=self._registry
        )
        self.video_frames = Counter(
            "mlx_mesh_video_frames", "Frames of them that the model was shown", registry=self._registry
        )
        self.embedding_tokens = Counter(
            "mlx_mesh_embedding_tokens", "Tokens of texts that became vectors", registry=self._registry
        )
        self.too_long = Counter(
            "mlx_mesh_requests_too_long",
            "Prompts that can never be served, by the limit that they exceed",
            ("limit",),
            registry=self._registry,
        )
        self.disconnects = Counter(
            "mlx_mesh_client_disconnects",
            "Clients gone before their answer was complete",
            registry=self._registry,
        )
        self.first_token_s = Histogram(
            "mlx_mesh_first_token_seconds",
            "Submission to first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.decode_rate = Histogram(
            "mlx_mesh_decode_tokens_per_second",
            "Decode rate of one answer",
            buckets=_RATES,
            registry=self._registry,
        )
        self._live(
            {
                "mlx_mesh_ready": ("1 when requests are taken", lambda: float(client.readiness.ready)),
                "mlx_mesh_open_requests": ("Sequences being generated", lambda: float(client.num_open)),
                "mlx_mesh_world_size": ("Ranks of the mesh", lambda: float(client.readiness.world_size)),
                "mlx_mesh_epoch": ("Current epoch", lambda: float(client.readiness.epoch)),
            }
        )

    def _live(self, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self._registry)
