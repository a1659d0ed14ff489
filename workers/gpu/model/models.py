"""The cache of a worker's loaded models. Models load at start or on demand, and the least recently
used models are evicted."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from ....protocol.errors import Code, RequestError
from ....protocol.messages import ModelInfo
from ....protocol.model_names import adapter_folders
from ....protocol.sampling import SAMPLING_VERSION
from ....protocol.settings import Settings
from ..engine.encoder import EncoderEngine
from ..engine.engine import Engine, EngineConfig
from ..speculation.draft_model import check_draft_model
from .allow_list import is_allowed
from .device_traits import traits_of
from .loader import LOADED, LoadedModel, ModelLoadError, load_model
from .lora.adapters import Adapters
from .lora.peft_layout import AdapterError, read_adapter
from .ranks import Ranks

log = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(slots=True, frozen=True)
class Progress:
    """Reports the progress of loading a model: the fraction that is done (0 to 1), and the
    stage."""

    model: str
    part: float
    stage: str


@dataclass(slots=True, frozen=True)
class Ready:
    """Reports that a model is loaded."""

    model: str
    engine: Engine


@dataclass(slots=True, frozen=True)
class Failed:
    """Reports that a model could not be loaded."""

    model: str
    error: ModelLoadError


LoadEvent = Progress | Ready | Failed


class Models:
    """The cache of loaded models. A separate thread loads models, and adds an event to ``events``
    for each report of progress, success and failure. The worker's loop handles the events.

    ``on_event`` is called from the loading thread when an event has been added.
    """

    def __init__(
        self, settings: Settings, on_event: Callable[[], None], ranks: Ranks | None = None
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._on_event = on_event
        self._engines: OrderedDict[str, Engine] = OrderedDict()
        self._loading: set[str] = set()
        self._draft_model: LoadedModel | None = None
        self._wanted: SimpleQueue[str | None] = SimpleQueue()
        self.events: SimpleQueue[LoadEvent] = SimpleQueue()
        self.default = "" if settings.model == AUTO else settings.model
        self._folders = adapter_folders(settings.lora)
        """The folders of the default model's LoRA adapters, by the names of the adapters."""
        own = [self.default] if self.default else []
        self._patterns = [*map(escape, (*own, *self._folders)), *settings.allow]
        self._loader: threading.Thread | None = None
        """The thread that loads models; None until the first model is requested."""

    @property
    def patterns(self) -> list[str]:
        """The name patterns of models that may be loaded, for the worker's registration."""
        return self._patterns

    @property
    def engines(self) -> dict[str, Engine]:
        """The loaded models."""
        return dict(self._engines)

    def infos(self) -> list[ModelInfo]:
        """The public facts about the loaded models. Any thread may read them."""
        return [
            model_info(engine, adapter)
            for engine in list(self._engines.values())
            for adapter in ("", *engine.loaded.adapter_names)
        ]

    def split(self, name: str) -> tuple[str, str]:
        """The model and the LoRA adapter for which a name stands. If the name is a model's own
        name, the adapter is empty."""
        return (self.default, name) if name in self._folders else (name, "")

    def get(self, name: str) -> Engine | None:
        """Returns the engine of a model, and marks the model as the most recently used. Returns
        None if the model is not loaded."""
        if name in self._engines:
            self._engines.move_to_end(name)
        return self._engines.get(name)

    def want(self, name: str) -> None:
        """Queues a model for the thread that loads models, unless the model is already queued or
        being loaded. Raises RequestError if the model is not allowed."""
        if name in self._loading:
            return
        if name != self.default and not is_allowed(name, self._settings.allow):
            raise RequestError(
                Code.UNKNOWN_MODEL,
                f"the model {name!r} is not in the allow-list ({', '.join(self._patterns)})",
                path="$.model",
            )
        self._loading.add(name)
        self._wanted.put(name)
        if self._loader is None:
            self._loader = threading.Thread(target=self._load_all, name="model-loader", daemon=True)
            self._loader.start()

    def loaded(self, event: Ready | Failed) -> None:
        """Handles the end of a load."""
        self._loading.discard(event.model)
        if isinstance(event, Ready):
            self._engines[event.model] = event.engine

    @property
    def excess(self) -> int:
        """Number of loaded models above ``max_models``. Such models were in use when another model
        was loaded, so they were not evicted."""
        return max(0, len(self._engines) - self._settings.max_models)

    def evict(self, used: Container[str]) -> list[str]:
        """Unloads models that are not in ``used``, the least recently used first, until at most
        ``max_models`` are left or no further model can be unloaded. The most recently used model
        always stays. Returns the names of the unloaded models."""
        idle = [name for name in list(self._engines)[:-1] if name not in used]
        evicted = idle[: self.excess]
        for name in evicted:
            del self._engines[name]
            if self._ranks is not None:
                self._ranks.drop(name)
        if evicted:
            # torch caches freed memory. The KV cache of the next model could not use this memory.
            torch.cuda.empty_cache()
        return evicted

    def unload(self, name: str) -> None:
        """Unloads a model that no stream uses."""
        del self._engines[name]
        if self._ranks is not None:
            self._ranks.drop(name)

    def close(self) -> None:
        """Ends the loader's thread when it has loaded the queued models."""
        self._wanted.put(None)

    # --- the loader's thread --------------------------------------------------------------------

    def _load_all(self) -> None:
        while (name := self._wanted.get()) is not None:
            self._load(name)

    def _load(self, name: str) -> None:
        settings = self._settings

        def progress(part: float, stage: str) -> None:
            self._report(Progress(name, part, stage))

        try:
            options: dict[str, Any] = {
                "device": settings.device,
                "dtype": settings.dtype,
                "quantize": settings.quantize,
                "trust_remote_code": settings.trust_remote_code,
                "parallel": self._ranks is not None,
            }
            together = self._ranks.loading(name, options) if self._ranks else nullcontext()
            with together:
                loaded = load_model(name, **options, progress=progress)
            loaded.adapters = self._adapters_for(loaded)
            if not loaded.causal:
                self._report(Ready(name, EncoderEngine(loaded)))
                return
            loaded.ranks = self._ranks
            draft_model = self._draft_model_for(loaded)
            engine = Engine(
                loaded,
                self._config_of(loaded),
                draft_model,
                lambda part, stage: progress(LOADED + (1 - LOADED) * part, stage),
            )
            self._report(Ready(name, engine))
        except ModelLoadError as error:
            self._report(Failed(name, error))
        except BaseException as error:
            # A checkpoint's own code may raise SystemExit. This thread then continues with other
            # models.
            reason = f"{name}: loading failed: {type(error).__name__}: {error}"
            self._report(Failed(name, ModelLoadError(reason)))

    def _config_of(self, loaded: LoadedModel) -> EngineConfig:
        """The configuration of a model's engine."""
        settings = self._settings
        return EngineConfig(
            max_num_seqs=settings.max_running,
            kv_cache_bytes=settings.kv_cache_bytes or None,
            memory_part=memory_part(settings),
            max_forks=settings.controller_forks,
            compiled=settings.compile,
            require_fast_attention=settings.require_fast_attention,
            fixed_threads=bool(settings.threads),
            exact=settings.exact,
            overlap=_overlaps(settings, loaded),
            speculation=settings.speculation != "off",
        )

    def _adapters_for(self, loaded: LoadedModel) -> Adapters | None:
        """The LoRA adapters of a model; None for a model other than the default model. Raises
        ModelLoadError if the engine cannot serve an adapter."""
        if not self._folders or loaded.name != self.default:
            return None
        why = ""
        if not loaded.causal:
            why = "is an encoder"
        elif self._ranks is not None:
            why = "is spread over several devices (tp)"
        elif self._settings.compile:
            why = "runs through torch.compile"
        elif self._settings.exact == "on":
            why = "must be exact (the setting exact is on)"
        if why:
            raise ModelLoadError(f"{loaded.name!r} {why} and cannot have LoRA adapters")
        try:
            found = [read_adapter(name, Path(place)) for name, place in self._folders.items()]
            return Adapters(loaded.model, found)
        except AdapterError as error:
            raise ModelLoadError(str(error)) from error

    def _draft_model_for(self, loaded: LoadedModel) -> LoadedModel | None:
        """The draft model, loaded at its first use. None if no draft model is configured, if
        ``speculation`` is ``off``, or if the draft model cannot draft for this model. Raises
        ModelLoadError if the draft model cannot be loaded, or cannot draft for the default
        model."""
        settings = self._settings
        if not settings.draft_model or settings.speculation == "off":
            return None
        if self._draft_model is None:
            self._draft_model = load_model(
                settings.draft_model,
                device=settings.device,
                dtype=settings.dtype,
                trust_remote_code=settings.trust_remote_code,
            )
        try:
            check_draft_model(loaded, self._draft_model)
        except ModelLoadError as error:
            if loaded.name == self.default:
                raise
            log.info("%s runs without a draft model: %s", loaded.name, error)
            return None
        return self._draft_model

    def _report(self, event: LoadEvent) -> None:
        self.events.put(event)
        self._on_event()


