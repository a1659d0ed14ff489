"""Scripts in a whole system: uploads, tags of tenants, AICI's names, guest processes, and moved
streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenbus.clients import Client
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.scripts import marked_script

from ....processes import Bus
from .script_runs import tokens_of

SCRIPT = b"""
async function main(ctx) {
  await ctx.fixed(`The ${ctx.arg} is `);
  const found = await ctx.gen({ regex: '[0-9]+', maxTokens: 12, logprobs: true });
  const number = found.text;
  const i = await ctx.fork(2);
  await ctx.fixed(` (${i})`);
  ctx.vars.set(`v${i}`, number);
  await ctx.gen({ regex: '[a-z ]{40,60}' });
  ctx.log(found.logprobs, await ctx.waitVar(`v${1 - i}`) === number);
}
"""
PYTHON = b"""
async def main(ctx):
    await ctx.fixed(f"The {ctx.arg} is ")
    number, _, logprobs = await ctx.gen(regex="[0-9]+", max_tokens=12, logprobs=True)
    i = await ctx.fork(2)
    await ctx.fixed(f" ({i})")
    ctx.vars[f"v{i}"] = number
    await ctx.gen(regex="[a-z ]{40,60}")
    print(logprobs, str(await ctx.wait_var(f"v{1 - i}") == number).lower())
"""
SCRIPTS = {"javascript": SCRIPT, "python": PYTHON}
EACH = pytest.mark.parametrize("language", SCRIPTS)
PYAICI_SCRIPT = """
import pyaici.server as aici

async def main():
    await aici.FixedTokens("one ")
    n = await aici.gen_text(regex="[0-9]{2}", store_var="n")
    aici.check_var("n", n)
    step = aici.ConstrainedToken(lambda: aici.RegexConstraint("z+"))
    assert aici.detokenize(await step).strip(b"z") == b""

aici.start(main())
"""
AICI_SCRIPT = """
import { start, gen, $, fork } from "aici";
start(async () => {
  await $`one `;
  const n = await gen({ regex: /[0-9]{2}/, storeVar: "n" });
  checkVar("n", n);
  const step = new ConstrainedToken(() => new RegexConstraint("z+"));
  assert(/^z+$/.test(detokenize(await step.run()).decode()));
});
"""


@pytest.fixture(scope="module", params=[0, 4], ids=["threads", "processes"])
def bus(processes: None, request: pytest.FixtureRequest) -> Iterator[Bus]:
    with Bus(guest_processes=request.param, heartbeat_s=0.2, expiry_s=5) as bus:
        bus.start_worker()
        bus.start_other("controller")
        bus.start_other("state")
        bus.wait_for_models("embedded")
        yield bus


@pytest.fixture
def client(bus: Bus) -> Iterator[Client]:
    with bus.client() as client:
        yield client


def run(client: Client, controller: str, arg: str = "answer") -> list[tuple[str, str]]:
    stream = client.generate(
        "Q: ", controller=controller, controller_arg=arg, max_tokens=150, temperature=0.0
    )
    stream.wait()
    assert not any(s.error for s in stream.sequences), [s.error for s in stream.sequences]
    return sorted((s.text, s.logs) for s in stream.sequences)


@EACH
def test_a_script_is_uploaded_tagged_and_run(client: Client, language: str) -> None:
    stored = client.upload_controller(marked_script(SCRIPTS[language], language), "answer")
    assert (stored.abi, stored.forks, stored.tags) == (language, True, ["answer"])
    (zero, log), (one, _) = run(client, "answer")
    assert zero.startswith("The answer is ")
    assert log.endswith(" true\n")
    logprobs = json.loads(log.splitlines()[-1].removesuffix(" true"))
    assert max(logprobs) < 0
    assert one.split(" (")[0] == zero.split(" (")[0]


CATCHES = {
    "javascript": b"""
async function main(ctx) {
  for (const call of [() => ctx.save("n".repeat(70000)), () => ctx.gen({regex: "["})])
    try {
      await call();
    } catch (error) {
      ctx.log(error.message);
    }
}
""",
    "python": b"""
async def main(ctx):
    for call in (lambda: ctx.save("n" * 70000), lambda: ctx.gen(regex="[")):
        try:
            await call()
        except ControllerError as error:
            print(error)
    try:
        ctx.vars.set("n" * 3000, "x")
    except ControllerError as error:
        print(error)
