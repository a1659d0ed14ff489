"""Compiles the guest that runs grammars, which is C for the sandbox, when the package is built."""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONTROLLER = Path("workers", "controller")
FLAGS = ["-target", "wasm32-freestanding", "-O3", "-g0", "-nostdlib", "-Wl,--no-entry"]
FLAGS += ["-Wl,-z,stack-size=65536", "-mcpu=generic+simd128+bulk_memory"]


class BuildGuests(build_py):
    """``build_py``, and ``builtin/*.wasm`` beside the Python files."""

    def run(self) -> None:
        """Copies the modules, then compiles."""
        super().run()
        root = Path() if self.editable_mode else Path(self.build_lib, "tokenbus")
        folder = root / CONTROLLER / "builtin"
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted((CONTROLLER / "builtin").glob("*.c")):
            target = str(folder / f"{source.stem}.wasm")
            command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, "-o", target]
            subprocess.check_call([*command, str(source)])


setup(cmdclass={"build_py": BuildGuests})
