"""A GPU worker with a model of 8B and random weights: ``python _gpu_worker.py``.

The worker has the tokenizer of the configured checkpoint. Only the weights are different from a
normal worker's. They are made on the device, so that loading them does not take time.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

from _gpu_world import SHAPES, World
from tokenbus.protocol import logs
from tokenbus.protocol.settings import load
from tokenbus.workers.gpu.model import models
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model
from tokenbus.workers.gpu.worker import GpuWorker
from transformers import AutoTokenizer


def load_model(name: str, **_: Any) -> LoadedModel:
    """The random model, with the tokenizer of the checkpoint ``name``."""
    world = World(7, False, Path(tempfile.gettempdir()) / "unused", 600.0)
    model = world.random_llama(**SHAPES["8b"])
    return wrap_model(name, model, AutoTokenizer.from_pretrained(name))


def main() -> None:
    """Serves until SIGTERM."""
    settings = load()
    logs.set_up(settings, "gpu")
    models.load_model = load_model  # type: ignore[assignment]
    worker = GpuWorker(settings)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop("the measurement has ended"))
    worker.run()


if __name__ == "__main__":
    main()
