"""Virtual environments for peers whose packages must not be ours, made once and kept."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "environments"
LMQL = "lmql==0.7.3"
LMQL_CLIENT_NEEDS = ("aiohttp<4", "numpy", "termcolor")
"""The imports of LMQL's client. The package itself also wants those of OpenAI and tiktoken."""


def environment(
    name: str, packages: Sequence[str], alone: Sequence[str] = (), borrow: bool = False
) -> Path:
    """The Python of a virtual environment with these packages, made unless it is there.

    ``alone`` are installed without what they depend on. ``borrow``: what is not installed in it is
    taken from the environment of this process, as torch, which is large. Raises
    CalledProcessError where pip fails.
    """
    folder = FOLDER / name
    python = folder / "bin" / "python"
    made = folder / "made"
    wanted = repr((sorted(packages), sorted(alone), borrow))
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists() and made.read_text() == wanted:
            return python
        venv.create(folder, clear=True)
        if borrow:
            _borrow(python)
        # Our own pip, as copying it into the environment takes seconds.
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
        pip += ["--quiet", "--disable-pip-version-check"]
        for arguments in (["--no-deps", *alone], list(packages)):
            if arguments != ["--no-deps"]:
                subprocess.run([*pip, *arguments], check=True, stdout=sys.stderr)
        made.write_text(wanted)
    return python


def lmql_client() -> Path:
    """LMQL's client and what it imports."""
    return environment("lmql-client", LMQL_CLIENT_NEEDS, alone=[LMQL])


def lmql(transformers: int) -> Path:
    """All of LMQL, with this major version of transformers for the tokenizers of models."""
    version = f"transformers>={transformers},<{transformers + 1}"
    needs = (*LMQL_CLIENT_NEEDS, "astunparse==1.6.3", "openai", "tiktoken", version)
    return environment(f"lmql-transformers-{transformers}", needs, alone=[LMQL], borrow=True)


def lmql_server() -> Path:
    """LMQL's own server, which needs transformers of its time."""
    needs = (*LMQL_CLIENT_NEEDS, "transformers<4.45")
    return environment("lmql-server", needs, alone=[LMQL], borrow=True)


def _borrow(python: Path) -> None:
    """Appends our own packages to the path of another environment, behind its own."""
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    ours = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(found.stdout.strip(), "borrowed.pth").write_text("\n".join(ours) + "\n")
