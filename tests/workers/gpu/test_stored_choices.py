"""The choice among attention kernels by their measured time, and the file that stores it."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch
from tokenbus.workers.gpu.model.cuda import choice, stored_choices
from tokenbus.workers.gpu.model.kv_cache import Kernel
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model

KERNELS: tuple[Kernel, ...] = ("varlen", "fa3", "triton")
SECONDS = {"varlen": 3.0, "fa3": 1.0, "triton": 2.0}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("embedded")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Kernel]]:
    """The kernels that were timed, in order. The time of a kernel's run is its value in
    ``SECONDS``."""
    found: list[Kernel] = []

    class Trial:
        def __init__(self, loaded: object, shape: object, kernel: Kernel, case: object) -> None:
            self._kernel = kernel

        def seconds(self) -> float:
            found.append(self._kernel)
            return SECONDS[self._kernel]

    monkeypatch.setattr(choice, "Trial", Trial)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(stored_choices, "DRIVER", tmp_path / "driver")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "driver").write_text("NVRM version: 570\n")
    stored_choices._chosen.clear()
    yield found
    stored_choices._chosen.clear()


def restart(timed: list[Kernel]) -> None:
    """Simulates a new process, which has only the file."""
    timed.clear()
    stored_choices._chosen.clear()


def test_the_fastest_kernel_is_used_and_not_measured_again(
    loaded: LoadedModel, timed: list[Kernel]
) -> None:
    assert choice._fastest(loaded, KERNELS) == "fa3"
    assert set(timed) == set(KERNELS)
    restart(timed)
    assert choice._fastest(loaded, KERNELS) == "fa3"
    assert not timed
    assert [file.name for file in stored_choices.path().parent.iterdir()] == ["attention.json"]


@pytest.mark.parametrize("changed", ["card", "driver", "torch", "kernels"])
def test_a_choice_is_measured_again_after_a_change(
    loaded: LoadedModel, timed: list[Kernel], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice._fastest(loaded, KERNELS)
    restart(timed)
    kernels = KERNELS
    if changed == "card":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another card")
    elif changed == "driver":
        stored_choices.DRIVER.write_text("NVRM version: 580\n")
    elif changed == "torch":
        monkeypatch.setattr(stored_choices, "_version", lambda library: "9")
    else:
        kernels = ("varlen", "triton")
    assert choice._fastest(loaded, kernels) == ("triton" if changed == "kernels" else "fa3")
    assert set(timed) == set(kernels)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"\xff\xfe\x00",
        lambda content: b"[1, 2]",
        lambda content: content.replace(b'"fa3"}', b'"fa9"}'),
    ],
    ids=["empty", "cut", "not text", "a list", "an unknown kernel"],
)
def test_a_file_that_cannot_be_read_is_replaced(
    loaded: LoadedModel, timed: list[Kernel], spoil: Callable[[bytes], bytes]
) -> None:
    choice._fastest(loaded, KERNELS)
    restart(timed)
    file = stored_choices.path()
    file.write_bytes(spoil(file.read_bytes()))
    assert choice._fastest(loaded, KERNELS) == "fa3"
    assert timed
    restart(timed)
    assert choice._fastest(loaded, KERNELS) == "fa3"
    assert not timed


def test_a_choice_of_a_kernel_that_no_longer_works_is_not_used(
    loaded: LoadedModel, timed: list[Kernel]
) -> None:
    key = stored_choices.key_of(loaded, choice.heads_per_key_head(loaded), KERNELS)
    stored_choices.store(key, "gather")
    assert choice._fastest(loaded, KERNELS) == "fa3"


def test_a_folder_that_cannot_be_written_costs_only_the_next_measurement(
    loaded: LoadedModel, timed: list[Kernel]
) -> None:
    stored_choices.path().parent.write_text("a file where the folder should be")
    for _ in range(2):
        assert choice._fastest(loaded, KERNELS) == "fa3"
    assert len(timed) == len(KERNELS) * len(choice.TIMED)


def test_a_user_without_a_home_directory_measures_at_each_start(
    loaded: LoadedModel, timed: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(number: int) -> NoReturn:
        raise KeyError(number)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for _ in range(2):
        restart(timed)
        assert choice._fastest(loaded, KERNELS) == "fa3"
        assert timed


def test_the_oldest_choices_are_dropped(
    timed: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_choices, "MAX_CHOICES", 3)
    for number in range(5):
        stored_choices.store(str(number), "triton")
    assert list(msgspec.json.decode(stored_choices.path().read_bytes())) == ["2", "3", "4"]
