"""``benchmarks/engine_gpu.py`` measures the engine as a worker runs it, and reports the path that
runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from tokenbus.workers.gpu.model.loader import load_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_it_measures_overlapping_steps_and_prints_what_runs_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import engine_gpu  # type: ignore[import-not-found]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a test's device")
    monkeypatch.setattr(engine_gpu, "CACHE_BYTES", 2**24)
    loaded = load_model("embedded")
    try:
        assert engine_gpu.make_engine(loaded).overlaps
        assert not engine_gpu.make_engine(loaded, overlap=False).overlaps
        engine_gpu.describe(loaded, engine_gpu.Results())
    finally:
        sys.modules.pop("engine_gpu")
    shown = capsys.readouterr().err
    assert re.search("over (gathered )?blocks", shown)
    assert "fast_attention 0" in shown
    assert "graphs 0" in shown
