"""Loads a model and its tokenizer, and checks that this engine can run it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
)

from ....protocol.messages import Quantized
from ....protocol.model_paths import path_fault
from ....protocol.text_bounds import TokenSize, size_of_tokenizer, token_size
from .. import embedded
from . import checkpoint, quantization
from .cpu_native.decoder import Unsupported, check_supported
from .cpu_native.library import library
from .fused.decoder import AttentionOptions, FusedDecoder
from .fused.from_transformers import NotFusible, fused_model
from .kv_cache import LayerShape
from .lora.adapters import Adapters
from .quantization import NotQuantizable
from .ranks import Ranks
from .special_tokens import special_tokens
from .transformers.attention import dot_product, register
from .weights import weights_version

log = logging.getLogger(__name__)

OnProgress = Callable[[float, str], None]
"""A function to call with the loaded fraction, 0 to 1, and the current stage."""

LOADED = 0.95
"""The fraction that is reported (``OnProgress``) when the model is in memory."""

PROBE = "tokenbus_probe"
PROBE_TOKENS = 4
PROBE_TOLERANCE = 0.05
"""Greatest allowed difference between the logits of a forward with plain attention (``_probe``) and
the logits of a forward with transformers' own attention. The difference is relative to the standard
deviation of the logits. Rounding in bfloat16 causes smaller differences. Attention that the engine
does not support causes far larger differences."""

OFFSET_POSITIONS = frozenset(("roberta", "xlm-roberta", "camembert", "mpnet"))
"""Types of encoders that number positions from the id of the padding token plus 1. So fewer
positions are usable."""

FUSED_TOLERANCE = 1e-3
"""Greatest allowed difference in float32 between the logits of a faster forward, such as the fused
decoder, and the logits of the forward that it replaces. The difference is relative to the standard
deviation of the logits. Other types round more coarsely, so their limit is ``PROBE_TOLERANCE``."""


class ModelLoadError(Exception):
    """The model cannot be loaded or run; the message says why."""


@dataclass(slots=True)
class LoadedModel:
    """A model that is ready to run, and its properties."""

    name: str
    model: Any
    tokenizer: Any
    """The tokenizer; None if the checkpoint does not contain one. Requests must then use token
    ids."""
    vocab_size: int
    context_length: int
    """Maximum number of tokens of a sequence: its prompt and its output."""
    eos_token_ids: frozenset[int]
    special_tokens: dict[str, int]
    """The ids of the special tokens by role (``special_tokens.py``), for controllers."""
    fingerprint: str
    """SHA-256 of ``tokenizer_json`` as canonical JSON. If ``tokenizer_json`` is None, SHA-256 of
    the vocabulary as canonical JSON. Empty without a tokenizer."""
    tokenizer_json: bytes | None
    """The tokenizer as the tokenizers library writes it. It is stored because writing it takes up
    to a second. None if the library cannot represent the tokenizer."""
    num_parameters: int
    dtype: torch.dtype
    device: torch.device
    layers: dict[int, LayerShape]
    """By layer: the shapes of one token's keys and values on this rank. Empty for an encoder."""
    soft_caps: bool = False
    """Whether the attention caps scores before the softmax (Gemma 2)."""
    decoder: FusedDecoder | None = None
    """Computes the model's forward with few operations. If this field is None, the engine runs the
    model's own modules."""
    ranks: Ranks | None = None
    """The other ranks, if the model is spread over several devices."""
    weights: str = ""
    """The version of the weights (``weights_version``); empty for an encoder."""
    version: int = 0
    """The version of the weights as the broker counts it; 0 until the weights are replaced."""
    token_size: TokenSize | None = None
    """The greatest amount of text that one token can represent; None without a tokenizer."""
    quantized: Quantized | None = None
    """The result of quantizing the weights; None if ``load_model`` has not quantized them."""
    causal: bool = True
    """Whether the model generates. If not, it is an encoder, which only computes vectors of
    texts."""
    adapters: Adapters | None = None
    """The LoRA adapters of the model; None if it does not have any."""

    @property
    def adapter_names(self) -> Iterable[str]:
        """The names of the LoRA adapters."""
        return self.adapters.names if self.adapters is not None else ()

    def adapter_number(self, name: str) -> int:
        """The number of a LoRA adapter; 0 if ``name`` is empty."""
        return self.adapters.number(name) if self.adapters is not None else 0


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "none",
    trust_remote_code: bool = False,
    parallel: bool = False,
    progress: OnProgress = lambda part, stage: None,
) -> LoadedModel:
    """Loads a causal language model or an encoder by path or name on a hub (``checkpoint.py``);
    ``embedded`` is the model in this package.

    ``dtype`` ``auto`` is float32 on a CPU, and the checkpoint's own type on a GPU. Quantized
    checkpoints load as in transformers. ``quantize`` ``int8`` or ``int4`` quantizes the weights of
    other checkpoints. ``parallel``: whether this process is one of several ranks, and loads only
    its part of the model. Raises ModelLoadError.
    """
    where = _device(device)
    if quantize == "int4" and dtype == "auto":
        dtype = "bfloat16"  # The kernels for int4 are made for this type.
    common = {"trust_remote_code": trust_remote_code}
    try:
        progress(0.0, "reading the configuration")
        if name != embedded.NAME and Path(name).exists():
            _check_path(name)
        found = checkpoint.find(name).fetched()
        config = AutoConfig.from_pretrained(found.place, **found.options, **common)
        progress(0.05, "loading the tokenizer")
        tokenizer = _load_tokenizer(found.place, found.options | common)
        progress(0.1, "loading the weights")
        kind = _class_of(name, config, parallel, quantize)
        with _weights_progress(progress):
            spread = {"tp_plan": "auto"} if parallel else {"device_map": {"": where}}
            model: Any = kind.from_pretrained(
                found.place,
                config=config,
                dtype=_dtype(dtype, where),
                **spread,
                **found.weights_options,
                **common,
            )
        model = model.eval()
        _avoid_failing_attention(model)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"cannot load the model {name!r}: {_reason(error)}") from error
    if quantize != "none":
        progress(LOADED, "quantizing the weights")
        return _quantized(name, model, tokenizer, quantize)
    progress(LOADED, "trying the model")
    if kind is AutoModel:
        return wrap_encoder(name, model, tokenizer)
    return wrap_model(name, model, tokenizer, parallel=parallel)


