"""The manual bootstrap: where each setting comes from, and what cannot be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.messages import AgentConfig, HostPlan, MeshConfig
from mlx_mesh.mesh.types import Sharding
from mlx_mesh.node.config import Manual, manual_settings, read_launched

LOOPBACK = {"PAIRED_HOST": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "2"}
ELSEWHERE = LOOPBACK | {"PAIRED_HOST": "192.0.2.1", "MLX_MESH_SECRET": "0123456789abcdef"}


class Bootstrap:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *flags: str, env: dict[str, str] | None = None, dotenv: str = "") -> Manual:
        if dotenv:
            (self.folder / ".env").write_text(dotenv)
        return manual_settings(
            ["--model", "org/model", *flags], env or {}, self.folder, self.folder / "state"
        )

    def config(self, *flags: str, env: dict[str, str] | None = None, dotenv: str = "") -> AgentConfig:
        return self(*flags, env=env, dotenv=dotenv).config


@pytest.fixture
def bootstrap(tmp_path: Path) -> Bootstrap:
    return Bootstrap(tmp_path)


def mesh_of(config: AgentConfig) -> MeshConfig:
    assert config.mesh is not None
    return config.mesh


def test_nothing_set_means_one_host_without_a_port(bootstrap: Bootstrap) -> None:
    config = bootstrap.config()
    assert config.coordinator == "" and len(mesh_of(config).hosts) == 1 and not config.attached


def test_the_leader_of_two_expects_any_host_with_the_other_rank(bootstrap: Bootstrap) -> None:
    config = bootstrap.config(env=LOOPBACK)
    assert config.coordinator == "127.0.0.1:17863" and config.ranks == (0,) and config.world_size == 2
    assert mesh_of(config).hosts == (HostPlan(name=""), HostPlan(name=""))


@pytest.mark.parametrize(
    ("env", "flags", "announces"),
    [
        (LOOPBACK, (), False),
        (LOOPBACK, ("--announce",), True),
        (ELSEWHERE, (), True),
        (ELSEWHERE, ("--no-announce",), False),
        ({}, (), False),
        ({}, ("--announce",), True),
    ],
)
def test_only_a_mesh_that_others_can_reach_is_announced_by_itself(
    bootstrap: Bootstrap, env: dict[str, str], flags: tuple[str, ...], announces: bool
) -> None:
    assert bootstrap.config(*flags, env=env).announce == announces


def test_a_follower_has_no_mesh_and_the_same_secret(bootstrap: Bootstrap) -> None:
    leader = bootstrap.config(env=LOOPBACK)
    follower = bootstrap.config(env=LOOPBACK | {"RANK": "1"})
    assert follower.mesh is None and follower.ranks == (1,)
    assert follower.secret == leader.secret and follower.mesh_name == leader.mesh_name
    assert follower.host != leader.host  # both may run on this machine


def test_a_host_alone_means_two_ranks(bootstrap: Bootstrap) -> None:
    assert bootstrap.config(env={"PAIRED_HOST": "127.0.0.1", "RANK": "1"}).world_size == 2


def test_a_world_size_alone_asks_for_the_host(bootstrap: Bootstrap) -> None:
    with pytest.raises(SettingsError, match="PAIRED_HOST"):
        bootstrap.config(env={"WORLD_SIZE": "4", "RANK": "0"})


def test_a_host_without_a_rank_asks_for_the_rank(bootstrap: Bootstrap) -> None:
    with pytest.raises(SettingsError, match=r"RANK \(0 to 1\)"):
        bootstrap.config(env={"PAIRED_HOST": "127.0.0.1"})


def test_no_distributed_wins_over_the_environment(bootstrap: Bootstrap) -> None:
    assert bootstrap.config("--no-distributed", env=LOOPBACK).coordinator == ""


@pytest.mark.parametrize(("value", "distributed"), [("0", False), ("off", False), ("1", True)])
def test_the_enabling_variable_wins_over_a_given_host(
    bootstrap: Bootstrap, value: str, distributed: bool
) -> None:
    config = bootstrap.config(env=LOOPBACK | {"MLX_DISTRIBUTED_ENABLED": value})
    assert (config.coordinator != "") is distributed


@pytest.mark.parametrize(
    ("flags", "changes", "dotenv", "port"),
    [
        (("--distributed-port", "1"), {"PAIRED_PORT": "2"}, "PAIRED_PORT=3", 1),
        ((), {"PAIRED_PORT": "2"}, "PAIRED_PORT=3", 2),
        ((), {}, "PAIRED_PORT=3", 3),
        ((), {"MLX_DISTRIBUTED_PORT": "4"}, "", 4),
        ((), {}, "", 17863),
    ],
)
def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    bootstrap: Bootstrap, flags: Any, changes: dict[str, str], dotenv: str, port: int
) -> None:
    assert bootstrap.config(*flags, env=LOOPBACK | changes, dotenv=dotenv).coordinator == f"127.0.0.1:{port}"


def test_the_file_may_export_quote_and_comment(bootstrap: Bootstrap) -> None:
    config = bootstrap.config(
        dotenv="""# a mesh
