"""In: pyproject.toml, README.md, the pages of the repository. Out: metadata for an index, and pages inside of a wheel.
Does not import codescent: a build has none of its dependencies. hatchling loads this file (pyproject.toml)."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parent.parent
PAGES = run_path(str(ROOT / "codescent/base/pages.py"))
PUBLIC = run_path(str(ROOT / "release/public.py"))


class Metadata(MetadataHookInterface):
    """The readme and the links of the metadata: [tool.hatch.metadata.hooks.custom] has the address."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the table [project]."""
        repository, version = str(self.config["repository"]).rstrip("/"), metadata["version"]
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        shown = PUBLIC["readme"](text, repository, version, PAGES["name_of"])
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
        metadata["urls"] = PUBLIC["links"](repository, version)


class Pages(BuildHookInterface[Any]):
    """The pages that `codescent docs` prints."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them to a wheel. An editable installation reads those of the checkout."""
        if version == "editable":
            return
        for path in PAGES["pages_in"](ROOT).values():
            inside = path.relative_to(ROOT).as_posix()
            build_data["force_include"][inside] = f"codescent/{PAGES['FOLDER']}/{inside}"
