"""The effective SSH settings of one host, as OpenSSH would use them.

`ssh -G HOST` tells them where the ssh program exists (it knows Include, Match and canonical names); else
paramiko's parser reads the same files. What the launcher cannot honour is refused by name, never ignored,
unless ignoring it is the stricter choice (StrictHostKeyChecking no) or has no meaning here (forwardings).
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha1
from pathlib import Path

import paramiko

from mlx_mesh.launcher.faults import HostFault

SSH_G_TIMEOUT_S = 15.0  # it may resolve names for CanonicalizeHostname or run `Match exec`
CONNECT_TIMEOUT_S = 10.0
ALIVE_INTERVAL_S = 5.0
ALIVE_COUNT = 3
MAX_JUMPS = 8

Options = Mapping[str, Sequence[str]]  # lower-case keyword -> its values; identityfile has several lines


@dataclass(frozen=True, slots=True)
class JumpSpec:
    """One element of ProxyJump."""

    host: str
    user: str = ""
    port: int = 0  # 0 = what the settings say

    def __str__(self) -> str:
        return (f"{self.user}@" if self.user else "") + self.host + (f":{self.port}" if self.port else "")


@dataclass(frozen=True, slots=True)
class SshSettings:
    """How to reach one host. Empty algorithm tuples mean paramiko's own."""

    alias: str  # as the hostfile or ProxyJump names it
    hostname: str
    port: int
    user: str
    known_as: tuple[str, ...]  # names to look up in known_hosts, best first
    known_hosts_files: tuple[str, ...]
    identity_files: tuple[str, ...]
    identities_only: bool
    agent_socket: str  # '' = no agent
    jumps: tuple[JumpSpec, ...]  # in the order in which they are passed
    connect_timeout_s: float
    alive_interval_s: float
    alive_count: int
    address_family: socket.AddressFamily
    bind_address: str
    ciphers: tuple[str, ...] = ()
    macs: tuple[str, ...] = ()
    kex: tuple[str, ...] = ()
    host_key_algorithms: tuple[str, ...] = ()
    min_rsa_bits: int = 0
    hash_known_hosts: bool = False  # names of hosts are written as hashes
    config_file: str = ""  # '' = ~/.ssh/config

    @property
    def command(self) -> str:
        """The ssh command with the same target, for messages."""
        return f"ssh {self.user}@{self.alias}"


def read_settings(
    host: str, target: str, user: str = "", port: int = 0, config_file: str | None = None
) -> SshSettings:
    """Settings of `target` for the host named `host` in messages. Raises HostFault (step "settings")."""
    options = (
        _ask_ssh(host, target, user, port, config_file)
        if shutil.which("ssh")
        else _ask_paramiko(host, target, user, port, config_file)
    )
    for seen, fix in refusals(options):
        raise HostFault(host, "settings", f"{seen} (for {target})", fix)
    return replace(settings_from_options(target, options, dict(os.environ)), config_file=config_file or "")


def parse_ssh_g(text: str) -> dict[str, list[str]]:
    """`ssh -G` prints one `keyword value` a line; keywords that stand several times keep all values."""
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.strip().partition(" ")
        if keyword:
            options.setdefault(keyword.lower(), []).append(value.strip())
    return options


