"""In: a config, the tokenizer's vocabulary size, the number of ranks. Out: the Plan, or all problems of the config.
Does not start a process, allocate a tensor or import torch."""

from __future__ import annotations

from codescent.build.accept import check_sizes
from codescent.build.own import check_own_names
from codescent.build.plan import build
from codescent.build.resolve import Resolved, needs_vocab_size, resolve, task_request
from codescent.build.resume import Began, on_resume
from codescent.build.saved import plan_of, saved_plan

__all__ = [
    "Began",
    "Resolved",
    "build",
    "check_own_names",
    "check_sizes",
    "needs_vocab_size",
    "on_resume",
    "plan_of",
    "resolve",
    "saved_plan",
    "task_request",
]
