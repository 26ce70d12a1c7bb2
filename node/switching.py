"""Another model in the same mesh: which may be asked for, and what is known of it before the old one goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.types import Placement


@dataclass(frozen=True, slots=True)
class Served:
    """A model with all that an epoch and a proxy need of it."""

    name: str  # as it was asked for: a folder or a hub id, the same on every host
    folder: Path  # on the leader
    footprint: ModelFootprint
    placement: Placement | None  # None = to be planned for the hosts that are there
    digest: str = ""  # of a folder that every rank compares with its own; the first model was compared before
    is_first: bool = False  # the one that the mesh was started with, which each host keeps where it likes


@dataclass(slots=True)
class Switch:
    """One switch from its order to its end. `old` comes back when `new` does not come up."""

    new: Served
    old: Served
    has_begun: bool = False


def refusal(name: str, served: str, allowed: tuple[str, ...], is_busy: bool) -> tuple[str, str]:
    """Code and words, '' when the model may be asked for."""
    if name not in (*allowed, served) or not allowed:
        known = ", ".join(allowed) if allowed else "none: start the mesh with --allow-model"
        return "model_not_allowed", f"The model '{name}' may not be loaded here. Those that may: {known}."
    if is_busy:
        return "switch_in_progress", "Another model is being loaded; ask again when it is there."
    return "", ""
