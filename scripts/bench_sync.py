"""Deliver a made-up model from the first host of a hostfile, which is this machine, to the second one over
TLS, in turns with plain TCP streams of the same size over the same link; print all rates and the ratio of the
best. Both hosts must share a disk, as those of a lab do: what was delivered is removed in between.

Beside the network, a delivery reads, hashes twice, encrypts and writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

from mlx_mesh.launcher.config import Flags, build_config, read_hostfile
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.delivery import Delivery
from mlx_mesh.launcher.preflight import ReadyHost, check_hosts, close_all
from mlx_mesh.launcher.remote import run_program, stream_program

FOLDER = "~/.cache/mlx-mesh/bench-sync/model"
WANTED = 0.8
MEGABYTE = 10**6
LIMIT_S = 300.0
CHUNK = 1024 * 1024  # of echo_link


def make_model(folder: Path, num_bytes: int) -> None:
    """Random bytes in the form of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "none"}))
    (folder / "tokenizer_config.json").write_text("{}")
    header = json.dumps(
        {"weight": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        left = num_bytes
        while left:
            part = min(left, 16 * MEGABYTE)
            file.write(os.urandom(part))
            left -= part


def stream_rate(sender: ReadyHost, receiver: ReadyHost, num_bytes: int) -> float:
    """Bytes a second of one plain TCP stream from the sender."""
    size = {"address": receiver.address, "num_trips": 1, "num_chunks": max(1, num_bytes // CHUNK)}
    answers = stream_program(receiver.remote, receiver.python, "echo_link", {"do": "serve", **size})
    try:
        port = next((int(item["port"]) for item in answers if item), 0)
        request = {"do": "measure", "port": port, **size}
        told = run_program(sender.remote, sender.python, "echo_link", request, LIMIT_S)
    finally:
        answers.close()  # type: ignore[attr-defined]
    return float(told["bandwidth"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hostfile")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ssh-config")
    arguments = parser.parse_args()
    flags = Flags(model=FOLDER, host="127.0.0.1", ssh_config=arguments.ssh_config)
    config = build_config(read_hostfile(arguments.hostfile), flags, {})
    config = replace(config, hosts=config.hosts[:2])
    own = Path(FOLDER).expanduser()
    make_model(own, arguments.megabytes * MEGABYTE)
    console = Console(sys.stderr)
    hosts = check_hosts(config, may_lack_model=True).hosts
    try:
        sender, receiver = hosts
        plain, delivered = [], []
        for _ in range(arguments.rounds):
            delivery = Delivery(config, hosts, console)
            delivery.look()
            delivery.find()
            plain.append(stream_rate(sender, receiver, arguments.megabytes * MEGABYTE))
            _, brought = delivery.bring(())
            shutil.rmtree(Path(brought.folder).parent)  # two hosts of a lab: they share a disk
            delivered.append(brought.received / brought.seconds)
    finally:
        close_all(hosts)
        shutil.rmtree(own.parent, ignore_errors=True)
    for name, rates in (("plain TCP", plain), ("delivered", delivered)):
        print(
            f"{name}   {', '.join(f'{rate / 1e6:.1f}' for rate in rates)} MB/s; best {max(rates) / 1e6:.1f}"
        )
    ratio = max(delivered) / max(plain)
    print(f"received / needed   {brought.received / brought.needed:.4f}")
    print(f"ratio of the best   {ratio:.3f} (wanted {WANTED})")
    return 0 if ratio >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
