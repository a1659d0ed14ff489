"""Installs clients: ``python -m tests.agents.install openai codex``.

Each client has its own folder in ``build/clients``, with the versions that ``environments`` lists.
If an installation fails, the program still installs the other clients, and then exits with the code
1. If a name is unknown, it installs nothing and exits with the code 2.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

LISTS = Path(__file__).parent / "environments"
"""``NAME.txt`` has the requirements of a Python client, ``NAME/package.json`` those of a Node
client."""
FOLDER = Path(__file__).parents[2] / "build" / "clients"
INSTALL_S = 900.0
"""Time limit of one installation, in seconds. Only a hang reaches this limit."""


def names() -> list[str]:
    """The names of all clients."""
    files = [path for path in LISTS.iterdir() if path.suffix == ".txt" or path.is_dir()]
    return sorted(path.stem for path in files)


def install(name: str) -> None:
    """Installs a client, unless the versions of its list are already installed. Raises an exception
    if the installation fails."""
    listed = LISTS / f"{name}.txt"
    if not listed.exists():
        listed = LISTS / name / "package.json"
    wanted = hashlib.sha256(listed.read_bytes()).hexdigest()
    folder = FOLDER / name
    done = folder / ".installed"
    if done.exists() and done.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    if listed.suffix == ".txt":
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(listed)]
    else:
        folder.mkdir(parents=True)
        shutil.copy(listed, folder)
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_S)
    done.write_text(wanted)
    print(f"installed {name} in {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """Installs the clients that the arguments name, or all clients; returns the exit code."""
    wanted = sys.argv[1:] or names()
    unknown = set(wanted) - set(names())
    if unknown:
        print(f"unknown clients: {', '.join(sorted(unknown))}; valid: {', '.join(names())}")
        return 2
    failed = []
    for name in wanted:
        try:
            install(name)
        except (subprocess.SubprocessError, OSError) as error:
            failed.append(name)
            print(f"the client {name} cannot be installed: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
