"""Pictures and texts at once, while towers are slow, engines die and freeze, and clients leave: whoever stays
gets what it gets alone, and nothing is left over."""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.two_rank, pytest.mark.long, pytest.mark.timeout(1800)]

PLANS = {
    "world size 1": ("--sim", "1"),
    "pipeline 2": ("--sim", "2", "--sharding", "pipeline"),
    "tensor 2": ("--sim", "2", "--sharding", "tensor"),
}
WITHIN_S = 60.0
SLOW_S = 40
"""Longer than any step may take (step_floor_s)."""

ENDLESS = {"logit_bias": {"0": -100, "1": -100, "2": -100}}

_ids = itertools.count()


def bodies(vlm: ModuleType) -> dict[str, dict[str, Any]]:
    """Four with pictures and four of text, greedy and drawn, with and without a memory of what was said."""
    long = "look at it very well and say what you see " * 30  # a pipeline reads it in three chunks
    asked: dict[str, tuple[str, list[bytes]]] = {
        "one": ("what is this?", [vlm.picture(1)]),
        "two": ("differ how?", [vlm.picture(2), vlm.picture(3, 32, 32, "JPEG")]),
        "long": (long, [vlm.picture(4)]),
        "again": ("and this?", [vlm.picture(1), vlm.picture(1)]),
        "text": ("no picture at all", []),
        "long text": (long, []),
        "short text": ("a", []),
        "other text": ("which way to the sea?", []),
    }
    drawn = {"temperature": 0.8, "seed": 5, "presence_penalty": 0.4, "repetition_penalty": 1.1}
    return {
        name: body_of(text, pictures, **({"temperature": 0.0} if at % 2 else drawn))
        for at, (name, (text, pictures)) in enumerate(asked.items())
    }


def body_of(text: str, pictures: list[bytes], **fields: Any) -> dict[str, Any]:
    urls = [f"data:image/{_kind(file)};base64,{base64.b64encode(file).decode()}" for file in pictures]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 24, **fields}


def _kind(file: bytes) -> str:
    return "png" if file.startswith(b"\x89PNG") else "jpeg"


def ask(mesh: Any, body: dict[str, Any], request_id: str = "") -> Any:
    headers = {"x-request-id": request_id} if request_id else {}
    return httpx.post(f"{mesh.url}/v1/chat/completions", json=body, headers=headers, timeout=600)


def ask_again(mesh: Any, body: dict[str, Any]) -> Any:
    """Until the mesh is ready: one that comes when an engine has just ended is not taken."""
    give_up = time.monotonic() + WITHIN_S
    while (answer := ask(mesh, body)).status_code == 503 and time.monotonic() < give_up:
        time.sleep(0.5)  # its Retry-After is longer
    return answer


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def ask_all(mesh: Any, asked: dict[str, dict[str, Any]]) -> dict[str, str]:
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = pool.map(lambda body: text_of(ask_again(mesh, body)), asked.values())
        return dict(zip(asked, answers, strict=True))


def status(mesh: Any) -> Any:
    return httpx.get(f"{mesh.url}/v1/cluster/status", timeout=10).json()


def wait_for(what: str, is_so: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    give_up = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < give_up, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)  # the poll interval of a wait that has a deadline


def is_ready(mesh: Any, epoch: int) -> bool:
    told = httpx.get(f"{mesh.url}/ready", timeout=10)
    return told.status_code == 200 and told.json()["epoch"] == epoch


def log_has(mesh: Any, words: str, times: int = 1) -> Callable[[], bool]:
    return lambda: mesh.output.read_text().count(words) >= times


def step_of(mesh: Any) -> int:
    nodes = httpx.get(f"{mesh.url}/v1/cluster/nodes", timeout=10).json()
    return int(nodes["ranks"][0]["step"])


def engine_pid(mesh: Any, rank: int) -> int:
    nodes = httpx.get(f"{mesh.url}/v1/cluster/nodes", timeout=10).json()
    return int(nodes["ranks"][rank]["engine_pid"])


def check_nothing_is_left(mesh: Any) -> None:
    """No request, no row, and no memory of rows, on any rank."""

    def is_empty() -> bool:
        metrics = httpx.get(f"{mesh.url}/metrics", timeout=10).text.splitlines()
        kv = [line for line in metrics if line.startswith("mlx_mesh_rank_kv_bytes{")]
        now = status(mesh)
        return bool(kv) and not (
            sum(float(line.rpartition(" ")[2]) for line in kv)
            or now["num_open"]
            or now["num_running"]
            or now["num_waiting"]
        )

    wait_for("nothing is open and no KV memory is taken", is_empty)


