"""What the leader decides about kept prefixes: what an admission begins with and keeps, what goes.

Pure. The scheduler asks when it makes a plan and tells what became of rows; all ranks do as the plans say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.messages import GenerateRequest, Save
from mlx_mesh.mesh.prefix_index import MIN_TOKENS, Hit, PrefixIndex, common_length, packed
from mlx_mesh.mesh.prefix_settings import PrefixCounters, PrefixSettings, limits_of, longest_entry

WORTH_WAITING_TOKENS = 64
"""A request waits for a row that computes at least so many tokens of its prompt right now."""

MAX_WANTED = 16
"""System prompts that wait to be saved."""

MAX_CHECKPOINTS = 4
"""Of one row."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A rank has kept the cache of these tokens under this number."""

    entry: int
    tokens: Sequence[int]
    can_cut: bool
    num_bytes: int  # on this rank


@dataclass(frozen=True, slots=True)
class Part:
    """What an admission says of prefixes, see messages.Admission."""

    entry: int = 0
    reuse: int = 0
    num_reused: int = 0
    checkpoints: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Row:
    """An admitted request."""

    entry: int
    salt: str
    prompt: tuple[int, ...]
    packed: bytes
    num_reused: int
    checkpoints: tuple[tuple[int, int], ...]
    is_computing: bool = True  # no token came of it yet, and it stays
    is_forgotten: bool = False  # all that was kept was dropped since it was admitted


