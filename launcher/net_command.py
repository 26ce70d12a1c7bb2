"""`mlx-mesh net plan`: addresses for the Thunderbolt cables between hosts, as commands to type on each.

Nothing is changed without --apply, and then only where sudo asks nothing. What was done is noted here with
its undo, command by command, so that `--undo` takes back exactly that, also after a half-done run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from mlx_mesh.launcher.asking import Answer, ask_hosts
from mlx_mesh.launcher.config import LaunchConfig, read_hostfile
from mlx_mesh.launcher.preflight import open_host
from mlx_mesh.launcher.remote import RemoteHost
from mlx_mesh.launcher.remote import run as run_there
from mlx_mesh.launcher.state import state_root
from mlx_mesh.mesh.doctor import Level
from mlx_mesh.mesh.errors import ExitCode, MeshError, PreflightError, SettingsError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.interfaces import LinkClass
from mlx_mesh.mesh.net_plan import HostSteps, NetPlan, Step, plan_network, plan_undo

COMMAND_S = 60.0

Say = Callable[[str], None]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["plan"], help="print the commands for each host, and their undo")
    parser.add_argument("hostfile", nargs="?", default="hosts.yaml", help="default hosts.yaml")
    parser.add_argument("--apply", action="store_true", help="run them, where `sudo -n` asks nothing")
    parser.add_argument("--undo", action="store_true", help="plan what takes an earlier plan back")
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    if arguments.apply and arguments.json:
        raise SettingsError("--json prints a plan; --apply carries one out. Give one of them.")
    hostfile = read_hostfile(arguments.hostfile)
    config = LaunchConfig(
        name=hostfile.name,
        model="",
        hosts=hostfile.hosts,
        ssh_config=str(Path(arguments.ssh_config).expanduser().resolve()) if arguments.ssh_config else "",
    )
    answers = ask_hosts(config)
    check_answers(answers)
    notes = Notes(state_root(os.environ) / "net-undo.json")
    plan = undo_of(answers, notes) if arguments.undo else plan_network(_reports(answers))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=1).decode())
        return ExitCode.OK
    for line in lines(plan, is_undo=arguments.undo):
        print(line)
    if plan.is_done or not arguments.apply:
        return ExitCode.OK
    return _apply(plan, answers, config, notes, is_undo=arguments.undo)


def check_answers(answers: Sequence[Answer]) -> None:
    """Raises PreflightError with the first failing step of each host that did not answer."""
    failed = [
        f"{finding.host}: {finding.check}: {finding.evidence}; {finding.fix}"
        for answer in answers
        if answer.examined is None
        for finding in answer.findings
        if finding.level is Level.FAIL
    ]
    if failed:
        raise PreflightError("\n".join(failed) + "\nan address is free only when every host says so")


def _reports(answers: Sequence[Answer]) -> list[tuple[str, HostReport]]:
    return [(a.entry.name, a.examined.report) for a in answers if a.examined is not None]


def lines(plan: NetPlan, *, is_undo: bool) -> list[str]:
    """For people: the cables, each host's commands, and how to take them back."""
    told = [f"note: {note}" for note in plan.notes]
    told += [f"cable: {cable}" for cable in plan.cables]
    for own in plan.hosts:
        if not own.steps:
            continue
        told += ["", f"on {own.host}, in this order:"]
        told += [f"  {step.command}    # {step.why}" for step in own.steps]
        if not is_undo:
            told.append("  to undo:")
            told += [f"    {step.undo_command}" for step in reversed(own.steps)]
    if plan.is_done:
        told.append("Nothing is to be undone." if is_undo else "Nothing is to be done.")
    return told


# ---------------------------------------------------------------- what was done


