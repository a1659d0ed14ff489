"""Finds the workers that serve a request, and the least loaded of them, without a scan of all
workers.

The workers of a model are its pool. A pool orders its workers by load in a heap.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

from ..protocol.worker_messages import ANY_MODULE
from .worker import Worker, WorkerState

EMBEDDED = "embedded"
"""The default model if workers have different defaults and this model is one of the defaults."""
MAX_NAMES = 1_024
"""Maximum number of model names whose pools are cached. Clients may request any name that matches a
pattern."""

DEFAULT, STEERS = "default", "steers"
ROLES = {DEFAULT: "gpu", STEERS: "controller"}
"""By kind of pool: the role of its workers. A pool of the kind ``DEFAULT`` has the GPU workers
whose default is the default model. A pool of the kind ``STEERS`` has the controller workers that
serve a certain controller."""

Rank = tuple[bool, float]
Key = tuple[str, str, tuple[str, ...]]
"""The key of a pool: its kind or role, the name of a model or controller, and the patterns that
match the model. If no worker has loaded the model, the key has an empty name."""


class Pool:
    """Workers that serve the same model or controller. ``workers`` has all of them, including busy
    and draining workers, in the order of their registration.

    Workers that accept a request are grouped in levels: the workers of a level have the same rank.
    A heap of the few ranks finds the best level, and the workers of a level take turns.
    """

    def __init__(self, model: str, accepts: Callable[[Worker], bool]) -> None:
        self.workers: dict[int, Worker] = {}
        self.accepts = accepts
        self._model = model
        self._levels: dict[Rank, OrderedDict[int, Worker]] = {}
        self._rank_of: dict[int, Rank] = {}
        """The rank of each worker that is in a level."""
        self._ranks: list[Rank] = []
        """A heap of the ranks of all levels. It may contain ranks of levels that have become
        empty."""
        self._known: set[Rank] = set()
        """The ranks that are in the heap."""

    def add(self, worker: Worker) -> None:
        """Adds a worker that begins to serve the model or controller of this pool."""
        self.workers[worker.id] = worker
        self.note(worker)

    def remove(self, worker: Worker) -> None:
        """Removes a worker that stops serving the model or controller of this pool."""
        del self.workers[worker.id]
        self._leave(worker)

    def note(self, worker: Worker) -> None:
        """Notes a change of a worker's load, or of whether it accepts requests."""
        if not self.accepts(worker):
            self._leave(worker)
            return
        rank = self.rank(worker)
        if self._rank_of.get(worker.id) == rank:
            return
        self._leave(worker)
        level = self._levels.get(rank)
        if level is None:
            level = self._levels[rank] = OrderedDict()
            if rank not in self._known:
                self._known.add(rank)
                heapq.heappush(self._ranks, rank)
        level[worker.id] = worker
        self._rank_of[worker.id] = rank

    def _leave(self, worker: Worker) -> None:
        """Removes a worker from its level, if it has a level."""
        rank = self._rank_of.pop(worker.id, None)
        if rank is not None:
            level = self._levels[rank]
            del level[worker.id]
            if not level:
                del self._levels[rank]

    def rank(self, worker: Worker) -> Rank:
        """The rank of a worker; lower ranks are preferred. Workers that have loaded the model
        precede workers that have not. Within each of these groups, less filled workers come
        first."""
        return bool(self._model) and self._model not in worker.models, worker.fill

    def least_loaded(self) -> Worker | None:
        """The next worker in turn among the workers of the lowest rank that accept a request now;
        None if no worker accepts a request."""
        while self._ranks:
            level = self._levels.get(self._ranks[0])
            if level is None:
                self._known.discard(heapq.heappop(self._ranks))
                continue
            worker = next(iter(level.values()))
            if self.accepts(worker):
                return worker
            self._leave(worker)
        return None

    def free(self) -> Iterator[Worker]:
        """All workers that accept a request now, ordered by rank."""
        first = self.least_loaded()
        if first is None:
            return
        yield first
        rest = (w for w in self.workers.values() if w is not first and self.accepts(w))
        yield from sorted(rest, key=self.rank)


