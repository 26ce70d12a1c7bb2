"""Two ranks on this machine serve a real model: start, ask one question, show the cluster, serve on."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from serving import Answer, Server, ServerError, stream

READY_S = 300.0  # a large hub model may have to be read from disk
QUESTION = "What is the capital of France?"
MESH_NAME = "loopback"  # `name` in the hostfile


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--once", action="store_true", help="stop after the answer")
    arguments = parser.parse_args()

    mesh = str(Path(sys.executable).with_name("mlx-mesh"))
    command = [mesh, "up", str(arguments.hostfile), "--model", arguments.model, "--port", str(arguments.port)]
    print(f"$ mlx-mesh up {arguments.hostfile.name} --model {arguments.model}", flush=True)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    server = Server("mlx-mesh up", f"http://127.0.0.1:{arguments.port}", "/ready", process)
    try:
        server.wait_until_ready(READY_S)
        ask(server.url)
        print("\n$ mlx-mesh status", flush=True)
        subprocess.run([mesh, "status", MESH_NAME], check=True)
        if not arguments.once:
            print(f"\nServing on {server.url}/v1 until Ctrl-C.", flush=True)
            process.wait()
    except ServerError as error:
        print(f"demo: {error}", file=sys.stderr)
        server.stop()
        sys.exit(1)
    except KeyboardInterrupt:  # the terminal tells `mlx-mesh up` too
        sys.exit(server.stop(is_told=True))
    if status := server.stop():
        sys.exit(f"demo: mlx-mesh up ended with status {status}")


def ask(url: str) -> None:
    """Stream the answer to the question; raises ServerError."""
    print(f"\n> {QUESTION}", flush=True)
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0}
    answer = Answer()
    for piece in stream(url + "/v1/chat/completions", body, answer):
        print(piece, end="", flush=True)
    if not answer.text:
        raise ServerError("the model answered nothing")
    ranks = answer.headers.get("x-mlx-mesh-world-size", "?")
    tokens = answer.usage.get("completion_tokens", 0)
    print(f"\n[{tokens} tokens in {answer.last_s:.1f} s from {ranks} ranks]", flush=True)


if __name__ == "__main__":
    main()
