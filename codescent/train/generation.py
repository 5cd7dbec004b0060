"""In: an open run. Out: the process groups and the trainer of a generation, which can be let go of and made anew.
Does not decide when (a coupling does, where all ranks meet) and does not take steps (loop.py does)."""

from __future__ import annotations

import gc

from codescent.checkpoint.held import HeldTensors, MemoryCheckpoint
from codescent.train.assemble import assemble
from codescent.train.holding import HeldStep, holding
from codescent.train.open import OpenRun
from codescent.train.references import ReferenceFiles
from codescent.train.rollouts import Rollouts
from codescent.train.spikes import Spikes
from codescent.train.stop import StopRequest
from codescent.train.trainer import Trainer


class Generation:
    """What of a run depends on who takes part: process groups, and the trainer with its coupling and its memory.

    The run folder, the store, the report and what ranks know of the run stay when a generation is replaced.

    Args:
        run: of this rank.
        stop: its request to stop.

    Attributes:
        number: of this generation, from 0.
        trainer: of this generation.
        spikes: looks at each step, before its update.
    """

    trainer: Trainer
    _holding: HeldStep | None

    def __init__(self, run: OpenRun, stop: StopRequest) -> None:
        self.run, self.stop, self.number = run, stop, 0
        self._make()

    def _make(self) -> None:
        run, compiles = self.run, self.run.machine["compile"]["choice"]
        self.spikes = spikes = Spikes(run.config.survive, run.saved.state.get("spikes", {}) if run.saved else {})
        facts = (run.config, run.plan, run.world, run.dataset, run.first_step, self.stop, compiles)
        accepts = spikes.accepts if spikes.looks else None
        references = ReferenceFiles(run)
        self.rollouts = Rollouts(run)
        initial = bool(references.lacking) or self.rollouts.needs_initial
        self.trainer = assemble(*facts, generation=self.number, ahead=run.ahead, accepts=accepts, initial=initial)
        references.compute(self.trainer.executor)
        self.rollouts.attach(self.trainer)
        executor = self.trainer.executor
        spikes.losses = lambda: executor.portion.losses
        run.remembered = lambda: {"spikes": spikes.state()} if spikes.looks else {}
        self._holding = holding(self.trainer, run.state)

    def replace(self) -> None:
        """Let go of this generation, and make the next one, which goes on from `run.saved`. Collective.

        Its process groups have other names: a message of the old ones that is late reaches none of the new ones.
        """
        self.trainer.close()
        self.rollouts.detach()
        self.run.remembered = dict
        del self.trainer, self.spikes, self._holding
        gc.collect()
        self.number += 1
        world = self.run.world
        world.go_on_with(world.living, self.run.plan, f"generation {self.number}")
        self._make()
        self.load()

    def load(self) -> None:
        """Load the checkpoint, if there is one. Collective. Then this rank holds its step."""
        self.run.load(self.trainer)
        if self._holding is not None:
            self._holding.begin(self.run.first_step)

    def held(self) -> HeldTensors | None:
        """What this rank has in memory of the last step, after the loss of another one; None: nothing that suffices."""
        holds, saved = getattr(self, "_holding", None), self.run.saved
        if holds is not None and holds.step is None and isinstance(saved, MemoryCheckpoint):  # it was being loaded
            return saved.held
        return None if holds is None else holds.held()

    def saves_at_stop(self) -> bool:
        """Whether the ranks save the step at which they stop. Collective.

        Otherwise other ranks take part from now on, and get their parts from the memory of these.
        """
        return self.stop.is_final() or self._holding is None

    def close(self) -> None:
        """Let go of this generation."""
        if hasattr(self, "trainer"):
            self.trainer.close()