def _avoid_failing_attention(model: Any) -> None:
    """Turns torch's flash attention off if it fails on this CPU. For 64 rows of a 16-bit type, it
    fails if oneDNN uses AMX or AVX-512 while ``ATEN_CPU_CAPABILITY`` selects a lower instruction
    set."""
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float16):
        return
    rows = torch.zeros(1, 1, 64, 64, dtype=model.dtype)
    try:
        scaled_dot_product_attention(rows, rows, rows)
    except RuntimeError as error:
        log.warning("torch's flash attention is off, because it fails here: %s", error)
        torch.backends.cuda.enable_flash_sdp(False)  # The setting also applies to CPUs.


def _quantized(name: str, model: Any, tokenizer: Any, kind: str) -> LoadedModel:
    try:
        quantized = quantization.quantize(name, model, tokenizer, kind)
    except NotQuantizable as error:
        raise ModelLoadError(f"{name!r} cannot be quantized: {error}") from None
    except Exception as error:
        raise ModelLoadError(f"cannot quantize {name!r} to {kind}: {_reason(error)}") from error
    loaded = wrap_model(name, model, tokenizer)
    loaded.quantized = quantized
    return loaded


def wrap_model(
    name: str, model: Any, tokenizer: Any = None, *, parallel: bool = False
) -> LoadedModel:
    """Prepares a loaded model of transformers for the engine. ``parallel``: whether ``model`` is
    one rank's part of a model; such a part is not fused. Raises ModelLoadError if the engine cannot
    run the model.
    """
    config = model.config.get_text_config()
    embeddings = model.get_output_embeddings()
    vocab_size = embeddings.weight.shape[0] if embeddings is not None else config.vocab_size
    parameter = next(model.parameters())
    layers, options = _probe(name, model)
    tokenizer_json = _tokenizer_json(tokenizer)
    eos = _eos_token_ids(model, tokenizer)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context_length=getattr(config, "max_position_embeddings", None) or 2048,
        eos_token_ids=eos,
        special_tokens=special_tokens(tokenizer, eos),
        fingerprint=_fingerprint(tokenizer, tokenizer_json),
        tokenizer_json=tokenizer_json,
        num_parameters=model.num_parameters(),
        dtype=parameter.dtype,
        device=parameter.device,
        layers=layers,
        soft_caps=any(o.softcap is not None for o in options.values()),
        decoder=None if parallel else _fused(name, model, layers, options),
        weights=weights_version(model),
        token_size=_token_size(tokenizer, tokenizer_json),
    )


def is_encoder(config: PretrainedConfig) -> bool:
    """Whether a checkpoint is an encoder: a model that fills masks and does not generate."""
    names = getattr(config, "architectures", None) or []
    generates = any("ForCausalLM" in name or "LMHead" in name for name in names)
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    return masked and not generates and not config.is_encoder_decoder


