"""The chat page in a real Chromium. The tests send the answers' tokens through a stepped worker."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from tokenbus.clients.gateway.users.keys import hash_of, new_key

from ...processes import Bus, Gateway
from .stepped import Stepped, SteppedWorker, stepped_worker

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]
PATIENCE_MS = 120_000.0
"""Time limit of an action in the browser, in milliseconds. It also suffices on a busy machine."""
Scheme = Literal["light", "dark"]

TEMPLATE = """\
{# <think> </think> <tool_call> #}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{% endfor %}[assistant]"""
HOSTILE = """\
# <img src=x onerror="window.hacked = 1">

<script>window.hacked = 1</script> <b>bold</b> &lt;i&gt;

[link](javascript:window.hacked=1) ![picture](https://example.invalid/a.png?secret)
[data](data:text/html,<script>window.hacked=1</script>) <https://example.invalid/<script>>

| <svg onload=window.hacked=1> | b |
| --- | --- |
| <iframe src="javascript:1"></iframe> | `<u>` |

```html"><script>window.hacked = 1</script>
</code></pre><script>window.hacked = 1</script>
```
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served(processes: None) -> Iterator[tuple[Bus, SteppedWorker]]:
    with Bus(session_grace_s=600) as bus:
        bus.start_other("state")
        bus.start_other("controller")
        back = f"ipc://{bus.folder}/back.sock"
        with stepped_worker(back, 64, template=TEMPLATE) as worker:
            bus.wait_for_models("stepped")
            bus.wait_for_roles("controller", "state")
            yield bus, worker


@pytest.fixture(scope="module")
def door(served: tuple[Bus, SteppedWorker]) -> Gateway:
    return served[0].start_gateway()


@pytest.fixture
def worker(served: tuple[Bus, SteppedWorker]) -> SteppedWorker:
    return served[1]


class Chat:
    """The chat page in a browser, and the errors that the page has reported."""

    def __init__(
        self, browser: Browser, url: str, scheme: Scheme = "light", width: int = 1280
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.problems: list[str] = []
        self.url = url
        self.page: Page = self.opened()

    def opened(self) -> Page:
        """Opens the page in a new tab."""
        page = self.context.new_page()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.goto(self.url)
        return page

    def _said(self, message: Any) -> None:
        # A browser reports each refused request as an error.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def reload(self) -> None:
        """Waits until the page has saved everything, and reloads it."""
        expect(self.page.locator("body[data-saving]")).to_have_count(0)
        self.page.reload()

    def send(self, text: str) -> None:
        """Types a message and sends it with the keyboard."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    @property
    def answer(self) -> Locator:
        """The last answer."""
        return self.page.locator(".message.assistant").last

    @property
    def text(self) -> Locator:
        """The text of the last answer."""
        return self.answer.locator(".markdown")

    def idle(self) -> None:
        """Waits until no answer is running."""
        expect(self.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        expect(self.answer.get_by_role("button", name="Again")).to_be_visible()

    def check_accessibility(self) -> None:
        """Fails if axe finds a serious violation, or if the page is wider than the window."""
        found = Axe().run(self.page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], [n["html"] for n in one["nodes"]]) for one in serious] == []
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture
def chat(browser: Browser, door: Gateway, request: pytest.FixtureRequest) -> Iterator[Chat]:
    """The chat page. A parameter sets its color scheme and its width in pixels."""
    scheme: Scheme
    scheme, width = getattr(request, "param", ("light", 1280))
    chat = Chat(browser, door.url, scheme, width)
    yield chat
    chat.context.close()
    assert chat.problems == []


BOTH = pytest.mark.parametrize("chat", [("light", 1280), ("dark", 360)], indirect=True)


def answered(chat: Chat, worker: SteppedWorker, question: str, text: str) -> Stepped:
    """Sends a question, and answers it with ``text``."""
    chat.send(question)
    stream = worker.begun()
    stream.step(text=text, finish_reason="stop")
    chat.idle()
    return stream


