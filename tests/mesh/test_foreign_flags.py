"""Command lines that users bring along from other servers."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from mlx_mesh.launcher.cli import main
from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.foreign_flags import FOREIGN, refuse_foreign

KAMIWAZA = [
    "-m",
    "--model",
    "--host",
    "--port",
    "-V",
    "--vision",
    "--strip-thinking",
    "--enable-auto-think-detection",
    "--tool-call-parser",
    "--tool-call-parser-config",
    "--trace-requests-path",
    "--trace-requests-include-prompt",
    "--retain-mx-cache",
    "--lazy-load",
    "--enable-prefix-caching",
    "--prompt-cache-dir",
    "--system-cache-max-tokens",
    "--prefix-cache-headroom",
    "--disable-kv-cache",
    "--kv-cache-max-tokens",
    "--kv-cache-keep",
    "--kv-cache-idle-release-seconds",
    "--kv-cache-hard-reserve",
    "--kv-cache-warmup",
    "--kv-cache-warmup-tokens",
    "--distributed",
    "--distributed-rank",
    "--distributed-world-size",
    "--distributed-host",
    "--distributed-port",
    "--distributed-timeout",
    "--distributed-env-file",
    "--distributed-server-rank",
    "--dflash-draft-model",
    "--dflash-backend",
    "--dflash-block-size",
]
VALUES = {"--port": "0", "--enable-prefix-caching": "false", "--system-cache-max-tokens": "64"}
SWITCHES = ("--strip-thinking", "--disable-kv-cache", "--vision")


@pytest.mark.parametrize("flag", KAMIWAZA)
def test_each_flag_of_a_known_server_is_taken_or_answered_with_a_sentence(flag: str) -> None:
    """Taken: what is missing is then the model itself, and nothing is started."""
    given = [flag] if flag in SWITCHES else [flag, VALUES.get(flag, "x/y")]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(["serve", *given])
    text = said.getvalue()
    assert status != 0 and "usage:" not in text
    if flag in ("-m", "--model"):
        assert "x/y" in text
    else:
        assert f"{flag} is a flag of another server" in text or "No model is named" in text or "key" in text


def test_the_value_of_a_flag_is_named_apart_from_it_and_words_behind_two_dashes_are_not_read() -> None:
    with pytest.raises(SettingsError, match=r"^--kv-cache-keep is a flag of another server"):
        refuse_foreign(["--kv-cache-keep=4"])
    refuse_foreign(["--", "--kv-cache-keep"])
    refuse_foreign(["--distributed"], known=["--distributed"])


def test_no_flag_of_ours_is_called_one_of_another_server() -> None:
    """In a command that has it; `known` of others differs."""
    for command in ("serve", "up", "plan"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([command, "--help"])
        ours = set(re.findall(r"--[a-z][a-z-]+", said.getvalue()))
        assert ours and not ours & FOREIGN.keys()


def test_every_sentence_is_one() -> None:
    assert all(text.endswith(".") and text[0] in "`ABCDEFGHIJKLMNOPQRSTUVWXYZ" for text in FOREIGN.values())
