"""Pictures of reports for the documentation, and how large a report is and how long it takes to open.

::

    python -m benchmarks.reports [--large]

It converts three bundled real checkpoints, averages and compares two, and stops a conversion half way, and photographs
the reports into ``docs/pictures``. ``--large`` plans a
conversion of 671B parameters from 2,048 ranks to 512 without a byte, and measures its report. It needs the extra
``browser`` and a Chromium of the system (``CHROMIUM=PATH``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.planning import T, job
from benchmarks.synthetic import MOE_671B, EmptySource, catalog_of, files_of
from paddle_reshard import convert
from paddle_reshard.pipeline.changes.change import Altered
from paddle_reshard.pipeline.convert.plan import plan_checkpoint
from paddle_reshard.pipeline.core.events import Event, Progress
from paddle_reshard.pipeline.report.command import Command
from paddle_reshard.pipeline.report.describe import describe_plan, picture_of
from paddle_reshard.pipeline.report.html_report import HtmlReport, save_report
from paddle_reshard.pipeline.request.parse import parse_request
from tests.conftest import REPO, case_directory

PICTURES = REPO / "docs" / "pictures"
CASES = (
    (
        "pipeline",
        "mp2pp2sh2_s1v2_meta_ema",
        ["--to", "pp=4,sharding=2"],
        "model.layers.1",
        "light",
    ),
    ("experts", "moe/ep2_pp2sh2_s1v2_meta", ["--to", "pp=2,sharding=4,ep=4"], "experts.3.up", "light"),
    ("export", "mp2pp2", ["--format", "huggingface"], "q_proj", "dark"),
)
OPENINGS = 5
LARGE = 1200, 1500


def run(*arguments: object, status: int = 0) -> None:
    """Run a command that ends with this status."""
    done = subprocess.run([sys.executable, "-m", "paddle_reshard", *map(str, arguments)], check=False)
    if done.returncode != status:
        raise SystemExit(f"{arguments}: exit status {done.returncode}")


def photograph(
    browser: Any,
    page: Path,
    name: str,
    scheme: str = "light",
    picked: str = "",
    size: tuple[int, int] = LARGE,
) -> None:
    viewport = {"width": size[0], "height": size[1]}
    opened = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
    opened.goto(page.as_uri())
    opened.wait_for_selector("html[data-ready]")
    if picked:
        opened.fill("#search", picked)
        opened.press("#search", "Enter")
    opened.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    opened.screenshot(path=PICTURES / f"{name}.png")


def average_and_difference(browser: Any, page: Path) -> None:
    """Two checkpoints of one model, of one rank and of eight."""
    for number, case in ((900, "single"), (1000, "mp2pp2sh2_s1v2_meta_ema")):
        shutil.copytree(case_directory(case) / "checkpoint-3", f"checkpoint-{number}")
    both = "checkpoint-900", "checkpoint-1000"
    run("diff", *both, "--states", "param,moment1,moment2", "--report", page, status=1)
    photograph(browser, page, "difference", size=(1200, 1060))
    run("ema", *both, "average", "--weights", "0.25,0.75", "--to", "tp=1", "--report", page, "--quiet")
    photograph(browser, page, "telephone", size=(400, 1060))


def stopped(browser: Any, page: Path) -> None:
    """A conversion whose process is told to end while it moves."""

    def stop(event: Event) -> None:
        if isinstance(event, Progress) and event.done_bytes > 1 << 20:
            raise KeyboardInterrupt("terminated by SIGTERM")

    words = Command("convert", ("checkpoint-1000", "stopped"), (("--to", "tp=1"), ("--report", page.name)))
    with suppress(KeyboardInterrupt), HtmlReport(page, stop, words) as report:
        convert("checkpoint-1000", "stopped", to="tp=1", observe=report)
    photograph(browser, page, "stopped", size=(1200, 560))


def opening_ms(browser: Any, page: Path) -> float:
    """The fastest of several openings, until everything is drawn."""
    found = []
    for _ in range(OPENINGS):
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.goto(page.as_uri())
        opened.wait_for_selector("html[data-ready]")
        found.append(opened.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        opened.close()
    return min(found)


def large(path: Path) -> None:
    source = job(tp=8, pp=4, sharding=64)
    store = EmptySource(files_of(MOE_671B, source), json.dumps(MOE_671B.config).encode())
    request = parse_request({"to": "tp=4,pp=4,sharding=32"})
    planned = _timed(
        "plan", lambda: plan_checkpoint(Altered.of(store, catalog_of(MOE_671B, source)), request)
    )
    picture = _timed("picture", lambda: picture_of(planned))
    _timed("page", lambda: save_report(describe_plan(planned, picture), path))


def _timed(what: str, function: Callable[[], T]) -> T:
    started = time.perf_counter()
    result = function()
    print(f"{what}: {time.perf_counter() - started:.1f} s")
    return result


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--large", action="store_true")
    asked = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as parent, sync_playwright() as driver:
        folder = Path(parent) / "run-7"
        folder.mkdir()
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = folder / "report.html"
        if asked.large:
            large(page)
            print(f"{page.stat().st_size:,} bytes, open after {opening_ms(browser, page):.0f} ms")
            return
        PICTURES.mkdir(exist_ok=True)
        os.chdir(folder)  # short paths in the pictures
        for name, case, options, picked, scheme in CASES:
            shutil.copytree(case_directory(case) / "checkpoint-3", "checkpoint-1000")
            run("convert", "checkpoint-1000", f"for-{name}", *options, "--report", page, "--quiet")
            photograph(browser, page, name, scheme, picked)
            print(f"{name}: {page.stat().st_size:,} bytes, open after {opening_ms(browser, page):.0f} ms")
            shutil.rmtree("checkpoint-1000")
        average_and_difference(browser, page)
        stopped(browser, page)
        browser.close()


if __name__ == "__main__":
    main()