class Notes:
    """What was done on which Mac, by hardware id (host name without one), with its undo; newest last."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, list[Step]]:
        """Raises MeshError."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, list[Step]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise MeshError(
                f"{self._path}, which notes what was done, cannot be read ({error}). Remove it to plan an "
                "undo from what the hosts have now."
            ) from error

    def write(self, done: Mapping[str, Sequence[Step]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode({key: steps for key, steps in done.items() if steps}))
        new.replace(self._path)

    def add(self, key: str, step: Step) -> None:
        done = self.read()
        self.write(done | {key: [*done.get(key, []), step]})

    def remove_last(self, key: str) -> None:
        done = self.read()
        self.write(done | {key: done.get(key, [])[:-1]})


def _key(answer: Answer) -> str:
    assert answer.examined is not None
    return answer.examined.report.hardware_uuid or answer.entry.name


def undo_of(answers: Sequence[Answer], notes: Notes) -> NetPlan:
    """What was noted, in reverse; of hosts without a note, what can be told from their services."""
    done = notes.read()
    derived = {own.host: own.steps for own in plan_undo(_reports(answers)).hosts}
    return NetPlan(
        hosts=tuple(
            HostSteps(
                host=answer.entry.name,
                steps=tuple(
                    Step(words=step.undo, undo=step.words, why=f"takes back: {step.why}")
                    for step in reversed(done.get(_key(answer), []))
                )
                or derived[answer.entry.name],
            )
            for answer in answers
            if answer.examined is not None
        )
    )


# ---------------------------------------------------------------- carrying it out


def _apply(
    plan: NetPlan, answers: Sequence[Answer], config: LaunchConfig, notes: Notes, *, is_undo: bool
) -> int:
    """Host by host; a host where sudo asks is left to its user. Returns the exit status."""
    keys = {answer.entry.name: _key(answer) for answer in answers}
    reports = dict(_reports(answers))
    entries = {entry.name: entry for entry in config.hosts}
    left: list[str] = []
    for own in plan.hosts:
        if own.steps:
            with _opened(entries[own.host], config.ssh_config) as remote:
                if cable := cable_reached_over(remote.peer_address, reports[own.host]):
                    left.append(
                        f"{own.host} is reached over {cable}, which the commands change: type them there by "
                        "hand, or reach it over another network first."
                    )
                    continue
                left += apply_host(remote, own, keys[own.host], notes, is_undo=is_undo)
    for line in left:
        print(line)
    return ExitCode.PREFLIGHT if left else ExitCode.OK


def cable_reached_over(address: str, report: HostReport) -> str:
    """The Thunderbolt interface that has the address under which a host is reached; '' = another one."""
    return next(
        (
            interface.what
            for interface in report.facts.interfaces
            if interface.link_class is LinkClass.THUNDERBOLT
            and any(text.partition("/")[0] == address for text in interface.addresses)
        ),
        "",
    )


@contextlib.contextmanager
def _opened(entry: HostEntry, ssh_config: str) -> Iterator[RemoteHost]:
    remote = open_host(entry, ssh_config)
    try:
        yield remote
    finally:
        remote.close()


def apply_host(remote: RemoteHost, own: HostSteps, key: str, notes: Notes, *, is_undo: bool) -> list[str]:
    """What is left for its user, in words; [] when all was done."""
    asked = sudo(remote, ["true"])
    if asked:
        return [
            f"{own.host}: `sudo -n` does not work there ({asked}). Type the commands above on it by hand."
        ]
    for number, step in enumerate(own.steps):
        failed = sudo(remote, step.words)
        if failed:
            rest = "; ".join(step.command for step in own.steps[number:])
            return [f"{own.host}: {step.command} failed ({failed}). Left to do there: {rest}"]
        print(f"{own.host}: {step.command}: done", flush=True)
        if is_undo:
            notes.remove_last(key)
        else:
            notes.add(key, step)
    return []


def sudo(remote: RemoteHost, words: Sequence[str]) -> str:
    """Run a command as root, asking nothing; '' or why not. A login shell's PATH may lack the system's own
    tools. Raises HostFault and CommandTimeout."""
    script = 'PATH="$PATH:/usr/bin:/bin:/usr/sbin:/sbin"; exec sudo -n "$@"'
    done = run_there(remote, ["/bin/sh", "-c", script, "sh", *words], b"", COMMAND_S)
    if done.exit.code == 0 and not any("Error" in line for line in done.stdout):
        return ""
    return done.last_words() or str(done.exit)
