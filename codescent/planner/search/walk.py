"""In: what the depths of a pass compute, what they send of weights and gradients. Out: the least seconds of the pass.
Does not know which depths a pass has (passes.py does). cost/stage_time.py walks through each depth instead."""

from __future__ import annotations

import math
from operator import add
from typing import NamedTuple

from codescent.clusters.cluster import Software
from codescent.planner.search.computing import PassTime
from codescent.planner.search.sent import NONE, Seconds


class Copies(NamedTuple):
    """Seconds in which the device copies what is sent.

    Attributes:
        least_s, most_s: of all depths.
        begins_s, ends_s: at most, of the depth that computes first, and of the one that computes last.
        last_s: at least, of the one that computes last.
    """

    least_s: float = 0.0
    most_s: float = 0.0
    begins_s: float = 0.0
    ends_s: float = 0.0
    last_s: float = 0.0


class PassMessages(NamedTuple):
    """What a pass sends, in seconds by link.

    Attributes:
        opens: what is gathered before the first depth.
        follows: what is gathered before the second one, if the first one hides little of it; else NONE.
        before: all that is gathered.
        after: all gradients.
        closes: what leaves the depth that computes last.
        aside: what leaves a depth beside which little or nothing is computed: next to the embedding.
        slows: whether gradients that leave beside a computation make it longer, as far as it is known.
        copies: what the device copies of them.
    """

    opens: Seconds = NONE
    follows: Seconds = NONE
    before: Seconds = NONE
    after: Seconds = NONE
    closes: Seconds = NONE
    aside: Seconds = NONE
    slows: bool = True
    copies: Copies = Copies()


class Walked(NamedTuple):
    """Seconds of a pass.

    Attributes:
        opening_s: at least until the first two depths have their weights; it is in `least_s`.
        opened_s: at most for how long depths wait for weights.
        shorter_s: by so much, at most, they wait less for messages of layers, because they compute for longer.
        least_s, most_s: until the last depth has computed.
        left_s: at least from then on, until gradients have arrived.
        all_s: at least until then.
    """

    opening_s: float
    opened_s: float
    shorter_s: float
    least_s: float
    most_s: float
    left_s: float
    all_s: float


def walk(
    computed: PassTime,
    begins: PassTime,
    ends: PassTime,
    sent: PassMessages,
    software: Software,
    *,
    fits: bool,
    exact: bool,
) -> Walked:
    """A pass of one micro-batch through consecutive depths.

    Messages that fit into the computation of a depth make it longer by `Software.contention`, and nobody waits for
    them. Messages of layers beside it do so, too: of both the longer ones count (cost/stage_time.py). Of others it is
    known that their link is busy, and that they make it longer or are waited for. Messages of layers share links with
    them. Here that counts only where the most is asked for. While a device copies, it waits less for its host, and for
    messages beside the computation.

    Args:
        computed, begins, ends: of all depths, of the one that computes first, and of the one that computes last.
        sent: what they send.
        software: of the run.
        fits: whether the messages of each depth take no longer than it computes.
        exact: whether `computed` has all messages of layers; else more may be waited for.
    """
    opens, follows, before, after, closes, _, _, copies = sent
    within_s, contention = computed.within_s, software.contention
    device_s = computed.device_s + copies.least_s
    alone_s = computed.device_s + within_s + max(copies.least_s, computed.host_s + computed.beside_s)
    if "gathers" not in software.overlaps:
        all_s = alone_s + sum(before) + sum(after)
        most_s = computed.total_s + copies.most_s + sum(before) + sum(after)
        return Walked(sum(opens), sum(before), 0.0, all_s, most_s if exact else math.inf, 0.0, all_s)
    first_s, last_s = _most_s(begins, copies.begins_s, contention), _most_s(ends, copies.ends_s, contention)
    opening_s = max(opens) + (max(0.0, max(follows) - first_s) if exact else 0.0)
    opened_s = max(opens) + max(follows) if fits else sum(before)
    hidden_s = max(0.0, _hidden_s(sent) - sum(computed.beside))  # `device_s` is longer by messages of layers already
    if fits:
        taken_s = (contention - 1.0) * hidden_s
    else:
        waits_s = within_s + computed.beside_s
        taken_s = (1.0 - 1.0 / contention) * max(0.0, min(hidden_s, computed.device_s) - waits_s)
    computing_s = max(alone_s, device_s + within_s + taken_s)
    ends_s = ends.device_s + ends.within_s + max(copies.last_s, ends.host_s + ends.beside_s)
    layers = [sum(both) for both in zip(computed.within, computed.beside, strict=True)]
    least_s = max(opening_s + computing_s, max(before) + ends_s, *(map(add, before, layers)))
    most_s, longer = _most_s(computed, copies.most_s, contention), _longer(computed, sent)
    queued_s = sum(left_s for gathered_s, left_s in zip(before, after, strict=True) if gathered_s)
    rest_s = most_s + sum(before) + queued_s - begins.total_s  # from the first depth's end, when it sends gradients
    left_s = sum(closes)
    if after != NONE and exact:
        left_s = _left_s(sent, last_s, rest_s, _longer(ends, sent), longer)
    all_s = max(least_s + left_s, *map(sum, zip(before, after, layers, strict=True)))
    slower_s = (contention - 1.0) * (computed.device_s + copies.most_s) + copies.most_s
    shorter_s = min(computed.beside_s + sum(longer), slower_s)
    most_s += opened_s + sum(longer) if exact else math.inf
    return Walked(opening_s, opened_s, shorter_s, least_s, most_s, left_s, all_s)


def _left_s(sent: PassMessages, last_s: float, rest_s: float, last_longer: Seconds, longer: Seconds) -> float:
    """What messages take after the last computation: those of the last depth, or all that their link still has."""
    return sum(
        max(
            sent.closes[at] + max(0.0, sent.aside[at] - last_s - _others(last_longer, at)),
            all_s - rest_s - _others(longer, at),
        )
        for at, all_s in enumerate(sent.after)
    )


def _hidden_s(sent: PassMessages) -> float:
    """Of one link, the busiest: for how long it sends while depths compute."""
    opens, follows, before, after, closes, aside, slows, _ = sent
    each_s = (
        before[at] - opens[at] - follows[at] + slows * (after[at] - closes[at] - aside[at]) for at in range(len(before))
    )
    return max(0.0, *each_s)


def _most_s(one: PassTime, copied_s: float, contention: float) -> float:
    """The most that depths take beside waiting for weights."""
    return contention * (one.device_s + copied_s) + one.host_s + one.within_s + one.beside_s


def _longer(one: PassTime, sent: PassMessages) -> Seconds:
    """By how much longer, at most, messages of layers take because they share their link with others."""
    inside_s, between_s, bus_s = (
        min(within_s + beside_s, 2.0 * (gathered_s + left_s))
        for within_s, beside_s, gathered_s, left_s in zip(one.within, one.beside, sent.before, sent.after, strict=True)
    )
    return inside_s, between_s, bus_s


def _others(longer: Seconds, link: int) -> float:
    """Of all links but one: what shares that one makes its own queue as much longer."""
    return sum(longer) - longer[link]
