"""The model that is served: its sizes, its place on the hosts, what ranks and front end are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from mlx_mesh.mesh.capacity import usable_context
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.kv_budget import KvBudget, kv_budget
from mlx_mesh.mesh.kv_options import with_kv_options
from mlx_mesh.mesh.messages import AgentConfig, PlanChosen, ProxyConfig
from mlx_mesh.mesh.rdma import BackendChoice
from mlx_mesh.mesh.topology import AddressPlan
from mlx_mesh.mesh.types import Backend, Placement, Sharding, VisionMode
from mlx_mesh.node.bring_up import EpochPlan
from mlx_mesh.node.gathering import backend_of, place_model, plan_links
from mlx_mesh.node.inspection import Inspector
from mlx_mesh.node.output import Output
from mlx_mesh.node.roster import Roster
from mlx_mesh.node.switching import Served

_PIPELINE_PREFILL = 512  # chunks small enough that all stages work on one prompt
_PREFILL = 2048  # mlx-lm's default


class ServedModel:
    """At first the one that the mesh was started with; `take` puts another one in its place."""

    def __init__(
        self, config: AgentConfig, roster: Roster, inspector: Inspector, output: Output, folder: Path | None
    ) -> None:
        """`folder`: of the model on this host, None when it is missing."""
        assert config.mesh is not None
        self._config = config
        self._mesh = config.mesh
        self._roster = roster
        self._inspector = inspector
        self._output = output
        self.name = config.model
        self.folder = folder
        self.digest = ""
        self.footprint: ModelFootprint | None = None
        self.placement: Placement | None = None
        self.backend = BackendChoice(backend=Backend.AUTO, reason="")
        self.addresses = AddressPlan()

    @property
    def is_first(self) -> bool:
        """The one that the mesh was started with."""
        return self.name == self._config.model

    # ------------------------------------------------------------ sizes

    async def inspect(self, folder: Path) -> None:
        """Learn the sizes of the first model. Raises PlacementError."""
        self.footprint = await self.sizes_of(folder, is_first=True)
        if not self.footprint.media and (why := self.footprint.media_refusals.get("image")):
            self._output.note(f"prompts hold text only: {why}")
        if self.footprint.alone_reason:
            self._output.note(f"one sequence at a time: {self.footprint.alone_reason}")
        if self.footprint.whole_reason:
            self._output.note(f"each prompt is read in one piece: {self.footprint.whole_reason}")
        if self.footprint.untried_reason:
            self._output.note(f"untried: {self.footprint.untried_reason}")

    async def sizes_of(self, folder: Path, *, is_first: bool) -> ModelFootprint:
        """Of any model, with caches as this mesh keeps them; of the first one with its adapter and towers.
        Raises PlacementError."""
        adapter = Path(self._config.adapter) if is_first and self._config.adapter else None
        vision = self._mesh.vision if is_first else VisionMode.AUTO
        found = await self._inspector.sizes_of(folder, self._mesh.deadlines.spawn_s, adapter, vision)
        return with_kv_options(found, self._mesh.kv_options)

    @property
    def context_length(self) -> int:
        own = self.footprint.context_length if self.footprint is not None else 0
        return usable_context(self._mesh.context_length, own)

    @property
    def kv_budget(self) -> KvBudget:
        if self.footprint is None or self.placement is None:
            return KvBudget()
        return kv_budget(self.footprint, self.placement)

    # ------------------------------------------------------------ its place

    def place(self, hosts: Sequence[int]) -> Placement:
        """On the seats of these numbers. Raises PlacementError."""
        assert self.footprint is not None
        return place_model(self._roster, self.footprint, hosts)

    def set_placement(self, placement: Placement) -> None:
        self.placement = placement
        self.backend = backend_of(self._roster)
        self._output.event(
            PlanChosen(placement=placement, backend=self.backend.backend, backend_reason=self.backend.reason)
        )

    def plan_epoch(self, *, is_first: bool) -> EpochPlan:
        """Placement (once) and addresses, for the next epoch. Raises PlacementError."""
        assert self.footprint is not None
        if self.placement is None:
            self.set_placement(self.place(range(len(self._roster.seats))))
        assert self.placement is not None
        self.addresses = plan_links(self._roster, self.backend.backend)
        is_pipeline = self.placement.sharding is Sharding.PIPELINE
        mesh = self._mesh
        return EpochPlan(
            epoch=self._roster.epoch.number + 1,
            placement=self.placement,
            backend=self.backend.backend,
            rdma=self.backend.devices,
            addresses=self.addresses,
            model=self.name,
            is_switched=not self.is_first,
            model_digest=self.digest,
            max_sequences=1 if self.footprint.alone_reason else mesh.max_sequences,
            prefill_step_size=mesh.prefill_step_size or (_PIPELINE_PREFILL if is_pipeline else _PREFILL),
            context_length=self.context_length,
            kv=self.kv_budget,
            prefix=mesh.prefix,
            kv_options=mesh.kv_options,
            with_vision=bool(self.footprint.media),
            is_first=is_first,
            is_paranoid=mesh.paranoid,
        )

    # ------------------------------------------------------------ another one

    def as_served(self) -> Served:
        assert self.footprint is not None and self.folder is not None
        return Served(
            self.name, self.folder, self.footprint, self.placement, self.digest, is_first=self.is_first
        )

    def take(self, served: Served) -> None:
        """From the next epoch on."""
        self.name, self.folder, self.footprint = served.name, served.folder, served.footprint
        self.digest = served.digest
        seated = [self._roster.host_of(rank) for rank in range(self._roster.world_size)]
        if served.placement is not None and [one.host for one in served.placement.shards] == seated:
            self.set_placement(served.placement)
        else:  # hosts came or went: it is planned for those that are there
            self.placement = None

    # ------------------------------------------------------------ for the front end

    @property
    def id(self) -> str:
        """The id in answers: a hub id as it is, of a folder its name."""
        if self.is_first and self._mesh.served_model_names:
            return self._mesh.served_model_names[0]
        return _name_of(self.name)

    def proxy_config(self) -> ProxyConfig:
        mesh, is_first = self._mesh, self.is_first
        return ProxyConfig(
            model=str(self.folder or self._config.model),
            model_id=self.id,
            served_model_names=mesh.served_model_names if is_first else (),
            serve_host=mesh.serve_host,
            serve_port=mesh.serve_port,
            listen_fd=-1,
            api_keys=mesh.api_keys,
            allowed_origins=mesh.allowed_origins,
            allowed_media_domains=mesh.allowed_media_domains,
            chat_template=mesh.chat_template if is_first else "",
            strip_thinking=mesh.strip_thinking,
            keeps_prefixes=mesh.prefix.is_enabled,
            has_prefixes_per_key=mesh.prefix.is_per_key,
            kv_bits=mesh.kv_options.bits,
            kv_group_size=mesh.kv_options.group_size,
            version=metadata.version("mlx-mesh"),
            embedding_model=_name_of(mesh.embedding_model) if mesh.embedding_model else "",
        )


def _name_of(model: str) -> str:
    """A hub id as it is, of a folder its name."""
    given = Path(model).expanduser()
    return given.resolve().name if given.is_dir() else model