@BOTH
def test_an_answer_streams_with_thinking_and_markdown(chat: Chat, worker: SteppedWorker) -> None:
    chat.send("hello")
    stream = worker.begun()
    expect(chat.answer).to_contain_text("Waiting for the model")
    stream.step(text="<think>\nfirst")
    expect(chat.answer.locator("summary")).to_have_text("Thinking …")
    expect(chat.answer.locator(".thought")).to_be_hidden()
    stream.step(text=" second\n</think>\n\nHello **you**, see `x`:\n\n- one\n- two\n\n```python\nx")
    expect(chat.text.locator("strong")).to_have_text("you")
    expect(chat.text.locator("pre")).to_have_text("x")
    expect(chat.page.get_by_role("button", name="Stop")).to_be_visible()
    stream.step(text=" = 1\n```\n\n| a | b |\n| - | -: |\n| 1 | 2 |\n", finish_reason="stop")
    chat.idle()
    expect(chat.text.locator("pre")).to_have_text("x = 1")
    expect(chat.text.locator("figcaption span")).to_have_text("python")
    expect(chat.text.get_by_role("listitem")).to_have_count(2)
    expect(chat.text.get_by_role("cell").last).to_have_text("2")
    summary = chat.answer.locator("summary")
    expect(summary).to_have_text("Thinking")
    summary.click()
    expect(chat.answer.locator(".thought")).to_contain_text("first second")
    chat.check_accessibility()


def test_output_of_a_model_never_becomes_html(chat: Chat, worker: SteppedWorker) -> None:
    requested: list[str] = []
    chat.page.on("request", lambda request: requested.append(request.url))
    answered(chat, worker, "<img src=x onerror=window.hacked=1>", HOSTILE)
    tags = chat.page.evaluate(
        """() => [...new Set([...document.querySelectorAll("#thread .content *")].map(
          (element) => element.tagName.toLowerCase()))]"""
    )
    assert not {"script", "img", "iframe", "svg", "b", "i", "u"} & set(tags), tags
    links = chat.text.locator("a").evaluate_all("list => list.map((a) => [a.href, a.rel])")
    assert {href for href, _ in links} == {
        "https://example.invalid/a.png?secret",
        "https://example.invalid/",
    }
    assert {rel for _, rel in links} == {"noopener noreferrer nofollow"}
    assert chat.page.evaluate("window.hacked === undefined")
    assert all(url.startswith(chat.url) for url in requested)
    expect(chat.text.locator("h3")).to_contain_text("<img src=x onerror=")


SLOW = {
    "brackets": "[" * 60_000,
    "stars": "*a" * 30_000,
    "ticks": "`" * 50_000,
    "quotes": "> " * 30_000,
    "targets": "](" * 30_000,
    "items": "- " * 30_000,
    "columns": "|" * 401 + "\n" + "|-" * 400 + "|\n" + "|\n" * 20_000,
    "rows": "a|" * 64 + "\n" + "-|" * 64 + "\n" + "|\n" * 9_000,
    "hashes": "# " + " #" * 30_000,
    "spaces": "x" + " " * 60_000 + "\ny",
    "spaces in a target": "[a](" + " " * 60_000 + "x",
    "tildes": "~" * 60_000 + "`",
}
"""Markdown texts for which a parser with backtracking takes long."""


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_text_that_is_made_to_be_slow_is_shown(
    chat: Chat, worker: SteppedWorker, text: str
) -> None:
    answered(chat, worker, "slow", text)
    assert chat.text.evaluate("element => element.querySelectorAll('*').length") < 200_000


def test_a_stopped_answer_stays_and_can_be_asked_for_again(
    chat: Chat, worker: SteppedWorker
) -> None:
    chat.send("hello")
    stream = worker.begun()
    stream.step(text="partial")
    expect(chat.text).to_have_text("partial")
    chat.page.keyboard.press("Escape")
    assert worker.cancelled() == stream.request
    chat.idle()
    expect(chat.answer).to_contain_text("Stopped.")
    expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()
    chat.answer.get_by_role("button", name="Again").click()
    again = worker.begun()
    assert again.generate.seed != stream.generate.seed
    again.step(text="whole", finish_reason="stop")
    expect(chat.text).to_have_text("whole")
    expect(chat.answer).to_contain_text("2 of 2")
    chat.answer.get_by_role("button", name="Earlier version").click()
    expect(chat.text).to_have_text("partial")
    expect(chat.answer.get_by_role("button", name="Later version")).to_be_focused()


def test_an_edited_message_begins_a_version_of_the_conversation(
    chat: Chat, worker: SteppedWorker
) -> None:
    answered(chat, worker, "first", "one")
    answered(chat, worker, "second", "two")
    field = chat.page.get_by_label("Message", exact=True)
    field.press("ArrowUp")
    editor = chat.page.locator(".message textarea")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("second")
    editor.fill("changed")
    chat.check_accessibility()
    editor.press("Enter")
    stream = worker.begun()
    stream.step(text="three", finish_reason="stop")
    expect(chat.text).to_have_text("three")
    users = chat.page.locator(".message.user")
    expect(users).to_have_count(2)
    expect(users.last).to_contain_text("changed")
    users.last.get_by_role("button", name="Earlier version").click()
    expect(chat.text).to_have_text("two")
    chat.reload()
    expect(chat.text).to_have_text("two")
    chat.answer.get_by_role("button", name="Branch").click()
    expect(chat.page.locator("#conversations > li")).to_have_count(2)
    expect(chat.page.locator(".versions")).to_have_count(0)


