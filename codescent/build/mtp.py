"""In: a config with modules that predict more tokens (multi-token prediction). Out: their weight; what is refused.
Does not refuse sizes or axes (models/llama/multi_token.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from codescent import tasks
from codescent.base.refusal import Change, Refusal

if TYPE_CHECKING:
    from codescent.config.sections import Config

WEIGHT = 0.3
"""DeepSeek-AI 2024, "DeepSeek-V3", section 4.2: lambda of the first 10T tokens."""
_LAYERS, _WEIGHT = "model.mtp_layers", "train.mtp_weight"


def weight_of(config: Config) -> float:
    """The weight of the losses of these modules; 0: there are none."""
    if not config.model.mtp_layers:
        return 0.0
    return WEIGHT if config.train.mtp_weight is None else config.train.mtp_weight


def refusals(config: Config, request: tasks.TaskRequest) -> Iterator[Refusal]:
    """Losses of answers, which are not of tokens; adapters, beside which modules would stay as they are."""
    if not weight_of(config):
        return
    said, off = f"{_LAYERS} = {config.model.mtp_layers}", [Change({_LAYERS: None, _WEIGHT: None})]
    task = tasks.task_of(request)
    if (task.preference(request), task.policy(request)) != (None, None):
        yield Refusal(f"{said}: a loss of answers has no next tokens", off)
    if config.lora.rank is not None or config.lora.weights is not None:
        yield Refusal(f"{said}: lora.rank freezes the modules, and adapters have no part in them", off)
