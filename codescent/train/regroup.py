"""In: a config, this process's rank. Out: the outcome of its run. After the loss of a rank this process goes on.
Does not start a rank again (launch/local.py does) and does not take steps (loop.py does)."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING

from codescent.base import cause
from codescent.base.call import INVITED, SURVIVES, Call
from codescent.base.early import be_patient, hand_over
from codescent.base.ending import ends_soon
from codescent.base.messages import detail
from codescent.base.parent import end_with_parent
from codescent.base.progress import OwnPage, Pages
from codescent.base.rank import Rank
from codescent.base.stopping import SAVING, STOPPING
from codescent.base.uncollected import uncollected
from codescent.config.load import with_values
from codescent.config.sections import Config
from codescent.preflight import is_begun
from codescent.train.hang_up import LOOK_EVERY_S, Alarm, Regroup, outlives
from codescent.train.outcome import GOES_ON, Outcome

if TYPE_CHECKING:
    from codescent.train.generation import Generation


SAVES_WITHIN_S = 10.0
"""A request to stop ends no rank for so long, while the ranks meet anew: they soon take a step, and save it."""


def train_on(config: Config, this_rank: Rank, *, resume: bool, notes: Sequence[str] = ()) -> Outcome:
    """`loop.train`. After the loss of a rank it is called again in this process, which has imported torch already.

    Arguments and errors are those of `loop.train`.
    """
    with uncollected():
        from codescent.train.loop import train  # noqa: PLC0415 - it imports `ends_or_regroups`, and torch

    least, _, page = os.environ.get(SURVIVES, "").partition(" ")
    pages = Pages.of(os.environ)
    if not least or pages is None:
        return train(config, this_rank, resume=resume, notes=notes)
    alarm, wanted = Alarm(pages), config
    gc.freeze()  # what was imported stays: without it, a collection takes a tenth of the time
    number = int(least)
    if number:
        _wait_for_a_place(pages, int(page))
    try:
        while True:
            call = alarm.follow(number)
            if call.number:
                this_rank, config, notes = _placed(this_rank, call), with_values(wanted, call.values), call.notes
                resume = is_begun(config)
            try:
                outcome = train(config, this_rank, resume=resume, notes=notes)
                if outcome.exit_code != GOES_ON:
                    return replace(outcome, rank=this_rank.rank)
            except Exception as error:
                if not outlives(error):
                    raise
                clear_frames(error.__traceback__)
                if isinstance(error, Regroup):  # else it had not loaded them yet
                    alarm.held = error.held
                detail(f"{this_rank.here()}: {error}")  # the launcher says who is lost, and how the run goes on
            if alarm.held is not None:
                be_patient((*STOPPING, *SAVING), SAVES_WITHIN_S)
            gc.collect()  # the trainer of before has gone before another one is made
            cause.forget()
            this_rank, resume, notes = replace(this_rank, store_fd=None), is_begun(config), ()
    finally:
        alarm.close()


def _wait_for_a_place(pages: Pages, page: int) -> None:
    """This process has imported what a rank needs: from now on it can take a place. It ends with its parent."""
    end_with_parent("a process that waits for a place")
    be_patient((*STOPPING, *SAVING), SAVES_WITHIN_S)  # others may wait for this one, to save
    invited = os.environ.get(INVITED)
    while invited and not Path(invited, str(os.getpid())).is_dir() and os.getpid() not in pages.call.places:
        time.sleep(LOOK_EVERY_S)
    OwnPage(pages, page).beat()


def _placed(this_rank: Rank, call: Call) -> Rank:
    """This process as a rank of a call."""
    rank, here = call.places[os.getpid()], sorted(call.places.values())
    return replace(
        this_rank,
        rank=rank,
        local_rank=here.index(rank),
        world_size=call.ranks,
        local_world_size=len(here),
        store_fd=None,
        late=False,
    )


@contextmanager
def ends_or_regroups(generation: Generation) -> Iterator[None]:
    """`ends_soon`, if this process does not outlive the error; else the block raises Regroup.

    If the block ends so that other ranks can take part, this rank keeps what it has for them.
    """
    lost = None
    with ends_soon(generation.run.world.this_rank.world_size):
        try:
            yield
        except Exception as error:
            if not outlives(error):
                raise
            lost = error
    if lost is not None:
        if generation.stop.signal is not None:
            hand_over(generation.stop.signal)
        clear_frames(lost.__traceback__)  # they hold tensors, and messages that are under way
        raise Regroup(str(lost).partition("\n")[0], generation.held())
    if generation.stop.goes_on and Alarm.current is not None:
        Alarm.current.held = generation.held()
