"""Compare every tiny family with towers, divided in several ways, with mlx-vlm on one process; print tables.

Each family runs in a process of its own with a limit. Ranks are simulated inside it; the other ranks' towers
are poisoned. A prompt with a picture is read in chunks that end inside the picture, then five tokens are
decoded; the same with a video, and with a video and a picture, where the family takes videos; then prompts of
pictures, videos and text share a batch. Families that take audio have a table of their own: two sounds, and a
picture and a sound.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "node" / "engine"
LIMIT_S = 600.0
BOUND = 2e-5
DOCUMENT = ROOT / "docs" / "vision.md"
END = "<!-- end of table -->"


def load(name: str) -> ModuleType:
    """A helper module of the engine tests."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def try_family(family: str) -> dict[str, str]:
    """One row: what each plan gave, and how rows go together."""
    import mlx.core as mx

    from mlx_mesh.node.engine.certificate import certify
    from mlx_mesh.node.engine.language_part import LanguagePart
    from mlx_mesh.node.engine.loader import LazyModel
    from mlx_mesh.node.engine.shard import shard_model
    from mlx_mesh.node.engine.trace import trace_model
    from mlx_mesh.node.vision import why_alone, why_no_audio, why_no_video, why_whole

    tiny, tiny_vlm, simulator = load("tiny"), load("tiny_vlm"), load("simulator")
    config, hears = tiny_vlm.CONFIGS[family], family in tiny_vlm.HEARING
    refusal = tiny_vlm.refusal(family)
    if refusal:
        return dict.fromkeys(COLUMNS, "–") | {"rows": f"refused: {refusal}"}

    def opened(*, is_blind: bool = False) -> tuple[Any, LazyModel]:
        whole = tiny_vlm.build(family, is_blind=is_blind)
        return whole, LazyModel(
            Path(family), LanguagePart(whole.language_model), tiny_vlm.CONFIGS[family], {}
        )

    whole, lazy = opened()
    trace = trace_model(lazy.model)
    legal = [cut for cut in range(1, trace.num_layers) if not trace.why_not(cut)]
    proposal = certify(lazy, trace).proposal
    plans = {
        "pipeline 2": tiny.stages(trace.num_layers, [legal[len(legal) // 2]]),
        "pipeline 3": tiny.stages(trace.num_layers, [legal[0], legal[-1]]),
        "tensor 2": tiny.slices(trace.num_layers, [1, 1]),
    }

    def gaps_of(prompt: Any) -> dict[str, float]:
        """By plan; infinite when the tokens are others."""
        expected, tokens = tiny_vlm.reference(whole, family, 5, prompt=prompt)
        ids, features = tiny_vlm.features_in(whole, family, prompt)
        chunks = tiny_vlm.chunks_of(features.length)
        gaps = {
            "alone": float(tiny.gap(tiny_vlm.forward(lazy.model, ids, features, chunks, tokens), expected))
        }
        for name, placement in plans.items():

            def body(rank: int, exchange: Any, name: str = name, placement: Any = placement) -> Any:
                own, mine = opened(is_blind=family in tiny_vlm.LARGE_TOWERS)
                if rank:
                    tiny_vlm.poison_tower(own)
                shard = shard_model(
                    mine,
                    placement,
                    rank,
                    exchange,
                    tiny.ignore_progress,
                    proposal=proposal if name == "tensor 2" else None,
                    trace=trace_model(mine.model),
                )
                return tiny_vlm.forward(shard.model, ids, features, chunks, tokens)

            logits = simulator.Simulator(placement.world_size).run(body)[0]
            same = [int(mx.argmax(one).item()) for one in logits[:-1]] == tokens
            gaps[name] = float(tiny.gap(logits, expected)) if same else math.inf
        return gaps

    first, *others = tiny_vlm.heard(family).values() if hears else [tiny_vlm.picture(family)]
    row = {name: cell(gap) for name, gap in gaps_of(first).items()}
    row["with a picture"] = cell(max(gaps_of(others[0]).values())) if others else ""
    shown = [("picture", 1), ("picture", 2)]
    row["video"] = ""
    if not hears and not why_no_video(config):
        prompts = [tiny_vlm.SHOWN[kind](family) for kind in ("video", "both")]
        row["video"] = cell(max(gap for prompt in prompts for gap in gaps_of(prompt).values()))
        shown += [("video", 1), ("both", 2)]
    alone = why_alone(config)
    if hears and (refusal := why_no_audio(config)):
        row["rows"] = f"not served: {refusal}"
    elif alone:
        row["rows"] = f"one at a time: {alone}"
    else:
        part = LanguagePart(whole.language_model)
        rows = (
            tiny_vlm.rows_with_sounds(whole, family) if hears else tiny_vlm.prompts_of(whole, family, shown)
        )
        single = {name: tiny_vlm.generate(part, {name: one}, 12)[name] for name, one in rows.items()}
        row["rows"] = "batched" if tiny_vlm.generate(part, rows, 12) == single else "**differ in a batch**"
    if why := why_whole(config):
        row["rows"] += f"; read in one piece: {why}"
    return row


def cell(gap: float) -> str:
    if gap == 0:
        return "exact"
    if math.isinf(gap):
        return "**other tokens**"
    return f"{gap:.0e}" if gap <= BOUND else f"**{gap:.0e}**"


COLUMNS = ("alone", "pipeline 2", "pipeline 3", "tensor 2", "video", "with a picture", "rows")
TABLES = (
    ("tiny_vlm_configs.json", "<!-- table: scripts/vision_table -->", "with a picture"),
    ("tiny_audio_configs.json", "<!-- table: scripts/vision_table, audio -->", "video"),
)
"""Families by file, where their table begins in the document, and the column that it does not have."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/vision_table", description=__doc__)
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(try_family(arguments.one)))
        return 0
    for file, begin, no_column in TABLES:
        known = list(json.loads((TESTS / file).read_text()))
        names = [name for name in arguments.families or known if name in known]
        columns = [column for column in COLUMNS if column != no_column]
        if names:
            print_table(names, columns, begin if arguments.write else "")
    return 0


def print_table(names: list[str], columns: list[str], begin: str) -> None:
    """Of these families; into the document as well, behind `begin`, unless that is ''."""
    lines = [f"| family | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    num_good = 0
    for name in names:
        try:
            ended = subprocess.run(
                [sys.executable, __file__, "--one", name],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=True,
            )
            row = json.loads(ended.stdout.splitlines()[-1])
            num_good += not any("**" in row[column] or row[column] == "–" for column in columns)
        except subprocess.TimeoutExpired:
            row = dict.fromkeys(COLUMNS, "–") | {"rows": f"not tried: over {LIMIT_S:g} s"}
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no word"])[-1][:120]
            row = dict.fromkeys(COLUMNS, "–") | {"rows": f"not tried: {last}"}
        lines.append(f"| {name} | {' | '.join(row[column] for column in columns)} |")
        print(lines[-1], flush=True)
    print(f"{num_good} of {len(names)} families are served, and right by every plan", flush=True)
    if begin:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(f"{before}{begin}\n{chr(10).join(lines)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
