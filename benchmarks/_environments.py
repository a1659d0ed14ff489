"""Creates virtual environments for other engines (peers), because their packages conflict with the
packages of this project."""

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
"""The packages that LMQL's client imports. LMQL's package also requires openai and tiktoken, which
the client does not import."""


def environment(
    name: str, packages: Sequence[str], alone: Sequence[str] = (), borrow: bool = False
) -> Path:
    """Creates the virtual environment ``name`` unless it exists with these packages. Returns the
    path of its Python.

    The packages in ``packages`` are installed with their dependencies. The packages in ``alone``
    are installed without dependencies. With ``borrow``, the environment imports missing packages
    from this process's environment. So a large package such as torch is not installed again. Raises
    CalledProcessError if pip fails.
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
        # This process's pip installs the packages, because a pip in the new environment would take
        # seconds to install.
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
        pip += ["--quiet", "--disable-pip-version-check"]
        for arguments in (["--no-deps", *alone], list(packages)):
            if arguments != ["--no-deps"]:
                subprocess.run([*pip, *arguments], check=True, stdout=sys.stderr)
        made.write_text(wanted)
    return python


def lmql_client() -> Path:
    """Creates the environment with LMQL's client and the packages that the client imports; returns
    the path of its Python."""
    return environment("lmql-client", LMQL_CLIENT_NEEDS, alone=[LMQL])


def lmql(transformers: int) -> Path:
    """Creates the environment with LMQL and the packages that LMQL imports; returns the path of its
    Python. ``transformers``: the major version of the package transformers, whose tokenizer LMQL
    uses."""
    version = f"transformers>={transformers},<{transformers + 1}"
    needs = (*LMQL_CLIENT_NEEDS, "astunparse==1.6.3", "openai", "tiktoken", version)
    return environment(f"lmql-transformers-{transformers}", needs, alone=[LMQL], borrow=True)


def lmql_server() -> Path:
    """Creates the environment with LMQL's server, which needs an old version of transformers;
    returns the path of its Python."""
    needs = (*LMQL_CLIENT_NEEDS, "transformers<4.45")
    return environment("lmql-server", needs, alone=[LMQL], borrow=True)


def _borrow(python: Path) -> None:
    """Appends the folders of this process's packages to the import path of another environment."""
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    ours = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(found.stdout.strip(), "borrowed.pth").write_text("\n".join(ours) + "\n")