def _class_of(name: str, config: PretrainedConfig, parallel: bool, quantize: str) -> Any:
    if parallel and quantize != "none":
        raise ModelLoadError(f"{name!r} is spread over several devices; set tp to 1 for --quantize")
    if not is_encoder(config):
        return AutoModelForCausalLM
    if quantize != "none":
        raise ModelLoadError(f"{name!r} is an encoder, which --quantize does not support")
    if parallel:
        raise ModelLoadError(f"{name!r} is an encoder, which runs on one device; set tp to 1")
    return AutoModel


def wrap_encoder(name: str, model: Any, tokenizer: Any = None) -> LoadedModel:
    """Prepares a loaded encoder of transformers for the engine."""
    parameter = next(model.parameters())
    tokenizer_json = _tokenizer_json(tokenizer)
    longest = getattr(model.config, "max_position_embeddings", None) or 512
    if model.config.model_type in OFFSET_POSITIONS:
        longest -= (model.config.pad_token_id or 0) + 1
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        vocab_size=model.config.vocab_size,
        context_length=longest,
        eos_token_ids=frozenset(),
        special_tokens=special_tokens(tokenizer, frozenset()),
        fingerprint=_fingerprint(tokenizer, tokenizer_json),
        tokenizer_json=tokenizer_json,
        num_parameters=model.num_parameters(),
        dtype=parameter.dtype,
        device=parameter.device,
        layers={},
        token_size=_token_size(tokenizer, tokenizer_json),
        causal=False,
    )


# --- can the engine run it? -----------------------------------------------------------------------


