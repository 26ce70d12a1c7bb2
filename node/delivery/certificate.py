"""TLS between a sender and its receivers: one certificate per sender process, which the receivers learn over
SSH and accept alone. No name, no authority and no clock has a part in it."""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mlx_mesh.mesh.errors import MeshError

_BEGIN = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)  # hosts' clocks may be far apart
_END = datetime.datetime(2099, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Certificate:
    """`pem` may be told; the key stays in this process."""

    pem: str
    context: ssl.SSLContext


def make_certificate() -> Certificate:
    """A new key, its certificate, and a server's context with both."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mlx-mesh delivery")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:  # the library reads a chain from files only
        path = Path(folder) / "both.pem"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + pem)
        context.load_cert_chain(path)
    return Certificate(pem.decode(), context)


def client_context(pem: str) -> ssl.SSLContext:
    """Accepts this certificate and no other. Raises MeshError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=pem)
    except ssl.SSLError as error:
        raise MeshError(f"the sender's certificate cannot be used ({error})") from error
    return context


def is_pinned(connection: ssl.SSLSocket, pem: str) -> bool:
    """Whether the other side showed exactly this certificate."""
    return connection.getpeercert(binary_form=True) == ssl.PEM_cert_to_DER_cert(pem)
