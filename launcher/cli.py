"""`mlx-mesh`: parse, dispatch, print errors, choose the exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO, cast

import msgspec

from mlx_mesh import __version__
from mlx_mesh.launcher import (
    agent_command,
    bench_command,
    discover_command,
    discovered,
    doctor_command,
    init_command,
    mcp_server,
    net_command,
    plan_command,
    report,
    sync_command,
    trust_command,
    verify_command,
)
from mlx_mesh.launcher.api import Api
from mlx_mesh.launcher.chat import HELP, Chat, ChatSettings, ask_once, converse, piped_question
from mlx_mesh.launcher.command_parser import CommandParser
from mlx_mesh.launcher.config import (
    Flags,
    LaunchConfig,
    build_config,
    local_hostfile,
    read_api_keys,
    read_hostfile,
)
from mlx_mesh.launcher.console import Console, prefix
from mlx_mesh.launcher.detach import Outcome, RotatingLog, detach, tell
from mlx_mesh.launcher.model_command import change_model
from mlx_mesh.launcher.node_command import change_node
from mlx_mesh.launcher.plan_command import PlanQuestion
from mlx_mesh.launcher.running import api_of, find_folder, read_logs, take_down
from mlx_mesh.launcher.state import ERROR_PREFIX, StateFolder, already_running, state_root
from mlx_mesh.launcher.status import status_lines
from mlx_mesh.launcher.text import harmless
from mlx_mesh.launcher.up import dry_run, up
from mlx_mesh.mesh import prefix_settings
from mlx_mesh.mesh.discovery import AGENT_PORT, SCAN_S
from mlx_mesh.mesh.doctor import exit_status
from mlx_mesh.mesh.errors import ExitCode, HostfileError, MeshError, PreflightError, SettingsError
from mlx_mesh.mesh.foreign_flags import refuse_foreign
from mlx_mesh.mesh.hostfile import Hostfile
from mlx_mesh.mesh.hostfile_words import MPI_REASON
from mlx_mesh.mesh.kv_options import KV_BITS, KV_GROUP_SIZES
from mlx_mesh.mesh.links import LINKS
from mlx_mesh.mesh.log_lines import LOG_FORMATS
from mlx_mesh.mesh.types import Backend, Sharding

MAX_SIM = 64
SHARDINGS = "auto, tensor or pipeline"

Arguments = argparse.Namespace
EXIT_CODES = "exit status: " + ", ".join(f"{code.value} {code.name.lower()}" for code in ExitCode)


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point. Every error is one message on stderr; a traceback only with --debug."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] in (["up"], ["serve"]):
            refuse_foreign(words[1:])
    except MeshError as error:
        print(f"{ERROR_PREFIX}{told(error)}", file=sys.stderr)
        return error.exit_code
    arguments = build_parser().parse_args(words)
    arguments.words = words
    run = cast("Callable[[Arguments], int]", arguments.run)
    try:
        return run(arguments)
    except MeshError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"{ERROR_PREFIX}{told(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `mlx-mesh logs | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        if arguments.debug:
            raise
        print(
            f"mlx-mesh: this is a fault of mlx-mesh itself: {type(error).__name__}: {error}. Please report "
            "it with the output of the same command with --debug.",
            file=sys.stderr,
        )
        return ExitCode.FAILED


def told(error: MeshError) -> str:
    """An error's message with its lines indented, under a heading where each line is a fault of its own."""
    lines = str(error).splitlines()
    if isinstance(error, PreflightError):
        lines.insert(0, "not all hosts are ready:")
    elif isinstance(error, HostfileError):
        lines.insert(0, "the hostfile cannot be used:")
    return "\n  ".join(lines)


# ---------------------------------------------------------------- the commands


def _up(arguments: Arguments) -> int:
    given = [arguments.hostfile is not None, arguments.sim is not None, arguments.discover]
    if sum(given) != 1:
        raise SettingsError(
            "Give a hostfile, --sim N or --discover, like `mlx-mesh up hosts.yaml`, `mlx-mesh up --sim 2` or "
            "`mlx-mesh up --discover`."
        )
    if arguments.discover:
        hostfile = _discovered(arguments)
    elif arguments.sim is not None:
        if not 1 <= arguments.sim <= MAX_SIM:
            raise SettingsError(
                f"--sim {arguments.sim} is out of range; it is the number of local ranks, 1 to {MAX_SIM}."
            )
        hostfile = local_hostfile(arguments.sim, "sim")
    else:
        hostfile = read_hostfile(arguments.hostfile)
    config = build_config(hostfile, _flags(arguments), os.environ)
    return _bring_up(arguments, _with_faults(config, arguments) if arguments.fault else config)


