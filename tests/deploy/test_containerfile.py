"""CI runs the steps that build the container image, and the files that the image needs exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from .manifests import ROOT, pods


def instructions(name: str) -> list[str]:
    """The arguments of all instructions with this name."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    return [m[1].strip() for m in re.finditer(rf"^{name}\s+(.*)$", text, re.MULTILINE)]


def copied() -> set[str]:
    """The files and folders that are copied into the image."""
    sources = [line.split()[:-1] for line in instructions("COPY") if "--from" not in line]
    return {source for line in sources for source in line}


def test_every_step_is_one_that_ci_runs() -> None:
    steps = instructions("RUN")
    run_by_ci = re.findall(r"^(make \S+) </dev/null$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert steps
    assert set(steps) <= set(run_by_ci)


def test_what_is_installed_is_part_of_what_the_tests_run_with() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert "tokenbus[all]" in extras["dev"]


def test_the_image_has_every_file_that_its_step_needs() -> None:
    there = copied()
    assert all((ROOT / name).exists() for name in there)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(project["tool"]["setuptools"]["package-dir"].values())
    needed = {"Makefile", "pyproject.toml", "setup.py", project["project"]["readme"]}
    needed |= {*project["project"]["license-files"], *folders}
    assert needed <= there
    outside = {
        link.readlink()
        for folder in folders
        for link in (ROOT / folder).iterdir()
        if link.is_symlink()
    }
    assert {path.name for path in outside} <= there


@pytest.mark.process
def test_make_has_the_step() -> None:
    for step in instructions("RUN"):
        made = subprocess.run(
            [*step.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        assert "'.[all]'" in made


@pytest.mark.process
def test_the_user_of_the_image_is_that_of_the_pods() -> None:
    (user,) = instructions("USER")
    for pod in pods("gpu").values():
        context = pod["spec"]["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
        assert Path("/opt/tokenbus/.venv/bin") in map(Path, path_of_image())


def path_of_image() -> list[str]:
    """The folders in which the image looks for programs."""
    (line,) = instructions("ENV")
    found = re.search(r"PATH=(\S+)", line)
    assert found
    return found[1].split(":")
