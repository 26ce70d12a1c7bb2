"""HTTP/1.1 as uvicorn reads it, with our own words for what is no HTTP at all."""

from __future__ import annotations

from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_mesh.proxy.errors import ApiError

_HEAD = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"


class EnvelopeProtocol(H11Protocol):
    """Answers nonsense with the error envelope that all other answers have, and ends the connection."""

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when h11 cannot read on; `msg` is its own sentence."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            error = ApiError(400, f"{msg} This server speaks HTTP/1.1 without TLS.", code="invalid_http")
            body = bytes(error.response().body)
            self.transport.write(_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
