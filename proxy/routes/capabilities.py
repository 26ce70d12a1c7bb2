"""GET /v1/capabilities: what works here, at this world size, in machine-readable form."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.convert.common import Room
from mlx_mesh.proxy.errors import json_response
from mlx_mesh.proxy.grammars import CAN_FORCE_CALLS
from mlx_mesh.proxy.media.containers import kinds
from mlx_mesh.proxy.media.files import FORMATS
from mlx_mesh.proxy.media.item import NOUNS
from mlx_mesh.proxy.media.limits import (
    MAX_AUDIO_S,
    MAX_FILE_BYTES,
    MAX_FRAME_PIXELS,
    MAX_FRAMES,
    MAX_ITEMS,
    MAX_PIXELS,
    MAX_TOTAL_BYTES,
    MAX_TOTAL_PIXELS,
)
from mlx_mesh.proxy.routes.common import services_of
from mlx_mesh.proxy.schemas.chat import CHAT_FIELDS
from mlx_mesh.proxy.schemas.common import MAX_CHOICES, MAX_STOP_CHARS, MAX_STOPS, MAX_TOP_LOGPROBS
from mlx_mesh.proxy.schemas.completions import COMPLETION_FIELDS, MAX_PROMPTS
from mlx_mesh.proxy.schemas.embeddings import (
    EMBEDDING_FIELDS,
    MAX_INPUTS,
    OLLAMA_EMBED_FIELDS,
    OLLAMA_EMBEDDINGS_FIELDS,
)
from mlx_mesh.proxy.schemas.fields import FieldPolicy
from mlx_mesh.proxy.schemas.messages import MESSAGES_FIELDS
from mlx_mesh.proxy.schemas.ollama import OLLAMA_CHAT_FIELDS, OLLAMA_GENERATE_FIELDS
from mlx_mesh.proxy.schemas.responses import RESPONSES_FIELDS

router = APIRouter()

_ENDPOINTS = (
    ("/v1/chat/completions", True, CHAT_FIELDS),
    ("/v1/completions", False, COMPLETION_FIELDS),
    ("/v1/responses", True, RESPONSES_FIELDS),
    ("/v1/messages", True, MESSAGES_FIELDS),
    ("/api/chat", True, OLLAMA_CHAT_FIELDS),
    ("/api/generate", True, OLLAMA_GENERATE_FIELDS),
)
"""Path, whether it needs a chat template, and its fields."""

_EMBEDDINGS = (
    ("/v1/embeddings", EMBEDDING_FIELDS),
    ("/api/embed", OLLAMA_EMBED_FIELDS),
    ("/api/embeddings", OLLAMA_EMBEDDINGS_FIELDS),
)


@router.get("/v1/capabilities")
async def capabilities(request: Request) -> Response:
    services = services_of(request)
    template_error = services.tokenizer.chat_template_error
    return json_response(
        {
            "world_size": services.client.readiness.world_size,
            "replicas": services.client.readiness.num_replicas,
            "model": services.config.model_id,
            "version": services.config.version,
            # Nothing in this version depends on the world size; what comes to do so is listed here.
            "differences_by_world_size": [],
            "endpoints": {
                path: {
                    "available": not (template_error and needs_template),
                    "reason": template_error if needs_template else "",
                    "stream": True,
                    "fields": _fields(policy),
                }
                for path, needs_template, policy in _ENDPOINTS
            }
            | {
                path: {
                    "available": bool(services.embedding_names),
                    "reason": "" if services.embedding_names else "started without --embedding-model",
                    "stream": False,
                    "fields": _fields(policy),
                }
                for path, policy in _EMBEDDINGS
            },
            "features": {
                "streaming": True,
                "continuous_batching": not services.client.readiness.alone_reason,
                "chunked_prefill": not services.client.readiness.whole_reason,
                "logprobs": True,
                "seed": True,
                "stop_strings": True,
                "penalties": True,
                "logit_bias": True,
                "tools": services.tokenizer.takes_tools,
                "forced_tool_choice": services.tokenizer.can_constrain
                and services.tokenizer.markup.family in CAN_FORCE_CALLS,
                "reasoning_split": services.tokenizer.markup.has_reasoning,
                "choices": True,
                "cancel": True,
                "structured_output": services.tokenizer.can_constrain,
                "images": not services.media.refusal("image"),
                "audio": not services.media.refusal("audio"),
                "video": not services.media.refusal("video"),
                "embeddings": bool(services.embedding_names),
                "prefix_cache": services.config.keeps_prefixes,
                "prefixes_per_api_key": services.config.has_prefixes_per_key,
            },
            "reasons": {  # of features that this model does not have
                "continuous_batching": services.client.readiness.alone_reason,
                "chunked_prefill": services.client.readiness.whole_reason,
            },
            "kv_cache": {
                "bits": services.config.kv_bits or None,
                "group_size": services.config.kv_group_size if services.config.kv_bits else None,
                "quantized_from_token": 0 if services.config.kv_bits else None,
            },
            "limits": {
                "context_length": services.client.readiness.context_length,
                "max_sequence_tokens": Room.of(services).num_tokens,
                "max_body_bytes": services.config.max_body_bytes,
                "max_stop_strings": MAX_STOPS,
                "max_stop_string_chars": MAX_STOP_CHARS,
                "max_top_logprobs": MAX_TOP_LOGPROBS,
                "max_prompts": MAX_PROMPTS,
                "max_embedding_inputs": MAX_INPUTS,
                "max_choices": MAX_CHOICES,
                "max_images": MAX_ITEMS["image"],
                "max_image_bytes": MAX_FILE_BYTES["image"],
                "max_images_bytes": MAX_TOTAL_BYTES,
                "max_image_pixels": MAX_PIXELS,
                "max_images_pixels": MAX_TOTAL_PIXELS,
                "max_audios": MAX_ITEMS["audio"],
                "max_audio_bytes": MAX_FILE_BYTES["audio"],
                "max_audio_seconds": MAX_AUDIO_S,
                "max_videos": MAX_ITEMS["video"],
                "max_video_bytes": MAX_FILE_BYTES["video"],
                "max_video_frames": MAX_FRAMES,
                "max_video_frame_pixels": MAX_FRAME_PIXELS,
                "max_media_bytes": MAX_TOTAL_BYTES,
            },
            "media": {
                kind: {
                    "available": not services.media.refusal(kind),
                    "reason": services.media.refusal(kind),
                    "media_types": _media_types(kind),
                    "url_domains": sorted(services.media.fetcher.allowed),
                }
                for kind in NOUNS
            },
        }
    )


def _media_types(kind: str) -> list[str]:
    if kind == "image":
        return [names[0] for names in FORMATS.values()]
    return [container.types_as(kind)[0] for container in kinds(kind)]


def _fields(policy: FieldPolicy) -> dict[str, Any]:
    return {
        "honoured": sorted(policy.honoured),
        "refused": {name: rule.reason for name, rule in policy.refused.items()},
        "ignored": dict(policy.ignored),
    }