export PAIRED_HOST="127.0.0.1"   # this machine
export RANK=1
WORLD_SIZE=3 # three ranks
PAIRED_PORT='18001'
"""
    )
    assert (config.coordinator, config.ranks, config.world_size) == ("127.0.0.1:18001", (1,), 3)


def test_another_file_is_named_by_a_flag_and_must_exist(bootstrap: Bootstrap, tmp_path: Path) -> None:
    file = tmp_path / "two.env"
    file.write_text("PAIRED_HOST=127.0.0.1\nRANK=0\n")
    config = bootstrap.config("--distributed-env-file", str(file), dotenv="PAIRED_HOST=127.0.0.9")
    assert config.coordinator.startswith("127.0.0.1:")
    with pytest.raises(SettingsError, match="does not exist"):
        bootstrap.config("--distributed-env-file", str(tmp_path / "none"))


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "2"},
        {"RANK": "-1"},
        {"RANK": "one"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "65"},
        {"WORLD_SIZE": "100000000"},
        {"WORLD_SIZE": "many"},
        {"PAIRED_PORT": "70000"},
        {"PAIRED_PORT": "17 # note"},
        {"SERVER_RANK": "2"},
        {"DISTRIBUTED_TIMEOUT": "soon"},
        {"KAMI_DIST_ENABLED": "perhaps"},
        {"PAIRED_HOST": "no such host.invalid"},
    ],
)
def test_what_cannot_be_meant_is_an_error_with_its_value(
    bootstrap: Bootstrap, changes: dict[str, str]
) -> None:
    [value] = changes.values()
    with pytest.raises(SettingsError) as error:
        bootstrap.config(env=LOOPBACK | changes)
    assert value in str(error.value)


@pytest.mark.parametrize(("rank", "mesh_rank"), [(0, 2), (1, 0), (2, 1)])
def test_the_server_rank_leads_and_the_others_follow_in_order(
    bootstrap: Bootstrap, rank: int, mesh_rank: int
) -> None:
    config = bootstrap.config(
        "--distributed-server-rank", "1", env=LOOPBACK | {"RANK": str(rank), "WORLD_SIZE": "3"}
    )
    assert config.ranks == (mesh_rank,)
    assert (config.mesh is not None) is (rank == 1)
    if config.mesh is not None:
        assert config.mesh.server_rank == 1


def test_a_server_rank_from_the_environment_counts(bootstrap: Bootstrap) -> None:
    assert bootstrap.config(env=LOOPBACK | {"RANK": "1", "SERVER_RANK": "1"}).mesh is not None


def test_the_timeout_is_the_time_to_join(bootstrap: Bootstrap) -> None:
    assert bootstrap.config(env=LOOPBACK).deadlines.join_s == 120.0
    config = bootstrap.config("--distributed-timeout", "7", env=LOOPBACK)
    assert config.deadlines.join_s == 7.0 and mesh_of(config).deadlines.join_s == 7.0


def test_hosts_that_meet_on_a_network_need_a_secret(bootstrap: Bootstrap) -> None:
    assert bootstrap(env=ELSEWHERE).notes == ()
    without = {name: value for name, value in ELSEWHERE.items() if name != "MLX_MESH_SECRET"}
    with pytest.raises(SettingsError, match="MLX_MESH_SECRET"):
        bootstrap.config(env=without)


def test_a_short_secret_is_refused(bootstrap: Bootstrap) -> None:
    with pytest.raises(SettingsError, match="at least 16"):
        bootstrap.config(env=ELSEWHERE | {"MLX_MESH_SECRET": "short"})


def test_the_loopback_secret_is_said_aloud_kept_private_and_the_same_next_time(
    bootstrap: Bootstrap, tmp_path: Path
) -> None:
    first, second = bootstrap(env=LOOPBACK), bootstrap(env=LOOPBACK)
    assert first.config.secret == second.config.secret
    [note] = first.notes
    assert "development secret" in note and first.config.secret not in note
    file = tmp_path / "state" / "manual" / "loopback-secret"
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_serving_flags_reach_the_leader(bootstrap: Bootstrap, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\nalpha\n\nbeta\n")
    mesh = mesh_of(
        bootstrap.config(
            "--host", "0.0.0.0", "--port", "1234", "--api-key-file", str(keys), "--sharding", "tensor",
            "--served-model-name", "m", "--strip-thinking", "--chat-template", "{{ messages }}", "--elastic",
            env=LOOPBACK,
        )
    )  # fmt: skip
    assert (mesh.serve_host, mesh.serve_port, mesh.api_keys) == ("0.0.0.0", 1234, ("alpha", "beta"))
    assert mesh.sharding is Sharding.TENSOR and mesh.served_model_names == ("m",)
    assert mesh.strip_thinking and mesh.chat_template == "{{ messages }}" and mesh.elastic


def test_other_models_the_context_and_the_form_of_log_lines_reach_the_leader(bootstrap: Bootstrap) -> None:
    words = (
        "--allow-model org/b --allow-model org/c --max-kv-size 512 --log-format json "
        "--allowed-media-domains Img.Example cdn.example --allowed-media-domains b.example"
    )
    config = bootstrap.config(*words.split(), env=LOOPBACK)
    mesh = mesh_of(config)
    assert mesh.allowed_models == ("org/b", "org/c")
    assert (mesh.context_length, mesh.plan_context) == (512, 512)
    assert mesh.allowed_media_domains == ("img.example", "cdn.example", "b.example")
    assert mesh.log_format == config.log_format == "json"
    assert mesh_of(bootstrap.config(env=LOOPBACK)).context_length == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-kv-size", "0"), "--max-kv-size 0"),
        (("--replicas", "2"), "one mesh"),
        (
            ("--allowed-media-domains", "a.example", "https://b.example"),
            "`https://b.example` is no host name",
        ),
        (("--prefix-cache-per-key",), "API keys"),
    ],
)
def test_what_cannot_be_served_by_hand_is_refused(
    bootstrap: Bootstrap, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        bootstrap.config(*words, env=LOOPBACK)


def test_the_api_key_may_come_from_the_environment(bootstrap: Bootstrap) -> None:
    assert mesh_of(bootstrap.config(env=LOOPBACK | {"MLX_MESH_API_KEY": "k"})).api_keys == ("k",)


def test_a_relative_model_folder_becomes_absolute(
    bootstrap: Bootstrap, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert manual_settings(["--model", "here"], {}, tmp_path, tmp_path).config.model == str(tmp_path / "here")
    assert bootstrap.config().model == "org/model"


def test_an_adapter_comes_from_its_flag_or_variable_as_an_absolute_folder(bootstrap: Bootstrap) -> None:
    assert bootstrap.config().adapter == ""
    variable = {"MLX_MESH_ADAPTER_PATH": "/adapters/one"}
    assert bootstrap.config(env=LOOPBACK | variable).adapter == "/adapters/one"
    assert bootstrap.config("--adapter-path", "two", env=variable).adapter == str(Path.cwd() / "two")


def test_the_launchers_line_is_read_whole(bootstrap: Bootstrap) -> None:
    config = bootstrap.config(env=LOOPBACK)
    assert read_launched(msgspec.json.encode(config)) == config
    with pytest.raises(SettingsError, match="not readable"):
        read_launched(b'{"host": 3}')