def _discovered(arguments: Arguments) -> Hostfile:
    if arguments.detach and arguments.detached_fd is None:  # the detached launcher looks for the hosts
        return replace(local_hostfile(1, discovered.MESH_NAME), hosts=())
    look = discovered.Look(
        timeout_s=arguments.discover_timeout,
        interfaces=tuple(arguments.interface),
        addresses=tuple(arguments.address),
    )
    wanted = discovered.Wanted(look, arguments.hosts, with_this_host=not arguments.no_local)
    return discovered.find_mesh(wanted, os.environ, lambda line: print(line, flush=True))


def _with_faults(config: LaunchConfig, arguments: Arguments) -> LaunchConfig:
    """The fault kit is not even imported without the flag."""
    if arguments.sim is None:
        raise SettingsError("--fault makes ranks fail on order; it goes with --sim N only.")
    from mlx_mesh.mesh.faults import check_faults

    if config.num_replicas > 1:
        raise SettingsError("--fault names ranks of one mesh; it does not go together with --replicas.")
    return replace(config, faults=check_faults(arguments.fault, arguments.sim))


def _serve(arguments: Arguments) -> int:
    hostfile = local_hostfile(max(1, arguments.replicas or 1), "serve")
    return _bring_up(arguments, build_config(hostfile, _flags(arguments), os.environ))


def _bring_up(arguments: Arguments, config: LaunchConfig) -> int:
    if arguments.dry_run:
        return dry_run(config, Console(is_json=config.log_format == "json"))
    folder = StateFolder(state_root(os.environ), config.name)
    if arguments.detached_fd is not None:
        return _detached(arguments.detached_fd, config, folder)
    if not arguments.detach:
        return up(config, folder, Console(is_json=config.log_format == "json"))
    state = folder.read()
    if state is not None and state.is_alive:
        raise already_running(config.name, state)
    outcome = detach(arguments.words, folder, sys.stdout)
    if outcome.url:
        print(f"Detached; output goes to {folder.launcher_log}. Stop with `mlx-mesh down {config.name}`.")
        return ExitCode.OK
    print(f"mlx-mesh: {outcome.message}", file=sys.stderr)
    return outcome.exit_code or ExitCode.FAILED


def _detached(descriptor: int, config: LaunchConfig, folder: StateFolder) -> int:
    """The launcher in its own session. Its outcome goes to the waiting one, its output to the log."""
    os.set_inheritable(descriptor, False)
    os.chdir("/")
    log = RotatingLog(folder.launcher_log)
    is_told = False

    def on_ready(url: str) -> None:
        nonlocal is_told
        is_told = True
        tell(descriptor, Outcome(url=url))

    try:
        return up(
            config,
            folder,
            Console(cast("TextIO", log), is_terminal=False, is_json=config.log_format == "json"),
            log=str(folder.launcher_log),
            on_ready=on_ready,
        )
    except MeshError as error:
        if not is_told:
            tell(descriptor, Outcome(message=told(error), exit_code=error.exit_code))
        # For `status` and `down`; our stderr may be a log that was rotated away.
        log.write(f"{ERROR_PREFIX}{told(error)}\n")
        return error.exit_code
    finally:
        log.close()


def _down(arguments: Arguments) -> int:
    folder = find_folder(arguments.target, os.environ, with_leftovers=True)
    done, problems = take_down(folder)
    for what in done:
        print(what)
    for what in problems:
        print(f"mlx-mesh: {what}", file=sys.stderr)
    return ExitCode.FAILED if problems else ExitCode.OK


