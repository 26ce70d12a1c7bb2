"""A rank's files of kept prefixes at bring-up: which are right for it, and which all ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.messages import EngineConfig, Load
from mlx_mesh.mesh.prefix_settings import limits_of
from mlx_mesh.node.engine.prefix_disk import DiskWriter, Loaded, PrefixFolder, identity_of
from mlx_mesh.node.engine.prefix_saving import Saving
from mlx_mesh.node.engine.shard import LoadedShard


@dataclass(slots=True)
class PrefixFiles:
    """`loaded`: what this rank has, most recently used first."""

    loaded: Sequence[Loaded] = ()
    saving: Saving | None = None

    def take(self, keys: Sequence[str]) -> list[Loaded]:
        """Those with these keys, which all ranks have, in their order. Nothing stays here: what is evicted
        later, or not on all ranks, must not keep its memory."""
        by_key, self.loaded = {one.key: one for one in self.loaded}, ()
        return [by_key[key] for key in keys]


def open_files(
    config: EngineConfig, command: Load, shard: LoadedShard, on_file: Callable[[], None]
) -> PrefixFiles:
    """Read what is there; `on_file` after each. Files are right for one rank of one split of the same model
    files, with the same form of caches and the same versions."""
    settings, placement = command.prefix, command.placement
    if not settings.folder or not settings.is_enabled:
        return PrefixFiles()
    identity = identity_of(
        command.model,
        command.adapter,
        placement.sharding.value,
        [(one.start_layer, one.end_layer, one.weight) for one in placement.shards],
        command.kv_options,
        metadata.version("mlx"),
        metadata.version("mlx-lm"),
    )
    path = Path(settings.folder).expanduser()
    folder = PrefixFolder(path, identity, config.rank, settings.max_disk_bytes)
    limits = limits_of(settings, command.kv)
    new_caches = shard.new_caches or (lambda: make_prompt_cache(shard.model))
    loaded = folder.load(new_caches, limits[min(config.rank, len(limits) - 1)], on_file)
    return PrefixFiles(loaded, Saving(DiskWriter(folder)))
