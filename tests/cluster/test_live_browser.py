"""The page of a daemon in a real browser: Chromium, driven by Selenium."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, configured, start_job
from test_metrics import LISTEN, base

from omnireduce import Communicator

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium here; `pip install selenium` installs it")
pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="no Chromium here; Debian's packages chromium and chromium-driver have it",
)
EVIL = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(13, 17, 23)"


def browser(*, with_scripts: bool = True) -> Any:
    """A browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,620"):
        options.add_argument(argument)
    if not with_scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(WAIT_S)
    return driver


@pytest.fixture(scope="module")
def waiting() -> Iterator[str]:
    """The address of a daemon with a job whose rank 1 is waited for, in a collective with an evil name."""
    shown = threading.Event()

    def work(comm: Communicator) -> None:
        x = np.zeros((4096, 256), np.float32)
        x[::8] = 1.0
        for _ in range(20):
            comm.allreduce(x.copy())
        if comm.rank == 1:
            shown.wait(4 * WAIT_S)
        comm.allreduce(np.ones(3, np.float32), name=EVIL)

    with Daemon(2, LISTEN) as daemon:
        ranks = start_job(configured(daemon.addresses, "transport.host_exchange=off"), 2, work, job="embedding-en-v2")
        try:
            yield base(daemon)
        finally:
            shown.set()
            ranks.results()


def until(page: Any, script: str) -> None:
    """Wait until `script` returns something true."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page, WAIT_S).until(lambda each: each.execute_script(script))


def background(page: Any, scheme: str) -> str:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    result: str = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    return result


def test_it_follows_what_happens_and_runs_nothing_of_a_worker(waiting: str) -> None:
    page = browser()
    try:
        page.get(waiting)
        until(page, "return document.body.innerText.includes('waits for rank 1')")
        assert EVIL in page.execute_script("return document.body.innerText")
        first = page.execute_script("return document.getElementById('at').textContent")
        until(page, f"return document.getElementById('at').textContent != {first!r}")  # it was not loaded again
        until(page, "return document.querySelectorAll('polyline').length >= 2")
        assert page.execute_script("return window.pwned === undefined && document.images.length == 0")
        assert background(page, "light") == LIGHT
        assert background(page, "dark") == DARK
        assert [entry for entry in page.get_log("browser") if "favicon" not in entry["message"]] == []
    finally:
        page.quit()


def test_it_is_whole_without_scripts(waiting: str) -> None:
    page = browser(with_scripts=False)
    try:
        page.get(waiting)
        words = page.find_element("tag name", "body").text
        assert "embedding-en-v2" in words
        assert "2/2" in words
        assert page.find_elements("css selector", "script[src]")  # it is there, and did not run
    finally:
        page.quit()
