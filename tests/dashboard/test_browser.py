"""The page in a browser, before a cluster of real processes. Skipped where there is no Chromium."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import elasticps as eps
from elasticps.dashboard.serve import Dashboard, make_token
from tests.conftest import NewCluster
from tests.dashboard.chromium import chromium, faults, needs_chromium, open_page, picture, wait

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, needs_chromium]  # a browser, and processes
CACHED = """[...document.querySelectorAll('#workers tbody tr')].some((row) => row.cells[0].textContent === 'w0'
  && row.cells[8].textContent.includes('%') && row.cells[9].textContent.includes('B'))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_a_server_is_killed_its_arc_turns_grey_and_it_comes_back(browser: Browser, local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=3, ranges=64, measure=True)
    dashboard = Dashboard(cluster.url, port=0)
    dashboard.start()
    ended = threading.Event()

    def train() -> None:
        with eps.connect(cluster.url, worker="w0") as ps:
            table = ps.table("items", dim=8, optimizer=eps.SGD(lr=0.1), cache=eps.Cache(rows=1000, staleness=4))
            keys = np.arange(500)
            while not ended.is_set():
                ps.push({table: (keys, np.ones((500, 8), np.float32))}).result()
                table.pull(keys)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        page, wrong = open_page(browser, dashboard.address)
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
        page.wait_for_selector("#entries li[data-kind=loss] .parts:has-text('detected by the leader')")
        picture(page, "lost")
        cluster.start_server("s1")
        page.wait_for_selector(f'{arc}[data-state="serving"]')
        assert page.get_attribute(arc, "fill") == before
        page.wait_for_selector("#health.good")

        page.click("#look")
        page.wait_for_selector("#hot td:has-text('default/items')")
        wait(page, CACHED)

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
            picture(page, scheme, whole=True)
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        picture(page, "phone")
        page.set_viewport_size({"width": 1280, "height": 1000})

        ended.set()
        trainer.join()
        cluster.stop()
        page.wait_for_selector("#health:has-text('down')")
        page.wait_for_selector("#trouble:has-text('etcd')")
        picture(page, "down")
        assert wrong == []
    finally:
        ended.set()
        trainer.join()
        dashboard.stop()


def test_servers_are_added_and_removed_on_the_page_with_a_token(browser: Browser, state_folder: Path) -> None:
    command = [sys.executable, "-m", "elasticps"]
    up = [*command, "up", "--servers", "2", "--ranges", "32", "--name", "demo", "--detach", "--json"]
    started = json.loads(subprocess.run(up, capture_output=True, text=True, timeout=100, check=True).stdout)
    dashboard = Dashboard(started["url"], port=0, token=make_token(started["url"]))
    dashboard.start()
    try:
        page, wrong = open_page(browser, dashboard.address)
        page.wait_for_selector("#health.good")
        page.fill("#count", "3")
        page.click("#whatif button[value=scale]")
        page.wait_for_selector("#forecast:has-text('s2')")
        page.click("#back")
        page.click("#scale")
        page.wait_for_selector("#forecast:has-text('takes the token')")
        page.fill("#token", dashboard._token)
        page.click("#scale")
        page.wait_for_selector("#forecast:has-text('s0, s1, s2 serve')")
        page.wait_for_selector('#arcs path[data-server="s2"][data-state="serving"]')
        picture(page, "scaled")
        page.select_option("#leaver", "s1")
        page.click("#drain")
        page.wait_for_selector("#forecast:has-text('s1 drains')")
        page.wait_for_selector("#entries li[data-kind=drain]:has-text('drain of s1 asked')")
        page.wait_for_selector('#arcs path[data-server="s1"]', state="detached")
        page.fill("#count", "1")
        page.click("#scale")  # it goes by what still runs: s2 is drained, and the process that ended is no trouble
        page.wait_for_selector("#forecast:has-text('s0 serve')")
        wait(page, "document.querySelectorAll('#arcs path.arc').length === 1")
        assert [text for text in wrong if "401" not in text] == []
    finally:
        dashboard.stop()
        down = subprocess.run([*command, "down", "--name", "demo"], capture_output=True, timeout=60, check=False)
    assert down.returncode == 0, down.stderr
