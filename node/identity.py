"""Which host this is: what makes two hosts of the same name, or one host on two networks, tell apart."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from mlx_mesh.mesh.discovery import Announcement, announced, hardware_digest, host_name
from mlx_mesh.mesh.interfaces import Interface
from mlx_mesh.node.facts import hardware, installed_versions
from mlx_mesh.node.system import ask, is_mac

SSH_FOLDER = Path("/etc/ssh")
_KEY_FILES = ("ssh_host_ed25519_key.pub", "ssh_host_ecdsa_key.pub", "ssh_host_rsa_key.pub")


def hardware_uuid() -> str:
    """A Mac's; '' elsewhere: Linux has only an id of its disk, which copies share."""
    if not is_mac():
        return ""
    match = re.search(
        r'"platform_UUID"\s*:\s*"([^"]+)"', ask(["system_profiler", "SPHardwareDataType", "-json"])
    )
    return match[1] if match else ""


def ssh_fingerprint(folder: Path = SSH_FOLDER) -> str:
    """Of the host key that `ssh` shows first, as `ssh-keygen -l` prints it; '' when sshd never ran here."""
    for name in _KEY_FILES:
        with contextlib.suppress(OSError, ValueError, IndexError):
            blob = base64.b64decode((folder / name).read_text("ascii").split()[1], validate=True)
            return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return ""


def describe_host(run: str, interfaces: Sequence[Interface]) -> Announcement:
    """What every process of this host says of it, over these interfaces."""
    chip, memory_bytes, _ = hardware()
    return Announcement(
        host=host_name(socket.gethostname()),
        run=run,
        role="node",
        hardware=hardware_digest(hardware_uuid()),
        ssh=ssh_fingerprint(),
        chip=re.sub(r"[^ -~]", "", chip)[:64],
        memory_bytes=memory_bytes,
        versions=installed_versions(),
        interfaces=announced(interfaces),
    )
