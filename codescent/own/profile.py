"""In: a `with` block around steps of a user's loop. Out: a trace per rank for ui.perfetto.dev; seconds of computation,
of communication, and of exposed communication (while nothing is computed).
Does not time operators itself (torch's profiler does), and does not measure a trace (trace/ does)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from codescent.base.agreement import rank, together
from codescent.base.device import activities, found_kind, synchronize
from codescent.base.errors import UserError
from codescent.base.reading import read_json
from codescent.base.writing import hidden_folder, make_parents, move
from codescent.own.arguments import PATH, public
from codescent.own.session import joined_or_alone
from codescent.trace.measure import Measured, measure

MOST_TRACE_BYTES = 16 << 30
"""A block of many steps records a large trace."""


@dataclass
class Profile(Measured):
    """Seconds of one rank in the `with` block. The values are set when the block ends.

    Attributes:
        wall_s: from the begin of the first recorded event to the end of the last one.
        compute_s: time in which a kernel (on a CUDA device) or an operator (on a CPU) ran.
        communication_s: time in which a collective ran; on a CUDA device this includes waiting for other ranks.
        exposed_s: the part of communication_s in which the rank computed nothing.
        trace: the path of the trace.
    """

    trace: str = ""


@public("codescent.profile", collective=True, folder=PATH)
@contextmanager
def profile(folder: str | PathLike[str], **options: Any) -> Iterator[Profile]:
    """Record the operators and kernels of the `with` block on every rank. Collective.

        with codescent.profile("traces"):
            for _ in range(3):
                step()

    Leave out the first steps: they allocate and compile. At the end each rank writes `folder/rank_00000.json` (with its
    own number) for ui.perfetto.dev. Rank 0 prints each rank's seconds of computation, communication and exposed
    communication.

    Args:
        folder: created if it does not exist.
        options: for torch.profiler.profile, such as record_shapes=True, with_stack=True.

    Raises:
        UserError: an option is unknown, or a trace cannot be written.
    """
    joined_or_alone("profile")
    device = torch.device(found_kind())
    result = Profile()
    try:
        recorder = torch.profiler.profile(**{"activities": activities(device), **options})
    except TypeError as error:
        raise UserError(f"codescent.profile: torch.profiler.profile refuses the options: {error}") from error
    with recorder as recorded:
        yield result
        synchronize(device)  # so that the trace has all kernels of the block

    def write() -> dict[str, Any]:
        path = Path(folder) / f"rank_{rank():05d}.json"
        try:
            make_parents(path.parent)
            with hidden_folder(path.parent) as hidden:
                recorded.export_chrome_trace(str(hidden / path.name))
                move(hidden / path.name, path)
            events = read_json(path, MOST_TRACE_BYTES)["traceEvents"]
        except (OSError, RuntimeError) as error:
            raise UserError(f"codescent.profile: {path}: cannot be written: {error}") from error
        vars(result).update(asdict(measure(events)), trace=str(path))
        return asdict(result)

    everyone = together(UserError, write)
    if rank() == 0:
        for number, of in enumerate(everyone):
            print(
                f"rank {number}: {of['wall_s']:.3f} s, computing {of['compute_s']:.3f}, communicating "
                f"{of['communication_s']:.3f}, of which exposed {of['exposed_s']:.3f}: {of['trace']}",
                flush=True,
            )
