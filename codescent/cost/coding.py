"""In: a plan, how fast a processor codes. Out: seconds for what an exchange computes: encoding, decoding, sums, copies.
Does not measure (collectives/coding_speed.py does) and does not encode (strategies/wire_codecs.py does)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from codescent.clusters.link import RATES
from codescent.plan import DTYPE_BYTES, Collective, Plan, TensorPlan, Traffic, Verb
from codescent.plan.wire import Wire
from codescent.strategies.gossip_graphs import AXIS

MEMORY_BYTES_PER_S = 10e9
"""What one core of a server reads and writes in a second, where nothing else is known."""

STREAMS: Mapping[str, tuple[float, float]] = MappingProxyType({
    "none": (0.0, 0.0), "bf16": (1.5, 1.5), "int8": (8.25, 3.25), "int4": (8.75, 4.5), "sign": (5.25, 7.5),
    "topk": (7.0, 0.5), "powersgd": (4.0, 1.0),
})  # fmt: skip
"""By method: how often encoding and decoding an element reads or writes 4 bytes, counted in the tensor operations of
wire_codecs.py and wire_sums.py. Of PowerSGD those of its matrices, of which a low rank reads and writes little else."""

_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kmg]?b)(?:/s)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Coding:
    """How fast a rank's processor does what an exchange needs beside its messages. All zero: it takes no time.

    Attributes:
        stream_s: seconds to read or write an element in the dtype of the sums.
        encode_s, decode_s: seconds to encode an element into the format of the wire, and to decode it.
    """

    stream_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0

    @classmethod
    def of_memory(cls, plan: Plan, bytes_per_s: float = MEMORY_BYTES_PER_S) -> Coding:
        """That of a processor which only waits for its memory."""
        stream_s = DTYPE_BYTES[plan.trained[0].optimizer_dtype] / bytes_per_s
        encode, decode = STREAMS[Wire.parse(plan.layout.wire).method]
        return cls(stream_s, encode * stream_s, decode * stream_s)


def rate_of(text: str) -> float:
    """Read bytes per second, such as "10GB/s". Raises ValueError, which names the form, for any other text."""
    found = _RATE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"'{text}' is no rate: it is above 0, in kB, MB or GB a second, such as 10GB/s")
    return float(found[1]) * RATES[found[2].lower()]


@dataclass(frozen=True)
class ElementWork:
    """What is computed for each element of a vector: elements read or written, encoded and decoded."""

    streams: float = 0.0
    encoded: float = 0.0
    decoded: float = 0.0

    def __add__(self, other: ElementWork) -> ElementWork:
        return ElementWork(self.streams + other.streams, self.encoded + other.encoded, self.decoded + other.decoded)

    def __mul__(self, times: float) -> ElementWork:
        return ElementWork(self.streams * times, self.encoded * times, self.decoded * times)

    def seconds(self, numel: float, coding: Coding) -> float:
        """For a vector of `numel` elements."""
        each_s = self.streams * coding.stream_s + self.encoded * coding.encode_s + self.decoded * coding.decode_s
        return numel * each_s


COPY, ADD, READ = ElementWork(2.0), ElementWork(3.0), ElementWork(1.0)
"""a = b; a = b + c, which a choice between two vectors costs too; a norm."""
ENCODE, DECODE = ElementWork(encoded=1.0), ElementWork(decoded=1.0)
NOTHING = ElementWork()


def of_sum(
    wire: Wire, collective: Collective, ranks: int, *, in_place: bool = False
) -> tuple[ElementWork, ElementWork]:
    """What a rank computes before and after one collective of a sum over `ranks`: see strategies/wire_sums.py.

    Of PowerSGD a part of the sum: its collectives share it by their bytes. `in_place`: the summands are in the vector
    that is summed, and stay there.
    """
    moved = NOTHING if in_place else COPY  # into this vector, and out of it
    feedback = ADD if wire.lossy else moved  # with the residual
    if wire.method in ("none", "powersgd"):
        coded = wire.method == "powersgd"
        return (feedback + ENCODE, ADD + COPY + DECODE + moved) if coded else (moved, moved)
    if wire.method == "topk":
        kept = ADD if wire.lossy else NOTHING
        return feedback + ENCODE, kept + READ + DECODE * ranks + moved
    own = DECODE + ADD + ADD  # what this rank's message lacks, and its choice
    if wire.parts(ranks) == 1:
        return feedback + ENCODE, own + DECODE + ADD + moved
    part = 1 / ranks
    if collective is Collective.ALL_TO_ALL:  # then the owner of a part adds its residual and the others' messages
        return feedback + ENCODE, DECODE + ADD + ENCODE * part
    return NOTHING, own * part + own + DECODE + moved


def of_average(plan: Plan) -> tuple[ElementWork, ElementWork]:
    """What AVERAGE computes before a fragment leaves, and MERGE after its sum: see coupling/averaging.py."""
    anchored = plan.layout.keeps_anchor
    before = (ADD if anchored else NOTHING) + COPY  # the change or the weights, times the replica's weight
    distance = ADD + READ + READ
    outer = ADD + ADD if anchored else NOTHING  # the mean weights, the step without momentum
    if plan.layout.has_outer_momentum:
        outer += COPY + ADD + ADD  # momentum times its factor, plus the change; the look ahead
    if plan.layout.overlap_steps:
        return before + COPY, distance + outer + ADD + ADD
    return before, distance + outer + COPY


def of_mixing(plan: Plan, neighbours: int) -> tuple[ElementWork, ElementWork]:
    """What EXCHANGE computes before it sends the weights, and after it has those of so many neighbours: see
    coupling/mixing.py and differences.py."""
    scaled = COPY if plan.layout.gossip == "push-sum" else NOTHING  # by the replica's weight
    if Wire.parse(plan.layout.wire).lossy:
        known = DECODE + ADD
        return COPY + ADD + COPY + ENCODE, known + (known * (neighbours + 1)) + ADD + ADD + COPY
    return COPY + scaled, COPY + ADD * neighbours + scaled + COPY


def of_push(plan: Plan) -> tuple[ElementWork, ElementWork]:
    """What a worker computes before a push leaves, and a server when it has come: see coupling/worker.py."""
    wire = Wire.parse(plan.layout.wire)
    before = COPY + (ADD + READ if plan.schedule.period > 1 else NOTHING)
    if wire.method != "none":
        before += (ADD if wire.lossy else COPY) + ENCODE + DECODE
    if not plan.layout.in_steps:
        before += READ  # its norm clips the update
    decoded = DECODE if wire.method != "none" else NOTHING
    return before, decoded + COPY + ADD


def delivered(plan: Plan) -> ElementWork:
    """What a worker computes when a push was applied: the new residual."""
    return ADD + READ + COPY if Wire.parse(plan.layout.wire).lossy else NOTHING


@dataclass(frozen=True)
class Exchanged:
    """Seconds of a rank's processor around one collective: before it, and after it."""

    before_s: float = 0.0
    after_s: float = 0.0


