"""A pretended agent: it speaks the launcher's protocol and does what behaviour.json says. Standard library
only, because it runs in an interpreter that has nothing else."""

import http.server
import json
import os
import pathlib
import signal
import sys
import threading
import time

FOLDER = pathlib.Path(__file__).parents[5]
BEHAVIOUR = json.loads((FOLDER / "behaviour.json").read_text())
print("a line before anything framed")
print("a line on stderr", file=sys.stderr)
CONFIG = json.loads(sys.stdin.buffer.readline())
HOST, LEADS = CONFIG["host"], CONFIG["mesh"] is not None


def note() -> None:
    draft = FOLDER / f".agent-{HOST}"
    told = {
        "host": HOST,
        "pid": os.getpid(),
        "argv": sys.argv,
        "cmdline": pathlib.Path(f"/proc/{os.getpid()}/cmdline").read_bytes().decode().split("\0")
        if pathlib.Path("/proc").is_dir()
        else [],
        "environ": dict(os.environ),
        "config": CONFIG,
    }
    draft.write_text(json.dumps(told))
    draft.replace(FOLDER / f"agent-{HOST}.json")


def say(kind: str, **fields: object) -> None:
    sys.stdout.write(f"{CONFIG['marker']} {json.dumps({'type': kind, **fields})}\n")
    sys.stdout.flush()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        nodes = {"ranks": [{"rank": 0, "host": HOST, "phase": "ready", "weights_bytes": 1000}]}
        answers = {
            "/v1/cluster/status": {
                "name": CONFIG["mesh_name"],
                "ready": True,
                "world_size": CONFIG["world_size"],
                "epoch": Handler.changed_to or 1,
                "sharding": "pipeline",
                "lineup": "serving with 1 of 2 hosts" if Handler.changed_to else "",
            },
            "/v1/cluster/nodes": nodes,
            "/v1/models": {"data": [{"id": "pretended"}]},
        }
        self.answer(200, "application/json", json.dumps(answers[self.path]).encode())

    changed_to = 0

    def do_POST(self) -> None:
        if self.path.startswith("/v1/cluster/nodes/"):
            host, action = self.path.split("/")[-2:]
            if host == "mac1":
                refusal = {"error": {"message": "1.0 GB are missing (mac1).", "code": "does_not_fit"}}
                self.answer(409, "application/json", json.dumps(refusal).encode())
                return
            Handler.changed_to = 2
            told = {"message": f"{action}: {host}", "changing": True, "epoch": 1}
            self.answer(202, "application/json", json.dumps(told).encode())
            return
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words = ["echo ", asked["messages"][-1]["content"]]
        events = [{"choices": [{"delta": {"content": word}}]} for word in words]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.answer(200, "text/event-stream", ": keepalive\n\n".join([*lines, "data: [DONE]\n\n"]).encode())

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


def write_run_file() -> None:
    """As the real one does; only a real one removes it."""
    folder = pathlib.Path(os.environ["XDG_STATE_HOME"]) / "mlx-mesh" / CONFIG["mesh_name"]
    record = {"agent": {"pid": os.getpid(), "start_time": "x"}, "engines": {}, "proxy": None}
    (folder / f"agent-{HOST}.json").write_text(json.dumps(record))


def wait_for_file(path: str) -> None:
    while not pathlib.Path(path).exists():
        time.sleep(0.02)


def lead() -> None:
    say("agentlistening", coordinator="127.0.0.1:4242", agent_pid=os.getpid())
    wanted = len(CONFIG["mesh"]["hosts"])
    deadline = time.monotonic() + 30
    while len(list(FOLDER.glob("agent-*.json"))) < wanted and "alone" not in BEHAVIOUR:
        if time.monotonic() > deadline:
            say("agentfailed", message="not everybody came", exit_code=5)
            sys.exit(5)
        time.sleep(0.02)
    for done in range(5):
        say("rankprogress", rank=0, host=HOST, phase="loading", done=done, total=4)
    say("logline", rank=0, host=HOST, line="\x1b[31mred\x1b[0m words")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", CONFIG["mesh"]["serve_port"]), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say("meshready", url=f"http://127.0.0.1:{server.server_address[1]}", epoch=1, seconds=1.5)


def main() -> None:
    mine = BEHAVIOUR.get(HOST, {})
    note()
    if mine.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("agentstarted", host=HOST, agent_pid=os.getpid())
    if mine.get("fail"):
        say("agentfailed", message=mine["fail"], exit_code=mine.get("exit_code", 1))
        sys.exit(mine.get("exit_code", 1))
    if mine.get("crash"):
        raise RuntimeError(mine["crash"])
    if LEADS and not mine.get("hang"):
        lead()
    if mine.get("run_file"):
        write_run_file()
    if mine.get("fail_on"):
        wait_for_file(mine["fail_on"])
        say("agentfailed", message="the coordinator is gone", exit_code=1)
        pathlib.Path(mine["then"]).touch()
        sys.exit(1)
    if mine.get("leave_on"):
        wait_for_file(mine["leave_on"])
        say("agentstopped", reason="the mesh ends", by_coordinator=True)
        sys.exit(0)
    if mine.get("die_on"):  # a file whose appearance ends this agent as a signal would
        wait_for_file(mine["die_on"])
        os.kill(os.getpid(), signal.SIGKILL)
    farewell = b""
    for line in sys.stdin.buffer:
        farewell = line
        if json.loads(line)["drain"] and not mine.get("ignore_eof"):  # there are no open requests
            break
    (FOLDER / f"farewell-{HOST}").write_bytes(farewell)
    if mine.get("ignore_eof"):
        while True:
            time.sleep(60)
    say("agentstopped", reason="")


main()
