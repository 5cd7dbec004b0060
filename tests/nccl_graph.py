"""In: what each rank logged: its transfers in order, the groups that it made. Out: what NCCL could not carry out.
Does not log anything (nccl_rules does) and imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

Node = tuple[str, int, list[int], str]
"""One end of a transfer: its channel, its number there, the ranks that take part, operation with bytes. A channel is a
group, or a pair of ranks of a group: NCCL knows no tags, so order alone matches the ends."""
Entry = list[Node]
"""What a rank starts at once."""
Made = list[tuple[list[int], str]]
"""Ranks and name of each group that a rank makes, in order."""


def broken(logs: Sequence[Sequence[Entry]]) -> list[str]:
    """What is wrong with the transfers of all ranks.

    Each transfer needs every one of its ranks, with the same operation and bytes. With an edge from each transfer to
    those that one of its ranks starts next, they must form a graph without cycles. Then no order in which a device
    serves its communicators can deadlock, even if each transfer waits for all its ranks.
    """
    ends: dict[tuple[str, int], dict[int, str]] = {}
    members: dict[tuple[str, int], set[int]] = {}
    graph: TopologicalSorter[tuple[str, int]] = TopologicalSorter()
    for rank, log in enumerate(logs):
        before: list[tuple[str, int]] = []
        for entry in log:
            now = [(channel, number) for channel, number, _, _ in entry]
            for node, (_, _, ranks, what) in zip(now, entry, strict=True):
                ends.setdefault(node, {})[rank] = what
                members.setdefault(node, set()).update(ranks)
                graph.add(node, *before)
            before = now
    problems = []
    for node, found in ends.items():
        if missing := sorted(members[node] - set(found)):
            problems.append(f"{node} {set(found.values())}: ranks {missing} take no part")
        if len(set(found.values())) > 1:
            problems.append(f"{node}: the ranks differ: {found}")
    try:
        graph.prepare()
    except CycleError as error:
        problems.append(f"these wait for each other: {error.args[1]}")
    return problems


def unlike(by_rank: Sequence[Made]) -> list[str]:
    """What is wrong with the new groups of all ranks: ncclCommSplit is a collective of all, and names must agree."""
    if len({len(made) for made in by_rank}) > 1:
        return [f"the ranks make {[len(made) for made in by_rank]} groups"]
    problems = []
    for number in range(len(by_rank[0])):
        for rank, made in enumerate(by_rank):
            ranks, name = made[number]
            others = [tuple(by_rank[other][number]) for other in ranks]
            if rank not in ranks or any(other != (ranks, name) for other in others):
                problems.append(f"group {number} of rank {rank} is {name} of {ranks}; there: {others}")
    for rank, made in enumerate(by_rank):
        if len({name for _, name in made}) < len(made):
            problems.append(f"rank {rank} has two groups of one name")
    return problems
