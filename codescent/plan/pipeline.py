"""In: schedule name, numbers of stages, micro-batches, virtual stages per rank. Out: an instruction list per stage.
Does not use measured costs. Raises ValueError for impossible numbers and suggests the nearest possible ones."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from codescent.base.counted import counted
from codescent.base.nearest import near_multiples
from codescent.base.refusal import Change, Refusal, each
from codescent.base.uncollected import uncollected
from codescent.plan.schedule import Instruction, Schedule, Verb

Order = list[Instruction]
"""The computations of one stage, in order, without loads, sends and receives."""

PARTS: dict[Verb, int] = {Verb.FORWARD: 1, Verb.BACKWARD: 2, Verb.BACKWARD_INPUT: 1, Verb.BACKWARD_WEIGHT: 1}
"""Assumed relative durations. They only decide the positions of sends and receives in the lists."""


@lru_cache(maxsize=256)  # plans of a search have the same lists
def pipeline(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1, *, all_load: bool = False
) -> Schedule:
    """Build the schedule `name` of SCHEDULES, with `num_chunks` virtual stages (chunks of layers) on each rank.

    With `all_load` every virtual stage loads the samples. Otherwise only the first stage (inputs) and the last stage
    (targets) load them.

    Raises:
        ValueError: the problems that `refusals` lists.
    """
    problems = list(refusals(name, num_stages, num_microbatches, num_chunks))
    if problems:
        raise ValueError("; ".join(problems))
    order = SCHEDULES[name]
    with uncollected():
        orders = [order(stage, num_stages, num_microbatches, num_chunks) for stage in range(num_stages)]
        return _communicating(orders, all_load=all_load)


def refusals(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    num_layers: int | None = None,
    more: Iterable[Change] = (),
) -> Iterator[Refusal]:
    """The reasons why `pipeline` cannot build this schedule, one sentence each, with the nearest that would do.

    Args:
        num_layers: the sentences suggest at most this many virtual stages in total; None: no limit.
        more: what gives another number of micro-batches, if theirs does not fit the stages.
    """
    if name not in SCHEDULES:
        yield Refusal(f"schedule {name!r}: there is {', '.join(SCHEDULES)}")
        return
    sizes = {"pipeline stages": num_stages, "micro-batches": num_microbatches, "virtual stages per rank": num_chunks}
    small = [Refusal(f"schedule {name}: {size} {what}; the least is 1") for what, size in sizes.items() if size < 1]
    yield from small
    if small or (name != "interleaved" and num_chunks == 1):
        return
    if name != "interleaved":
        layers_do = num_layers is None or num_layers >= num_stages * num_chunks
        interleaved_does = layers_do and num_stages > 1 and num_microbatches % num_stages == 0
        interleaved = [Change({"parallel.schedule": "interleaved"})] if interleaved_does else []
        yield Refusal(
            f"schedule {name}: {num_chunks} virtual stages per rank, but it has one",
            [Change({"parallel.virtual_stages": 1}), *interleaved],
        )
        return
    other = Change({"parallel.schedule": "1f1b"})
    if num_chunks == 1:
        two = each("parallel.virtual_stages", [2] if num_layers is None or num_layers >= 2 * num_stages else [])
        yield Refusal("schedule interleaved: 1 virtual stage per rank", [*two, other])
    if num_stages == 1:
        two = each("parallel.pp", [2])
        yield Refusal("schedule interleaved: 1 pipeline stage has no neighbour", [*two, other])
    if num_microbatches % num_stages:
        verb, near = "is" if num_microbatches == 1 else "are", near_multiples(num_microbatches, num_stages)
        yield Refusal(
            f"schedule interleaved: {counted(num_microbatches, 'micro-batch')} {verb} no multiple of {num_stages} "
            f"pipeline stages ({near} would be)",
            more,
        )


@lru_cache
def cut(costs: tuple[float, ...], num_parts: int) -> tuple[tuple[int, int], ...]:
    """Cut `costs` into consecutive parts [first, end) with the lowest possible maximum of the parts' sums.

    Among several such cuts, the one with the smallest sum of squares is returned.

    Raises:
        ValueError: more parts than costs.
    """
    if num_parts > len(costs):
        raise ValueError(f"{len(costs)} costs cannot be cut in {num_parts} parts")
    sums, stop = [0.0, *accumulate(costs)], len(costs)
    most = _lowest_maximum(sums, num_parts) * (1 + 1e-12)
    latest, earliest = [0], [stop]  # latest end of n parts from 0, earliest begin of n parts up to `stop`
    for _ in range(num_parts):
        latest.append(bisect_right(sums, sums[latest[-1]] + most) - 1)
        earliest.append(bisect_left(sums, sums[earliest[-1]] - most))
    totals: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by end: sum of squares, begins of the parts
    for part in range(num_parts):
        left, reached = num_parts - part - 1, {}
        for end in range(max(part + 1, earliest[left]), min(stop - left, latest[part + 1]) + 1):
            begins = (begin for begin in range(bisect_left(sums, sums[end] - most), end) if begin in totals)
            prices = ((totals[at][0] + (sums[end] - sums[at]) ** 2, totals[at][1], at) for at in begins)
            price, before, begin = min(prices)
            reached[end] = price, [*before, begin]
        totals = reached
    begun = totals[stop][1]
    return tuple(zip(begun, [*begun[1:], stop], strict=True))


def _lowest_maximum(sums: list[float], num_parts: int) -> float:
    """The lowest possible maximum of the parts' sums. `sums` are the cumulative costs, from 0."""

    def maximum(most: float) -> float:
        """Fill each part up to the sum `most`. Returns the largest sum; inf: `num_parts` parts do not suffice."""
        begin, found = 0, 0.0
        for _ in range(num_parts):
            end = bisect_right(sums, sums[begin] + most) - 1
            found, begin = max(found, sums[end] - sums[begin]), end
        return found if begin == len(sums) - 1 else math.inf

    low, high = 0.0, sums[-1] * (1 + 1e-12)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if maximum(middle) == math.inf else (low, middle)
    return maximum(high)


