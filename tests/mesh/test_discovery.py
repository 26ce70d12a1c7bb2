"""Announcements: written and read within bounds, and what is to be thought of all that were seen."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_mesh.mesh.discovery import (
    MAX_TXT_BYTES,
    Announcement,
    FoundHost,
    HostInterface,
    InterfaceScan,
    RecordRejected,
    Sighting,
    advise,
    announced,
    common_networks,
    format_txt,
    hardware_digest,
    host_name,
    in_words,
    meeting_addresses,
    merge,
    parse_txt,
    split_txt,
    txt_bytes,
    usable_interfaces,
    version_differences,
)
from mlx_mesh.mesh.interfaces import Interface, LinkClass
from mlx_mesh.mesh.types import Versions

VERSIONS = Versions(mlx_mesh="0.1.0", mlx="0.32.4", mlx_lm="0.32.2", python="3.11.7", protocol=1)


def print_of(letter: str) -> str:
    return "SHA256:" + letter * 43


def wired(*addresses: str, name: str = "en0", link_class: LinkClass = LinkClass.ETHERNET) -> HostInterface:
    return HostInterface(name=name, link_class=link_class, addresses=addresses)


def said(number: int, **changes: Any) -> Announcement:
    """What an agent on host `number`, at 10.0.0.number, announces."""
    made = Announcement(
        host=f"mac{number}",
        run=f"{number:016x}",
        role="agent",
        hardware=hardware_digest(f"uuid {number}"),
        ssh=print_of(chr(ord("a") + number)),
        key=print_of(chr(ord("A") + number)),
        port=17864,
        chip="Apple M4 Max",
        memory_bytes=128 * 10**9,
        versions=VERSIONS,
        interfaces=(wired(f"10.0.0.{number}/24"),),
    )
    return replace(made, **changes)


def seen(*announcements: Announcement, **changes: Any) -> list[Sighting]:
    return [
        replace(Sighting(announcement=each, source="multicast", interface="en0"), **changes)
        for each in announcements
    ]


def what(rows: list[FoundHost]) -> dict[str, str]:
    return {row.name: row.verdict.what for row in rows}


OWN = said(9, role="node", key="", port=0)

# ---------------------------------------------------------------- the TXT record


def wire(strings: dict[str, str]) -> bytes:
    data = b""
    for key, value in strings.items():
        text = f"{key}={value}".encode()
        data += bytes([len(text)]) + text
    return data


def test_an_announcement_survives_the_wire() -> None:
    two = said(
        1,
        interfaces=(
            wired("10.0.0.1/24", "169.254.3.4/16"),
            wired("10.1.0.1/30", name="en5", link_class=LinkClass.THUNDERBOLT),
        ),
    )
    assert parse_txt(split_txt(wire(format_txt(two))), 17864) == two


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.text("abc XYZ", max_size=80),
    st.integers(0, 2**60),
)
def test_whatever_a_host_has_its_record_fits_and_is_read(counts: list[int], chip: str, memory: int) -> None:
    interfaces = tuple(
        wired(
            *(f"192.168.{index}.{k}/255.255.255.0" for k in range(1, count + 1)), name=f"interface{index:06}"
        )
        for index, count in enumerate(counts)
    )
    made = said(1, interfaces=interfaces, chip=chip, memory_bytes=memory, mesh="m" * 63, host="h" * 63)
    strings = format_txt(made)
    assert txt_bytes(strings) <= MAX_TXT_BYTES and all(len(f"{k}={v}") <= 255 for k, v in strings.items())
    back = parse_txt(split_txt(wire(strings)), 17864)
    assert back.interfaces == interfaces[: len(back.interfaces)] and back.interfaces
    assert (back.host, back.memory_bytes, back.chip) == (made.host, memory, chip[:64])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": "2"}, "a record of version '2', where this mlx-mesh knows 1"),
        ({"v": ""}, "a record of version ''"),
        ({"host": "a b"}, "host='a b'"),
        ({"host": ""}, "no host"),
        ({"host": "\x1b[2Jx"}, "host="),
        ({"run": "zz"}, "run='zz'"),
        ({"role": "leader"}, "role='leader'"),
        ({"key": ""}, "no key"),
        ({"key": "SHA256:short"}, "key='SHA256:short'"),
        ({"ssh": "MD5:x"}, "ssh='MD5:x'"),
        ({"hw": "not hex!"}, "hw='not hex!'"),
        ({"mem": "-1"}, "mem='-1'"),
        ({"mem": "9" * 21}, "mem="),
        ({"proto": "one"}, "proto='one'"),
        ({"chip": "M4\n"}, "chip="),
        ({"if0": ""}, "an interface ''"),
        ({"if0": "en0;ethernet;10.0.0.1/24,"}, "an interface"),
        ({"if0": "en0;token-ring;10.0.0.1/24"}, "an interface"),
        ({"if0": "en0;ethernet;224.0.0.1/24"}, "no host has that address"),
        ({"if0": "en0;ethernet;0.0.0.0/0"}, "no host has that address"),
        ({"if0": "en0;ethernet;fe80::1/64"}, "an interface"),
        ({"if0": "en0;ethernet;" + ",".join(["10.0.0.1/24"] * 5)}, "an interface"),
        ({"if0": "../../etc;ethernet;10.0.0.1/24"}, "an interface"),
    ],
)
def test_a_malformed_record_is_rejected_with_what_is_wrong(change: dict[str, str], reason: str) -> None:
    with pytest.raises(RecordRejected) as caught:
        parse_txt(format_txt(said(1)) | change, 17864)
    assert reason in str(caught.value)


def test_an_agent_without_a_port_or_an_address_is_rejected() -> None:
    strings = format_txt(said(1))
    with pytest.raises(RecordRejected, match="an agent on port 0"):
        parse_txt(strings, 0)
    with pytest.raises(RecordRejected, match="no interface with an address"):
        parse_txt({key: value for key, value in strings.items() if key != "if0"}, 1)


def test_what_is_not_known_is_left_alone_and_the_first_of_a_key_wins() -> None:
    strings = format_txt(said(1))
    data = wire(strings) + wire({"host": "other", "later": "thing"}) + b"\x04flag"
    assert parse_txt(split_txt(data), 17864) == said(1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x05ab", "ends in the middle"),
        (b"\x04k=\xff\xff", "not ASCII"),
        (b"\x01a" * 600, f"{MAX_TXT_BYTES} is the limit"),
    ],
)
def test_text_that_is_no_record_is_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(RecordRejected, match=reason):
        split_txt(data)


@given(st.binary(max_size=400), st.integers(0, 70000))
def test_no_bytes_do_worse_than_be_rejected(data: bytes, port: int) -> None:
    with contextlib.suppress(RecordRejected):
        parse_txt(split_txt(data), port)


@pytest.mark.parametrize(
    ("hostname", "name"),
    [
        ("Annas-Mac-Studio.local", "Annas-Mac-Studio"),
        ("mac1", "mac1"),
        ("Büro Mac", "B-ro-Mac"),
        ("---", "host"),
        ("", "host"),
        ("x" * 80, "x" * 63),
    ],
)
def test_a_host_s_name_fits_into_records_and_logs(hostname: str, name: str) -> None:
    assert host_name(hostname) == name


def test_hardware_is_told_apart_but_not_named() -> None:
    assert hardware_digest("ABC") == hardware_digest(" abc ") != hardware_digest("ABD")
    assert "abc" not in hardware_digest("ABC").lower() and hardware_digest("") == ""


# ---------------------------------------------------------------- interfaces


def interface(name: str, link_class: LinkClass, *addresses: str, **more: Any) -> Interface:
    return Interface(
        name=name, link_class=link_class, evidence=f"as {link_class}", addresses=addresses, **more
    )


def test_only_interfaces_that_lead_to_other_hosts_are_used_and_the_others_are_told() -> None:
    used, unused = usable_interfaces(
        [
            interface("en0", LinkClass.WIFI, "10.0.0.2/24"),
            interface("en1", LinkClass.ETHERNET, "10.1.0.2/24"),
            interface("en5", LinkClass.THUNDERBOLT, "169.254.1.1/16"),
            interface("en6", LinkClass.THUNDERBOLT, bridge="bridge0"),
            interface("en7", LinkClass.ETHERNET, "10.3.0.1/24", is_active=False),
            interface("en8", LinkClass.ETHERNET),
            interface("utun3", LinkClass.FOREIGN, "100.64.0.1/32"),
            interface("awdl0", LinkClass.FOREIGN),
            interface("lo0", LinkClass.LOOPBACK, "127.0.0.1/8"),
        ]
    )
    assert [each.name for each in used] == ["en5", "en1", "en0"]
    assert unused == {
        "en6": "a member of bridge0",
        "en7": "no carrier",
        "en8": "no IPv4 address",
        "utun3": "as foreign",
        "awdl0": "as foreign",
        "lo0": "as loopback",
    }


def test_an_interface_that_is_asked_for_is_used_whatever_it_is() -> None:
    interfaces = [
        interface("en0", LinkClass.ETHERNET, "10.0.0.2/24"),
        interface("lo", LinkClass.LOOPBACK, "127.0.0.1/8"),
    ]
    used, unused = usable_interfaces(interfaces, ["lo", "en9"])
    assert [each.name for each in used] == ["lo"]
    assert unused == {"en0": "not among those asked for", "en9": "there is no such interface"}
    used, unused = usable_interfaces(interfaces, ["*", "^en0"])
    assert used == [] and unused == {"en0": "not among those asked for", "lo": "as loopback"}


def test_an_announcement_has_so_many_interfaces_and_addresses() -> None:
    many = [
        interface(f"en{n}", LinkClass.ETHERNET, *(f"10.{n}.0.{k}/24" for k in range(1, 9))) for n in range(12)
    ]
    assert [(len(each.addresses)) for each in announced(many)] == [4] * 8


# ---------------------------------------------------------------- merging and verdicts


def test_one_host_on_two_interfaces_in_two_roles_is_one_row() -> None:
    agent = said(
        1,
        interfaces=(wired("10.0.0.1/24"), wired("10.1.0.1/30", name="en5", link_class=LinkClass.THUNDERBOLT)),
    )
    node = replace(agent, run="f" * 16, role="node", key="", port=0, mesh="studio")
    rows = merge([*seen(agent, node), *seen(agent, interface="en5")], OWN)
    (row,) = rows
    assert (row.name, row.verdict.what, row.seen_on, row.meshes) == (
        "mac1",
        "usable",
        ("en0", "en5"),
        ("studio",),
    )
    assert (row.port, row.key) == (17864, agent.key)
    assert row.addresses == ("10.1.0.1", "10.0.0.1"), "the better link first"


def test_two_hosts_with_one_identity_are_both_refused_with_both_names() -> None:
    copy = said(2, hardware=said(1).hardware)
    rows = merge(seen(said(1), copy, said(3)), OWN)
    assert what(rows) == {"mac1": "duplicate", "mac2": "duplicate", "mac3": "usable"}
    for row in rows[:2]:
        assert "mac1 (10.0.0.1)" in row.verdict.reason and "mac2 (10.0.0.2)" in row.verdict.reason
        assert "the same hardware UUID" in row.verdict.reason and not row.verdict.is_usable


@pytest.mark.parametrize(("field", "told"), [("ssh", "SSH host key"), ("key", "key of mlx-mesh")])
def test_a_copied_key_is_a_copied_host_even_under_one_name(field: str, told: str) -> None:
    copy = replace(said(2), host="mac1", **{field: getattr(said(1), field)})
    rows = merge(seen(said(1), copy), OWN)
    assert [row.verdict.what for row in rows] == ["duplicate", "duplicate"] and told in rows[0].verdict.reason


def test_copies_are_copies_also_when_both_were_seen_before() -> None:
    pair = [said(1), said(2, ssh=said(1).ssh)]
    for sightings in (seen(*pair) + seen(*pair, source="cache"), seen(*pair, source="cache") + seen(*pair)):
        assert what(merge(sightings, OWN)) == {"mac1": "duplicate", "mac2": "duplicate"}


def test_a_copy_of_this_host_is_refused_and_this_host_is_told_as_itself() -> None:
    mine = replace(OWN, run="e" * 16, role="agent", key=print_of("Z"), port=17864)
    assert what(merge(seen(mine), OWN)) == {"mac9": "self"}
    copy = said(2, hardware=OWN.hardware)
    assert what(merge(seen(copy), OWN)) == {"mac2": "duplicate"}


def test_this_host_knows_itself_without_any_identity() -> None:
    bare = {"hardware": "", "ssh": "", "key": ""}
    own = replace(OWN, **bare)
    mine = replace(own, run="e" * 16, role="agent", key=print_of("Z"), port=17864)
    assert what(merge(seen(mine), own)) == {"mac9": "self"}
    node = said(1, run="d" * 16, role="node", port=0, mesh="m", **bare)
    (row,) = merge(seen(said(1, hardware="", ssh=""), node), own)
    assert (row.verdict.what, row.meshes) == ("usable", ("m",))


def test_hosts_without_identity_and_with_one_name_stay_two() -> None:
    bare = {"hardware": "", "ssh": "", "host": "mac"}
    rows = merge(seen(said(1, **bare), said(2, **bare)), OWN)
    assert [row.verdict.what for row in rows] == ["usable", "usable"]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("mlx", "0.33.0", "mlx 0.33.0 there, 0.32.4 here"),
        ("mlx_lm", "", "mlx-lm none there, 0.32.2 here"),
        ("mlx_mesh", "0.2.0", "mlx-mesh 0.2.0 there, 0.1.0 here"),
        ("protocol", 2, "protocol 2 there, 1 here"),
    ],
)
def test_other_versions_are_a_reason_not_to_use_a_host(field: str, value: Any, told: str) -> None:
    other = said(1, versions=replace(VERSIONS, **{field: value}))
    (row,) = merge(seen(other), OWN)
    assert row.verdict.what == "version" and told in row.verdict.reason


def test_another_python_is_none() -> None:
    assert version_differences(replace(VERSIONS, python="3.12.1"), VERSIONS) == []


def test_a_host_in_a_mesh_without_an_agent_is_busy() -> None:
    (row,) = merge(seen(said(1, role="node", key="", port=0, mesh="studio")), OWN)
    assert row.verdict.what == "busy" and "mesh studio" in row.verdict.reason


def test_the_cache_only_says_who_was_there() -> None:
    cached = seen(said(1), said(2), source="cache", interface="", age_s=7200.0)
    rows = merge([*seen(said(2)), *cached], OWN)
    assert what(rows) == {"mac1": "stale", "mac2": "usable"}
    assert rows[0].verdict.reason == "seen 2 hours ago, and does not answer now" and rows[0].meshes == ()
    assert (rows[1].source, rows[1].age_s) == ("multicast", 0.0)


def test_what_the_cache_has_of_a_host_that_moved_or_was_set_up_anew_is_forgotten() -> None:
    moved = said(1, interfaces=(wired("10.0.0.77/24"),))
    anew = said(2, key=print_of("Y"), ssh=print_of("y"), hardware="")
    cached = seen(said(1), said(2, hardware=""), source="cache", age_s=60.0)
    rows = merge([*seen(moved, anew), *cached], OWN)
    assert what(rows) == {"mac1": "usable", "mac2": "usable"} and len(rows) == 2
    assert rows[0].addresses == ("10.0.0.77",)


def test_a_host_that_answers_at_its_address_only_is_as_good() -> None:
    (row,) = merge(seen(said(1), source="address", interface="", sender="10.0.0.1"), OWN)
    assert (row.verdict.what, row.source, row.seen_on) == ("usable", "address", ())


@given(st.permutations(range(6)))
def test_the_order_of_what_was_seen_does_not_matter(order: list[int]) -> None:
    bridge = said(1, run="a" * 16, interfaces=(wired("10.0.0.1/24"), wired("10.9.0.1/24", name="en5")))
    far = said(1, run="b" * 16, interfaces=(wired("10.9.0.1/24", name="en5"),))
    all_seen = seen(said(1), bridge, far, said(2), said(3, hardware=said(2).hardware), said(4))
    rows = merge([all_seen[index] for index in order], OWN)
    assert what(rows) == {"mac1": "usable", "mac2": "duplicate", "mac3": "duplicate", "mac4": "usable"}


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.4, "3 s"), (61, "1 minute"), (7300, "2 hours"), (200000, "2 days")]
)
def test_ages_are_told_roughly(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


# ---------------------------------------------------------------- where to knock


def test_networks_in_common_come_first_and_then_the_better_links() -> None:
    own = (wired("10.0.0.9/24"), wired("10.1.0.2/30", name="en5", link_class=LinkClass.THUNDERBOLT))
    host = (
        wired("192.168.7.1/24", name="en6", link_class=LinkClass.THUNDERBOLT),
        wired("10.0.0.1/24"),
        wired("10.1.0.1/30", name="en5", link_class=LinkClass.THUNDERBOLT),
    )
    assert meeting_addresses(own, host) == ["10.1.0.1", "10.0.0.1", "192.168.7.1"]


def test_a_network_for_all_is_one_on_which_everybody_is() -> None:
    cable = {"link_class": LinkClass.THUNDERBOLT}
    own = (
        wired("10.0.0.9/24"),
        HostInterface(name="en5", addresses=("10.1.0.1/30",), **cable),
        HostInterface(name="en6", addresses=("10.2.0.1/30",), **cable),
    )
    first = (wired("10.0.0.1/24"), HostInterface(name="en5", addresses=("10.1.0.2/30",), **cable))
    second = (wired("10.0.0.2/24"), HostInterface(name="en5", addresses=("10.2.0.2/30",), **cable))
    assert [str(network) for network in common_networks(own, [first])] == ["10.1.0.0/30", "10.0.0.0/24"]
    assert [str(network) for network in common_networks(own, [first, second])] == ["10.0.0.0/24"]
    assert common_networks(own[1:], [first, second]) == []


# ---------------------------------------------------------------- advice


def scanned(name: str, link_class: LinkClass, **more: Any) -> InterfaceScan:
    return InterfaceScan(name=name, link_class=link_class, evidence="x", **more)


def test_who_sees_nobody_is_told_what_to_do() -> None:
    wifi = scanned("en0", LinkClass.WIFI, num_queries=3)
    advice = " ".join(advise([wifi], [], is_mac=True))
    for part in (
        "`mlx-mesh agent`",
        "Local Network",
        "client isolation",
        "--address",
        "mlx-mesh up hosts.yaml",
    ):
        assert part in advice
    wired_only = " ".join(advise([scanned("en0", LinkClass.ETHERNET)], [], is_mac=False))
    assert "Local Network" not in wired_only and "Wi-Fi" not in wired_only
    assert "No interface" in advise([replace(wifi, is_used=False)], [], is_mac=False)[0]
    assert "Nothing could be sent" in advise([replace(wifi, error="No route to host")], [], is_mac=True)[0]


def test_there_is_no_advice_once_somebody_was_seen() -> None:
    here = merge(seen(OWN), OWN)
    stale = merge(seen(said(1), source="cache", age_s=5.0), OWN)
    en0 = scanned("en0", LinkClass.ETHERNET)
    assert advise([en0], [*here, *stale], is_mac=False)
    assert advise([en0], merge(seen(said(1)), OWN), is_mac=True) == []
