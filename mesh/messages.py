"""Everything that crosses a process boundary, as frozen tagged structs in MessagePack.

Six conversations, one union of types per direction:

    launcher -> agent        AgentConfig, one JSON line on stdin; end of file ends an attached agent
    agent    -> launcher     LauncherEvent, one framed JSON line each on stdout
    agent   <-> coordinator  AgentMessage / CoordinatorMessage (ZeroMQ, CURVE)
    agent   <-> engine       EngineCommand / EngineReport (a socket pair, length-prefixed)
    agent   <-> embedder     EmbedderCommand / EmbedderReport (a socket pair, length-prefixed)
    engine   -> engine       StepPlan from the leader, PlanHello to it (ZeroMQ, CURVE)
    coordinator <-> proxy    ProxyRequest / ProxyEvent (a socket pair, length-prefixed)

Struct tags are the class names in lower case. Every union has one `Decoder`; decoding anything else
raises `msgspec.ValidationError`, which the edges turn into a counted, logged rejection.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mlx_mesh.mesh.discovery import ScanReport
from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.kv_options import KvOptions
from mlx_mesh.mesh.links import Link
from mlx_mesh.mesh.log_lines import LogFormat
from mlx_mesh.mesh.prefix_settings import PrefixCounters, PrefixSettings
from mlx_mesh.mesh.types import Backend, HostFacts, Phase, Placement, Sharding, Versions, VisionMode

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest message on any channel: a prompt of a million tokens takes about 5 MB."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower):
    """Base of all messages; gives the tag."""


# ---------------------------------------------------------------- settings


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Named limits in seconds. Each is shown in the error that it causes."""

    join_s: float = 60.0  # from coordinator start until every expected agent has joined
    spawn_s: float = 60.0  # engine process started -> imported
    connect_s: float = 30.0  # every engine told to connect -> checked collective passed
    load_stall_s: float = 120.0  # loading without a progress report
    warmup_s: float = 120.0  # cut check and one-token warm-up
    stop_s: float = 5.0  # TERM -> KILL
    drain_s: float = 30.0  # SIGTERM: open requests may finish within
    heartbeat_interval_s: float = 1.0
    engine_silence_s: float = 3.0  # an engine without a heartbeat is frozen
    proxy_silence_s: float = 15.0  # a proxy without a heartbeat is frozen; it may read a large body meanwhile
    heartbeat_timeout_s: float = 15.0  # an agent without a heartbeat is lost
    rejoin_timeout_s: float = 60.0
    step_floor_s: float = 30.0  # a step is never called stuck before this
    first_step_s: float = 120.0  # the first step after loading: kernels compile, pages are read
    media_s: float = 300.0  # all pictures of one prompt: the model's processor and its towers
    request_s: float = 3600.0


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the mesh as the coordinator expects it, in rank order."""

    name: str
    slots: int = 1
    address: str = ""  # IPv4 by which the others reach it; '' = the agent's control address
    is_pinned: bool = False  # `address` is the user's word: the data goes over it, whatever else there is
    layers: tuple[int, ...] = ()  # pinned number of layers of each slot; () = planned
    memory_limit_bytes: int = 0  # 0 = what the host reports
    rdma: tuple[str | None, ...] = ()
    interfaces: tuple[str, ...] = ()  # that may carry data, see mesh.interfaces; () = all
    memory_rate: int = 0  # bytes and operations a second, for placement; 0 = unknown
    matrix_rate: int = 0
    replica: int = 0  # which one its ranks belong to
    num_shares: int = 1  # members of the mesh on this machine, which share its memory
    reserved_bytes: int = 0  # of that memory, what the leader's member on this machine has besides


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator needs to run one mesh. Built once by the launcher or the manual bootstrap."""

    name: str
    hosts: tuple[HostPlan, ...]
    sharding: Sharding = Sharding.AUTO
    backend: Backend = Backend.AUTO
    serve_host: str = "127.0.0.1"
    serve_port: int = 18000  # 0 = a free one
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # web pages that may ask, like "https://chat.example"
    allowed_media_domains: tuple[str, ...] = ()  # hosts that files may be fetched from; () = none
    served_model_names: tuple[str, ...] = ()
    chat_template: str = ""  # overrides the model's
    strip_thinking: bool = False  # leave reasoning out of answers unless a request asks for it
    embedding_model: str = ""  # folder or hub id on the leader; '' = no embeddings
    allowed_models: tuple[str, ...] = ()  # that may be loaded in place of the first one
    vision: VisionMode = VisionMode.AUTO
    log_format: LogFormat = "text"
    context_length: int = 0  # 0 = the model's
    max_sequences: int = 32  # decoded together
    max_queue: int = 256
    prefill_step_size: int = 0  # 0 = chosen by sharding
    kv_options: KvOptions = KvOptions()
    plan_context: int = 4096  # tokens and sequences that the memory plan reserves KV for
    plan_sequences: int = 4
    link: Link | None = None  # the slowest between hosts, for placement; None = unknown
    server_rank: int = 0  # user rank of the leader (manual bootstrap); shown in status
    max_restarts: int = 3
    elastic: bool = False  # take a host in again by itself that came back after the mesh went on without it
    paranoid: bool = False  # compare all ranks after each step, before its tokens are passed on
    prefix: PrefixSettings = PrefixSettings()
    planned: tuple[Placement, ...] = ()  # by replica: hosts may have no more of the model than these need
    allow_wifi: bool = False  # data may go over Wi-Fi where hosts have nothing better in common
    num_replicas: int = 1
    replica: int = 0  # of these, the one that a coordinator runs
    first_rank: int = 0  # outside of it its ranks are counted from here on
    deadlines: Deadlines = Deadlines()


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's settings. `mesh` is set for the coordinator's agent and None for the others."""

    mesh_name: str
    run_id: str
    host: str  # this host's name in the mesh
    model: str  # folder or hub id on this host
    secret: str  # hex, at least 32 bytes; never logged
    coordinator: str  # "ip:port" to join; for the coordinator what to bind, port 0 = a free one,
    #                   '' = in-process only (a mesh of one host)
    slots: int = 1
    ranks: tuple[int, ...] = ()  # mesh ranks this agent insists on (manual bootstrap)
    world_size: int = 0  # expected; 0 = whatever the coordinator says
    address: str = ""  # IPv4 for the data links
    marker: str = ""  # prefix of framed stdout lines; '' = log for people instead
    attached: bool = True  # end of file on stdin ends this agent
    deadlines: Deadlines = Deadlines()
    mesh: MeshConfig | None = None
    offline: bool = False  # ask no hub; all files must be on this host
    adapter: str = ""  # folder of a LoRA or DoRA adapter on this host; '' = none
    announce: bool = False  # tell the network that this host takes part in the mesh
    faults: tuple[str, ...] = ()  # of `up --sim N --fault ...`, see mesh.faults; () = the plain engine
    log_format: LogFormat = "text"  # of its own output where no launcher reads it


# ---------------------------------------------------------------- generation


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, with OpenAI's and mlx-lm's names. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    xtc_probability: float = 0.0  # how often the most probable tokens are left out, see sampler.exclude_top
    xtc_threshold: float = 0.0
    xtc_kept: tuple[int, ...] = ()  # never left out: ends of text, new lines
    seed: int = 0  # always set: the proxy draws one when the client gives none


class Video(msgspec.Struct, frozen=True, kw_only=True):
    """A video as the front end read it: its frames, already chosen, as PNG or JPEG files of one size."""

    frames: tuple[bytes, ...]
    fps: float  # of these frames, not of the original
    times: tuple[float, ...]  # of each frame in the original, in seconds


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt has beside text. Only the leader's engine can turn it into tokens: `text` is the prompt
    with the chat template applied and the model's own mark where each item stands, each kind in the order of
    its tuple. `images` are files as they came (PNG, JPEG, WebP, BMP, GIF's first frame), `audios` WAV files,
    mono, 16 bit, at the sampling rate of the model's processor. Pixel bounds of 0 are the processor's own;
    they are of images and of frames of videos. Errors name items: "images[0]", "audios[1]", "videos[2]"."""

    text: str
    images: tuple[bytes, ...] = ()
    min_pixels: int = 0
    max_pixels: int = 0
    audios: tuple[bytes, ...] = ()
    videos: tuple[Video, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        frames = (frame for video in self.videos for frame in video.frames)
        return sum(map(len, (*self.images, *self.audios, *frames)))


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `sent_ids` are tokens already given to the client in an earlier epoch:
    the engine prefills prompt_ids + sent_ids and goes on; max_tokens counts sent_ids too."""

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()  # end-of-text ids; the matched id ends it with "stop"
    logprobs: int | None = None  # None = none; k = the chosen token and the k best
    sent_ids: tuple[int, ...] = ()
    max_time_s: float = 0.0  # the request's own deadline, from its submission; 0 = request_s only
    grammar: str = ""  # what the generated tokens must match, in llguidance's Lark dialect or its JSON
    cache_salt: str = ""  # only requests with the same one share prefixes
    skip_prefix_cache: bool = False  # begin with no kept prefix, and keep none
    reset_prefix: bool = False  # begin with no kept prefix, and keep this one
    cache_points: tuple[int, ...] = ()  # lengths of prefixes of the prompt that others are likely to share
    system_tokens: int = 0  # of these, the one that ends behind the system message; 0 = there is none
    media: Media | None = None  # then prompt_ids are of the text alone, and the engine makes the real ones
    conversation: str = ""  # those of one go to the same replica, where there are several
    prefix_keys: tuple[int, ...] = ()  # set by the engine: what tokens of such a prompt are known by


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural-log probabilities of one position, before temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


FinishReason = Literal["stop", "length", "cancelled"]


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request, without the end-of-text token. The last chunk has a finish_reason. One
    without tokens may come first: the request has its place now."""

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # set in the first chunk: prompt tokens that did not have to be computed
    prefill_s: float = 0.0  # set in the first chunk: admission until the first token
    prompt_tokens: int = 0  # set in the first chunk of a request with media: its prompt's real length


# ---------------------------------------------------------------- leader engine -> follower engines


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank needs of a request to keep the same schedule. Followers never sample."""

    id: str
    prompt_ids: tuple[int, ...]  # prompt and sent ids
    max_tokens: int  # still to generate
    stop_token_ids: tuple[int, ...]
    entry: int = 0  # under which its cache is kept when it ends; 0 = it is not
    reuse: int = 0  # the entry, or the row with that entry, whose cache it begins with; 0 = none
    num_reused: int = 0  # tokens of it; fewer than the prompt has
    checkpoints: tuple[tuple[int, int], ...] = ()  # (tokens, entry): keep the cache as it is there, too
    features: bytes = (
        b""  # of a prompt with pictures: the language model's inputs; travels in a frame of its own
    )


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the cache of these tokens, with which `entry` begins, in a file, too."""

    entry: int
    tokens: tuple[int, ...]


class StepPlan(Message, frozen=True):
    """What all ranks do at step `step` of `epoch`: cancel, admit, save, evict, then one generator step.
    `stop`: drain and leave the loop instead."""

    epoch: int
    step: int
    cancel: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()  # of `cancel`: rows that make room; their caches are not kept
    admit: tuple[Admission, ...] = ()
    save: tuple[Save, ...] = ()
    evict: tuple[int, ...] = ()  # entries of the prefix cache
    stop: bool = False


class PlanHello(Message, frozen=True):
    """A follower engine's first message on the plan channel."""

    epoch: int
    rank: int


# ---------------------------------------------------------------- agent -> engine


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's settings, the first frame on its socket pair (after that: EngineCommand)."""

    epoch: int
    rank: int
    world_size: int
    host: str
    secret: str  # for the plan channel; never logged
    plan_address: str  # IPv4 on which the leader engine binds its plan channel
    heartbeat_interval_s: float = 1.0


class Connect(Message, frozen=True):
    """Form the data group. `addresses[r]` is rank r's "ip:port" list (ring); world size 1 has none.
    The leader also binds its plan channel and reports the endpoint; followers get it in JoinPlans.
    From here to CONNECTED no heartbeat comes: MLX waits for its peers with the GIL held, so only the connect
    deadline watches this phase (and only a KILL ends it)."""

    epoch: int
    rank: int
    world_size: int
    backend: Backend
    addresses: tuple[tuple[str, ...], ...]
    coordinator: str = ""  # jaccl and nccl: rank 0's "ip:port"
    rdma: tuple[tuple[str | None, ...], ...] = ()
    deadline_s: float = 30.0


class JoinPlans(Message, frozen=True):
    """Where the leader engine's plan channel is: "tcp://ip:port"."""

    endpoint: str


class Load(Message, frozen=True):
    """Read this rank's share, then report LOADED. Each host's agent fills in `model` and `adapter`."""

    model: str
    placement: Placement
    max_sequences: int
    prefill_step_size: int
    context_length: int
    adapter: str = ""  # folder of a LoRA or DoRA adapter; '' = none
    is_switched: bool = False  # another model than the first: `model` names it alike on all hosts
    model_digest: str = ""  # of such a folder on the leader, see facts.digest_model; '' = not compared
    is_paranoid: bool = False  # report a StepDigest after every step
    kv: KvBudget = KvBudget()  # of all ranks; the leader admits by it
    prefix: PrefixSettings = PrefixSettings()
    kv_options: KvOptions = KvOptions()
    with_vision: bool = False  # mlx-vlm's model, with its towers on rank 0


class WarmUp(Message, frozen=True):
    """Check every cut with three shapes, run one token through all ranks, then report READY. `prefixes`: the
    keys of files that all ranks have read, most recently used first; they are entries 1, 2, ... from the last
    one on."""

    prefixes: tuple[str, ...] = ()


class Submit(Message, frozen=True):
    """Leader only."""

    request: GenerateRequest


class Cancel(Message, frozen=True):
    """Leader only: end this request at the next step."""

    id: str


class ResetPrefixes(Message, frozen=True):
    """Drop all kept prefixes, on all ranks at one step. From the proxy with an `id`, which comes back in
    NodeReply; to the leader's engine without one."""

    id: str = ""


class StopEngine(Message, frozen=True):
    """Leader only: send the stop plan and leave. Followers leave by that plan."""


EngineCommand = Connect | JoinPlans | Load | WarmUp | Submit | Cancel | ResetPrefixes | StopEngine

# ---------------------------------------------------------------- engine -> agent


class EngineHello(Message, frozen=True):
    """First report: imports are done. `backends`: what this MLX build offers."""

    pid: int
    versions: Versions
    backends: tuple[str, ...] = ()
    device: str = ""


class NeighbourLink(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank measured by TCP towards the next rank, on the addresses and ports of the data link."""

    peer: int
    rtt_ns: int  # median of small messages there and back
    bandwidth: int  # bytes a second of a short stream


class PhaseReached(Message, frozen=True):
    """The rank finished a phase: CONNECTED, LOADED or READY. The leader's CONNECTED has plan_endpoint; that
    of a rank of a ring has what it measured towards the next one."""

    phase: Phase
    seconds: float = 0.0
    plan_endpoint: str = ""
    link: NeighbourLink | None = None
    weights_bytes: int = 0
    detail: str = ""
    plan_digest: str = ""  # with LOADED: Placement.digest() of what was loaded
    prefixes: tuple[str, ...] = ()  # with LOADED: keys of kept prefixes that were read from files


class Progress(Message, frozen=True):
    """Loading went on: `done` of `total` layers."""

    phase: Phase
    done: int
    total: int


class Heartbeat(Message, frozen=True):
    """Each second from a thread of its own. `step` counts generator steps, `layer` moves inside one."""

    phase: Phase
    step: int
    layer: int = 0
    busy: bool = False  # a step is being computed
    busy_s: float = 0.0  # since when
    num_sequences: int = 0
    num_waiting: int = 0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    cache_bytes: int = 0
    expected_s: float = -1.0  # predicted seconds of the current step; below 0 = nothing measured yet
    reads_media: bool = False  # busy with a prompt's pictures, not with a step; the leader only
    steps_s: float = 0.0  # seconds in steps since the start
    kv_tokens: int = 0  # tokens in the caches of all rows
    kv_longest: int = 0  # of the longest row, to which the others are padded
    num_preempted: int = 0  # leader: rows that had to make room so far
    digests: tuple[tuple[int, str], ...] = ()  # the newest checkpoints, see divergence.DigestBook
    prefix: PrefixCounters = PrefixCounters()


class StepDigest(Message, frozen=True):
    """Under --paranoid, from every rank after every step: its history up to and with that step."""

    step: int
    digest: str


class Tokens(Message, frozen=True):
    """Leader only: what one step produced; `admitted` are requests that the steps to come take part in,
    said before any rank computes them, and `cached` how many tokens of each prompt need not be computed."""

    step: int
    chunks: tuple[TokenChunk, ...]
    admitted: tuple[str, ...] = ()
    cached: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()  # of `admitted`, how long prompts with media are; () = none has any


class RequestFailed(Message, frozen=True):
    """Leader only: this request cannot go on; the others do. `param`: of several images the one at fault,
    like "images[2]", in the order of `Media.images`; '' = not known."""

    id: str
    code: str
    message: str
    param: str = ""


class EngineFailed(Message, frozen=True):
    """Last report of an engine that ends by itself. `kind` decides whether another try makes sense."""

    phase: Phase
    kind: Literal["config", "memory", "peer_lost", "stray_peer", "bind", "version", "internal"]
    message: str
    lost_ranks: tuple[int, ...] = ()
    """Of peer_lost: whose engines it lost, as far as it can tell."""


EngineReport = (
    EngineHello | PhaseReached | Progress | Heartbeat | StepDigest | Tokens | RequestFailed | EngineFailed
)

# ---------------------------------------------------------------- agent <-> embedder


class EmbedderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The embedder's settings, the first frame on its socket pair (after that: EmbedderCommand)."""

    model: str  # folder


class Embed(Message, frozen=True):
    """Vectors for some inputs, each a text or token ids of the embedding model, which are taken as they are.
    `truncate`: inputs that are too long are cut, not refused. 0 dimensions = all."""

    id: str
    inputs: tuple[str | tuple[int, ...], ...]
    truncate: bool = False
    dimensions: int = 0


EmbedderCommand = Embed | Cancel


class EmbedderReady(Message, frozen=True):
    """The model is loaded."""

    num_dimensions: int
    max_tokens: int  # of one input
    weights_bytes: int


class EmbedderStep(Message, frozen=True):
    """A batch was computed: the embedder is alive, and not stuck."""


class Embedded(Message, frozen=True):
    """The vectors of a request, as rows of little-endian float32 in the order of the inputs."""

    id: str
    num_dimensions: int
    vectors: bytes
    num_tokens: int  # of all inputs


class EmbedRefused(Message, frozen=True):
    """A request that this model cannot serve; `code` is the OpenAI error code."""

    id: str
    code: str
    message: str
    param: str


EmbedderReport = EmbedderReady | EmbedderStep | Embedded | EmbedRefused

# ---------------------------------------------------------------- agent -> coordinator


class Join(Message, frozen=True):
    """An agent asks to take part. `ranks` empty: the coordinator assigns by host name."""

    protocol: int
    mesh_name: str
    host: str
    agent_pid: int
    slots: int
    ranks: tuple[int, ...]
    world_size: int
    address: str
    facts: HostFacts


class PortsReserved(Message, frozen=True):
    """Answer to ReservePorts: for each rank its "ip:port"s, bound exclusively for a moment to prove them."""

    epoch: int
    addresses: dict[int, tuple[str, ...]] = {}
    error: str = ""


class RankReport(Message, frozen=True):
    """What an engine reported."""

    epoch: int
    rank: int
    report: EngineReport


class RankStarted(Message, frozen=True):
    epoch: int
    rank: int
    pid: int


class RankExited(Message, frozen=True):
    """An engine process ended; `expected` when this agent stopped it."""

    epoch: int
    rank: int
    exit_code: int | None
    signal: int | None
    expected: bool
    last_lines: tuple[str, ...] = ()


class RankLog(Message, frozen=True):
    """One line of an engine's or agent's output."""

    rank: int
    line: str


class EpochStopped(Message, frozen=True):
    """All engines of that epoch on this host are gone."""

    epoch: int


class AgentBeat(Message, frozen=True):
    """Each second from the agent itself. `stopped`: ranks whose engine process is stopped (SIGSTOP), as far
    as this system tells; it shows also before the first heartbeat and while one cannot come."""

    seq: int
    stopped: tuple[int, ...] = ()
    pressure: str = ""  # how the host is short of memory, in words; '' = it is not
    awake: str = ""  # what holds the host awake, in words; '' = nothing has to, or can
    events: tuple[str, ...] = ()  # sleep and changes of links, the latest few with their times


class Leaving(Message, frozen=True):
    """The agent ends on purpose."""

    reason: str


AgentMessage = (
    Join
    | PortsReserved
    | RankReport
    | RankStarted
    | RankExited
    | RankLog
    | EpochStopped
    | AgentBeat
    | Leaving
)

# ---------------------------------------------------------------- coordinator -> agent


class Welcome(Message, frozen=True):
    """The agent is in; `ranks` are its mesh ranks now, () of a standby."""

    ranks: tuple[int, ...]
    world_size: int
    deadlines: Deadlines


class Refused(Message, frozen=True):
    """The agent must end with this message."""

    reason: str


class StartEpoch(Message, frozen=True):
    """Start one engine per rank of this host, after killing those of any other epoch. Data ports bind to
    `address`, the IPv4 of this host's data links, and the leader's plan channel to `plan_address`, which all
    hosts reach."""

    epoch: int
    ranks: tuple[int, ...]
    world_size: int
    address: str
    plan_address: str


class ReservePorts(Message, frozen=True):
    epoch: int
    num_per_rank: int


class ToEngine(Message, frozen=True):
    """Hand a command to one engine."""

    epoch: int
    rank: int
    command: EngineCommand


class StopEpoch(Message, frozen=True):
    """KILL the engines of this epoch (TERM first when `gently`), then answer EpochStopped. `dump`: first have
    each print where its threads stand."""

    epoch: int
    gently: bool
    reason: str
    dump: bool = False


class Shutdown(Message, frozen=True):
    """End everything on this host; the agent exits with `exit_code`."""

    reason: str
    exit_code: int = 0


class JoinAgain(Message, frozen=True):
    """The sender is no member (any more): it must stop its engines and send Join."""

    reason: str


class BeatAck(Message, frozen=True):
    """Answer to AgentBeat, so that a follower notices a silent coordinator."""

    seq: int


CoordinatorMessage = (
    Welcome | Refused | StartEpoch | ReservePorts | ToEngine | StopEpoch | Shutdown | JoinAgain | BeatAck
)

# ---------------------------------------------------------------- proxy <-> coordinator


class StatusQuery(Message, frozen=True):
    """Ask for MeshStatus; `id` comes back."""

    id: str
    with_metrics: bool = False


class ChangeNode(Message, frozen=True):
    """Go on without a host, or with it again; `id` comes back in NodeReply."""

    id: str
    action: Literal["drain", "add"]
    host: str


class SwitchModel(Message, frozen=True):
    """Serve another model, or the one that was unloaded again, or say why not; `id` comes back in NodeReply.
    `model` '' = the one that is or was served."""

    id: str
    model: str


class UnloadModel(Message, frozen=True):
    """End the engines and serve no model until SwitchModel asks for one; `id` comes back in NodeReply."""

    id: str


class ScanNetwork(Message, frozen=True):
    """Look for hosts on the leader's network for `timeout_s`; 0: what the last look has shown. `id` comes
    back in ScanReply."""

    id: str
    timeout_s: float = 0.0


class ProxyReady(Message, frozen=True):
    """The proxy accepts connections."""

    pid: int


class Farewell(msgspec.Struct, frozen=True, kw_only=True):
    """A line, as JSON, that a launcher may write to an agent before it closes its stdin, which ends the agent
    at once."""

    reason: str
    is_failure: bool  # the mesh broke; nobody asked for its end
    drain: bool = False  # the end may wait for open requests; stdin stays open meanwhile


class ProxyBeat(Message, frozen=True):
    """The proxy's loop runs. Sent every PROXY_BEAT_S from the first moment on."""


PROXY_BEAT_S = 1.0

ProxyRequest = (
    Submit
    | Cancel
    | Embed
    | StatusQuery
    | ChangeNode
    | SwitchModel
    | UnloadModel
    | ResetPrefixes
    | ScanNetwork
    | ProxyReady
    | ProxyBeat
)


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The data link from a rank to the next one. Times and rates were measured when the epoch connected."""

    peer: int  # rank
    peer_address: str
    interface: str = ""  # of this side; '' = not known, as behind a router
    link_class: str = ""  # thunderbolt, ethernet, wifi, loopback; '' = not known
    evidence: str = ""  # why it is of that class: the hardware port or the driver
    rtt_ms: float | None = None
    bandwidth_bytes_per_s: int | None = None


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One row of /v1/cluster/nodes."""

    rank: int
    user_rank: int
    host: str
    address: str
    agent_pid: int
    engine_pid: int
    epoch: int
    phase: Phase
    step: int
    layers: str  # "0-14" or "all"
    weights_bytes: int
    memory_bytes: int
    peak_memory_bytes: int
    last_heartbeat_s: float | None
    is_leader: bool
    chip: str = ""
    detail: str = ""
    prefix: PrefixCounters = PrefixCounters()
    link: LinkStatus | None = None  # None: world size 1, or not connected yet
    replica: int = 1


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the hostfile, whether it serves or not."""

    host: str
    state: Literal["serving", "gone", "standby", "drained", "failed"]
    ranks: tuple[int, ...]
    detail: str = ""
    pressure: str = ""  # how it is short of memory; while one is, no new request is taken
    awake: str = ""  # what holds it awake; '' = nothing has to, or can
    events: tuple[str, ...] = ()  # sleep and changes of links, the latest few with their times
    model_part: str = (
        ""  # what it has of the model, if not all: then its mesh does not go on with fewer hosts
    )
    replica: int = 1


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One value for Prometheus; several with one name differ in their labels."""

    name: str  # as Prometheus shows it, with _total on counters
    kind: Literal["counter", "gauge"]
    help: str
    value: float
    labels: dict[str, str] = {}


class EmbeddingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding model beside the mesh's own."""

    model: str
    ready: bool
    reason: str  # why not ready; '' when ready
    pid: int
    restarts: int
    weights_bytes: int = 0
    num_dimensions: int = 0
    max_tokens: int = 0
    num_open: int = 0


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of the model, which has epochs of its own. Numbers begin with 1."""

    replica: int
    ready: bool
    reason: str  # why not ready; '' when ready
    epoch: int
    epoch_cause: str
    hosts: tuple[str, ...]
    placement: Placement | None
    num_running: int
    num_waiting: int
    num_open: int
    restarts: int
    num_requests: dict[str, int]  # that were sent there, by why: conversation, prefix, load
    lineup: str = ""


class MeshStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The live state of a mesh, from heartbeats only. With several replicas `world_size` is that of each,
    counts are of all, and epoch and placement those of the first; `replicas` has each."""

    name: str
    model: str
    world_size: int
    sharding: Sharding
    backend: Backend
    epoch: int
    epoch_cause: str
    ready: bool
    reason: str  # why not ready; '' when ready
    placement: Placement | None
    ranks: tuple[RankStatus, ...]
    num_running: int
    num_waiting: int
    num_open: int
    uptime_s: float
    versions: Versions | None
    context_length: int
    restarts: int = 0
    hosts: tuple[HostStatus, ...] = ()
    lineup: str = ""  # how it falls short of its hostfile, like "serving with 2 of 3 hosts since ..."
    metrics: tuple[Metric, ...] = ()  # when they were asked for
    embedding: EmbeddingStatus | None = None
    backend_reason: str = ""
    switch: str = ""  # what became of the last order to serve another model; '' = there was none
    replicas: tuple[ReplicaStatus, ...] = ()  # () = there is one
    code: str = ""  # see Readiness


class StatusReply(Message, frozen=True):
    id: str
    status: MeshStatus


class NodeReply(Message, frozen=True):
    """`error` '' = done or begun; else a code, and `message` says why not. `is_changing`: an epoch after
    `epoch` will be the changed mesh."""

    id: str
    message: str
    epoch: int
    error: str = ""
    is_changing: bool = False


class ScanReply(Message, frozen=True):
    """`report` None: there was no scan yet, or it failed for the reason in `error`."""

    id: str
    report: ScanReport | None
    error: str = ""


class Chunk(Message, frozen=True):
    """New tokens of one request."""

    chunk: TokenChunk


class Failed(Message, frozen=True):
    """A request ends with an error; `code` is the OpenAI error code; retry_after_s > 0 asks to try again."""

    id: str
    code: str
    message: str
    retry_after_s: int = 0
    param: str = ""  # the field at fault, where one is


class Readiness(Message, frozen=True):
    """Sent at every change and once at start."""

    ready: bool
    reason: str
    world_size: int
    context_length: int
    epoch: int
    kv: KvBudget = KvBudget()
    lineup: str = ""  # see MeshStatus; '' = all hosts serve
    num_replicas: int = 1
    num_ready: int = 0  # of these
    code: str = ""  # of the refusals while it is not ready, '' = not_ready
    media: tuple[
        str, ...
    ] = ()  # what prompts may hold beside text, see MEDIA_KINDS; () before the first epoch
    media_refusals: dict[str, str] = {}  # why not others, as far as it is known
    alone_reason: str = ""  # see ModelFootprint
    whole_reason: str = ""  # likewise


class Drain(Message, frozen=True):
    """Take no new request; the coordinator stops the proxy when open ones are done or late."""


ProxyEvent = StatusReply | NodeReply | ScanReply | Chunk | Embedded | Failed | Readiness | Drain


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy child's settings, sent as the first frame on its socket pair (after that: ProxyEvent)."""

    model: str  # folder with the tokenizer
    model_id: str  # the id in answers
    served_model_names: tuple[str, ...]
    serve_host: str
    serve_port: int
    listen_fd: int  # a bound, listening socket passed by the agent
    api_keys: tuple[str, ...]
    chat_template: str
    allowed_origins: tuple[str, ...] = ()
    version: str
    max_body_bytes: int = 32 * 1024 * 1024
    keepalive_s: float = 5.0
    embedding_model: str = ""  # its id in answers; '' = no embeddings
    strip_thinking: bool = False  # leave reasoning out of answers unless a request asks for it
    keeps_prefixes: bool = True
    has_prefixes_per_key: bool = False  # clients with different API keys share none
    kv_bits: int = 0  # 0 = keys and values are not quantised
    kv_group_size: int = 0
    allowed_media_domains: tuple[str, ...] = ()  # hosts that files may be fetched from; () = none


# ---------------------------------------------------------------- agent -> launcher (stdout lines)


class AgentListening(Message, frozen=True):
    """The coordinator's control channel is bound: followers may be started."""

    coordinator: str
    agent_pid: int


class AgentStarted(Message, frozen=True):
    host: str
    agent_pid: int


class PlanChosen(Message, frozen=True):
    placement: Placement
    backend: Backend
    backend_reason: str = ""


class RankProgress(Message, frozen=True):
    """For the one line per rank: phase, and layers done while loading."""

    rank: int
    host: str
    phase: Phase
    done: int = 0
    total: int = 0
    detail: str = ""


class LogLine(Message, frozen=True):
    rank: int
    host: str
    line: str


class MeshReady(Message, frozen=True):
    url: str
    epoch: int
    seconds: float
    restarted: bool = False  # True: after a recovery
    world_size: int = 0
    lineup: str = ""  # see MeshStatus


class EpochEnded(Message, frozen=True):
    """An epoch broke; the next one starts unless `final`."""

    epoch: int
    cause: str
    final: bool


class MeshDown(Message, frozen=True):
    """No epoch can begin with the hosts that are there; the mesh waits for others."""

    reason: str


class AgentFailed(Message, frozen=True):
    """The agent ends with this error and exit status."""

    message: str
    exit_code: int


class AgentStopped(Message, frozen=True):
    """`by_coordinator`: it was sent away because the whole mesh ends."""

    reason: str
    by_coordinator: bool = False


LauncherEvent = (
    AgentListening
    | AgentStarted
    | PlanChosen
    | RankProgress
    | LogLine
    | MeshReady
    | EpochEnded
    | MeshDown
    | AgentFailed
    | AgentStopped
)

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack bytes of any message above."""
    return _encoder.encode(message)
