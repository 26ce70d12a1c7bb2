"""A delivery between hosts that are all this machine, with folders of their own: real processes, real TLS."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from mlx_mesh.launcher import bring, delivery
from mlx_mesh.launcher.bring import lacks_something, plan_and_bring, with_model
from mlx_mesh.launcher.config import Flags, LaunchConfig, build_config
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.delivery import Delivery
from mlx_mesh.launcher.delivery_process import Heard
from mlx_mesh.launcher.preflight import ReadyHost, python_of
from mlx_mesh.launcher.remote import LocalHost
from mlx_mesh.mesh.delivery import Holding, Spans, size_of
from mlx_mesh.mesh.delivery_orders import Refused, Source
from mlx_mesh.mesh.errors import MeshError, PreflightError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.hostfile import Hostfile
from mlx_mesh.mesh.types import HostFacts, Placement, Shard, Sharding, Versions

SIZE = 400_000
VERSIONS = Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3.11.4")
FACTS = HostFacts(
    hostname="x",
    system="Linux",
    machine="x86_64",
    chip="",
    memory_bytes=1,
    usable_memory_bytes=1,
    addresses=("127.0.0.1",),
    versions=VERSIONS,
)
HUB = Path(__file__).parents[1] / "node" / "hub" / "conftest.py"


@pytest.fixture(scope="module")
def hub_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launcher_tests_hub", HUB)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PLACEMENT = Placement(
    sharding=Sharding.PIPELINE,
    model_digest="d",
    num_layers=4,
    shards=(
        Shard(rank=0, host="a", start_layer=2, end_layer=4),
        Shard(rank=1, host="b", start_layer=0, end_layer=2),
    ),
)
HALVES: list[Spans] = [
    {"model.safetensors": [(0, 100), (SIZE // 2, SIZE)]},
    {"model.safetensors": [(0, SIZE // 2)]},
]


def make_model(folder: Path, seed: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "seed": seed}))
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
    start = header.replace(b"%d", b"399900")
    start = len(start).to_bytes(8, "little") + start
    (folder / "model.safetensors").write_bytes(start + random.Random(seed).randbytes(SIZE - len(start)))
    return folder


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


class Hosts:
    """`a`, `b` and `c` have a folder of models each."""

    def __init__(self, root: Path, names: str = "ab", model: str = "org/name") -> None:
        self.root = root
        entries = tuple(HostEntry(name=name, models=str(root / name), line=1) for name in names)
        hostfile = Hostfile(source="", name="x", hosts=entries)
        self.config: LaunchConfig = build_config(hostfile, Flags(model=model, is_offline=True), {})
        self.output = io.StringIO()
        self.ready = tuple(
            ReadyHost(
                entry=entry,
                remote=LocalHost(entry.name, self.environment(entry.name)),
                python=python_of(entry),
                model=model,
                facts=FACTS,
                address="127.0.0.1",
            )
            for entry in self.config.hosts
        )

    def environment(self, name: str) -> dict[str, str]:
        """Nothing of this user's own caches."""
        folder = self.root / name
        return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "hub")}

    def delivery(self, **changes: Any) -> Delivery:
        made = Delivery(replace(self.config, **changes), self.ready, Console(self.output))
        made.look()
        return made

    def delivered(self, name: str) -> Path:
        (folder,) = (self.root / name / ".mlx-mesh").glob("*/*")
        return folder


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setattr(Delivery, "_needs_of_ranks", lambda self, placement: HALVES)
    return Hosts(tmp_path)


