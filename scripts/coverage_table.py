"""Compare every mlx-lm architecture, divided in several ways, with one process; write docs/models.md's table.

Each architecture runs in a process of its own with a limit, with a tiny random float32 model: a prefill in 3
chunks and decoding with a cache, then a batch of three lengths that grows and shrinks, by every plan. Ranks
are simulated inside the process (tests/node/engine/simulator.py). For three equal ranks the config is made
fit for three where it is not (tests/node/engine/widening.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENGINE_TESTS = ROOT / "tests" / "node" / "engine"
LIMIT_S = 900.0
EXACT = 1e-4  # a tensor gap above this is a failure; pipelines must be 0
FULL_SLACK = 0.06  # fully split: the largest share is at most 1/N + this
TENSOR_PLANS = ((1, 1), (1, 1, 1), (2, 1))
LLAMA = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64, "hidden_size": 128}
SHAPES = {
    "llama": LLAMA | {"intermediate_size": 384, "num_hidden_layers": 4},
    "qwen3_moe": LLAMA | {"moe_intermediate_size": 384, "intermediate_size": 384},
    "gpt_oss": LLAMA | {"intermediate_size": 192},
}
"""Wide enough for quantisation groups of 64."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind}, {bits} bit, groups of {size}": (kind, {"quantization": {"bits": bits, "group_size": size}})
    for kind in ("llama", "qwen3_moe")
    for bits in (4, 8)
    for size in (32, 64)
} | {
    "gpt_oss, experts in mxfp4": (
        "gpt_oss",
        {"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}, "quantized_parts": "experts"},
    ),
    "llama with a LoRA adapter": ("llama", {"adapter_rank": 4}),
    "llama, 4 bit, with a LoRA adapter": (
        "llama",
        {"quantization": {"bits": 4, "group_size": 32}, "adapter_rank": 4},
    ),
}
"""Quantised and adapted models, in a table of their own: (architecture, changes to its config)."""

BEGIN, END = "<!-- table: scripts/coverage_table -->", "<!-- end of table -->"

REASONS = {
    "bitnet": "its linears are a Metal kernel, which a CPU cannot run even whole",
    "muse_spark": "its experts are a Metal kernel, which a CPU cannot run even whole",
    "gear": "mlx-lm's own forward with a cache raises for this config, even whole",
    "phi3small": "mlx-lm's own forward corrupts memory with a small config, even whole",
    "olmo": "mlx-lm needs the package ai2-olmo for it",
    "prism_hadamard_qwen35": "there is no small config for it",
}
"""Architectures that do not run whole here, so that there is nothing to compare with."""

NOTES = {
    "afm7": "rounds keys and values to 8-bit steps: noise of 1e-7 can move one (9e-02 seen)",
    "deepseek_v41": "its caches (LayerCache) can be neither ticked by a placeholder nor batched by mlx-lm",
    "iquestloopcoder": "its forward uses the layers' parts and never calls a layer",
}
"""Why figures differ from what is wanted, where the program cannot tell."""


def load(name: str) -> ModuleType:
    """A helper module of the engine tests."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ENGINE_TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------ one architecture, in a process of its own


def measure(kind: str, batches: bool) -> dict[str, Any]:
    """All figures of one architecture; 'error' instead of a plan's figures says why there are none."""
    tiny, simulator = load("tiny"), load("simulator")
    from mlx_mesh.node.engine.trace import TraceError, trace_model

    config = config_of(tiny, kind)
    lazy = tiny.build(config)
    num_layers = len(lazy.layers)
    row: dict[str, Any] = {"kind": kind, "layers": num_layers, "plans": {}}
    row["upstream_tensor"] = hasattr(lazy.model, "shard")
    row["upstream_pipeline"] = hasattr(getattr(lazy.model, "model", None), "pipeline")
    try:
        reference = tiny.forward(lazy.model)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"}
    alone: dict[int, list[int]] = {}
    try:
        alone = tiny.generate(tiny.build(config).model, None) if batches else {}
    except Exception as error:
        row["remark"] = f"mlx-lm cannot batch it, even whole ({type(error).__name__}: {error})"
    try:
        trace = trace_model(tiny.build(config).model)
        legal = [cut for cut in range(1, num_layers) if not trace.why_not(cut)]
        row["cuts"] = f"{len(legal)} of {num_layers - 1}"
        untraced = ""
    except TraceError as error:
        trace, legal, untraced = None, [], str(error)
        row["cuts"] = "0"
    for name, cuts in _pipelines(legal, num_layers).items():
        if cuts is None:
            row["plans"][name] = {"error": untraced or f"only {len(legal)} legal cuts"}
        else:
            placement = tiny.stages(num_layers, cuts)
            row["plans"][name] = _compare(tiny, simulator, config, placement, reference, alone)
    proposal = _proposal(tiny.build(config))
    row["collectives"] = sum(unit.num_collectives for unit in proposal.units) / num_layers
    row["gathered"] = sorted({unit.path for unit in proposal.units if unit.kind == "gathered"})
    row["refusals"] = sorted({refusal.split(".", 2)[2] for refusal in proposal.refusals})
    row["vocabulary"] = [unit.path for unit in proposal.vocabulary]
    for weights in TENSOR_PLANS:
        name = "tensor " + ":".join(map(str, weights))
        if len(weights) == 3 and (fit := fit_config(tiny, kind, config)) != config:
            row["widened"] = [key for key in fit if fit[key] != config.get(key)]
            whole = tiny.forward(tiny.build(fit).model)
            tokens = tiny.generate(tiny.build(fit).model, None) if alone else {}
            own = fit, tiny.slices(num_layers, weights), whole, tokens, _proposal(tiny.build(fit))
        else:
            own = config, tiny.slices(num_layers, weights), reference, alone, proposal
        row["plans"][name] = _compare(tiny, simulator, *own)
    return row


def config_of(tiny: ModuleType, kind: str) -> dict[str, Any]:
    """The tiny config of an architecture or of a variant."""
    if kind not in VARIANTS:
        return dict(tiny.CONFIGS[kind])
    base, changes = VARIANTS[kind]
    return dict(tiny.CONFIGS[base] | SHAPES[base] | changes)


def _proposal(lazy: Any) -> Any:
    """As the product gets it, with a certificate."""
    from mlx_mesh.node.engine.certificate import certify
    from mlx_mesh.node.engine.trace import TraceError, trace_model

    try:
        trace = trace_model(lazy.model)
    except TraceError:
        trace = None
    with tempfile.TemporaryDirectory() as folder:  # not the user's verdicts
        return certify(lazy, trace, Path(folder)).proposal


def fit_config(tiny: ModuleType, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config, or a widened one of it that three equal ranks divide better."""
    best, least = config, math.inf
    for candidate in load("widening").widened(config, 3):
        try:
            tiny.forward(tiny.build(candidate).model, 1)
            share = _share_of_three(tiny.build(candidate))
        except Exception:
            continue  # sizes that the model does not accept
        if share < least:
            best, least = candidate, share
        if least <= 1 / 3 + FULL_SLACK:
            break
    return best


def _share_of_three(lazy: Any) -> float:
    """The largest of three equal ranks' shares of the layers' bytes, by the rules alone."""
    from mlx.utils import tree_flatten

    from mlx_mesh.node.engine.probe import divisible_units
    from mlx_mesh.node.engine.rules import module_at
    from mlx_mesh.node.engine.tensor import bytes_of_unit
    from mlx_mesh.node.engine.trace import TraceError, trace_model

    try:
        trace = trace_model(lazy.model)
    except TraceError:
        trace = None
    parts = [
        part
        for unit in divisible_units(lazy, trace).units
        for part in bytes_of_unit(module_at(lazy.layers[unit.layer], unit.path), unit)
    ]
    arrays = {id(a): a.nbytes for layer in lazy.layers for _, a in tree_flatten(layer.parameters())}
    total = sum(arrays.values())
    whole = total - sum(part.total for part in parts)
    held = [whole + sum(part.of_rank((1, 1, 1), rank) for part in parts) for rank in range(3)]
    return float(max(held) / total)


def _pipelines(legal: Sequence[int], num_layers: int) -> dict[str, list[int] | None]:
    middle = min(legal, key=lambda cut: abs(cut - num_layers // 2), default=None)
    uneven = [legal[0], legal[-1]] if len(legal) > 1 else None
    return {"pipeline 2": None if middle is None else [middle], "pipeline 3": uneven}


def _compare(
    tiny: ModuleType,
    simulator: ModuleType,
    config: dict[str, Any],
    placement: Any,
    reference: list[Any],
    alone: dict[int, list[int]],
    proposal: Any = None,
) -> dict[str, Any]:
    """`alone`: the tokens of the batch in one process; {} leaves the batch out."""
    from mlx.utils import tree_flatten

    from mlx_mesh.node.engine.shard import shard_model

    layer_bytes = [0] * placement.world_size

    def body(rank: int, exchange: Any) -> Any:
        shard = shard_model(
            tiny.build(config), placement, rank, exchange, tiny.ignore_progress, proposal=proposal
        )
        counted = {id(a): a for layer in shard.model.layers for _, a in tree_flatten(layer.parameters())}
        layer_bytes[rank] = sum(a.nbytes for a in counted.values())
        outputs = tiny.forward(shard.model)
        return outputs, tiny.generate(shard.model, exchange) if alone else {}

    try:
        results = simulator.Simulator(placement.world_size).run(body)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
    gap = float(tiny.gap(results[0][0], reference))
    whole = {
        id(a): a.nbytes
        for layer in tiny.build(config).model.layers
        for _, a in tree_flatten(layer.parameters())
    }
    return {
        "gap": gap if math.isfinite(gap) else "nan",
        "share": max(layer_bytes) / sum(whole.values()),
        "same_tokens": all(tokens == alone for _, tokens in results),
    }


# ------------------------------------------------------------ all of them


def run_all(kinds: Sequence[str], jobs: int, batches: bool) -> Iterator[dict[str, Any]]:
    """`measure` each in a child process, with a limit. Children are forks of this process, which has imported
    everything but computed nothing, because importing mlx-lm takes longer than most models."""
    load("tiny"), load("simulator"), load("widening")
    waiting = list(kinds)
    running: dict[Connection, tuple[str, Any, float]] = {}
    context = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < jobs:
            kind = waiting.pop(0)
            if kind in REASONS:
                yield {"kind": kind, "error": REASONS[kind]}
                continue
            mine, its = context.Pipe()
            child = context.Process(target=_child, args=(kind, batches, its))
            child.start()
            its.close()
            running[mine] = kind, child, time.monotonic() + LIMIT_S
        ready = connection.wait(list(running), timeout=1.0)
        for pipe, (kind, child, limit) in list(running.items()):
            if pipe not in ready and time.monotonic() < limit:
                continue
            row = {"kind": kind, "error": f"not done within {LIMIT_S:g} s"}
            if pipe in ready:
                try:
                    row = pipe.recv()
                except EOFError:
                    child.join()
                    row = {"kind": kind, "error": f"its process ended with status {child.exitcode}"}
            child.kill()
            child.join()
            pipe.close()
            del running[pipe]
            yield row


def _child(kind: str, batches: bool, pipe: Any) -> None:
    try:
        pipe.send(measure(kind, batches))
    except Exception as error:
        pipe.send({"kind": kind, "error": f"{type(error).__name__}: {error}"})


def is_exact(plan: dict[str, Any] | None) -> bool:
    return plan is not None and plan.get("gap") == 0.0 and plan["same_tokens"]


def is_right(plan: dict[str, Any] | None) -> bool:
    return plan is not None and isinstance(plan.get("gap"), float) and plan["gap"] <= EXACT


def is_full(plan: dict[str, Any] | None, ranks: int) -> bool:
    return is_right(plan) and plan is not None and plan["share"] <= 1 / ranks + FULL_SLACK


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    ran = [row for row in rows if "error" not in row]
    batched = [row for row in ran if "remark" not in row]
    plans = [row["plans"] for row in ran]
    tensor = ["tensor " + ":".join(map(str, weights)) for weights in TENSOR_PLANS]
    return {
        "architectures": len(rows),
        "run whole on a CPU": len(ran),
        "pipeline of 2 bit-identical": sum(is_exact(p.get("pipeline 2")) for p in plans),
        "pipeline of 3 bit-identical": sum(is_exact(p.get("pipeline 3")) for p in plans),
        "tensor right at 2, 3 and 2:1": sum(all(is_right(p.get(x)) for x in tensor) for p in plans),
        "same tokens in a batch, by all five plans": sum(
            all(plan.get("same_tokens", False) for plan in row["plans"].values()) for row in batched
        ),
        "fully split over 2": sum(is_full(p.get(tensor[0]), 2) for p in plans),
        "fully split over 3": sum(is_full(p.get(tensor[1]), 3) for p in plans),
        "by heads and columns alone": sum(
            is_full(row["plans"].get(tensor[0]), 2) and not row["gathered"] for row in ran
        ),
        "divided by vocabulary": sum(bool(row.get("vocabulary")) for row in ran),
        "upstream pipeline": sum(bool(row.get("upstream_pipeline")) for row in ran),
        "upstream tensor": sum(bool(row.get("upstream_tensor")) for row in ran),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The document's part between the two marks."""
    plain = [row for row in rows if row["kind"] not in VARIANTS]
    lines = ["| | count |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in totals(plain).items()]
    lines += ["", *_rows("architecture", plain)]
    variants = [row for row in rows if row["kind"] in VARIANTS]
    if variants:
        lines += ["", "### Quantised and adapted models", "", *_rows("model", variants)]
    return "\n".join(lines)


def _rows(title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"| {title} | legal cuts | pipeline 2 | pipeline 3 | tensor 2 | tensor 3 | tensor 2:1 | "
        "share of 2 | share of 3 | sums a layer | cut by linear | upstream | remarks |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: str(row["kind"]).lower()):
        if "error" in row:
            lines.append(f"| {row['kind']} | " + "| " * 11 + f"{_clean(row['error'])} |")
            continue
        plans = row["plans"]
        upstream = [name for name in ("tensor", "pipeline") if row.get(f"upstream_{name}")]
        remarks = dict.fromkeys(plan["error"] for plan in plans.values() if "error" in plan)
        if row["kind"] in NOTES:
            remarks[NOTES[row["kind"]]] = None
        if "remark" in row:
            remarks[row["remark"]] = None
        cells = [
            row["kind"],
            row["cuts"],
            *(_gap(plans[name]) for name in plans),
            _share(plans["tensor 1:1"]),
            _share(plans["tensor 1:1:1"]),
            f"{row['collectives']:.1f}",
            ", ".join(row["gathered"]),
            " ".join(upstream),
            "; ".join(_clean(remark) for remark in remarks),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _gap(plan: dict[str, Any]) -> str:
    if "error" in plan:
        return "-"
    text = "0" if plan["gap"] == 0.0 else f"{plan['gap']:.0e}" if plan["gap"] != "nan" else "nan"
    return text if plan["same_tokens"] else f"{text}, other tokens"


def _share(plan: dict[str, Any]) -> str:
    return "-" if "error" in plan else f"{plan['share']:.2f}"


def _clean(text: str) -> str:
    return " ".join(str(text).replace("|", "/").split())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "models.md")
    parser.add_argument(
        "--json", type=Path, help="keep all figures here, and bring those of ARCHITECTURE up to date"
    )
    parser.add_argument("--no-batches", action="store_true", help="logits only")
    options = parser.parse_args(argv)
    configs = json.loads((ENGINE_TESTS / "tiny_configs.json").read_text(encoding="utf-8"))
    kinds = options.kinds or [*sorted({*configs, *REASONS}), *VARIANTS]
    rows = []
    began = time.monotonic()
    for row in run_all(kinds, options.jobs, not options.no_batches):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(f"{len(rows)} models in {time.monotonic() - began:.0f} s", file=sys.stderr)
    for name, count in totals([row for row in rows if row["kind"] not in VARIANTS]).items():
        print(f"{count:5} {name}", file=sys.stderr)
    if options.kinds and options.json and options.json.is_file():
        known = {row["kind"]: row for row in json.loads(options.json.read_text(encoding="utf-8"))}
        rows = list((known | {row["kind"]: row for row in rows}).values())
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.json or not options.kinds:
        text = options.out.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        options.out.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