def start(start_mesh: Any, plan: str, folder: Path, *faults: str) -> Any:
    words = [word for fault in faults for word in ("--fault", fault)]
    return start_mesh("up", *PLANS[plan], "--model", str(folder), *words)


class Listener:
    """A streamed answer, read in a thread: lines with the time when they came."""

    def __init__(self, mesh: Any, body: dict[str, Any]) -> None:
        self.lines: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._read, args=(mesh, {**body, "stream": True}))
        self._thread.start()

    def _read(self, mesh: Any, body: dict[str, Any]) -> None:
        url = f"{mesh.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=300) as response:
            self.lines += ((time.monotonic(), line) for line in response.iter_lines() if line)

    @property
    def num_events(self) -> int:
        return sum(line.startswith("data:") for _, line in self.lines)

    def text(self) -> str:
        self._thread.join(300)
        assert not self._thread.is_alive() and self.lines[-1][1] == "data: [DONE]"
        events = [json.loads(line[6:]) for _, line in self.lines[:-1] if line.startswith("data:")]
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.parametrize("plan", PLANS)
def test_a_long_pass_of_the_towers_is_no_hang_and_holds_up_nothing_but_tokens(
    plan: str, start_mesh: Any, vlm: ModuleType, tiny_vlm_folder: Path
) -> None:
    slow = (f"delay:0@tower+1={SLOW_S}s", "delay:0@tower+2=10s")
    with start(start_mesh, plan, tiny_vlm_folder, *slow) as mesh:
        asked = bodies(vlm)
        picture, text = asked["one"], {**asked["text"], **ENDLESS, "max_tokens": 1500}
        alone = text_of(ask(mesh, text)), text_of(ask(mesh, picture))  # the first pass is a quick one
        stream = Listener(mesh, text)
        wait_for("the stream has begun", lambda: stream.num_events > 3)
        with ThreadPoolExecutor(3) as pool:
            began = time.monotonic()
            slow_answer = pool.submit(ask, mesh, picture)
            wait_for("the towers are at it", log_has(mesh, "fault: delay at tower"))
            while not slow_answer.done() and time.monotonic() < began + SLOW_S:
                for path in ("/health", "/ready", "/metrics", "/v1/cluster/status", "/v1/models"):
                    assert httpx.get(mesh.url + path, timeout=5).status_code == 200, path
                time.sleep(1)  # ask now and then for as long as the towers run
            assert text_of(slow_answer.result(300)) == alone[1]
            took_s = time.monotonic() - began
            assert took_s > SLOW_S
            during = [line for at, line in stream.lines if began + 8 < at < began + SLOW_S - 2]
            assert during and set(during) == {": keepalive"}
            # One that is cancelled meanwhile gets no row; its end is told when the towers are through.
            gone = pool.submit(ask, mesh, {**asked["two"], **ENDLESS, "max_tokens": 500}, "gone")
            wait_for("the towers are at it again", log_has(mesh, "fault: delay at tower", 2))
            cancel = httpx.post(f"{mesh.url}/v1/requests/gone/cancel", timeout=10)
            assert cancel.status_code == 200
            assert gone.result(60).json()["error"]["code"] == "request_cancelled"
        assert stream.text() == alone[0]
        check_nothing_is_left(mesh)
        assert status(mesh)["epoch"] == 1
        assert mesh.stop() == 0


LEADERS = ("pictures", "pictures+2", "tower", "features", "prefill+2", "prefill+7", "decode", "decode+6")
FOLLOWERS = ("features", "features+2", "prefill+2", "prefill+7", "decode", "decode+6")


