"""What a host says of itself: versions, memory, addresses and whether it has the model.

`python -m mlx_mesh.node.facts MODEL [ADAPTER]` prints HostFacts as one line of JSON, last on stdout.
Nothing here imports MLX: versions come from the installed packages' metadata.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import platform
import re
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import ifaddr
import msgspec

from mlx_mesh.mesh.capacity import mac_usable_bytes
from mlx_mesh.mesh.embedding_memory import max_tokens_of, working_bytes
from mlx_mesh.mesh.errors import PreflightError, SettingsError
from mlx_mesh.mesh.macos import parse_key_values
from mlx_mesh.mesh.types import HostFacts, Versions
from mlx_mesh.node.adapters import digest_adapter, resolve_adapter
from mlx_mesh.node.delivery.part_folder import describe_part, read_part
from mlx_mesh.node.hub import find_complete, locate, parse_hub_id
from mlx_mesh.node.hub_folder import read_record
from mlx_mesh.node.interfaces import own_interfaces
from mlx_mesh.node.system import ask, is_mac
from mlx_mesh.node.tokenizer_files import tokenizer_problem

_SYSCTL_KEYS = ("hw.memsize", "machdep.cpu.brand_string", "iogpu.wired_limit_mb")


def gather_facts(model: str, adapter: str = "", embedding: str = "", *, asks_hub: bool = True) -> HostFacts:
    """Everything at once. A model or adapter that is not there is a fact too, not an error. `asks_hub` False:
    a hub model that is not here as a whole is not here."""
    digest, error, tokenizer, part, is_delivered = "", "", "", "", False
    try:
        folder = resolve_model(model) if asks_hub else _whole_model(model)
        part, is_delivered = describe_part(folder), read_part(folder) is not None
        digest, tokenizer = digest_model(folder), tokenizer_problem(folder)
    except PreflightError as problem:
        error = str(problem)
    adapter_digest, adapter_error = _adapter_facts(adapter)
    embedding_bytes, embedding_error = _embedding_facts(embedding)
    chip, memory, usable = hardware()
    return HostFacts(
        hostname=socket.gethostname(),
        system="Darwin" if is_mac() else platform.system(),
        machine=(ask(["uname", "-m"]).strip() if is_mac() else "") or platform.machine(),
        chip=chip,
        memory_bytes=memory,
        usable_memory_bytes=usable,
        addresses=own_addresses(),
        interfaces=own_interfaces(),
        versions=installed_versions(),
        model_digest=digest,
        model_error=error,
        model_part=part if digest else "",
        is_delivered=is_delivered,
        adapter_digest=adapter_digest,
        adapter_error=adapter_error,
        tokenizer_error=tokenizer,
        embedding_bytes=embedding_bytes,
        embedding_error=embedding_error,
    )


def gather_here(model: str, adapter: str = "", embedding: str = "") -> HostFacts:
    """The same without a word to the hub."""
    return gather_facts(model, adapter, embedding, asks_hub=False)


def _adapter_facts(adapter: str) -> tuple[str, str]:
    """Digest, or why there is none; both '' when no adapter is asked for."""
    if not adapter:
        return "", ""
    try:
        return digest_adapter(resolve_adapter(adapter)), ""
    except SettingsError as problem:
        return "", str(problem)


def _embedding_facts(embedding: str) -> tuple[int, str]:
    """Bytes of an embedding model when it runs, or why it cannot; 0 and '' when none is asked for."""
    if not embedding:
        return 0, ""
    try:
        folder = resolve_model(embedding)
        return embedding_weights_bytes(folder) + embedding_working_bytes(folder), ""
    except PreflightError as problem:
        return 0, str(problem)


def embedding_weights_bytes(folder: Path) -> int:
    """Bytes of the weight files, which must be here: they are read whole. Raises PreflightError."""
    if part := describe_part(folder):
        raise PreflightError(f"{folder} has only {part} of the embedding model; bring it with `--full`.")
    if (record := read_record(folder)) is not None:
        raise PreflightError(
            f"the embedding model {record.repo} is not on {socket.gethostname()} as a whole, with the files "
            f"that say how its vectors are made. Fetch it first: `hf download {record.repo}`."
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise PreflightError(f"the embedding model in {folder} has no weights (*.safetensors).")
    return sum(path.stat().st_size for path in weights)


def embedding_working_bytes(folder: Path) -> int:
    """What its largest batch takes here. A file that cannot be read is the embedder's to name."""
    config, said = _json_object(folder / "config.json"), _json_object(folder / "sentence_bert_config.json")
    max_tokens = max_tokens_of(config, said.get("max_seq_length"))
    return working_bytes(config, max_tokens, keeps_scores=not is_mac())


