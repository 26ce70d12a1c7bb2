"""Who is paired with whom: the folder `.pairing` in the state folder, for this user only.

As a host: the key that `mlx-mesh agent` shows, and the launchers that may use this host. As a launcher: the
key that it proves itself with, and the hosts that it trusts. No mesh can have the folder's name.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from mlx_mesh.launcher.known_hosts import fingerprint
from mlx_mesh.launcher.state import state_root
from mlx_mesh.mesh.errors import SettingsError

MAX_PAIRED = 64
MAX_FILE_BYTES = 1 << 20

_one_writer = threading.Lock()
"""Hosts are connected to side by side, and each may change what is kept of it."""

T = TypeVar("T")


class PairedHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose agent this launcher trusts."""

    name: str
    key: str  # fingerprint
    addresses: tuple[str, ...]  # at which it was last reached or announced, best first
    port: int
    paired_at: float  # seconds since 1970


class PairedLauncher(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher that may run ranks on this host."""

    label: str  # user@host, as it says
    key: str  # fingerprint
    address: str  # from which it paired
    paired_at: float


class Pairings:
    """The folder. Every method reads or writes it anew."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.folder = state_root(environment) / ".pairing"

    def key_of(self, side: str) -> paramiko.PKey:
        """The Ed25519 key of "agent" or "launcher", made when there is none. Raises SettingsError."""
        path = self.folder / f"{side}_key"
        try:
            if not path.exists():
                self._make_key(path)
            if path.stat().st_mode & 0o077:
                raise SettingsError(f"{path} can be read by others. Run `chmod 600 {path}`.")
            return paramiko.Ed25519Key.from_private_key_file(str(path))
        except (OSError, paramiko.SSHException, ValueError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(
                f"The key {path} cannot be used ({error}). Remove it; hosts must then be paired again."
            ) from error

    def _make_key(self, path: Path) -> None:
        self._make_folder()
        text = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        _write(draft, text)
        try:
            path.hardlink_to(draft)
        except FileExistsError:  # another process was faster
            pass
        finally:
            draft.unlink()

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def hosts(self) -> list[PairedHost]:
        return self._read("hosts", PairedHost)

    def launchers(self) -> list[PairedLauncher]:
        return self._read("launchers", PairedLauncher)

    def keep_host(self, host: PairedHost) -> None:
        """Add it, or replace what is known of the same key."""
        with _one_writer:
            others = [each for each in self.hosts() if each.key != host.key]
            self._write("hosts", [host, *others])

    def keep_launcher(self, launcher: PairedLauncher) -> None:
        with _one_writer:
            others = [each for each in self.launchers() if each.key != launcher.key]
            self._write("launchers", [launcher, *others])

    def forget_host(self, name: str) -> list[PairedHost]:
        """By name or fingerprint; which ones they were."""
        hosts = self.hosts()
        gone = [each for each in hosts if name in (each.name, each.key)]
        self._write("hosts", [each for each in hosts if each not in gone])
        return gone

    def forget_launchers(self) -> list[PairedLauncher]:
        """All; which ones they were."""
        gone = self.launchers()
        self._write("launchers", [])
        return gone

    def _read(self, what: str, of: type[T]) -> list[T]:
        path = self.folder / f"{what}.json"
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise SettingsError(f"{path} is too large to be ours. Remove it and pair again.")
            return msgspec.json.decode(path.read_bytes(), type=list[of])  # type: ignore[valid-type]
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            raise SettingsError(f"{path} cannot be read ({error}). Remove it and pair again.") from error

    def _write(self, what: str, entries: list[T]) -> None:
        if not entries and not (self.folder / f"{what}.json").exists():
            return
        if len(entries) > MAX_PAIRED:
            raise SettingsError(f"{len(entries)} {what} are paired; {MAX_PAIRED} is the limit. Forget some.")
        self._make_folder()
        draft = self.folder / f".{what}.{secrets.token_hex(4)}"
        _write(draft, msgspec.json.format(msgspec.json.encode(entries), indent=1) + b"\n")
        draft.replace(self.folder / f"{what}.json")


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def fingerprint_of(key: paramiko.PKey) -> str:
    """SHA256:..., as `ssh-keygen -l` prints it."""
    return fingerprint(key.get_base64())
