"""The console in a real Chromium, on a real system."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tokenbus.clients.gateway.users.keys import hash_of, new_key
from tokenbus.grammars.regex import RegexError, compile_regex
from tokenbus.grammars.yacc import GrammarError, compile_grammar

from ...processes import Bus, Gateway
from ...worlds.controllers import serving_main
from ..wasm_guests import BIASED, guest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]
PATIENCE_MS = 120_000.0
"""Time limit of an action in the browser, in milliseconds. It also suffices on a busy machine."""

FORKS = guest(
    # Each round writes "round" to the log and "d\n" to a variable named "round". In round 4 the
    # sequence forks. The second sequence drops 2 of its 3 tokens and appends "a" and "b".
    pre="""(if (i32.eq (global.get $round) (i32.const 4)) (then
      (i32.store (i32.const 1056) (i32.const 2)) (return (i32.const 3))))""",
    mid="""(call $log (i32.const 512) (i32.const 6))
    (drop (call $set (i32.const 512) (i32.const 5) (i32.const 516) (i32.const 2) (i32.const -1)
      (i32.const 0)))
    (if (i32.and (call $seq) (i32.eq (global.get $round) (i32.const 4))) (then
      (global.set $round (i32.const 5))
      (i32.store (i32.const 1056) (i32.const 2)) (i32.store (i32.const 1060) (i32.const 600))
      (i32.store (i32.const 1064) (i32.const 2)) (return (i32.const 4))))""",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Console:
    """The console in a browser, and the errors that the page has reported."""

    def __init__(
        self, browser: Browser, url: str, scheme: Literal["light", "dark"], width: int
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.problems: list[str] = []
        self.page: Page = self.context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(f"{url}/console")
        expect(self.page.get_by_text("connected", exact=True)).to_be_visible()

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def choose(self, kind: str, argument: str) -> None:
        """Chooses how the generation is steered, and enters the argument."""
        self.page.get_by_role("radio", name=kind, exact=True).check()
        self.page.locator("#argument-text").fill(argument)

    def generate(self, **options: object) -> None:
        """Starts a generation with these options."""
        if options:
            self.page.locator("details.options").evaluate("details => (details.open = true)")
        for name, value in options.items():
            self.page.locator(f"#{name}").fill(str(value))
        self.page.get_by_role("button", name="Generate").click()

    def finished(self) -> None:
        """Waits until the generation has ended."""
        expect(self.page.locator("#progress")).to_contain_text("finished")

    def sequence(self, seq: int) -> Any:
        """The list item of the sequence with this number."""
        return self.page.locator(f"#sequences > li[data-seq='{seq}']")

    def check_accessibility(self) -> None:
        """Fails if axe finds a serious violation."""
        found = Axe().run(self.page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [n["html"] for n in one["nodes"]]) for one in serious] == []


@pytest.fixture
def console(
    browser: Browser, gateway: Gateway, request: pytest.FixtureRequest
) -> Iterator[Console]:
    """The console. A parameter sets its color scheme and its width in pixels."""
    scheme: Literal["light", "dark"]
    scheme, width = getattr(request, "param", ("light", 1280))
    console = Console(browser, gateway.url, scheme, width)
    yield console
    console.context.close()
    assert console.problems == []


def upload(console: Console, file: Path, module: bytes) -> None:
    """Uploads a module as a file, and waits until the page has chosen its tag as the controller."""
    file.write_bytes(module)
    console.page.get_by_role("radio", name="controller", exact=True).check()
    console.page.locator("#upload").set_input_files(file)
    expect(console.page.locator("#uploaded")).to_contain_text("native ABI")
    expect(console.page.locator("#controller")).to_have_value(file.stem)


BOTH = pytest.mark.parametrize("console", [("light", 1280), ("dark", 360)], indirect=True)


@BOTH
def test_a_constrained_generation_shows_what_each_step_allowed_and_cut_off(
    console: Console,
) -> None:
    page = console.page
    page.locator("#prompt").fill("x = ")
    console.choose("regex", "(one|two) apples and [0-9]{3}")
    console.generate(seed=3)
    expect(page.locator("#sequences .token").first).to_be_visible()
    console.finished()
    text = console.sequence(0).locator(".text").text_content()
    assert re.fullmatch(r"x = (one|two) apples and \d{3}·?", text), text
    assert page.locator(".token.masked").count() > 1
    assert page.locator(".token.appended").count() > 1

    slider = page.get_by_role("slider", name="Step")
    slider.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r"^1 of \d+: .* tokens allowed"))
    expect(page.locator("#step")).to_contain_text(re.compile(r"\d+ of 4,096 \(0\.\d+\s%\)"))
    expect(page.locator("#step tr[data-outcome='chosen']")).to_have_count(1)
    assert page.locator("#step tr[data-outcome='cut off'] s").count() > 0
    slider.press("ArrowRight")
    expect(page.locator("#step h3")).to_have_text("Step 2 of #0")
    named = "labels => labels.map((label) => label.firstChild.textContent)"
    axes = page.locator("#axes > span").evaluate_all(named)
    assert axes == ["cut off", "allowed", "round"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    console.check_accessibility()


@BOTH
def test_a_step_shows_what_a_bias_added_to_its_tokens(console: Console, tmp_path: Path) -> None:
    page = console.page
    upload(console, tmp_path / "console-biased.wasm", BIASED)
    page.locator("#prompt").fill("def add(a, b):")
    console.generate(max_tokens=3, temperature=0)
    console.finished()
    page.get_by_role("slider", name="Step").press("Home")
    chosen = page.locator("#step tr[data-outcome='chosen']")
    expect(chosen).to_contain_text("chosen, bias +500")
    console.check_accessibility()


@BOTH
def test_forks_writes_and_splices_are_drawn(console: Console, tmp_path: Path) -> None:
    page = console.page
    upload(console, tmp_path / "console-forks.wasm", FORKS)
    page.locator("#prompt").fill("def add(a, b):")
    console.generate(max_tokens=8, temperature=0)
    console.finished()

    tree = page.get_by_role("img", name=re.compile("^Tree of 2 sequences"))
    expect(tree).to_have_attribute("aria-label", re.compile("#1 forked from #0 at token 3"))
    assert tree.locator(".lane").count() == 2
    assert tree.locator(".write").count() > 2
    assert tree.locator(".splice").count() == 1

    expect(console.sequence(1)).to_contain_text("fork of #0 at token 3")
    assert console.sequence(0).locator("del").count() == 0
    taken = console.sequence(1).locator("del.token")
    assert taken.count() == 2
    struck = "element => getComputedStyle(element).textDecorationLine"
    assert taken.first.evaluate(struck) == "line-through"
    expect(console.sequence(1)).to_contain_text('round = "d')
    appended = console.sequence(1).locator(".token.appended")
    assert appended.all_text_contents() == ["a", "b"]

    variables = page.get_by_role("region", name="Variables")
    expect(variables.locator("li").first).to_contain_text('round = "d')
    expect(variables.locator(".time").first).to_have_text(re.compile(r"\d\s(µs|ms|s)"))
    assert page.get_by_role("region", name="Controller log").locator("li").count() > 2
    tree.locator(".lane[data-seq='1'] .hit").click()
    expect(page.locator("#step h3")).to_contain_text("of #1")
    console.sequence(0).get_by_role("button", name="#0").press("Enter")
    expect(page.locator("#step h3")).to_contain_text("of #0")
    console.check_accessibility()


def example(console: Console, name: str) -> None:
    """Chooses an example that has a module, and waits until the module is uploaded."""
    console.page.locator("#example").select_option(label=name)
    expect(console.page.locator("#uploaded")).to_contain_text("native ABI")


def figure(console: Console, name: str) -> str:
    """The value of the figure ``name``, which stands above the generation."""
    row = console.page.locator("#figures > div").filter(has_text=name).first
    return row.locator("dd").inner_text()


def test_the_sequence_that_a_controller_chose_is_marked_and_the_counts_agree(
    console: Console,
) -> None:
    example(console, "The longest of four, by forks")
    console.generate()
    console.finished()
    chosen = console.page.get_by_text("✓ chosen by #0")
    expect(chosen).to_have_count(1)
    marked = console.page.locator("#sequences > li").filter(has=chosen)
    texts = [
        "".join(sequence.locator(f".token{kind}").all_text_contents()).removesuffix("·")
        for sequence, kind in ((console.sequence(0), ".appended"), (marked, ""))
    ]
    assert texts[0] == texts[1]
    assert console.page.locator("#forks text", has_text="✓").count() == 1
    shown = console.page.locator("#sequences .state").all_inner_texts()
    counts = [int(n) for text in shown for n in re.findall(r"(\d+) tokens?", text)]
    assert figure(console, "Tokens") == f"{sum(counts)}, 1 taken back"
    expect(console.page.locator("#progress")).to_have_text(f"finished: {sum(counts)} tokens")


def test_the_example_of_arithmetic_gives_a_short_expression_for_every_seed(
    console: Console,
) -> None:
    console.page.locator("#example").select_option(label="Arithmetic")
    prompt = console.page.locator("#prompt").input_value()
    for seed in range(1, 9):
        console.generate(seed=seed)
        expect(console.page.locator("#figures")).to_contain_text(
            f"Seed\n{seed}", use_inner_text=True
        )
        console.finished()
        text = console.sequence(0).locator(".text").text_content().removeprefix(prompt)
        expression = text.strip("↵\n")
        assert re.search("[a-z].*[a-z]", expression), expression
        eval(expression, {"width": 3, "height": 5})


def test_the_counts_agree_after_a_splice(console: Console) -> None:
    example(console, "A word replaced, by backtracking")
    console.generate(max_tokens=12, temperature=0)
    console.finished()
    [shown] = re.findall(r"(\d+ tokens, \d+ taken back)", console.sequence(0).inner_text())
    assert figure(console, "Tokens") == shown.replace(" tokens", "")
    expect(console.page.locator("#progress")).to_have_text("finished: 12 tokens")


def test_the_texts_that_an_example_writes_to_variables_are_shown_as_texts(
    console: Console,
) -> None:
    example(console, "The longest of four, by forks")
    console.generate(seed=1)
    console.finished()
    variables = console.page.locator("#variables .value").all_text_contents()
    assert len(variables) == 4
    assert all(re.fullmatch(r'text [1-4] = ".*"', one, re.DOTALL) for one in variables), variables


def test_a_generation_waits_for_the_upload_of_its_controller(
    console: Console, tmp_path: Path
) -> None:
    page = console.page
    button = page.get_by_role("button", name="Generate")
    page.evaluate("""() => {
      const send = window.fetch;
      const released = new Promise((release) => (window.release = release));
      window.fetch = async (...request) => (await released, send(...request));
    }""")
    page.locator("#example").select_option(label="A word replaced, by backtracking")
    expect(page.locator("#uploaded")).to_have_text("Uploading example-backtrack …")
    expect(button).to_be_disabled()
    page.locator("#prompt").press("Control+Enter")
    expect(page.locator("#controller-fault")).to_be_hidden()
    page.get_by_role("radio", name="regex", exact=True).check()
    expect(button).to_be_enabled()
    page.get_by_role("radio", name="controller", exact=True).check()
    expect(button).to_be_disabled()
    page.evaluate("release()")
    expect(button).to_be_enabled()
    console.generate(max_tokens=4)
    console.finished()

    file = tmp_path / "no-module.wasm"
    file.write_bytes(b"no module")
    page.locator("#upload").set_input_files(file)
    expect(page.locator("#controller-fault")).to_be_visible()
    expect(button).to_be_enabled()


def test_a_seed_that_is_shown_gives_the_same_tokens_again(console: Console) -> None:
    example(console, "A word replaced, by backtracking")
    console.generate(max_tokens=12)
    console.finished()
    text = console.sequence(0).locator(".text").text_content()
    seed = figure(console, "Seed")
    # During the generation, the page chose each new step. The last step stays chosen at the end.
    last = console.page.locator("#sequences .token").last
    expect(last).to_have_class(re.compile("chosen"))
    console.generate(seed=seed)
    expect(console.page.locator("section.generation.stale")).to_have_count(0)
    console.finished()
    assert console.sequence(0).locator(".text").text_content() == text


def test_a_refused_request_leaves_the_result_before_dimmed(console: Console) -> None:
    console.choose("regex", "ab{3}")
    console.generate()
    console.finished()
    console.choose("regex", "a(")
    console.generate()
    expect(console.page.locator("#progress")).to_contain_text("refused")
    expect(console.page.locator("section.generation.stale")).to_have_count(1)
    expect(console.sequence(0).locator(".text")).to_contain_text("abbb")
    console.choose("regex", "cd{2}")
    console.generate()
    console.finished()
    expect(console.page.locator("section.generation.stale")).to_have_count(0)
    expect(console.sequence(0).locator(".text")).to_contain_text("cdd")


def test_controllers_that_are_served_by_name_are_suggested(
    console: Console, steered: Bus, tmp_path: Path
) -> None:
    suggestion = console.page.locator("#controllers > option[value='console_own:main']")
    with serving_main(steered, tmp_path, "console_own"):
        expect(suggestion).to_have_count(1)
    expect(suggestion).to_have_count(0)


@pytest.mark.parametrize("console", [("dark", 390)], indirect=True)
def test_a_phone_shows_the_processes_in_a_line_until_they_are_unfolded(console: Console) -> None:
    rail = console.page.locator("#rail")
    summary = console.page.locator("#processes-summary")
    expect(summary).to_have_text(re.compile(r"^\d+ processes, all ready$"))
    expect(rail).to_be_hidden()
    summary.click()
    expect(rail).to_be_visible()


def test_an_error_of_a_grammar_is_shown_where_it_is(console: Console) -> None:
    page = console.page
    console.choose("grammar", '%start s\n%%\ns : "a" t ;\n')
    console.generate()
    fault = page.get_by_role("alert").filter(has_text="The rule 't' is not defined")
    expect(fault).to_be_visible()
    expect(page.locator(".under mark")).to_have_text("t")
    expect(page.locator("#argument-text")).to_have_attribute("aria-invalid", "true")
    console.check_accessibility()
    fault.get_by_role("button", name="Line 3, column 9").click()
    expect(page.locator("#argument-text")).to_be_focused()
    selected = "area => area.value.slice(area.selectionStart, area.selectionEnd)"
    assert page.locator("#argument-text").evaluate(selected) == "t"
    page.keyboard.type('"b"')
    expect(page.locator(".under mark")).to_have_count(0)
    page.keyboard.press("Control+Enter")
    console.finished()


def test_scripts_run_and_their_errors_are_marked(console: Console) -> None:
    page = console.page
    page.locator("#example").select_option(label="Fields of a record, by a script in Python")
    console.generate(temperature=0)
    console.finished()
    text = console.sequence(0).locator(".text").text_content()
    assert re.search(r'"name": "[a-z]{3,8}", "id": \d{1,4}\}', text), text
    page.locator("#example").select_option(label="The shorter of two, by a script in JavaScript")
    console.generate()
    console.finished()
    expect(page.get_by_role("region", name="Controller log")).to_contain_text("chosen ")
    console.choose("Python", "async def main(ctx):\n    await ctx.gen(regex=)\n")
    console.generate()
    fault = page.get_by_role("alert").filter(has_text="SyntaxError")
    expect(fault.get_by_role("button", name="Line 2, column 5")).to_be_visible()
    expect(page.locator(".under mark")).to_have_text("await ctx.gen(regex=)")


LETTER = """async def main(ctx):
    ctx.send("What is your name?")
    await ctx.fixed("Dear " + await ctx.receive())
    ctx.send("And your town?")
    await ctx.fixed(" of " + await ctx.receive())
