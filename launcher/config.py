"""What one `mlx-mesh up` runs: the hostfile, the flags and the environment, checked and frozen."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from mlx_mesh.mesh.errors import HostfileError, SettingsError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.hostfile import DEFAULT_PORT, Hostfile, SyncMode, parse_hostfile
from mlx_mesh.mesh.hostfile_fields import check_media_domain, check_name
from mlx_mesh.mesh.interfaces import check_rules
from mlx_mesh.mesh.kv_options import KvOptions, check_kv_options
from mlx_mesh.mesh.log_lines import LogFormat
from mlx_mesh.mesh.messages import Deadlines, MeshConfig
from mlx_mesh.mesh.prefix_settings import PrefixSettings, check_keys
from mlx_mesh.mesh.replicas import divide
from mlx_mesh.mesh.types import Backend, Sharding, VisionMode

API_KEY_VARIABLE = "MLX_MESH_API_KEY"
MIN_KEY_CHARACTERS = 8
MAX_HOSTFILE_BYTES = 1024 * 1024
MAX_PATH_BYTES = 1024
MAX_PATH_PART_BYTES = 255
MAX_CHAT_TEMPLATE_CHARS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the command line says; None and () = not given."""

    model: str | None = None
    adapter: str | None = None
    vision: bool | None = None
    embedding_model: str | None = None
    allowed_models: tuple[str, ...] = ()
    log_format: LogFormat = "text"
    name: str | None = None
    num_replicas: int | None = None
    sharding: Sharding | None = None
    backend: Backend | None = None
    host: str | None = None
    port: int | None = None
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    strip_thinking: bool = False
    max_sequences: int | None = None
    max_queued_requests: int | None = None
    context: int | None = None
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    kv_bits: int | None = None
    kv_group_size: int | None = None
    quantized_kv_start: int | None = None
    ssh_config: str | None = None
    is_offline: bool = False
    sync: SyncMode | None = None
    paranoid: bool = False
    allow_wifi: bool = False
    interfaces: tuple[str, ...] = ()  # for all hosts; () = the hostfile's
    is_elastic: bool = False
    announce: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """One mesh to bring up. Built once."""

    name: str
    model: str
    hosts: tuple[HostEntry, ...]  # the first one leads; with replicas, parts of those of the hostfile
    num_replicas: int = 1
    adapter: str = ""  # folder of an adapter on each host; '' = none
    vision: VisionMode = VisionMode.AUTO
    embedding_model: str = ""  # folder or hub id on the leader; '' = no embeddings
    allowed_models: tuple[str, ...] = ()  # that may be loaded in place of `model`; alike on all hosts
    log_format: LogFormat = "text"
    hostfile: str = ""
    sharding: Sharding = Sharding.AUTO
    backend: Backend = Backend.AUTO
    serve_host: str = "127.0.0.1"
    serve_port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()  # hosts that files may be fetched from; () = none
    served_model_names: tuple[str, ...] = ()
    chat_template: str = ""  # its text; '' = the model's
    strip_thinking: bool = False
    max_sequences: int = 32
    max_queued_requests: int = 256
    context_length: int = 0  # 0 = the model's
    prefill_step_size: int = 0  # 0 = chosen by sharding
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    kv_options: KvOptions = field(default_factory=KvOptions)
    is_offline: bool = False  # no host asks the hub
    sync: SyncMode = "auto"
    ssh_config: str = ""  # '' = ~/.ssh/config
    notes: tuple[str, ...] = ()
    paranoid: bool = False
    allow_wifi: bool = False
    is_elastic: bool = False  # take hosts in again by itself
    announce: bool | None = None  # that hosts take part in this mesh; None = if it has several hosts
    faults: tuple[str, ...] = ()  # of --fault
    deadlines: Deadlines = field(default_factory=Deadlines)

    @property
    def brings_model(self) -> bool:
        """A model that a host lacks is brought there from another."""
        return self.sync == "auto" and len({host.machine or host.name for host in self.hosts}) > 1

    @property
    def num_ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    @property
    def world_size(self) -> int:
        """Ranks of each replica."""
        return self.num_ranks // self.num_replicas

    def hosts_of(self, replica: int) -> tuple[HostEntry, ...]:
        return tuple(host for host in self.hosts if host.replica == replica)


