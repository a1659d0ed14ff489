"""Names of models as Ollama's clients write them."""

from __future__ import annotations

from ..context import Gateway

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without a tag."""


async def served_name(gateway: Gateway, name: str) -> str:
    """The name under which the model ``name`` is served. Removes the tag ``:latest`` if a model is
    loaded under the name without the tag, but not under the name with the tag."""
    if not name.endswith(LATEST):
        return name
    loaded = await loaded_names(gateway)
    plain = name.removesuffix(LATEST)
    return plain if name not in loaded and plain in loaded else name


async def loaded_names(gateway: Gateway) -> list[str]:
    """The names of the loaded models, sorted."""
    status = await gateway.client.status()
    return sorted({name for worker in status.workers for name in worker.models})