def test_conversations_are_kept_renamed_and_deleted(chat: Chat, worker: SteppedWorker) -> None:
    page = chat.page
    rows = page.locator("#conversations > li")
    answered(chat, worker, "first question", "one")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#blank")).to_be_visible()
    answered(chat, worker, "second question", "two")
    expect(rows.locator(".title")).to_have_text(["second question", "first question"])
    field = page.get_by_label("Message", exact=True)
    field.fill("not sent yet")
    rows.last.locator(".title").click()
    expect(chat.text).to_have_text("one")
    expect(field).to_have_value("")
    rows.first.locator(".title").click()
    expect(field).to_have_value("not sent yet")
    page.reload()
    expect(chat.text).to_have_text("two")
    expect(field).to_have_value("not sent yet")

    rows.last.get_by_role("button", name="Rename").click()
    rows.last.get_by_label("Title").fill("other name")
    page.keyboard.press("Enter")
    expect(rows.last.locator(".title")).to_have_text("other name")
    rows.first.get_by_role("button", name="Delete").click()
    rows.first.get_by_role("button", name="Keep").click()
    expect(rows).to_have_count(2)
    rows.first.get_by_role("button", name="Delete").click()
    rows.first.locator(".danger").click()
    expect(rows).to_have_count(1)
    expect(page.locator("#blank")).to_be_visible()


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(
    chat: Chat, worker: SteppedWorker
) -> None:
    page = chat.page
    chat.send("hello")
    stream = worker.begun()
    stream.step(text="one")
    expect(chat.text).to_have_text("one")
    page.get_by_role("button", name="Delete").click()
    page.locator(".danger").click()
    # CANCELs of earlier tests' streams may arrive first.
    while worker.cancelled() != stream.request:
        pass
    expect(page.locator("#blank")).to_be_visible()
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("stepped")
    expect(page.locator("#conversations > li")).to_have_count(0)


def test_calls_are_shown_and_their_results_are_sent(chat: Chat, worker: SteppedWorker) -> None:
    page = chat.page
    page.get_by_role("button", name="Settings").click()
    tools = page.get_by_label("Tools, as a JSON list of functions")
    tools.fill('[{"name": "weather"')
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#tools-fault")).to_contain_text("The tools are not valid JSON")
    expect(tools).to_be_focused()
    chat.check_accessibility()
    tools.fill('[{"name": "weather", "parameters": {"type": "object"}}]')
    page.get_by_label("Instructions").fill("Be brief.")
    page.get_by_role("button", name="Save").click()

    chat.send("weather?")
    stream = worker.begun()
    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>'
    stream.step(text=call, finish_reason="stop")
    form = chat.answer.locator("form")
    expect(chat.answer.locator("pre")).to_have_text('{\n  "place": "Bern"\n}')
    form.get_by_label("Result of weather").fill("sunny")
    chat.check_accessibility()
    page.reload()
    expect(form.get_by_label("Result of weather")).to_have_value("sunny")
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data))
    form.get_by_role("button", name="Send results").click()
    stream = worker.begun()
    stream.step(text="It is sunny.", finish_reason="stop")
    expect(chat.text).to_have_text("It is sunny.")
    [body] = [json.loads(data) for data in sent if data]
    assert [one["role"] for one in body["messages"]] == ["system", "user", "assistant", "tool"]
    assert body["messages"][-1]["content"] == "sunny"
    expect(page.locator("form").filter(has_text="Send results")).to_have_count(0)


def test_an_error_is_shown_at_its_place_and_nothing_is_lost(
    chat: Chat, worker: SteppedWorker
) -> None:
    page = chat.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#temperature-fault")).to_be_visible()
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Maximum tokens").fill("999999999999")
    page.get_by_role("button", name="Save").click()
    chat.send("kept")
    fault = chat.answer.get_by_role("alert")
    expect(fault).to_contain_text("Maximum tokens: expected a whole number of at most")
    chat.check_accessibility()
    fault.get_by_role("button", name="Settings").click()
    expect(page.locator("#max_tokens-fault")).to_be_visible()
    page.get_by_label("Maximum tokens").fill("5")
    page.get_by_role("button", name="Save").click()
    fault.get_by_role("button", name="Try again").click()
    stream = worker.begun()
    assert stream.generate.max_tokens == 5
    stream.step(text="cut", finish_reason="length")
    expect(chat.text).to_have_text("cut")
    expect(chat.answer).to_contain_text("maximum number of tokens")
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator(".said")).to_have_text("kept")


