"""The TypeScript client has the message types of ``protocol/``, has no type ``any``, and passes its
own tests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Route, sync_playwright
from tokenbus.clients.gateway.users.keys import hash_of, new_key
from tokenbus.clients.typescript.generate import OUTPUT, typescript

from ..processes import Bus, Gateway
from ..worlds.keyed_broker import KeyedBroker
from . import wasm_guests
from .typescript_package import needs_node, run

KEY = new_key()
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def test_the_committed_messages_are_those_of_the_structs() -> None:
    assert OUTPUT.read_text() == typescript(), (
        f"{OUTPUT.name} does not match the structs; run "
        "python -m tokenbus.clients.typescript.generate"
    )


@needs_node
def test_the_public_types_have_no_any(package: Path) -> None:
    declarations = [*(package / "dist" / "src").glob("*.d.ts")]
    assert declarations
    for file in declarations:
        text = re.sub(r"/\*.*?\*/|//.*", "", file.read_text(), flags=re.DOTALL)
        assert not re.search(r"\bany\b", text), file.name


@needs_node
def test_its_own_tests_pass_on_a_running_system(
    package: Path, steered: Bus, gateway: Gateway, tmp_path: Path
) -> None:
    for name in ("LOGS", "FAILS", "FORKS", "SPLICES"):
        (tmp_path / f"{name.lower()}.wasm").write_bytes(getattr(wasm_guests, name))
    tests = sorted((package / "dist" / "test").glob("*.test.js"))
    # In one of eight runs, a closed socket of npm's zeromq keeps the event loop alive forever.
    node = tuple(map(int, run("node", "--version").strip("v\n").split(".")))
    output = run(
        "node",
        "--test",
        *(["--test-force-exit"] if node >= (20, 14) else []),
        *tests,
        TOKENBUS_TEST_FRONT=steered.front,
        TOKENBUS_TEST_WS=gateway.ws_url,
        TOKENBUS_TEST_WASM=tmp_path,
    )
    assert re.search(r"^. pass [1-9]", output, re.MULTILINE), output


@needs_node
def test_the_first_minute_of_its_readme_works(package: Path, steered: Bus) -> None:
    [example] = re.findall(r"```js\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)
    (package / "dist" / "first.mjs").write_text(example)
    output = run("node", "dist/first.mjs", TOKENBUS_FRONT=steered.front)
    assert re.search(r"^[0-9]{3}-[0-9]{4}$", output, re.MULTILINE), output


@needs_node
def test_a_broker_with_keys_is_reported_as_the_reason(package: Path) -> None:
    (package / "dist" / "refused.mjs").write_text(
        'import { Client } from "./src/node.js";\n'
        "const client = new Client(process.env.TOKENBUS_TEST_FRONT, { patience_s: 300 });\n"
        "try {\n"
        '  await client.generate("x").text();\n'
        "} catch (error) {\n"
        "  console.log(error.code, error.message);\n"
        "}\n"
        "process.exit();\n"
    )
    with KeyedBroker() as broker:
        output = run("node", "dist/refused.mjs", TOKENBUS_TEST_FRONT=broker.front)
        assert output.startswith(
            f"not_allowed the broker at {broker.front} accepts only connections with a key"
        )


# --- over a WebSocket with an API key -------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(steered: Bus, tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    """A gateway that requires an API key."""
    file = tmp_path_factory.mktemp("keys") / "api-keys"
    file.write_text(f"ann {hash_of(KEY)}\n")
    return steered.start_gateway(api_keys=file)


@needs_node
def test_node_sends_its_api_key_and_sees_that_one_is_refused(
    package: Path, guarded: Gateway
) -> None:
    (package / "dist" / "keys.mjs").write_text(
        """
        import { Client } from "tokenbus";
        for (const api_key of [process.argv[3], "wrong", undefined]) {
          const client = new Client(process.argv[2], { api_key });
          await client.status().then(
            (status) => console.log(status.workers.length),
            (error) => console.log(error.name, error.code, error.message),
          );
          client.close();
        }
        """
    )
    output = run("node", "dist/keys.mjs", guarded.ws_url, KEY)
    refused = (
        "RequestError not_allowed the gateway refused the WebSocket with HTTP status 401; give the "
        "client a valid api_key"
    )
    assert output.splitlines() == ["3", refused, refused]


@needs_node
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_a_page_in_a_real_browser_streams_tokens(package: Path, guarded: Gateway) -> None:
    def source(route: Route) -> None:
        file = package / "dist" / "src" / route.request.url.rpartition("/")[2]
        route.fulfill(path=file, content_type="text/javascript")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.route(f"{guarded.url}/tokenbus/*", source)
        page.goto(f"{guarded.url}/live")
        said = page.evaluate(
            """async (api_key) => {
              const { Client, RequestError } = await import("/tokenbus/browser.js");
              const client = new Client(undefined, { api_key });
              const options = { arg: "[0-9]{3}-[a-f]{2}", max_tokens: 30 };
              let text = "";
              for await (const token of client.run("regex", "x = ", options)) text += token.text;
              const refused = await client.modelInfo("no-such-model").catch((error) => error);
              client.close();
              return [text, refused instanceof RequestError, refused.code];
            }""",
            KEY,
        )
        browser.close()
    text, is_request_error, code = said
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", text)
    assert (is_request_error, code) == (True, "unknown_model")
