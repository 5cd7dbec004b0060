"""In: nothing. Out: `Changed`: an entry of the order in which the weights of a replica of asynchronous gossip changed.
Does not change weights and writes no file (record/gossip_order.py does)."""

from __future__ import annotations

from dataclasses import dataclass

SENT, AVERAGED, MERGED, STEPPED, AGREED = "sent", "averaged", "merged", "stepped", "agreed"
"""Kinds of `Changed`."""


@dataclass(frozen=True)
class Changed:
    """An entry of one replica, in the order in which its weights were read or changed.

    Attributes:
        kind: "sent": an active replica has read its weights for an average. "averaged": a passive one has averaged
            with them. "merged": the active one has taken the change. "stepped": the optimizer's update. "agreed": all
            ranks have met, after `step` steps.
        partner: the other replica of an average; else -1.
        number: of the average, counted by the active replica since the ranks last met; of "stepped": by how many
            averages the weights had changed since the gradient's were read.
        step: of an average: the steps that were complete when the ranks last met. Of "stepped": the portion's step.
        part: of "stepped": which of the equal parts of the step's samples; else -1.
    """

    kind: str
    partner: int
    number: int
    step: int
    part: int = -1