def _json_object(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def installed_versions() -> Versions:
    """Versions of the installed packages; '' for one that is not installed."""

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""

    return Versions(
        mlx_mesh=version("mlx-mesh"),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        python=platform.python_version(),
    )


def own_addresses() -> tuple[str, ...]:
    """This host's IPv4 addresses, loopback included, in the order of its interfaces."""
    found: dict[str, None] = {}
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            if ip.is_IPv4 and isinstance(ip.ip, str):
                found[str(ipaddress.IPv4Address(ip.ip))] = None
    return tuple(found)


# ---------------------------------------------------------------- the model


def resolve_model(model: str) -> Path:
    """The folder of a model: a local folder (`~` expanded), or that of a hub id, `org/name` or
    `org/name@revision`, whose weights may be fetched later.

    Raises PreflightError that says what was looked for and how to get it.
    """
    folder = Path(model).expanduser()
    try:
        is_there = folder.is_dir()
    except (OSError, ValueError) as problem:
        raise PreflightError(f"no model can be at {model[:80]!r} ({problem.args[-1]}).") from problem
    if is_there:
        if not (folder / "config.json").is_file():
            raise PreflightError(f"{folder} has no config.json: it is not a model folder.")
        return folder.resolve()
    hub_id = parse_hub_id(model)
    if hub_id is None:
        raise PreflightError(f"the model folder {folder} does not exist on {socket.gethostname()}.")
    return locate(*hub_id)


def _whole_model(model: str) -> Path:
    """As `resolve_model`, without a word to the hub. Raises PreflightError."""
    hub_id = parse_hub_id(model)
    if hub_id is None or Path(model).expanduser().is_dir():
        return resolve_model(model)
    if (found := find_complete(*hub_id)) is None:
        raise PreflightError(f"the model {model} is not (or not completely) on {socket.gethostname()}")
    return found


def digest_model(folder: Path) -> str:
    """Hex SHA-256 over config.json, the weight index, and the names and sizes of the weight files.

    Two hosts with the same digest hold the same model unless somebody edited weights in place.
    Raises PreflightError when the folder is not complete.
    """
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        weights = sorted(folder.glob("model*.safetensors"))
        if not weights:
            raise PreflightError(f"{folder} has no model*.safetensors files: there is nothing to load.")
        present = {path.name for path in weights}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            listed = set(json.loads(index.read_bytes()).get("weight_map", {}).values())
            if missing := sorted(listed - present):
                raise PreflightError(
                    f"{folder} is not complete: {len(missing)} of {len(listed)} weight files are missing "
                    f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}). Download it again."
                )
            digest.update(hashlib.sha256(index.read_bytes()).digest())
        for path in weights:
            digest.update(f"{path.name}:{path.stat().st_size};".encode())
    except (OSError, ValueError) as error:
        raise PreflightError(f"the model in {folder} cannot be read: {error}") from error
    return digest.hexdigest()


def digest_with_revision(folder: Path) -> str:
    """The same, with the commit of a model of the hub: its weights may change and keep their sizes. Raises
    PreflightError."""
    record = read_record(folder)
    commit = record.commit if record is not None else ""
    if folder.parent.name == "snapshots":  # of the hub's own cache
        commit = folder.name
    return f"{digest_model(folder)}@{commit}" if commit else digest_model(folder)


def check_same_model(folder: Path, digest: str) -> None:
    """Raises PreflightError unless the model here has this digest, which is the leader's."""
    own = digest_with_revision(folder)
    if own == digest:
        return
    here, there = own.rpartition("@"), digest.rpartition("@")
    if here[1] and there[1] and here[2] != there[2]:
        raise PreflightError(
            f"{socket.gethostname()} has commit {here[2][:12]} of this model, the leader {there[2][:12]}. "
            "Name the commit, as ORG/NAME@COMMIT, or fetch the same one on all hosts."
        )
    raise PreflightError(
        f"the model in {folder} on {socket.gethostname()} is another one than on the leader (digests "
        f"{own[:16]} and {digest[:16]}: config.json, index, names and sizes of weight files). Copy the "
        "same folder to all hosts."
    )


# ---------------------------------------------------------------- hardware


def hardware() -> tuple[str, int, int]:
    """Chip, bytes of memory, and bytes that engines may use."""
    if is_mac():
        # One by one: an older system that lacks a key still tells the others.
        values = parse_key_values("\n".join(ask(["sysctl", key]) for key in _SYSCTL_KEYS))
        memory = int(values.get("hw.memsize", "0"))
        usable = mac_usable_bytes(memory, int(values.get("iogpu.wired_limit_mb", "0")))
        return values.get("machdep.cpu.brand_string", ""), memory, usable
    memory, usable = parse_meminfo(_read("/proc/meminfo"))
    limit = parse_cgroup_limit(_read("/sys/fs/cgroup/memory.max"))
    if limit:
        memory, usable = min(memory, limit), min(usable, limit)
    return parse_cpuinfo(_read("/proc/cpuinfo")) or platform.processor(), memory, usable


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def parse_meminfo(text: str) -> tuple[int, int]:
    """MemTotal and MemAvailable in bytes, 0 where missing."""
    values = {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return values.get("MemTotal", 0), values.get("MemAvailable", 0)


def parse_cgroup_limit(text: str) -> int:
    """Bytes of cgroup v2's memory.max; 0 = none."""
    return int(text) if text.strip().isdigit() else 0


def parse_cpuinfo(text: str) -> str:
    """The first model name; '' where there is none (most ARM boards)."""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def main(argv: list[str]) -> int:
    if len(argv) not in (1, 2):
        print("usage: python -m mlx_mesh.node.facts MODEL [ADAPTER]", file=sys.stderr)
        return 2
    print(msgspec.json.encode(gather_facts(*argv)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
