"""Reports in a browser: what a click, a key and a search do. ``make report-test`` runs it with Chromium."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from benchmarks.planning import job
from benchmarks.synthetic import LLAMA_70B
from paddle_reshard.pipeline.core.part_limits import PartLimits
from paddle_reshard.pipeline.examine.diff import DiffReport
from paddle_reshard.pipeline.planning.compare import Difference
from paddle_reshard.pipeline.report.describe import describe_comparison, describe_plan, picture_of
from paddle_reshard.pipeline.report.html_report import save_report
from tests.conftest import case_directory
from tests.report.pages import Page
from tests.report.test_report import HOSTILE, SOURCE, command, difference, synthetic

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"none of {', '.join(NAMES)} is installed; name another Chromium with CHROMIUM=PATH"
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Any]:
    """Opens a file. In the end no request, no dialog and no error may have come of it."""
    wrong: list[str] = []
    contexts = []

    def opened(path: Path, **settings: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        own = path.absolute().as_uri()
        page.on("request", lambda sent: sent.url in (own, "data:,") or wrong.append(sent.url))
        page.goto(own)
        page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    report = folder / "report.html"
    command("convert", SOURCE, folder / "target", "--to", "pp=4,sharding=2", "--report", report)
    return report


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,048 ranks become 512."""
    path = tmp_path_factory.mktemp("large") / "report.html"
    dims = replace(LLAMA_70B, layers=16)
    planned = synthetic(dims, job(tp=8, pp=4, sharding=64), "tp=4,pp=4,sharding=32", PartLimits())
    save_report(describe_plan(planned, picture_of(planned)), path)
    return path


def lit(page: Any, side: str) -> set[int]:
    cells = page.query_selector_all(f"#{side}-grid [data-place]:not(.off)")
    return {int(cell.get_attribute("data-place")) for cell in cells}


@pytest.mark.parametrize(
    "key", ["model.layers.1.self_attn.q_proj.weight", "model.layers.1", "lm_head.weight"]
)
@pytest.mark.parametrize("state", ["all states", "moment1"])
def test_what_is_picked_lights_up_where_it_lies(show: Any, converted: Path, key: str, state: str) -> None:
    page, data = show(converted), Page(converted)
    page.select_option("#state", label=state)
    page.fill("#search", key)
    page.press("#search", "Enter")
    said = page.inner_text("#picked")
    for side in ("source", "target"):
        held = {
            (place, of, kind): nbytes
            for (of, kind, place), nbytes in data.held(side).items()
            if (of == key or of.startswith(f"{key}.")) and state in ("all states", kind)
        }
        assert lit(page, side) == {place for place, _, _ in held} != set()
        assert f"in {len(lit(page, side))} of 8 ranks of the {side}" in said
    page.click("#clear")
    page.select_option("#state", label="all states")
    assert lit(page, "source") == set(range(8))


def test_the_search_works_with_keys_alone(show: Any, converted: Path) -> None:
    page = show(converted)
    page.keyboard.press("/")
    page.keyboard.type("norm")
    options = page.query_selector_all("#found [role=option]")
    assert len(options) > 4
    assert all("norm" in option.inner_text() for option in options)
    assert page.get_attribute("#search", "aria-expanded") == "true"
    page.keyboard.press("ArrowDown")
    chosen = page.get_attribute("#search", "aria-activedescendant")
    text = page.inner_text(f"#{chosen} code")
    page.keyboard.press("Enter")
    assert page.input_value("#search") == text
    assert page.inner_text("#picked").startswith(text)
    page.keyboard.press("Escape")
    assert page.inner_text("#picked") == ""
    page.fill("#search", "no such tensor")
    assert page.inner_text("#found") == "No tensor has this in its key."