def around(plan: Plan, coding: Coding, stage: int, number: int) -> Mapping[Traffic, Exchanged]:
    """Seconds around each collective of a stage in step `number` that is part of a sum over replicas in a format of its
    own: of buckets of gradients, or of weights.

    The elements of a stage are shared by the collectives of a kind in proportion to their bytes.
    """
    wire = Wire.parse(plan.layout.wire)
    averages = plan.layout.average_every > 0
    verb, axis = (Verb.AVERAGE, AXIS) if averages else (Verb.REDUCE, plan.mesh.joint(AXIS, "cp"))
    if coding == Coding() or not (averages or wire.method != "none"):
        return {}
    records = [t for t in plan.traffic if t.verb is verb and t.stage in (None, stage) and t.axis in (AXIS, axis)]
    valid = [t for t in records if t.since <= number and (t.until is None or number < t.until)]
    numel = sum(_numel(plan, tensor, averages=averages) for tensor in plan.held_by(stage) if tensor.parameter.trained)
    form = wire if number >= plan.layout.wire_from or not wire.lossy else Wire()
    found = {}
    for record in valid:
        alike = sum(t.payload_bytes * t.times for t in valid if t.collective is record.collective)
        mine = numel * record.payload_bytes / alike
        before, after = of_sum(form, record.collective, plan.mesh.degree(record.axis), in_place=averages)
        found[record] = Exchanged(before.seconds(mine, coding), after.seconds(mine, coding))
    return found


def _numel(plan: Plan, tensor: TensorPlan, *, averages: bool) -> int:
    """Elements of a tensor that the largest rank sums."""
    shard = tensor.optimizer if averages else tensor.gradients
    return shard.numel(tensor.parameter.shape, plan.mesh)
