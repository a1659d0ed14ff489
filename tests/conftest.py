"""Hooks for all tests, and fixtures that tests of several folders use, such as a running bus.

The processes that run tests share the cores. So torch has one thread in each of them, and in each
worker that they start, unless ``OMP_NUM_THREADS`` is already set.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tokenbus.clients import Client

from . import counts as counts  # sets the number of examples of property tests
from . import forks, starts
from . import processes as systems
from .processes import Bus, Gateway

LONG = (
    "tests/chaos/",
    "tests/hostile/",
    "tests/system/",
    "tests/test_gpu_check.py",
    "tests/workers/controller/backends/test_compiling.py",
    "tests/workers/controller/test_kills.py",
    "tests/workers/gpu/test_compiled.py",
)
"""Folders and files with tests that take up to two minutes each."""


def pytest_configure() -> None:
    """Makes unmarked tests fail if they start processes (``starts.py``). Lets Ctrl-C interrupt this
    process. A shell without job control starts background processes so that they ignore Ctrl-C, and
    the child processes inherit this."""
    # While test modules are imported, the garbage collector is off, because imported modules stay
    # in memory.
    gc.disable()
    starts.watch()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Turns the garbage collector on, and excludes all objects that exist now."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Ends the servers that fork processes for tests (``forks.py``)."""
    forks.close()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``make test-quick``, skips the import of files whose tests all start processes."""
    quick = config.getoption("markexpr") == "not process"
    if quick and collection_path.suffix == ".py":
        return "\npytestmark = pytest.mark.process\n" in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that start processes through a fixture, and orders all tests."""
    for item in items:
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.process)
    items[:] = _longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Orders the tests so that no process runs a long test when the other processes have ended.

    Each of ``workers`` processes begins with an equal part of the list. A process without further
    tests takes over the last tests of another process. So each part begins with tests of the
    folders and files ``LONG``, and ends with short tests.
    """
    long = [item for item in items if item.nodeid.startswith(LONG)]
    others = [item for item in items if not item.nodeid.startswith(LONG)]
    parts = []
    for i in range(workers):
        for group in (long, others):
            parts += group[len(group) * i // workers : len(group) * (i + 1) // workers]
    return parts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that starts a process and is not marked ``process``."""
    with starts.only_if_marked(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the logs of the shared processes to the report of a failed test, and their stacks if the
    test waited too long. Escapes lone surrogates in the test's output, because a report with lone
    surrogates cannot be sent to the process that collects the reports."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        shared = (one for one in item.funcargs.values() if isinstance(one, Bus))
        for bus in shared:
            report.sections.append(("logs of the processes", bus.logs))
            if "Timeout" in report.longreprtext:
                report.sections.append(("stacks of the processes", bus.stacks))
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes all systems of this run share the compiled forms of modules."""
    base = tmp_path_factory.getbasetemp()
    compiled = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    compiled.mkdir(mode=0o700, exist_ok=True)
    systems.compiled = compiled


@pytest.fixture(scope="session")
def processes() -> None:
    """Marks tests that start processes: fixtures that start processes use this fixture."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the ties: the positions at which rounding in a kernel decided between two tokens."""
    shapes = sys.modules.get("tests.workers.gpu.shapes")
    if shapes is not None:
        terminalreporter.write_line(f"tokens that differed by a tie of logits: {len(shapes.ties)}")
        for tie in shapes.ties:
            terminalreporter.write_line(f"  {tie}")


@pytest.fixture(scope="session")
def bus(processes: None) -> Iterator[Bus]:
    """A broker and a GPU worker with the embedded model, for tests that do not change their state.

    The broker does not wait for workers of an earlier broker."""
    with Bus(recover_s=0.1) as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        yield bus


@pytest.fixture(scope="session")
def steered(processes: None) -> Iterator[Bus]:
    """A broker, a GPU worker, a state worker and a controller worker, for tests that do not change
    the state of these processes. Users of the gateways of this bus may call the tools whose names
    begin with ``chat_``."""
    with Bus(recover_s=0.1, allow_tools="chat_*") as bus:
        bus.start_worker()
        bus.start_other("state")
        bus.start_other("controller", controller_idle_wakes=20)
        bus.wait_for_models("embedded")
        bus.wait_for_roles("controller", "state")
        yield bus


@pytest.fixture(scope="session")
def gateway(steered: Bus) -> Gateway:
    """A gateway of the bus ``steered``, without API keys. It renders the chat templates that
    requests contain."""
    return steered.start_gateway(trust_request_chat_template=True)


@pytest.fixture
def client(bus: Bus) -> Iterator[Client]:
    """A client of the bus ``bus``."""
    with bus.client() as client:
        yield client


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of asynchronous tests."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TOKENBUS_")]:
        monkeypatch.delenv(name)