def plan_size(config: LaunchConfig) -> tuple[int, int]:
    """Memory is planned for sequences of so many tokens, and so many of them."""
    default = MeshConfig(name="", hosts=())
    return (
        config.context_length or default.plan_context,
        min(default.plan_sequences, config.max_sequences),
    )


def read_hostfile(path: str) -> Hostfile:
    """The checked hostfile at `path`. Raises HostfileError."""
    try:
        file = Path(path).expanduser()
        if file.exists() and not file.is_file():
            raise HostfileError(f"{path}: not a regular file; give the path of a hostfile")
        if file.stat().st_size > MAX_HOSTFILE_BYTES:
            raise HostfileError(f"{path}: larger than 1 MiB, so not a hostfile; check the path")
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise HostfileError(f"{path}:1: not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise HostfileError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    return parse_hostfile(text, path)


def local_hostfile(num_slots: int, name: str) -> Hostfile:
    """A hostfile of this machine alone, for `up --sim N` and `serve`."""
    return Hostfile(source="", name=name, hosts=(HostEntry(name="local", slots=num_slots),))


def build_config(hostfile: Hostfile, flags: Flags, environment: Mapping[str, str]) -> LaunchConfig:
    """Flags win over the file. Raises SettingsError."""
    model = flags.model or hostfile.model
    if not model:
        raise SettingsError(
            "No model is named. Give --model with a folder or a hub id"
            + (f", or add `model:` to {hostfile.source}." if hostfile.source else ".")
        )
    check_model_name(model)
    allowed_models, embedding_model = _other_models(hostfile, flags)
    num_replicas = hostfile.num_replicas if flags.num_replicas is None else flags.num_replicas
    if allowed_models and num_replicas > 1:
        raise SettingsError(
            "Switching models (--allow-model) does not go together with --replicas: a switch is all or "
            "nothing, and the replicas have lives of their own. Leave one of them out."
        )
    if flags.max_sequences is not None and flags.max_sequences < 1:
        raise SettingsError(f"--max-sequences {flags.max_sequences} is out of range; it must be at least 1.")
    if flags.max_queued_requests is not None and flags.max_queued_requests < 0:
        raise SettingsError(
            f"--max-queued-requests {flags.max_queued_requests} is out of range; it must be at least 0 (none "
            "waits)."
        )
    if flags.context is not None and flags.context < 1:
        raise SettingsError(f"--context {flags.context} is out of range; it must be at least 1 token.")
    if flags.port is not None and not 0 <= flags.port <= 65535:
        raise SettingsError(f"--port {flags.port} is out of range; it must be 0 (a free one) to 65535.")
    serve_host = flags.host if flags.host is not None else hostfile.serve_host
    api_keys = read_api_keys(flags.api_key_file, environment)
    if not is_loopback(serve_host) and not api_keys:
        raise SettingsError(
            f"Serving on {serve_host} lets other machines in, and there is no API key. Make one with "
            '`python3 -c "import secrets; print(secrets.token_urlsafe(32))" > key.txt` and add '
            f"--api-key-file key.txt (or set {API_KEY_VARIABLE}), or serve on 127.0.0.1."
        )
    for problem in check_rules(flags.interfaces):
        raise SettingsError(f"--interface {problem}.")
    name = flags.name or hostfile.name
    for problem in check_name(name):
        raise SettingsError(f"The mesh name {name!r} {problem}.")
    base = Path.cwd() if flags.model else _folder_of(hostfile)
    return LaunchConfig(
        name=name,
        model=anchor_model(model, base),
        adapter=anchor_adapter(hostfile.adapter, _folder_of(hostfile))
        if flags.adapter is None
        else anchor_adapter(flags.adapter, Path.cwd()),
        vision=VisionMode.of(hostfile.vision if flags.vision is None else flags.vision),
        log_format=flags.log_format,
        allowed_models=allowed_models,
        embedding_model=embedding_model,
        hosts=divide(
            [
                replace(host, models=_anchor(host), interfaces=flags.interfaces or host.interfaces)
                for host in hostfile.hosts
            ],
            num_replicas,
        ),
        num_replicas=num_replicas,
        hostfile=str(Path(hostfile.source).expanduser().resolve()) if hostfile.source else "",
        sharding=flags.sharding or hostfile.sharding,
        backend=flags.backend or hostfile.backend,
        serve_host=serve_host,
        serve_port=flags.port if flags.port is not None else hostfile.serve_port,
        api_keys=api_keys,
        allowed_origins=tuple(map(check_origin, flags.allowed_origins)),
        allowed_media_domains=tuple(map(read_media_domain, flags.allowed_media_domains))
        or hostfile.allowed_media_domains,
        api_key_file=str(Path(flags.api_key_file).expanduser().resolve()) if flags.api_key_file else "",
        served_model_names=flags.served_model_names,
        chat_template=read_chat_template(flags.chat_template) if flags.chat_template is not None else "",
        strip_thinking=flags.strip_thinking,
        max_sequences=flags.max_sequences or 32,
        max_queued_requests=256 if flags.max_queued_requests is None else flags.max_queued_requests,
        context_length=flags.context or 0,
        prefix=check_keys(flags.prefix, api_keys),
        kv_options=check_kv_options(flags.kv_bits, flags.kv_group_size, flags.quantized_kv_start),
        ssh_config=str(Path(flags.ssh_config).expanduser().resolve()) if flags.ssh_config else "",
        notes=hostfile.notes,
        is_offline=flags.is_offline,
        sync=flags.sync or hostfile.sync,
        paranoid=flags.paranoid,
        allow_wifi=flags.allow_wifi,
        is_elastic=flags.is_elastic,
        announce=hostfile.announce if flags.announce is None else flags.announce,
        deadlines=hostfile.deadlines,
    )


def _other_models(hostfile: Hostfile, flags: Flags) -> tuple[tuple[str, ...], str]:
    """Models that may be switched to, and the embedding model. Flags win; a relative path of the file is one
    beside it. Raises SettingsError."""
    base = Path.cwd() if flags.allowed_models else _folder_of(hostfile)
    allowed = flags.allowed_models or hostfile.allowed_models
    for name in allowed:
        check_path("model", name)
    given = hostfile.embedding_model if flags.embedding_model is None else flags.embedding_model
    check_path("embedding model", given)
    place = Path.cwd() if flags.embedding_model is not None else _folder_of(hostfile)
    return tuple(anchor_model(name, base) for name in allowed), anchor_model(given, place) if given else ""


def read_chat_template(given: str) -> str:
    """A template as it is, or the text of a file on this machine. Raises SettingsError."""
    if "{{" in given or "{%" in given:
        return given
    try:
        text = Path(given).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--chat-template {given}: neither a Jinja text nor a readable file ({error})."
        ) from error
    if not text.strip() or len(text) > MAX_CHAT_TEMPLATE_CHARS:
        raise SettingsError(
            f"--chat-template {given}: it has {len(text)} characters; 1 to {MAX_CHAT_TEMPLATE_CHARS} will do."
        )
    return text


