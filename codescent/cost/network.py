"""In: a cluster, the host of each rank. Out: when a message or a collective arrives.
Does not measure a link and does not know what travels (ranks_walk.py does)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from codescent.clusters.cluster import Cluster
from codescent.cost.cards import Card, Queue, WaitingPiece, keep_busy
from codescent.cost.events import Clock, Event, Process
from codescent.cost.simulate import SimulatedMessage
from codescent.plan import Collective, Traffic
from codescent.plan.activations import CUDA
from codescent.plan.wire import PIECE_BYTES, PIECES_AT_ONCE

PIECES = 16
"""The largest message that shares its cards with others is cut into so many pieces; with many hosts into fewer."""
PIECES_OF_A_CARD = 128
"""The largest message is cut into this number, divided by the hosts: enough for cards that are shared fairly."""
TURN_S = 1e-9
"""After a piece the messages that wait look at the cards first: they share them fairly, as connections of TCP do."""
OVER_NCCL = frozenset({Collective.ALL_TO_ALL})
"""Collectives in which each rank sends to each other one, by backend."""
OVER_GLOO = OVER_NCCL | {Collective.REDUCE_SCATTER}  # strategies/by_messages.py makes it


@dataclass
class _Meeting:
    """A collective of a group: who is still missing, and when it was done."""

    missing: set[int]
    complete: Event = field(default_factory=Event)
    done: Event = field(default_factory=Event)


class Network:
    """Cards as queues, and the collectives of groups of ranks.

    Ranks of one host have a card each for what stays inside, or share one (`Cluster.shares_inside`). Where nothing is
    known of that link (AT_ONCE) they exchange in no time.

    A collective is a ring of messages (Patarasuk and Yuan 2009): each member sends `Traffic.wire_bytes` to the next
    one. In those of `to_each` each member sends to each other one. It begins when its slowest member has arrived, and
    when the group's collective before it is done: a process group does one at a time. It ends when the slowest message
    has arrived.

    Between two cards bytes have the rate of the slower one. The faster one has time for other messages meanwhile: its
    own rate says how long it is busy. The latency is the mean of both. Of several cards of a host one message has one;
    a ring is divided over all of them, as far as a device can feed them. A card with a curve (`Link.curve`) has the
    rate of each message by its size, also where others share the card with it.

    Args:
        clock: of the walk.
        cluster: the machines. Devices of kind "cuda" have NCCL's collectives, others gloo's.
        hosts: by rank.
        collective_s: seconds of a collective beside its messages.
    """

    def __init__(self, clock: Clock, cluster: Cluster, hosts: Sequence[int], collective_s: float = 0.0) -> None:
        self.clock, self.cluster, self.hosts, self.collective_s = clock, cluster, hosts, collective_s
        self.to_each = OVER_NCCL if cluster.device.kind == CUDA else OVER_GLOO
        self.cards = {host: Card(cluster.card_of(host), cluster.cards) for host in hosts}
        shared = {host: Card(cluster.inside) for host in self.cards}
        self.inside = [shared[host] if cluster.shares_inside else Card(cluster.inside) for host in hosts]  # by rank
        self.copies_free_s = [0.0 for _ in hosts]  # by rank: when its link to the host's memory is free again
        self.meetings: dict[tuple[str, tuple[int, ...]], list[_Meeting]] = defaultdict(list)
        self.joined: dict[tuple[str, int], int] = defaultdict(int)  # by axis and rank: collectives so far
        self.pieces = 0  # that have waited so far
        self.looks: dict[float, dict[int, Queue]] = {}  # by time: the queues, by id, to look at then
        self.flights: list[SimulatedMessage] = []  # from rank to rank, while they keep the sender's card busy

    def send(self, sender: int, receiver: int, payload_bytes: float) -> Event:
        """Send a message now. Returns its arrival."""
        arrived = Event()
        arrived.begun_s = self.clock.now_s
        self.clock.start(self._carry(sender, receiver, payload_bytes, arrived))
        return arrived

    def share(self, sender: int, receiver: int, payload_bytes: float, largest_bytes: float = 0.0) -> Event:
        """Send a message now, beside others of the same cards: piece by piece. Returns its arrival.

        `largest_bytes`: of the messages beside it. The default means that none is larger. All have pieces of about one
        size, because connections of TCP share bytes, not messages.
        """
        arrived = Event()
        arrived.begun_s = self.clock.now_s
        largest_bytes = max(payload_bytes, largest_bytes)
        self.clock.start(self._carry_pieces(sender, receiver, payload_bytes, largest_bytes, arrived))
        return arrived

    def request(self, one: int, other: int) -> Process:
        """A small message to a rank, and its answer. Each waits in the queue of the card that sends it, if it is busy.

        What comes from a card is as slow as it is: it fills no second queue.
        """
        for sender, receiver in ((one, other), (other, one)):
            if self._takes_time(sender, receiver):
                card, _ = self._cards(sender, receiver)
                is_busy = card.sends_free_s > self.clock.now_s
                yield self.latency_s(sender, receiver) + is_busy * card.link.queue_s

    def copy(self, rank: int, payload_bytes: float) -> Event:
        """A rank copies between its device and its host, copy after copy. Returns the end."""
        done = Event()
        self.clock.start(self._copy(rank, payload_bytes, done))
        return done

    def _copy(self, rank: int, payload_bytes: float, done: Event) -> Process:
        link = self.cluster.bus
        if link.takes_time:
            start_s = max(self.clock.now_s, self.copies_free_s[rank])
            self.copies_free_s[rank] = start_s + link.moved_s(payload_bytes)
            yield self.copies_free_s[rank] + link.latency_s - self.clock.now_s
        self.clock.happens(done)

    def latency_s(self, one: int, other: int) -> float:
        """Seconds of a small message from a rank to another."""
        if not self._takes_time(one, other):
            return 0.0
        return sum(card.link.latency_s for card in self._cards(one, other)) / 2

    def join(
        self, rank: int, group: tuple[int, ...], record: Traffic, times: float = 1.0, *, in_pieces: bool = False
    ) -> Event:
        """A rank comes to the next collective of its group. Returns its end. The ranks come in the same order.

        `times` of them, one after the other, count as one. `in_pieces`: it is cut into pieces of PIECE_BYTES.
        """
        number = self.joined[record.axis, rank]
        self.joined[record.axis, rank] += 1
        meetings = self.meetings[record.axis, group]
        if number == len(meetings):
            meetings.append(_Meeting(set(group)))
            before = meetings[number - 1].done if number else None
            self.clock.start(self._meet(group, meetings[number], before, record, times, in_pieces=in_pieces))
        meeting = meetings[number]
        meeting.missing.remove(rank)
        if not meeting.missing:
            self.clock.happens(meeting.complete)
        return meeting.done

    def cards_of(self, rank: int) -> list[Card]:
        """The card of a rank's host, and that for what stays inside."""
        return [self.cards[self.hosts[rank]], self.inside[rank]]

    def _carry(self, sender: int, receiver: int, payload_bytes: float, arrived: Event) -> Process:
        if self._takes_time(sender, receiver):
            arrives_s = self._transfer(sender, receiver, payload_bytes) + self.latency_s(sender, receiver)
            yield arrives_s - self.clock.now_s
        self.clock.happens(arrived)

    def _carry_pieces(
        self, sender: int, receiver: int, payload_bytes: float, largest_bytes: float, arrived: Event
    ) -> Process:
        """Piece after piece. The others that wait come first then."""
        if self._takes_time(sender, receiver):
            of_largest = max(1, min(PIECES, PIECES_OF_A_CARD // len(self.cards)))
            pieces = max(1, math.ceil(of_largest * payload_bytes / largest_bytes)) if largest_bytes else 1
            for _ in range(pieces):
                end_s = yield from self._piece(sender, receiver, payload_bytes / pieces, 1 / pieces)
                yield end_s - self.clock.now_s
                yield TURN_S
            yield self.latency_s(sender, receiver)
        self.clock.happens(arrived)

    def _piece(
        self, sender: int, receiver: int, payload_bytes: float, share: float
    ) -> Generator[Event | float, None, float]:
        """Send a piece, such a share of a message, when both cards are free. Returns when it has crossed them."""
        out, into = self._cards(sender, receiver)
        if max(out.sends_free_s, into.receives_free_s) <= self.clock.now_s:
            return self._transfer(sender, receiver, payload_bytes, share)
        piece = WaitingPiece(sender, receiver, payload_bytes, share, out, into)
        self.pieces += 1
        out.sends[self.pieces] = into.receives[self.pieces] = piece
        self._look_later(out, into)
        yield piece.leaves
        return piece.end_s

    def _look_later(self, out: Card, into: Card) -> None:
        """The pieces that wait for a card look at it when it is free again."""
        for free_s, queue in ((out.sends_free_s, out.sends), (into.receives_free_s, into.receives)):
            if queue and free_s > self.clock.now_s:
                if free_s not in self.looks:
                    self.looks[free_s] = {}
                    self.clock.start(self._look(free_s))
                self.looks[free_s][id(queue)] = queue

    def _look(self, free_s: float) -> Process:
        """Cards are free. The pieces that have waited longest leave first."""
        yield free_s - self.clock.now_s
        now_s = max(free_s, self.clock.now_s)  # the clock may be a rounding error before it
        queues = self.looks.pop(free_s)
        waiting = {number: piece for queue in queues.values() for number, piece in queue.items()}
        for number, piece in sorted(waiting.items()):
            out, into = piece.out, piece.into
            if out.sends_free_s <= now_s >= into.receives_free_s:
                del out.sends[number], into.receives[number]
                piece.end_s = self._transfer(piece.sender, piece.receiver, piece.payload_bytes, piece.share)
                self.clock.happens(piece.leaves)
                for until_s, queue in ((out.sends_free_s, out.sends), (into.receives_free_s, into.receives)):
                    if until_s > now_s:
                        queues.pop(id(queue), None)
                if not queues:  # all are busy again
                    break

    def _meet(
        self,
        group: tuple[int, ...],
        meeting: _Meeting,
        before: Event | None,
        record: Traffic,
        times: float,
        *,
        in_pieces: bool,
    ) -> Process:
        yield meeting.complete
        meeting.done.begun_s = self.clock.now_s
        if before is not None:
            yield before
        ring = list(zip(group, (*group[1:], group[0])))
        pieces = math.ceil(record.payload_bytes / len(group) / PIECE_BYTES) if in_pieces else 1
        leaves = list(self._leaves(group, ring, record, times, pieces))
        if leaves:
            end_s = max(self._transfer(*message, is_divided=True, record=record) for message in leaves)
            latency_s = around_s([self.latency_s(*pair) for pair in ring], self._rounds(record, len(group)))
            if in_pieces:
                sent_bytes, messages = record.wire_bytes(len(group)), self._messages(record, len(group), pieces)
                cards = [card for one, other, *_ in leaves for card in self._cards(one, other)]
                slowest_s = max(card.together.moved_s(sent_bytes, messages) for card in cards)
                latency_s = stalls_s(pieces, slowest_s / pieces, latency_s)
            yield end_s + times * (latency_s + self.collective_s) - self.clock.now_s
        self.clock.happens(meeting.done)

    def _leaves(
        self, group: tuple[int, ...], ring: Sequence[tuple[int, int]], record: Traffic, times: float, pieces: int
    ) -> Iterator[tuple[int, int, float, float]]:
        """What goes from host to host: sender, receiver, bytes, and in how many messages.

        Where each sends to each, a host sends what its members have for those of other hosts one after the other.
        """
        size, others = times * record.wire_bytes(len(group)), len(group) - 1
        messages = times * self._messages(record, len(group), pieces)
        if record.collective not in self.to_each:
            yield from ((rank, after, size, messages) for rank, after in ring if self._takes_time(rank, after))
            return
        members: dict[int, list[int]] = defaultdict(list)
        for rank in group:
            members[self.hosts[rank]].append(rank)
        firsts = [ranks[0] for ranks in members.values()]
        for ranks, after in zip(members.values(), (*firsts[1:], firsts[0])):
            if away := len(group) - len(ranks):
                pairs = len(ranks) * away
                yield ranks[0], after, size * pairs / others, messages * pairs / others
            for rank, next_one in zip(ranks, (*ranks[1:], ranks[0])):
                if self._takes_time(rank, next_one):  # to those of its own host
                    here = len(ranks) - 1
                    yield rank, next_one, size * here / others, messages * here / others

    def _messages(self, record: Traffic, degree: int, pieces: int) -> int:
        """In how many messages a rank sends its bytes of a collective of `degree` ranks."""
        if record.collective in (Collective.SEND, Collective.BROADCAST):
            return pieces
        return pieces * (2 if record.collective is Collective.ALL_REDUCE else 1) * (degree - 1)

    def _rounds(self, record: Traffic, degree: int) -> int:
        """How many messages of a collective of `degree` ranks go one after the other."""
        if record.collective is Collective.ALL_REDUCE:
            return 2 * (degree - 1)
        return 1 if record.collective is Collective.SEND or record.collective in self.to_each else degree - 1

    def _transfer(
        self,
        sender: int,
        receiver: int,
        payload_bytes: float,
        messages: float = 1,
        *,
        is_divided: bool = False,
        record: Traffic | None = None,
    ) -> float:
        """Bytes leave as soon as a card of each is free. Returns when the last one has crossed the slower card.

        `messages`: they are so many, one after the other; a piece is a share of one. `is_divided`: over all cards of a
        host, when all are free. A device feeds them at the rate of its own link. `record`: the collective to which they
        belong; None: they are a message of their own.
        """
        out, into = self._cards(sender, receiver)
        cards = (out.cards, into.cards) if is_divided else (1, 1)
        links = (out.together, into.together) if is_divided else (out.link, into.link)
        sending_s, receiving_s = (link.moved_s(payload_bytes, messages) for link in links)
        free = max if is_divided else min
        start_s = max(self.clock.now_s, free(out.sends_free), free(into.receives_free))
        keep_busy(out.sends_free, start_s + sending_s, all_of_them=is_divided)
        keep_busy(into.receives_free, start_s + receiving_s, all_of_them=is_divided)
        out.sending_s += sending_s * cards[0] / out.cards
        into.receiving_s += receiving_s * cards[1] / into.cards
        self.flights.append(SimulatedMessage(sender, receiver, start_s, start_s + sending_s, record))
        self._look_later(out, into)
        fed_s = self.cluster.inside.moved_s(payload_bytes, messages) if cards > (1, 1) else 0.0
        return start_s + max(sending_s, receiving_s, fed_s)

    def _takes_time(self, sender: int, receiver: int) -> bool:
        """Whether a message between two ranks has a link."""
        is_inside = self.hosts[sender] == self.hosts[receiver]
        return sender != receiver and (not is_inside or self.cluster.inside.takes_time)

    def _cards(self, sender: int, receiver: int) -> tuple[Card, Card]:
        if self.hosts[sender] == self.hosts[receiver]:
            return self.inside[sender], self.inside[receiver]
        return self.cards[self.hosts[sender]], self.cards[self.hosts[receiver]]


def stalls_s(pieces: int, piece_s: float, latency_s: float) -> float:
    """Seconds that a message in pieces takes beyond its bytes. A piece begins when the second before it has arrived.

    Args:
        pieces: their number, at least 1.
        piece_s: for which a piece keeps the link busy.
        latency_s: until it has arrived then.
    """
    if latency_s <= piece_s:  # the link is never idle
        return latency_s
    turns, one_more = divmod(pieces, PIECES_AT_ONCE)
    alone_s = (turns + one_more) * (piece_s + latency_s) + (0.0 if one_more else piece_s)
    return alone_s - pieces * piece_s


def around_s(latencies: Sequence[float], messages: int) -> float:
    """Seconds of latency of so many messages, one after the other around a ring, from where they take longest.

    `latencies`: of the ring's messages, in order; 0 within a host.
    """
    circles, more = divmod(messages, len(latencies))
    until = list(accumulate((*latencies, *latencies[:more]), initial=0.0))
    longest = max(end - begin for begin, end in zip(until, until[more:]))
    return circles * sum(latencies) + longest
