"""Rewards for reverse.toml: what a function of rewards looks like (docs/grpo.md)."""

from __future__ import annotations

from typing import Any


def letters(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of letters at their place; a letter too many or too few takes away as much as one gives."""
    return [_letters(text, right) for text, right in zip(completions, answer, strict=True)]


def _letters(text: str, right: str) -> float:
    same = sum(one == other for one, other in zip(text, right, strict=False))
    return (same - abs(len(text) - len(right))) / len(right)
