"""A real HTTP server over a scripted coordinator, and a tiny real tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import queue
import shutil
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.messages import (
    Cancel,
    ChangeNode,
    Chunk,
    Drain,
    Embed,
    Embedded,
    Failed,
    GenerateRequest,
    MeshStatus,
    NodeReply,
    ProxyConfig,
    ProxyReady,
    ProxyRequest,
    RankStatus,
    Readiness,
    ResetPrefixes,
    ScanNetwork,
    ScanReply,
    StatusQuery,
    StatusReply,
    Submit,
    SwitchModel,
    TokenChunk,
    UnloadModel,
)
from mlx_mesh.mesh.prefix_settings import PrefixCounters
from mlx_mesh.mesh.types import Backend, Phase, Sharding
from mlx_mesh.node.client import CoordinatorClient
from mlx_mesh.node.pipe import AsyncPipe
from mlx_mesh.proxy.app import build_app
from mlx_mesh.proxy.metrics import Metrics
from mlx_mesh.proxy.protocol import EnvelopeProtocol
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.tokenizer import ModelTokenizer

DEADLINE_S = 20.0

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('no such turn') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. Paris is the capital of France.",
    "one two three four five six seven eight nine ten hello world",
]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer small enough that CJK and emoji take several tokens each."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(str(model_folder))
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def families() -> Any:
    """The module of calls as each family writes them; it is no test, and no package to import from."""
    return load_families()


def load_families() -> Any:
    if "proxy_families" not in sys.modules:
        path = Path(__file__).parent / "families.py"
        spec = importlib.util.spec_from_file_location("proxy_families", path)
        assert spec and spec.loader
        module = sys.modules["proxy_families"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["proxy_families"]


@pytest.fixture(scope="session")
def thinker(model_with: Callable[..., ModelTokenizer], families: Any) -> ModelTokenizer:
    """A model like Qwen3: tools in JSON, and a template that opens the reasoning unless told otherwise."""
    return model_with(families.template_of(families.FAMILIES["json_tools"], families.THINKING))


@pytest.fixture(scope="session")
def model_with(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ModelTokenizer]]:
    """The tiny model with another template, more special tokens, or other settings; one for each variant."""
    loaded: dict[str, ModelTokenizer] = {}

    def load(template: str, special: Sequence[str] = (), **settings: Any) -> ModelTokenizer:
        key = repr((template, special, settings))
        if key not in loaded:
            folder = tmp_path_factory.mktemp("variant")
            shutil.copytree(model_folder, folder, dirs_exist_ok=True)
            (folder / "chat_template.jinja").write_text(template)
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
            backend.add_special_tokens([AddedToken(name, special=True) for name in special])
            backend.save(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps({**config, **settings}))
            loaded[key] = ModelTokenizer.load(str(folder))
        return loaded[key]

    yield load
    for one in loaded.values():
        one.close()


SEEING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def seer(model_with: Callable[..., ModelTokenizer]) -> ModelTokenizer:
    """A model like Qwen's with pictures: content lists, and three tokens for each picture."""
    return model_with(SEEING_TEMPLATE, ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"))


@pytest.fixture(scope="session")
def seeing_front(
    seer: ModelTokenizer, model_folder: Path, ids_of: Callable[[str], list[int]]
) -> Iterator[Front]:
    """One front end of such a model; a prompt with pictures turns out to have 700 tokens."""

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        ids = tuple(ids_of("fine"))
        yield TokenChunk(id="", prompt_tokens=700 if request.media else 0)
        yield TokenChunk(id="", token_ids=ids, finish_reason="stop")

    with _front_ends(seer, model_folder) as start:
        yield start(script, coordinator={"media": ("image",)})


OMNI_TEMPLATE = SEEING_TEMPLATE.replace(
    "{% else %}{{ part.text }}",
    "{% elif part.type == 'audio' %}<|audio_pad|>{% elif part.type == 'video' %}<|vision_start|><|video_pad|>"
    "<|vision_end|>{% else %}{{ part.text }}",
)


@pytest.fixture(scope="session")
def omni(model_with: Callable[..., ModelTokenizer]) -> ModelTokenizer:
    """A model that takes pictures, audio and video."""
    tokens = ("<|vision_start|>", "<|image_pad|>", "<|audio_pad|>", "<|video_pad|>", "<|vision_end|>")
    return model_with(OMNI_TEMPLATE, tokens)


@pytest.fixture(scope="session")
def omni_front(
    omni: ModelTokenizer, model_folder: Path, ids_of: Callable[[str], list[int]]
) -> Iterator[Front]:
    """One front end of such a model, that may ask a host for files."""

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", prompt_tokens=700 if request.media else 0)
        yield TokenChunk(id="", token_ids=tuple(ids_of("fine")), finish_reason="stop")

    with _front_ends(omni, model_folder) as start:
        kinds = {"media": ("image", "audio", "video")}
        yield start(script, coordinator=kinds, allowed_media_domains=("files.example",))


@pytest.fixture(scope="session")
def ids_of(tokenizer: ModelTokenizer) -> Callable[[str], list[int]]:
    """Tokens of a text, without any around it."""
    return lambda text: list(tokenizer._encode(text, add_special=True, limit=0))


Script = Callable[[GenerateRequest], AsyncIterator[TokenChunk | Failed]]


@dataclass
class ScriptedCoordinator:
    """The other end of the proxy's pipe. `script` says what each request gets; ids are filled in."""

    script: Script
    world_size: int = 2
    context_length: int = 512
    kv: KvBudget = field(default_factory=KvBudget)
    media: tuple[str, ...] = ()
    media_refusals: dict[str, str] = field(default_factory=dict)
    alone_reason: str = ""
    whole_reason: str = ""
    requests: list[GenerateRequest] = field(default_factory=list)
    cancelled: queue.Queue[str] = field(default_factory=queue.Queue)
    answers_status: bool = True
    changes: list[tuple[str, str]] = field(default_factory=list)
    embed: Callable[[Embed], Embedded | Failed] | None = None
    embeds: list[Embed] = field(default_factory=list)
    node_reply: NodeReply = field(default_factory=lambda: NodeReply(id="", message="done", epoch=1))
    scans: list[float] = field(default_factory=list)
    scan_reply: ScanReply = field(default_factory=lambda: ScanReply(id="", report=None))
    is_running: threading.Event = field(default_factory=threading.Event)
    loop: asyncio.AbstractEventLoop | None = None
    pipe: AsyncPipe[ProxyRequest] | None = None

    async def run(self, pipe: AsyncPipe[ProxyRequest]) -> None:
        self.loop, self.pipe = asyncio.get_running_loop(), pipe
        self.is_running.set()
        running: dict[str, asyncio.Task[None]] = {}
        while (message := await pipe.receive()) is not None:
            match message:
                case Submit(request=request):
                    self.requests.append(request)
                    running[request.id] = asyncio.create_task(self._play(request))
                case Embed():
                    self.embeds.append(message)
                    if self.embed is not None:
                        pipe.send(msgspec.structs.replace(self.embed(message), id=message.id))
                case Cancel(id=request_id):
                    if request_id in running:
                        running[request_id].cancel()
                    self.cancelled.put(request_id)
                case StatusQuery(id=query_id):
                    if self.answers_status:
                        pipe.send(StatusReply(id=query_id, status=self.status()))
                case SwitchModel():
                    self.changes.append(("switch", message.model))
                    pipe.send(msgspec.structs.replace(self.node_reply, id=message.id))
                case ChangeNode():
                    self.changes.append((message.action, message.host))
                    pipe.send(msgspec.structs.replace(self.node_reply, id=message.id))
                case UnloadModel():
                    self.changes.append(("unload", ""))
                    pipe.send(msgspec.structs.replace(self.node_reply, id=message.id))
                case ScanNetwork(id=query_id):
                    self.scans.append(message.timeout_s)
                    pipe.send(msgspec.structs.replace(self.scan_reply, id=query_id))
                case ResetPrefixes():
                    self.changes.append(("reset", ""))
                    pipe.send(msgspec.structs.replace(self.node_reply, id=message.id))
                case ProxyReady():
                    pass
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)

    async def _play(self, request: GenerateRequest) -> None:
        assert self.pipe is not None
        try:
            async for item in self.script(request):
                item = msgspec.structs.replace(item, id=request.id)
                self.pipe.send(item if isinstance(item, Failed) else Chunk(chunk=item))
        except Exception as error:  # a test's own mistake must not look like a hang
            self.pipe.send(Failed(id=request.id, code="script_error", message=repr(error)))

    def _send_readiness(self, ready: bool, reason: str, code: str = "") -> None:
        assert self.pipe is not None
        self.pipe.send(
            Readiness(
                ready=ready,
                reason=reason,
                world_size=self.world_size,
                context_length=self.context_length,
                epoch=1,
                kv=self.kv,
                media=self.media,
                media_refusals=self.media_refusals,
                alone_reason=self.alone_reason,
                whole_reason=self.whole_reason,
                code=code,
            )
        )

    def on_loop(self, call: Callable[[], None]) -> None:
        """From the test's thread: do it in the coordinator's loop and wait until it is done."""
        assert self.is_running.wait(DEADLINE_S) and self.loop is not None
        done = threading.Event()
        self.loop.call_soon_threadsafe(call)
        self.loop.call_soon_threadsafe(done.set)
        assert done.wait(DEADLINE_S)

    def send_readiness(self, ready: bool, reason: str, code: str = "") -> None:
        self.on_loop(lambda: self._send_readiness(ready, reason, code))

    def send_drain(self) -> None:
        assert self.pipe is not None
        pipe = self.pipe
        self.on_loop(lambda: pipe.send(Drain()))

    def status(self) -> MeshStatus:
        ranks = tuple(
            RankStatus(
                rank=rank,
                user_rank=rank,
                host=f"mac{rank}",
                address=f"10.0.0.{rank}",
                agent_pid=100 + rank,
                engine_pid=200 + rank,
                epoch=1,
                phase=Phase.READY,
                step=7,
                layers="0-14",
                weights_bytes=1000,
                memory_bytes=2000,
                peak_memory_bytes=3000,
                last_heartbeat_s=0.5,
                is_leader=rank == 0,
                prefix=PrefixCounters(
                    num_entries=2,
                    num_bytes=100 + rank,
                    limit_bytes=1000,
                    num_hits=0 if rank else 5,
                    num_tokens=0 if rank else 70,
                ),
            )
            for rank in range(self.world_size)
        )
        return MeshStatus(
            name="studio",
            model="tiny",
            world_size=self.world_size,
            sharding=Sharding.PIPELINE,
            backend=Backend.RING,
            epoch=1,
            epoch_cause="start",
            ready=True,
            reason="",
            placement=None,
            ranks=ranks,
            num_running=1,
            num_waiting=2,
            num_open=3,
            uptime_s=9.0,
            versions=None,
            context_length=self.context_length,
        )


