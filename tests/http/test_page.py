"""The page and the chat in a real browser: live, in any width and colour, closed to others."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_model import write_chat_model
from playwright import sync_api as playwright

from kvdb.history import RequestRecord
from kvdb.keys import create_key
from tests.http.conftest import Running, StartServer

REFUSED = re.compile("status of 40[13]")  # how Chromium tells of an answer that asks for a key
HOSTILE = "<img src=x onerror=alert(1)>\u202egnp"
WORDS = "one two three four five six seven eight nine ten "
# One that is installed, else the one that `playwright install chromium` fetched.
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("KVDB_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        try:
            browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(
                f"NO BROWSER, SO THE PAGE IS NOT TESTED: playwright install chromium ({error})"
            )
        yield browser
        browser.close()


class Tab:
    """A page of one's own browser context, and what it must not do: complain, or ask elsewhere."""

    def __init__(self, browser: Any, url: str, path: str = "/", **look: Any) -> None:
        self.url = url
        self.wrong: list[str] = []
        self.context = browser.new_context(**look)
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(url + path)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not REFUSED.search(message.text):
            self.wrong.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self.url):
            self.wrong.append(request.url)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.wrong == []


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes prompts long enough to be watched."""
    return write_chat_model(
        tmp_path_factory.mktemp("models") / "chat", max_position_embeddings=1 << 15
    )


@pytest.fixture(scope="module")
def server(start: StartServer) -> Running:
    """With one miss and one hit in its history, of a tenant with a hostile name."""
    server = start(step=16)
    server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": WORDS * 4}],
        max_tokens=4,
        extra_headers={"x-kvdb-tenant": "acme"},
    )
    assert server.store is not None
    assert server.store.flush(30)
    namespace = server.store.namespaces()[0].id
    for restored in (0, 80):
        server.store.record(
            RequestRecord(
                started_at=server.store.environment.now_us(),
                namespace_id=namespace,
                tenant=HOSTILE,
                client=HOSTILE,
                prompt_tokens=100,
                restored_tokens=restored,
                refilled_tokens=0,
                computed_tokens=100 - restored,
                generated_tokens=1,
                skip="partial" if restored else "none",
                miss_reason="divergence",
                prefill_ms=5000.0,
            )
        )
    assert server.store.flush(30)
    return server


@contextmanager
def prefill(server: Running, sentences: int) -> Iterator[None]:
    """Inside, a long prompt is on its way; then its client goes away."""
    enough = threading.Event()
    body = {"model": "tiny", "stream": True, "max_tokens": 4}
    body["messages"] = [{"role": "user", "content": WORDS * sentences}]

    def ask() -> None:
        with httpx.stream(
            "POST",
            f"{server.url}/v1/chat/completions",
            json=body,
            headers={"user-agent": "agent/1 <b>"},
            timeout=60,
        ) as response:
            for _ in response.iter_lines():
                if enough.is_set():
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


@pytest.mark.parametrize(
    ("width", "scheme"), [(1000, "light"), (1000, "dark"), (360, "light")], ids=str
)
def test_it_fits_and_is_readable(
    server: Running, browser: Any, width: int, scheme: str, tmp_path: Path
) -> None:
    with Tab(
        browser, server.url, viewport={"width": width, "height": 700}, color_scheme=scheme
    ) as page:
        page.wait_for_selector("#sections section")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".bars rect").count() > 1
        assert page.locator(".levels .meter").first.bounding_box()["height"] < 20
        text = page.inner_text("body")
        for said in ("Tokens saved", "Time saved", "What prompts have in common", "costliest"):
            assert said in text
        # Foreign names are text, on one line and with their direction made visible.
        assert "<img src=x onerror=alert(1)>⟨202E⟩gnp" in text
        assert page.locator("img").count() == 0
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body)"
            ".backgroundColor].map(c => c.match(/\\d+/g).reduce((a, b) => a + +b, 0))"
        )
        assert (ink > paper) == (scheme == "dark")
        assert abs(ink - paper) > 400


def test_the_bar_of_a_prefill_moves_without_reload(server: Running, browser: Any) -> None:
    with Tab(browser, server.url) as page:
        page.evaluate("document.body.dataset.same = 'page'")
        with prefill(server, 500):
            row = page.locator("#running li[data-state=prefill]")
            row.wait_for()
            assert "agent/1 <b>" in row.inner_text()
            before = page.eval_on_selector("#running progress", "bar => bar.value")
            page.wait_for_function(
                "before => document.querySelector('#running progress')?.value > before", arg=before
            )
        page.wait_for_selector("#none-running", state="visible")
        assert page.evaluate("document.body.dataset.same") == "page"


def test_a_chat_says_what_was_cached(server: Running, browser: Any) -> None:
    questions = [WORDS.upper() * 5 + "<b>?", "and then?"]
    with Tab(browser, server.url, "/chat") as page:
        for number, question in enumerate(questions):
            page.fill("#text", question)
            page.keyboard.press("Enter")
            page.locator(".assistant .facts", has_text="cached").nth(number).wait_for()
        told = page.locator(".assistant .facts").all_inner_texts()
        asked = page.locator(".user").all_inner_texts()
        assert asked == questions
        counts = [[int(text.split(" ")[i].replace(",", "")) for i in (0, 2)] for text in told]
        assert counts[0][0] < 16  # what every prompt of the template begins with
        cached, prompt = counts[1]
        assert 80 < cached < prompt
        row = server.one(
            "SELECT restored_tokens, prompt_tokens FROM requests ORDER BY id DESC LIMIT 1"
        )
        assert row == (cached, prompt)


def test_a_chat_shows_the_prefill_and_stops(server: Running, browser: Any) -> None:
    with Tab(browser, server.url, "/chat") as page:
        page.fill("#text", WORDS[::-1] * 300)
        page.click("#send")
        page.wait_for_selector(".assistant progress")
        assert "Prefill" in page.inner_text(".assistant .facts")
        box = page.locator(".assistant progress").bounding_box()
        assert 0 < box["y"] < page.locator("#ask").bounding_box()["y"]  # and is in sight
        page.click("#stop")
        page.wait_for_selector("#send", state="visible")
        assert page.inner_text(".assistant .facts") == "Stopped"
        while server.service.running():
            page.wait_for_timeout(20)


@pytest.fixture(scope="module")
def guarded(start: StartServer) -> tuple[str, dict[str, str]]:
    """A server that needs keys, and its keys by role; it holds a prompt of the main key's."""
    server = start()
    assert server.store is not None
    keys = {
        "main": create_key(server.store, "main").text,
        "admin": create_key(server.store, "admin").text,
        "tenant": create_key(server.store, "tenant", tenant="acme").text,
    }
    body = {"model": "tiny", "messages": [{"role": "user", "content": WORDS * 4}], "max_tokens": 2}
    answer = server.post("/v1/chat/completions", body, authorization=f"Bearer {keys['main']}")
    assert answer.status_code == 200
    assert server.store.flush(30)
    return server.url, keys


