"""A real browser without a screen, driven over WebDriver: Debian's chromium and chromium-driver."""

import base64
import json
import re
import shutil
import subprocess
import threading
import urllib.request
from contextlib import contextmanager

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
DEADLINE_S = 120


class Browser:
    """One tab."""

    def __init__(self, address, session):
        self._session = f"{address}/session/{session}"

    def open(self, url):
        self._say("url", url=url)

    def run(self, script, *arguments):
        """What JavaScript returns."""
        return self._say("execute/sync", script=script, args=list(arguments))

    def text(self):
        """What a person reads."""
        return self.run("return document.body.innerText")

    def look(self, width, height, scheme="light"):
        """How large the window is, and which colours its user wants."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._tell("Emulation.setDeviceMetricsOverride", **size)
        self._tell("Emulation.setScrollbarsHidden", hidden=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._tell("Emulation.setEmulatedMedia", features=features)

    def picture(self):
        """The whole page as PNG."""
        shot = self._tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def log(self):
        """What the page complained of."""
        return [entry["message"] for entry in self._say("se/log", type="browser")]

    def _tell(self, command, **parameters):
        return self._say("goog/cdp/execute", cmd=command, params=parameters)

    def _say(self, path, **body):
        return say(f"{self._session}/{path}", body)


def say(url, body=None, method=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        return json.loads(reply.read())["value"]


@contextmanager
def browsing(folder):
    """`folder`: for what the browser keeps."""
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                break
        threading.Thread(target=process.stdout.read, daemon=True).start()
        address = f"http://127.0.0.1:{found[1]}"
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        started = say(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
        try:
            yield Browser(address, started["sessionId"])
        finally:
            say(f"{address}/session/{started['sessionId']}", method="DELETE")
    finally:
        process.terminate()
        process.wait(30)
