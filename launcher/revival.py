"""A follower's agent that is gone while the mesh runs: its host is reached again, what is left of the old
agent ended, and the host handed back so that a new one can be started there.

There is no limit on the whole: a host may come back after hours, and the mesh goes on or waits without it
meanwhile. Each try has its own deadlines (ConnectTimeout, OLD_AGENT_S), and the pauses between tries grow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlx_mesh.launcher.preflight import open_host, python_of
from mlx_mesh.launcher.remote import RemoteHost, run_program
from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.mesh.host_entry import HostEntry

OLD_AGENT_S = 5.0  # an agent whose connection was lost: to end by itself, by TERM, by KILL, so long each
PROGRAM_MARGIN_S = 20.0
LONGEST_PAUSE_S = 30.0
SHORT_LIFE_S = 30.0
"""An agent that ends sooner than this after its start is started again later each time."""


def pause_s(num_tries: int) -> float:
    """Before try number `num_tries`: none at first, then 1, 2, 4 ... at most 30 s."""
    return 0.0 if num_tries <= 0 else min(LONGEST_PAUSE_S, 2.0 ** min(num_tries - 1, 10))


def reach_again(
    entry: HostEntry,
    ssh_config: str,
    old_agent: tuple[int, str],
    num_tries: int,
    give_up: threading.Event,
    on_trouble: Callable[[str], None],
) -> RemoteHost | None:
    """Connect, and see that the old agent (pid and start time, '' = never identified) is gone. Tries until
    `give_up` is set (None). `on_trouble` hears why each try failed."""
    while not give_up.wait(pause_s(num_tries)):
        num_tries += 1
        remote: RemoteHost | None = None
        try:
            remote = open_host(entry, ssh_config)
            _end_old_agent(entry, remote, *old_agent)
        except MeshError as error:
            if remote is not None:
                remote.close()
            on_trouble(str(error))
            continue
        return remote
    return None


def _end_old_agent(entry: HostEntry, remote: RemoteHost, pid: int, started: str) -> None:
    """Its stdin has ended with the connection, or will; one that was never identified is left to that."""
    if not pid or not started:
        return
    request = {
        "do": "end",
        "processes": [[pid, started]],
        "wait_s": OLD_AGENT_S,
        "term_s": OLD_AGENT_S,
        "kill_s": OLD_AGENT_S,
    }
    run_program(remote, python_of(entry), "processes", request, 3 * OLD_AGENT_S + PROGRAM_MARGIN_S)
