"""A real Chromium without a window, which tests drive through its own driver. `make` finds or unpacks both (`.ci/chromium.sh`)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.remote.webelement import WebElement

from .daemon import Daemon, wait_until

ROOT = Path(__file__).parent.parent.parent
UNPACKED = ROOT / "build" / "chromium"  # where the system has none
NARROW = 360  # CSS pixels of a phone


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(str(UNPACKED / name))
    if found is None:
        message = f"no Chromium: {name} is neither on PATH nor in build/chromium; `make test` puts Debian's there"
        if os.environ.get("KVSERVER_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    return found


class Browser:
    """One process for a whole run of tests; open() begins anew, without what earlier pages stored."""

    def __init__(self) -> None:
        options = ChromeOptions()
        options.binary_location = _program("chromium")
        for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "hide-scrollbars"):
            options.add_argument(f"--{flag}")
        options.add_argument("--disable-background-networking")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(
            options=options, service=ChromeService(_program("chromedriver"))
        )  # its path: none is downloaded
        self.driver.set_page_load_timeout(30)

    def open(self, daemon: Daemon, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """The daemon's page, in a tab of this size. Returns when the page was loaded, not when it shows data."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self._command("Storage.clearDataForOrigin", origin=self._origin(daemon), storageTypes="all")
        scheme = "dark" if dark else "light"
        self._command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.driver.get(self._origin(daemon) + "/")
        self.run("sessionStorage.clear()")

    @staticmethod
    def _origin(daemon: Daemon) -> str:
        return f"http://127.0.0.1:{daemon.http_port}"

    def _command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str) -> Any:
        """The value of a script's `return`."""
        return self.driver.execute_script(script)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """Of the first such element; "" while there is none, or it is hidden."""
        code = f"const e = document.querySelector({json.dumps(selector)}); return e && e.checkVisibility() ? e.innerText : ''"
        return str(self.run(code))

    def wait_for_text(self, selector: str, part: str, seconds: float = 20.0) -> str:
        """The element's text, when it has that part."""
        last = ""

        def has_part() -> bool:
            nonlocal last
            last = self.text(selector)
            return part in last

        try:
            wait_until(has_part, seconds)
        except AssertionError:
            raise AssertionError(f"{selector} has no {part!r} but {last!r}; log: {self.log()}") from None
        return last

    def log(self) -> list[str]:
        """What the browser has complained about since the last call: violations of the page's policy are in it."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Of the whole page, or of its first `height` pixels."""
        size = self.run("return [innerWidth, document.documentElement.scrollHeight, innerHeight]")
        self._command(
            "Emulation.setDeviceMetricsOverride", width=size[0], height=height or size[1], deviceScaleFactor=1, mobile=size[0] < 600
        )  # fmt: skip
        self.driver.save_screenshot(str(path))

    def close(self) -> None:
        self.driver.quit()