def _status(arguments: Arguments) -> int:
    state = find_folder(arguments.target, os.environ).read_running()
    if not state.url:
        if arguments.json:
            print(
                json.dumps(
                    {"status": {"name": state.name, "ready": False, "reason": "starting"}, "ranks": []}
                )
            )
        else:
            print(f"{state.name}: not ready: starting (launcher pid {state.pid})")
        return ExitCode.OK
    with api_of(state, arguments.api_key_file, os.environ) as api:
        status, nodes = api.get("/v1/cluster/status"), api.get("/v1/cluster/nodes")
    if arguments.json:
        print(json.dumps({"url": state.url, "status": status, "ranks": nodes.get("ranks", [])}, indent=1))
        return ExitCode.OK
    for line in status_lines(status, nodes):
        print(line)
    print(
        f"\n{state.url}/v1, launcher pid {state.pid}" + (f", its output in {state.log}" if state.log else "")
    )
    return ExitCode.OK


def _node(arguments: Arguments) -> int:
    state = find_folder(arguments.target, os.environ).read_running()
    with api_of(state, arguments.api_key_file, os.environ) as api:
        change_node(api, arguments.action, arguments.host, print)
    return ExitCode.OK


def _model(arguments: Arguments) -> int:
    if arguments.action == "unload" and arguments.model is not None:
        raise SettingsError("`model unload` takes no --model: what is served is unloaded.")
    state = find_folder(arguments.target, os.environ).read_running()
    with api_of(state, arguments.api_key_file, os.environ) as api:
        change_model(api, arguments.action, arguments.model or "", print)
    return ExitCode.OK


def _logs(arguments: Arguments) -> int:
    folder = find_folder(arguments.target, os.environ)
    state = folder.read_running()
    ranks, where = [], ""
    for item in read_logs(state, arguments.rank, arguments.lines, arguments.follow):
        if item is None:
            if arguments.follow and not state.is_alive:
                break
        elif "line" in item:
            line = harmless(str(item["line"]))
            names_itself = line.startswith("{") or prefix(str(item["rank"]), "")[:-1] in line
            print(line if names_itself else f"[{item['rank']}] {line}", flush=True)
        else:
            ranks, where = list(map(int, item["ranks"])), str(item["folder"])
            if ranks and arguments.rank not in (None, *ranks):
                known = ", ".join(map(str, ranks))
                raise SettingsError(f"Mesh {state.name} has no rank {arguments.rank}; its ranks are {known}.")
    if not ranks and not arguments.follow:
        print(f"There is no log in {where} on {state.hosts[0].name} yet.", file=sys.stderr)
    return ExitCode.OK


def _chat(arguments: Arguments) -> int:
    settings = ChatSettings(
        system=arguments.system, max_tokens=arguments.max_tokens, temperature=arguments.temperature
    )
    with _chosen_api(arguments) as api:
        chat = Chat(api, settings)
        if arguments.prompt is not None:  # standard input is left alone: it may never end
            ask_once(chat, arguments.prompt, sys.stdout)
        elif not sys.stdin.isatty():
            ask_once(chat, piped_question(sys.stdin), sys.stdout)
        else:
            print(f"{api.url}: {HELP}")
            converse(chat, sys.stdout)
    return ExitCode.OK


@contextlib.contextmanager
def _chosen_api(arguments: Arguments) -> Iterator[Api]:
    """Of --url, or of a mesh that runs."""
    if arguments.url:
        keys = read_api_keys(arguments.api_key_file, os.environ)
        yield Api(arguments.url, keys[0] if keys else "")
        return
    state = find_folder(arguments.target, os.environ).read_running()
    with api_of(state, arguments.api_key_file, os.environ) as api:
        yield api


def _mcp(arguments: Arguments) -> int:
    mcp_server.require_package()
    with _chosen_api(arguments) as api:
        mcp_server.build_server(api).run("stdio")
    return ExitCode.OK


def _plan(arguments: Arguments) -> int:
    question = PlanQuestion(
        model=arguments.model,
        adapter=arguments.adapter_path,
        vision=arguments.vision,
        hostfile=arguments.hostfile,
        num_nodes=arguments.nodes,
        memory=arguments.memory,
        chip=arguments.chip,
        link=arguments.link,
        context=arguments.context,
        num_sequences=arguments.sequences,
        kv_bits=arguments.kv_bits,
        kv_group_size=arguments.kv_group_size,
        revision=arguments.revision,
        is_offline=arguments.offline,
        ssh_config=arguments.ssh_config,
    )
    found = plan_command.answer(question, os.environ)
    for line in [plan_command.as_json(found)] if arguments.json else plan_command.lines(found):
        print(line)
    return ExitCode.PLACEMENT if plan_command.problems(found) else ExitCode.OK


