"""Pictures of the status page, for a person to look at: a store and engines that are made up.

dashboard_pictures.py FOLDER    writes PNGs: dark and light, narrow and wide, well and in trouble

Needs Debian's chromium and chromium-driver.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.cli.browser import browsing
from tests.cli.metrics_engine import MetricsEngine
from tests.cli.viewed import MODEL_A, MODEL_B, A, Filled, showing

LOOKS = [
    ("wide", 1400, 1000, "light"),
    ("wide", 1400, 1000, "dark"),
    ("narrow", 400, 900, "light"),
    ("narrow", 400, 900, "dark"),
]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        filled = Filled(Path(scratch)).fill()
        filled.hold()
        engines = [MetricsEngine(MODEL_A), MetricsEngine(MODEL_A), MetricsEngine(MODEL_B)]
        arguments = [part for engine in engines for part in ("--engine", engine.url)]
        command = ("dashboard", filled.root, "--catalog", filled.url, "--interval-s", "0.5")
        with showing(*command, *arguments) as shown, browsing(f"{scratch}/browser") as browser:
            browser.open(f"http://127.0.0.1:{shown.port}/")
            work(filled, engines)
            take(browser, folder, "well")
            trouble(engines)
            time.sleep(4)
            take(browser, folder, "trouble")
        filled.close()


def work(filled: Filled, engines: list[MetricsEngine]) -> None:
    """Half a minute of it, at rates that go up and down."""
    for turn in range(24):
        filled.look(A, "system prompt", 20)
        filled.look(A, "nothing", 3)
        for number, engine in enumerate(engines):
            count = engine.metrics.count
            count("kvferry_load_bytes_total", (400 + 150 * (turn % 7)) << 20 >> number)
            count("kvferry_store_bytes_total", (60 + 40 * (turn % 5)) << 20 >> number)
            count("kvferry_lookup_tokens_total", 4096)
            count("kvferry_hit_tokens_total", 3000 if number < 2 else 500)
        time.sleep(1)


def trouble(engines: list[MetricsEngine]) -> None:
    engines[0].metrics.set("kvferry_breaker_open", 1)
    engines[0].metrics.count("kvferry_store_drops_total", 41, reason="no_staging")
    engines[0].metrics.count("kvferry_store_drops_total", 3, reason="late")
    engines[0].metrics.count("kvferry_load_failures_total", 2, reason="absent")
    engines[0].metrics.count("kvferry_loads_declined_total", 7, reason="short")
    engines[1].metrics.set("kvferry_standing_aside", 1)
    engines[2].close()


def take(browser, folder: Path, condition: str) -> None:
    for name, width, height, scheme in LOOKS:
        browser.look(width, height, scheme)
        time.sleep(1)
        target = folder / f"{condition}-{name}-{scheme}.png"
        target.write_bytes(browser.picture())
        print(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
