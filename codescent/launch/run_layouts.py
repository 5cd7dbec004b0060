"""In: the pages of a run that only its ranks know. Out: its layouts for fewer ranks, as another process finds them.
Does not find a layout (jobs/layouts.py does): an agent imports no model and no strategy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.progress import Pages
from codescent.launch.places import Fewer, FewerRanks
from codescent.record import RunFolder

PROGRAM = "codescent.jobs.layouts"
MOST_FAILURES = 2
"""Times that the process may fail for a number of ranks. Then there is no layout for it."""
ANSWER_S = 30.0
"""Seconds in which the process answers: it imports all models and strategies."""


def layouts_of_run(pages: Pages, wanted: int, say: Callable[[str], None]) -> Fewer:
    """The layouts of a run for fewer ranks. Before its first step there is none: its folder may be incomplete.

    Args:
        pages: of the ranks of this host; they have the path of the run folder.
        wanted: the number of ranks that the user wants.
        say: prints why there is none.
    """
    began: dict[str, Any] = {}  # the first config and plan of this start: later ones have fewer ranks
    known: dict[int, FewerRanks | None] = {}  # it is asked again and again
    failures = Counter[int]()

    def fewer(there: int) -> FewerRanks | None:
        if not began and pages.folder and any(pages.read(rank).position > 0 for rank in range(wanted)):
            try:
                folder = RunFolder.open(Path(pages.folder))
            except UserError as error:
                say(f"codescent: no layout for fewer ranks is known: {error}")
                return None
            began.update(config=folder.config_text, plan=folder.plan, wanted=wanted)
        if began and there not in known:
            try:
                known[there] = _asked({**began, "there": there})
            except NoAnswer as error:
                say(f"codescent: no layout of at most {there} ranks is found: {error}")
                failures[there] += 1
                if failures[there] == MOST_FAILURES:
                    known[there] = None
        return known.get(there)

    return fewer


class NoAnswer(Exception):
    """The process has failed."""


def _asked(request: dict[str, Any]) -> FewerRanks | None:
    """The answer of the process. None: there is no layout. Raises NoAnswer."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", PROGRAM],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
        found = json.loads(done.stdout)
        lists = {name: tuple(found[name]) for name in ("notes", "parts")} if found else {}
        return FewerRanks(**{**found, **lists}) if found else None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        raise NoAnswer(
            said[-1] if said else f"the process that looks for it has ended with {error.returncode}"
        ) from error
    except (subprocess.TimeoutExpired, OSError, ValueError, LookupError, TypeError) as error:
        raise NoAnswer(str(error)) from error