def _verify(arguments: Arguments) -> int:
    verdict = verify_command.verify(
        _chosen_config(arguments), os.environ, print, by_layers=arguments.layer_by_layer
    )
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(verdict), indent=1).decode())
    else:
        for line in verify_command.lines(verdict):
            print(line)
    return ExitCode.OK if verdict.is_same else ExitCode.FAILED


def _sync(arguments: Arguments) -> int:
    given = arguments.hostfile
    hostfile = local_hostfile(1, "sync") if given is None else read_hostfile(given)
    flags = Flags(
        model=arguments.model,
        adapter=arguments.adapter_path,
        sharding=arguments.sharding,
        context=arguments.context,
        ssh_config=arguments.ssh_config,
        is_offline=arguments.offline,
        host="127.0.0.1",
    )
    config = build_config(hostfile, flags, {})
    options = sync_command.SyncOptions(is_full=arguments.full, verify=arguments.verify)
    console = Console(sys.stderr if arguments.json else None)
    synced = sync_command.sync(config, options, console)
    if arguments.json:
        print(json.dumps([asdict(each.brought) for each in synced], indent=1))
    else:
        for line in sync_command.lines(synced):
            print(line)
    return ExitCode.OK


def _report(arguments: Arguments) -> int:
    config, folder = report.target_of(arguments.target, arguments.model, arguments.ssh_config, os.environ)
    path = Path(arguments.output).expanduser().resolve() if arguments.output else report.default_path()
    made = report.report(config, folder, os.environ, path, print, arguments.lines)
    print(f"\n{path} has, without names, keys, prompts and paths of yours:")
    for name, size in made:
        print(f"  {name:24} {size:8} bytes")
    print(f"Look at it before you send it: tar -xzOf {path} | less")
    return ExitCode.OK


def _bench(arguments: Arguments) -> int:
    if not arguments.probe:
        raise SettingsError("Give --probe; it is what `bench` can measure.")
    found = bench_command.probe(_chosen_config(arguments), os.environ, print)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found.measurements), indent=1).decode())
    else:
        for line in bench_command.lines(found):
            print(line)
    for fault in found.faults:
        print(f"mlx-mesh: {fault}", file=sys.stderr)
    return ExitCode.FAILED if found.faults else ExitCode.OK


def _doctor(arguments: Arguments) -> int:
    config = _chosen_config(arguments)
    findings = doctor_command.diagnose(config)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=1).decode())
    else:
        for line in doctor_command.lines(findings, arguments.verbose):
            print(line)
    return exit_status(findings)


