"""The page in a browser, before a cluster of real processes. Skipped where there is no Chromium."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import elasticps as eps
from elasticps.dashboard.serve import Dashboard
from tests.conftest import NewCluster

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RUNS = Path(__file__).parents[2] / "runs" / "dashboard"
WAIT_MS = 40_000

pytestmark = [
    pytest.mark.slow,  # a browser, and processes
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def faults(page: Page) -> list[str]:
    """What axe-core calls serious or worse."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{f['id']}: {f['nodes'][0]['html']}" for f in found if f["impact"] in ("serious", "critical")]


def test_a_server_is_killed_its_arc_turns_grey_and_it_comes_back(browser: Browser, local_cluster: NewCluster) -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    cluster = local_cluster(servers=3, ranges=64, measure=True)
    dashboard = Dashboard(cluster.url, port=0)
    dashboard.start()
    ended = threading.Event()

    def train() -> None:
        with eps.connect(cluster.url, worker="w0") as ps:
            table = ps.table("items", dim=8, optimizer=eps.SGD(lr=0.1))
            keys = np.arange(500)
            while not ended.is_set():
                ps.push({table: (keys, np.ones((500, 8), np.float32))}).result()
                table.pull(keys)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(WAIT_MS)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.goto(dashboard.address)
        page.wait_for_selector("#health.good")
        page.wait_for_selector("#workers td:has-text('w0')")
        arc = '#arcs path[data-server="s1"]'
        page.wait_for_selector(f'{arc}[data-state="serving"]')
        before = page.get_attribute(arc, "fill")

        cluster.kill("s1")
        page.wait_for_selector(f'{arc}[data-state="lost"]')
        assert page.get_attribute(arc, "fill") != before
        page.wait_for_selector("#entries li[data-kind=loss]:has-text('s1 lost')")
        page.wait_for_selector("#entries li[data-kind=loss] .parts:has-text('first push')")
        page.screenshot(path=RUNS / "lost.png")
        cluster.start_server("s1")
        page.wait_for_selector(f'{arc}[data-state="serving"]')
        assert page.get_attribute(arc, "fill") == before
        page.wait_for_selector("#health.good")

        page.focus("#ranges")
        page.keyboard.press("ArrowRight")
        assert re.match(r"range 0 of 64: s\d \(head\) → s\d \(tail\)", page.inner_text("#range"))
        page.click("#whatif button[value=drain]")
        page.wait_for_selector("#forecast:has-text('elasticps drain s0')")
        page.click("#back")
        page.click("#entries li[data-kind=loss] a")
        assert "#t=" in page.url
        page.reload()
        page.wait_for_selector("#entries li.chosen[data-kind=loss]")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert faults(page) == []
            page.screenshot(path=RUNS / f"{scheme}.png", full_page=True)
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.screenshot(path=RUNS / "phone.png")
        page.set_viewport_size({"width": 1280, "height": 1000})

        ended.set()
        trainer.join()
        cluster.stop()
        page.wait_for_selector("#health:has-text('down')")
        page.wait_for_selector("#trouble:has-text('etcd')")
        page.screenshot(path=RUNS / "down.png")
        assert wrong == []
    finally:
        ended.set()
        trainer.join()
        dashboard.stop()


def test_names_never_become_html(browser: Browser) -> None:
    evil = '<img src=x onerror="document.title=1">'
    page = browser.new_page()
    page.goto("about:blank")
    script = (Path(eps.__file__).parent / "dashboard" / "static" / "format.js").read_text(encoding="utf-8")
    made = f"document.body.append(el('td', {{title: {json.dumps(evil)}}}, {json.dumps(evil)}))"
    page.evaluate(script.replace("export ", "") + made)
    assert page.inner_text("td") == evil
    assert page.query_selector("img") is None
