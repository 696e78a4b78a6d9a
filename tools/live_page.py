"""Pictures of the daemon's page for the documents: `.venv/bin/python -m tools.live_page`.

It needs Chromium with its driver, and Selenium. A job runs for half a minute meanwhile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from selenium import webdriver

FOLDER = Path(__file__).parent.parent / "docs" / "plots"
RUN_S = 30.0
DAEMON = ("aggregator", "--listen", "127.0.0.1:7440", "--shards", "2", "--set", "metrics.listen=127.0.0.1:9464")
RANK = """
import time, numpy as np, omnireduce as omni
omni.init(aggregators="127.0.0.1:7440,127.0.0.1:7441", job="embedding-en-v2")
chance = np.random.default_rng(omni.rank())
end = time.monotonic() + {seconds}
while omni.broadcast_object(time.monotonic() < end):
    x = np.zeros((20_000, 256), np.float32)
    x[chance.integers(20_000, size=chance.integers(200, 1500))] = 1.0
    omni.allreduce(x)
    time.sleep(0.02)
omni.shutdown()
"""


def main() -> None:
    """Start a daemon and a job, and take the pictures."""
    program = [sys.executable, "-m", "omnireduce"]
    daemon = subprocess.Popen([*program, *DAEMON], stdout=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout is not None
        assert re.match("ready ", daemon.stdout.readline())
        mpirun = str(Path(sys.executable).parent / "mpirun")
        job = subprocess.Popen([mpirun, "-n", "4", sys.executable, "-c", RANK.format(seconds=RUN_S)])
        take("http://127.0.0.1:9464/")
        job.wait()
    finally:
        daemon.terminate()
        daemon.wait()


def take(address: str) -> None:
    """Follow the page while the job runs, then take a picture in each colour."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1150,640"):
        options.add_argument(argument)
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        page.get(address)
        time.sleep(RUN_S - 8)
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            page.save_screenshot(str(FOLDER / f"live-{scheme}.png"))
    finally:
        page.quit()


if __name__ == "__main__":
    main()
