"""Flags, hostfile and environment become one checked configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_mesh.launcher.config import (
    MAX_HOSTFILE_BYTES,
    Flags,
    LaunchConfig,
    adapter_candidates,
    anchor_model,
    build_config,
    is_loopback,
    local_hostfile,
    model_candidates,
    plan_size,
    read_hostfile,
)
from mlx_mesh.mesh.errors import ExitCode, HostfileError, SettingsError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.hostfile import Hostfile, parse_hostfile
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.mesh.types import Backend, Sharding

HOSTS = "name: a\nmodel: org/m\nsharding: tensor\nserve: {port: 1}\nhosts: [{local: true}]"
KEY = "k" * 20


def build(flags: Flags, text: str = HOSTS, **environment: str) -> LaunchConfig:
    return build_config(parse_hostfile(text, "a.yaml"), flags, environment)


def test_flags_win_over_the_file_and_the_file_over_the_defaults() -> None:
    config = build(Flags(model="org/other", sharding=Sharding.PIPELINE, port=0))
    assert (config.model, config.sharding, config.serve_port) == ("org/other", Sharding.PIPELINE, 0)
    config = build(Flags())
    assert (config.model, config.sharding, config.serve_port) == ("org/m", Sharding.TENSOR, 1)
    assert (config.backend, config.serve_host) == (Backend.AUTO, "127.0.0.1")


def test_an_adapter_is_a_folder_from_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Hostfile(
        source="/elsewhere/a.yaml", name="a", model="m", adapter="lora", hosts=(HostEntry(name="b"),)
    )
    assert build_config(file, Flags(), {}).adapter == "/elsewhere/lora"
    assert build_config(file, Flags(adapter="mine"), {}).adapter == str(tmp_path / "mine")
    assert build_config(file, Flags(adapter=""), {}).adapter == ""
    assert build(Flags()).adapter == "" and build(Flags(adapter="~/a")).adapter == "~/a"
    assert adapter_candidates("/a/lora", "~/models/") == ["/a/lora", "~/models/lora"]
    with pytest.raises(SettingsError, match="Correct --adapter-path, or `adapter:` in the hostfile"):
        build(Flags(adapter="x" * 2000))


def test_other_models_of_the_file_are_taken_unless_flags_name_some(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    file = tmp_path / "hosts.yaml"
    file.write_text(f"{HOSTS}\nembedding_model: ./bert\nallow_model: [org/b, ./bert]\n")
    config = build_config(read_hostfile(str(file)), Flags(), {})
    assert config.embedding_model == str(tmp_path / "bert")
    assert config.allowed_models == ("org/b", str(tmp_path / "bert"))
    config = build_config(read_hostfile(str(file)), Flags(embedding_model="", allowed_models=("org/c",)), {})
    assert (config.embedding_model, config.allowed_models) == ("", ("org/c",))


def test_images_come_from_hosts_of_the_file_or_the_flag_alone() -> None:
    file = HOSTS.replace("port: 1", "port: 1, allowed_media_domains: [Img.Example]")
    assert build(Flags()).allowed_media_domains == ()
    assert build(Flags(), file).allowed_media_domains == ("img.example",)
    assert build(Flags(allowed_media_domains=("CDN.example",)), file).allowed_media_domains == (
        "cdn.example",
    )
    for host in ("https://img.example", "*.example", "img.example:80", "img.example/x", "", "a b", "::1"):
        with pytest.raises(SettingsError, match=r"--allowed-media-domains: .* is no host name"):
            build(Flags(allowed_media_domains=(host,)))


def test_replicas_of_the_file_or_the_flag_divide_the_hosts() -> None:
    config = build(Flags(), HOSTS.replace("local: true", "local: true, slots: 4") + "\nreplicas: 2")
    assert [(host.name, host.slots) for host in config.hosts] == [("local", 2), ("local.2", 2)]
    assert (config.num_replicas, config.num_ranks, config.world_size) == (2, 4, 2)
    assert [host.name for host in config.hosts_of(1)] == ["local.2"]
    assert build(Flags(num_replicas=1), HOSTS + "\nreplicas: 2").num_replicas == 1


def test_replicas_and_a_switch_of_models_do_not_go_together() -> None:
    with pytest.raises(SettingsError, match="all or nothing"):
        build(Flags(num_replicas=2, allowed_models=("org/b",)), HOSTS.replace("true", "true, slots: 2"))


def test_prefixes_per_key_need_keys() -> None:
    prefix = PrefixSettings(is_per_key=True)
    with pytest.raises(SettingsError, match="there are none"):
        build(Flags(prefix=prefix))
    assert build(Flags(prefix=prefix), MLX_MESH_API_KEY=KEY).prefix.is_per_key


def test_a_mesh_without_a_model_is_refused_with_the_fix() -> None:
    with pytest.raises(SettingsError, match=r"No model is named\. Give --model"):
        build_config(local_hostfile(2, "sim"), Flags(), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "mac1.local"])
def test_serving_to_other_machines_needs_an_api_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"Serving on {host} lets other machines in.*--api-key-file"):
        build(Flags(host=host))
    with pytest.raises(SettingsError, match="lets other machines in"):
        build(Flags(), HOSTS.replace("port: 1", f"host: '{host}'"))
    assert build(Flags(host=host), MLX_MESH_API_KEY=KEY).api_keys == (KEY,)
    assert build(Flags(host=host), MLX_MESH_API_KEY=f"{KEY}, {KEY[::-1]}").api_keys == (KEY, KEY[::-1])
    assert build(Flags(allowed_origins=("https://Chat.Example",))).allowed_origins == (
        "https://chat.example",
    )
    file = tmp_path / "keys"
    file.write_text(f"# two\n{KEY}\n\n{KEY}2\n")
    assert build(Flags(host=host, api_key_file=str(file))).api_keys == (KEY, KEY + "2")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host) and build(Flags(host=host)).api_keys == ()


@pytest.mark.parametrize("text", ["", "# only\n", "short\n", "has space in it\n", "ümlaut-ümlaut\n"])
def test_a_key_file_without_a_usable_key_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match="key"):
        build(Flags(api_key_file=str(file)))


def test_a_key_never_shows_in_the_configurations_text() -> None:
    assert KEY not in repr(build(Flags(), MLX_MESH_API_KEY=KEY))


@pytest.mark.parametrize(
    "flags",
    [
        Flags(port=-1),
        Flags(port=65536),
        Flags(max_sequences=0),
        Flags(max_queued_requests=-1),
        Flags(context=0),
        Flags(allowed_origins=("*",)),
        Flags(allowed_origins=("https://chat.example/",)),
        Flags(allowed_origins=("chat.example",)),
        Flags(name="../x"),
    ],
)
def test_a_flag_out_of_range_is_a_usage_error(flags: Flags) -> None:
    with pytest.raises(SettingsError) as caught:
        build(flags)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_relative_model_path_starts_at_its_file_or_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "m").mkdir(parents=True)
    (tmp_path / "h.yaml").write_text("model: ./m\nhosts: [{local: true}]")
    monkeypatch.chdir(tmp_path / "here")
    hostfile = read_hostfile(str(tmp_path / "h.yaml"))
    assert build_config(hostfile, Flags(), {}).model == str(tmp_path / "m")
    assert build_config(hostfile, Flags(model="m"), {}).model == str(tmp_path / "here" / "m")
    assert build_config(hostfile, Flags(model="org/m"), {}).model == "org/m"
    assert anchor_model("~/m", tmp_path) == "~/m"


def test_a_model_is_looked_up_in_the_hosts_folder_first() -> None:
    assert model_candidates("org/m", "") == []
    assert model_candidates("org/m", "~/models/") == ["~/models/org/m", "~/models/m"]
    assert model_candidates("/a/m", "~/models") == ["/a/m", "~/models/m"]


def test_a_relative_models_folder_of_another_host_is_refused() -> None:
    with pytest.raises(SettingsError, match="relative path, which has no meaning on another host"):
        build(Flags(), "model: m\nhosts: [{ssh: x, models: models}]")


def test_memory_is_planned_for_the_context_and_sequences_asked_for() -> None:
    assert plan_size(build(Flags())) == (4096, 4)
    assert plan_size(build(Flags(context=1000, max_sequences=2))) == (1000, 2)


@pytest.mark.parametrize("model", ["/" + "x" * 300, "org/" + "x/" * 600])
def test_a_models_name_that_is_too_long_is_refused_and_not_repeated(model: str) -> None:
    with pytest.raises(SettingsError, match="too many for a path or a hub id") as caught:
        build_config(local_hostfile(1, "x"), Flags(model=model), {})
    assert len(str(caught.value)) < 300


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_hostfile_that_is_no_regular_file_or_far_too_large_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_HOSTFILE_BYTES + 1))
    for path, words in (
        (tmp_path / "fifo.yaml", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "large.yaml", "larger than 1 MiB"),
    ):
        with pytest.raises(HostfileError, match=words):
            read_hostfile(str(path))


def test_a_hostfile_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match=r"none\.yaml: cannot be read"):
        read_hostfile(str(tmp_path / "none.yaml"))
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HostfileError, match="not UTF-8"):
        read_hostfile(str(tmp_path / "b.yaml"))


def test_a_chat_template_is_read_here_whoever_leads(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert build(Flags(chat_template=str(file))).chat_template == "{{ messages }}"
    assert build(Flags(chat_template="{% for m in messages %}{% endfor %}")).chat_template.startswith("{%")
    assert build(Flags()).chat_template == ""
    for bad, words in (
        (tmp_path / "none.jinja", "neither a Jinja text nor"),
        (tmp_path, "neither a Jinja text"),
    ):
        with pytest.raises(SettingsError, match=words):
            build(Flags(chat_template=str(bad)))
    file.write_text(" \n")
    with pytest.raises(SettingsError, match="1 to 1000000 will do"):
        build(Flags(chat_template=str(file)))
