"""Compiles the C sources when the package is built.

The grammar guest, the console's examples and the interpreter of scripts are compiled to Wasm. On
Linux, the GPU worker's native forward for few tokens is compiled for this machine's architecture.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
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

SCRIPTS = Path("workers", "controller", "scripts")
QUICKJS = "quickjs==1.19.4"
QUICKJS_SHA256 = "1205953abc24ff757f4a795304d5d61e4bf1e555c9ef6ec96a132d4b95535484"
"""The hash of the package's source distribution on PyPI, which contains the C sources of
QuickJS."""
QUICKJS_SOURCES = ["quickjs.c", "cutils.c", "libregexp.c", "libunicode.c", "libbf.c"]
# -DEMSCRIPTEN makes QuickJS leave out atomics. WASI's libc has only one rounding mode, so the
# constants of the other modes are defined as 0.
QUICKJS_FLAGS = [
    "-target",
    "wasm32-wasi",
    "-mexec-model=reactor",
    "-O2",
    "-g0",
    "-w",
    "-D_GNU_SOURCE",
]
QUICKJS_FLAGS += ["-DEMSCRIPTEN", "-DCONFIG_STACK_CHECK", "-DFE_UPWARD=0", "-DFE_DOWNWARD=0"]
QUICKJS_FLAGS += ['-DCONFIG_VERSION="2021-03-27"', "-Wl,-z,stack-size=262144", "-Wl,--strip-all"]

NATIVE = Path("workers", "gpu", "model", "cpu_native")
NATIVE_SOURCES = [str(NATIVE / name) for name in ("decode.c", "functions.c", "rows.c", "threads.c")]
NATIVE_FLAGS = ["-O3", "-g0", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden"]
NATIVE_FLAGS += ["-fno-math-errno", "-ffp-contract=off"]
PROCESSORS = {"x86_64": ["x86_64_v3", "x86_64_v4"], "aarch64": ["generic"]}
"""The processors for which a library is compiled, by architecture. The worker loads the library for
its own processor, if this library exists."""


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
        _build_javascript(root / SCRIPTS / "javascript" / "engine.wasm")
        machine = platform.machine() if sys.platform == "linux" else ""
        for processor in PROCESSORS.get(machine, []):
            library = root / NATIVE / f"decode-{machine}-{processor}.so"
            _compile([*NATIVE_FLAGS, f"-mcpu={processor}", *NATIVE_SOURCES], library)


def _build_javascript(to: Path) -> None:
    """Compiles QuickJS in half a minute, unless its compiled form is present. Without QuickJS, the
    package works except for scripts in JavaScript."""
    glue = SCRIPTS / "javascript" / "engine.c"
    made = glue.with_suffix(".wasm")
    mark = _mark(glue.read_bytes() + " ".join([QUICKJS_SHA256, *QUICKJS_FLAGS]).encode())
    try:
        if not (made.exists() and made.read_bytes().endswith(mark)):
            with tempfile.TemporaryDirectory() as folder:
                sources = _download(QUICKJS, QUICKJS_SHA256, Path(folder)) / "upstream-quickjs"
                files = [str(sources / name) for name in QUICKJS_SOURCES]
                _compile([*QUICKJS_FLAGS, "-I", str(sources), str(glue), *files], made)
            made.write_bytes(made.read_bytes() + mark)
        if to != made:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(made, to)
    except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
        print(f"warning: scripts in JavaScript are not available: {error}", file=sys.stderr)


def _mark(inputs: bytes) -> bytes:
    """Returns a custom section with the hash of the inputs from which a module was compiled."""
    content = b"\x04made" + hashlib.sha256(inputs).digest()
    return bytes([0, len(content)]) + content


def _download(requirement: str, sha256: str, folder: Path) -> Path:
    """Downloads the source distribution of a package and returns the unpacked folder. pip checks
    the hash of the download."""
    listed = folder / "requirements.txt"
    listed.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    subprocess.check_call([*command, "--requirement", str(listed)])
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    [unpacked] = [path for path in folder.iterdir() if path.is_dir()]
    return unpacked


def _compile(arguments: list[str], to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    # The old file is removed first. Overwriting it would change the code of processes that have
    # loaded it.
    to.unlink(missing_ok=True)
    subprocess.check_call([sys.executable, "-m", "ziglang", "cc", "-o", str(to), *arguments])


setup(cmdclass={"build_py": BuildNative})
