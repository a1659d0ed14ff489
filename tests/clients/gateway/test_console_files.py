"""The headers and the contents with which the console's files are served."""

from __future__ import annotations

import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tokenbus.clients.gateway import console, pages


@pytest.fixture(scope="module")
def files() -> TestClient:
    return TestClient(Starlette(routes=console.routes()))


def test_the_page_and_every_file_that_it_names_are_served_with_their_types(
    files: TestClient,
) -> None:
    page = files.get("/console")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:href|src)="(console/[^"]+)"', page.text)
    scripts = [f"console/{path.name}" for path in console.FOLDER.glob("*.js")]
    for name in {*named, *scripts}:
        answer = files.get(f"/{name}")
        assert answer.status_code == 200, name
        suffix = "." + name.rpartition(".")[2]
        assert answer.headers["content-type"].startswith(pages.TYPES[suffix])


def test_the_page_names_nothing_of_another_origin() -> None:
    for path in console.FOLDER.iterdir():
        if path.suffix == ".wasm":
            continue
        outside = set(re.findall(r"https?://[^\s\"')]+", path.read_text()))
        assert outside <= {"http://www.w3.org/2000/svg"}, path.name


def test_a_policy_allows_the_files_of_the_page_and_nothing_else(files: TestClient) -> None:
    answer = files.get("/console")
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "style=" not in answer.text, "the policy forbids style attributes"


def test_a_browser_asks_whether_its_copy_is_the_newest(files: TestClient) -> None:
    first = files.get("/console/main.js")
    assert first.headers["cache-control"] == "no-cache"
    known = {"if-none-match": f'"another", W/{first.headers["etag"]}'}
    again = files.get("/console/main.js", headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert files.get("/console/base.css", headers=known).status_code == 200


def test_only_the_files_of_the_page_are_served(files: TestClient) -> None:
    for path in ("/console/", "/console/../app.py", "/console/%2e%2e/app.py", "/console/none.js"):
        answer = files.get(path, follow_redirects=False)
        assert answer.status_code in (307, 404), path
    assert files.get("/console/").url.path == "/console"
