"""`plan`, `bench --probe` and the measurements that both use, on this machine."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_mesh.launcher import bench_command, cli, plan_command, verify_command
from mlx_mesh.launcher.commands.launch_flags import read_launch_flags
from mlx_mesh.launcher.config import build_config, local_hostfile
from mlx_mesh.launcher.measured import keep_measurements, measurements_file, read_measurements
from mlx_mesh.launcher.plan import context_notes
from mlx_mesh.launcher.plan_command import parse_ram, parse_tokens
from mlx_mesh.launcher.preflight import ReadyHost, check_hosts
from mlx_mesh.launcher.programs import echo_link
from mlx_mesh.launcher.remote import LocalHost
from mlx_mesh.mesh.capacity import usable_context
from mlx_mesh.mesh.errors import ExitCode, PreflightError, SettingsError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.kv_options import KvOptions
from mlx_mesh.mesh.measurements import HostMeasurement, Measurements
from mlx_mesh.mesh.reference import ReferenceScores, Scored
from mlx_mesh.mesh.types import HostFacts, Versions

GIB = 1024**3


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_tokens("32k") == 32768 and parse_tokens("4096") == 4096
    assert parse_ram("64GB") == [64 * GIB]
    assert parse_ram("128 GB, 64GiB") == [128 * GIB, 64 * GIB]
    for wrong in ("", "64", "x", "10MB"):
        with pytest.raises(SettingsError):
            parse_ram(wrong)
    for wrong in ("0", "32kb", "-1"):
        with pytest.raises(SettingsError):
            parse_tokens(wrong)


def test_a_plan_for_macs_that_are_not_here(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(tiny_llama), "--nodes", "3", "--memory", "16GB", "--chip", "M4"]
    assert cli.main([*words, "--link", "ethernet10g", "--context", "1k"]) == 0
    text = capsys.readouterr().out
    assert "llama, 6 layers" in text and "4 sequences of 1024 tokens" in text
    assert "Recommended: it fits on one host: use host1 alone." in text
    assert text.count("pipeline") >= 2 and text.count("tok/s") >= 5
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(o["num_ranks"], o["sharding"]) for o in found["options"]] == [
        (1, "none"),
        (2, "pipeline"),
        (2, "tensor"),
        (3, "pipeline"),
        (3, "tensor"),
    ]
    assert found["options"][0]["rows"][0]["limit_bytes"] == 16 * GIB * 2 // 3
    assert found["link"] is None and any("link between the hosts" in note for note in found["notes"])
    # The second answer came from the kept footprint.
    assert len(list(Path(os.environ["XDG_CACHE_HOME"], "mlx-mesh", "footprints").iterdir())) == 1


def test_a_plan_that_cannot_be_ends_with_the_placement_status(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hostfile = tmp_path / "hosts.yaml"
    hostfile.write_text("hosts: [{local: true, memory_limit: 100MB}]")
    assert cli.main(["plan", str(tiny_llama), str(hostfile), "--memory", "8GB"]) == 4
    assert "are missing" in capsys.readouterr().out


def test_a_model_or_an_adapter_that_is_not_there_is_a_host_that_is_not_ready_as_in_up(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["plan", str(tmp_path / "nowhere")]) == ExitCode.PREFLIGHT
    assert "the model folder" in capsys.readouterr().err
    assert cli.main(["plan", str(tiny_llama), "--adapter-path", str(tmp_path)]) == ExitCode.PREFLIGHT
    told = capsys.readouterr().err
    assert "it is not an adapter folder" in told and str(tiny_llama) not in told


def test_a_context_beyond_the_models_own_is_told() -> None:
    assert context_notes(2048, 2048) == context_notes(0, 2048) == context_notes(4096, 0) == []
    (note,) = context_notes(4096, 2048)
    assert "--context 4096" in note and "2048" in note
    assert usable_context(4096, 2048) == usable_context(0, 2048) == usable_context(2048, 0) == 2048


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "0"], "--nodes 0 is out of range"),
        (["--memory", "64GB,32GB", "--nodes", "3"], "--memory names 2 hosts, but there are 3"),
        (["--memory", "64GB", "--link", "string"], "--link string is not known; use one of loopback"),
        (["--sequences", "0"], "--sequences 0 is out of range"),
        (["--revision", "main"], "--revision is for models on the hub"),
    ],
)
def test_a_bad_flag_is_named(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert cli.main(["plan", str(tiny_llama), *words]) == 2
    assert told in capsys.readouterr().err


def test_an_unknown_chip_is_said(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(tiny_llama), "--memory", "16GB", "--chip", "M99"]) == 0
    assert "'M99' is not in the table" in capsys.readouterr().out


def test_measurements_are_kept_and_a_broken_file_is_named() -> None:
    one = Measurements(hosts={"a": HostMeasurement(memory_rate=1, matrix_rate=2)})
    two = Measurements(hosts={"b": HostMeasurement(memory_rate=3, matrix_rate=4)})
    keep_measurements(os.environ, one)
    keep_measurements(os.environ, two)
    assert set(read_measurements(os.environ).hosts) == {"a", "b"}
    measurements_file(os.environ).write_text("no json")
    with pytest.raises(SettingsError, match=r"measurements\.json cannot be read.*bench --probe"):
        read_measurements(os.environ)


def test_a_probe_measures_this_machine_and_the_plan_uses_it(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--probe", "--model", str(tiny_llama)]) == 0
    assert "GB/s" in capsys.readouterr().out
    (kept,) = read_measurements(os.environ).hosts.values()
    assert kept.memory_rate > 10**8 and kept.matrix_rate > 10**8
    assert cli.main(["plan", str(tiny_llama)]) == 0
    assert "tok/s" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--nodes", "2"], ["--chip", "M4"]])
def test_what_hosts_are_asked_is_not_also_given(
    tiny_llama: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile = tmp_path / "hosts.yaml"
    hostfile.write_text("hosts: [{name: a, local: true}]")
    assert cli.main(["plan", str(tiny_llama), str(hostfile), *words]) == 2
    assert f"{' '.join(words)}: the hosts of" in capsys.readouterr().err


def test_a_link_is_measured_by_its_round_trip_and_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    has_port = threading.Event()

    def say(marker: str, answer: object) -> None:
        said.append(answer)
        has_port.set()

    monkeypatch.setattr(echo_link, "say", say)
    server = threading.Thread(target=echo_link.serve, args=("m", "127.0.0.1", 20, 4))
    server.start()
    assert has_port.wait(10)
    echo_link.measure("m", "127.0.0.1", said[0]["port"], 20, 4)
    server.join(10)
    result = next(item for item in said if "rtt_ns" in item)
    assert 0 < result["rtt_ns"] < 10**9 and result["bandwidth"] > 10**6


def test_a_link_is_measured_between_two_hosts_in_both_directions(tmp_path: Path) -> None:
    versions = Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3.12")
    facts = HostFacts(
        hostname="h",
        system="Linux",
        machine="x86_64",
        chip="",
        memory_bytes=GIB,
        usable_memory_bytes=GIB,
        addresses=("127.0.0.1",),
        versions=versions,
    )
    ends = [
        ReadyHost(HostEntry(name=name), LocalHost(name), sys.executable, "m", facts, "127.0.0.1")
        for name in ("a", "b")
    ]
    link = bench_command.measure_link(*ends)
    assert 0 < link.rtt_ns < 10**9 and link.bandwidth > 10**6


def test_bench_without_a_measurement_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    assert "--probe" in capsys.readouterr().err


def test_probe_results_are_shown_in_units() -> None:
    probe = bench_command.Probe(
        Measurements(),
        {"mac1": HostMeasurement(memory_rate=400 * 10**9, matrix_rate=14 * 10**12)},
        {},
        (),
    )
    assert "400.0 GB/s" in bench_command.lines(probe)[1] and "14.00 TFLOP/s" in bench_command.lines(probe)[1]


# ---------------------------------------------------------------- verify


def answer(tokens: list[str], logprobs: list[float], top: list[dict[str, float]] | None = None) -> Any:
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top or []}


def verdict_of(*found: verify_command.Compared) -> verify_command.Verdict:
    return verify_command.Verdict(model="m", reference="mac1 alone", prompts=found)


def test_equal_tokens_are_compared_by_their_largest_gap() -> None:
    found = verify_command.compare("p", answer(["a", "b"], [-0.1, -0.2]), answer(["a", "b"], [-0.1, -0.25]))
    assert found.differs_at == -1 and abs(found.largest_gap - 0.05) < 1e-9
    assert verdict_of(found).is_same


def test_the_first_different_token_counts_unless_it_was_a_near_tie() -> None:
    other = answer(["a", "c", "d"], [-0.1, -0.7, -0.1])
    close = answer(["a", "b", "x"], [-0.1, -0.69, -9.0], [{}, {"b": -0.69, "c": -0.70}, {}])
    found = verify_command.compare("p", close, other)
    assert (found.differs_at, found.tokens) == (1, ("b", "c")) and found.near_tie == pytest.approx(0.01)
    assert verdict_of(found).is_same
    far = answer(["a", "b", "x"], [-0.1, -0.2, -9.0], [{}, {"b": -0.2, "c": -3.0}, {}])
    verdict = verdict_of(verify_command.compare("p", far, other))
    assert not verdict.is_same and "does NOT answer" in verify_command.lines(verdict)[-1]


def test_what_quantised_caches_change_is_said_and_widens_ties() -> None:
    scored = Scored(best_ids=(5, 7), best_logprobs=(-0.1, -0.2), logprobs=(-0.1, -0.5))
    scores = ReferenceScores(answers=(scored,), num_parts=1, largest_part_bytes=1)
    given = answer(["a", "b"], [-0.1, -0.25]) | {"token_ids": [5, 6]}
    changed = verify_command.beside_unquantised(scores, [given])
    assert changed == {"agreement": (1, 2), "noise": 0.25}
    tie = verify_command.Compared(
        prompt="p", num_tokens=2, largest_gap=0.1, differs_at=1, tokens=("b", "c"), near_tie=0.2
    )
    verdict = msgspec.structs.replace(verdict_of(tie), kv_bits=4, **changed)
    assert not verdict_of(tie).is_same and verdict.is_same
    told = verify_command.lines(verdict)[-2]
    assert "Of 2 tokens with keys and values of 4 bits, 1 (50.0 %)" in told and "up to 0.25" in told


def test_the_gap_is_also_that_of_the_other_likely_tokens() -> None:
    one = answer(["a"], [-0.1], [{"a": -0.1, "b": -3.0, "c": -4.0}])
    other = answer(["a"], [-0.1], [{"a": -0.1, "b": -3.2, "d": -9.0}])
    assert verify_command.compare("p", one, other).largest_gap == pytest.approx(0.2)


def test_a_recomputed_answer_differs_where_another_token_is_the_likeliest() -> None:
    said = answer(["a", "b", "c"], [-0.1, -0.2, -0.3]) | {"token_ids": [5, 6, 7]}
    same = Scored(best_ids=(5, 6, 7), best_logprobs=(-0.1, -0.2, -0.3), logprobs=(-0.1, -0.25, -0.3))
    found = verify_command.compare_scored("p", same, said)
    assert found.differs_at == -1 and found.largest_gap == pytest.approx(0.05)
    other = Scored(best_ids=(5, 9, 9), best_logprobs=(-0.1, -0.1, -0.1), logprobs=(-0.1, -2.0, -9.0))
    found = verify_command.compare_scored("p", other, said)
    assert (found.differs_at, found.tokens) == (1, ("token 9", "b"))
    assert found.near_tie == pytest.approx(1.9) and not verdict_of(found).is_same


def test_an_answer_that_ends_early_differs() -> None:
    found = verify_command.compare("p", answer(["a"], [-0.1]), answer(["a", "b"], [-0.1, -0.2]))
    assert found.differs_at == 1 and not verdict_of(found).is_same


def test_one_of_the_prompts_fills_several_prefill_chunks() -> None:
    assert max(len(prompt.split()) for prompt in verify_command.PROMPTS) > 2 * verify_command.CHUNK_TOKENS


def test_plan_flags_reach_the_question() -> None:
    arguments = cli.build_parser().parse_args(["plan", "m", "--context", "8k", "--sequences", "2"])
    assert (arguments.model, arguments.context, arguments.sequences) == ("m", "8k", 2)
    assert plan_command.parse_tokens(arguments.context) == 8192


def test_offline_reaches_every_host(tiny_llama: Path) -> None:
    words = ["up", "--sim", "1", "--model", "org/none", "--offline"]
    arguments = cli.build_parser().parse_args(words)
    config = build_config(local_hostfile(1, "sim"), read_launch_flags(arguments), {})
    assert config.is_offline
    with pytest.raises(PreflightError, match=r"--offline forbids to ask the hub"):
        check_hosts(config)


def test_cache_flags_reach_the_plan_and_the_mesh() -> None:
    parser = cli.build_parser()
    plan = parser.parse_args(["plan", "m", "--kv-bits", "4", "--kv-group-size", "32"])
    assert (plan.kv_bits, plan.kv_group_size) == (4, 32)
    words = ["serve", "--model", "m", "--kv-bits", "8", "--quantized-kv-start", "0", "--max-kv-size", "900"]
    config = build_config(local_hostfile(1, "sim"), read_launch_flags(parser.parse_args(words)), {})
    assert (config.kv_options, config.context_length) == (KvOptions(bits=8, group_size=64), 900)
