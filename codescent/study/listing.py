"""In: a study and its folder. Out: the command of each repeat, for other machines: copy, paste, collect.
Does not run anything and writes no job script."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from codescent.base.command import command
from codescent.study.folder import StudyFolder
from codescent.study.points import Spec
from codescent.study.result import PointState

TORCHRUN = "torchrun --nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m"


def to_do(folder: StudyFolder) -> Iterator[tuple[Spec, list[int], str]]:
    """Each point with the numbers of its repeats that are to do; or why it has none."""
    definition = folder.definition
    for spec in definition.specs:
        if why := definition.refused.get(spec.name, ""):
            yield spec, [], why
            continue
        done = {attempt.number for attempt in folder.attempts(spec) if attempt.state is PointState.DONE}
        missing = [number for number in range(1, definition.repeats + 1) if number not in done]
        yield spec, missing, "" if missing else "done"


def commands(folder: StudyFolder) -> Iterator[tuple[Spec, str, str]]:
    """Each point with the command of the repeats that are to do, a loop if they are several; or why it has none."""
    for spec, missing, why in to_do(folder):
        yield spec, _lines(folder, spec, missing) if missing else "", why


def _lines(folder: StudyFolder, spec: Spec, numbers: Sequence[int]) -> str:
    """The command of repeats. On several machines a launcher starts it on each of them."""
    line = command("train", folder.definition.config, *spec.words)
    if spec.nodes > 1:
        line = f"{TORCHRUN.format(nodes=spec.nodes, ranks=spec.ranks // spec.nodes)} {line}"
    path = shlex.quote(f"run.folder={folder.run_path(spec, 0).parent}")
    if len(numbers) == 1:
        return f"{line} {path}/{numbers[0]}"
    return f"for repeat in {' '.join(map(str, numbers))}; do {line} {path}/$repeat; done"