def _probe(name: str, model: Any) -> tuple[dict[int, LayerShape], dict[int, AttentionOptions]]:
    """Runs a forward over a few tokens, and records the shapes of each layer's keys and values and
    the options of the layer's attention.

    Raises ModelLoadError if the forward fails, or if its logits differ from the logits of a forward
    with transformers' own attention.
    """
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name!r} is an encoder-decoder ({kind}), not a causal model")
    before = model.config._attn_implementation
    layers: dict[int, LayerShape] = {}
    options: dict[int, AttentionOptions] = {}

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any
    ) -> Any:
        if given.get("packed_batch") != PROBE:
            raise ModelLoadError(f"{kind} does not pass keyword arguments to its attention")
        if given.get("s_aux") is not None:
            raise ModelLoadError(f"{kind} uses attention sinks")
        if not getattr(module, "is_causal", True):
            raise ModelLoadError(f"{kind} has attention that is not causal")
        layer = module.layer_idx
        layers[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        options[layer] = AttentionOptions(
            given.get("scaling"), given.get("sliding_window"), given.get("softcap")
        )
        return _plain_attention(query, key, value, options[layer]).unsqueeze(0), None

    ids = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    try:
        with torch.inference_mode():
            model.set_attn_implementation("eager")
            expected = model(ids, position_ids=ids, use_cache=False).logits.float()
            register(PROBE, attention)
            model.set_attn_implementation(PROBE)
            found = model(ids, position_ids=ids, use_cache=False, packed_batch=PROBE).logits.float()
    except Exception as error:
        raise ModelLoadError(
            f"the engine cannot run {name!r}, a {kind}: {_reason(error)}"
        ) from error
    finally:
        model.set_attn_implementation(before)
    if not layers:
        raise ModelLoadError(
            f"the engine cannot run {name!r}: {kind} does not use transformers' attention interface"
        )
    distance = difference(found, expected)
    if not distance <= PROBE_TOLERANCE:
        raise ModelLoadError(
            f"the engine cannot run {name!r}: {kind} changes its attention in a way that the "
            f"engine does not support (its logits differ by {distance:.3g} standard deviations)"
        )
    return layers, options


def _fused(
    name: str,
    model: Any,
    layers: dict[int, LayerShape],
    options: dict[int, AttentionOptions],
) -> FusedDecoder | None:
    """The model as a FusedDecoder. None if the structure of the model is unknown, or if the
    decoder's logits differ from the model's logits. The comparison includes positions up to the end
    of the context."""

    def attend(
        layer: int, query: Any, key: Any, value: Any, context: Any, **given: Any
    ) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        return _plain_attention(q, k, v, AttentionOptions(**given))

    before = model.config._attn_implementation
    ids = torch.arange(PROBE_TOKENS, device=model.device)
    furthest = (getattr(model.config, "max_position_embeddings", None) or 2048) - 1
    positions = torch.tensor([0, 1, furthest // 3, furthest], device=model.device)
    try:
        decoder = _read(model, layers, options)
        with torch.inference_mode():
            model.set_attn_implementation(PROBE)
            expected = model(
                ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                packed_batch=PROBE,
            ).logits[0]
            found = decoder.forward(ids, positions, ids, None, attend)
        distance = difference(found.float(), expected.float())
        limit = FUSED_TOLERANCE if found.dtype == torch.float32 else PROBE_TOLERANCE
        if not distance <= limit:
            raise NotFusible(f"the logits would differ by {distance:.3g} standard deviations")
    except Exception as error:
        why = _reason(error)
        log.info("%s runs as transformers' modules, since it cannot be fused: %s", name, why)
        return None
    finally:
        model.set_attn_implementation(before)
    return decoder


def _read(
    model: Any, layers: dict[int, LayerShape], options: dict[int, AttentionOptions]
) -> FusedDecoder:
    """Makes the FusedDecoder of a model. If native code supports the model, all weights are stored
    as ``[out, in]``, because native code reads them in this order."""
    if library() is not None:
        decoder = fused_model(model, layers, options, by_input=False)
        try:
            check_supported(decoder)
            return decoder
        except Unsupported:
            pass
    return fused_model(model, layers, options)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference of logits, relative to the standard deviation of ``expected``."""
    distance = (found - expected).abs().max() / (expected.std() + 1e-6)
    return distance.item()


def _plain_attention(q: Any, k: Any, v: Any, options: AttentionOptions) -> torch.Tensor:
    """Causal attention over one short sequence. Queries, keys and values are ``[1, heads,
    num_tokens, dim]``, and the result is ``[num_tokens, heads, dim]``."""
    length = q.shape[2]
    positions = torch.arange(length, device=q.device)
    hidden = positions > positions.unsqueeze(-1)
    if options.sliding_window:
        hidden |= positions <= positions.unsqueeze(-1) - options.sliding_window
    mask = torch.zeros(1, 1, length, length, dtype=q.dtype, device=q.device)
    mask = mask.masked_fill_(hidden, float("-inf"))
    found = dot_product(q, k, v, mask, options.scaling, options.softcap, causal=False)
    return found.transpose(1, 2)[0]


# --- parts of loading -----------------------------------------------------------------------------


def _check_path(name: str) -> None:
    fault = path_fault(name)
    if fault is not None:
        raise ModelLoadError(f"cannot load the model {name!r}: {fault}")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(f"device {name!r} cannot be used: {_reason(error)}") from None
    return device


def _dtype(name: str, device: torch.device) -> Any:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelLoadError(
            f"{name!r} is not a floating-point dtype; use auto, float32, bfloat16 or float16"
        )
    return found


def _load_tokenizer(place: str, common: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(place, **common)
    except Exception as error:
        if Path(place).is_dir() and not list(Path(place).glob("token*")):
            return None
        raise ModelLoadError(f"cannot load the tokenizer of {place!r}: {_reason(error)}") from error


@contextmanager
def _weights_progress(progress: OnProgress) -> Iterator[None]:
    """Converts transformers' progress bar for weights into calls of ``progress``."""

    class Bar:
        def __init__(self, iterable: Any = None, *, total: int | None = None, **_: Any) -> None:
            self._items = iterable
            self._total = total or (len(iterable) if hasattr(iterable, "__len__") else 0)
            self._done = 0
            self._reported = 0.0

        def __iter__(self) -> Iterator[Any]:
            for item in self._items:
                yield item
                self.update()

        def update(self, n: int = 1) -> None:
            self._done += n
            part = self._done / self._total if self._total else 0.0
            if part - self._reported >= 0.02:
                self._reported = part
                progress(0.1 + 0.8 * part, "loading the weights")

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    logging_ = transformers.utils.logging
    before = logging_.set_tqdm_hook(lambda factory, args, kwargs: Bar(*args, **kwargs))
    try:
        yield
    finally:
        logging_.set_tqdm_hook(before)


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    for holder in (model.generation_config, model.config.get_text_config(), tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()


def _tokenizer_json(tokenizer: Any) -> bytes | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    written: str = backend.to_str()
    return written.encode()


def _token_size(tokenizer: Any, tokenizer_json: bytes | None) -> TokenSize | None:
    if tokenizer is None:
        return None
    with suppress(Exception):
        # The first call sets the tokenizer's option for special tokens. Later calls may be on
        # several threads, and do not change the option.
        tokenizer.encode("a")
    if tokenizer_json is None:
        return token_size(tokenizer.get_vocab(), byte_level=False, shortens=True)
    return size_of_tokenizer(json.loads(tokenizer_json))


def _fingerprint(tokenizer: Any, tokenizer_json: bytes | None) -> str:
    if tokenizer is None:
        return ""
    content = tokenizer.get_vocab() if tokenizer_json is None else json.loads(tokenizer_json)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _reason(error: BaseException) -> str:
    """The first line of an error's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
