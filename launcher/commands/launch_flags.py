"""Flags of `up` and `serve`: what is served, to whom, and how."""

from __future__ import annotations

import argparse

from mlx_mesh.launcher.commands.shared_flags import add_adapter_flag, add_kv_flags
from mlx_mesh.launcher.config import Flags
from mlx_mesh.mesh import prefix_settings
from mlx_mesh.mesh.log_lines import LOG_FORMATS


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", help="folder or hub id; wins over the hostfile's")
    add_adapter_flag(parser)
    parser.add_argument(
        "--embedding-model",
        metavar="MODEL",
        help="folder or hub id on the leader: a second model, for /v1/embeddings",
    )
    parser.add_argument(
        "--allow-model",
        action="append",
        default=[],
        metavar="MODEL",
        help="a folder or hub id that requests may load in place of the first one; may be repeated",
    )
    parser.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help="json: an object per line, of every process"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="so many copies of the model behind one front end; the ranks are divided among them",
    )
    parser.add_argument("--name", help="name of the mesh, for status, logs and down")
    parser.add_argument(
        "--host", help="where HTTP listens on the leader (default 127.0.0.1; others need a key)"
    )
    parser.add_argument("--port", type=int, help="default 18000; 0 = a free one")
    parser.add_argument("--api-key-file", metavar="FILE", help="keys, one a line (or MLX_MESH_API_KEY)")
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's origin that may ask, like https://chat.example; may be repeated",
    )
    parser.add_argument(
        "--allowed-media-domains",
        nargs="+",
        action="extend",
        default=[],
        metavar="HOST",
        help="hosts that media in requests may be fetched from (default none: data URLs only)",
    )
    parser.add_argument(
        "--served-model-name", action="append", default=[], metavar="NAME", help="may be repeated"
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's")
    parser.add_argument("--strip-thinking", action="store_true", help="leave reasoning out of answers")
    parser.add_argument(
        "--max-sequences", "--max-num-seqs", type=int, metavar="N", help="decoded together (default 32)"
    )
    parser.add_argument(
        "--max-queued-requests",
        type=int,
        metavar="N",
        help="that wait beyond these; more get 429 (default 256)",
    )
    parser.add_argument(
        "--context",
        "--max-kv-size",
        type=int,
        metavar="TOKENS",
        help="longest context to plan for and to serve; an answer ends there with `length`",
    )
    prefix_settings.add_flags(parser)
    add_kv_flags(parser)
    parser.add_argument("--quantized-kv-start", type=int, metavar="TOKENS", help="only 0: from the first one")
    parser.add_argument("--offline", action="store_true", help="ask no hub; the files must be on each host")
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    parser.add_argument(
        "--announce",
        action=argparse.BooleanOptionalAction,
        help="tell the local network which mesh its hosts are in (default: only of several hosts)",
    )
    parser.add_argument("--detach", action="store_true", help="return when ready; `down` stops it")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the hosts, show the plan, start nothing"
    )
    parser.add_argument(
        "--paranoid",
        action="store_true",
        help="compare all ranks after each step, before its tokens are sent",
    )
    parser.add_argument("--detached-fd", type=int, help=argparse.SUPPRESS)


def read_launch_flags(arguments: argparse.Namespace) -> Flags:
    return Flags(
        model=arguments.model,
        adapter=arguments.adapter_path,
        vision=arguments.vision,
        embedding_model=arguments.embedding_model,
        allowed_models=tuple(arguments.allow_model),
        log_format=arguments.log_format,
        name=arguments.name,
        num_replicas=arguments.replicas,
        sharding=getattr(arguments, "sharding", None),
        backend=getattr(arguments, "backend", None),
        host=arguments.host,
        port=arguments.port,
        api_key_file=arguments.api_key_file,
        allowed_origins=tuple(arguments.allow_origin),
        allowed_media_domains=tuple(arguments.allowed_media_domains),
        served_model_names=tuple(arguments.served_model_name),
        chat_template=arguments.chat_template,
        strip_thinking=arguments.strip_thinking,
        max_sequences=arguments.max_sequences,
        max_queued_requests=arguments.max_queued_requests,
        context=arguments.context,
        prefix=prefix_settings.read_flags(arguments),
        kv_bits=arguments.kv_bits,
        kv_group_size=arguments.kv_group_size,
        quantized_kv_start=arguments.quantized_kv_start,
        ssh_config=arguments.ssh_config,
        is_offline=arguments.offline,
        paranoid=arguments.paranoid,
        allow_wifi=getattr(arguments, "allow_wifi", False),
        interfaces=tuple(getattr(arguments, "interface", ())),
        sync=getattr(arguments, "sync", None),
        is_elastic=getattr(arguments, "elastic", False),
        announce=arguments.announce,
    )