@lru_cache
def cut_at(costs: tuple[float, ...], num_parts: int, border: int) -> tuple[tuple[int, int], ...]:
    """Like `cut`, but one part must begin at index `border`.

    Raises:
        ValueError: there are too few or too many parts for such a cut.
    """
    front, back = costs[:border], costs[border:]
    cuts = [
        (*cut(front, before), *((border + first, border + stop) for first, stop in cut(back, num_parts - before)))
        for before in range(max(1, num_parts - len(back)), min(num_parts - 1, len(front)) + 1)
    ]
    if not cuts:
        raise ValueError(f"{len(front)} and {len(back)} costs cannot be cut in {num_parts} parts, one on each side")

    def prices(parts: tuple[tuple[int, int], ...]) -> tuple[float, float]:
        sums = [sum(costs[first:stop]) for first, stop in parts]
        return max(sums), sum(price * price for price in sums)

    return min(cuts, key=prices)


def _naive(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
    """Forward and backward of one micro-batch through all stages, then the next micro-batch."""
    verbs = (Verb.FORWARD, Verb.BACKWARD)
    return [Instruction(verb, microbatch) for microbatch in range(num_microbatches) for verb in verbs]


def _gpipe(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", figure 2c).

    Backward begins with micro-batch 0, unlike in the paper. So all schedules sum gradients in the same order.
    """
    verbs = (Verb.FORWARD, Verb.BACKWARD)
    return [Instruction(verb, microbatch) for verb in verbs for microbatch in range(num_microbatches)]


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
    """1F1B: stage i runs p - 1 - i forwards, then alternates (Narayanan et al. 2021, section 2.2.1; DAPPLE 2021)."""
    forwards, backwards = _passes(num_stages, num_microbatches, 1)
    return _alternate(forwards, backwards, num_stages - 1 - stage)


def _interleaved(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
    """1F1B over v chunks per rank, p micro-batches at a time (Narayanan et al. 2021, section 2.2.2, figure 4)."""
    forwards, backwards = _passes(num_stages, num_microbatches, num_chunks)
    return _alternate(forwards, backwards, 2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages)


@lru_cache(maxsize=4)  # all stages have the same ones
def _passes(num_stages: int, num_microbatches: int, num_chunks: int) -> tuple[Order, Order]:
    """The forward passes of a stage in their order, and the backward passes."""
    group = num_stages * num_chunks
    forwards, backwards = [], []
    for k in range(num_microbatches * num_chunks):
        microbatch, chunk = k // group * num_stages + k % num_stages, k % group // num_stages
        forwards.append(Instruction(Verb.FORWARD, microbatch, chunk=chunk))
        backwards.append(Instruction(Verb.BACKWARD, microbatch, chunk=num_chunks - 1 - chunk))
    return forwards, backwards


def _zero_bubble(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
    """ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 3.1).

    The order of 1F1B with each backward split in two. Stage i delays its weight gradients by i micro-batches, so they
    fill the idle time at the end. Every stage holds activations of min(m, p) micro-batches, like stage 0 of 1F1B.
    """
    order: Order = []
    for instruction in _one_forward_one_backward(stage, num_stages, num_microbatches, num_chunks):
        if instruction.verb is Verb.FORWARD:
            order.append(instruction)
            continue
        assert instruction.microbatch is not None
        order.append(replace(instruction, verb=Verb.BACKWARD_INPUT))
        if instruction.microbatch >= stage:
            order.append(Instruction(Verb.BACKWARD_WEIGHT, instruction.microbatch - stage))
    late = range(max(0, num_microbatches - stage), num_microbatches)
    return order + [Instruction(Verb.BACKWARD_WEIGHT, microbatch) for microbatch in late]


SCHEDULES: dict[str, Callable[[int, int, int, int], Order]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}
"""Every schedule by name. Arguments: stage i, p stages, m micro-batches, v chunks per stage."""


def _alternate(forwards: Order, backwards: Order, warmup: int) -> Order:
    """`warmup` forwards, then forwards and backwards in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]


