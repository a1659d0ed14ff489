"""Places, watches and retires the workers of one kind in a Ray cluster."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ...protocol.settings import Settings
from .owner import Owner, Report

log = logging.getLogger(__name__)

Kind = Literal["gpu", "controller"]
MODULES: Mapping[Kind, str] = {
    "gpu": "tokenbus.workers.gpu",
    "controller": "tokenbus.workers.controller",
}
ENDING_MARGIN_S = 10.0
"""A retiring worker is killed after ``drain_s`` plus this number of seconds."""


def ray_module() -> Any:
    """Imports the package ``ray``, which the extra ``ray`` installs."""
    return importlib.import_module("ray")


def resources(kind: Kind, settings: Settings) -> dict[str, float]:
    """The resources that a worker reserves on its node. A controller worker reserves a CPU. A GPU
    worker reserves a GPU and a CPU for each of its devices. If its device is ``cpu``, it reserves a
    CPU for each of its threads."""
    if kind == "gpu" and settings.device != "cpu":
        return {"GPU": float(settings.tp), "CPU": float(settings.tp)}
    if kind == "gpu":
        return {"CPU": float(max(1, settings.threads))}
    return {"CPU": 1.0}


class WorkerSetup(NamedTuple):
    """The settings and the key of a worker."""

    variables: dict[str, str]
    """The environment variables with the worker's settings."""
    key: str | None
    """The content of the worker's key file; None if the system has no worker key."""


class Member:
    """One worker: its placement group, its actor, and the actor's last report."""

    def __init__(self, name: str, number: int, actor: Any, target: str | None = None) -> None:
        """``target``: the planned node, if the worker has just been placed."""
        self.name = name
        self.number = number
        self.actor = actor
        self._target = target
        self.report: Report | None = None
        self.retired_at: float | None = None
        self._asked: Any = None

    @property
    def node(self) -> str | None:
        """The node of the worker. Before its first report, this is the planned node, or None if no
        node is planned."""
        return self.report.node if self.report is not None else self._target

    def look(self, now: float) -> None:
        """Reads the next report if it has arrived. Does not wait."""
        ray = ray_module()
        if self._asked is None:
            self._asked = self.actor.report.remote()
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return
        asked, self._asked = self._asked, None
        try:
            report = Report(*ray.get(asked))
        except ray.exceptions.RayActorError:
            # Ray restarts the actor, on another node if the actor's node has died.
            if self.report is not None:
                log.warning("%s ended because its actor was lost; Ray restarts it", self.name)
            self.report = self._target = None
            return
        before = self.report
        if report.pid and (
            before is None or (before.node, before.pid) != (report.node, report.pid)
        ):
            log.info("%s is process %d on node %s", self.name, report.pid, report.node[:12])
        if report.retiring and self.retired_at is None:
            self.retired_at = now  # A predecessor of this process retired the worker.
        if report.ended and self.retired_at is None and (before is None or not before.ended):
            log.error("%s is not restarted: its exit code is %s", self.name, report.exit_code)
        self.report = report

    def retire(self, now: float) -> None:
        """Begins to drain the worker. ``gone`` returns True when the worker has ended or its time
        limit has passed."""
        self.retired_at = now
        self.actor.retire.remote()

    def gone(self, now: float, drain_s: float) -> bool:
        """Whether a retiring worker has ended or its time limit has passed."""
        if self.retired_at is None:
            return False
        ended = self.report is not None and self.report.ended
        return ended or now - self.retired_at > drain_s + ENDING_MARGIN_S


