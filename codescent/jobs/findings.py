"""In: nothing. Out: the dataclasses `Preflight` (what is checked before a job) and `Findings` (what was found).
Does not check: checks.py and the files that it calls do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from codescent.config.sections import Config
from codescent.data.samples import AnyDataset
from codescent.jobs.shape import JobShape
from codescent.jobs.site import Site
from codescent.plan import Plan


@dataclass(frozen=True)
class Preflight:
    """What a command asks for.

    Attributes:
        target: the word of --to.
        config: of the run; None: a script of the user.
        shape: ranks of each node.
        site: the cluster.
        run: the run folder, where the records of its jobs are.
        words: overrides on the command line.
        submits: whether the job is submitted now. Else what may change before it starts is said, not refused.
        times: how many jobs follow each other.
        saved: whether the script has a file: then a script of PBS can submit itself again.
    """

    target: str
    config: Config | None
    shape: JobShape
    site: Site
    run: Path
    words: tuple[str, ...] = ()
    submits: bool = False
    times: int = 1
    saved: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks; of an elastic job the largest."""
        return sum(self.shape.slots)


@dataclass
class Findings:
    """What was found.

    Attributes:
        problems: why the job must not start.
        notes: sentences for the user.
        config: with the steps and samples that the prepared data decides.
        plan: for the largest number of ranks; None: there is none.
        dataset: the prepared data; None: it is not prepared, or damaged.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config: Config | None = None
    plan: Plan | None = None
    dataset: AnyDataset | None = None

    def refuse(self, problems: Iterable[str]) -> None:
        """Add problems."""
        self.problems += problems

    def refuse_now(self, problems: Iterable[str], asked: Preflight) -> None:
        """Add what may change before a script starts: problems of a job that is submitted now, else notes."""
        (self.problems if asked.submits else self.notes).extend(problems)