def test_a_cut_connection_is_resumed(browser: Browser, served: tuple[Bus, SteppedWorker]) -> None:
    bus, worker = served
    first = bus.start_gateway()
    chat = Chat(browser, first.url)
    expect(chat.page.get_by_label("Model")).to_have_value("stepped")
    chat.send("hello")
    stream = worker.begun()
    stream.step(text="one ")
    expect(chat.text).to_have_text("one")
    first.process.kill()
    expect(chat.answer).to_contain_text("The connection was cut. Trying again.")
    bus.start_gateway(http=first.url.removeprefix("http://"))
    worker.attached()
    stream.send_again()
    stream.step(text="two", finish_reason="stop")
    expect(chat.text).to_have_text("one two")
    chat.idle()
    chat.context.close()


def test_a_reloaded_page_resumes_its_answer(chat: Chat, worker: SteppedWorker) -> None:
    chat.send("hello")
    stream = worker.begun()
    stream.step(text="one ")
    expect(chat.text).to_have_text("one")
    chat.reload()
    again = worker.begun()
    assert again.generate.seed == stream.generate.seed
    again.step(text="one ")
    again.step(text="two", finish_reason="stop")
    expect(chat.text).to_have_text("one two")


def test_two_tabs_show_the_same_conversations(chat: Chat, worker: SteppedWorker) -> None:
    answered(chat, worker, "hello", "one")
    other = chat.opened()
    expect(other.locator("#conversations .title")).to_have_text("hello")
    other.locator("#conversations .title").click()
    expect(other.locator(".markdown")).to_have_text("one")
    answered(chat, worker, "more", "two")
    expect(other.locator(".markdown").last).to_have_text("two")


@pytest.mark.parametrize("chat", [("dark", 360)], indirect=True)
def test_a_phone_shows_the_conversations_in_a_drawer(chat: Chat, worker: SteppedWorker) -> None:
    page = chat.page
    answered(chat, worker, "hello " * 40, "word" * 300)
    menu = page.get_by_role("button", name="Conversations")
    expect(page.locator("#sidebar")).to_be_hidden()
    menu.click()
    expect(page.get_by_role("button", name="New conversation")).to_be_focused()
    chat.check_accessibility()
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(menu).to_be_focused()


def test_the_page_asks_for_a_key_if_the_gateway_requires_one(
    browser: Browser, served: tuple[Bus, SteppedWorker], tmp_path: Path
) -> None:
    bus, worker = served
    key = new_key()
    file = tmp_path / "api-keys"
    file.write_text(f"ann {hash_of(key)}\n")
    gateway = bus.start_gateway(api_keys=file)
    chat = Chat(browser, gateway.url)
    dialog = chat.page.get_by_role("dialog", name="API key")
    for given in ("tb-wrong", key):
        expect(dialog).to_be_visible()
        dialog.get_by_label("Key", exact=True).fill(given)
        dialog.get_by_role("button", name="Connect").click()
    expect(dialog).to_be_hidden()
    expect(chat.page.get_by_label("Model")).to_have_value("stepped")
    answered(chat, worker, "hello", "one")
    with chat.context.expect_page() as opening:
        chat.answer.get_by_role("link", name="Why this token").click()
    console = opening.value
    expect(console.get_by_text("connected", exact=True)).to_be_visible()
    stream = worker.begun()
    stream.step(text="one", finish_reason="stop")
    expect(console.locator("#progress")).to_contain_text("finished")
    chat.context.close()


def test_an_answer_opens_in_the_console_with_the_same_tokens(
    browser: Browser, gateway: Gateway
) -> None:
    chat = Chat(browser, gateway.url)
    page = chat.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Maximum tokens").fill("12")
    page.get_by_role("button", name="Save").click()
    chat.send("def add(a, b):")
    chat.idle()
    shown = page.evaluate(
        """async () => {
          const { Store } = await import("/chat/store.js");
          const store = new Store();
          const [{ id }] = await store.list();
          return (await store.get(id)).messages.at(-1).text;
        }"""
    )
    assert shown
    with chat.context.expect_page() as opening:
        chat.answer.get_by_role("link", name="Why this token").click()
    console = opening.value
    expect(console.locator("#progress")).to_contain_text("finished: 12 tokens")
    expect(console.locator("#prompt")).to_have_value(re.compile(r"User: def add"))
    # The console shows the sign \u21b5 for each newline.
    text = (console.locator("#sequences .text").text_content() or "").replace("\u21b5", "")
    assert shown.strip() in text
    assert chat.problems == []
    chat.context.close()
