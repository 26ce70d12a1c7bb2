"""hosts.yaml and mlx.launch hostfiles: what is read, and what each fault says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_mesh.mesh.errors import ExitCode, HostfileError
from mlx_mesh.mesh.hostfile import Hostfile, parse_hostfile
from mlx_mesh.mesh.messages import Deadlines
from mlx_mesh.mesh.types import Backend, Sharding

HOSTFILES = Path(__file__).parents[2] / "hostfiles"


def fault(text: str, source: str = "hosts.yaml") -> str:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, source)
    assert caught.value.exit_code is ExitCode.USAGE
    return str(caught.value)


def example(name: str) -> Hostfile:
    path = HOSTFILES / name
    return parse_hostfile(path.read_text(), str(path))


# ---------------------------------------------------------------- what is read


def test_the_loopback_example_is_one_local_host_with_two_slots() -> None:
    hostfile = example("loopback.yaml")
    assert [(host.is_local, host.slots) for host in hostfile.hosts] == [(True, 2)]
    assert (hostfile.name, hostfile.serve_host, hostfile.serve_port) == ("loopback", "127.0.0.1", 18000)


def test_the_two_macs_example_has_a_local_leader_and_applies_the_defaults() -> None:
    leader, follower = example("two_macs.yaml").hosts
    assert leader.is_local and not follower.is_local
    assert (follower.ssh, follower.addresses) == ("mac2.local", ("10.77.0.2",))
    assert leader.python == follower.python == "~/.venvs/mlx-mesh/bin/python"


def test_the_three_macs_example_reads_every_field() -> None:
    hostfile = example("three_macs_ethernet.yaml")
    studio, mini, book = hostfile.hosts
    assert (hostfile.sharding, hostfile.backend) == (Sharding.PIPELINE, Backend.RING)
    assert (studio.user, mini.user, book.user) == ("me", "me", "alex")
    assert (mini.memory_limit_bytes, book.layers, mini.models) == (40 * 10**9, (8,), "~/models")


def test_the_mlx_launch_example_is_read_as_it_is_and_says_what_it_leaves_out() -> None:
    hostfile = example("mlx_launch.json")
    assert [(host.ssh, host.addresses, host.rdma) for host in hostfile.hosts] == [
        ("mac1.local", ("192.168.0.1",), (None, "rdma_en3")),
        ("mac2.local", ("192.168.0.2",), ("rdma_en3", None)),
    ]
    assert hostfile.backend is Backend.JACCL
    assert len(hostfile.notes) == 1 and "MLX_METAL_FAST_SYNCH" in hostfile.notes[0]


def test_a_bare_list_of_mlx_launch_is_read_and_named_after_its_file() -> None:
    hostfile = parse_hostfile('[\n\t{"ssh": "a.local", "ips": ["10.0.0.1"], "rdma": []}]', "/x/pair.json")
    assert (hostfile.name, hostfile.hosts[0].name, hostfile.backend) == ("pair", "a.local", Backend.AUTO)


def test_several_entries_of_127_0_0_1_are_one_local_host_with_as_many_slots() -> None:
    hostfile = parse_hostfile('[{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "127.0.0.1"}]', "l.json")
    assert [(host.is_local, host.slots) for host in hostfile.hosts] == [(True, 2)]


def test_of_several_rdma_devices_to_one_host_the_first_is_used_and_said_aloud() -> None:
    text = '[{"ssh":"a","ips":[],"rdma":[null,["d1","d2"]]},{"ssh":"b","ips":[],"rdma":[["d3"],null]}]'
    hostfile = parse_hostfile(text, "x.json")
    assert [host.rdma for host in hostfile.hosts] == [(None, "d1"), ("d3", None)]
    assert any("only the first" in note for note in hostfile.notes)


def test_a_name_is_taken_from_the_ssh_target_when_none_is_given() -> None:
    hostfile = parse_hostfile("hosts: [{ssh: me@mac1.local}, {local: true}]")
    assert [(host.name, host.user) for host in hostfile.hosts] == [("mac1.local", "me"), ("local", "")]


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("100GB", 100 * 10**9), ("96 GiB", 96 * 2**30), ("0.5TB", 5 * 10**11)]
)
def test_a_memory_limit_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    hostfile = parse_hostfile(f"hosts: [{{local: true, memory_limit: {text}}}]")
    assert hostfile.hosts[0].memory_limit_bytes == num_bytes


def test_deadlines_are_read_and_the_others_keep_their_defaults() -> None:
    text = "deadlines: {heartbeat_timeout_s: 4, rejoin_timeout_s: 7.5}\nhosts: [{local: true}]"
    deadlines = parse_hostfile(text).deadlines
    assert (deadlines.heartbeat_timeout_s, deadlines.rejoin_timeout_s) == (4.0, 7.5)
    assert deadlines.join_s == Deadlines().join_s


@pytest.mark.parametrize(("text", "announces"), [("", None), ("announce: false\n", False)])
def test_a_hostfile_may_ask_for_silence_on_the_network(text: str, announces: bool | None) -> None:
    assert parse_hostfile(f"{text}hosts: [{{local: true}}]").announce is announces


# ---------------------------------------------------------------- what each fault says


@pytest.mark.parametrize(
    ("deadlines", "words"),
    [
        (
            "{rejoin_timeout: 9}",
            "hosts.yaml:1: unknown key `rejoin_timeout`; did you mean `rejoin_timeout_s`?",
        ),
        ("{xyzzy: 9}", "use one of join_s, "),
        ("{stop_s: 0}", "`stop_s: 0` is out of range; it must be 0.1 to 86400 s"),
        ("{stop_s: soon}", "must be a number"),
        ("{heartbeat_timeout_s: 90}", "rejoin_timeout_s is 60 s; it must be at least heartbeat_timeout_s"),
        ("{engine_silence_s: 1.5}", "at least 2 times heartbeat_interval_s, which is 1 s"),
    ],
)
def test_a_deadline_that_cannot_work_is_refused(deadlines: str, words: str) -> None:
    assert words in fault(f"deadlines: {deadlines}\nhosts: [{{local: true}}]")


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_valid_one() -> None:
    message = fault("name: a\nhosts:\n  - local: true\n    slot: 2\nbackand: ring\n", "h.yaml")
    assert message.splitlines() == [
        "h.yaml:4: unknown key `slot`; did you mean `slots`?",
        "h.yaml:5: unknown key `backand`; did you mean `backend`?",
    ]


def test_faults_of_keys_and_of_values_are_told_together() -> None:
    message = fault("hosts:\n  - {local: true, slot: 2}\n  - {ssh: b, addresses: ['fe80::1']}\n", "h.yaml")
    assert message.splitlines()[0] == "h.yaml:2: unknown key `slot`; did you mean `slots`?"
    assert message.splitlines()[1].startswith("h.yaml:3: `fe80::1` is IPv6")


def test_an_unknown_key_without_a_near_one_lists_what_is_valid_there() -> None:
    assert "valid here: allowed_media_domains, host, port" in fault(
        "serve: {xyzzy: 1}\nhosts: [{local: true}]"
    )


def test_a_key_written_twice_is_an_error() -> None:
    assert fault("name: a\nname: b\nhosts: [{local: true}]").startswith(
        "hosts.yaml:2: key `name` stands twice"
    )


def test_two_hosts_of_one_name_are_refused_with_both_lines() -> None:
    message = fault("hosts:\n  - {name: a, ssh: x}\n  - {name: A, ssh: y}\n")
    assert message == "hosts.yaml:3: host 'A' stands already on line 2; rename one"


def test_the_same_ssh_target_and_user_twice_is_refused_with_the_slots_fix() -> None:
    message = fault("defaults: {user: me}\nhosts:\n  - {name: a, ssh: x}\n  - {name: b, ssh: me@X}\n")
    assert message.startswith("hosts.yaml:4:") and "slots: N" in message


def test_the_same_ssh_target_under_two_users_is_two_hosts() -> None:
    assert len(parse_hostfile("hosts: [{name: a, ssh: u@x}, {name: b, ssh: v@x}]").hosts) == 2


def test_two_local_hosts_are_refused_with_the_slots_fix() -> None:
    assert "slots: N" in fault("hosts: [{name: a, local: true}, {name: b, local: true}]")


def test_the_same_address_on_two_hosts_is_refused() -> None:
    message = fault(
        "hosts:\n  - {name: a, ssh: x, addresses: [10.0.0.1]}\n  - {name: b, ssh: y, addresses: [10.0.0.1]}"
    )
    assert message.startswith("hosts.yaml:3: 10.0.0.1 is already an address of 'a'")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("'fe80::1'", "IPv6, and MLX's ring speaks IPv4 only"),
        ("'fe80::1%en0'", "IPv6"),
        ("10.0.0", "no IPv4 address"),
        ("10.0.0.256", "no IPv4 address"),
        ("mac2.local", "a name belongs in `ssh:`"),
        ("0.0.0.0", "not the address of one host"),
        ("224.0.0.1", "not the address of one host"),
        ("255.255.255.255", "not the address of one host"),
        ("10.0.0.1%en0", "write the IPv4 address alone"),
    ],
)
def test_a_bad_address_is_named_with_its_line(address: str, words: str) -> None:
    message = fault(f"hosts:\n  - ssh: x\n    addresses:\n      - {address}\n")
    assert message.startswith("hosts.yaml:4: ") and words in message


def test_a_loopback_address_among_others_is_refused() -> None:
    text = "hosts: [{ssh: x, addresses: [127.0.0.1]}, {ssh: y, addresses: [10.0.0.1]}]"
    assert "loopback, which the other hosts cannot reach" in fault(text)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("{local: true, slots: 0}", "`slots: 0` is out of range; it must be at least 1"),
        ("{local: true, slots: two}", "`slots: two` is text; it must be a whole number"),
        ("{local: true, slots: 1.5}", "it must be a whole number"),
        ("{local: true, layers: -3}", "must be at least 1"),
        ("{local: true, memory_limit: 100}", "has no unit; write it like 100GB"),
        ("{local: true, memory_limit: lots}", "is no memory size"),
        ("{local: true, memory_limit: [1]}", "is no memory size"),
        ("{local: true, memory_limit: 0.1MB}", "under 1 MB"),
        ("{local: true, ssh: x}", "not both"),
        ("{name: a}", "this host has no `ssh:`"),
        ("{local: true, user: me}", "`user` means nothing"),
        ("{ssh: x, name: 5}", "`name: 5` is read as a number; put it in quotes"),
        ("{ssh: x, name: no}", "is read as true/false; put it in quotes"),
        ("{ssh: x, name: 'a b'}", "must be 1 to 63 letters"),
        ("{ssh: x, name: ../up}", "must be 1 to 63 letters"),
        ("{ssh: '-oProxyCommand=x'}", "is no host name"),
        ("{ssh: 'a b'}", "is no host name"),
        ("{ssh: 'x:22'}", "put `Port 22` under `Host x` in ~/.ssh/config"),
        ("{ssh: 'fe80::1'}", "IPv6"),
        ("{ssh: 'ssh://x'}", "is a URL"),
        ("{ssh: a@x, user: b}", "names user a and `user:` names b"),
        ("{ssh: x, addresses: 10.0.0.1}", "it must be a list"),
        ("{ssh: x, rdma: [a, b]}", "2 RDMA devices for 1 hosts"),
        ("{ssh: x, rdma: [a]}", "to itself must be null"),
        ("just-text", "it must be a mapping"),
    ],
)
def test_a_bad_host_is_refused_with_its_line_and_the_fix(host: str, words: str) -> None:
    message = fault(f"hosts:\n\n  - {host}\n")
    assert message.startswith("hosts.yaml:3: ") and words in message
    assert len(message.splitlines()) == 1


def test_the_mpi_backend_is_refused_with_the_reason() -> None:
    message = fault("backend: mpi\nhosts: [{local: true}]")
    assert message.startswith("hosts.yaml:1: backend mpi is not offered: ranks are started one by one")
    assert "no MPI job" in fault('{"backend": "mpi", "hosts": [{"ssh": "a", "ips": []}]}', "m.json")


def test_hosts_of_images_are_names_alone() -> None:
    message = fault('serve:\n  allowed_media_domains:\n  - a.example\n  - "*.b"\nhosts: [{local: true}]')
    assert message.startswith("hosts.yaml:4: `*.b` is no host name") and "wildcard" in message


def test_an_unknown_backend_lists_the_known_ones() -> None:
    assert "jaccl-ring" in fault("backend: rign\nhosts: [{local: true}]")


def test_a_port_out_of_range_is_refused() -> None:
    assert "at most 65535" in fault("serve: {port: 70000}\nhosts: [{local: true}]")


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "just text", "hosts: []", "hosts:\n", "name: x"])
def test_a_file_without_hosts_says_so(text: str) -> None:
    assert "hosts" in fault(text)


def test_broken_yaml_has_its_line() -> None:
    assert fault("hosts:\n  - a: 1\n    b: c: d\n").startswith("hosts.yaml:3: not readable as YAML")


def test_broken_json_has_its_line_and_says_json() -> None:
    assert fault('[\n  {"ssh": "a" "ips": []}\n]', "x.json").startswith("x.json:2: not readable as JSON")


def test_an_unknown_key_in_a_json_hostfile_has_its_line() -> None:
    message = fault('[\n  {"ssh": "a", "ips": []},\n  {"ssh": "b", "ip": ["10.0.0.2"]}\n]', "x.json")
    assert message == "x.json:3: unknown key `ip`; did you mean `ips`?"


def test_a_json_hostfile_with_one_host_twice_is_refused() -> None:
    assert fault('[{"ssh": "a", "ips": []},\n {"ssh": "a", "ips": []}]', "x.json").startswith("x.json:2:")


def test_aliases_that_explode_are_stopped() -> None:
    bomb = "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    for before, after in zip("abcdef", "bcdefg", strict=True):
        bomb += f"{after}: &{after} [{','.join(['*' + before] * 10)}]\n"
    assert "too large" in fault(bomb)


def test_a_structure_that_holds_itself_is_stopped() -> None:
    assert "too deeply nested" in fault("hosts: &h [*h]")


@pytest.mark.parametrize("text", ["hosts: " + "[" * 3000, "[" * 100_000 + "]" * 100_000])
def test_deep_nesting_is_a_fault_of_the_file(text: str) -> None:
    with pytest.raises(HostfileError, match="too deeply nested"):
        parse_hostfile(text, "deep.yaml")


def test_a_merge_key_is_named() -> None:
    text = "x: &d {user: me}\nhosts:\n  - {<<: *d, ssh: a}\n"
    with pytest.raises(HostfileError, match=r"h.yaml:3: `<<` \(merging another mapping\) is not read"):
        parse_hostfile(text, "h.yaml")


def test_three_hosts_of_one_name_are_told_twice() -> None:
    text = "hosts:\n  - {name: a, ssh: x}\n  - {name: A, ssh: y}\n  - {name: a, ssh: z}\n"
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, "h.yaml")
    assert len(str(caught.value).splitlines()) == 2


def test_all_faults_of_a_file_are_told_at_once_in_the_order_of_its_lines() -> None:
    message = fault("backend: x\nsharding: y\nhosts:\n  - {slots: -1}\n")
    assert [line.split(":")[1] for line in message.splitlines()] == ["1", "2", "4"]


def test_layers_is_one_number_for_all_slots_or_one_for_each() -> None:
    text = "model: m\nhosts:\n  - {name: a, local: true, slots: 2, layers: LAYERS}\n"
    assert parse_hostfile(text.replace("LAYERS", "15"), "f").hosts[0].layers == (15, 15)
    assert parse_hostfile(text.replace("LAYERS", "[20, 10]"), "f").hosts[0].layers == (20, 10)
    with pytest.raises(HostfileError, match="f:3: 1 numbers of layers for 2 slots"):
        parse_hostfile(text.replace("LAYERS", "[20]"), "f")


def test_rules_about_interfaces_are_the_files_unless_a_host_has_its_own() -> None:
    text = "interfaces: [en*, ^en0]\nhosts:\n  - {local: true}\n  - {ssh: a, interfaces: [en5]}\n"
    text += "  - {ssh: b, interfaces: []}\n"
    assert [host.interfaces for host in parse_hostfile(text).hosts] == [("en*", "^en0"), ("en5",), ()]
    with pytest.raises(HostfileError) as error:
        parse_hostfile("interfaces: [en 5]\nhosts:\n  - {local: true, interfaces: ['^']}\n")
    assert "hosts.yaml:1: `en 5` is no interface" in str(error.value)
    assert "hosts.yaml:3: `^` is no interface" in str(error.value)
