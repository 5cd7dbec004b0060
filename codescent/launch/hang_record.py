"""In: a verdict in words. Out: hang.txt of the run folder, or of the folder of the ranks' output; an event of the run.
Does not print (local.py does). Without a run folder, such as that of an own loop, there is no event."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.page import GroupUse
from codescent.base.progress import Pages
from codescent.launch.hang_writer import HANG, write_apart
from codescent.record import RunFolder


class HangRecord:
    """Where the verdicts of this start are written.

    Args:
        pages: have the path of the run folder, once a rank knows it.
        spare: a folder for hang.txt, if there is no run folder, or its disk does not answer. None: it is made then,
            so that nothing is left of a process that is killed before.
    """

    def __init__(self, pages: Pages, spare: Path | None = None) -> None:
        self._pages, self._spare = pages, spare
        self._texts: list[str] = []
        self._silent = False  # whether the disk of the run folder does not answer

    def look(self) -> None:
        """Read the plan, as soon as there is one: later the disk may not answer."""
        _purposes(self._pages.folder)

    def write(self, text: str, event: Mapping[str, Any]) -> Path | None:
        """Add a verdict to hang.txt, and an event to the run folder. Returns the path; None: it cannot be written."""
        self._texts.append(text)
        content = "\n".join(self._texts)
        if self._apart(content, event):
            return Path(self._pages.folder) / HANG
        with suppress(OSError):
            self._spare = self._spare or Path(tempfile.mkdtemp(prefix="codescent-hang-"))
            replace_file(self._spare / HANG, content)
            return self._spare / HANG
        return None

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the run folder."""
        self._apart("", {"kind": kind, **fields})

    def carries(self, use: GroupUse) -> str:
        """What the plan of the run says that a collective carries."""
        found = _purposes(self._pages.folder).get((use.kind, use.axis), {})
        exact = [what for what, sizes in found.items() if use.size_bytes in sizes]
        return ", or ".join(exact or found)

    def _apart(self, text: str, event: Mapping[str, Any]) -> bool:
        folder = self._pages.folder
        done = write_apart(folder, text, event) if folder and not self._silent else False
        self._silent |= done is None
        return bool(done)


@functools.cache
def _purposes(path: str) -> dict[tuple[str, str], dict[str, set[int]]]:
    """The purposes of the collectives of a plan with their bytes, by kind and axis."""
    found: dict[tuple[str, str], dict[str, set[int]]] = {}
    with suppress(UserError, KeyError, TypeError):
        for one in RunFolder.open(path).plan["traffic"] if path else ():
            of_kind = found.setdefault((one["collective"], one["axis"]), {})
            of_kind.setdefault(one["what"], set()).add(one["payload_bytes"])
    return found
