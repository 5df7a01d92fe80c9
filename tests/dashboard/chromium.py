"""A real browser, and what is asked of a page in it. Tests are skipped where there is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RUNS = Path(__file__).parents[2] / "runs" / "dashboard"
WAIT_MS = 90_000
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install --no-install-recommends chromium"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Runs a Chromium until the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def open_page(browser: Browser, address: str, width: int = 1280, height: int = 1000) -> tuple[Page, list[str]]:
    """A page, and what goes wrong in it from now on."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(WAIT_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda printed: wrong.append(printed.text) if printed.type == "error" else None)
    page.add_init_script(
        "window.shifts = 0; new PerformanceObserver((list) => { for (const e of list.getEntries()) "
        "if (!e.hadRecentInput) window.shifts += e.value; }).observe({ type: 'layout-shift', buffered: true });"
    )
    page.goto(address)
    return page, wrong


def wait(page: Page, expression: str) -> None:
    """Until it is true in the page. Playwright's own way takes `eval`, which the page forbids."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"it did not come true: {expression}"
        page.wait_for_timeout(20)


def faults(page: Page) -> list[str]:
    """The faults of a page that axe-core calls serious or worse."""
    from axe_playwright_python.sync_playwright import Axe

    found: list[dict[str, Any]] = Axe().run(page).response["violations"]
    return [f"{f['id']}: {f['nodes'][0]['html']}" for f in found if f["impact"] in ("serious", "critical")]


def picture(page: Page, name: str, *, whole: bool = False) -> None:
    """A screenshot in runs/dashboard, from the top of the page."""
    RUNS.mkdir(parents=True, exist_ok=True)
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=RUNS / f"{name}.png", full_page=whole)
