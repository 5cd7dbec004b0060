"""In: README.md, the repository's public address. Out: the text and the links that a package index shows.
Does not read pyproject.toml (hatch_build.py does). Where no address is known, it makes no link that leads nowhere."""

from __future__ import annotations

import re
from collections.abc import Callable

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
"""A link or a picture of Markdown: "!" of a picture, text, target."""


def links(repository: str, version: str) -> dict[str, str]:
    """The links that an index shows beside the text; none without an address.

    Args:
        repository: address of the repository at its code host, without a slash at the end; "": not known.
        version: of the package. The tag of a version is v and the version.
    """
    if not repository:
        return {}
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/features.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def readme(text: str, repository: str, version: str, name_of: Callable[[str], str]) -> str:
    """README.md for an index, where links within the repository lead nowhere.

    With an address links and pictures are those of the tag. Without one a picture becomes its description, and a link
    to a page the command that prints the page.

    Args:
        text: of README.md.
        repository: see `links`.
        version: see `links`.
        name_of: the name of a page by its path (codescent/base/pages.py).
    """

    def public(found: re.Match[str]) -> str:
        picture, shown, target = found[1], found[2], found[3]
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        if repository:
            kind = "raw" if picture else "blob"
            return f"{picture}[{shown}]({repository}/{kind}/v{version}/{target})"
        if picture:
            return f"*Picture: {shown}*"
        path, mark, anchor = target.partition("#")
        return f"{shown} (`codescent docs {name_of(path)}{mark}{anchor}`)" if path.endswith(".md") else shown

    return LINK.sub(public, text)
