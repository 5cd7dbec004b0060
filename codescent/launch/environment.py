"""In: the environment variables that torchrun (or our own launcher) sets. Out: which rank this process is, or none.
Does not connect to anything and does not guess: a set with a part missing is refused."""

from __future__ import annotations

from collections.abc import Mapping

from codescent.errors import UserError
from codescent.place import Place

STORE_FD = "CODESCENT_STORE_FD"
"""Descriptor of the listening socket that `launch/local.py` hands to rank 0."""

REQUIRED: Mapping[str, str] = {
    "RANK": "number of this process among all",
    "LOCAL_RANK": "number of this process among those of its machine",
    "WORLD_SIZE": "number of processes in all",
    "LOCAL_WORLD_SIZE": "number of processes on this machine",
    "MASTER_ADDR": "address at which rank 0 is reached",
    "MASTER_PORT": "port at which rank 0 is reached",
}
_MARKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # an address alone is often left in a shell


def read(env: Mapping[str, str]) -> Place | None:
    """Which rank this process is; None when no launcher started it.

    Raises:
        UserError: naming every variable that is missing, not a number, or contradicts another.
    """
    if not any(name in env for name in _MARKS):
        return None
    problems = [
        f"environment: {name} ({meaning}) is not set, but {_present(env)} is; a launcher such as torchrun sets all of "
        f"{', '.join(REQUIRED)}"
        for name, meaning in REQUIRED.items()
        if not env.get(name, "").strip()
    ]
    numbers: dict[str, int] = {}
    for name in (*_MARKS, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", STORE_FD):
        text = env.get(name, "").strip()
        if text.isascii() and text.isdigit():
            numbers[name] = int(text)
        elif text:
            problems.append(f'environment: {name}: given "{text}"; must be a whole number >= 0')
    problems += _contradictions(numbers)
    if problems:
        raise UserError(*problems)
    return Place(
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        master_addr=env["MASTER_ADDR"].strip(),
        master_port=numbers["MASTER_PORT"],
        attempt=numbers.get("TORCHELASTIC_RESTART_COUNT", 0),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "").strip().lower() == "true",
        store_fd=numbers.get(STORE_FD),
    )


def _present(env: Mapping[str, str]) -> str:
    return next(name for name in _MARKS if name in env)


def _contradictions(numbers: Mapping[str, int]) -> list[str]:
    """Problems among the numbers that are there."""
    problems: list[str] = []
    below = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    for small, large in below:
        if small in numbers and large in numbers and numbers[small] >= numbers[large]:
            problems.append(f"environment: {small} is {numbers[small]}; must be below {large} ({numbers[large]})")
    if numbers.get("LOCAL_WORLD_SIZE", 0) > numbers.get("WORLD_SIZE", 2**63):
        problems.append(
            f"environment: LOCAL_WORLD_SIZE is {numbers['LOCAL_WORLD_SIZE']}; "
            f"must be at most WORLD_SIZE ({numbers['WORLD_SIZE']})"
        )
    if numbers.get("LOCAL_RANK", 0) > numbers.get("RANK", 2**63):
        problems.append(
            f"environment: LOCAL_RANK is {numbers['LOCAL_RANK']}; must be at most RANK ({numbers['RANK']}), "
            "since a machine's ranks follow one another"
        )
    if not 0 < numbers.get("MASTER_PORT", 1) < 2**16:
        problems.append(f"environment: MASTER_PORT is {numbers['MASTER_PORT']}; must be from 1 to 65535")
    return problems
