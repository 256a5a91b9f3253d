"""Drive Debian's chromium by chromedriver: the few commands of WebDriver that the tests of the page need.

A browser has an empty profile of its own, and a listener for what its page's policy has refused.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "no chromium and chromedriver here: apt-get install chromium chromium-driver"
_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"),
]
KEYS = {"Enter": "\ue007", "Down": "\ue015", "Up": "\ue013", "Right": "\ue014", "Left": "\ue012", "End": "\ue010"}
KEYS |= {"Home": "\ue011", "Tab": "\ue004", "Escape": "\ue00c", "PageDown": "\ue00f"}


class Browser:
    """One window."""

    def __init__(self, base: str) -> None:
        self._base = base

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._base}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {json.load(error)['value']['message']}") from None

    def open(self, url: str) -> None:
        """Load ``url``, and wait for the page to have drawn itself."""
        self._call("POST", "/url", {"url": "about:blank"})
        self._call("POST", "/url", {"url": url})
        self.wait("return document.documentElement.dataset.ready === 'yes'")

    def run(self, script: str, *args: Any) -> Any:
        """Return what ``script`` returns; awaited if that is a promise."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def wait(self, script: str, *args: Any, seconds: float = 30) -> Any:
        """Wait until ``script`` returns something true, and return that."""
        end = time.monotonic() + seconds
        while not (found := self.run(script, *args)):
            assert time.monotonic() < end, (
                f"still not: {script}\n{self.run('return document.body.innerText.slice(0, 3000)')}"
            )
            time.sleep(0.05)
        return found

    def go(self, *route: str) -> None:
        """Show a view by its address."""
        self.run("location.hash = '#' + arguments[0].map(encodeURIComponent).join('/')", list(route))

    def text(self, selector: str) -> str:
        """Return the text of the first that matches and is shown."""
        found: str = self.run(
            "const nodes = [...document.querySelectorAll(arguments[0])];"
            "return nodes.find((node) => node.checkVisibility())?.innerText ?? ''",
            selector,
        )
        return found

    def press(self, keys: str) -> None:
        """Type ``keys`` to what has the focus; a key with a name is one of `KEYS`."""
        typed = [KEYS[keys]] if keys in KEYS else list(keys)
        actions = [{"type": kind, "value": key} for key in typed for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector: str) -> None:
        """Click the first shown element that matches."""
        self.run(
            "const node = [...document.querySelectorAll(arguments[0])].find((node) => node.checkVisibility());"
            "if (!node) throw new Error('nothing matches ' + arguments[0]);"
            "node.scrollIntoView({block: 'center'}); node.click()",
            selector,
        )

    def resize(self, width: int, height: int) -> None:
        """Give the page this size, smaller than a window may be."""
        self._cdp(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )

    def prefer(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``, and no motion: colours are what they are at once."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self._cdp("Emulation.setEmulatedMedia", {"features": features})

    def watch(self) -> None:
        """Collect in each page what its policy refuses and what its scripts throw, from its start."""
        source = (
            "window.__bad = [];"
            "addEventListener('securitypolicyviolation', (e) =>"
            "  __bad.push('policy: ' + e.violatedDirective + ' ' + e.blockedURI));"
            "addEventListener('error', (e) => __bad.push('error: ' + e.message + ' ' + e.lineno));"
            "addEventListener('unhandledrejection', (e) => __bad.push('rejected: ' + e.reason));"
        )
        self._cdp("Page.addScriptToEvaluateOnNewDocument", {"source": source})

    def _cdp(self, command: str, params: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def bad(self) -> list[str]:
        """Return what was refused or thrown in this page."""
        found: list[str] = self.run("return window.__bad")
        return found

    def requests(self) -> list[str]:
        """Return the URLs that the page has asked for, but for itself."""
        found: list[str] = self.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        return found

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save a screenshot."""
        shot = self._cdp("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile; end it and its driver."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    driver = subprocess.Popen(
        [DRIVER, "--port=0", "--allowed-ips=127.0.0.1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        port = next(line.split("port ")[1].strip(" .\n") for line in driver.stdout if "started successfully" in line)
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        asked = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        session = Browser(f"http://127.0.0.1:{port}")._call("POST", "/session", asked)["sessionId"]
        found = Browser(f"http://127.0.0.1:{port}/session/{session}")
        found.watch()
        found.resize(1280, 900)
        try:
            yield found
        finally:
            with contextlib.suppress(AssertionError, OSError):
                found._call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(10)
        assert driver.stdout is not None
        driver.stdout.close()
