"""In: a report and a headless Chromium. Out: no error on its console; tables sort, timelines zoom, nothing is wide.
Does not judge beauty. Without Chromium or playwright these tests are skipped, and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reported import make_run, predicted_run
from runs import called

from codescent.study import Kind
from codescent.study.folder import Definition, StudyFolder
from codescent.study.points import Spec

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WORDS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-sync",
    "--disable-component-update", "--disable-quic",
)  # fmt: skip


TOO_WIDE = """
[...document.querySelectorAll("main *")]
  .filter((one) => !one.closest(".wide, pre, svg") && one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.outerHTML.slice(0, 80))
"""
"""What is cut off, but for what scrolls: tables, texts and figures."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page about three runs, one of them with a long name and a slow rank."""
    folder = tmp_path_factory.mktemp("page")
    predicted_run(folder / "one")
    make_run(folder / "pipeline", 4, "parallel.pp=4", steps=20, keys="tp = 2\n")
    make_run(folder / ("a_very_long_name_of_a_run_that_has_no_blank_" * 4), 2, steps=20, slower={1: 1.4})
    done = called(folder, "report", *(path.name for path in sorted(folder.iterdir())), "--out", "report.html")
    assert done.returncode == 0, done.stderr
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(NAMES)}")
    with api.sync_playwright() as playwright:
        folder = tmp_path_factory.mktemp("profile")
        found = playwright.chromium.launch_persistent_context(str(folder), executable_path=program, args=list(WORDS))
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[tuple[Any, list[str]]]:
    """The page, open; and what the console has said."""
    said: list[str] = []
    found = browser.new_page()
    found.on("console", lambda message: said.append(message.text))
    found.on("pageerror", lambda error: said.append(str(error)))
    found.on(
        "request", lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:")) else None
    )
    found.set_viewport_size({"width": 1280, "height": 900})
    found.goto(address)
    yield found, said
    found.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(page: tuple[Any, list[str]], width: int, scheme: str) -> None:
    found, said = page
    found.emulate_media(color_scheme=scheme)
    found.set_viewport_size({"width": width, "height": 900})
    assert found.evaluate("document.documentElement.scrollWidth") <= width
    assert found.evaluate(TOO_WIDE) == []
    ink, paper = (found.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    bright = [sum(map(int, colour[4:-1].split(","))) > 380 for colour in (ink, paper)]
    assert bright == ([False, True] if scheme == "light" else [True, False])
    assert said == []


def test_a_study_begins_with_its_figures_and_its_tables_need_no_scrolling(browser: Any, tmp_path: Path) -> None:
    specs = [
        Spec(f"batch=16 threads={n}", f"b-{n}", {"batch": 16, "threads": n}, {"train.num_threads": n}, 1)
        for n in (1, 2, 16)
    ]
    definition = Definition(
        name="threads", kind=Kind.THREADS, config="default", repeats=3, steps=15, warmup=5, baseline={"threads": 1},
        axes=["batch", "threads"], specs=specs, refused={},
    )  # fmt: skip
    folder = StudyFolder.create(tmp_path / "threads", definition)
    for spec in specs:
        make_run(folder.run_path(spec, 1), steps=20, environment={"num_threads": spec.axes["threads"]})
    assert called(tmp_path, "report", "threads", "--out", "report.html").returncode == 0
    found = browser.new_page()
    found.set_viewport_size({"width": 1280, "height": 900})
    found.goto((tmp_path / "report.html").as_uri())
    assert found.locator("figure.picture").first.bounding_box()["y"] < 300
    widths = "[...document.querySelectorAll('#study .wide')].map((one) => [one.scrollWidth, one.clientWidth])"
    shown = found.evaluate(widths)
    assert len(shown) == 3, "times, rates, laws"
    assert all(needed <= there for needed, there in shown)
    found.close()


def test_tables_sort_by_number_and_back(page: tuple[Any, list[str]]) -> None:
    found, said = page

    def column(number: int) -> list[str]:
        cells = found.locator("#runs tbody tr").all()
        return [row.locator("th, td").nth(number).inner_text() for row in cells]

    before = column(3)
    assert sorted(before) == ["1", "2", "4"]
    button = found.locator("#runs thead button").nth(3)
    button.click()
    assert column(3) == ["1", "2", "4"]
    button.click()
    assert column(3) == ["4", "2", "1"]
    assert found.locator("#runs thead th").nth(3).get_attribute("aria-sort") == "descending"
    assert said == []


def test_a_timeline_zooms_and_says_the_operation_and_its_bytes(page: tuple[Any, list[str]]) -> None:
    found, said = page
    timeline = found.locator(".timeline").filter(has_text="One step of pipeline")
    lane = timeline.locator("svg").last

    def box() -> list[float]:
        return [float(part) for part in str(lane.get_attribute("viewBox")).split()]

    whole = box()
    timeline.get_by_title("Zoom in").click()
    assert box()[2] == pytest.approx(whole[2] / 2)
    labels = timeline.locator(".ticks").inner_text()
    lane.focus()
    found.keyboard.press("ArrowRight")
    assert box()[0] > 250
    assert timeline.locator(".ticks").inner_text() != labels
    timeline.get_by_text("whole step").click()
    assert box() == whole
    assert timeline.locator(".said").is_hidden()
    timeline.locator("rect.k-forward").first.click()
    text = timeline.locator(".said").inner_text()
    assert text.startswith("rank 0: forward 0, ")
    assert "Sends: send over pp" in text
    assert "KiB" in text
    assert said == []


def test_without_javascript_all_is_there_but_zoom_and_sorting(browser: Any, address: str) -> None:
    context = browser.browser.new_context(java_script_enabled=False) if browser.browser else None
    if context is None:
        pytest.skip("this browser opens no second context")
    found = context.new_page()
    found.goto(address)
    text = found.locator("body").inner_text()
    assert "What limits it?" in text
    assert "whole step" not in text
    assert found.locator("svg").count() > 5
    context.close()