@dataclass
class Front:
    """A running front end."""

    url: str
    coordinator: ScriptedCoordinator
    http: httpx.Client
    port: int

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        return self.post("/v1/chat/completions", body)

    def set_ready(self, ready: bool, reason: str = "", code: str = "") -> None:
        """Returns when the proxy knows."""
        self.coordinator.send_readiness(ready, reason, code)
        self._wait_until_told()

    def drain(self) -> None:
        self.coordinator.send_drain()
        self._wait_until_told()

    def _wait_until_told(self) -> None:
        """The answer to a status query comes through the pipe behind what was sent before."""
        headers = {"authorization": "Bearer key-1", "host": "localhost"}
        assert self.http.get("/v1/cluster/status", headers=headers).status_code == 200

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, parsed; comments as they are."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            blocks = "".join(response.iter_text()).split("\n\n")
        return [parse_event(block) for block in blocks if block]


def parse_event(block: str) -> Any:
    if block == "data: [DONE]":
        return "[DONE]"
    return json.loads(block.removeprefix("data: ")) if block.startswith("data: ") else block


StartFront = Callable[..., Front]


def _chunks_of(
    ids: Sequence[int], finish: str = "stop", per_chunk: int = 1, **first: Any
) -> list[TokenChunk]:
    """Chunks that carry these tokens; `first` are more fields of the first one."""
    chunks = [
        TokenChunk(id="", token_ids=tuple(ids[at : at + per_chunk]), **(first if at == 0 else {}))
        for at in range(0, len(ids), per_chunk)
    ]
    return [*chunks, TokenChunk(id="", finish_reason=finish)]  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def chunks_of() -> Callable[..., list[TokenChunk]]:
    return _chunks_of


