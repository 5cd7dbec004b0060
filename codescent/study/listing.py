"""In: a study and its folder. Out: the command of each repeat, for other machines: copy, paste, collect.
Does not run anything and writes no job script."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.command import command
from codescent.study.folder import StudyFolder
from codescent.study.points import Spec
from codescent.study.result import PointState

TORCHRUN = "torchrun --nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m"


def commands(folder: StudyFolder) -> Iterator[tuple[Spec, list[str], str]]:
    """Each point with the commands of the repeats that are to do, round by round within a point; or why it has none."""
    definition = folder.definition
    for spec in definition.specs:
        if why := definition.refused.get(spec.name, ""):
            yield spec, [], why
            continue
        done = {attempt.number for attempt in folder.attempts(spec) if attempt.state is PointState.DONE}
        missing = [number for number in range(1, definition.repeats + 1) if number not in done]
        yield spec, [_line(folder, spec, number) for number in missing], ""


def _line(folder: StudyFolder, spec: Spec, number: int) -> str:
    """The command of a repeat. On several machines a launcher starts it on each of them."""
    words = [*spec.words, f"run.folder={folder.run_path(spec, number)}"]
    line = command("train", folder.definition.config, *words)
    if spec.nodes == 1:
        return line
    launcher = TORCHRUN.format(nodes=spec.nodes, ranks=spec.ranks // spec.nodes)
    return f"{launcher} {line}"