class _Role:
    """The workers of a role, and how many of them serve each name."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.models: Counter[str] = Counter()
        self.patterns: Counter[str] = Counter()
        self.defaults: Counter[str] = Counter()

    def count(self, worker: Worker, change: int) -> bool:
        """Counts the names that a worker serves (``change`` 1), or stops counting them (-1).
        Returns whether the set of served names has changed."""
        counted = (
            (self.models, worker.models),
            (self.patterns, worker.patterns),
            (self.defaults, [worker.default] if worker.default else []),
        )
        changed = False
        for counts, names in counted:
            for name in names:
                counts[name] += change
                changed = changed or counts[name] == max(change, 0)
                if not counts[name]:
                    del counts[name]
        return changed


class Pools:
    """The pools of all workers, updated when workers register, change and leave."""

    def __init__(self, is_hung: Callable[[Worker], bool]) -> None:
        self._is_hung = is_hung
        self._roles: dict[str, _Role] = {}
        self._pools: dict[Key, Pool] = {}
        self._named: dict[str, Pool] = {}
        """Pools of GPU workers, by the name of the model in the request."""
        self._of: dict[int, list[Pool]] = {}
        """By worker: the pools that contain the worker."""
        self.default_model = ""
        """The model of a request that does not name a model. Empty if the workers' defaults differ
        and none of the defaults is ``EMBEDDED``."""
        self.has_default = False
        """Whether any worker has a default model."""

    # --- workers --------------------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """Adds a worker that has registered."""
        role = self._roles.setdefault(worker.role, _Role())
        role.workers[worker.id] = worker
        self._of[worker.id] = []
        if role.count(worker, 1):
            self._start_over()
        for key, pool in self._pools.items():
            if _belongs(worker, key):
                self._join(pool, worker)

    def remove(self, worker: Worker) -> None:
        """Removes a worker that is lost, or that is about to serve other names."""
        role = self._roles[worker.role]
        del role.workers[worker.id]
        for pool in self._of.pop(worker.id):
            pool.remove(worker)
        if role.count(worker, -1):
            self._start_over()

    def note(self, worker: Worker) -> None:
        """Notes a change of a worker's load, or of whether it accepts requests."""
        for pool in self._of.get(worker.id, ()):
            pool.note(worker)

    def of_role(self, role: str) -> Mapping[int, Worker]:
        """The workers of a role."""
        found = self._roles.get(role)
        return found.workers if found is not None else {}

    def names(self, role: str) -> set[str]:
        """The models and patterns that the workers of a role serve."""
        found = self._roles.get(role)
        return {*found.models, *found.patterns} if found is not None else set()

    # --- requests -------------------------------------------------------------------------------

    def serving(self, role: str, model: str) -> Pool:
        """The GPU workers that serve a model; ``""`` is the default model. For the role
        ``controller``: the workers that run uploaded modules."""
        if role != "gpu":
            return self._pool((role, ANY_MODULE, ()))
        pool = self._named.get(model)
        if pool is None:
            pool = self._pool(self._key(model))
            if len(self._named) >= MAX_NAMES:
                self._named.clear()
            self._named[model] = pool
        return pool

    def steering(self, pattern: str) -> Pool:
        """The controller workers that have registered this name or pattern of controllers."""
        role = self._roles.get("controller")
        if role is None or pattern not in role.patterns:
            return self._none
        return self._pool((STEERS, pattern, ()))

    @property
    def _none(self) -> Pool:
        return Pool("", self.accepts)

    def _key(self, model: str) -> Key | None:
        role = self._roles.get("gpu")
        if role is None:
            return None
        if not model:
            return (DEFAULT, self.default_model, ()) if self.default_model else None
        name = model if model in role.models else ""
        patterns = tuple(sorted(p for p in role.patterns if fnmatchcase(model, p)))
        return ("gpu", name, patterns) if name or patterns else None

    def _pool(self, key: Key | None) -> Pool:
        if key is None:
            return self._none
        pool = self._pools.get(key)
        if pool is None:
            kind, name, _ = key
            accepts = self.has_place if kind == STEERS else self.accepts
            pool = self._pools[key] = Pool(name if kind in ("gpu", DEFAULT) else "", accepts)
            for worker in self.of_role(ROLES.get(kind, kind)).values():
                if _belongs(worker, key):
                    self._join(pool, worker)
        return pool

    def _join(self, pool: Pool, worker: Worker) -> None:
        self._of[worker.id].append(pool)
        pool.add(worker)

    def _start_over(self) -> None:
        """Drops all pools, because the set of served names has changed. Pools are built again when
        they are needed."""
        defaults = {name for role in self._roles.values() for name in role.defaults}
        self.has_default = bool(defaults)
        unclear = EMBEDDED if EMBEDDED in defaults else ""
        self.default_model = defaults.pop() if len(defaults) == 1 else unclear
        self._pools.clear()
        self._named.clear()
        for pools in self._of.values():
            pools.clear()

    def accepts(self, worker: Worker) -> bool:
        """Whether a worker accepts one more request."""
        ready = worker.state is WorkerState.READY and worker.has_room
        return ready and not self._is_hung(worker)

    @staticmethod
    def has_place(worker: Worker) -> bool:
        """Whether a controller worker accepts one more controller."""
        return worker.state is WorkerState.READY and worker.has_place


def _belongs(worker: Worker, key: Key) -> bool:
    """Whether a worker belongs to the pool with this key."""
    kind, name, patterns = key
    if worker.role != ROLES.get(kind, kind):
        return False
    if kind == DEFAULT:
        return worker.default == name
    if kind == "gpu":
        return name in worker.models or any(p in worker.patterns for p in patterns)
    return name in worker.patterns