def test_a_rank_says_what_it_holds_by_mouse_and_by_keys(show: Any, converted: Path) -> None:
    page, data = show(converted), Page(converted)
    page.click("#source-grid [data-place='5'] rect")
    assert "rank 5 · pp 1, sharding 0, tp 1" in page.inner_text("#place")
    page.focus("#target-grid svg")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "Target: rank 3 · pp 1, sharding 1" in page.inner_text("#place")
    largest = max((nbytes, key) for (key, _, place), nbytes in data.held("target").items() if place == 3)
    assert largest[1] in page.inner_text("#place")
    states = page.inner_text("#place table")
    assert "moment1" in states
    page.keyboard.press("End")
    assert "rank 7" in page.inner_text("#place")


def test_the_heat_map_is_read_by_keys_and_by_kind(show: Any, converted: Path) -> None:
    page, moved = show(converted), Page(converted).moves()
    page.focus("#heat")
    said = page.inner_text("#pair")
    assert said.startswith("rank 0 · pp 0, sharding 0, tp 0 → rank 0")
    assert said.endswith(f"{sum(moved[0, 0]) / 1024:.1f} KiB")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#pair").startswith("rank 1")
    page.click("#moves .switch label:has-text('copied')")
    assert "0 pairs" in page.inner_text("#moved")
    page.click("#moves .switch label:has-text('memory')")
    assert f"{len(moved)} pairs" in page.inner_text("#moved")
    colours = """() => { const canvas = document.getElementById("heat");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const found = new Set();
        for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 3).join());
        return found.size; }"""
    assert page.evaluate(colours) > 8