def refusals(options: Options) -> list[tuple[str, str]]:
    """What the settings ask for and this launcher cannot do: (what was seen, the fix)."""
    found: list[tuple[str, str]] = []

    def value(keyword: str) -> str:
        return " ".join(options.get(keyword, ())).strip()

    def is_set(keyword: str) -> bool:
        return value(keyword).lower() not in ("", "none", "no")

    if is_set("proxycommand"):
        found.append(
            (f"ProxyCommand {value('proxycommand')!r} cannot be honoured", "use ProxyJump in ~/.ssh/config")
        )
    if is_set("certificatefile"):
        found.append(
            (
                f"CertificateFile {value('certificatefile')!r} cannot be honoured",
                "put the plain public key into the host's authorized_keys, or the certificate beside its key "
                "as KEY-cert.pub",
            )
        )
    for keyword, name, fix in (
        ("pkcs11provider", "PKCS11Provider", "load the key into ssh-agent (ssh-add -s PROVIDER)"),
        ("knownhostscommand", "KnownHostsCommand", "write the host's key into UserKnownHostsFile"),
        ("revokedhostkeys", "RevokedHostKeys", "mark revoked keys with @revoked in known_hosts instead"),
        ("bindinterface", "BindInterface", "use BindAddress"),
    ):
        if is_set(keyword):
            found.append((f"{name} {value(keyword)!r} cannot be honoured", fix))
    if value("permitlocalcommand").lower() in ("yes", "true") and is_set("localcommand"):
        found.append(("LocalCommand is not run", "remove PermitLocalCommand for this host"))
    if value("pubkeyauthentication").lower() in ("no", "false"):
        found.append(
            (
                "PubkeyAuthentication is off, and a password is never asked for",
                "turn it on for this host and run ssh-copy-id",
            )
        )
    preferred = value("preferredauthentications").lower()
    if preferred and preferred != "none" and "publickey" not in preferred.split(","):
        found.append(
            (
                f"PreferredAuthentications {preferred} leaves out publickey, the only way that asks nothing",
                "add publickey for this host and run ssh-copy-id",
            )
        )
    return found


def settings_from_options(target: str, options: Options, environment: Mapping[str, str]) -> SshSettings:
    """Settings from keywords; pure but for the names of this user and machine."""

    def first(keyword: str, default: str = "") -> str:
        values = options.get(keyword)
        return values[0] if values and values[0] else default

    def names(keyword: str) -> tuple[str, ...]:
        return tuple(name for name in first(keyword).split(",") if name)

    hostname = first("hostname", target)
    port = int(first("port", "22"))
    user = first("user") or getpass.getuser()
    key_alias = first("hostkeyalias")
    key_alias = "" if key_alias.lower() == "none" else key_alias
    tokens = _tokens(target, hostname, port, user, key_alias)
    known_hosts = [
        expand_path(path, tokens)
        for keyword in ("userknownhostsfile", "globalknownhostsfile")
        for path in first(keyword).split()
        if path.lower() not in ("none", "/dev/null")
    ]
    interval, count = _positive(first("serveraliveinterval")), _positive(first("serveralivecountmax"))
    timeout = first("connecttimeout")
    jumps = first("proxyjump")
    return SshSettings(
        alias=target,
        hostname=hostname,
        port=port,
        user=user,
        known_as=_known_as(hostname, port, key_alias),
        known_hosts_files=tuple(known_hosts),
        identity_files=tuple(
            expand_path(path, tokens)
            for path in options.get("identityfile", ())
            if path and path.lower() != "none"
        ),
        identities_only=first("identitiesonly").lower() in ("yes", "true"),
        agent_socket=_agent_socket(first("identityagent"), tokens, environment),
        jumps=parse_jumps(jumps) if jumps.lower() != "none" else (),
        connect_timeout_s=float(timeout) if _positive(timeout) else CONNECT_TIMEOUT_S,
        alive_interval_s=float(interval or ALIVE_INTERVAL_S),
        alive_count=count or ALIVE_COUNT,
        address_family={"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(
            first("addressfamily").lower(), socket.AF_UNSPEC
        ),
        bind_address=first("bindaddress"),
        ciphers=names("ciphers"),
        macs=names("macs"),
        kex=names("kexalgorithms"),
        host_key_algorithms=names("hostkeyalgorithms"),
        min_rsa_bits=_positive(first("requiredrsasize")),
        hash_known_hosts=first("hashknownhosts").lower() in ("yes", "true"),
    )


