"""The proxy as a coordinator sees it."""

from __future__ import annotations

from typing import Protocol

from mlx_mesh.mesh.messages import ProxyConfig, ProxyEvent


class FrontEnd(Protocol):
    """One proxy, behind which there may be several coordinators."""

    @property
    def is_ready(self) -> bool: ...
    def send(self, event: ProxyEvent) -> None: ...
    async def replace(self, config: ProxyConfig, stop_s: float) -> None: ...

    def rescue(self) -> int:
        """Let other replicas go on with the open requests that no engine has; returns how many went."""
        ...

    def others_serve(self) -> bool:
        """Some other replica serves, or will soon."""
        ...