def test_colours_follow_the_system_and_the_button_and_paper_is_light(show: Any, converted: Path) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = show(converted, color_scheme="light").evaluate(background)
    page = show(converted, color_scheme="dark")
    dark = page.evaluate(background)
    assert light != dark
    page.click("#theme")
    assert (page.inner_text("#theme"), page.evaluate(background)) == ("○ light", light)
    page.click("#theme")
    assert (page.inner_text("#theme"), page.evaluate(background)) == ("● dark", dark)
    page.emulate_media(media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert not page.is_visible("header")


def test_time_is_drawn(show: Any, converted: Path) -> None:
    page, run = show(converted), Page(converted).data["run"]
    bars = page.query_selector_all("#time rect title")
    assert len(bars) == len(run["stretches"]) > 0
    assert [
        text.text_content() for text in page.query_selector_all("#time figure:first-child text:not(.soft)")
    ] == ["plan", "move", "verify", "publish"]
    assert page.query_selector_all("#time polyline")


UNREADABLE = """() => {
    const texts = [], found = [];
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) {
        const holder = node.parentElement, text = node.textContent.trim();
        if (!text || !holder.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const boxes = [...range.getClientRects()].filter((box) => box.width > 1 && box.right > 0);
        texts.push(...boxes.map((box) => [text, holder, box]));
    }
    texts.forEach(([text, holder, box], number) => {
        for (const [other, , over] of texts.slice(number + 1)) {
            const width = Math.min(box.right, over.right) - Math.max(box.left, over.left);
            const height = Math.min(box.bottom, over.bottom) - Math.max(box.top, over.top);
            if (width > 2 && height > 4) found.push(`${text} over ${other}`);
        }
        const scrolled = holder.closest(".scroll, .switch"), cut = (one) => getComputedStyle(one).overflowX;
        const edge = [...(function* () { for (let up = holder; up; up = up.parentElement) yield up; })()]
            .filter((one) => ["hidden", "clip"].includes(cut(one))).map((one) => one.getBoundingClientRect().right);
        if (box.left < 0 || box.right > Math.min(...edge, innerWidth) + 1)
            if (!scrolled || cut(scrolled) === "visible") found.push(`${text} is cut off`);
    });
    return found;
}"""


@pytest.fixture(scope="module")
def pages(converted: Path, large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    other = case_directory("single") / "checkpoint-3"
    made = {name: folder / f"{name}.html" for name in ("diff", "average", "alone", "two", "cards")}
    command("diff", other, SOURCE, "--atol", "0.001", "--report", made["diff"], status=1)
    average = folder / "made"
    command("ema", other, SOURCE, average, "--uniform", "--to", "tp=1", "--report", made["average"])
    command("verify", average, "--report", made["alone"])
    command("verify", SOURCE, converted.parent / "target", "--report", made["two"])
    command("plan", *case_directory("pp4vpp2").glob("checkpoint-*"), "--cards", 64, "--report", made["cards"])
    return made | {"converted": converted, "planned": large}


@pytest.mark.parametrize(
    ("width", "media"),
    [(400, "screen"), (1280, "screen"), (703, "print")],
    ids=["a telephone", "a screen", "A4 less its margins"],
)
@pytest.mark.parametrize("name", ["diff", "average", "alone", "two", "cards", "converted", "planned"])
def test_nothing_lies_over_another_or_is_cut_off(
    show: Any, pages: dict[str, Path], tmp_path: Path, name: str, width: int, media: str
) -> None:
    """But for tables, which are scrolled in a frame of their own. A picture stays where this fails."""
    page = show(pages[name], viewport={"width": width, "height": 900})
    page.emulate_media(media=media)
    page.screenshot(path=tmp_path / f"{name}.png", full_page=True)
    assert page.evaluate(UNREADABLE) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_long_first_step_has_its_duration_in_its_bar(show: Any, tmp_path: Path) -> None:
    """Whatever the machine makes of it: on neither side there is room."""
    report = tmp_path / "two.html"
    command("verify", SOURCE, SOURCE, "--report", report)
    text = report.read_text("utf-8")
    steps = '"seconds":100,"steps":[["reading headers",0,99,""],["comparing",99,100,""]]'
    report.write_text(re.sub(r'"seconds":[\d.]+,"steps":.*?\]\]', steps, text, count=1), "utf-8")
    page = show(report, viewport={"width": 400, "height": 900})
    assert page.evaluate(UNREADABLE) == []


@pytest.mark.parametrize(("width", "media"), [(400, "screen"), (1280, "screen"), (703, "print")])
def test_topologies_of_many_cards_lie_beside_each_other(
    show: Any, tmp_path: Path, width: int, media: str
) -> None:
    """On a telephone, a screen, and A4 less its margins: nothing overlaps or is clipped."""
    report = tmp_path / "cards.html"
    (source,) = case_directory("pp4vpp2").glob("checkpoint-*")
    command("plan", source, "--cards", 64, "--report", report)
    page = show(report, viewport={"width": width, "height": 900})
    page.emulate_media(media=media)
    clipped = """() => [...document.querySelectorAll(".tiles b, .jobs figcaption, .jobs table, .copied .line")]
        .filter((one) => one.scrollWidth > one.clientWidth + 1 || one.getBoundingClientRect().right > innerWidth)
        .map((one) => one.textContent)"""
    assert page.evaluate(clipped) == []
    assert page.locator(".jobs figure").count() == 8
    ranks = page.locator(".jobs i").first.evaluate("(one) => getComputedStyle(one).printColorAdjust")
    assert ranks == ("exact" if media == "print" else "economy")
    if width == 1280:
        frames = (
            "() => [...document.querySelectorAll('.scroll')].map((one) => one.scrollWidth - one.clientWidth)"
        )
        assert page.evaluate(frames) == [0, 0]
        page.click(".jobs figure:nth-child(2) summary")
        page.click(".jobs figure:nth-child(2) .copied button")
        assert page.evaluate("getSelection().toString()").startswith("paddle-reshard convert")


def test_what_one_looks_for_is_in_sight(show: Any, pages: dict[str, Path]) -> None:
    """Of each tensor how far it is apart and an example, without scrolling to the right; axes are not broken."""
    page = show(pages["diff"])
    right = "(one) => one.getBoundingClientRect().right"
    assert page.locator("th", has_text="first at").first.evaluate(right) <= 1280
    nearest = show(pages["cards"]).locator(".tiles b", has_text="sharding=16")
    assert [line.strip() for line in nearest.inner_text().splitlines()] == ["pp=4,vpp=2,sharding=16"]
    heights = "(one) => one.getBoundingClientRect().height / parseFloat(getComputedStyle(one).lineHeight)"
    assert round(nearest.evaluate(heights)) <= 2 and nearest.locator("wbr").count() == 2


def test_paper_has_all_columns(show: Any, tmp_path: Path) -> None:
    report = tmp_path / "diff.html"
    command("diff", case_directory("single") / "checkpoint-3", SOURCE, "--report", report, status=1)
    page = show(report, viewport={"width": 703, "height": 1000})  # A4 less its margins
    page.emulate_media(media="print")
    edges = "() => [...document.querySelectorAll('th')].map((one) => one.getBoundingClientRect().right)"
    assert max(page.evaluate(edges)) <= 703


def test_tables_are_sorted_and_filtered(show: Any, tmp_path: Path) -> None:
    names = [HOSTILE, "b.weight", "a.weight"]
    found = [replace(difference(name), ulps=number) for number, name in enumerate(names, 1)]
    rows = [replace(difference(f"layers.{number}.w"), ulps=100 + number) for number in range(300)]
    compared = DiffReport(303, 4, 16, (*found, *rows), (Difference(HOSTILE, HOSTILE),))
    save_report(describe_comparison(compared, (HOSTILE, "b"), None), tmp_path / "diff.html")
    page = show(tmp_path / "diff.html")
    first = "#findings .table:first-child"
    assert page.locator(f"{first} tbody tr").count() == 100
    assert page.inner_text(f"{first} tbody tr:first-child td:first-child") == HOSTILE.replace(
        "\u2028", "\u2028"
    )
    page.click(f"{first} th button:has-text('ulps')")
    assert page.inner_text(f"{first} tbody tr:first-child td:first-child") == "layers.299.w"
    page.click(f"{first} th button:has-text('tensor')")
    page.fill(f"{first} input", "weight")
    shown = page.locator(f"{first} tbody tr td:first-child").all_inner_texts()
    assert shown == ["a.weight", "b.weight"]
    page.fill(f"{first} input", "")
    page.click(f"{first} .more")
    assert page.locator(f"{first} tbody tr").count() == 303


def test_hostile_names_are_shown_and_do_nothing(show: Any, tmp_path: Path) -> None:
    planned = paddle_reshard.plan(SOURCE, to="tp=1")
    picture = picture_of(planned)
    picture = replace(picture, keys=(HOSTILE, *picture.keys[1:]))
    save_report(replace(describe_plan(planned, picture), remarks=(HOSTILE,)), tmp_path / "plan.html")
    page = show(tmp_path / "plan.html")
    page.fill("#search", "</script>")
    page.press("#search", "Enter")
    assert page.inner_text("#picked").startswith("</script><img src=x onerror=alert(1)>&")
    assert page.query_selector("img") is None


def test_nothing_else_may_run_in_a_page(browser: Any, converted: Path) -> None:
    page = browser.new_page()
    page.goto(converted.absolute().as_uri())
    page.evaluate(
        """() => { const script = document.createElement("script"); script.textContent = "window.ran = 1";
        document.body.append(script); const holder = document.createElement("div");
        holder.innerHTML = "<img src=x onerror='window.ran = 2'>"; document.body.append(holder); }"""
    )
    assert page.evaluate("() => window.ran") is None
    page.close()


def test_thousands_of_ranks_can_be_walked(show: Any, large: Path) -> None:
    page = show(large)
    assert page.locator("#source-grid [data-place]").count() == 2048
    assert page.locator("#target-grid [data-place]").count() == 512
    page.fill("#search", "layers.15")
    page.press("#search", "Enter")
    # The last of four pipeline stages.
    assert lit(page, "source") <= set(range(1536, 2048))
    assert lit(page, "target") <= set(range(384, 512))
    assert lit(page, "source")
    assert lit(page, "target")
    page.focus("#heat")
    page.keyboard.press("ArrowRight")
    assert "→ rank 1 " in page.inner_text("#pair")
