"""Runs the engine of a GPU worker without a bus: ``python _serving_engine.py MODEL``.

The engine has a worker's settings. The process reads orders, which ``_serving_client.py``
describes. Its answers have only ``whole``, the tokens per second of the run.
"""

from __future__ import annotations

import sys
import time

from _served import answer, orders
from tokenbus.protocol.settings import load
from tokenbus.workers.gpu.cpu import prepare_environment


def main(model: str) -> None:
    """Handles orders until the end of the input."""
    settings = load(model=model)
    # torch is imported after its environment variables are set, as in the worker.
    prepare_environment(settings.threads)
    from tokenbus.protocol.sampling import Sampling
    from tokenbus.workers.gpu.model.models import Failed, Models, Ready

    models = Models(settings, lambda: None)
    models.want(model)
    while not isinstance(event := models.events.get(), Ready):
        if isinstance(event, Failed):
            raise event.error
    engine = event.engine
    request = 0
    for order in orders():
        began = time.perf_counter()
        for prompt in order["prompts"]:
            request += 1
            sampling = Sampling(max_tokens=order["tokens"], ignore_eos=True)
            engine.add(request, prompt, sampling)
        count = 0
        while engine.has_work:
            count += len(engine.step())
        seconds = time.perf_counter() - began
        assert count == len(order["prompts"]) * order["tokens"]
        answer({"whole": count / seconds})


if __name__ == "__main__":
    main(*sys.argv[1:])