def parse_jumps(text: str) -> tuple[JumpSpec, ...]:
    """`[user@]host[:port]`, separated by commas; also `ssh://` URLs."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        user, _, rest = part.removeprefix("ssh://").rpartition("@")
        match = re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]+)(?::(\d+))?|(.+)", rest)
        assert match is not None
        host = match[1] or match[3] or match[5]
        found.append(JumpSpec(host, user, int(match[2] or match[4] or 0)))
    return tuple(found)


def expand_path(path: str, tokens: Mapping[str, str]) -> str:
    """`~`, `~user` and %-tokens of a path as ssh expands them: by the password database, not by $HOME."""
    path = re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), path.strip('"'))
    if not path.startswith("~"):
        return path
    name, slash, rest = path[1:].partition("/")
    try:
        home = pwd.getpwnam(name).pw_dir if name else tokens["d"]
    except KeyError:
        return path
    return home + slash + rest


def _tokens(target: str, hostname: str, port: int, user: str, key_alias: str) -> dict[str, str]:
    me = pwd.getpwuid(os.getuid())
    local = socket.gethostname()
    return {
        "%": "%",
        "d": me.pw_dir,
        "h": hostname,
        "i": str(os.getuid()),
        "k": key_alias or target,
        "L": local.partition(".")[0],
        "l": local,
        "n": target,
        "p": str(port),
        "r": user,
        "u": me.pw_name,
        "C": sha1(f"{local}{hostname}{port}{user}".encode(), usedforsecurity=False).hexdigest(),
    }


def _known_as(hostname: str, port: int, key_alias: str) -> tuple[str, ...]:
    """OpenSSH looks a host on another port up as [host]:port, and then without the port."""
    if key_alias:
        return (key_alias.lower(),)
    name = hostname.lower()
    return (name,) if port == 22 else (f"[{name}]:{port}", name)


def _agent_socket(value: str, tokens: Mapping[str, str], environment: Mapping[str, str]) -> str:
    if value.lower() == "none":
        return ""
    if value in ("", "SSH_AUTH_SOCK"):
        return environment.get("SSH_AUTH_SOCK", "")
    if value.startswith("$"):
        return environment.get(value[1:].strip("{}"), "")
    return expand_path(value, tokens)


def _positive(text: str) -> int:
    """The number, or 0 for none, 0 and text."""
    return int(text) if text.isdigit() else 0


def _ask_ssh(host: str, target: str, user: str, port: int, config_file: str | None) -> dict[str, list[str]]:
    command = ["ssh", "-G", *(["-F", config_file] if config_file else []), *(["-l", user] if user else [])]
    command += [*(["-p", str(port)] if port else []), "--", target]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SSH_G_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostFault(
            host, "settings", f"`{' '.join(command)}` took over {SSH_G_TIMEOUT_S:g} s", "run it to see why"
        ) from error
    if done.returncode != 0:
        said = " ".join(line for line in done.stderr.splitlines() if "Pseudo-terminal" not in line)
        raise HostFault(host, "settings", f"ssh cannot read its settings: {said}", "correct ~/.ssh/config")
    return parse_ssh_g(done.stdout)


def _ask_paramiko(
    host: str, target: str, user: str, port: int, config_file: str | None
) -> dict[str, list[str]]:
    """Without an ssh program. First value wins, the user's file before the machine's, as in OpenSSH."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    files = [Path(config_file)] if config_file else [home / ".ssh/config", Path("/etc/ssh/ssh_config")]
    text = ""
    for path in files:
        try:
            part = path.read_text("utf-8")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise HostFault(
                host, "settings", f"{path} cannot be read ({error.strerror})", "correct it"
            ) from error
        include = re.search(r"^[ \t]*include[ \t=]", part, re.IGNORECASE | re.MULTILINE)
        if include:
            raise HostFault(
                host,
                "settings",
                f"{path} has Include, which is only understood through the ssh program, and there is none",
                "install OpenSSH's client, or write the settings into that file",
            )
        text += part + "\nHost *\n"
    try:
        found = paramiko.SSHConfig.from_text(text).lookup(target)
    except paramiko.SSHException as error:
        raise HostFault(host, "settings", f"{error}", "correct ~/.ssh/config") from error
    options = {key: list(value) if isinstance(value, list) else [str(value)] for key, value in found.items()}
    options.setdefault("hostname", [target])
    if user:
        options["user"] = [user]
    if port:
        options["port"] = [str(port)]
    ssh = home / ".ssh"
    options.setdefault("identityfile", [str(ssh / f"id_{kind}") for kind in ("rsa", "ecdsa", "ed25519")])
    options.setdefault("userknownhostsfile", [f"{ssh}/known_hosts {ssh}/known_hosts2"])
    options.setdefault("globalknownhostsfile", ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"])
    return options
