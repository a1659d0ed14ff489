"""LoRA adapters in an engine: the tokens are those of a model into which the adapter is merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenbus.protocol.bodies import pack_tokens
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Span, Token
from tokenbus.protocol.pages import first_key, page_keys
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu.engine import engine as engine_module
from tokenbus.workers.gpu.engine.engine import Continued, Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.cuda import varlen
from tokenbus.workers.gpu.model.kv_cache import FLASH_BLOCK_SIZE, Layout
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model, wrap_model
from tokenbus.workers.gpu.model.lora.adapters import Adapters
from tokenbus.workers.gpu.model.lora.peft_layout import AdapterError, read_adapter
from tokenbus.workers.gpu.model.models import Failed, Models, Progress, Ready

from ...worlds.gpu_worker_loop import Loop
from . import flash, shapes
from .cuda import Cuda
from .moved import REQUEST, finish, give, token_messages, transcript
from .peft import ATTENTION, HEAD, MLP, PREFIX, merged, write_adapter

NAMES = ("", "one", "two")
"""No adapter, and the adapters of ``World``."""
GREEDY = Sampling(max_tokens=12, ignore_eos=True)


@dataclass
class World:
    """A model with two adapters. ``merged`` has for each adapter's name a model into which the
    adapter is merged."""

    loaded: LoadedModel
    merged: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Adapters of different modules, ranks and scales."""
    model, folder = shapes.make(request.param), tmp_path_factory.mktemp("adapters")
    # An update of a head that shares the weights of the embeddings cannot be merged.
    head = () if model.config.tie_word_embeddings else HEAD
    places = {
        "one": write_adapter(folder / "one", model, strength=0.3),
        "two": write_adapter(
            folder / "two",
            model,
            (*ATTENTION, *MLP, *head),
            seed=1,
            strength=0.1,
            use_rslora=True,
            rank_pattern={"down_proj": 2, "c_attn": 7},
            alpha_pattern={"v_proj": 3, "c_proj": 5},
        ),
    }
    found = World(wrap_model(request.param, model), {"": shapes.make(request.param)})
    read = [read_adapter(name, place) for name, place in places.items()]
    found.loaded.adapters = Adapters(found.loaded.model, read)
    for name, place in places.items():
        found.merged[name] = merged(shapes.make(request.param), place)
    return found