class PrefixPlanner:
    """The index of one epoch, and what the plans to come do with it."""

    def __init__(self, settings: PrefixSettings, kv: KvBudget, *, can_cut: bool) -> None:
        """`can_cut`: the model's caches can always be cut back to a shorter prefix. Those that cannot are
        also kept at checkpoints, where a later prompt is likely to go on."""
        self.is_enabled = settings.is_enabled
        self._settings = settings
        self._wanted: dict[
            tuple[int, ...], None
        ] = {}  # system prompts that are to be saved when they are kept
        self._was_saved: set[tuple[int, ...]] = set()
        self._to_save: list[Save] = []
        self._kv = kv
        self._can_cut = can_cut
        self._limits = limits_of(settings, kv)
        self._longest = longest_entry(settings, kv)
        self._index = PrefixIndex(self._limits)
        self._rows: dict[str, _Row] = {}
        self._waiting: dict[str, bytes] = {}  # packed prompts of requests that were looked at and wait
        self._salts: dict[int, str] = {}  # of entries that may be stored yet
        self._to_evict: list[int] = []
        self._ending: list[int] = []  # entries of rows that ended in this step
        self._last_entry = 0
        self._num_hits = self._num_misses = self._num_tokens = self._num_stored = self._num_evicted = 0

    # ------------------------------------------------------------ for a plan

    @property
    def has_orders(self) -> bool:
        """The next plan has something to save or to evict."""
        return bool(self._to_evict or self._to_save)

    @property
    def taken(self) -> Sequence[int]:
        """Bytes of all entries by rank; () when nothing is known of the ranks."""
        return self._index.used if self._kv.ranks else ()

    def must_wait(self, request: GenerateRequest, prompt: tuple[int, ...]) -> bool:
        """A row that was admitted computes much of the same prompt now, and little else: the request begins
        with its work as soon as that is done."""
        if request.reset_prefix or not self._takes_part(request):
            return False
        rows = [
            row
            for row in self._rows.values()
            if row.is_computing and not row.is_forgotten and row.salt == request.cache_salt
        ]
        if not rows:
            return False
        mine = self._packed(request, prompt)
        best = 0
        for row in rows:
            common = min(common_length(row.packed, mine), len(prompt) - 1)
            if self._can_cut:  # there is nothing to begin with before the whole prompt is computed
                is_most = 2 * (common - row.num_reused) >= len(row.prompt) - row.num_reused
                best = max(best, common if is_most else 0)
            else:
                points = (point for point, _ in row.checkpoints if point <= common)
                best = max(best, max(points, default=0))
        if best < WORTH_WAITING_TOKENS:
            return False
        hit = self._index.find(mine, request.cache_salt)
        return best - (hit.num_tokens if hit else 0) >= WORTH_WAITING_TOKENS

    def _packed(self, request: GenerateRequest, prompt: tuple[int, ...]) -> bytes:
        """Of a request that waits; plans are made many times a second, so it is done once."""
        known = self._waiting.get(request.id)
        if known is None or len(known) != 4 * len(prompt):  # one that made room comes back with more
            known = self._waiting[request.id] = packed(prompt)
        return known

    def waits_no_more(self, request_id: str) -> None:
        """The request was admitted, or ended before."""
        self._waiting.pop(request_id, None)

    def find(self, request: GenerateRequest, prompt: tuple[int, ...]) -> Hit | None:
        """What the request would begin with; it is the last one to go when room is made."""
        if request.reset_prefix or not self._takes_part(request):
            return None
        hit = self._index.find(self._packed(request, prompt), request.cache_salt)
        if hit is not None:
            self._index.use(hit.entry)
        return hit

    def make_room(self, fits: Callable[[Sequence[int]], bool]) -> None:
        """Evict until `fits(bytes by rank)`; all of it when nothing less will do."""
        self._evict(self._index.evict(lambda _: fits(self.taken)))

    def admit(self, request: GenerateRequest, prompt: tuple[int, ...]) -> Part:
        """The request is admitted by the plan that is being made."""
        if not self._takes_part(request):
            return Part()
        hit, mine = self.find(request, prompt), self._packed(request, prompt)
        self.waits_no_more(request.id)
        if hit is None:
            self._num_misses += len(prompt) > MIN_TOKENS
            hit = Hit(0, 0)
        else:
            self._num_hits += 1
            self._num_tokens += hit.num_tokens
        if len(prompt) > self._longest:  # its cache would be copied to be dropped
            return Part(0, hit.entry, hit.num_tokens)
        checkpoints = tuple(
            (point, self._new_entry(request.cache_salt)) for point in self._points(request, prompt, hit)
        )
        self._want(request, prompt)
        entry = self._new_entry(request.cache_salt)
        self._rows[request.id] = _Row(entry, request.cache_salt, prompt, mine, hit.num_tokens, checkpoints)
        return Part(entry, hit.entry, hit.num_tokens, checkpoints)

    def take_saves(self) -> tuple[Save, ...]:
        """What the plan that is being made saves, before it evicts."""
        saves, self._to_save = tuple(self._to_save), []
        return saves

    def take_evictions(self) -> tuple[int, ...]:
        """Entries that the plan that is being made evicts."""
        evictions, self._to_evict = tuple(self._to_evict), []
        return evictions

    def clear(self) -> int:
        """Evict all that is stored; how many that was. Rows that run go on; nobody begins with what they have
        by now, and nothing of them is kept."""
        gone = self._index.clear()
        self._evict(gone)
        for row in self._rows.values():
            row.is_forgotten = True
            for entry in (row.entry, *(entry for _, entry in row.checkpoints)):
                self._index.remove(entry)
                self._salts.pop(entry, None)
        return len(gone)

    # ------------------------------------------------------------ what became of it

    def first_token(self, request_id: str) -> None:
        """The row has its whole prompt in its cache."""
        row = self._rows.get(request_id)
        if row is not None and row.is_computing:
            row.is_computing = False
            if self._can_cut and len(row.prompt) >= MIN_TOKENS and not row.is_forgotten:
                self._index.add_row(row.entry, row.prompt, row.salt)

    def leaves(self, request_id: str, *, is_kept: bool) -> None:
        """The plan that is being made cancels it. Its cache is not kept when it has to make room."""
        row = self._rows.get(request_id)
        if row is None:
            return
        row.is_computing = False
        if not is_kept:
            self._index.remove(row.entry)
            self._salts.pop(row.entry, None)

    def ended(self, request_id: str) -> None:
        """The row is gone; what the same step kept of it is told after this."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._ending += [row.entry, *(entry for _, entry in row.checkpoints)]

    def stored(self, entries: Sequence[Stored]) -> None:
        """All ranks have kept these in one step."""
        for stored in entries:
            self._store(stored)
        for entry in self._ending:  # of rows that had nothing to keep
            if self._salts.pop(entry, None) is not None:
                self._index.remove(entry)
        self._ending = []

    def _store(self, stored: Stored) -> None:
        salt = self._salts.pop(stored.entry, None)
        if salt is None:  # it ended by itself before it could leave
            self._to_evict.append(stored.entry)
            return
        self._num_stored += 1
        if not salt:
            self._save_wanted(stored)
        self._add(stored, salt)

    def begin_with(self, entries: Sequence[Stored]) -> None:
        """Before anything else: all ranks have read these from files, the most recently used one last."""
        for stored in entries:
            self._last_entry = max(self._last_entry, stored.entry)
            self._add(stored, "")

    def _add(self, stored: Stored, salt: str) -> None:
        num_tokens = len(stored.tokens)
        sizes = tuple(rank.bytes_of(1, num_tokens) for rank in self._kv.ranks) or (stored.num_bytes,)
        self._evict(self._index.add(stored.entry, stored.tokens, salt, sizes, can_cut=stored.can_cut))

    def counters(self, num_entries: int, num_bytes: int) -> PrefixCounters:
        """With what this rank's store says of itself."""
        return PrefixCounters(
            num_entries=num_entries,
            num_bytes=num_bytes,
            limit_bytes=self._limits[0],
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_tokens=self._num_tokens,
            num_stored=self._num_stored,
            num_evicted=self._num_evicted,
        )

    # ------------------------------------------------------------ parts

    def _takes_part(self, request: GenerateRequest) -> bool:
        return self.is_enabled and not request.skip_prefix_cache

    def _want(self, request: GenerateRequest, prompt: tuple[int, ...]) -> None:
        """Once an epoch each system prompt is saved, or its file touched, so that the files in use stay."""
        most = self._settings.max_system_tokens or len(prompt)
        if self._settings.folder and not request.cache_salt and MIN_TOKENS <= request.system_tokens <= most:
            tokens = prompt[: request.system_tokens]
            if tokens in self._was_saved or len(self._wanted) >= MAX_WANTED:
                return
            entry = self._index.stored_with(tokens)
            if entry is None:
                self._wanted[tokens] = None
            else:
                self._save(tokens, entry)

    def _save_wanted(self, stored: Stored) -> None:
        for tokens in list(self._wanted):
            num_common = len(tokens) if stored.can_cut else len(stored.tokens)
            if tuple(stored.tokens[:num_common]) == tokens:
                del self._wanted[tokens]
                self._save(tokens, stored.entry)

    def _save(self, tokens: tuple[int, ...], entry: int) -> None:
        self._was_saved.add(tokens)
        self._to_save.append(Save(entry=entry, tokens=tokens))

    def _new_entry(self, salt: str) -> int:
        self._last_entry += 1
        self._salts[self._last_entry] = salt
        return self._last_entry

    def _evict(self, entries: list[int]) -> None:
        self._num_evicted += len(entries)
        self._to_evict += entries

    def _points(self, request: GenerateRequest, prompt: tuple[int, ...], hit: Hit) -> list[int]:
        """Lengths at which the cache is kept on the way through the prompt, ascending: where a cache cannot
        be cut back later. Before the last token, where the next turn goes on; where the front end says; and
        where another prompt had gone on differently, as a third one may."""
        if self._can_cut:
            return []
        last = len(prompt) - 1
        known = self._index.longest_known(prompt, request.cache_salt)
        points = {point for point in (*request.cache_points, known, last) if hit.num_tokens < point <= last}
        return sorted(point for point in points if point >= MIN_TOKENS)[-MAX_CHECKPOINTS:]
