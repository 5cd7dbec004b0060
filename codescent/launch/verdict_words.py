"""In: a verdict, and what is known of each rank. Out: a page for people: cause, advice, a table, stacks.
Does not judge (verdict.py does) and does not write it anywhere (hang_record.py does)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from codescent.base.page import GroupUse, Page
from codescent.launch.verdict import BUSY, HangVerdict, RankState

SHOWN_RANKS, SHOWN_FRAMES = 16, 6
Carries = Callable[[GroupUse], str]
"""What the plan says that a collective carries; "": nothing."""

CAUSES: Mapping[str, tuple[str, str]] = {
    "stopped": (
        "{ranks} {is_} stopped by a signal",
        "kill -CONT {pids} continues. parallel.stopped_s=SECONDS ends such a rank",
    ),
    "frozen": ("{ranks} {is_} frozen by the cgroup", "thaw the cgroup, or ask the scheduler why the job is suspended"),
    "gone": ("{ranks} {has} ended", "look at the log of the rank, and at the kernel's log (dmesg)"),
    "disk": (
        "{ranks} {is_} in the kernel, in a wait for a disk or a network file system",
        "look at the file system (df, mount, dmesg). Such a process cannot be killed before the wait ends",
    ),
    "gil": (
        "{ranks} {has} not given up the GIL: a call into C holds it",
        "look at the innermost line below. The call has to release the GIL, or to be shorter",
    ),
    "reader": (
        "{ranks} {wait} for samples: the reader stands still",
        "look at the disk or the network file system of the data, and at the thread of the loader in the stacks",
    ),
    "first_alone": (
        "rank 0 alone does something, and the others wait for it",
        "look at the line below. Work of rank 0 alone has to be short, or to be done by a process of its own",
    ),
    "alone": (
        "{ranks} {does} something that the others do not, and {has} not come to their collective",
        "look at the line below: a loop that does not end, a branch of this rank alone, more work than others have",
    ),
    "order": (
        "the ranks wait for each other in different collectives",
        "every rank must make the same collectives in the same order. Compare the lines below",
    ),
    "shapes": (
        "the tensors of one collective have other sizes on {ranks}",
        "compare the sizes in the table. Batches, or branches of the model, differ between ranks",
    ),
    "network": (
        "all ranks are in the same collective, and it does not end: the network, or the device",
        "look at the interfaces and links of the hosts: codescent doctor",
    ),
    "elsewhere": (
        "all these ranks wait: another host, whose supervisor is silent, holds them up: it is down, or a link is cut",
        "look at the hosts that are not in the table, then at the links: codescent doctor",
    ),
}
"""For each cause a sentence, and what to do."""


def one_page(verdict: HangVerdict, ranks: Mapping[int, RankState], world: int, carries: Carries) -> list[str]:
    """The verdict on one page, for the console."""
    cause, advice = CAUSES[verdict.cause]
    since_s = min((seen.since_s for seen in ranks.values()), default=0.0)
    shown = [*verdict.culprits, *(rank for rank in ranks if rank not in verdict.culprits)][:SHOWN_RANKS]
    hosts = dict.fromkeys(state.host for state in ranks.values())
    where = ", ".join(hosts) if len(hosts) < 5 else f"{len(hosts)} hosts"
    lines = [
        f"no rank of {where} has moved for {since_s:.0f} s. This is no timeout: the run goes on waiting",
        f"  likely cause: {cause.format(**_words(verdict.culprits, ranks))}",
        f"  what to do: {advice.format(**_words(verdict.culprits, ranks))}",
        *_table(verdict, {rank: ranks[rank] for rank in sorted(shown)}, world, carries),
    ]
    if len(ranks) > len(shown):
        lines.append(f"  and {len(ranks) - len(shown)} ranks more")
    for rank in [rank for rank in shown if rank in verdict.culprits] or shown[:1]:
        frames = ranks[rank].frames[:SHOWN_FRAMES]
        pid = f"pid {ranks[rank].pid}{_on([rank], ranks)}"
        said = "says nothing of its stack" if not frames else "is at:"
        lines += [f"  rank {rank} ({pid}) {said}", *(f"    {frame}" for frame in frames)]
    return lines


def whole(lines: Sequence[str], stacks: Mapping[int, str], when: str) -> str:
    """The page and the stacks of all threads of all ranks, for a file."""
    parts = [f"{when}: {lines[0]}", *lines[1:]]
    for rank, text in sorted(stacks.items()):
        parts += ["", f"rank {rank}, all threads:", text.rstrip()]
    return "\n".join(parts) + "\n"


def doing(page: Page) -> str:
    """What a rank does, in a word or two."""
    name = page.section or page.instruction or ("steps" if page.position else "start")
    return "update" if name == "step" else name  # the instruction `step`; a step of the run is another thing


def _table(verdict: HangVerdict, ranks: Mapping[int, RankState], world: int, carries: Carries) -> list[str]:
    """A line for each rank."""
    rows = [("rank", "pid", "state", "step", "does", "for", "last collective")]
    for rank, seen in ranks.items():
        state = "computing or spinning" if seen.word == "running" or seen.busy >= BUSY else seen.word or "unknown"
        collective = _collective(seen, verdict.missing.get(rank), [*verdict.missing.values()], carries)
        step = "ended" if seen.page.step is None else str(seen.page.step)
        rows.append(
            (f"{rank} of {world}", str(seen.pid), state, step, doing(seen.page), f"{seen.since_s:.0f} s", collective)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _collective(seen: RankState, missing: GroupUse | None, awaited: Sequence[GroupUse], carries: Carries) -> str:
    """The last collective of a rank, or that to which it has not come. `awaited`: those to which others have not."""
    if missing is not None:
        return f"before {_named(missing, carries)}"
    last = seen.page.last
    if last is None:
        return "none"
    waits = seen.waits or any((last.group, last.number) == (use.group, use.number) for use in awaited)
    return f"{'in' if waits else 'in or after'} {_named(last, carries)}"


def _named(use: GroupUse, carries: Carries) -> str:
    size = f"{use.size_bytes:,} bytes" if use.size_bytes else ""
    more = ": ".join(part for part in (size, carries(use)) if part)
    return f"{use.kind} {use.number} over {use.axis}" + (f" ({more})" if more else "")


def _on(culprits: Sequence[int], ranks: Mapping[int, RankState]) -> str:
    """The hosts of some ranks, where ranks of several are known."""
    if len({state.host for state in ranks.values()}) < 2:
        return ""
    return " on " + ", ".join(dict.fromkeys(ranks[rank].host for rank in culprits))


def _words(culprits: Sequence[int], ranks: Mapping[int, RankState]) -> dict[str, str]:
    one = len(culprits) == 1
    return {
        "ranks": ("rank " if one else "ranks ") + ", ".join(map(str, culprits)) + _on(culprits, ranks),
        "pids": " ".join(str(ranks[rank].pid) for rank in culprits),
        "is_": "is" if one else "are",
        "has": "has" if one else "have",
        "does": "does" if one else "do",
        "wait": "waits" if one else "wait",
    }