def device_works(device: torch.device) -> bool:
    """Whether a device can still compute. Some errors make a CUDA context unusable."""
    try:
        return torch.ones((), device=device).add(1).item() == 2
    except RuntimeError:
        return False


def model_info(engine: Engine, adapter: str = "") -> ModelInfo:
    """The public facts about a model, or about one of its LoRA adapters."""
    loaded = engine.loaded
    return ModelInfo(
        name=adapter or loaded.name,
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        eos_token_ids=sorted(loaded.eos_token_ids),
        fingerprint=loaded.fingerprint,
        architecture=type(loaded.model).__name__,
        parameters=loaded.num_parameters,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        sampling=SAMPLING_VERSION,
        path=engine.path_of(adapter),
        parent=loaded.name if adapter else "",
        adapter=loaded.adapters.hash(adapter) if adapter and loaded.adapters is not None else "",
    )


def memory_part(settings: Settings) -> float:
    """The value of ``EngineConfig.memory_part`` for each model: all models that may be loaded at
    the same time have equal parts."""
    return 1 / settings.max_models if settings.allow or settings.model == AUTO else 1.0


def _overlaps(settings: Settings, loaded: LoadedModel) -> bool:
    """Whether the steps of a model overlap with the host's work."""
    if settings.overlap == "auto":
        return traits_of(loaded.device).overlaps
    return settings.overlap == "on"
