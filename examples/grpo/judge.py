"""Rewards for reverse.toml: what a function of rewards looks like (docs/grpo.md)."""

from __future__ import annotations

from typing import Any


def letters(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of places that have the right letter; a letter too many is a place without one."""
    return [_letters(text, right) for text, right in zip(completions, answer, strict=True)]


def _letters(text: str, right: str) -> float:
    same = sum(one == other for one, other in zip(text, right, strict=False))
    return same / max(len(text), len(right))