""",
}


@EACH
def test_a_script_catches_the_errors_of_its_calls(client: Client, language: str) -> None:
    module = client.upload_controller(marked_script(CATCHES[language], language)).module
    [(_, log)] = run(client, module)
    save, gen, *written = log.splitlines()
    assert save == "the name of a context has 70000 bytes; expected 1 to 256"
    assert gen.startswith("gen(regex): regex: unterminated")
    assert all("has 3000" in line and "256" in line for line in written)
    assert len(written) == (language == "python")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"let a = 1;\nlet b = ;\n", "line 2: SyntaxError"),
        (b"async function main(ctx) {\n  await ctx.gen(;\n}", "line 2: SyntaxError"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_an_upload_with_an_error_is_refused_with_the_place(
    client: Client, text: bytes, error: str
) -> None:
    with pytest.raises(RequestError, match=error):
        client.upload_controller(marked_script(text, "javascript"))


def test_an_upload_in_python_with_an_error_is_refused_with_the_place(client: Client) -> None:
    with pytest.raises(RequestError, match="line 2: SyntaxError"):
        client.upload_controller(marked_script(b"async def main(ctx):\n  x = = 1\n", "python"))


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        (
            b"# main\nasync def run(ctx):\n  pass\n",
            "python",
            r"async def main\(ctx\) or class Main",
        ),
        (b"async function run(ctx) {}", "javascript", r"async function main\(ctx\) or class Main"),
    ],
)
def test_an_upload_without_a_program_is_refused(
    client: Client, text: bytes, language: str, expected: str
) -> None:
    with pytest.raises(RequestError, match=f"the script does not define {expected}"):
        client.upload_controller(marked_script(text, language))


@EACH
def test_a_client_uploads_the_file_of_a_script(
    client: Client, tmp_path: Path, language: str
) -> None:
    file = tmp_path / {"python": "own.py", "javascript": "own.js"}[language]
    file.write_bytes(SCRIPTS[language])
    stored = client.upload_controller(file, "own")
    assert (
        stored.module == client.upload_controller(marked_script(SCRIPTS[language], language)).module
    )
    assert run(client, "own")


def test_the_text_of_a_script_without_its_language_is_refused_with_a_hint(client: Client) -> None:
    with pytest.raises(RequestError, match=r"this is not Wasm: .*uploaded as a file NAME\.py"):
        client.upload_controller(SCRIPTS["python"])


def test_an_unknown_language_is_refused(client: Client) -> None:
    with pytest.raises(RequestError, match="'cobol'; it must be in one of"):
        client.upload_controller(marked_script(b"", "cobol"))


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("jsctrl-latest", AICI_SCRIPT),
        ("gh:microsoft/aici/jsctrl", AICI_SCRIPT),
        ("pyctrl-latest", PYAICI_SCRIPT),
        ("gh:microsoft/aici/pyctrl", PYAICI_SCRIPT),
    ],
)
def test_aicis_names_run_the_script_of_the_argument(client: Client, name: str, script: str) -> None:
    [(text, _)] = run(client, name, script)
    assert text.startswith("one ")
    with pytest.raises(RequestError, match="built-in"):
        client.tag_controller(run_id(client), name)


def run_id(client: Client) -> str:
    return client.upload_controller(marked_script(SCRIPT, "javascript")).module


@pytest.mark.parametrize(
    ("controller", "script"), [("jsctrl", AICI_SCRIPT), ("pyctrl", PYAICI_SCRIPT)]
)
def test_aicis_rest_interface_runs_a_script(bus: Bus, controller: str, script: str) -> None:
    gateway = bus.gateways[0] if bus.gateways else bus.start_gateway()
    body = {
        "controller": f"gh:microsoft/aici/{controller}",
        "controller_arg": script,
        "prompt": "",
        "temperature": 0.0,
    }
    answer = httpx.post(f"{gateway.url}/v1/run", json=body, timeout=120.0)
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
    forks = [fork for part in parts for fork in part.get("forks", [])]
    assert "".join(fork["text"] for fork in forks).startswith("one ")
    assert not any(fork["error"] for fork in forks)


@EACH
def test_a_script_moves_to_another_worker(bus: Bus, client: Client, language: str) -> None:
    client.upload_controller(marked_script(SCRIPTS[language], language), "moves")
    expected = run(client, "moves")
    stream = client.generate(
        "Q: ", controller="moves", controller_arg="answer", max_tokens=150, temperature=0.0
    )
    iterator = iter(stream)
    for _ in range(8):
        next(iterator)
    next(each for each in bus.others if each.alive and each is not bus.others[1]).kill()
    bus.start_other("controller")
    stream.wait()
    assert sorted((s.text, s.logs) for s in stream.sequences) == expected


SAVES = b"""
import json

async def main(ctx):
    await ctx.gen(max_tokens=12)
    await ctx.save("chat")
    print(json.dumps(ctx.tokens))
"""
OPENS = b"""
import json

async def main(ctx):
    await ctx.open("chat")
    print(json.dumps([ctx.prompt, await ctx.score([" return", "zq"])]))
    if await ctx.spawn("import "):
        await ctx.gen(max_tokens=4)
        await ctx.stop()
    await ctx.gen(max_tokens=12)
"""


LOGS = b"""
async def main(ctx):
    for word in ("os", "sys"):
        await ctx.score([word])
        ctx.log("scored", word)
    await ctx.save("logs")
    ctx.log("saved")
    await ctx.open("logs")
    number = await ctx.spawn("import ")
    ctx.log("spawned", number)
    await ctx.fixed("os")
"""


def test_logs_before_scores_contexts_and_new_prompts_arrive(client: Client) -> None:
    module = client.upload_controller(marked_script(LOGS, "python")).module
    first, spawned = client.generate("x", controller=module, max_tokens=20).wait()
    assert first.logs == "scored os\nscored sys\nsaved\nspawned 0\n"
    assert spawned.logs == "spawned 1\n"
    assert first.prompt_tokens == 1


def test_a_context_outlives_its_worker_and_serves_another_client(bus: Bus, client: Client) -> None:
    names = {
        name: client.upload_controller(marked_script(script, "python")).module
        for name, script in (("saves", SAVES), ("opens", OPENS))
    }
    saved = client.generate("def add(a, b):", controller=names["saves"], max_tokens=20)
    whole = json.loads(saved.wait()[0].logs)
    bus.workers[-1].kill()
    bus.start_worker()
    with bus.client() as other:
        opened = other.generate("unlike", controller=names["opens"], max_tokens=20)
        opened.wait()
        assert not any(s.error for s in opened.sequences), [s.error for s in opened.sequences]
        first, spawned = opened.sequences
        prompt, scores = json.loads(first.logs)
        assert prompt == whole
        texts = tokens_of(" return"), tokens_of("zq")
        wanted = [sum(other.score(whole, text).logprobs) for text in texts]
        assert scores == pytest.approx(wanted, abs=1e-3)
        for sequence, given in ((first, whole), (spawned, "import ")):
            again = other.generate(given, max_tokens=len(sequence.tokens))
            assert sequence.tokens == again.tokens()[: len(sequence.tokens)]