def _communicating(orders: list[Order], *, all_load: bool) -> Schedule:
    """The complete lists: computations, loads, sends and receives, then REDUCE and STEP.

    All computations and sends of all stages are sorted into one global order. A send and its receive have the same
    position in it. So the lists never deadlock, even if each send blocks until its receive.
    """
    num_stages = len(orders)
    last = max(_virtual(stage, at, num_stages) for stage, order in enumerate(orders) for at in order)
    events: list[list[tuple[_Place, Instruction]]] = [[] for _ in orders]
    for stage, (order, begins) in enumerate(zip(orders, _begin_times(orders, last))):
        for instruction, begin in zip(order, begins):
            events[stage].append(((begin, True, "", stage, 0), instruction))
            pair = _send_and_receive(stage, instruction, num_stages, last)
            if pair is not None:
                send, receive = pair
                assert send.peer is not None
                place = (begin + PARTS[instruction.verb], False, send.verb.value, stage, send.chunk)
                events[stage].append((place, send))
                events[send.peer].append((place, receive))
    ordered = [[at for _, at in sorted(found, key=_place)] for found in events]
    loading = range(last + 1) if all_load else (0, last)
    return Schedule(tuple(_finished(order, stage, num_stages, loading) for stage, order in enumerate(ordered)))


_Place = tuple[int, bool, str, int, int]
"""Sort key of the global order: time, then sends before computations, then values that both ends of a send know."""


def _place(event: tuple[_Place, Instruction]) -> _Place:
    return event[0]


def _send_and_receive(
    stage: int, instruction: Instruction, num_stages: int, last: int
) -> tuple[Instruction, Instruction] | None:
    """The send after a computation and its receive on the other stage. None: the computation sends nothing."""
    virtual, microbatch = _virtual(stage, instruction, num_stages), instruction.microbatch
    if instruction.verb is Verb.FORWARD and virtual < last:
        to, verbs = virtual + 1, (Verb.SEND_ACTIVATION, Verb.RECEIVE_ACTIVATION)
    elif instruction.verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT) and virtual > 0:
        to, verbs = virtual - 1, (Verb.SEND_GRADIENT, Verb.RECEIVE_GRADIENT)
    else:
        return None
    chunk, peer = divmod(to, num_stages)
    return (
        Instruction(verbs[0], microbatch, chunk=instruction.chunk, peer=peer),
        Instruction(verbs[1], microbatch, chunk=chunk, peer=stage),
    )


def _begin_times(orders: list[Order], last: int) -> list[list[int]]:
    """Begin of each computation of each stage, in units of PARTS: when its stage and its input are ready.

    Sends take no time.
    """
    num_stages = len(orders)
    begins: list[list[int]] = [[] for _ in orders]
    done: dict[tuple[bool, int, int | None], int] = {}  # (forward?, virtual stage, micro-batch) -> end time
    clocks = [0] * num_stages
    while unfinished := [stage for stage, order in enumerate(orders) if len(begins[stage]) < len(order)]:
        before = [len(begins[stage]) for stage in unfinished]
        for stage in unfinished:
            order, found, clock = orders[stage], begins[stage], clocks[stage]
            for place in range(len(found), len(order)):
                instruction = order[place]
                needed = _needed(stage, instruction, num_stages, last)
                if needed is not None and needed not in done:
                    break
                begin = clock if needed is None else max(clock, done[needed])
                clock = begin + PARTS[instruction.verb]
                found.append(begin)
                if instruction.verb is not Verb.BACKWARD_WEIGHT:
                    forward, virtual = instruction.verb is Verb.FORWARD, _virtual(stage, instruction, num_stages)
                    done[forward, virtual, instruction.microbatch] = clock
            clocks[stage] = clock
        assert [len(begins[stage]) for stage in unfinished] != before, "the stages' orders wait for each other"
    return begins


def _needed(stage: int, instruction: Instruction, num_stages: int, last: int) -> tuple[bool, int, int | None] | None:
    """The input of a computation from another virtual stage: (forward?, virtual stage, micro-batch); None: no input."""
    virtual = _virtual(stage, instruction, num_stages)
    if instruction.verb is Verb.FORWARD and virtual > 0:
        return True, virtual - 1, instruction.microbatch
    if instruction.verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT) and virtual < last:
        return False, virtual + 1, instruction.microbatch
    return None


def _virtual(stage: int, instruction: Instruction, num_stages: int) -> int:
    return instruction.chunk * num_stages + stage


def _finished(order: Order, stage: int, num_stages: int, loading: Collection[int]) -> tuple[Instruction, ...]:
    """Complete the list of a stage: add LOAD, mark the last backward of each chunk, append REDUCE and STEP."""
    program: Order = []
    completing: dict[int, int] = {}
    for instruction in order:
        if instruction.verb is Verb.FORWARD and _virtual(stage, instruction, num_stages) in loading:
            program.append(Instruction(Verb.LOAD, instruction.microbatch, chunk=instruction.chunk))
        if instruction.verb in (Verb.BACKWARD, Verb.BACKWARD_WEIGHT):
            completing[instruction.chunk] = len(program)
        program.append(instruction)
    for place in completing.values():
        program[place] = replace(program[place], last=True)
    return (*program, Instruction(Verb.REDUCE), Instruction(Verb.STEP))