def _discover(arguments: Arguments) -> int:
    at = discovered.Look(
        timeout_s=arguments.timeout,
        interfaces=tuple(arguments.interface),
        addresses=tuple(arguments.address),
    )
    if arguments.forget is not None:
        print(discover_command.forget(arguments.forget, os.environ))
    elif arguments.pair is not None:
        host = discover_command.pair(arguments.pair, at, os.environ, sys.stdin, sys.stdout)
        print(f"\nPaired with {host.name} (key {host.key}).")
    elif arguments.watch:
        for line in discover_command.watch(at, os.environ):
            print(line, flush=True)
    else:
        made = discovered.look(at, os.environ)
        if arguments.json:
            print(msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
        else:
            for line in discover_command.lines(made, discovered.paired_keys(os.environ)):
                print(line)
        return ExitCode.OK if made.others else ExitCode.FAILED
    return ExitCode.OK


def _agent(arguments: Arguments) -> int:
    if arguments.forget:
        print(agent_command.forget(os.environ))
        return ExitCode.OK
    options = agent_command.AgentOptions(
        port=arguments.port,
        shows_code=arguments.pair,
        interfaces=tuple(arguments.interface),
        is_quiet_on_network=not arguments.announce,
    )
    return agent_command.wait_here(options, os.environ, lambda line: print(line, flush=True))


def _chosen_config(arguments: Arguments) -> LaunchConfig:
    """Of a hostfile, or of ranks on this machine."""
    num_ranks = getattr(arguments, "sim", None)
    if arguments.hostfile is not None and num_ranks is not None:
        raise SettingsError("Give a hostfile or --sim N, not both.")
    if arguments.hostfile is not None:
        hostfile = read_hostfile(arguments.hostfile)
    else:
        hostfile = local_hostfile(2 if num_ranks is None else num_ranks, "sim")
    flags = Flags(
        model=arguments.model,
        adapter=getattr(arguments, "adapter_path", None),
        vision=getattr(arguments, "vision", None),
        sharding=getattr(arguments, "sharding", None),
        kv_bits=getattr(arguments, "kv_bits", None),
        kv_group_size=getattr(arguments, "kv_group_size", None),
        backend=getattr(arguments, "backend", None),
        port=getattr(arguments, "port", None),
        ssh_config=arguments.ssh_config,
        host="127.0.0.1",
        num_replicas=1,
    )
    return build_config(hostfile, flags, {})


# ---------------------------------------------------------------- the words


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-mesh", description="Serve one MLX model over several machines.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"mlx-mesh {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)

    def command(name: str, run: Callable[[Arguments], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
        made.set_defaults(run=run)
        made.add_argument("--debug", action="store_true", help="show a traceback with an error")
        return made

    up_parser = command("up", _up, "Bring a mesh up and keep it up until Ctrl-C.")
    up_parser.add_argument("hostfile", nargs="?", help="hosts.yaml, or a JSON hostfile of mlx.launch")
    up_parser.add_argument("--sim", type=int, metavar="N", help="N ranks on this machine, without a hostfile")
    up_parser.add_argument(
        "--discover", action="store_true", help="the hosts are this one and those that `discover` finds"
    )
    found = up_parser.add_argument_group("with --discover")
    found.add_argument("--hosts", type=int, metavar="N", help="so many, with this one; fewer are an error")
    found.add_argument("--no-local", action="store_true", help="this host takes no part")
    found.add_argument(
        "--discover-timeout",
        type=float,
        default=discovered.DISCOVER_S,
        metavar="S",
        help=f"how long to look (default {discovered.DISCOVER_S:g})",
    )
    _add_address_flag(found)
    up_parser.add_argument("--sharding", type=_sharding, help=f"{SHARDINGS}; default: auto")
    up_parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="SPEC",
        help="with --sim: make a rank fail, like kill:1@decode+5 (docs/failures.md)",
    )
    up_parser.add_argument(
        "--elastic",
        action="store_true",
        help="take a host in again by itself that comes back after the mesh went on without it",
    )
    up_parser.add_argument(
        "--allow-wifi", action="store_true", help="let data go over Wi-Fi where hosts have no cable in common"
    )
    up_parser.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="NAME",
        help="let data go over this interface only, on all hosts (en5, en*), or never over it (^en0); may be "
        "repeated",
    )
    up_parser.add_argument(
        "--sync",
        choices=("auto", "never"),
        help="auto: bring the model to hosts that lack it; default: the hostfile's, or auto",
    )
    up_parser.add_argument("--backend", type=_backend, help="auto, ring, jaccl, jaccl-ring or nccl")
    _add_launch_flags(up_parser)

    serve = command("serve", _serve, "Serve a model from this machine alone.")
    _add_launch_flags(serve)

    plan = command("plan", _plan, "Show where a model fits and how fast it would be. Loads nothing.")
    plan.add_argument("model", metavar="MODEL", help="folder or hub id")
    plan.add_argument("hostfile", nargs="?", help="ask these hosts what they have")
    plan.add_argument("--nodes", type=int, metavar="N", help="so many hosts instead")
    plan.add_argument("--memory", default="", metavar="SIZES", help="of each: 64GB, or 128GB,64GB")
    plan.add_argument("--chip", default="", metavar="CHIPS", help="of each: 'M4 Max', or 'M3 Ultra,M4 Max'")
    plan.add_argument("--link", default="", metavar="LINK", help=f"between hosts: {', '.join(LINKS)}")
    plan.add_argument("--context", default="4096", metavar="TOKENS", help="like 32k (default 4096)")
    plan.add_argument("--sequences", type=int, default=4, metavar="N", help="at the same time (default 4)")
    plan.add_argument("--revision", default="", help="of a hub model: branch, tag or commit")
    plan.add_argument("--offline", action="store_true", help="ask no hub")
    plan.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    plan.add_argument("--json", action="store_true", help="machine-readable")

    _add_adapter_flag(plan)
    _add_kv_flags(plan)

    sync = command("sync", _sync, "Bring a model, or each host's part of it, to the hosts.")
    sync.add_argument("model", metavar="MODEL", help="folder or hub id")
    sync.add_argument("hostfile", nargs="?", help="default: this machine")
    sync.add_argument("--full", action="store_true", help="all of the model to every host")
    sync.add_argument(
        "--verify", action="store_true", help="read again what is there, and compare it by SHA-256"
    )
    sync.add_argument("--sharding", type=_sharding, help=f"of the plan: {SHARDINGS}; default: the hostfile's")
    sync.add_argument("--context", type=int, metavar="TOKENS", help="of the plan, as for `up`")
    sync.add_argument("--offline", action="store_true", help="ask no hub; a host must have the model")
    sync.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    sync.add_argument("--json", action="store_true", help="machine-readable")
    _add_adapter_flag(sync)

    verify = command("verify", _verify, "Compare a mesh's answers with those of one host.")
    verify.add_argument("model", metavar="MODEL", help="folder or hub id")
    verify.add_argument("hostfile", nargs="?", help="default: two ranks on this machine")
    verify.add_argument("--sharding", type=_sharding, help=f"{SHARDINGS}; default: auto")
    _add_adapter_flag(verify)
    _add_kv_flags(verify)
    verify.add_argument(
        "--layer-by-layer",
        action="store_true",
        help="never hold the model whole on the leader; else only when it does not fit there",
    )
    bench = command("bench", _bench, "Measure hosts and links, for better plans.")
    bench.add_argument("hostfile", nargs="?", help="default: this machine")
    bench.add_argument("--model", help="default: the hostfile's")
    bench.add_argument("--probe", action="store_true", help="memory, matrix and link rates; seconds")
    for made in (verify, bench):
        made.add_argument("--sim", type=int, metavar="N", help="N ranks on this machine")
        made.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
        made.add_argument("--json", action="store_true", help="machine-readable")

    report_parser = command("report", _report, "Write one archive for a bug report, without names and keys.")
    report_parser.add_argument(
        "target", nargs="?", metavar="NAME|hosts.yaml", help="default: the mesh that runs"
    )
    report_parser.add_argument("--model", help="default: the hostfile's")
    report_parser.add_argument("--output", metavar="FILE", help="default: mlx-mesh-report-TIME.tar.gz here")
    report_parser.add_argument(
        "--lines", type=int, default=report.NUM_LOG_LINES, metavar="N", help="last lines of each log (400)"
    )
    report_parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")

    doctor = command("doctor", _doctor, "Say what is wrong with hosts, and what to do; changes nothing.")
    doctor.add_argument("hostfile", nargs="?", help="default: this machine")
    doctor.add_argument("--model", help="default: the hostfile's")
    doctor.add_argument("--backend", type=_backend, help="what the hosts are wanted for (default: auto)")
    doctor.add_argument("--port", type=int, help="that the leader is to serve on")
    doctor.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    doctor.add_argument("--verbose", action="store_true", help="also what is right")
    doctor.add_argument("--json", action="store_true", help="machine-readable")

    trust_command.add_parser(command)
    init_command.add_parser(command)
    net_command.add_parser(command)

    discover = command("discover", _discover, "Show which hosts are on the network, and pair with one.")
    discover.add_argument("--json", action="store_true", help="machine-readable")
    discover.add_argument("--watch", action="store_true", help="go on, and show what changes")
    discover.add_argument(
        "--timeout",
        type=float,
        default=SCAN_S,
        metavar="S",
        help=f"how long to look (default {SCAN_S:g})",
    )
    _add_address_flag(discover)
    discover.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="NAME",
        help="look on this one only (en5, en*), or not on it (^en0); may be repeated",
    )
    discover.add_argument("--pair", metavar="HOST", help="with the code that its agent shows, from stdin")
    discover.add_argument("--forget", metavar="HOST", help="trust a paired host no more")

    agent = command("agent", _agent, "Announce this host, and wait for launchers that are paired with it.")
    agent.add_argument("--pair", action="store_true", help="show a code, with which one launcher can pair")
    agent.add_argument(
        "--port",
        type=int,
        default=AGENT_PORT,
        metavar="N",
        help=f"where it waits (default {AGENT_PORT}); 0 = a free one",
    )
    agent.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="NAME",
        help="announce on this one only (en5, en*), or not on it (^en0); may be repeated",
    )
    agent.add_argument(
        "--no-announce", dest="announce", action="store_false", help="wait without telling the network"
    )
    agent.add_argument("--forget", action="store_true", help="let no launcher in any more, and end")

    down = command("down", _down, "Stop a mesh.")
    status = command("status", _status, "Show a running mesh and its ranks.")
    logs = command("logs", _logs, "Show what the ranks of a running mesh say.")
    chat = command("chat", _chat, "Chat with a running mesh.")
    mcp = command("mcp", _mcp, "Offer a running mesh to MCP clients over standard input and output.")
    node = command("node", _node, "Take a host out of a running mesh, or in again.")
    node.add_argument("action", choices=["drain", "add"], help="go on without the host, or with it again")
    node.add_argument("host", metavar="HOST", help="its name in the hostfile")
    model = command("model", _model, "Unload the model of a running mesh, or load it or another one.")
    model.add_argument("action", choices=["unload", "load"], help="end the engines, or begin them again")
    model.add_argument("--model", help="with load: another one of the allowed (default: the last one)")
    for made in (down, status, node, model, logs, chat, mcp):
        made.add_argument("target", nargs="?", metavar="NAME|hosts.yaml", help="default: the one that runs")
    for made in (status, node, model, chat, mcp):
        made.add_argument(
            "--api-key-file", metavar="FILE", help="default: MLX_MESH_API_KEY, or what `up` was given"
        )
    status.add_argument("--json", action="store_true", help="machine-readable")
    logs.add_argument("--rank", type=int, metavar="K", help="only this rank")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    logs.add_argument(
        "-n", "--lines", type=int, default=50, metavar="N", help="last lines per rank (default 50)"
    )
    chat.add_argument("--url", help="any OpenAI-compatible server, like http://127.0.0.1:18000")
    mcp.add_argument("--url", help="a mesh by its address, like http://127.0.0.1:18000")
    chat.add_argument(
        "-p", "--prompt", help="ask this once and print the answer; without it, what is piped in"
    )
    chat.add_argument("--system", default="", help="system message")
    chat.add_argument("--max-tokens", type=int, metavar="N")
    chat.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest answer"
    )
    return parser


