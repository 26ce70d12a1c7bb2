"""SSH settings from `ssh -G` lines."""

from __future__ import annotations

import os
import pwd
import socket

from mlx_mesh.launcher.ssh_config import (
    CONNECT_TIMEOUT_S,
    JumpSpec,
    SshSettings,
    expand_path,
    parse_jumps,
    parse_ssh_g,
    refusals,
    settings_from_options,
)

HOME = pwd.getpwuid(os.getuid()).pw_dir


def settings(*lines: str, **environment: str) -> SshSettings:
    return settings_from_options("mac2", parse_ssh_g("\n".join(lines)), environment)


def test_what_ssh_tells_is_taken_over() -> None:
    found = settings(
        "user me",
        "hostname mac2.local",
        "port 2222",
        "identityfile ~/.ssh/a",
        "identityfile /keys/%r-%h-%p",
        "identitiesonly yes",
        "connecttimeout 3",
        "serveraliveinterval 2",
        "serveralivecountmax 4",
        "addressfamily inet",
        "userknownhostsfile /a /b",
        "globalknownhostsfile none",
        "ciphers aes128-ctr,aes256-ctr",
    )
    assert (found.user, found.hostname, found.port) == ("me", "mac2.local", 2222)
    assert found.identity_files == (f"{HOME}/.ssh/a", "/keys/me-mac2.local-2222")
    assert (found.connect_timeout_s, found.alive_interval_s, found.alive_count) == (3.0, 2.0, 4)
    assert found.address_family is socket.AF_INET
    assert found.known_hosts_files == ("/a", "/b")
    assert found.known_as == ("[mac2.local]:2222", "mac2.local")
    assert found.ciphers == ("aes128-ctr", "aes256-ctr")


def test_a_link_is_watched_even_when_the_settings_say_nothing() -> None:
    found = settings("serveraliveinterval 0", "connecttimeout none")
    assert found.alive_interval_s > 0 and found.connect_timeout_s == CONNECT_TIMEOUT_S


def test_a_host_key_alias_is_looked_up_without_the_port() -> None:
    assert settings("port 2222", "hostkeyalias Studio").known_as == ("studio",)


def test_the_agent_is_the_one_that_is_named() -> None:
    assert settings(SSH_AUTH_SOCK="/s").agent_socket == "/s"
    assert settings("identityagent none", SSH_AUTH_SOCK="/s").agent_socket == ""
    assert settings("identityagent SSH_AUTH_SOCK", SSH_AUTH_SOCK="/s").agent_socket == "/s"
    assert settings("identityagent $MY_AGENT", MY_AGENT="/m").agent_socket == "/m"
    assert settings("identityagent ~/agent").agent_socket == f"{HOME}/agent"


def test_jumps_are_read_in_their_order_with_user_and_port() -> None:
    assert parse_jumps("me@a:22,b,ssh://[fe80::1]:2200") == (
        JumpSpec("a", "me", 22),
        JumpSpec("b"),
        JumpSpec("fe80::1", "", 2200),
    )
    assert settings("proxyjump none").jumps == ()


def test_paths_are_expanded_as_ssh_does_and_unknown_users_are_left() -> None:
    assert expand_path("~/x", {"d": "/home/me"}) == "/home/me/x"
    assert expand_path("~root/x", {"d": "/h"}) == pwd.getpwnam("root").pw_dir + "/x"
    assert expand_path("~no-such-user/x", {"d": "/h"}) == "~no-such-user/x"
    assert expand_path("%d/%%/%z", {"d": "/h", "%": "%"}) == "/h/%/%z"


def test_plain_settings_are_not_refused() -> None:
    options = parse_ssh_g(
        "proxycommand none\npubkeyauthentication true\nremotecommand none\nforwardagent yes"
    )
    assert refusals(options) == []