@pytest.fixture(scope="session")
def saying() -> Callable[..., Script]:
    return _saying


def _saying(ids: Sequence[int], finish: str = "stop", per_chunk: int = 1, **first: Any) -> Script:
    """Every request gets these tokens, at most as many as it asked for."""

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        given = list(ids[: request.max_tokens])
        reason = "length" if len(given) < len(ids) or len(given) == request.max_tokens else finish
        for chunk in _chunks_of(given, reason, per_chunk, **first):
            yield chunk

    return script


@pytest.fixture
def start_front(tokenizer: ModelTokenizer, model_folder: Path) -> Iterator[StartFront]:
    """Starts front ends; all end with the test."""
    with _front_ends(tokenizer, model_folder) as start:
        yield start


@pytest.fixture(scope="session")
def plain_front(
    tokenizer: ModelTokenizer, model_folder: Path, ids_of: Callable[[str], list[int]]
) -> Iterator[Front]:
    """One front end for all tests that change nothing in it; every request gets "fine"."""
    with _front_ends(tokenizer, model_folder) as start:
        yield start(_saying(ids_of("fine")))


@contextlib.contextmanager
def _front_ends(tokenizer: ModelTokenizer, model_folder: Path) -> Iterator[StartFront]:
    """Each with a thread and a loop of its own."""
    stops: list[Callable[[], None]] = []

    def start(
        script: Script,
        *,
        ready: bool = True,
        coordinator: dict[str, Any] | None = None,
        model: ModelTokenizer | None = None,
        **config: Any,
    ) -> Front:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        settings = {
            "model": str(model_folder),
            "model_id": "mlx-community/tiny-model",
            "served_model_names": ("local",),
            "serve_host": "127.0.0.1",
            "serve_port": port,
            "listen_fd": -1,
            "api_keys": (),
            "chat_template": "",
            "version": "0.1.0",
            **config,
        }
        scripted = ScriptedCoordinator(script, **(coordinator or {}))
        thread = _FrontThread(ProxyConfig(**settings), model or tokenizer, scripted, listener)
        thread.start()
        stops.append(thread.stop)
        assert thread.serving.wait(DEADLINE_S)
        url = f"http://127.0.0.1:{port}"
        http = httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False, verify=False)
        stops.append(http.close)
        front = Front(url, scripted, http, port)
        front.set_ready(ready, "" if ready else "rank 1 on mac1 is loading")
        return front

    try:
        yield start
    finally:
        for stop in reversed(stops):
            stop()