def test_each_host_is_brought_what_its_ranks_read_and_no_more(hosts: Hosts) -> None:
    own = make_model(hosts.root / "a" / "org" / "name")
    made = hosts.delivery()
    assert made.find() == "a"
    assert made.missing(made.needs((PLACEMENT,)))["a"] == {}
    first, second = made.bring((PLACEMENT,))
    assert (first.missing, first.received, first.folder) == (0, 0, str(own))
    small = sum((own / name).stat().st_size for name in ("config.json", "tokenizer.json"))
    assert second.missing == second.needed == SIZE // 2 + small
    assert second.needed <= second.received <= 1.02 * second.needed
    there = hosts.delivered("b")
    assert Path(second.folder) == there
    assert (there / "config.json").read_bytes() == (own / "config.json").read_bytes()
    data = (there / "model.safetensors").read_bytes()
    assert data[: SIZE // 2] == (own / "model.safetensors").read_bytes()[: SIZE // 2]
    assert data[SIZE // 2 :] == bytes(SIZE // 2)
    assert made.holdings["b"].state == "part"
    assert [each.received for each in _again(hosts, (PLACEMENT,))] == [0, 0]


def _again(self: Hosts, placements: tuple[Placement, ...]) -> list[delivery.Brought]:
    made = self.delivery()
    made.find()
    return made.bring(placements)


def test_another_plan_fetches_only_what_is_missing_and_full_makes_it_whole(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_model(hosts.root / "a" / "org" / "name")
    _again(hosts, (PLACEMENT,))
    more: list[Spans] = [HALVES[0], {"model.safetensors": [(0, 3 * SIZE // 4)]}]
    monkeypatch.setattr(Delivery, "_needs_of_ranks", lambda self, placement: more)
    _, second = _again(hosts, (PLACEMENT,))
    assert second.missing == SIZE // 4
    assert second.received <= 1.02 * second.missing
    _, third = _again(hosts, ())
    assert third.missing == SIZE // 4
    there = hosts.delivered("b")
    assert (there / "model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
    made = hosts.delivery()
    assert made.holdings["b"].state == "whole"
    shutil.rmtree(own)
    made = hosts.delivery()
    assert made.find() == "b"  # from whichever host has it
    assert [each.received > 0 for each in made.bring((PLACEMENT,))] == [True, False]


def test_two_hosts_that_have_it_share_the_sending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "pieces_of", lambda spans: list(_small_pieces(spans)))
    hosts = Hosts(tmp_path, "abc")
    own = make_model(hosts.root / "a" / "name")
    make_model(hosts.root / "b" / "name")
    made = hosts.delivery()
    made.find()
    *_, third = made.bring(())
    assert "from a" in third.words
    assert "from b" in third.words
    assert weights_of(hosts.delivered("c")) == weights_of(own)


def _small_pieces(spans: Spans) -> Any:
    from mlx_mesh.mesh.delivery import pieces_of

    return pieces_of(spans, 50_000)


def test_a_host_that_does_not_give_is_replaced_by_another_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, "abc")
    make_model(hosts.root / "a" / "name")
    own = make_model(hosts.root / "b" / "name")
    real = Source

    def broken(**fields: Any) -> Source:
        if fields["host"] == "a":
            fields["endpoints"] = (("127.0.0.1", 1),)  # nobody listens there
        return real(**fields)

    monkeypatch.setattr(delivery, "Source", broken)
    made = hosts.delivery()
    made.find()
    made.bring(())
    assert weights_of(hosts.delivered("c")) == weights_of(own)
    assert "nothing comes from a" in hosts.output.getvalue()
    assert "trying the other hosts" in hosts.output.getvalue()


@pytest.mark.long
def test_a_changed_small_file_comes_again(hosts: Hosts) -> None:
    own = make_model(hosts.root / "a" / "org" / "name")
    _again(hosts, (PLACEMENT,))
    (own / "tokenizer.json").write_text("[]")
    _, second = _again(hosts, (PLACEMENT,))
    assert second.missing == 2
    assert (hosts.delivered("b") / "tokenizer.json").read_text() == "[]"


@pytest.mark.long
def test_another_model_of_the_same_name_replaces_what_was_delivered(hosts: Hosts) -> None:
    own = make_model(hosts.root / "a" / "org" / "name")
    _again(hosts, (PLACEMENT,))
    shutil.rmtree(own)
    make_model(own, seed=2)
    _, second = _again(hosts, (PLACEMENT,))
    assert second.missing == second.needed
    assert "2" in (hosts.delivered("b") / "config.json").read_text()


def test_weights_that_were_trained_on_come_again_with_the_same_names_and_sizes(hosts: Hosts) -> None:
    own = make_model(hosts.root / "a" / "org" / "name")
    _again(hosts, (PLACEMENT,))
    config = (own / "config.json").read_bytes()
    shutil.rmtree(own)
    make_model(own, seed=2)
    (own / "config.json").write_bytes(config)
    _, second = _again(hosts, (PLACEMENT,))
    assert second.missing == SIZE // 2
    half = SIZE // 2
    assert weights_of(hosts.delivered("b"))[:half] == weights_of(own)[:half]
    assert _again(hosts, (PLACEMENT,))[1].missing == 0


def test_old_weights_are_not_sent_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b was brought the old ones, c has nothing: both get the new ones from a."""
    monkeypatch.setattr(Delivery, "_needs_of_ranks", lambda self, placement: HALVES)
    hosts = Hosts(tmp_path, "abc")
    own = make_model(tmp_path / "a" / "org" / "name")
    made = hosts.delivery()
    made.find()
    old = made.holdings["a"]
    held = Holding(state="part", digest=old.digest, files=old.files, held={"model.safetensors": [(0, 9)]})
    (own / "model.safetensors").write_bytes(weights_of(make_model(tmp_path / "other", seed=2)))
    made.look()
    made.holdings["b"] = held
    made.holdings["c"] = msgspec.structs.replace(held, state="whole", is_delivered=True)
    a, b, c = made._holders(set())
    assert a.held is None
    assert b.held == {}
    assert c.held is not None
    assert "model.safetensors" not in c.held
    assert "config.json" in c.held
    half_way = {"config.json": [(0, 5)], "model.safetensors": [(0, 9)]}
    files = tuple(file for file in made.holdings["a"].files if file.is_weights)
    made.holdings["b"] = msgspec.structs.replace(held, state="none", files=files, held=half_way)
    assert made._holders(set())[1].held == {"model.safetensors": [(0, 9)]}


def test_own_folders_with_other_weights_of_the_same_sizes_are_refused(hosts: Hosts) -> None:
    make_model(hosts.root / "a" / "org" / "name")
    copy = make_model(hosts.root / "b" / "org" / "name")
    hosts.delivery().find()
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(1234)
        file.write(b"\0\0\0")
    with pytest.raises(PreflightError, match=r"b: model: .*other bytes in model\.safetensors"):
        hosts.delivery().find()
    made = Delivery(hosts.config, hosts.ready, Console(hosts.output))
    made.look(verify=True)
    made.find()  # the bytes are told by `compare`


def test_a_model_that_never_stays_the_same_is_not_sent_for_ever(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(hosts.root / "a" / "org" / "name")
    made = hosts.delivery()
    made.find()
    monkeypatch.setattr(made, "_transfer", lambda *_: None)
    monkeypatch.setattr(made, "look", lambda: None)
    with pytest.raises(PreflightError, match="changes while it is sent"):
        made.bring((PLACEMENT,))


def test_strangers_are_told_once_each_and_are_no_sign_of_life(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hosts.delivery()
    transfer = delivery._Transfer(made, (), {})
    monkeypatch.setattr(delivery, "STALL_S", 0.05)
    transfer._heard_at = {"b": time.monotonic()}
    transfer._waiting = {"b": None}  # type: ignore[dict-item]
    for number in range(200):
        transfer._heard.put(Heard("a", Refused(peer=f"10.0.0.{number // 2}", why="its token is wrong")))
    with pytest.raises(MeshError, match="b: nothing came for"):
        while True:
            transfer._take({})
            transfer._heard.put(Heard("a", Refused(peer="10.0.0.1", why="its token is wrong")))
    assert len(made.refused) == len(set(made.refused)) == delivery.MAX_REFUSED


def test_two_own_folders_that_differ_are_refused_with_both_names(hosts: Hosts) -> None:
    make_model(hosts.root / "a" / "org" / "name")
    make_model(hosts.root / "b" / "org" / "name", seed=2)
    with pytest.raises(PreflightError, match=r"b: model: .*/b/org/name differs from a's .*/a/org/name"):
        hosts.delivery().find()


def test_verify_names_the_bytes_in_which_a_copy_of_the_user_differs(hosts: Hosts) -> None:
    make_model(hosts.root / "a" / "org" / "name")
    copy = make_model(hosts.root / "b" / "org" / "name")
    made = hosts.delivery()
    made.find()
    made.compare(made.needs(()))
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(1234)
        file.write(b"\0\0\0")
    with pytest.raises(PreflightError, match=r"b: model: bytes 0 to 262144 of .*/b/org/name/model"):
        made.compare(made.needs(()))
    assert not (hosts.root / "b" / ".mlx-mesh").exists()


def test_verify_finds_a_flipped_byte_of_a_delivery_and_its_piece_comes_again(hosts: Hosts) -> None:
    own = make_model(hosts.root / "a" / "org" / "name")
    _again(hosts, ())
    with (hosts.delivered("b") / "model.safetensors").open("r+b") as file:
        file.seek(1234)
        file.write(b"\0\0\0")
    made = hosts.delivery()
    made.look(verify=True)
    made.find()
    _, second = made.bring(())
    assert second.missing == 262_144  # the piece that it is in
    assert "1 pieces in" in hosts.output.getvalue()
    assert weights_of(hosts.delivered("b")) == weights_of(own)


def test_a_disk_that_is_too_small_is_refused_with_figures_before_anything_is_sent(hosts: Hosts) -> None:
    make_model(hosts.root / "a" / "org" / "name")
    made = hosts.delivery()
    made.find()
    made.holdings["b"] = type(made.holdings["b"])(
        **{
            **{name: getattr(made.holdings["b"], name) for name in made.holdings["b"].__struct_fields__},
            "free_bytes": 10**6,
        }
    )
    with pytest.raises(PreflightError, match=r"b: needs 0\.2 MB more of .* has 1\.0 MB free; .* missing"):
        made.bring((PLACEMENT,))
    assert not (hosts.root / "b" / ".mlx-mesh").exists()


def test_nobody_has_it_and_no_hub_may_be_asked(hosts: Hosts) -> None:
    with pytest.raises(PreflightError, match="No host has the model, and --offline forbids"):
        hosts.delivery().find()
    made = hosts.delivery()
    assert made.find(may_fetch=False) == ""


class HubHosts(Hosts):
    """They reach a hub of this test."""

    url = ""

    def environment(self, name: str) -> dict[str, str]:
        hub = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1"}
        return {**super().environment(name), **hub}


def test_one_host_fetches_from_the_hub_and_the_others_get_it_from_there(
    tmp_path: Path, hub_module: ModuleType
) -> None:
    with hub_module.serve() as hub:
        published = make_model(tmp_path / "published")
        hub.folders["org/name"] = published
        HubHosts.url = hub.url
        hosts = HubHosts(tmp_path)
        made = hosts.delivery(is_offline=False)
        assert hub.requests == []  # to look asks nobody
        assert made.find() == "a"
        first, second = made.bring(())
        assert first.received == 0
        assert second.received >= SIZE
        assert weights_of(hosts.delivered("b")) == weights_of(published)
        assert hub.sent("model.safetensors") < 2 * SIZE  # headers first, then the file, once
        assert "a fetches it from the hub, once for all" in hosts.output.getvalue()
        num_requests = len(hub.requests)
        assert hosts.delivery(is_offline=False).find() == "a"
        assert len(hub.requests) == num_requests


def test_a_path_that_no_host_has_is_refused(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, model="/no/such/model")
    with pytest.raises(PreflightError, match=r"a: model: it is not there\n.*\nCopy the model's folder"):
        hosts.delivery().find()


@pytest.mark.long
def test_parts_alone_will_do_when_they_have_what_the_plan_needs(hosts: Hosts) -> None:
    own = make_model(hosts.root / "a" / "org" / "name")
    _again(hosts, (PLACEMENT,))
    shutil.rmtree(own)
    made = hosts.delivery()
    assert made.find() == "b"
    with pytest.raises(PreflightError, match=r"a: model: 0\.2 MB that it needs are on no host"):
        made.bring((PLACEMENT,))
    with pytest.raises(PreflightError, match=r"no host has the whole model; b has 0\.2 MB"):
        made.bring(())
    assert size_of(made.missing(made.needs((PLACEMENT,)))["b"]) == 0


# ---------------------------------------------------------------- what `up` makes of it


def with_facts(hosts: Hosts, **by_name: HostFacts) -> tuple[ReadyHost, ...]:
    return tuple(replace(host, facts=by_name[host.entry.name]) for host in hosts.ready)


def facts(**changes: Any) -> HostFacts:
    return msgspec.structs.replace(FACTS, **changes)


def test_hosts_that_all_have_the_same_model_are_not_looked_at_again(hosts: Hosts) -> None:
    whole, part = facts(model_digest="d"), facts(model_digest="d", model_part="1 of 2 GB")
    assert not lacks_something(hosts.config, with_facts(hosts, a=whole, b=whole))
    assert lacks_something(hosts.config, with_facts(hosts, a=whole, b=part))
    delivered = facts(model_digest="d", is_delivered=True)  # perhaps before it was trained on
    assert lacks_something(hosts.config, with_facts(hosts, a=whole, b=delivered))
    assert lacks_something(hosts.config, with_facts(hosts, a=whole, b=facts()))
    assert lacks_something(hosts.config, with_facts(hosts, a=whole, b=facts(model_digest="e")))
    assert not lacks_something(hosts.config, with_facts(hosts, a=facts(), b=whole)[:1])


@pytest.fixture
def planned(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    make_model(hosts.root / "a" / "org" / "name")
    monkeypatch.setattr(bring, "show_plans", lambda *_: (PLACEMENT,))
    return hosts


def test_up_brings_the_model_and_holds_the_mesh_to_the_plan(planned: Hosts) -> None:
    there = with_facts(planned, a=facts(model_digest="d"), b=facts())
    ready = plan_and_bring(planned.config, there, Console(planned.output))
    assert ready.planned == (PLACEMENT,)
    assert ready.hosts[0] is there[0]
    second = ready.hosts[1]
    assert second.model == str(planned.delivered("b"))
    assert second.facts.model_part == "0.2 MB of 0.4 MB"
    assert second.facts.is_delivered
    assert "Bringing the model to b (--sync never forbids it)" in planned.output.getvalue()
    assert "Parts of the model only on b (0.2 MB of 0.4 MB): the mesh does not go on with fewer hosts" in (
        planned.output.getvalue()
    )
    assert "b: received 0.2 MB for the 0.2 MB that it lacked" in planned.output.getvalue()


def test_a_dry_run_says_what_would_be_brought_and_brings_nothing(planned: Hosts) -> None:
    there = with_facts(planned, a=facts(model_digest="d"), b=facts())
    plan_and_bring(planned.config, there, Console(planned.output), is_dry=True)
    assert "b: lacks 0.2 MB of org/name; it would be brought from a" in planned.output.getvalue()
    assert not (planned.root / "b" / ".mlx-mesh").exists()


def test_never_refuses_what_is_missing_with_the_command_that_brings_it(planned: Hosts) -> None:
    there = with_facts(planned, a=facts(model_digest="d"), b=facts())
    config = replace(planned.config, sync="never")
    with pytest.raises(PreflightError, match=r"b: lacks 0\.2 MB of org/name; `mlx-mesh sync"):
        plan_and_bring(config, there, Console(planned.output))
    assert not (planned.root / "b" / ".mlx-mesh").exists()


def test_a_model_that_became_whole_is_no_part(planned: Hosts) -> None:
    made = planned.delivery()
    made.find()
    made.bring(())
    there = with_facts(planned, a=facts(model_digest="d"), b=facts())
    assert with_model(there[1], made).facts.model_part == ""


def test_a_process_that_cannot_start_is_a_fault_of_its_host(
    hosts: Hosts, fake_python: Callable[..., Any]
) -> None:
    broken = replace(hosts.ready[1], python=fake_python("b").python)
    made = Delivery(hosts.config, (hosts.ready[0], broken), Console(hosts.output))
    with pytest.raises(MeshError, match="b: look gave no answer"):
        made.look()
