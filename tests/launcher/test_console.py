"""What a terminal or a log gets to see."""

from __future__ import annotations

import io

import pytest

from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.status import status_lines
from mlx_mesh.launcher.text import harmless, table
from mlx_mesh.mesh.placement import PlanRow
from mlx_mesh.mesh.types import Phase, Placement, Shard, Sharding


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain\twords é", "plain\twords é"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;my title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("10%\r20%\r30%", "30%"),
        ("a\x00b\x7fc\x9b31m", "abc31m"),
        ("\x1b", ""),
    ],
)
def test_what_others_write_cannot_steer_the_terminal(said: str, shown: str) -> None:
    assert harmless(said) == shown


def test_a_table_is_aligned_and_numbers_stand_to_the_right() -> None:
    assert table(["rank", "host"], [["0", "a"], ["10", "longer"]]) == [
        "rank  host",
        "   0  a",
        "  10  longer",
    ]


def test_without_a_terminal_progress_is_told_by_quarters_and_not_twice() -> None:
    out = io.StringIO()
    console = Console(out, is_terminal=False)
    for done in range(101):
        console.progress(0, "mac1", Phase.LOADING, done, 100, "")
        console.progress(0, "mac1", Phase.LOADING, done, 100, "")
    console.progress(1, "mac2", Phase.READY, 0, 0, "")
    assert out.getvalue().splitlines() == [
        *(f"[0 mac1] loading {done}/100" for done in (0, 25, 50, 75, 100)),
        "[1 mac2] ready",
    ]


def test_on_a_terminal_each_rank_has_one_line_and_logs_go_above() -> None:
    out = io.StringIO()
    console = Console(out, is_terminal=True)
    console.progress(0, "mac1", Phase.LOADING, 1, 2, "")
    console.progress(1, "mac2", Phase.LOADING, 1, 2, "")
    console.log("1", "mac2", "a word [bold]with brackets[/bold]")
    console.progress(0, "mac1", Phase.READY, 0, 0, "")
    console.ready("studio", "http://127.0.0.1:1", "2 ranks", ["hint"])
    text = harmless(out.getvalue().replace("\n", "¶")).replace("¶", "\n")
    assert "[1 mac2] a word [bold]with brackets[/bold]" in out.getvalue()
    assert text.rstrip().splitlines()[-2:] == ["studio is ready: http://127.0.0.1:1/v1  (2 ranks)", "  hint"]


def test_a_plan_shows_a_row_per_rank_and_the_reasons() -> None:
    out = io.StringIO()
    shard = Shard(rank=0, host="mac1", start_layer=0, end_layer=4)
    placement = Placement(
        sharding=Sharding.NONE, model_digest="d", num_layers=4, shards=(shard,), reasons=("because",)
    )
    row = PlanRow(
        rank=0,
        host="mac1",
        part="all layers",
        weights_bytes=3 * 10**8,
        kv_bytes=10**6,
        working_bytes=0,
        limit_bytes=8 * 10**9,
    )
    Console(out, is_terminal=False).plan(placement, [row], "org/m", "auto")
    lines = out.getvalue().splitlines()
    assert lines[0] == "Plan: org/m, 1 rank, sharding none, backend auto"
    assert lines[2].split()[:4] == ["0", "mac1", "all", "layers"] and "300 MB" in lines[2]
    assert lines[3].strip() == "because"


def test_the_status_of_a_mesh_that_is_not_ready_gives_the_reason_and_both_rank_numbers() -> None:
    ranks = [
        {
            "rank": 0,
            "user_rank": 1,
            "host": "mac2",
            "is_leader": True,
            "phase": "loading",
            "last_heartbeat_s": 0.5,
        }
    ]
    lines = status_lines(
        {"name": "m", "ready": False, "reason": "rank 1 is gone", "epoch": 2}, {"ranks": ranks}
    )
    assert lines[0] == "m: not ready: rank 1 is gone"
    assert "0 (RANK 1)" in lines[-1] and "mac2 *" in lines[-1] and "0.5 s" in lines[-1]


@pytest.mark.parametrize(
    ("reasons", "line"),
    [
        (("", "", "no tower"), "takes images, audio; no video: no tower"),
        (("", "deaf", "deaf"), "takes images; no audio, video: deaf"),
        (("", "it takes text and images only", "old"), "takes images; no audio; no video: old"),
        (("", "", ""), "takes images, audio, video"),
        (("this model takes text only",) * 3, "takes text only"),
        (
            ("started with --no-vision",) * 3,
            "takes text only; no images, audio, video: started with --no-vision",
        ),
    ],
)
def test_the_status_tells_what_the_model_takes_beside_text(reasons: tuple[str, ...], line: str) -> None:
    kinds = zip(("image", "audio", "video"), reasons, strict=True)
    media = {kind: {"available": not why, "reason": why} for kind, why in kinds}
    lines = status_lines({"model": "m", "ready": True, "media": media}, {})
    assert lines[1:3] == ["  model m", f"  {line}"]
    assert not any("takes" in line for line in status_lines({"model": "m"}, {}))  # not known yet


def test_the_status_tells_that_a_mesh_with_parts_keeps_its_plan() -> None:
    hosts = [
        {"host": "mac1", "state": "serving"},
        {"host": "mac2", "state": "serving", "model_part": "1 of 2 GB"},
    ]
    lines = status_lines({"name": "x", "ready": True}, {"ranks": [], "hosts": hosts})
    assert any("only on mac2 (1 of 2 GB): the mesh does not go on with fewer hosts" in line for line in lines)


def test_the_status_tells_what_holds_hosts_awake_and_what_happened_to_them() -> None:
    hosts = [
        {"host": "mac1", "state": "serving", "awake": "by caffeinate (pid 7)", "events": []},
        {"host": "mac2", "state": "serving", "events": ["05:10: the machine slept for 312 s"]},
    ]
    lines = status_lines({"name": "x", "ready": True}, {"ranks": [], "hosts": hosts})
    assert "held awake: mac1 by caffeinate (pid 7)" in lines
    assert "mac2: 05:10: the machine slept for 312 s" in lines
