"""What `up` and `serve` do once they know what to bring up: attached, detached, or the plan only."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TextIO, cast

from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.detach import Outcome, RotatingLog, detach, tell
from mlx_mesh.launcher.error_text import ERROR_PREFIX, told
from mlx_mesh.launcher.state import StateFolder, already_running, state_root
from mlx_mesh.launcher.up import dry_run, up
from mlx_mesh.mesh.errors import ExitCode, MeshError


def bring_up(arguments: argparse.Namespace, config: LaunchConfig) -> int:
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