def check_origin(origin: str) -> str:
    """An origin as browsers write it. Raises SettingsError."""
    try:
        parts = urlsplit(origin)
        bare = f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        bare = ""
    if not origin.isascii() or parts.scheme not in ("http", "https") or not parts.hostname or bare != origin:
        raise SettingsError(
            f"--allow-origin {origin!r} is not an origin as browsers write it: http or https, a host, and a "
            "port if it is not the usual one, like https://chat.example:8443. There is no wildcard."
        )
    return origin.lower()


def read_media_domain(host: str) -> str:
    """A host that files of requests may be fetched from, in lower case. Raises SettingsError."""
    for problem in check_media_domain(host):
        raise SettingsError(f"--allowed-media-domains: {problem}.")
    return host.lower()


def read_api_keys(path: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of a file, one a line, or of the environment, between commas. Raises SettingsError."""
    if path is None:
        keys = [key.strip() for key in environment.get(API_KEY_VARIABLE, "").split(",") if key.strip()]
        source = API_KEY_VARIABLE
        if not keys:
            return ()
    else:
        source = path
        try:
            lines = Path(path).expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"The API key file {path} cannot be read ({error}). Check --api-key-file."
            ) from error
        keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise SettingsError(f"The API key file {path} has no key in it. Write one key a line.")
    for key in keys:
        if (
            len(key) < MIN_KEY_CHARACTERS
            or not key.isascii()
            or any(character.isspace() for character in key)
        ):
            raise SettingsError(
                f"A key in {source} is shorter than {MIN_KEY_CHARACTERS} characters, or has spaces or "
                "characters that are not ASCII, which cannot stand in an HTTP header. Use "
                "`secrets.token_urlsafe(32)`."
            )
    return tuple(keys)


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_model_name(model: str) -> None:
    """Raises SettingsError for what can be neither a path nor a hub id."""
    check_path("model", model)


def check_path(what: str, path: str) -> None:
    """`what`: "model", "adapter" or "embedding model". Raises SettingsError for what cannot be a path."""
    if len(path.encode()) > MAX_PATH_BYTES or any(
        len(part.encode()) > MAX_PATH_PART_BYTES for part in path.split("/")
    ):
        fix = {
            "model": "--model, or `model:` in the hostfile",
            "adapter": "--adapter-path, or `adapter:` in the hostfile",
            "embedding model": "--embedding-model, or `embedding_model:` in the hostfile",
        }[what]
        raise SettingsError(
            f"The {what}'s name {path[:40]!r}... has {len(path)} characters, too many for a path"
            f"{'' if what == 'adapter' else ' or a hub id'}. Correct {fix}."
        )
    if "\0" in path:
        raise SettingsError(f"The {what}'s name {path!r} has a zero byte in it. Correct it.")


def anchor_model(model: str, base: Path) -> str:
    """A model that is plainly a relative path becomes absolute; a folder that is there wins over a hub id."""
    if model.startswith(("./", "../")) or model in (".", ".."):
        return str((base / model).resolve())
    if not model.startswith(("/", "~")) and (base / model).is_dir():
        return str((base / model).resolve())
    return model


def anchor_adapter(adapter: str, base: Path) -> str:
    """An adapter is always a folder, so a relative path is one on this machine; '' = none."""
    if not adapter:
        return ""
    check_path("adapter", adapter)
    return adapter if adapter.startswith(("/", "~")) else str((base / adapter).resolve())


def adapter_candidates(adapter: str, models_folder: str) -> list[str]:
    """Folders on a host in which the adapter may be, best first; [] without one."""
    if not adapter or not models_folder:
        return [adapter] if adapter else []
    return [adapter, f"{models_folder.rstrip('/')}/{adapter.rstrip('/').rpartition('/')[2]}"]


def _folder_of(hostfile: Hostfile) -> Path:
    return Path(hostfile.source or ".").expanduser().resolve().parent


def model_candidates(model: str, models_folder: str) -> list[str]:
    """Folders on a host in which the model may be, best first. `~` is that host's home."""
    if not models_folder:
        return [] if is_hub_id(model) else [model]
    folder = models_folder.rstrip("/")
    last = model.rstrip("/").rpartition("/")[2]
    if is_hub_id(model):
        return [f"{folder}/{model}", f"{folder}/{last}"]
    return [model, f"{folder}/{last}"]


def is_hub_id(model: str) -> bool:
    """Neither an absolute path nor one in a home folder."""
    return not model.startswith(("/", "~"))


def _anchor(host: HostEntry) -> str:
    """A relative `models` folder means something on this machine only."""
    if not host.models or host.models.startswith(("/", "~")):
        return host.models
    if host.is_local:
        return str(Path(host.models).resolve())
    raise SettingsError(
        f"`models: {host.models}` of host {host.name} is a relative path, which has no meaning "
        "on another host. Write it with / or ~/ in front."
    )
