"""The agent's settings: from the launcher over stdin, or by hand from flags, environment and `.env`.

By hand (`python -m mlx_mesh.node --model M`) a flag wins over the environment, and the environment over the
`.env` file. This is the only reader of these variables.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import hashlib
import ipaddress
import itertools
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from dotenv import dotenv_values

from mlx_mesh.mesh import prefix_settings
from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.foreign_flags import refuse_foreign
from mlx_mesh.mesh.hostfile_fields import check_media_domain
from mlx_mesh.mesh.interfaces import check_rules
from mlx_mesh.mesh.kv_options import check_kv_options
from mlx_mesh.mesh.log_lines import LOG_FORMATS
from mlx_mesh.mesh.messages import AgentConfig, Deadlines, HostPlan, MeshConfig
from mlx_mesh.mesh.types import Backend, Sharding, VisionMode
from mlx_mesh.node.keys import MIN_SECRET_BYTES

DEFAULT_PORT = 17863
DEFAULT_JOIN_S = 120.0
MAX_WORLD_SIZE = 64

ENABLED = ("KAMI_DIST_ENABLED", "MLX_DISTRIBUTED_ENABLED")
HOST = ("PAIRED_HOST", "MLX_DISTRIBUTED_HOST", "MLX_DIST_HOST")
PORT = ("PAIRED_PORT", "MLX_DISTRIBUTED_PORT")
WORLD_SIZE = ("PAIRED_WORLD_SIZE", "MLX_DISTRIBUTED_WORLD_SIZE", "WORLD_SIZE")
RANK = ("RANK", "MLX_DISTRIBUTED_RANK", "PAIRED_RANK")
SERVER_RANK = ("SERVER_RANK", "MLX_DISTRIBUTED_SERVER_RANK")
TIMEOUT = ("MLX_DISTRIBUTED_TIMEOUT", "DISTRIBUTED_TIMEOUT")
ADAPTER = ("MLX_MESH_ADAPTER_PATH",)
SECRET = ("MLX_MESH_SECRET",)
API_KEY = ("MLX_MESH_API_KEY",)
"""Names of one setting, the first that is set wins."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Manual:
    """An agent started by hand, and what its user should read first."""

    config: AgentConfig
    notes: tuple[str, ...]


def read_launched(line: bytes) -> AgentConfig:
    """The launcher's line of JSON. Raises SettingsError."""
    try:
        return msgspec.json.decode(line, type=AgentConfig)
    except msgspec.MsgspecError as error:
        raise SettingsError(
            f"the launcher's settings are not readable ({error}): the versions of mlx-mesh on both hosts "
            "must be the same."
        ) from error


# ---------------------------------------------------------------- by hand


