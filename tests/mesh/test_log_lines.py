"""Log lines as JSON: the same keys whoever speaks, in rank files and in the launcher's output."""

from __future__ import annotations

import io
import json
from pathlib import Path

from mlx_mesh.launcher.console import Console
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.logs import RankLogs

KEYS = {"timestamp", "level", "component", "rank", "host", "message"}


def test_a_ranks_file_has_an_object_per_line_and_names_the_agents_children(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path, is_json=True)
    logs.write(0, "mac1", 'it said "yes" [2 x]')
    logs.write(0, "mac1", "proxy: chatcmpl-1: 3 prompt tokens")
    logs.close()
    first, second = map(json.loads, (tmp_path / "rank-0.log").read_text().splitlines())
    assert set(first) == set(second) == KEYS
    assert (first["component"], first["rank"], first["host"]) == ("engine", 0, "mac1")
    assert first["message"] == 'it said "yes" [2 x]'
    assert (second["component"], second["message"]) == ("proxy", "chatcmpl-1: 3 prompt tokens")


def test_all_that_a_launcher_prints_is_json() -> None:
    out = io.StringIO()
    console = Console(out, is_terminal=True, is_json=True)
    console.say("two\nlines")
    console.warn("a host is slow")
    console.log("1", "mac2", "loaded\x1b[2J")
    console.log("agent", "mac2", "joined")
    console.progress(0, "mac1", Phase.LOADING, 1, 4, "")
    console.ready("studio", "http://x", "1 rank", ["Ctrl-C stops"])
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all(set(line) == KEYS for line in lines)
    assert [line["message"] for line in lines[:3]] == ["two", "lines", "a host is slow"]
    assert (lines[2]["level"], lines[2]["component"]) == ("warning", "launcher")
    assert (lines[3]["component"], lines[3]["rank"], lines[3]["host"]) == ("engine", 1, "mac2")
    assert "\x1b" not in lines[3]["message"] and lines[4]["component"] == "agent"
