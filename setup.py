"""Compiles the guest that runs grammars, which is C for the sandbox, when the package is built."""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

GUEST = Path("grammars", "guest")
FLAGS = ["-target", "wasm32-freestanding", "-O3", "-g0", "-nostdlib", "-Wl,--no-entry"]
FLAGS += ["-Wl,-z,stack-size=65536", "-mcpu=generic+simd128+bulk_memory"]


class BuildGuest(build_py):
    """``build_py``, and ``grammar.wasm`` beside the guest's C."""

    def run(self) -> None:
        """Copies the modules, then compiles."""
        super().run()
        root = Path() if self.editable_mode else Path(self.build_lib, "tokenbus")
        folder = root / GUEST
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS]
        command += ["-o", str(folder / "grammar.wasm"), str(GUEST / "grammar.c")]
        subprocess.check_call(command)


setup(cmdclass={"build_py": BuildGuest})
