"""What Linux says of a port in its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_mesh.node import interfaces


@pytest.mark.parametrize(
    ("files", "is_active"),
    [
        ({"carrier": "1", "operstate": "up"}, True),
        ({"carrier": "1", "operstate": "unknown"}, True),  # drivers that do not care
        ({"carrier": "0", "operstate": "down"}, False),
        ({"operstate": "down"}, False),  # switched off: its carrier cannot be read, its addresses stay
        ({}, True),  # a system without these files
    ],
)
def test_a_port_that_is_switched_off_carries_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], is_active: bool
) -> None:
    monkeypatch.setattr(interfaces, "_NET", tmp_path)
    (tmp_path / "eth9").mkdir()
    for name, text in files.items():
        (tmp_path / "eth9" / name).write_text(f"{text}\n")
    assert interfaces._linux_entry("eth9", ("10.0.0.1/24",)).is_active is is_active
