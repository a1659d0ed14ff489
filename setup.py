"""Compiles the C sources when the package is built.

They are the grammar guest and the console's examples, as Wasm. On Linux, the GPU worker's native
forward for few tokens is compiled for this machine's architecture.
"""

import platform
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

GUEST = Path("grammars", "guest")
GUEST_FLAGS = ["-target", "wasm32-freestanding", "-O3", "-g0", "-nostdlib", "-Wl,--no-entry"]
GUEST_FLAGS += ["-Wl,-z,stack-size=65536", "-mcpu=generic+simd128+bulk_memory"]

SDK = Path("workers", "controller", "sdk")
CONSOLE = Path("clients", "console")
EXAMPLES = ["backtrack", "best_of"]
"""The SDK's examples whose modules the console uploads."""

NATIVE = Path("workers", "gpu", "model", "cpu_native")
NATIVE_SOURCES = [str(NATIVE / name) for name in ("decode.c", "functions.c", "rows.c", "threads.c")]
NATIVE_FLAGS = ["-O3", "-g0", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden"]
NATIVE_FLAGS += ["-fno-math-errno", "-ffp-contract=off"]
PROCESSORS = {"x86_64": ["x86_64_v3", "x86_64_v4"], "aarch64": ["generic"]}
"""The processors of each architecture for which a library is compiled. The worker loads the library
for its processor, if it exists."""


class BuildNative(build_py):
    """``build_py`` that also puts compiled files next to their C sources."""

    def run(self) -> None:
        """Copies the Python modules, then compiles the C sources."""
        super().run()
        root = Path() if self.editable_mode else Path(self.build_lib, "tokenbus")
        guest = root / GUEST / "grammar.wasm"
        _compile([*GUEST_FLAGS, str(GUEST / "grammar.c")], guest)
        for name in EXAMPLES:
            sources = ["-I", str(SDK), str(SDK / "examples" / f"{name}.c")]
            _compile([*GUEST_FLAGS, *sources], root / CONSOLE / f"{name}.wasm")
        machine = platform.machine() if sys.platform == "linux" else ""
        for processor in PROCESSORS.get(machine, []):
            library = root / NATIVE / f"decode-{machine}-{processor}.so"
            _compile([*NATIVE_FLAGS, f"-mcpu={processor}", *NATIVE_SOURCES], library)


def _compile(arguments: list[str], to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    # The file is replaced, because processes may have loaded the old file.
    to.unlink(missing_ok=True)
    subprocess.check_call([sys.executable, "-m", "ziglang", "cc", "-o", str(to), *arguments])


setup(cmdclass={"build_py": BuildNative})
