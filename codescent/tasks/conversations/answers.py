"""In: nothing. Out: what tasks with a loss of whole answers have in common.
Does not read a line and knows no loss (tasks/preferences and tasks/rewarded do)."""

from __future__ import annotations

from types import MappingProxyType

from codescent.tasks.conversations import Conversations


class AnswersTask(Conversations):
    """Conversations whose answers have losses as a whole. A sample has several, each a document."""

    undivided = "its samples always keep their answers apart"
    ignores = ("data.text_key", "data.as_text", "data.messages_key", "train.label_smoothing", "train.z_loss")
    equal_losses = True
    mixes = False
    kept = MappingProxyType(dict(Conversations.kept))
