"""In: a batch, a sequence length, or a size of a mesh axis, that cannot be used. Out: the nearest usable ones, as text.
Does not decide what is usable: strategies do. The text is a part of an error message."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from codescent.base.counted import plural
from codescent.base.nearest import divisors, near_divisors, near_multiples

if TYPE_CHECKING:
    from codescent.plan import Mesh
    from codescent.strategies.strategy import Candidate

LARGEST_DEGREE = 1 << 14  # larger degrees are not tried: models have fewer heads, layers and slices of a sequence


def length_factor(candidate: Candidate) -> int:
    """Every length that cp and tp can divide is a multiple of this number of positions.

    cp cuts a sequence into two slices for each rank; a sample of several sequences it cannot cut. With sequence
    parallelism tp divides what a cp rank has.
    """
    cp = 1 if candidate.work.streams else candidate.mesh.cp
    tp = candidate.mesh.tp if candidate.layout.sequence_parallel else 1
    return cp * math.lcm(2 if cp > 1 else 1, tp)


def near_lengths(candidate: Candidate) -> str:
    """The nearest lengths that cp and tp can divide, as text. More positions also need a larger model.seq_len."""
    value, factor = candidate.work.seq_len, length_factor(candidate)
    below, above = value // factor * factor, -(-value // factor) * factor
    longer = f"{above} positions (model.seq_len at least that){and_tokens(candidate, above)}"
    return f"{below} positions (data.seq_len){and_tokens(candidate, below)}, or {longer}" if below else longer


def and_tokens(candidate: Candidate, sample_tokens: int) -> str:
    """What else has to change with the tokens of a sample, as text: a batch in tokens that would not divide."""
    factor = candidate.mesh.dp * candidate.multiple(candidate.mesh) * (candidate.microbatch_size or 1) * sample_tokens
    if candidate.batch_tokens % factor == 0:
        return ""
    return f" and train.global_batch_tokens = {near_multiples(candidate.batch_tokens, factor)}"


def too_long(candidate: Candidate, longest: int) -> Iterator[str]:
    """A problem if data.seq_len does not fit the `longest` positions of the model."""
    work = candidate.work
    if work.streams and work.seq_len != longest:
        yield (
            f"data.seq_len = {work.seq_len}: a sample is a source of {work.streams[0]} tokens (model.source_len) and a "
            f"target of {work.streams[1]} (model.target_len), {longest} together; leave out data.seq_len, or "
            "change model.source_len and model.target_len"
        )
    elif work.seq_len > longest:
        whole = longest // (factor := length_factor(candidate)) * factor
        shorter = f"data.seq_len = {whole}{and_tokens(candidate, whole)}, or " if whole else ""
        yield (
            f"data.seq_len = {work.seq_len}: the model has {longest} positions (model.seq_len); nearest that "
            f"would do: {shorter}model.seq_len = {work.seq_len}"
        )


def near_batch(candidate: Candidate, mesh: Mesh) -> str:
    """The nearest batch that the ranks of a mesh can share equally, as text: its keys with values.

    It is the candidate's batch in other micro-batches, if possible.
    """
    size, microbatch, stages = candidate.work.global_batch_size, candidate.microbatch_size, candidate.multiple(mesh)
    share, rest = divmod(size, mesh.dp * stages)
    if not rest and candidate.whole_samples:
        return f"train.microbatch_size = {near_divisors(share, microbatch) if microbatch else share}"
    factor = mesh.dp * stages * (microbatch or 1)
    batch = f"train.global_batch_size = {near_multiples(size, factor)}"
    if tokens := candidate.batch_tokens:
        batch = f"train.global_batch_tokens = {near_multiples(tokens, factor * candidate.sample_tokens)}"
    return batch if microbatch or stages == 1 else f"{batch} and train.microbatch_size = 1"


def near_degrees(candidate: Candidate, axis: str, most: int, fits: Callable[[Candidate], bool]) -> str:
    """The nearest degrees of an axis for which `fits` is true, as text: one below and one above the candidate's.

    No degree is above `most`. Degrees that are possible on the run's ranks come first, with their dp_replicate. If
    these ranks could not share the batch, the text names the nearest batch that they could, and a degree with the
    number of ranks that it needs. Degree 1 comes last, because it does without the strategy; but it is named if no
    other degree keeps the run's ranks. The text is empty if no degree does.
    """
    degree = candidate.mesh.degree(axis)
    if not candidate.advises:
        return ""

    def first(on_ranks: Callable[..., str], numbers: list[int]) -> str:
        return next(filter(None, (on_ranks(candidate, axis, number, fits) for number in numbers)), "")

    def nearest(degrees: range) -> list[str]:
        for numbers in ([number for number in degrees if number > 1], [number for number in degrees if number == 1]):
            if same := first(_on_these_ranks, numbers):
                return [same]
            if found := [text for on in (_with_another_batch, _on_other_ranks) if (text := first(on, numbers))]:
                return found
        return []

    most = min(most, LARGEST_DEGREE)
    below, above = range(min(degree - 1, most), 0, -1), range(degree + 1, most + 1)
    found = [*nearest(below), *nearest(above)]
    if degree > 1 and not any(" with dp_replicate = " in text for text in found):
        found.append(first(_on_these_ranks, [1]) or first(_with_another_batch, [1]))
    return ", or ".join(filter(None, found))


def near_meshes(candidate: Candidate, fits: Callable[[Candidate], bool]) -> list[str]:
    """The nearest meshes of as many ranks as the run has, as text: with another dp_replicate, else another degree.

    Where these ranks cannot share the batch, the text names the nearest batch that they can.
    """
    mesh, found = candidate.mesh, []
    if candidate.layout.data_parallel > 1 and candidate.world_size > 1:  # torch.nn.DataParallel is one process
        return []
    copies, rest = divmod(candidate.world_size, mesh.world_size // mesh.dp_replicate)
    if copies and not rest:
        other = replace(mesh, dp_replicate=copies)
        batch = "" if candidate.on(other) else f" and {near_batch(candidate, other)}"
        return [f"parallel.dp_replicate = {copies}{batch}"]
    possible = sorted(divisors(candidate.world_size))
    for axis in ("pp", "dp_shard", "cp", "tp"):
        degree = mesh.degree(axis)
        below, above = [n for n in reversed(possible) if n < degree], [n for n in possible if degree < n <= 2 * degree]
        for degrees in (below, above):
            ways = (
                on(candidate, axis, number, fits) for on in (_on_these_ranks, _with_another_batch) for number in degrees
            )
            found += list(itertools.islice(filter(None, ways), 1 if degree > 1 else 0))
    return found


def near_ranks(candidate: Candidate, wanted: float, fits: Callable[[Candidate], bool]) -> list[int]:
    """The nearest numbers of ranks whose copies of the model share the batch: of less and more than `wanted` copies."""
    copies, found = sorted(divisors(candidate.work.global_batch_size)), []
    below, above = [n for n in reversed(copies) if n < wanted], [n for n in copies if n > wanted]
    for numbers in (below, above):
        others = (candidate.on(replace(candidate.mesh, dp_replicate=number)) for number in numbers)
        found += list(itertools.islice((other.mesh.world_size for other in others if other and fits(other)), 1))
    return found


def near_copies(candidate: Candidate, numbers: list[int], fits: Callable[[Candidate], bool]) -> str:
    """The first of these numbers of copies that would do, as text: its ranks, with the batch that they can share."""
    for mesh in (replace(candidate.mesh, dp_replicate=number) for number in numbers if number):
        other = candidate.on(mesh)
        if fits(other or _in_another_batch(candidate, mesh)):
            batch = "" if other else f" and {near_batch(candidate, mesh)}"
            return f"{mesh.world_size} {plural(mesh.world_size, 'rank')}{batch}"
    return ""


def _in_another_batch(candidate: Candidate, mesh: Mesh) -> Candidate:
    work = replace(candidate.work, microbatch_size=1, num_microbatches=candidate.multiple(mesh))
    return replace(candidate, mesh=mesh, work=work)


def _mesh_on_these_ranks(candidate: Candidate, axis: str, degree: int) -> Mesh | None:
    """The mesh with this degree, and with as many copies of the model as make the run's ranks; None: there is none."""
    one = replace(candidate.mesh, **{axis: degree, "dp_replicate": 1})
    replicas, rest = divmod(candidate.world_size, one.world_size)
    return replace(one, dp_replicate=replicas) if replicas and not rest else None


def _on_these_ranks(candidate: Candidate, axis: str, degree: int, fits: Callable[[Candidate], bool]) -> str:
    mesh = _mesh_on_these_ranks(candidate, axis, degree)
    other = None if mesh is None else candidate.on(mesh)
    return f"{axis} = {degree} with dp_replicate = {other.mesh.dp_replicate}" if other and fits(other) else ""


def _with_another_batch(candidate: Candidate, axis: str, degree: int, fits: Callable[[Candidate], bool]) -> str:
    mesh = _mesh_on_these_ranks(candidate, axis, degree)
    if mesh is None or candidate.on(mesh) is not None:
        return ""
    if not fits(_in_another_batch(candidate, mesh)):
        return ""
    return f"{axis} = {degree} with dp_replicate = {mesh.dp_replicate} and {near_batch(candidate, mesh)}"


def _on_other_ranks(candidate: Candidate, axis: str, degree: int, fits: Callable[[Candidate], bool]) -> str:
    mesh = replace(candidate.mesh, **{axis: degree})
    return (
        f"{axis} = {degree} on {mesh.world_size} {plural(mesh.world_size, 'rank')}"
        if fits(replace(candidate, mesh=mesh))
        else ""
    )
