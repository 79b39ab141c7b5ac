"""A page opened in headless Chromium, as a user would see it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

PROGRAMS = ("chromium", "chromedriver")  # Debian's: apt-get install chromium chromium-driver
PHONE = 390  # pixels
_WAIT = 60.0  # seconds, at most, until figures are drawn
_DRAWN = """
    const all = window.Bokeh ? Bokeh.documents : [];
    return document.readyState === "complete" && all.length > 0 && all.every((one) => one.is_idle);
"""


@dataclasses.dataclass(frozen=True)
class Opened:
    """A page in a browser."""

    driver: Any  # selenium.webdriver.Chrome
    seconds: float  # until everything was drawn

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body of JavaScript returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def errors(self) -> list[str]:
        """What the console has said since it was asked last that is no mere information."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def missing() -> str:
    """What is not installed, or nothing."""
    return " and ".join(program for program in PROGRAMS if shutil.which(program) is None)


@contextlib.contextmanager
def opened(path: pathlib.Path, width: int, *, figures: bool = True) -> Iterator[Opened]:
    """A file in a window of so many pixels, once its figures are drawn; narrow ones are of a phone's touch screen."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    # In containers there is neither a sandbox nor much of /dev/shm.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={max(width, 500)},900")
    if width < 500:  # narrower than any window
        metrics = {"width": width, "height": 844, "pixelRatio": 2.0, "touch": True, "mobile": True}
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get("about:blank")
        started = time.perf_counter()
        driver.get(path.resolve().as_uri())
        if figures:
            WebDriverWait(driver, _WAIT, poll_frequency=0.02).until(lambda d: d.execute_script(_DRAWN))
        yield Opened(driver, time.perf_counter() - started)
    finally:
        driver.quit()
