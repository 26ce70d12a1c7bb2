"""Two ranks on this machine serve a real model: start, ask one question, show the cluster, serve on."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from serving import Answer, ServerError, mesh_url, stop, stream, wait_until_ready

READY_S = 300.0  # a large hub model may have to be read from disk
QUESTION = "What is the capital of France?"
MESH_NAME = "loopback"  # `name` in the hostfile


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--port", type=lambda port: ["--port", port], default=[], help="default: 18000")
    parser.add_argument("--once", action="store_true", help="stop after the answer")
    arguments = parser.parse_args()

    mesh = str(Path(sys.executable).with_name("mlx-mesh"))
    command = [mesh, "up", str(arguments.hostfile), "--model", arguments.model, *arguments.port]
    print(f"$ mlx-mesh up hostfiles/{arguments.hostfile.name} --model {arguments.model}", flush=True)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    is_told = False
    try:
        url = wait_until_ready("mlx-mesh up", process, lambda: mesh_url(MESH_NAME, process), READY_S)
        ask(url)
        print("\n$ mlx-mesh status", flush=True)
        subprocess.run([mesh, "status", MESH_NAME], check=True)
        if not arguments.once:
            print(f"\nServing on {url}/v1 until Ctrl-C.", flush=True)
            process.wait()
    except (ServerError, subprocess.CalledProcessError) as error:
        print(f"demo: {error}", file=sys.stderr, flush=True)
        stop(process)
        sys.exit(1)
    except KeyboardInterrupt:
        is_told = True  # the terminal tells `mlx-mesh up` too
    finally:
        status = stop(process, is_told)
    sys.exit(status)


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
