"""The page in a browser, before a cluster that exists in a model only. Skipped where there is no Chromium."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from coordinator.core.keys import DRAINS, NEWEST_CHECKPOINT, SERVERS, TABLES
from coordinator.core.store import Entry
from coordinator.core.view import Roster, WorkerInfo
from elasticps.system import background
from tests.dashboard.chromium import chromium, faults, needs_chromium, open_page, picture, wait
from tests.dashboard.scene import Scene, activity, use
from tests.dashboard.staged import Staged

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium
GLOWS = "moves.getContext('2d').getImageData(0, 0, moves.width, moves.height).data.some((value) => value > 0)"
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def staged() -> Iterator[Staged]:
    scene = Scene(servers=4, ranges=64, zones=2, t0=time.time() - 60)
    scene.tick(59)
    dashboard = Staged(scene, token="let me")
    dashboard.start()
    yield dashboard
    dashboard.stop()


def lose(scene: Scene) -> None:
    scene.kill("s1")


def text(page: Page, selector: str) -> str:
    return page.inner_text(selector)


def test_a_loss_is_seen_zoomed_into_and_linked_to(browser: Browser, staged: Staged) -> None:
    page, wrong = open_page(browser, staged.address)
    page.wait_for_selector("#health.good")
    arc = '#arcs path[data-server="s1"]'
    page.wait_for_selector(f'{arc}[data-state="serving"]')
    before = page.get_attribute(arc, "fill")
    page.wait_for_selector("#workers td:has-text('w1')")
    wait(page, "document.querySelectorAll('#servers tbody tr').length === 4")
    wait(page, "performance.now() > 2500")  # of its time: two samples have come
    assert page.evaluate("window.shifts") < 0.1  # more is no longer called good

    staged.do(lose)
    page.wait_for_selector(f'{arc}[data-state="lost"]')
    assert page.get_attribute(arc, "fill") != before
    loss = "#entries li[data-kind=loss]"
    page.wait_for_selector(f"{loss}:has-text('s1 lost')")
    staged.do(Scene.answer, Scene.answer)
    page.wait_for_selector(f"{loss} .parts:has-text('first push')")
    parts = text(page, f"{loss} .parts")
    assert [parts.index(part) for part in ("connection broke", "detected", "view written", "adopted")] == sorted(
        parts.index(part) for part in ("connection broke", "detected", "view written", "adopted")
    )
    assert "s1 was lost at" in text(page, "#reason")
    page.wait_for_selector("#health:has-text('healing')")
    staged.do(Scene.plan)
    wait(page, GLOWS)

    page.focus("#strip")
    assert page.get_attribute("#live", "aria-pressed") == "true"
    page.keyboard.press("+")
    assert page.get_attribute("#live", "aria-pressed") == "false"
    first = page.url
    assert re.search(r"#t=\d+\.\d+-\d+\.\d+$", first)
    page.keyboard.press("ArrowLeft")
    assert page.url != first
    page.keyboard.press("Escape")
    assert "#" not in page.url
    strip = page.locator("#strip")
    strip.scroll_into_view_if_needed()
    wait(page, "document.getElementById('trouble').hidden")  # else it moves all that is below it
    box = strip.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] - 8
    page.mouse.move(box["x"] + 0.5 * box["width"], y)
    page.mouse.down()
    for x in (0.7, 0.9):
        page.mouse.move(box["x"] + x * box["width"], y)
    page.mouse.up()
    wait(page, "location.hash.includes('-')")
    found = re.search(r"#t=(\d+\.\d+)-(\d+\.\d+)$", page.url)
    assert found is not None
    assert float(found[2]) - float(found[1]) == pytest.approx(0.4 * 300, rel=0.05)
    page.click("#live")
    page.click(f"{loss} a")
    assert re.search(r"#t=\d+\.\d+$", page.url)
    page.reload()
    page.wait_for_selector("#entries li.chosen[data-kind=loss]")
    assert wrong == []


def test_the_ring_and_previews_work_by_keyboard_and_a_drain_takes_a_token(browser: Browser, staged: Staged) -> None:
    page, wrong = open_page(browser, staged.address)
    page.wait_for_selector("#health.good")
    page.focus("#ranges")
    page.keyboard.press("ArrowRight")
    assert re.match(r"range 0 of 64: s\d \(head\) → s\d \(tail\)", text(page, "#range"))
    page.fill("#count", "6")
    page.click("#whatif button[value=scale]")
    page.wait_for_selector("#back:visible")
    assert page.locator("#arcs path.arc").count() == 6
    page.click("#back")
    wait(page, "document.querySelectorAll('#arcs path.arc').length === 4")

    background.run(staged.stage.store.put(SERVERS + "s0", staged.stage.scene.infos["s0"].to_json()))
    page.click("#drain")
    page.wait_for_selector("#forecast:has-text('takes the token')")
    page.fill("#token", "let me")
    page.click("#drain")
    page.wait_for_selector("#forecast:has-text('s0 drains')")
    assert background.run(staged.stage.store.get(DRAINS + "s0")) is not None
    page.click("#scale")
    page.wait_for_selector("#forecast:has-text('did not start the servers')")
    assert [text for text in wrong if "40" not in text] == []  # browsers report the refusals


def test_labels_of_tiny_arcs_do_not_overlap(browser: Browser, staged: Staged) -> None:
    scene = staged.stage.scene
    for i in range(4, 14):  # registered, in no view yet: each has the smallest arc
        scene.register(f"s{i}")
        background.run(staged.stage.store.put(SERVERS + f"s{i}", scene.infos[f"s{i}"].to_json()))
    page, _ = open_page(browser, staged.address)
    wait(page, "document.querySelectorAll('#arcs path.arc').length === 14")
    picture(page, "tiny-arcs")
    boxes = page.evaluate(
        "[...document.querySelectorAll('#arcs > text')].map(t => t.getBBox()).map(b => [b.x, b.y, b.width, b.height])"
    )
    assert len(boxes) >= 6
    for k, (x, y, width, height) in enumerate(boxes):
        assert min(x, y) >= -330
        assert max(x + width, y + height) <= 330
        for other_x, other_y, other_width, other_height in boxes[:k]:
            apart = x >= other_x + other_width or other_x >= x + width or y >= other_y + other_height
            assert apart or other_y >= y + height


def test_names_never_become_html_and_hot_keys_are_shown(browser: Browser, staged: Staged) -> None:
    workers = (WorkerInfo(1, "w0", 1, "default"), WorkerInfo(2, "w1", 2, "default"))
    object.__setattr__(workers[0], "name", EVIL)  # a store would refuse it
    spec = {"name": EVIL, "dim": 8, "dtype": "float32", "optimizer": {"kind": EVIL, "lr": 0.1}}
    evil_table = {"name": EVIL, "sampled": 4, "keys": [-(1 << 62), 3], "counts": [3, 1]}
    staged.stage.hot = {
        "s0": {"sampled": 4, "ranges": [5], "range_counts": [4], "tables": [evil_table]}, EVIL: None,
    }  # fmt: skip

    def name(scene: Scene) -> None:
        scene.model._roster = Roster(2, workers, "demo")
        scene.put(TABLES + "default/t", b'{"id": 7, "spec": "x"}')
        described = {"id": 7, "app": EVIL, "shape": EVIL, "filters": [EVIL], "policies": [EVIL], **spec}
        scene.model.tables._known["x"] = Entry("x", b"", 1, 1), described
        scene.put(NEWEST_CHECKPOINT, b'{"cut": 3, "time": 1763840000.0}')
        scene.model.catalog({"url": EVIL, "error": EVIL, "checkpoints": [{"cut": 3, "error": EVIL}]})
        scene.model.timeline.note(scene.now, "server", EVIL, EVIL)
        scene.silent.add("s2")
        scene.model.silent(scene.now, "s2", 1, EVIL)
        for clock in (10, 20):
            report = use(1, clock=clock, committed=clock, sent=100 * clock, received=50 * clock, wanted=9 * clock,
                       kept=3 * clock, shards=2)  # fmt: skip
            scene.model.activity(scene.now, "s0", {**activity(1, [1, 2], 20, 100), "uses": [report]})
        scene.model._change("tables", "workers")

    page, wrong = open_page(browser, staged.address)
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.wait_for_selector("#health.good")
    staged.do(name)
    for place in ("#workers", "#tables", "#checkpoints", "#entries", "#trouble"):
        page.wait_for_selector(f"{place}:has-text('onerror')")
    page.click("#look")
    page.wait_for_selector("#hot td:has-text('onerror')")
    assert f"{-(1 << 62)} (75 %)" in text(page, "#hot")
    assert "onerror" in text(page, "#looked")
    page.wait_for_selector("#workers tr:has-text('33.3 %'):has-text('150 B')")
    assert page.query_selector("img") is None
    assert wrong == []


def test_the_page_has_enough_contrast_and_fits_on_a_phone(browser: Browser, staged: Staged) -> None:
    staged.do(lose)
    page, wrong = open_page(browser, staged.address)
    page.wait_for_selector("#entries li[data-kind=loss]")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert faults(page) == []
        picture(page, f"staged-{scheme}", whole=True)
    page.set_viewport_size({"width": 390, "height": 844})
    wait(page, "document.documentElement.scrollWidth === 390")
    picture(page, "staged-phone", whole=True)
    assert wrong == []


def test_the_page_reports_a_dashboard_that_does_not_answer(browser: Browser, staged: Staged) -> None:
    page, wrong = open_page(browser, staged.address)
    page.wait_for_selector("#health.good")
    staged.stage.still = True
    page.wait_for_selector("#trouble:has-text('dashboard does not answer')")
    staged.stage.still = False
    page.wait_for_selector("#health.good")
    assert page.is_hidden("#trouble")
    assert wrong == []


def test_the_page_reports_a_dead_dashboard_and_reconnects_by_itself(browser: Browser) -> None:
    scene = Scene(t0=time.time() - 5)
    first = Staged(scene)
    first.start()
    try:
        page, _ = open_page(browser, first.address)
        page.wait_for_selector("#health.good")
        port = int(first.address.rstrip("/").rpartition(":")[2])
    finally:
        first.stop()
    page.wait_for_selector("#trouble:has-text('dashboard does not answer')")
    second = Staged(scene, port=port)
    second.start()
    try:
        page.wait_for_selector("#health.good")
        assert page.is_hidden("#trouble")
    finally:
        second.stop()
