"""CURVE keys derived from the mesh secret, and the allow-list that goes with them.

Every process of a mesh derives the same two key pairs: one that servers (coordinator, leader engine) show and
one that clients show. CURVE alone admits any client that knows the server's public key, so servers also
check the client's key over ZAP (https://rfc.zeromq.org/spec/27/).
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.auth
from zmq.utils import z85

ZAP_DOMAIN = "mlx-mesh"
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class MeshKeys:
    """Z85 keys; `*_secret` must not be logged."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def derive_keys(secret: str) -> MeshKeys:
    """Both key pairs of a mesh. Raises ValueError for a secret under 16 characters."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the mesh secret has {len(secret)} characters; at least {MIN_SECRET_BYTES} are needed"
        )
    server_public, server_secret = _pair(secret, b"mlx-mesh-server")
    client_public, client_secret = _pair(secret, b"mlx-mesh-client")
    return MeshKeys(server_public, server_secret, client_public, client_secret)


def _pair(secret: str, who: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(hashlib.blake2b(secret.encode(), digest_size=32, person=who).digest())
    return zmq.curve_public(private), private


class AllowOnlyClientKey:
    """The credentials provider for pyzmq's authenticators: exactly one key is right."""

    def __init__(self, keys: MeshKeys) -> None:
        self._allowed = keys.client_public
        self.num_denied = 0

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq for each handshake with the client's key in Z85."""
        allowed = hmac.compare_digest(key, self._allowed)
        self.num_denied += not allowed
        return allowed


def secure_server(socket: zmq.Socket[Any], keys: MeshKeys) -> None:
    """Make a socket that binds demand CURVE. An authenticator for ZAP_DOMAIN must run in its context:
    `authenticator.configure_curve_callback(ZAP_DOMAIN, AllowOnlyClientKey(keys))`."""
    socket.curve_publickey = keys.server_public
    socket.curve_secretkey = keys.server_secret
    socket.curve_server = True
    socket.zap_domain = ZAP_DOMAIN.encode()


def secure_client(socket: zmq.Socket[Any], keys: MeshKeys) -> None:
    """Make a socket that connects speak CURVE to a server of the same mesh."""
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret
    socket.curve_serverkey = keys.server_public