def build_parser() -> argparse.ArgumentParser:
    """Flags of the manual bootstrap. No flag has a default here, so that an unset one never wins."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_mesh.node",
        description="Start one rank of a mesh by hand: one agent per rank, the server rank serves HTTP.",
        epilog="RANK, WORLD_SIZE, PAIRED_HOST, PAIRED_PORT, MLX_MESH_SECRET, MLX_MESH_API_KEY and "
        "MLX_MESH_ADAPTER_PATH are read "
        "from the environment or a .env file.",
    )
    parser.add_argument("-m", "--model", required=True, help="model folder, or a hub id in the local cache")
    parser.add_argument(
        "--adapter-path", metavar="DIR", help="folder of a LoRA or DoRA adapter (MLX_MESH_ADAPTER_PATH)"
    )
    mesh = parser.add_argument_group("mesh")
    mesh.add_argument("--distributed", action=argparse.BooleanOptionalAction, default=None)
    mesh.add_argument("--distributed-rank", metavar="K", help="this agent's rank (RANK)")
    mesh.add_argument("--distributed-world-size", metavar="N", help="number of ranks (WORLD_SIZE)")
    mesh.add_argument("--distributed-host", metavar="HOST", help="host of the server rank (PAIRED_HOST)")
    mesh.add_argument("--distributed-port", metavar="PORT", help=f"its port (PAIRED_PORT, {DEFAULT_PORT})")
    mesh.add_argument("--distributed-server-rank", metavar="K", help="the rank that serves HTTP (0)")
    mesh.add_argument(
        "--distributed-timeout",
        metavar="SECONDS",
        help=f"how long to wait for all ranks ({DEFAULT_JOIN_S:g})",
    )
    mesh.add_argument("--distributed-env-file", metavar="FILE", help=".env file (.env in this folder)")
    mesh.add_argument(
        "--elastic",
        action="store_true",
        help="server rank only: take a rank in again by itself that was started anew after the mesh went on "
        "without it",
    )
    mesh.add_argument(
        "--announce",
        action=argparse.BooleanOptionalAction,
        help="tell the local network which mesh this host is in (default: unless it is on loopback)",
    )
    mesh.add_argument("--sharding", choices=["auto", "tensor", "pipeline"], default="auto")
    mesh.add_argument("--backend", choices=["auto", "ring", "jaccl", "jaccl-ring", "nccl"], default="auto")
    mesh.add_argument(
        "--allow-wifi", action="store_true", help="let data go over Wi-Fi where hosts have no cable in common"
    )
    mesh.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="json: an object per line, of what this agent says and of the ranks' files",
    )
    mesh.add_argument("--replicas", type=int, default=1, metavar="N", help="1: `mlx-mesh up` has more")
    mesh.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="NAME",
        help="server rank only: let data go over this interface only, on all hosts (en5, en*), or never over "
        "it (^en0); may be repeated",
    )
    serve = parser.add_argument_group("serving (server rank only)")
    serve.add_argument("--host", default="127.0.0.1", help="address for HTTP (127.0.0.1)")
    serve.add_argument("--port", type=int, default=18000, help="port for HTTP (18000), 0 = a free one")
    serve.add_argument("--api-key-file", metavar="FILE", help="one API key per line")
    serve.add_argument(
        "--allowed-media-domains",
        nargs="+",
        action="extend",
        default=[],
        metavar="HOST",
        help="hosts that media in requests may be fetched from (default none: data URLs only)",
    )
    serve.add_argument("--served-model-name", action="append", default=[], metavar="NAME")
    serve.add_argument("--embedding-model", default="", metavar="MODEL", help="for /v1/embeddings")
    serve.add_argument(
        "--allow-model",
        action="append",
        default=[],
        metavar="MODEL",
        help="a folder or hub id, alike on all hosts, that a request may load instead; may be repeated",
    )
    serve.add_argument(
        "--max-kv-size",
        "--context",
        type=int,
        metavar="TOKENS",
        help="longest context to plan for and to serve",
    )
    serve.add_argument("--chat-template", default="", metavar="FILE", help="instead of the model's")
    serve.add_argument("--kv-bits", type=int, metavar="N", help="quantise the KV cache to so many bits")
    serve.add_argument("--kv-group-size", type=int, metavar="N", help="in groups of 32, 64 or 128 (64)")
    serve.add_argument("--quantized-kv-start", type=int, metavar="TOKENS", help="only 0: from the first one")
    serve.add_argument(
        "--vision",
        action=argparse.BooleanOptionalAction,
        help="serve the model with or without its vision tower (with, where mlx-vlm can)",
    )
    serve.add_argument("--strip-thinking", action="store_true", help="leave reasoning out of answers")
    prefix_settings.add_flags(serve)
    return parser


def manual_settings(argv: Sequence[str], environ: Mapping[str, str], folder: Path, state: Path) -> Manual:
    """Settings from flags over `environ` over the `.env` file in `folder` (or the file named by a flag).

    `state` holds the development secret of loopback meshes. Raises SettingsError; argparse exits by itself.
    """
    parser = build_parser()
    refuse_foreign(argv, known=parser._option_string_actions.keys())
    flags = parser.parse_args(argv)
    if flags.replicas != 1:
        raise SettingsError(
            f"--replicas {flags.replicas}: ranks that are started by hand are one mesh. `mlx-mesh serve` and "
            "`mlx-mesh up` start several replicas behind one front end."
        )
    env_file, values = _read_env_file(flags.distributed_env_file, folder)
    source = _Source(values | {name: value for name, value in environ.items() if value}, env_file)
    host = flags.distributed_host or source.text(HOST)
    size = source.integer(WORLD_SIZE, flags.distributed_world_size, "--distributed-world-size")
    if not _is_distributed(flags.distributed, source, host, size):
        return Manual(_single(flags, source), ())
    return _member(flags, source, host, size, state)


def _is_distributed(flag: bool | None, source: _Source, host: str, size: int | None) -> bool:
    """The flag, else the variable, else whether a host or a world size is given."""
    if flag is not None:
        return flag
    enabled = source.boolean(ENABLED)
    if enabled is not None:
        return enabled
    return bool(host) or (size or 1) > 1


def _single(flags: argparse.Namespace, source: _Source) -> AgentConfig:
    """One host, one rank, no coordinator port."""
    name = _short_hostname()
    mesh = MeshConfig(name=f"node-{flags.port}", hosts=(HostPlan(name=name),))
    return AgentConfig(
        mesh_name=mesh.name,
        run_id=secrets.token_hex(8),
        host=name,
        model=_model(flags.model),
        adapter=_adapter(flags.adapter_path, source),
        secret=secrets.token_hex(32),
        coordinator="",
        attached=False,
        announce=bool(flags.announce),
        mesh=_serving(mesh, flags, source),
        log_format=flags.log_format,
    )


def _member(flags: argparse.Namespace, source: _Source, host: str, size: int | None, state: Path) -> Manual:
    if not host:
        raise SettingsError(
            "the host of the server rank is not known: set PAIRED_HOST or --distributed-host."
        )
    size = 2 if size is None else size
    if not 1 <= size <= MAX_WORLD_SIZE:
        raise SettingsError(f"WORLD_SIZE is {size}; it must be between 1 and {MAX_WORLD_SIZE}.")
    rank = source.integer(RANK, flags.distributed_rank, "--distributed-rank")
    if rank is None:
        raise SettingsError(
            f"the rank of this agent is not known: set RANK (0 to {size - 1}) or --distributed-rank."
        )
    server_rank = source.integer(SERVER_RANK, flags.distributed_server_rank, "--distributed-server-rank") or 0
    for name, value in (("RANK", rank), ("the server rank", server_rank)):
        if not 0 <= value < size:
            raise SettingsError(
                f"{name} is {value}, but with WORLD_SIZE={size} ranks go from 0 to {size - 1}."
            )
    port = source.integer(PORT, flags.distributed_port, "--distributed-port")
    port = DEFAULT_PORT if port is None else port
    if not 1 <= port <= 65535:
        raise SettingsError(f"PAIRED_PORT is {port}; it must be between 1 and 65535.")
    address = _resolve(host)
    secret, notes = _secret(source, address, state)
    deadlines = Deadlines(
        join_s=source.seconds(TIMEOUT, flags.distributed_timeout, "--distributed-timeout") or DEFAULT_JOIN_S
    )
    mesh_rank = (rank - server_rank) % size
    mesh = None
    if mesh_rank == 0:
        mesh = _serving(
            MeshConfig(
                name=f"manual-{port}",
                hosts=tuple(HostPlan(name="") for _ in range(size)),
                server_rank=server_rank,
                deadlines=deadlines,
            ),
            flags,
            source,
        )
    return Manual(
        AgentConfig(
            mesh_name=f"manual-{port}",
            run_id=secrets.token_hex(8),
            # Two ranks may run on one machine, and two machines may have one name.
            host=f"{_short_hostname()}-r{rank}",
            model=_model(flags.model),
            adapter=_adapter(flags.adapter_path, source),
            secret=secret,
            coordinator=f"{address}:{port}",
            ranks=(mesh_rank,),
            world_size=size,
            attached=False,
            deadlines=deadlines,
            announce=not address.startswith("127.") if flags.announce is None else flags.announce,
            mesh=mesh,
            log_format=flags.log_format,
        ),
        notes,
    )


def _serving(mesh: MeshConfig, flags: argparse.Namespace, source: _Source) -> MeshConfig:
    """`mesh` with the flags that only the server rank needs. Raises SettingsError."""
    api_keys = _api_keys(flags.api_key_file, source)
    if flags.max_kv_size is not None and flags.max_kv_size < 1:
        raise SettingsError(f"--max-kv-size {flags.max_kv_size} is out of range; it must be at least 1.")
    for problem in itertools.chain.from_iterable(map(check_media_domain, flags.allowed_media_domains)):
        raise SettingsError(f"--allowed-media-domains: {problem}.")
    for problem in check_rules(flags.interface):
        raise SettingsError(f"--interface {problem}.")
    return msgspec.structs.replace(
        mesh,
        hosts=tuple(msgspec.structs.replace(host, interfaces=tuple(flags.interface)) for host in mesh.hosts),
        sharding=Sharding(flags.sharding),
        backend=Backend(flags.backend),
        allow_wifi=flags.allow_wifi,
        serve_host=flags.host,
        serve_port=flags.port,
        api_keys=api_keys,
        allowed_media_domains=tuple(host.lower() for host in flags.allowed_media_domains),
        served_model_names=tuple(flags.served_model_name),
        chat_template=flags.chat_template,
        vision=VisionMode.of(flags.vision),
        strip_thinking=flags.strip_thinking,
        elastic=flags.elastic,
        prefix=prefix_settings.check_keys(prefix_settings.read_flags(flags), api_keys),
        allowed_models=tuple(map(_model, flags.allow_model)),
        log_format=flags.log_format,
        context_length=flags.max_kv_size or 0,
        plan_context=flags.max_kv_size or mesh.plan_context,
        kv_options=check_kv_options(flags.kv_bits, flags.kv_group_size, flags.quantized_kv_start),
        embedding_model=_model(flags.embedding_model) if flags.embedding_model else "",
    )


# ---------------------------------------------------------------- sources


class _Source:
    """Variables under their several names, with errors that say where a value came from."""

    def __init__(self, values: Mapping[str, str], env_file: Path | None) -> None:
        self._values = values
        self._env_file = env_file

    def text(self, names: Sequence[str]) -> str:
        return self._find(names)[1]

    def integer(self, names: Sequence[str], flag: str | None, flag_name: str) -> int | None:
        name, text = (flag_name, flag) if flag is not None else self._find(names)
        if not text:
            return None
        try:
            return int(text)
        except ValueError:
            raise SettingsError(f"{name} is {text!r}, not a whole number{self._where(name)}.") from None

    def seconds(self, names: Sequence[str], flag: str | None, flag_name: str) -> float | None:
        name, text = (flag_name, flag) if flag is not None else self._find(names)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < 1e6:
            raise SettingsError(f"{name} is {text!r}, not a number of seconds{self._where(name)}.")
        return value

    def boolean(self, names: Sequence[str]) -> bool | None:
        name, text = self._find(names)
        if not text:
            return None
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise SettingsError(f"{name} is {text!r}; use 1 or 0{self._where(name)}.")

    def _find(self, names: Sequence[str]) -> tuple[str, str]:
        for name in names:
            if value := self._values.get(name, "").strip():
                return name, value
        return names[0], ""

    def _where(self, name: str) -> str:
        if name.startswith("--") or self._env_file is None:
            return ""
        return f" (from the environment or {self._env_file})"


def _read_env_file(flag: str | None, folder: Path) -> tuple[Path | None, dict[str, str]]:
    """The file of the flag, which must exist, or `.env` in `folder`, which may."""
    path = Path(flag).expanduser() if flag else folder / ".env"
    if not path.is_file():
        if flag:
            raise SettingsError(f"the file {path} of --distributed-env-file does not exist.")
        return None, {}
    try:
        found = dotenv_values(path, interpolate=False)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the file {path} cannot be read: {error}") from error
    return path, {name: value for name, value in found.items() if value is not None}


def _api_keys(flag: str | None, source: _Source) -> tuple[str, ...]:
    if flag:
        try:
            lines = Path(flag).expanduser().read_text().splitlines()
        except OSError as error:
            raise SettingsError(f"the file {flag} of --api-key-file cannot be read: {error}") from error
        keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if not keys:
            raise SettingsError(f"the file {flag} of --api-key-file has no key in it.")
        return keys
    return tuple(key.strip() for key in (source.text(API_KEY) or "").split(",") if key.strip())


def _resolve(host: str) -> str:
    """An IPv4 address of `host`."""
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise SettingsError(
            f"PAIRED_HOST is {host!r}, which has no IPv4 address here ({error.strerror}). "
            "Use an IPv4 address."
        ) from error


def _secret(source: _Source, address: str, state: Path) -> tuple[str, tuple[str, ...]]:
    """The mesh secret, and what the user should know about it."""
    given = source.text(SECRET)
    if given:
        if len(given) < MIN_SECRET_BYTES:
            raise SettingsError(
                f"MLX_MESH_SECRET has {len(given)} characters; at least {MIN_SECRET_BYTES} are needed. "
                f"Make one: {_MAKE_SECRET}"
            )
        return hashlib.sha256(given.encode()).hexdigest(), ()
    if not ipaddress.IPv4Address(address).is_loopback:
        raise SettingsError(
            f"the ranks meet at {address}, which is not loopback, so they need a secret: set the same "
            f"MLX_MESH_SECRET on all hosts. Make one: {_MAKE_SECRET}"
        )
    path = state / "manual" / "loopback-secret"
    return _development_secret(path), (
        f"no MLX_MESH_SECRET: using the development secret of {getpass.getuser()} in {path} (loopback only)",
    )


_MAKE_SECRET = "python3 -c 'import secrets; print(secrets.token_hex(32))'"


def _development_secret(path: Path) -> str:
    """A random secret that only this user can read, made at its first use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # complete or not there, whichever of two agents is first
    finally:
        draft.unlink()
    text = path.read_text().strip()
    if len(text) < MIN_SECRET_BYTES:
        raise SettingsError(f"the development secret in {path} is damaged; remove that file.")
    return text


def _model(given: str) -> str:
    """A folder as an absolute path: the agent leaves the working directory. A hub id as it is."""
    folder = Path(given).expanduser()
    return str(folder.absolute()) if folder.exists() or given.startswith((".", "/", "~")) else given


def _adapter(flag: str | None, source: _Source) -> str:
    """Always a folder, so always as an absolute path; '' = none."""
    given = flag or source.text(ADAPTER)
    return str(Path(given).expanduser().absolute()) if given else ""


def _short_hostname() -> str:
    return socket.gethostname().split(".")[0] or "host"