@pytest.mark.parametrize("kind", ["kill", "freeze"])
@pytest.mark.parametrize("plan", ["pipeline 2", "tensor 2", "world size 1"])
def test_an_engine_that_goes_at_any_moment_of_a_picture_changes_no_answer(
    plan: str, kind: str, start_mesh: Any, vlm: ModuleType, tiny_vlm_folder: Path
) -> None:
    """The same eight requests at once for each moment. They end in the next epoch, where nothing is ordered:
    so many engines in a row that end without a token would be the requests' fault."""
    moments = [(0, moment) for moment in LEADERS]
    if plan == "world size 1":
        moments.remove((0, "features"))  # they are sent to nobody
    else:
        moments += [(1, moment) for moment in FOLLOWERS]
    faults = [f"{kind}:{rank}@{moment}#{2 * at + 1}" for at, (rank, moment) in enumerate(moments)]
    with start(start_mesh, plan, tiny_vlm_folder, *faults) as mesh:
        asked = bodies(vlm)
        seen = []
        for at, moment in enumerate(moments):
            if at:
                os.kill(engine_pid(mesh, 0), signal.SIGKILL)
                wait_for("the next epoch", lambda at=at: is_ready(mesh, 2 * at + 1))  # type: ignore[misc]
            seen.append((moment, ask_all(mesh, asked)))
            assert is_ready(mesh, 2 * at + 2), f"{moment} struck once"
        alone = {name: text_of(ask(mesh, body)) for name, body in asked.items()}
        assert len(set(alone.values())) == len(alone)
        wrong = [(moment, name) for moment, texts in seen for name in asked if texts[name] != alone[name]]
        assert not wrong
        check_nothing_is_left(mesh)
        assert is_ready(mesh, 2 * len(moments))
        assert mesh.stop() == 0


@pytest.mark.parametrize("plan", ["pipeline 2", "tensor 2"])
def test_a_follower_that_goes_while_pictures_wait_or_the_towers_run_costs_no_request(
    plan: str, start_mesh: Any, vlm: ModuleType, tiny_vlm_folder: Path
) -> None:
    """The follower does nothing then; the leader takes four seconds for its first prompt."""
    slow = [f"delay:0@tower=6s#{epoch}" for epoch in (1, 2)]
    with start(start_mesh, plan, tiny_vlm_folder, *slow) as mesh:
        asked = bodies(vlm)
        seen = []
        for times, sign in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
            with ThreadPoolExecutor(1) as pool:
                answers = pool.submit(ask_all, mesh, asked)
                wait_for("the towers are at it", log_has(mesh, "fault: delay at tower", times))
                os.kill(engine_pid(mesh, 1), sign)
                seen.append(answers.result(600))
            wait_for("one more epoch", lambda times=times: status(mesh)["epoch"] == times + 1)  # type: ignore[misc]
        assert seen == [{name: text_of(ask(mesh, body)) for name, body in asked.items()}] * 2
        check_nothing_is_left(mesh)
        assert mesh.stop() == 0


@pytest.mark.parametrize("plan", PLANS)
def test_requests_that_come_late_and_leave_early_change_nobody_elses_answer(
    plan: str, start_mesh: Any, vlm: ModuleType, tiny_vlm_folder: Path
) -> None:
    with start(start_mesh, plan, tiny_vlm_folder) as mesh:
        asked = bodies(vlm)
        alone = {name: text_of(ask(mesh, body)) for name, body in asked.items()}
        for round_ in range(3):
            assert httpx.post(f"{mesh.url}/v1/cache/reset", timeout=10).status_code == 202
            with ThreadPoolExecutor(16) as pool:
                first = {name: pool.submit(ask, mesh, body) for name, body in asked.items()}
                leaving = []
                for name in ("long", "one", "two", "text"):
                    body = {**asked[name], **ENDLESS, "max_tokens": 1900}
                    request_id = f"gone-{round_}-{next(_ids)}"
                    leaving.append((request_id, pool.submit(ask, mesh, body, request_id)))
                late = {name: pool.submit(ask, mesh, asked[name]) for name in ("again", "other text")}
                for at, (request_id, _) in enumerate(leaving):
                    if at:  # the first at once, the others while something is computed
                        step = step_of(mesh)
                        wait_for("some steps more", lambda step=step: step_of(mesh) > step)  # type: ignore[misc]
                    path = f"{mesh.url}/v1/requests/{request_id}/cancel"
                    wait_for("the cancel is taken", lambda path=path: httpx.post(path, timeout=30).is_success)  # type: ignore[misc]
                assert {name: text_of(one.result(300)) for name, one in first.items()} == alone
                assert {name: text_of(one.result(300)) for name, one in late.items()} == {
                    name: alone[name] for name in late
                }
                ends = {one.result(300).json().get("error", {}).get("code") for _, one in leaving}
                assert ends == {"request_cancelled"}
            check_nothing_is_left(mesh)
        assert status(mesh)["epoch"] == 1
        assert mesh.stop() == 0