def test_with_keys_it_asks_for_one(guarded: tuple[str, dict[str, str]], browser: Any) -> None:
    url, keys = guarded
    with Tab(browser, url) as page:
        page.wait_for_selector("#key-form", state="visible")
        for key, said in (("kvdb_wrong", "not valid"), (keys["tenant"], "may not see")):
            page.fill("#key", key)
            page.keyboard.press("Enter")
            page.wait_for_selector(f"#problem:has-text('{said}')")
        page.fill("#key", keys["main"])
        page.keyboard.press("Enter")
        page.wait_for_selector("#sections section")
        assert keys["main"] not in page.content()
        assert page.evaluate("[localStorage.length, document.cookie, location.search]") == [
            0,
            "",
            "",
        ]
        page.click("#forget")
        page.wait_for_selector("#key-form", state="visible")


def test_only_who_may_sees_figures_and_texts(guarded: tuple[str, dict[str, str]]) -> None:
    url, keys = guarded

    def overview(role: str) -> httpx.Response:
        bearer = {"authorization": f"Bearer {keys[role]}"}
        return httpx.get(f"{url}/v1/kvdb/overview", headers=bearer, timeout=30)

    assert httpx.get(f"{url}/v1/kvdb/overview").status_code == 401
    assert overview("tenant").status_code == 403
    assert "three four" not in overview("main").text
    assert "three four" in overview("admin").text
    first = overview("main").json()["figures"]
    seen = httpx.get(
        f"{url}/v1/kvdb/overview?seen={first['version']}",
        headers={"authorization": f"Bearer {keys['main']}"},
    ).json()
    assert seen["figures"] is None


def test_a_page_may_load_nothing_from_elsewhere(server: Running) -> None:
    for path in ("/", "/chat", "/pages/index.js", "/pages/report.css"):
        answer = httpx.get(server.url + path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert httpx.get(f"{server.url}/pages/__init__.py").status_code == 404
    # Another test made keys: a path that is none of ours is administration.
    assert httpx.get(f"{server.url}/pages/..%2fapp.py").status_code in (401, 404)