class Members:
    """All workers of one kind of one system.

    Placement groups and actors have the names ``SYSTEM/RUN/KIND-N``; ``RUN`` identifies this run of
    the system. They are detached, so that workers outlive the process that created them.
    """

    def __init__(
        self, kind: Kind, system: str, run: str, settings: Settings, setup: WorkerSetup
    ) -> None:
        self._kind = kind
        self._system = system
        self._run = run
        self._settings = settings
        self._setup = setup
        self._members: dict[str, Member] = {}

    @property
    def serving(self) -> list[Member]:
        """The workers that are not retiring."""
        return [member for member in self._members.values() if member.retired_at is None]

    @property
    def empty(self) -> bool:
        """Whether no worker is left."""
        return not self._members

    def find(self, now: float) -> int:
        """Takes over existing workers. Workers of this run continue; workers of an earlier run
        retire. Returns the number of all found workers."""
        for name in _names(f"{self._system}/"):
            run, _, rest = name.removeprefix(f"{self._system}/").partition("/")
            kind, _, number = rest.rpartition("-")
            if kind != self._kind or not number.isdecimal():
                continue
            try:
                actor = ray_module().get_actor(name)
            except ValueError:
                _remove(name)  # The actor of this placement group never existed, or has ended.
                continue
            member = self._members[name] = Member(name, int(number), actor)
            if run != self._run:
                log.info("ending %s, which belongs to an earlier run", name)
                member.retire(now)
        return len(self._members)

    def place(self) -> None:
        """Adds a worker. If no node has enough free resources, the worker starts when resources
        become free, or when Ray's autoscaler adds a node."""
        taken = {member.number for member in self.serving}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        name = f"{self._system}/{self._run}/{self._kind}-{number}"
        if name in self._members:  # The worker that had this name is still retiring.
            number = max(member.number for member in self._members.values()) + 1
            name = f"{self._system}/{self._run}/{self._kind}-{number}"
        ray = ray_module()
        util = importlib.import_module("ray.util")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = resources(self._kind, self._settings)
        target = self._emptiest(bundle)
        group = util.placement_group(
            [bundle],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            _soft_target_node_id=target,
        )
        actor = (
            ray.remote(Owner)
            .options(
                name=name,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=0
                ),
            )
            .remote(MODULES[self._kind], self._setup.variables, self._setup.key)
        )
        self._members[name] = Member(name, number, actor, target)
        log.info("placing %s: %s", name, bundle)

    def retire(self, now: float) -> None:
        """Retires the worker with the highest number."""
        max(self.serving, key=lambda member: member.number).retire(now)

    def retire_all(self, now: float) -> None:
        """Retires all workers."""
        for member in self.serving:
            member.retire(now)

    def look(self, now: float) -> None:
        """Processes the reports, removes workers that have retired, and kills retiring workers
        whose time limit has passed."""
        for member in list(self._members.values()):
            member.look(now)
            if member.gone(now, self._settings.drain_s):
                ray_module().kill(member.actor)
                _remove(member.name)
                del self._members[member.name]
                log.info("%s has ended", member.name)

    def _emptiest(self, bundle: Mapping[str, float]) -> str | None:
        """The node with the fewest workers of this kind. Nodes whose total resources do not suffice
        for a worker are left out. None if no node is left."""
        nodes = [node for node in ray_module().nodes() if node["Alive"]]
        on = [member.node for member in self.serving]
        room = [
            node["NodeID"]
            for node in nodes
            if all(node["Resources"].get(name, 0.0) >= amount for name, amount in bundle.items())
        ]
        return min(room, key=lambda node: (on.count(node), node), default=None)


def _names(prefix: str) -> Iterator[str]:
    """The names of placement groups and of actors that begin with ``prefix``."""
    util = importlib.import_module("ray.util")
    groups = [
        group["name"]
        for group in util.placement_group_table().values()
        if group["state"] != "REMOVED"
    ]
    yield from sorted({n for n in (*groups, *util.list_named_actors()) if n.startswith(prefix)})


def _remove(name: str) -> None:
    """Removes a placement group, which ends its actor too."""
    util = importlib.import_module("ray.util")
    try:
        util.remove_placement_group(util.get_placement_group(name))
    except ValueError:
        log.debug("%s has no placement group", name)
