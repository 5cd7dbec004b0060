"""In: every page of the documentation. Out: its links lead somewhere; verbs, public names and decisions have a page.
Does not judge what the pages say, follows no link out of the repository, and builds no site: `make docs` does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import matplotlib
import pytest
from runs import codescent as run_codescent

import codescent
from codescent.plan import Verb
from codescent.verbs.plot import MARK

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:codescent|tests|benchmarks|configs|docs)/[\w./-]+\.\w+)`")


def anchors(page: Path) -> set[str]:
    """The names by which the headings of a page can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    broken += [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    assert not broken


def test_there_are_pages_for_the_verbs() -> None:
    assert len(PAGES) > 10
    for verb in ("train", "plan", "config", "data", "sample", "evaluate"):
        assert (ROOT / "docs" / f"{verb}.md").is_file()


def test_the_page_of_instructions_has_every_verb() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    table = page.partition("| verb | what it does |")[2].partition("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {verb for first in firsts for verb in re.findall(r"`(\w+)`", first)} == set(Verb)


def test_the_page_of_a_run_folder_has_every_event() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "codescent").rglob("*.py"))
    written = set(re.findall(r"event\(\s*\"(\w+)\"", code))
    page = (ROOT / "docs" / "run_folder.md").read_text(encoding="utf-8")
    assert {"start", "slow_steps", "rewind", "import"} <= written
    assert written - set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set()


def test_the_page_of_public_names_has_each_of_them() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: codescent\.(?:api\.\w+\.)?(\w+)$", page, re.MULTILINE)) == sorted(codescent.__all__)


def test_the_index_of_decisions_has_each_note_with_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    notes = sorted(folder.glob("[0-9]*.md"))
    titles = [note.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").split(". ", 1) for note in notes]
    assert [f"{number}. [{title}]({note.name})" for (number, title), note in zip(titles, notes)] == [
        line for line in index.splitlines() if re.match(r"\d+\. ", line)
    ]


def test_the_quick_loop_names_files_that_are_there_for_each_room() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.*?) \| `(tests/.*?)` \|", page, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "codescent").glob("*/__init__.py")}
    assert rooms == {name for row in rows for name in re.findall(r"`(\w+)/`", row)}
    for files in rows.values():
        for pattern in re.findall(r"tests/\S+", files):
            before, _, names, after = re.fullmatch(r"([^{]*)(\{(.*)\})?(.*)", pattern).groups("")  # type: ignore[union-attr]
            for name in names.split(","):
                assert list(ROOT.glob(before + name + after)), pattern


def test_the_glossary_has_each_term_once_in_order_with_one_short_sentence() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^### (.+)\n\n(.+)\n(?=\n|\Z)", page, re.MULTILINE)
    terms = [term for term, _ in entries]
    assert len(terms) > 150
    assert len(terms) == page.count("\n### ")
    assert terms == sorted(terms, key=str.casefold)
    assert len(anchors(ROOT / "docs" / "glossary.md")) == len(terms) + 1
    for term, sentence in entries:
        shown = re.sub(r"\]\([^)]*\)", "]", sentence)
        assert sentence[0].isupper() or sentence[0].isdigit(), term
        assert sentence.endswith("."), term
        assert ". " not in shown, term
        assert len(shown.split()) <= 25, term


def test_each_term_of_the_glossary_is_used() -> None:
    files = [page for page in PAGES if page.name != "glossary.md"] + sorted((ROOT / "codescent").rglob("*.py"))
    text = " ".join(" ".join(file.read_text(encoding="utf-8") for file in files).casefold().split())
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    for term in re.findall(r"^### (.+)$", page, re.MULTILINE):
        words = re.escape(term.casefold()).replace("\\ ", "[ -]")
        assert re.search(rf"(?<!\w){words}(s|es)?(?!\w)", text), term


def labels(svg: Path) -> list[str]:
    """The texts of a picture, in the order of the file."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def test_the_timeline_of_the_first_page_is_what_its_command_draws(tmp_path: Path) -> None:
    block = re.search(r"^    \$ .*codescent (plan .*--timeline) (\S+)\n((?:    .*\n)+)", readme(), re.MULTILINE)
    assert block is not None
    committed = ROOT / block[2]
    drawn = tmp_path / committed.name
    done = run_codescent(tmp_path, *block[1].split(), str(drawn))
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert [line for line in block[3].splitlines() if "..." not in line and " ".join(line.split()) not in said] == []
    pin = re.search(r"^matplotlib==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pin is not None
    assert labels(drawn) == labels(committed)
    assert matplotlib.__version__ != pin[1] or drawn.read_bytes() == committed.read_bytes()


def test_pictures_are_small_opaque_and_linked() -> None:
    for picture in sorted((ROOT / "docs").glob("*.svg")):
        root = ElementTree.parse(picture).getroot()
        width, height = (float(root.attrib[name].removesuffix("pt")) for name in ("width", "height"))
        ground = next(element for element in root.iter() if element.tag.endswith("}path"))
        assert "fill: #ffffff" in ground.attrib["style"]
        assert max(float(number) for number in re.findall(r"[\d.]+", ground.attrib["d"])) == max(width, height)
        assert picture.stat().st_size < 120_000
        assert f"](docs/{picture.name})" in readme()


def test_the_run_of_the_first_page_is_drawn_by_plot_and_two_ranks_have_the_losses_of_one() -> None:
    picture = ROOT / "docs" / "loss.svg"
    assert MARK in picture.read_text(encoding="utf-8")
    assert re.search(r"^    codescent plot .* --out docs/loss.svg$", features(), re.MULTILINE)
    (said,) = [label for label in labels(picture) if "has the losses of" in label]
    found = re.fullmatch(
        r"two_ranks has the losses of default \(broad line\): in [\d,]+ rows at most (\S+) apart", said
    )
    assert found is not None
    assert float(found[1]) < 0.04  # of losses of 3.5: rounding in fp32 grows from step to step


def features() -> str:
    return (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def module_of(path: Path) -> ModuleType:
    """A Python file of docs/, imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """The hook of mkdocs.yml."""
    pytest.importorskip("mkdocs", reason="make docs installs it")
    return module_of(ROOT / "docs" / "site" / "pages.py")


@pytest.mark.parametrize(
    ("page", "fetched"),
    [
        ('<script src="https://cdn.net/a.js"></script>', ["https://cdn.net/a.js"]),
        ('<link rel="stylesheet" href="//fonts.net/b.css">', ["//fonts.net/b.css"]),
        ('<img src="http://x.net/c.svg" srcset="https://x.net/d.svg">', ["http://x.net/c.svg", "https://x.net/d.svg"]),
        ('<style>@import "https://x.net/g.css";</style>', ["https://x.net/g.css"]),
        ("<style>p { background: url(//x.net/h.png) }</style>", ["//x.net/h.png"]),
        ('<a href="https://x.net/e">read</a><img src="f.svg"><link rel="canonical" href="https://x.net/">', []),
    ],
)
def test_what_a_page_of_the_site_fetches_is_found(site: ModuleType, page: str, fetched: list[str]) -> None:
    assert site.fetched(page) == fetched


def test_an_entry_of_the_navigation_with_a_star_is_every_file_that_matches(site: ModuleType) -> None:
    nav = ["README.md", {"A": ["docs/nothing_of_this_name*.md", "docs/decisions/000[12]*.md"]}]
    notes = ["docs/decisions/0001-buckets-of-our-own.md", "docs/decisions/0002-planning-without-torch.md"]
    assert site.expanded(nav) == ["README.md", {"A": notes}]
