"""In: a refusal. Out: the changes of a config that it says would do.
Does not try them. An advice in a form that is not known here is an error, so that no new form stays untried."""

from __future__ import annotations

import re
from typing import Any

Change = tuple[dict[str, Any], int | None]
"""Values by key ("section.key"), and the number of ranks; None: as many as before."""

NUMBERS = r"((?:\d+ or )?\d+)"
KEY = r"(\w+\.\w+)"


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def advised(problem: str) -> list[Change]:
    """Every change that the refusal names. The key of a bare number is the one that the refusal begins with."""
    _, found, text = problem.partition("nearest that would do: ")
    parts = re.split(r"[,;] or ", text) if found else []
    return [change for part in parts for change in _changes(part, problem)]


def _changes(part: str, problem: str) -> list[Change]:
    part, *further = part.split(" and ")
    found = _changes_alone(part, problem)
    for more in further:  # another key that has to change, too, with one or two values
        key, _, values = more.partition(" = ")
        found = [({**keys, key: value}, ranks) for keys, ranks in found for value in numbers(values)]
    return found


def _changes_alone(part: str, problem: str) -> list[Change]:
    if match := re.fullmatch(r"(\w+) = (\d+) with dp_replicate = (\d+)", part):
        return [({f"parallel.{match[1]}": int(match[2]), "parallel.dp_replicate": int(match[3])}, None)]
    if match := re.fullmatch(r"(\w+) = (\d+) on (\d+) ranks?", part):
        return [({f"parallel.{match[1]}": int(match[2])}, int(match[3]))]
    if match := re.fullmatch(rf"{KEY} = {NUMBERS} on {NUMBERS} ranks?", part):
        return [({match[1]: value}, ranks) for value, ranks in zip(numbers(match[2]), numbers(match[3]), strict=True)]
    if match := re.fullmatch(rf"{NUMBERS} ranks?", part):
        return [({}, ranks) for ranks in numbers(match[1])]
    if match := re.fullmatch(rf"{NUMBERS} samples?", part):
        return [({"train.global_batch_size": samples}, None) for samples in numbers(match[1])]
    if match := re.fullmatch(r"(\d+) positions \((data\.seq_len|model\.seq_len at least that)\)", part):
        length = int(match[1])
        return [({"data.seq_len": length} | ({} if match[2][0] == "d" else {"model.seq_len": length}), None)]
    if match := re.fullmatch(rf"{NUMBERS} micro-batches \((.*)\)", part):
        found = [(key, numbers(values)) for key, values in re.findall(rf"{KEY} = {NUMBERS}", match[2])]
        return [({key: values[min(at, len(values) - 1)] for key, values in found}, None) for at in (0, 1)]
    if match := re.fullmatch(r"1 virtual stage|schedule ([\w-]+)", part):
        return [({"parallel.schedule": match[1]} if match[1] else {"parallel.virtual_stages": 1}, None)]
    if match := re.fullmatch(rf"(?:{KEY} = )?{NUMBERS}", part):
        key = match[1] or ("parallel.virtual_stages" if "virtual stage" in problem else problem.split(" ")[0])
        return [({key: value}, None) for value in numbers(match[2])]
    if match := re.fullmatch(rf'{KEY} = ("?)([a-z-]+)\2', part):
        return [({match[1]: {"false": False, "true": True}.get(match[3], match[3])}, None)]
    raise AssertionError(f"an advice of unknown form: {part!r} in {problem!r}")
