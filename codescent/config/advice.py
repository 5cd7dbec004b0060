"""In: a message that refuses a layout, the values that decide the losses of a run. Out: the message for `--resume`.
Does not refuse anything and does not find advice (build.py and strategies do)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from codescent.config import effects
from codescent.config.words import KEYS

if TYPE_CHECKING:
    from codescent.config.sections import Config

KEY = re.compile(r"\w+\.\w+")


def on_resume(problem: str, config: Config, before: Mapping[str, Any]) -> str:
    """The message with only the advice that a run can follow: the values of `before`, its trajectory, do not change."""
    said, found, advice = problem.partition("; nearest that would do: ")
    own, scales = problem.split(" ")[0].rstrip(":"), config.optimizer.scale_learning_rate != "none"

    def may_follow(way: str) -> bool:
        ranks = re.fullmatch(r"[\d or]+ ranks?", way)
        keys = KEY.findall(way) or ([] if ranks else [own])
        fixed = any(key in before or key.startswith("model.") or key == "train.global_batch_tokens" for key in keys)
        # The number of data-parallel ranks scales the learning rate; of a layout it is not known here.
        return not (fixed or (scales and (ranks or re.search(r"dp_replicate| on \d", way))))

    ways = [way for way in re.split("[,;] or ", advice) if may_follow(way)] if found else []
    for key in dict.fromkeys(KEY.findall(said)):
        if key in before and key in KEYS and effects.value_of(config, key) not in (None, before[key]):
            ways.append(f"{key} = {before[key]}")
    if ways:
        return f"{said}; nearest that would do on a resume: {', or '.join(ways)}"
    learning_rate = ", and with optimizer.scale_learning_rate no number of data-parallel ranks" if scales else ""
    no = f"the run cannot continue so: a resume changes no model, data and batch{learning_rate}"
    return f"{said}; {no}" if found else problem
