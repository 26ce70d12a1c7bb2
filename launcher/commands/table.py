"""All commands, in the order of `--help`. A command's module is imported when the command is called: several
take libraries (SSH, tables for terminals) that the others never need."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast


class CommandModule(Protocol):
    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """What may stand behind the command's name."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it. Returns the exit status; raises MeshError."""


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    text: str
    module: str = ""  # under `launcher`; '' = the one of its name in this folder

    def load(self) -> CommandModule:
        where = self.module or f"commands.{self.name}"
        return cast("CommandModule", importlib.import_module(f"mlx_mesh.launcher.{where}"))


COMMANDS: Sequence[Command] = (
    Command("up", "Bring a mesh up and keep it up until Ctrl-C."),
    Command("serve", "Serve a model from this machine alone."),
    Command("plan", "Show where a model fits and how fast it would be. Loads nothing."),
    Command("sync", "Bring a model, or each host's part of it, to the hosts."),
    Command("verify", "Compare a mesh's answers with those of one host."),
    Command("bench", "Measure hosts and links, for better plans."),
    Command("report", "Write one archive for a bug report, without names and keys."),
    Command("doctor", "Say what is wrong with hosts, and what to do; changes nothing."),
    Command("trust", "Show a host's SSH key, and record it when you say so.", "trust_command"),
    Command("init", "Ask hosts over SSH what they are, and write hosts.yaml.", "init_command"),
    Command("net", "Plan addresses for the Thunderbolt cables between hosts.", "net_command"),
    Command("discover", "Show which hosts are on the network, and pair with one."),
    Command("agent", "Announce this host, and wait for launchers that are paired with it."),
    Command("down", "Stop a mesh."),
    Command("status", "Show a running mesh and its ranks."),
    Command("logs", "Show what the ranks of a running mesh say."),
    Command("chat", "Chat with a running mesh."),
    Command("mcp", "Offer a running mesh to MCP clients over standard input and output."),
    Command("node", "Take a host out of a running mesh, or in again."),
    Command("model", "Unload the model of a running mesh, or load it or another one."),
)
