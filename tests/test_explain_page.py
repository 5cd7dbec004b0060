"""In: lessons as pages, in a headless Chromium, and as pictures. Out: nothing is wide, keys step, paper has all.
Does not judge beauty. Without Chromium or playwright the tests of pages are skipped, and say so."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from lessons import WITHOUT_RANKS, lesson
from runs import called

from codescent.explain.content import Arrow, Chart, ChartLine, Grid, NodeNetwork, RankLanes, TextTable
from codescent.explain.language import language, languages
from codescent.explain.page import page
from codescent.explain.picture import picture
from codescent.explain.svg import _chart, drawn
from codescent.explain.topics import TOPICS

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WORDS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-sync",
         "--disable-component-update", "--disable-quic")  # fmt: skip
TOO_WIDE = """
[...document.querySelectorAll("header *, main *, footer *, .steps *")]
  .filter((one) => !one.closest(".wide") && one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.outerHTML.slice(0, 80))
"""
CUT = """
[...document.querySelectorAll("svg[role=img]")].flatMap((svg) => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter((text) => {
    const at = text.getBoundingClientRect();
    return at.width && (at.right > box.right + 2 || at.left < box.left - 2 || at.bottom > box.bottom + 2);
  }).map((text) => text.textContent);
})
"""
"""Texts that leave their picture."""
SHOWN = "[...document.querySelectorAll('.frame')].filter((one) => one.offsetHeight).map((one) => one.id)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(NAMES)}")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=list(WORDS))
        yield found
        found.close()


def opened(browser: Any, file: Path, **options: Any) -> Any:
    """The page in a window of 1280 pixels."""
    found = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
    found.goto(file.as_uri())
    return found


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lang", languages())
@pytest.mark.parametrize("topic", TOPICS)
def test_nothing_is_wider_than_the_window(browser: Any, tmp_path: Path, topic: str, lang: str) -> None:
    """Fault: a page scrolls to the side, a text is cut by its picture, or dark letters stand on a dark page."""
    file = tmp_path / f"{topic}.html"
    file.write_text(page(lesson(topic, lang=lang), language(lang)), encoding="utf-8")
    found = opened(browser, file)
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.locator("[data-all]").click()
    for width in (1280, 390):
        found.set_viewport_size({"width": width, "height": 900})
        assert found.evaluate("document.documentElement.scrollWidth") <= width
        assert found.evaluate(TOO_WIDE) == []
        assert found.evaluate(CUT) == []
    for scheme, bright in (("light", [False, True]), ("dark", [True, False])):
        found.emulate_media(color_scheme=scheme)
        colours = [found.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")]
        assert [sum(map(int, colour[4:-1].split(","))) > 380 for colour in colours] == bright
    assert found.evaluate("document.documentElement.lang") == lang
    written = file.read_text(encoding="utf-8")
    assert set(re.findall(r"var\(--([\w-]+)", written)) <= set(re.findall(r"--([\w-]+):", written)), "colours"
    assert errors == []
    found.close()


@pytest.mark.browser
def test_keys_step_through_the_frames(browser: Any, tmp_path: Path) -> None:
    """Fault: keys or buttons do not step, a link to a frame is lost, or paper and pages without scripts lack frames."""
    done = called(tmp_path, "explain", "zero", "--out", "lesson.html")
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path / "lesson.html"
    frames = [f"frame-{number}" for number in range(1, 12)]
    found = opened(browser, file)
    assert found.evaluate(SHOWN) == frames[:1]
    for key, at in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", 10),
        ("ArrowRight", 10),
        ("Home", 0),
    ):
        found.keyboard.press(key)
        assert found.evaluate(SHOWN) == [frames[at]]
    found.locator("[data-move='1']").click()
    assert found.evaluate("location.hash") == "#frame-2"
    found.reload()
    assert found.evaluate(SHOWN) == [frames[1]]
    found.emulate_media(media="print")
    assert found.evaluate(SHOWN) == frames
    assert not found.locator(".steps").is_visible()
    found.close()
    plain = opened(browser, file, java_script_enabled=False)
    assert [plain.locator(f"#{name}").is_visible() for name in frames] == [True] * 11
    assert not plain.locator(".steps").is_visible()
    plain.close()


@pytest.mark.browser
def test_a_link_to_a_frame_shows_its_heading(browser: Any, tmp_path: Path) -> None:
    """Fault: in a narrow window the bar of buttons covers the heading of the frame that a link names."""
    file = tmp_path / "lesson.html"
    file.write_text(page(lesson("zero", lang="es"), language("es")), encoding="utf-8")
    found = browser.new_page(viewport={"width": 390, "height": 600})
    found.goto(f"{file.as_uri()}#frame-4")
    bar = found.evaluate("document.querySelector('.steps').getBoundingClientRect().bottom")
    assert found.evaluate("document.querySelector('#frame-4 h2').getBoundingClientRect().top") >= bar
    found.close()


def test_versions_on_arrows_do_not_lie_on_each_other() -> None:
    """Fault: texts of arrows lie on each other, on another arrow where there is room, or below one that comes later."""
    fan = [Arrow(2, 1.0, lane, 2.0 + lane / 50, f"v{lane}") for lane in (0, 1)] + [Arrow(0, 0.1, 2, 0.9, "v0")]
    figures = [RankLanes(["a", "b", "c"], [], "ms", fan)]
    figures += [
        one for frame in lesson("server", lang="es").frames for one in frame.figures if isinstance(one, RankLanes)
    ]
    for figure in figures:
        root = ElementTree.fromstring(f"<g>{drawn(figure, '').body}</g>")
        kinds = [one.tag if one.tag == "line" else one.attrib.get("class") for one in root.iter()]
        assert max(i for i, kind in enumerate(kinds) if kind == "line") < kinds.index("small on-line")
        at = [
            (float(one.attrib["x"]), float(one.attrib["y"]))
            for one in root.iter("text")
            if one.attrib["class"] == "small on-line"
        ]
        assert len(at) == len(figure.arrows)
        pairs = [(one, other) for number, one in enumerate(at) for other in at[:number]]
        assert not [1 for (x, y), (to_x, to_y) in pairs if abs(x - to_x) < 14 and abs(y - to_y) < 11]


def test_ticks_of_ranks_are_whole_numbers() -> None:
    """Fault: an axis of ranks has a tick at 1.2 ranks."""
    pytest.importorskip("matplotlib")
    line = ChartLine("measured", [(1.0, 1.0), (2.0, 1.8)])
    axes = _chart(Chart([line], "ranks", "speed-up")).axes[0]
    assert [tick for tick in axes.get_xticks() if not float(tick).is_integer()] == []


@pytest.mark.parametrize("lang", languages())
@pytest.mark.parametrize("topic", WITHOUT_RANKS)
def test_a_picture_is_one_svg_with_all_its_texts(topic: str, lang: str) -> None:
    """Fault: a picture is no XML, lacks a frame, has a text to the right of its edge, or names a file of elsewhere."""
    one = lesson(topic, lang=lang)
    root = ElementTree.fromstring(picture(one))
    texts = " ".join("".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text"))
    for frame in one.frames:
        assert frame.title.split()[0] in texts
    assert one.title.split()[0] in texts
    width = float(root.attrib["width"])
    for text in root.findall(".//{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(text.attrib.get("x", 0)) <= width
    assert not [value for node in root.iter() for name, value in node.attrib.items()
                if name.endswith("href") and not value.startswith("#")]  # fmt: skip


@pytest.mark.parametrize("topic", WITHOUT_RANKS)
def test_nodes_and_cells_do_not_lie_on_each_other(topic: str) -> None:
    """Fault: circles of a network overlap, so that names cannot be read."""
    for frame in lesson(topic).frames:
        for figure in frame.figures:
            if isinstance(figure, Grid | RankLanes | NodeNetwork):
                shape = drawn(figure, frame.title)
                assert shape.width > 100
                assert shape.height > 30
            else:
                assert not isinstance(figure, TextTable) or all(len(row) == len(figure.columns) for row in figure.rows)
            if isinstance(figure, NodeNetwork):
                _apart(drawn(figure, frame.title).body)


@pytest.mark.parametrize("ranks", [16, 32])
def test_networks_of_many_ranks_are_apart(ranks: int) -> None:
    """Fault: the picture of a mesh of more ranks has no room: its circles overlap."""
    words = ("gpt2_124m", "--ranks", str(ranks), "parallel.pp=2", "parallel.tp=2", f"parallel.dp_shard={ranks // 4}")
    for frame in lesson("hybrid", *words).frames:
        for figure in frame.figures:
            if isinstance(figure, NodeNetwork):
                _apart(drawn(figure, frame.title).body)


def _apart(body: str) -> None:
    root = ElementTree.fromstring(f"<g>{body}</g>")
    circles = [
        (float(one.attrib["cx"]), float(one.attrib["cy"]), float(one.attrib["r"])) for one in root.iter("circle")
    ]
    for number, (x, y, radius) in enumerate(circles):
        for other_x, other_y, _ in circles[number + 1 :]:
            assert ((x - other_x) ** 2 + (y - other_y) ** 2) ** 0.5 > 2 * radius