class _FrontThread(threading.Thread):
    def __init__(
        self,
        config: ProxyConfig,
        tokenizer: ModelTokenizer,
        coordinator: ScriptedCoordinator,
        listener: socket.socket,
    ) -> None:
        super().__init__(name="front", daemon=True)
        self._config, self._tokenizer = config, tokenizer
        self._coordinator, self._listener = coordinator, listener
        self._server: uvicorn.Server | None = None
        self.serving = threading.Event()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        ours, theirs = socket.socketpair()
        client = await CoordinatorClient.open(theirs)
        pipe: AsyncPipe[ProxyRequest] = await AsyncPipe.open(ours, msgspec.msgpack.Decoder(ProxyRequest))
        tasks = [asyncio.create_task(client.run()), asyncio.create_task(self._coordinator.run(pipe))]
        services = Services(
            config=self._config, client=client, tokenizer=self._tokenizer, metrics=Metrics(client)
        )
        settings = uvicorn.Config(
            build_app(services),
            http=EnvelopeProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = server = uvicorn.Server(settings)
        self.serving.set()  # the socket listens already
        await server._serve(sockets=[self._listener])
        await client.close()
        await pipe.close()
        await asyncio.gather(*tasks)

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self.join(DEADLINE_S)
        assert not self.is_alive(), "the front end did not stop"
