"""In: the repository's pages, mkdocs.yml. Out: the files of the site, its navigation, and that it fetches nothing.
Does not change a page: each has the path in the site that it has in the repository, so its links are right in both."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
FILES = ("*.md", "docs/**/*.md", "docs/**/*.svg", "docs/**/*.png", "docs/site/*.js", "benchmarks/**/*.md")
LINKED = ("LICENSE", "configs/*.toml", "examples/*.py", "examples/*.ipynb", "examples/*/*.toml", "examples/*/*.py")
"""Files that pages link to, copied as they are."""

AWAY = re.compile(r"\s*(?:https?:)?//")
STYLE_AWAY = re.compile(r"""(?:@import\s*|url\()["']?((?:https?:)?//[^"')\s;]+)""")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give each entry of the navigation with a * the files that match it."""
    config.nav = expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the repository instead of those of docs_dir; what the theme brings stays."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in matches(*FILES, *LINKED):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site with a page that a browser without a network cannot show."""
    problems = []
    for path in sorted(Path(config.site_dir).rglob("*.*")):
        find = {".html": fetched, ".css": STYLE_AWAY.findall}.get(path.suffix)
        problems += [f"{path}: fetches {address}" for address in find(path.read_text("utf-8"))] if find else []
    if problems:
        raise PluginError("\n".join(problems))


def expanded(entry: Any) -> Any:
    """An entry of the navigation, its patterns replaced by the files that match."""
    if isinstance(entry, dict):
        return {title: expanded(inner) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [
            inner
            for each in entry
            for inner in (matches(each) if isinstance(each, str) and "*" in each else [expanded(each)])
        ]
    return entry


def matches(*patterns: str) -> list[str]:
    """Paths of the repository's files that match."""
    return [path.relative_to(ROOT).as_posix() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def fetched(page: str) -> list[str]:
    """The addresses of other machines from which a browser gets a part of this HTML page; links to follow are none."""
    parser = _Fetched()
    parser.feed(page)
    return parser.found


class _Fetched(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        names = ("src", "srcset", "data", "poster") + (("href",) if tag == "link" else ())
        if values.get("rel") != "canonical":
            self.found += [values[name] for name in names if AWAY.match(values.get(name, ""))]

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += STYLE_AWAY.findall(data)
