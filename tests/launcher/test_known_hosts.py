"""known_hosts lines and the verdicts drawn from them."""

from __future__ import annotations

import base64
import hmac

import pytest

from mlx_mesh.launcher.known_hosts import (
    Trust,
    fingerprint,
    judge,
    known_key_types,
    name_matches,
    parse_known_hosts,
)

# ssh-keygen -H of "mac2.local"
HASHED = "|1|AAECAwQFBgcICQoLDA0ODxAREhM=|"


def trust(text: str, *names: str, key: str = "AAAA", kind: str = "ssh-ed25519") -> Trust:
    return judge(parse_known_hosts(text, "kh"), names, kind, key).trust


@pytest.mark.parametrize(
    ("names", "name", "matches"),
    [
        ("mac2.local", "mac2.local", True),
        ("MAC2.local", "mac2.local", True),
        ("mac1,mac2", "mac2", True),
        ("*.local", "mac2.local", True),
        ("*.local,!mac2.local", "mac2.local", False),
        ("mac?", "mac2", True),
        ("[mac2]:2222", "[mac2]:2222", True),
        ("[mac2]:2222", "m", False),
        ("mac2", "[mac2]:2222", False),
        ("|1|bad", "mac2", False),
    ],
)
def test_patterns_match_as_in_openssh(names: str, name: str, matches: bool) -> None:
    assert name_matches(names, name) is matches


def test_a_hashed_name_matches_only_that_name() -> None:
    salt = base64.b64decode("AAECAwQFBgcICQoLDA0ODxAREhM=")
    names = HASHED + base64.b64encode(hmac.new(salt, b"mac2.local", "sha1").digest()).decode()
    assert name_matches(names, "mac2.local")
    assert not name_matches(names, "mac1.local")


def test_the_same_key_is_known_and_another_of_its_type_is_a_change() -> None:
    assert trust("mac2 ssh-ed25519 AAAA", "mac2") is Trust.KNOWN
    assert trust("mac2 ssh-ed25519 BBBB", "mac2") is Trust.CHANGED
    assert trust("mac2 ssh-ed25519 BBBB\nmac2 ssh-ed25519 AAAA", "mac2") is Trust.KNOWN


def test_a_key_of_another_type_or_host_leaves_it_unknown() -> None:
    assert trust("mac2 ssh-rsa BBBB", "mac2") is Trust.UNKNOWN
    assert trust("mac1 ssh-ed25519 AAAA", "mac2") is Trust.UNKNOWN
    assert trust("", "mac2") is Trust.UNKNOWN


def test_a_revoked_key_is_never_known() -> None:
    assert trust("mac2 ssh-ed25519 AAAA\n@revoked * ssh-ed25519 AAAA", "mac2") is Trust.REVOKED


def test_a_certificate_authority_does_not_make_a_plain_key_known() -> None:
    verdict = judge(
        parse_known_hosts("@cert-authority *.local ssh-ed25519 AAAA", "kh"),
        ["mac2.local"],
        "ssh-ed25519",
        "AAAA",
    )
    assert verdict.trust is Trust.UNKNOWN
    assert verdict.entry is not None and verdict.entry.marker == "@cert-authority"


def test_the_name_without_the_port_makes_a_key_known_but_never_changed() -> None:
    assert trust("mac2 ssh-ed25519 AAAA", "[mac2]:2222", "mac2") is Trust.KNOWN
    assert trust("mac2 ssh-ed25519 BBBB", "[mac2]:2222", "mac2") is Trust.UNKNOWN


def test_comments_and_broken_lines_are_left_out() -> None:
    entries = parse_known_hosts("# x y z\n\nonly two\nmac2 ssh-rsa AAAA comment\n", "kh")
    assert [(entry.names, entry.line) for entry in entries] == [("mac2", 4)]
    assert known_key_types(entries, ["mac2"]) == ["ssh-rsa"]


def test_a_fingerprint_is_the_one_of_ssh_keygen() -> None:
    assert fingerprint("AAAA") == "SHA256:cJ6AyISHokEeHuTfufIqhhSS0gxHZRUMDHlKvXD4FHw"