"""


@pytest.mark.parametrize("console", [("light", 1280), ("dark", 390)], indirect=True)
def test_a_program_s_messages_are_shown_and_answered(console: Console) -> None:
    page = console.page
    console.choose("Python", LETTER)
    console.generate()
    dialogue = page.get_by_role("region", name="Messages")
    for question, answer in (("What is your name?", "Ada"), ("And your town?", "Oslo")):
        expect(dialogue).to_contain_text(question)
        page.get_by_label("Input for the program").fill(answer)
        dialogue.get_by_role("button", name="Send").click()
    console.finished()
    expect(console.sequence(0).locator(".text")).to_have_text("config = Dear Ada of Oslo")
    expect(dialogue.get_by_role("listitem")).to_have_count(4)
    expect(page.get_by_label("Input for the program")).to_be_hidden()
    console.check_accessibility()
    console.choose("Python", "async def main(ctx):\n    await ctx.fixed('a')\n")
    console.generate()
    expect(console.sequence(0).locator(".text")).to_have_text("config = a")
    expect(dialogue).to_be_hidden()


def test_an_error_of_another_field_is_shown_at_that_field(console: Console) -> None:
    page = console.page
    page.get_by_role("radio", name="nothing").check()
    console.generate(max_tokens=0)
    fault = page.locator("#max_tokens-fault")
    expect(fault).to_have_text("Max tokens: expected a whole number of at least 1, not 0")
    expect(page.locator("#max_tokens")).to_have_attribute("aria-invalid", "true")
    console.generate(max_tokens=4, top_logprobs=1000)
    expect(page.locator("#top_logprobs-fault")).to_contain_text("Alternatives: expected")
    expect(fault).to_be_hidden()
    page.locator("#top_logprobs").fill("8")
    page.locator("#model").fill("no-such-model")
    console.generate()
    expect(page.locator("#model-fault")).to_contain_text("no-such-model")
    page.locator("#model").fill("")
    page.get_by_role("radio", name="controller", exact=True).check()
    page.locator("#controller").fill("no-such-module")
    console.generate(max_tokens=4)
    expect(page.locator("#controller-fault")).to_contain_text("no-such-module")


def place_of(console: Console, kind: str, message: str, text: str) -> str | None:
    """The part of ``text`` that the page marks as the place of an error."""
    found: str | None = console.page.evaluate(
        """async ([kind, message, text]) => {
          const { placeOf } = await import("/console/places.js");
          const place = placeOf(kind, message, text);
          return place && text.slice(place.start, place.end);
        }""",
        [kind, message, text],
    )
    return found


def test_the_places_of_errors_are_found_in_their_messages(console: Console) -> None:
    for pattern, marked in (
        ("ab(?=c)d", "(?=c)"),
        ("é(?=c)d", "(?=c)"),
        ("a(b", "("),
        ("[a-", "["),
    ):
        with pytest.raises(RegexError) as regex_error:
            compile_regex(pattern)
        assert place_of(console, "regex", str(regex_error.value), pattern) == marked
    grammar = '%start s\n%%\ns : "é" $ ;\n'
    with pytest.raises(GrammarError) as grammar_error:
        compile_grammar(grammar)
    assert place_of(console, "yacc", str(grammar_error.value), grammar) == "$"
    schema = '{"type": "object",\n "uniqueItems": true,}'
    comma = "the argument is not a JSON schema: trailing comma at line 2 column 22"
    assert place_of(console, "json_schema", comma, schema) == "}"
    assert place_of(console, "json_schema", 'Unimplemented keys: ["uniqueItems"]', schema) == (
        '"uniqueItems"'
    )
    assert place_of(console, "choice", "the argument of choice is an empty list", "") is None


def test_the_system_and_the_page_s_own_streams_are_shown(console: Console, steered: Bus) -> None:
    page = console.page
    rail = page.get_by_role("region", name="System").get_by_role("listitem")
    for role in ("GPU worker", "controller worker", "state worker"):
        expect(rail.filter(has_text=role).first).to_contain_text("ready")
    rows = page.get_by_role("row").filter(has=page.get_by_role("cell", name="regex", exact=True))
    others = page.get_by_role("row").filter(has=page.get_by_role("cell", name="-93", exact=True))
    with steered.client() as client:
        # Both generations are so long that they still run when the page requests the status.
        with client.generate("x", max_tokens=1000, n=64, ignore_eos=True, priority=-93) as stream:
            next(stream)
            console.choose("regex", "[a-z]{2000}")
            console.generate(max_tokens=1000, n=64, top_logprobs=0)
            expect(rows).to_have_count(1)
            expect(rows).to_contain_text("running")
            expect(rows).to_contain_text("gpu-")
            expect(others).to_have_count(0)
            assert any(live.priority == -93 for live in client.status(streams=True).live)
        page.get_by_role("button", name="Stop").click()
        expect(rows).to_have_count(0)


def test_processes_are_unknown_after_the_gateway_has_ended(browser: Browser, steered: Bus) -> None:
    gateway = steered.start_gateway()
    console = Console(browser, gateway.url, "light", 1280)
    rail = console.page.locator("#rail")
    summary = console.page.locator("#processes-summary")
    expect(summary).to_have_text(re.compile(r"^\d+ processes, all ready$"))
    gateway.process.kill()
    expect(console.page.get_by_text("disconnected, reconnecting", exact=True)).to_be_visible()
    expect(summary).to_have_text(re.compile(r"^\d+ processes, all unknown$"))
    expect(rail.get_by_text("ready", exact=True)).to_have_count(0)
    expect(rail.get_by_text("unknown", exact=True)).to_have_count(rail.locator("li.node").count())
    expect(console.page.locator("#streams-count")).to_have_text("unknown")
    console.context.close()


def test_a_generation_is_stopped(console: Console) -> None:
    page = console.page
    console.choose("regex", "[a-z]{2000}")
    page.evaluate("""() => {
      const stop = document.querySelector("#stop");
      const watch = () => document.querySelector(".token") && stop.click();
      new MutationObserver(watch).observe(document.querySelector("#sequences"), {
        childList: true, subtree: true,
      });
    }""")
    console.generate(max_tokens=1000, n=64, top_logprobs=0)
    expect(console.sequence(0)).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_a_page_whose_websocket_is_refused_asks_for_an_api_key(
    browser: Browser, steered: Bus, tmp_path: Path
) -> None:
    key = new_key()
    file = tmp_path / "api-keys"
    file.write_text(f"ann {hash_of(key)}\n")
    gateway = steered.start_gateway(api_keys=file)
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    # The browser sends the key with requests for the page, but not with the WebSocket's request.
    with_key = {"authorization": f"Bearer {key}"}
    page.route("**/console**", lambda route: route.continue_(headers=with_key))
    page.goto(f"{gateway.url}/console")
    dialog = page.get_by_role("dialog", name="API key")
    for given in ("tb-wrong", key):
        expect(dialog).to_be_visible()
        dialog.get_by_label("Key", exact=True).fill(given)
        dialog.get_by_role("button", name="Connect").click()
    expect(page.get_by_text("connected", exact=True)).to_be_visible()
    expect(dialog).to_be_hidden()
    page.reload()
    expect(page.get_by_text("connected", exact=True)).to_be_visible()
    context.close()
    gateway.process.kill()
