"""Flags of other servers of MLX models that mean nothing here, and what there is instead. Pure.

None of them is taken and then ignored: a user who brings a command line along is told, flag by flag.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlx_mesh.mesh.errors import SettingsError

_ONE_MESH = (
    "Give the hosts in a hostfile to `mlx-mesh up`, or start ranks by hand with `python -m mlx_mesh.node`."
)
_NO_DRAFT = "There is no drafting here: every token comes from the model itself."
_TEMPLATE = "The format is recognised by the model's chat template and vocabulary; docs/api.md lists them."
_ON_GROWTH = "KV memory is planned before the start and taken as requests grow."
_LOADING = "Each rank reads its own layers one by one, lazily."

FOREIGN: dict[str, str] = {
    "-V": "A model that can see does so by itself; --vision makes it a condition.",
    "--enable-auto-think-detection": "It is always so: the template says whether it opens the thinking.",
    "--tool-call-parser": _TEMPLATE,
    "--tool-call-parser-config": _TEMPLATE,
    "--tool-parser": _TEMPLATE,
    "--reasoning-parser": _TEMPLATE,
    "--trace-requests-path": "Requests are not written to files; the log has a line with the counts of each.",
    "--trace-requests-include-prompt": "Requests are not written to files, nor their prompts.",
    "--no-trace-requests-include-prompt": "Requests are not written to files; leave the flag out.",
    "--retain-mx-cache": "There is no such switch here: what MLX's allocator keeps is left to it.",
    "--no-retain-mx-cache": "There is no such switch here: what MLX's allocator keeps is left to it.",
    "--lazy-load": _LOADING,
    "--no-lazy-load": _LOADING,
    "--prefix-cache-headroom": "Prefixes of any length are kept, within --prefix-cache-bytes.",
    "--kv-cache-max-tokens": "The longest sequence is --context (or --max-kv-size).",
    "--kv-cache-keep": "Nothing of a sequence is dropped; it ends at --context.",
    "--kv-cache-idle-release-seconds": "What is kept makes room when a request needs it, not by the clock.",
    "--kv-cache-hard-reserve": _ON_GROWTH,
    "--no-kv-cache-hard-reserve": _ON_GROWTH,
    "--kv-cache-warmup": "All ranks compute one token before the mesh is ready.",
    "--no-kv-cache-warmup": "All ranks compute one token before the mesh is ready.",
    "--kv-cache-warmup-tokens": "All ranks compute one token before the mesh is ready.",
    "--distributed": _ONE_MESH,
    "--no-distributed": "`mlx-mesh serve` is one rank on this machine; leave the flag out.",
    "--distributed-rank": _ONE_MESH,
    "--distributed-world-size": _ONE_MESH,
    "--distributed-host": _ONE_MESH,
    "--distributed-port": _ONE_MESH,
    "--distributed-timeout": "It is `deadlines: {join_s: ...}` in the hostfile.",
    "--distributed-env-file": _ONE_MESH,
    "--distributed-server-rank": "The first host of the hostfile serves.",
    "--draft-model": _NO_DRAFT,
    "--draft-kind": _NO_DRAFT,
    "--draft-block-size": _NO_DRAFT,
    "--num-draft-tokens": _NO_DRAFT,
    "--api-key": "A key in a command line is seen by all users of the host: --api-key-file FILE, or "
    "MLX_MESH_API_KEY.",
    "--trust-remote-code": "Code of a model's folder is never run.",
    "--no-trust-remote-code": "Code of a model's folder is never run; leave the flag out.",
    "--max-tokens": "A request without a limit may use the whole context; requests say max_tokens.",
    "--temp": "Requests say their temperature; the default is the API's.",
    "--image-model": "One model is served, and one for embeddings.",
    "--tts-model": "One model is served, and one for embeddings.",
    "--stt-model": "One model is served, and one for embeddings.",
    "--reranker-model": "One model is served, and one for embeddings.",
    "--rate-limit": "Load is bounded by --max-sequences and --max-queued-requests.",
}
_DFLASH = "--dflash-"


def refuse_foreign(words: Sequence[str], known: Collection[str] = ()) -> None:
    """Raises SettingsError for the first flag that another server has, unless it is `known` here as well."""
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if flag in known:
            continue
        reason = _NO_DRAFT if flag.startswith((_DFLASH, f"--no-{_DFLASH[2:]}")) else FOREIGN.get(flag)
        if reason is not None:
            raise SettingsError(f"{flag} is a flag of another server. {reason}")
