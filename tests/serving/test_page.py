"""The page at `/` in headless Chromium: tokens in colour, charts, positions, stop; what the model writes is never HTML."""

from __future__ import annotations

import shutil

import httpx
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (dspine[fuzz])")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser, toy):
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.problems.append(request.url) if toy.url not in request.url else None)
    page.goto(f"{toy.url}/")
    page.locator("#facts", has_text="dflash").wait_for()
    page.fill("#limit", "40")
    yield page
    assert not page.problems  # no script error, and nothing was fetched from elsewhere
    context.close()


def send(page, text):
    page.fill("#prompt", text)
    page.click("#send")
    page.locator(".answer").last.wait_for(state="attached")
    page.locator("#send:not([disabled])").wait_for()


def test_page_is_one_file_without_a_key(toy):
    answer = httpx.get(f"{toy.url}/")
    assert (
        answer.headers["content-type"].startswith("text/html")
        and "default-src 'none'" in answer.headers["content-security-policy"]
    )
    assert "src=" not in answer.text and "http://" not in answer.text and "https://" not in answer.text


def test_answer_in_colours(toy, page):
    send(page, "hello page")
    body = {"model": "toy", "messages": [{"role": "user", "content": "hello page"}], "max_tokens": 40, "temperature": 0}
    answer = httpx.post(f"{toy.url}/v1/chat/completions", json=body).json()
    spec, text = answer["usage"]["speculative"], answer["choices"][0]["message"]["content"]
    shown = page.eval_on_selector_all(".answer .t", "nodes => nodes.map(n => n.textContent).join('')")
    assert shown == text
    assert page.locator(".answer .accepted").count() == spec["accepted"] > 0
    assert page.locator(".answer .corrected").count() > 0 and page.locator(".answer .refused").count() > 0
    assert f"in {spec['rounds']} rounds" in page.text_content("#counts") and float(page.text_content("#rate")) > 0
    assert float(page.text_content("#length")) == pytest.approx(spec["tokens_per_round"], abs=0.006)
    bars = page.locator("#positions .bar")
    assert bars.count() == len(spec["drafted_at"])
    share = round(100 * spec["acceptance_by_position"][0])
    assert bars.nth(0).text_content() == f"1{share} % of {spec['drafted_at'][0]}"
    painted = "id => document.getElementById(id).getContext('2d').getImageData(0, 0, 600, 220).data.some(x => x > 0)"
    assert page.evaluate(painted, "rounds") and page.evaluate(painted, "speed")
    page.uncheck("#refused")
    assert not page.locator(".answer .refused").first.is_visible()


def test_model_text_is_not_html(toy, page):
    toy.target.scripts["attack"] = "<img src=x onerror=alert(1)><b>bold</b>"
    send(page, "attack")
    assert page.locator(".answer img, .answer b").count() == 0
    assert "<b>bold</b>" in page.eval_on_selector_all(".answer .t", "nodes => nodes.map(n => n.textContent).join('')")


def test_second_turn_stop_and_errors(toy, page):
    toy.target.scripts["one"] = "first."
    send(page, "one")
    page.uncheck("#draft")
    send(page, "two")
    assert page.locator(".answer").count() == 2 and page.locator(".answer >> nth=1").locator(".accepted").count() == 0
    toy.target.slow = 0.02
    page.fill("#limit", "300")
    page.fill("#prompt", "long")
    page.click("#send")
    page.wait_for_selector(".answer >> nth=2 >> .t >> nth=3")
    page.click("#stop")
    page.locator("#send:not([disabled])").wait_for()
    toy.target.slow = 0.0
    assert page.locator(".answer >> nth=2 >> .t").count() < 300
    page.problems.clear()
    page.fill("#limit", "100000")
    send(page, "too much")
    assert "max_tokens" in page.text_content(".error")
    page.problems.clear()  # the browser itself notes the 400
