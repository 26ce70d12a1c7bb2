"""Errors as OpenAI's clients expect them: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from mlx_mesh.mesh.errors import MeshError, RequestRejected
from mlx_mesh.node.client import GenerationFailed, StatusUnavailable
from mlx_mesh.proxy.open_answers import CancelledByRequest
from mlx_mesh.proxy.tokenizer import EncodeTimeout, TemplateRefused

RETRY_AFTER_S = 5
"""What a client is told to wait when nothing better is known."""

_STATUS_OF_CODE = {
    "context_length_exceeded": 400,
    "kv_memory_exceeded": 400,
    "empty_prompt": 400,
    "model_not_found": 404,
    "queue_full": 429,
    "rate_limit_exceeded": 429,
    "not_ready": 503,
    "draining": 503,
    "coordinator_lost": 503,
    "cancelled": 503,
    "timeout": 504,
    "request_timeout": 504,
}
"""Statuses of the coordinator's codes. Others: 400 for `invalid_*` and `unsupported_*`, 503 with a
Retry-After when the coordinator asks for another try, else 500."""


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path.removeprefix("/v1") in ("/messages", "/messages/count_tokens")


class ApiError(MeshError):
    """An answer other than success. `param` is the request field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self, path: str = "") -> Response:
        """In the shape of the dialect that `path` belongs to."""
        return json_response(self.body(path), self.status, self.headers())

    def body(self, path: str) -> dict[str, Any]:
        if is_anthropic(path):
            return self.anthropic()
        return self.ollama() if path.startswith("/api/") else self.envelope()

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def ollama(self) -> dict[str, Any]:
        return {"error": str(self)}


def invalid(message: str, *, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, code=code, param=param)


def not_ready(reason: str, code: str = "") -> ApiError:
    """`code`: of a mesh that does not become ready by itself, see Readiness; `reason` says what helps."""
    if code:
        return ApiError(503, f"{reason.rstrip('.')}.", code=code)
    return ApiError(
        503, f"The mesh is not ready: {reason.rstrip('.')}.", code="not_ready", retry_after_s=RETRY_AFTER_S
    )


def shutting_down() -> ApiError:
    return ApiError(503, "The mesh is shutting down.", code="draining", retry_after_s=RETRY_AFTER_S)


def to_api_error(error: Exception) -> ApiError:
    """What a failure below the HTTP front end means for its client."""
    match error:
        case ApiError():
            return error
        case GenerationFailed(code=code, retry_after_s=retry_after_s):
            status = _status_of(code, retry_after_s)
            if status in (429, 503):
                retry_after_s = retry_after_s or RETRY_AFTER_S
            return ApiError(
                status, str(error), code=code, param=error.param or None, retry_after_s=retry_after_s
            )
        case RequestRejected(code=code, param=param):
            return ApiError(_STATUS_OF_CODE.get(code, 400), str(error), code=code, param=param)
        case CancelledByRequest():
            return ApiError(400, str(error), code="request_cancelled")
        case TemplateRefused():
            return invalid(str(error), param="messages", code="chat_template_error")
        case EncodeTimeout():
            return ApiError(503, str(error), code="tokenize_timeout", retry_after_s=RETRY_AFTER_S)
        case StatusUnavailable():
            return ApiError(503, str(error), code="status_unavailable", retry_after_s=RETRY_AFTER_S)
        case _:
            # Our own mistake: its text may hold anything, so it goes to the log only.
            return ApiError(500, "The server failed; its log has the details.", code="internal_error")


def _status_of(code: str, retry_after_s: int) -> int:
    if code in _STATUS_OF_CODE:
        return _STATUS_OF_CODE[code]
    if code.startswith(("invalid", "unsupported")):
        return 400
    return 503 if retry_after_s else 500


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json"
    )