def _add_address_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="ask this host, too, without multicast; may be repeated",
    )


def _add_adapter_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter-path", metavar="DIR", help="LoRA or DoRA adapter, a folder on each host")
    parser.add_argument(
        "--vision",
        action=argparse.BooleanOptionalAction,
        help="serve the model with or without its vision tower (default: with, where mlx-vlm can)",
    )


def _add_kv_flags(parser: argparse.ArgumentParser) -> None:
    bits, sizes = ", ".join(map(str, KV_BITS)), ", ".join(map(str, KV_GROUP_SIZES))
    parser.add_argument("--kv-bits", type=int, metavar="N", help=f"quantise the KV cache to {bits} bits")
    parser.add_argument("--kv-group-size", type=int, metavar="N", help=f"in groups of {sizes} (default 64)")


def _add_launch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", help="folder or hub id; wins over the hostfile's")
    _add_adapter_flag(parser)
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
    _add_kv_flags(parser)
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


def _sharding(text: str) -> Sharding:
    if text == Sharding.NONE:
        raise argparse.ArgumentTypeError("none is what one rank has by itself; use auto")
    try:
        return Sharding(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not known; use {SHARDINGS}") from None


def _backend(text: str) -> Backend:
    if text == "mpi":
        raise argparse.ArgumentTypeError(MPI_REASON)
    if text == Backend.NONE:
        raise argparse.ArgumentTypeError("none is what one rank has by itself; use auto")
    try:
        return Backend(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not known; use auto, ring, jaccl, jaccl-ring or nccl"
        ) from None


def _flags(arguments: Arguments) -> Flags:
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
