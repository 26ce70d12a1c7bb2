"""How a launcher and a host that never met prove to each other that they know the same code or secret.

SPAKE2 (RFC 9382, by the `spake2` package): whoever listens learns nothing, and whoever takes part can try one
code per attempt. What is proven is bound to both sides' SSH keys and to the very connection, so nobody in the
middle can pass it on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable

from mlx_mesh.mesh.errors import ExitCode, MeshError, SettingsError

SECRET_VARIABLE = "MLX_MESH_SECRET"
MIN_SECRET_CHARACTERS = 16
NUM_DIGITS = 8
CODE_LIFE_S = 600.0
CODE_TRIES = 3
SECRET_FAILURES = 10
SECRET_PAUSE_S = 60.0


class PairingRefused(MeshError):
    """The two did not come together. The message says why, for the log of the side that raises it."""

    exit_code = ExitCode.PREFLIGHT


def binding(host_key: bytes, launcher_key: bytes, session: bytes) -> bytes:
    """What both sides must see alike: the keys that they show, and the SSH session between them."""
    digest = hashlib.sha256(b"mlx-mesh pairing 1")
    for part in (host_key, launcher_key, session):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


class LauncherSide:
    """`begin`, then `check` with what the host answered."""

    def __init__(self, password: str, bound_to: bytes) -> None:
        from spake2 import SPAKE2_A  # it computes tables when it is imported

        self._spake = SPAKE2_A(password.encode(), idA=b"launcher" + bound_to, idB=b"host" + bound_to)

    def begin(self) -> bytes:
        return bytes(self._spake.start())

    def check(self, message: bytes, proof: bytes) -> bytes:
        """Our own proof, once the host's is right. Raises PairingRefused."""
        key = _finish(self._spake.finish, message)
        if not hmac.compare_digest(proof, _proof(key, b"host")):
            raise PairingRefused("the code or secret is not the one that the host has.")
        return _proof(key, b"launcher")


class HostSide:
    """`answer`, then `check`."""

    def __init__(self, password: str, bound_to: bytes) -> None:
        from spake2 import SPAKE2_B

        self._spake = SPAKE2_B(password.encode(), idA=b"launcher" + bound_to, idB=b"host" + bound_to)
        self._key = b""

    def answer(self, message: bytes) -> tuple[bytes, bytes]:
        """Our message and proof. Raises PairingRefused for a message that is none."""
        answer = bytes(self._spake.start())
        self._key = _finish(self._spake.finish, message)
        return answer, _proof(self._key, b"host")

    def check(self, proof: bytes) -> None:
        """Raises PairingRefused."""
        if not self._key or not hmac.compare_digest(proof, _proof(self._key, b"launcher")):
            raise PairingRefused("it does not know the code or secret.")


def _finish(finish: Callable[[bytes], bytes], message: bytes) -> bytes:
    from spake2 import SPAKEError

    try:
        return bytes(finish(message))
    except (SPAKEError, ValueError, AssertionError, IndexError) as error:
        raise PairingRefused(f"what it sent is no part of a pairing ({error!r}).") from error


def _proof(key: bytes, side: bytes) -> bytes:
    return hmac.new(key, b"mlx-mesh pairing proof " + side, hashlib.sha256).digest()


# ---------------------------------------------------------------- who may try, and how often


class OneTimeCode:
    """Eight digits that pair one launcher, once, soon, in few tries. Used from several threads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.code = f"{secrets.randbelow(10**NUM_DIGITS):0{NUM_DIGITS}d}"
        self._now = now
        self._expires_at = now() + CODE_LIFE_S
        self._num_tries = 0
        self._is_used = False
        self._lock = threading.Lock()

    @property
    def shown(self) -> str:
        """As people read it."""
        return f"{self.code[:4]}-{self.code[4:]}"

    @property
    def tries_left(self) -> int:
        return max(0, CODE_TRIES - self._num_tries)

    def begin(self) -> str:
        """The code, for one attempt, which counts from now on. Raises PairingRefused."""
        with self._lock:
            self._refuse_if_over()
            self._num_tries += 1
            return self.code

    def use(self) -> None:
        """An attempt succeeded. Raises PairingRefused when another one was faster, or the time is over."""
        with self._lock:
            if self._is_used or self._now() > self._expires_at:
                self._refuse_if_over()
            self._is_used = True

    def failed(self) -> None:
        """An attempt ended without success; it was counted when it began."""

    def _refuse_if_over(self) -> None:
        again = "Start `mlx-mesh agent --pair` anew for another one."
        if self._is_used:
            raise PairingRefused(f"the code was used already. {again}")
        if self._now() > self._expires_at:
            raise PairingRefused(f"the code was good for {CODE_LIFE_S / 60:g} minutes. {again}")
        if not self.tries_left:
            raise PairingRefused(f"the code was tried {CODE_TRIES} times. {again}")


class SharedSecret:
    """MLX_MESH_SECRET of this host: any number of launchers, but not any number of wrong guesses, one after
    the other or at once."""

    def __init__(self, secret: str, now: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._now = now
        self._failures: list[float] = []
        self._num_under_way = 0
        self._lock = threading.Lock()

    def begin(self) -> str:
        """The secret, for one attempt, which ends with `use` or `failed`. Raises PairingRefused."""
        with self._lock:
            self._failures = [at for at in self._failures if self._now() - at < SECRET_PAUSE_S]
            if len(self._failures) + self._num_under_way >= SECRET_FAILURES:
                raise PairingRefused(
                    f"{len(self._failures)} wrong secrets came within {SECRET_PAUSE_S:g} s, and "
                    f"{self._num_under_way} attempts are under way; wait that long."
                )
            self._num_under_way += 1
            return self._secret

    def use(self) -> None:
        """An attempt succeeded."""
        with self._lock:
            self._num_under_way -= 1

    def failed(self) -> None:
        with self._lock:
            self._num_under_way -= 1
            self._failures.append(self._now())


def check_code(text: str) -> str:
    """The digits of a code as somebody typed it. Raises SettingsError."""
    digits = "".join(character for character in text if character not in " -\t\r\n")
    if len(digits) != NUM_DIGITS or not digits.isascii() or not digits.isdigit():
        raise SettingsError(
            f"A code has {NUM_DIGITS} digits, as `mlx-mesh agent --pair` shows them on the other host, like "
            "1234-5678."
        )
    return digits


def check_secret(secret: str) -> str:
    """'' or a usable secret. Raises SettingsError."""
    if secret and len(secret) < MIN_SECRET_CHARACTERS:
        raise SettingsError(
            f"{SECRET_VARIABLE} has {len(secret)} characters; at least {MIN_SECRET_CHARACTERS} are needed. "
            'Make one with `python3 -c "import secrets; print(secrets.token_urlsafe(32))"`.'
        )
    return secret