def run(engine: Engine) -> dict[int, list[TokenOutput]]:
    """Runs the engine until it has no work; returns the outputs by request."""
    found: dict[int, list[TokenOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request, []).append(output)
    return found


def tokens(outputs: Sequence[TokenOutput], seq: int = 0) -> list[int]:
    """The tokens of a sequence."""
    return [o.token for o in outputs if o.seq == seq and o.token is not None]


@pytest.fixture(params=["gathered", "in place"])
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether engines read blocks in place and capture graphs, as on a GPU, or gather blocks."""
    if request.param == "in place":
        found = Layout(FLASH_BLOCK_SIZE, "varlen")
        monkeypatch.setattr(engine_module, "choose_layout", lambda loaded: found)
        monkeypatch.setattr(varlen, "varlen_attn", flash.varlen_attn)
        Cuda().patch(monkeypatch)
    return bool(request.param == "in place")


def test_the_tokens_of_a_mixed_batch_are_those_of_merged_models(
    world: World, in_place: bool
) -> None:
    config = EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_bytes=2**24,
        overlap=in_place,
        speculation=True,
    )
    engine = Engine(world.loaded, config)
    prompts = [shapes.prompts(10, 70)[i] for i in (1, 4, 9)]
    jobs = [(prompt, name) for prompt in prompts for name in NAMES]
    for i, (prompt, name) in enumerate(jobs):
        engine.add(i, prompt, GREEDY, adapter=name)
    found = [tokens(outputs) for _, outputs in sorted(run(engine).items())]
    for (prompt, name), got in zip(jobs, found, strict=True):
        model = world.merged[name]
        assert shapes.same_tokens(model, prompt, shapes.greedy(model, prompt, 12), got)
    assert len({tuple(got) for got in found}) == len(jobs)


def test_scores_and_continued_sequences_have_the_adapter(world: World) -> None:
    engine = Engine(world.loaded, EngineConfig(kv_cache_bytes=2**23))
    prompt, text = [5, 6, 7], list(range(20, 40))
    for i, name in enumerate(NAMES):
        engine.score(i, prompt, text, adapter=name)
        begun = Continued({0: text, 1: text[:9]}, 2)
        sampling = Sampling(max_tokens=25, ignore_eos=True, n=2)
        engine.add(10 + i, prompt, sampling, adapter=name, continued=begun)
    found = run(engine)
    for i, name in enumerate(NAMES):
        model = world.merged[name]
        scores = [o.logprob for o in found[i] if o.logprob is not None]
        assert scores == pytest.approx(shapes.log_probs(model, prompt, text), abs=1e-3)
        for seq, before in ((0, text), (1, text[:9])):
            wanted = shapes.greedy(model, [*prompt, *before], 25 - len(before))
            assert shapes.same_tokens(model, [*prompt, *before], wanted, tokens(found[10 + i], seq))


def test_forks_splices_and_new_prompts_keep_the_adapter(world: World) -> None:
    engine = Engine(world.loaded, EngineConfig(kv_cache_bytes=2**23))
    model, prompt = world.merged["two"], list(range(1, 40))
    engine.add(1, prompt, Sampling(max_tokens=12, ignore_eos=True, n=2), adapter="two")
    engine.add(2, prompt, GREEDY)
    outputs = [o for _ in range(4) for o in engine.step()]
    before = tokens([o for o in outputs if o.request == 1])
    [fork] = engine.fork(1, 0, 1)
    engine.splice(1, fork, 2, [9, 8, 7])
    engine.begin_anew(1, 1, prompt[:20])
    outputs += run(engine)[1]
    mine = [o for o in outputs if o.request == 1]
    spliced = [*before[:-2], 9, 8, 7]
    after = tokens(mine, fork)
    assert after[:3] == [9, 8, 7]
    wanted = shapes.greedy(model, [*prompt, *spliced], 12 - len(spliced))
    assert shapes.same_tokens(model, [*prompt, *spliced], wanted, after[3:])
    wanted = shapes.greedy(model, prompt, 12)
    assert shapes.same_tokens(model, prompt, wanted, tokens(mine))
    anew = next(i for i, o in enumerate(mine) if o.seq == 1 and o.backtrack)
    got = tokens(mine[anew:], 1)
    assert shapes.same_tokens(model, prompt[:20], shapes.greedy(model, prompt[:20], 12), got)


def test_scored_texts_have_the_adapter(world: World) -> None:
    engine = Engine(world.loaded, EngineConfig(kv_cache_bytes=2**23))
    prompt, texts = list(range(1, 40)), [[7, 8, 9], [30, 31]]
    engine.add(1, prompt, GREEDY, adapter="one")
    engine.score_texts(1, 0, texts)
    [scored] = [o for o in run(engine)[1] if o.scores]
    for text, scores in zip(texts, scored.scores, strict=True):
        wanted = shapes.log_probs(world.merged["one"], prompt, text)
        assert scores == pytest.approx(wanted, abs=1e-3)


def test_adapters_do_not_share_cached_prefixes(world: World) -> None:
    engine = Engine(world.loaded, EngineConfig(kv_cache_bytes=2**23))
    prompt = [1 + i % 400 for i in range(300)]
    for i, name in enumerate((*NAMES, *NAMES)):
        usage = engine.add(i, prompt, GREEDY, adapter=name)
        got = tokens(run(engine)[i])
        assert (usage.cached or 0) == (288 if i >= 3 else 0)
        model = world.merged[name]
        assert shapes.same_tokens(model, prompt, shapes.greedy(model, prompt, 12), got)
    # The broker finds an adapter's pages as the pages of a model with the adapter's name.
    names = (world.loaded.name, "one", "two")
    pages = [next(page_keys(first_key(name), pack_tokens(prompt), 1)) for name in names]
    assert sorted(engine.pages.every()) == sorted(pages)


def test_tokens_without_an_adapter_have_the_bits_of_a_service_without_adapters(
    tmp_path: Path,
) -> None:
    plain, loaded = load_model("embedded"), load_model("embedded")
    adapter = read_adapter("one", write_adapter(tmp_path, loaded.model))
    loaded.adapters = Adapters(loaded.model, [adapter])
    prompts = shapes.prompts(4, 60)

    def outputs(model: LoadedModel, others: int) -> list[list[tuple[int | None, float | None]]]:
        engine = Engine(model, EngineConfig(kv_cache_bytes=2**23))
        for i, prompt in enumerate(prompts):
            engine.add(i, prompt, GREEDY)
        for i in range(others):
            engine.add(10 + i, prompts[i], GREEDY, adapter="one")
        found = run(engine)
        assert all(len(tokens(one)) == 12 for one in found.values())
        return [[(o.token, o.logprob) for o in found[i]] for i in range(len(prompts))]

    wanted = outputs(plain, 0)
    assert outputs(loaded, 0) == wanted
    exact = Engine(loaded, EngineConfig(kv_cache_bytes=2**21)).path.exact
    assert not exact or outputs(loaded, 3) == wanted


def test_a_moved_stream_does_not_continue_with_another_adapter_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "split", lambda self, name: ("m", name))
    loaded = wrap_model("m", shapes.tiny_model())
    adapter = read_adapter("sql", write_adapter(tmp_path, loaded.model))
    loaded.adapters = Adapters(loaded.model, [adapter])
    body = {"model": "sql", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    first = Token(token=9, stream_id=REQUEST, logprob=-1.0, finish_reason=None)
    for hash_ in (adapter.hash, "0" * 32):
        first.span = Span(weights=f"w+sql@{hash_}")
        loop = Loop(tmp_path, loaded)
        give(loop, b"GENERATE", body, Flag.MOVED, transcript([[first]]))
        if hash_ == adapter.hash:
            finish(loop)
            new = [entry for message in token_messages(loop) for entry in message]
            assert [entry.pos for entry in new] == [1, 2, 3]
            continue
        loop.turn()
        [error] = loop.sent(b"ERROR")
        assert b"the LoRA adapter 'sql' of the worker at which this stream continues" in error[2]


def test_a_quantized_model_has_adapters(tmp_path: Path) -> None:
    loaded = load_model("embedded", dtype="bfloat16", quantize="int8")
    prompt = [5, 6, 7, 8]
    before = shapes.logits_after(loaded.model, prompt)
    place = write_adapter(tmp_path, load_model("embedded").model, strength=0.5)
    loaded.adapters = Adapters(loaded.model, [read_adapter("one", place)])
    engine = Engine(loaded, EngineConfig(kv_cache_bytes=2**22))
    engine.score(1, prompt[:1], prompt[1:], adapter="one")
    found = [o.logprob for o in run(engine)[1] if o.logprob is not None]
    changed = merged(load_model("embedded").model, place)
    wanted = shapes.log_probs(changed, prompt[:1], prompt[1:])
    assert found == pytest.approx(wanted, abs=0.2)
    assert torch.equal(shapes.logits_after(loaded.model, prompt), before)


def test_the_hash_is_that_of_the_updates(tmp_path: Path) -> None:
    model = shapes.tiny_model()
    one = read_adapter("a", write_adapter(tmp_path / "a", model))
    same = read_adapter("b", write_adapter(tmp_path / "b", model, task_type="CAUSAL_LM"))
    scaled = read_adapter("c", write_adapter(tmp_path / "c", model, lora_alpha=9))
    other = read_adapter("d", write_adapter(tmp_path / "d", model, seed=1))
    assert one.hash == same.hash
    assert len({one.hash, scaled.hash, other.hash}) == 3


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"use_dora": True}, r"it has DoRA \(use_dora\)"),
        ({"modules_to_save": ["lm_head"]}, "it has retrained modules"),
        ({"bias": "all"}, "its bias is 'all'; only 'none' is supported"),
        ({"peft_type": "IA3"}, "its peft_type is 'IA3'; only 'LORA'"),
        ({"init_lora_weights": "pissa"}, "which also changes the weights of the model"),
        ({"rank_pattern": {"q_proj": 3}, "r": "x"}, "is not valid: "),
        ({"rank_pattern": {"q_proj": 0}}, "is not valid: .*>= 1"),
        ({"alpha_pattern": {"q_proj(": 3}}, r"its pattern 'q_proj\(' is not a valid regular"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    place = write_adapter(tmp_path, shapes.tiny_model())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(AdapterError, match=f"^the LoRA adapter 'a' cannot be served: .*{why}"):
        read_adapter("a", place)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"lora_embedding_A": (4, 16)}, "'x.lora_embedding_A' is not part of a linear module's"),
        ({f"{PREFIX}m.lora_A.weight": (4, 16)}, "the update of m lacks lora_A or lora_B"),
        ({}, "has no tensors"),
        (
            {f"{PREFIX}m.lora_A.weight": (3, 16), f"{PREFIX}m.lora_B.weight": (16, 3)},
            r"\[3, 16\] and \[16, 3\]; expected a rank of 4",
        ),
    ],
)
def test_other_tensors_are_refused(
    tmp_path: Path, tensors: dict[str, tuple[int, int]], why: str
) -> None:
    write_adapter(tmp_path, shapes.tiny_model())
    named = {k if k.startswith(PREFIX) else f"x.{k}": torch.ones(v) for k, v in tensors.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=why):
        read_adapter("a", tmp_path)


@pytest.mark.parametrize(
    ("alpha", "dtype"), [(1e42, "float32"), (1e9, "float16")], ids=["infinite", "too large"]
)
def test_values_that_are_not_finite_in_the_type_of_the_model_are_refused(
    tmp_path: Path, alpha: float, dtype: str
) -> None:
    model = shapes.tiny_model().to(getattr(torch, dtype))
    adapter = read_adapter("a", write_adapter(tmp_path, model, lora_alpha=alpha))
    with pytest.raises(AdapterError, match=rf"^the LoRA adapter 'a' .*not finite in {dtype}$"):
        Adapters(model, [adapter])


def test_an_adapter_does_not_change_when_its_file_is_overwritten(tmp_path: Path) -> None:
    place = write_adapter(tmp_path, shapes.tiny_model())
    adapter = read_adapter("a", place)
    before = {
        path: (update.a.clone(), update.b.clone()) for path, update in adapter.updates.items()
    }
    with (place / "adapter_model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(size))
    for path, (a, b) in before.items():
        assert torch.equal(adapter.updates[path].a, a)
        assert torch.equal(adapter.updates[path].b, b)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapters = [
        read_adapter(shape, write_adapter(tmp_path / shape, shapes.make(shape)))
        for shape in ("gpt2", "llama")
    ]
    with pytest.raises(AdapterError, match=r"'gpt2' cannot .*no module transformer\.h\.0\.attn"):
        Adapters(shapes.tiny_model(), adapters[:1])
    with pytest.raises(AdapterError, match=r"k_proj is \[8, 16\] and the update is \[16, 64\]"):
        Adapters(shapes.tiny_model(), adapters[1:])


def test_a_module_that_a_forward_does_not_call_is_refused(tmp_path: Path) -> None:
    model = shapes.tiny_model()
    model.model.layers[0].spare_proj = torch.nn.Linear(16, 16)
    adapter = read_adapter("a", write_adapter(tmp_path, model, ("q_proj", "spare_proj")))
    with pytest.raises(AdapterError, match=r"spare_proj 0 times; expected once"):
        Adapters(model, [adapter])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, ""),
        ({"compile": True}, "runs through torch.compile and cannot have LoRA adapters"),
        ({"exact": "on"}, "must be exact"),
        ({"lora": ["a=/no/such"]}, "'a' cannot be served: cannot read /no/such/adapter_config"),
    ],
)
def test_a_worker_loads_the_adapters_of_its_model(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    model = shapes.tiny_model()
    model.save_pretrained(tmp_path / "model")
    place = write_adapter(tmp_path / "adapter", model)
    own: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "lora": [f"a={place}"],
        "kv_cache_bytes": 2**20,
    }
    models = Models(Settings(device="cpu", **(own | settings)), lambda: None)
    assert models.patterns == [own["model"], "a"]
    assert models.split("a") == (own["model"], "a")
    models.want(models.default)
    while isinstance(event := models.events.get(timeout=600), Progress):
        pass
    models.close()
    if why:
        assert isinstance(event, Failed)
        assert why in str(event.error)
        return
    assert isinstance(event, Ready)
    models.loaded(event)
    base, adapter = models.infos()
    assert (adapter.name, adapter.parent) == ("a", base.name)
    assert adapter.path.weights == f"{base.path.weights}+a@{adapter.adapter}"
    assert not adapter.path.exact
