"""Compiles what is C when the package is built.

For the sandbox: the guest that runs grammars, and the console's examples. On Linux also the GPU
worker's forward of few tokens, for this machine's kind of processor.
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
"""Modules of the SDK's examples that the console uploads."""

NATIVE = Path("workers", "gpu", "model", "cpu_native")
NATIVE_SOURCES = [str(NATIVE / name) for name in ("decode.c", "rows.c", "threads.c")]
NATIVE_FLAGS = ["-O3", "-g0", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden"]
NATIVE_FLAGS += ["-fno-math-errno", "-ffp-contract=fast"]
PROCESSORS = {"x86_64": ["x86_64_v3", "x86_64_v4"], "aarch64": ["generic"]}
"""By machine: what is compiled for it. The worker loads the one for its processor, if any."""


class BuildNative(build_py):
    """``build_py``, and the compiled files beside their C."""

    def run(self) -> None:
        """Copies the modules, then compiles."""
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
    # A process that has it loaded keeps the file that it has.
    to.unlink(missing_ok=True)
    subprocess.check_call([sys.executable, "-m", "ziglang", "cc", "-o", str(to), *arguments])


setup(cmdclass={"build_py": BuildNative})
