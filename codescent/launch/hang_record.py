"""In: a verdict in words. Out: hang.txt of the run folder, or of the folder of the ranks' output; an event of the run.
Does not print (local.py does). Without a run folder, such as that of an own loop, there is no event."""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path
from typing import Any

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.page import GroupUse
from codescent.base.progress import Pages
from codescent.record import RunFolder

HANG = "hang.txt"


class HangRecord:
    """Where the verdicts of this start are written.

    Args:
        pages: have the path of the run folder, once a rank knows it.
        spare: a folder for hang.txt, if there is no run folder.
    """

    def __init__(self, pages: Pages, spare: Path) -> None:
        self._pages, self._spare = pages, spare
        self._texts: list[str] = []

    @property
    def folder(self) -> RunFolder | None:
        """The run folder; None: there is none."""
        path = self._pages.folder
        with suppress(UserError):
            return RunFolder.open(path) if path else None
        return None

    def write(self, text: str) -> Path | None:
        """Add a verdict to hang.txt. Returns its path; None: it cannot be written."""
        self._texts.append(text)
        folder = self.folder
        path = (self._spare if folder is None else folder.path) / HANG
        with suppress(OSError):
            replace_file(path, "\n".join(self._texts))
            return path
        return None

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the run folder."""
        folder = self.folder
        if folder is not None:
            with suppress(UserError):  # the disk is full: the page is on the console
                folder.event(kind, **fields)

    def carries(self, use: GroupUse) -> str:
        """What the plan of the run says that a collective carries."""
        found = _purposes(self._pages.folder).get((use.kind, use.axis), {})
        exact = [what for what, sizes in found.items() if use.size_bytes in sizes]
        return ", or ".join(exact or found)


@functools.cache
def _purposes(path: str) -> dict[tuple[str, str], dict[str, set[int]]]:
    """The purposes of the collectives of a plan with their bytes, by kind and axis."""
    found: dict[tuple[str, str], dict[str, set[int]]] = {}
    with suppress(UserError, KeyError, TypeError):
        for one in RunFolder.open(path).plan["traffic"] if path else ():
            of_kind = found.setdefault((one["collective"], one["axis"]), {})
            of_kind.setdefault(one["what"], set()).add(one["payload_bytes"])
    return found
