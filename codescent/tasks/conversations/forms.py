"""In: a JSON line. Out: whether it has a known form that would be learned from in part only, in words.
Does not read conversations or pairs (conversations.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFERENCES = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("chosen_response", "rejected_response"),
    ("response_j", "response_k"),
    ("completions", "labels"),
)
"""Keys of a line with a better and a worse response, or with a judgement of each response."""
LABEL = "label"
"""The key of KTO's form: whether the response is wanted."""
PROMPTS_IN_PARTS = {
    "Alpaca": ("instruction", "input", "output"),
    "Dolly": ("instruction", "context", "response"),
    "OpenOrca": ("system_prompt", "question", "response"),
}
"""Known files whose prompt is in two keys: name -> the keys of the prompt and the key of the response."""


def refused_form(line: Mapping[str, Any], response_key: str) -> str | None:
    """Why a line without messages is no prompt with a response; None: it has no such form."""
    judged = next((keys for keys in PREFERENCES if all(key in line for key in keys)), None)
    responses = [key for key in ("completion", response_key) if key in line]
    if judged is None and isinstance(line.get(LABEL), bool) and responses:
        judged = responses[0], LABEL
    if judged is not None:
        return (
            f'preferences ("{judged[0]}" and "{judged[1]}"): data.task = "dpo" learns from them (codescent docs '
            "preferences); a line of this task has a prompt and one response that is learned"
        )
    for name, keys in PROMPTS_IN_PARTS.items():
        if all(isinstance(line.get(key), str) and line[key] for key in keys):
            *of_prompt, response = keys
            return (
                f'the form of {name}: "{of_prompt[0]}", "{of_prompt[1]}" and "{response}"; a prompt is read from one '
                f"key, so a part of it would be left out; write {of_prompt[0]} and {of_prompt[1]} as one text, such as "
                f'{{"prompt": "{of_prompt[0]}\\n\\n{of_prompt[1]}", "response": "{response}"}}'
            )
    turns = line.get("conversations")
    if isinstance(turns, list) and any(isinstance(turn, dict) and "from" in turn for turn in turns):
        return (
            'the form of ShareGPT ("conversations" with "from" and "value"); write "messages" with "role" and '
            '"content"; the roles are system, user (human) and assistant (gpt)'
        )
    return None
