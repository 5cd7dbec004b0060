"""In: a batch, a sequence length, or a size of a mesh axis, that cannot be used. Out: the nearest usable ones.
Does not decide what is usable: strategies do. A `Refusal` names the changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from codescent.base.nearest import divisors, nearest_divisors, nearest_multiples
from codescent.base.refusal import Change, Refusal

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


def near_lengths(candidate: Candidate) -> list[Change]:
    """The nearest lengths that cp and tp can divide. More positions than the model has need a larger model.seq_len."""
    found: list[Change] = []
    if not candidate.advises:
        return found
    for length in nearest_multiples(candidate.work.seq_len, length_factor(candidate)):
        longer = {"model.seq_len": length} if length > cast(int, candidate.model.sizes["seq_len"]) else {}
        found += with_tokens(candidate, Change({"data.seq_len": length, **longer}), length)
    return found


def with_tokens(candidate: Candidate, change: Change, sample_tokens: int) -> list[Change]:
    """A change of a sample's tokens, with each of the nearest batches in tokens if the run's would not divide."""
    factor = candidate.mesh.dp * candidate.multiple(candidate.mesh) * (candidate.microbatch_size or 1) * sample_tokens
    if candidate.batch_tokens % factor == 0:
        return [change]
    batches = nearest_multiples(candidate.batch_tokens, factor)
    return [change.and_also({"train.global_batch_tokens": tokens}) for tokens in batches]


def too_long(candidate: Candidate, longest: int) -> Iterator[str]:
    """A problem if data.seq_len does not fit the `longest` positions of the model."""
    work = candidate.work
    if work.streams and work.seq_len != longest:
        yield Refusal(
            f"data.seq_len = {work.seq_len}: a sample is a source of {work.streams[0]} tokens (model.source_len) and a "
            f"target of {work.streams[1]} (model.target_len), {longest} together",
            [Change({"data.seq_len": None})],
        )
    elif work.seq_len > longest:
        whole = longest // (factor := length_factor(candidate)) * factor
        shorter = with_tokens(candidate, Change({"data.seq_len": whole}), whole) if whole else []
        yield Refusal(
            f"data.seq_len = {work.seq_len}: the model has {longest} positions (model.seq_len)",
            [*shorter, Change({"model.seq_len": work.seq_len})],
        )


def near_batches(candidate: Candidate, mesh: Mesh) -> list[dict[str, int]]:
    """The nearest batches that the ranks of a mesh can share equally: values by config key.

    They are the candidate's batch in other micro-batches, if possible.
    """
    size, microbatch, stages = candidate.work.global_batch_size, candidate.microbatch_size, candidate.multiple(mesh)
    share, rest = divmod(size, mesh.dp * stages)
    if not rest and candidate.whole_samples:
        sizes = nearest_divisors(share, microbatch) if microbatch else [share]
        return [{"train.microbatch_size": number} for number in sizes]
    key, total, unit = "train.global_batch_size", size, mesh.dp * stages * (microbatch or 1)
    if candidate.batch_tokens:
        key, total, unit = "train.global_batch_tokens", candidate.batch_tokens, unit * candidate.sample_tokens
    one = {} if microbatch or stages == 1 else {"train.microbatch_size": 1}
    return [{key: number, **one} for number in nearest_multiples(total, unit)]


def near_degrees(candidate: Candidate, axis: str, most: int, fits: Callable[[Candidate], bool]) -> list[Change]:
    """The nearest degrees of an axis for which `fits` is true: one below and one above the candidate's.

    No degree is above `most`. Degrees that are possible on the run's ranks come first, with their dp_replicate. If
    these ranks could not share the batch, changes are the nearest batches that they could, and a degree with the
    number of ranks that it needs. Degree 1 comes last, because it does without the strategy; but it is named if no
    other degree keeps the run's ranks.
    """
    degree = candidate.mesh.degree(axis)
    if not candidate.advises:
        return []

    def first(on_ranks: Callable[..., list[Change]], numbers: list[int]) -> list[Change]:
        return next(filter(None, (on_ranks(candidate, axis, number, fits) for number in numbers)), [])

    def nearest(degrees: range) -> list[Change]:
        for numbers in ([number for number in degrees if number > 1], [number for number in degrees if number == 1]):
            if same := first(_on_these_ranks, numbers):
                return same
            if found := [*first(_with_another_batch, numbers), *first(_on_other_ranks, numbers)]:
                return found
        return []

    most = min(most, LARGEST_DEGREE)
    below, above = range(min(degree - 1, most), 0, -1), range(degree + 1, most + 1)
    found = [*nearest(below), *nearest(above)]
    if degree > 1 and all(change.ranks is not None for change in found):
        found += first(_on_these_ranks, [1]) or first(_with_another_batch, [1])
    return found


def near_meshes(candidate: Candidate, fits: Callable[[Candidate], bool]) -> list[Change]:
    """The nearest meshes of as many ranks as the run has: with another dp_replicate, else another degree.

    Where these ranks cannot share the batch, the changes have the nearest batches that they can.
    """
    mesh, found = candidate.mesh, []
    if candidate.layout.data_parallel > 1 and candidate.world_size > 1:  # torch.nn.DataParallel is one process
        return []
    copies, rest = divmod(candidate.world_size, mesh.world_size // mesh.dp_replicate)
    if copies and not rest:
        other = replace(mesh, dp_replicate=copies)
        return _with_batch(candidate, other, Change({"parallel.dp_replicate": copies}))
    possible = sorted(divisors(candidate.world_size))
    for axis in ("pp", "dp_shard", "ep", "cp", "tp"):
        degree = mesh.degree(axis)
        below, above = [n for n in reversed(possible) if n < degree], [n for n in possible if degree < n <= 2 * degree]
        for degrees in (below, above):
            ways = (
                on(candidate, axis, number, fits) for on in (_on_these_ranks, _with_another_batch) for number in degrees
            )
            found += next(filter(None, ways), []) if degree > 1 else []
    return found


def near_ranks(candidate: Candidate, wanted: float, fits: Callable[[Candidate], bool]) -> list[int]:
    """The nearest numbers of ranks whose copies of the model share the batch: of less and more than `wanted` copies."""
    copies, found = sorted(divisors(candidate.work.global_batch_size)), []
    below, above = [n for n in reversed(copies) if n < wanted], [n for n in copies if n > wanted]
    for numbers in (below, above):
        others = (candidate.on(replace(candidate.mesh, dp_replicate=number)) for number in numbers)
        found += list(itertools.islice((other.mesh.world_size for other in others if other and fits(other)), 1))
    return found


def near_copies(candidate: Candidate, numbers: list[int], fits: Callable[[Candidate], bool]) -> list[Change]:
    """The first of these numbers of copies that would do: its ranks, with the batches that they can share."""
    for mesh in (replace(candidate.mesh, dp_replicate=number) for number in numbers if number):
        if fits(candidate.on(mesh) or _in_another_batch(candidate, mesh)):
            return _with_batch(candidate, mesh, Change({}, mesh.world_size))
    return []


def _with_batch(candidate: Candidate, mesh: Mesh, change: Change) -> list[Change]:
    """A change of the mesh, with each of the nearest batches if the ranks of `mesh` cannot share the candidate's."""
    if candidate.on(mesh) is not None:
        return [change]
    return [change.and_also(batch) for batch in near_batches(candidate, mesh)]


def _in_another_batch(candidate: Candidate, mesh: Mesh) -> Candidate:
    work = replace(candidate.work, microbatch_size=1, num_microbatches=candidate.multiple(mesh))
    return replace(candidate, mesh=mesh, work=work)


def _mesh_on_these_ranks(candidate: Candidate, axis: str, degree: int) -> Mesh | None:
    """The mesh with this degree, and with as many copies of the model as make the run's ranks; None: there is none."""
    one = replace(candidate.mesh, **{axis: degree, "dp_replicate": 1})
    replicas, rest = divmod(candidate.world_size, one.world_size)
    return replace(one, dp_replicate=replicas) if replicas and not rest else None


def _on_these_ranks(candidate: Candidate, axis: str, degree: int, fits: Callable[[Candidate], bool]) -> list[Change]:
    mesh = _mesh_on_these_ranks(candidate, axis, degree)
    other = None if mesh is None else candidate.on(mesh)
    return [_to_degree(other.mesh, axis)] if other and fits(other) else []


def _with_another_batch(
    candidate: Candidate, axis: str, degree: int, fits: Callable[[Candidate], bool]
) -> list[Change]:
    mesh = _mesh_on_these_ranks(candidate, axis, degree)
    if mesh is None or candidate.on(mesh) is not None or not fits(_in_another_batch(candidate, mesh)):
        return []
    return _with_batch(candidate, mesh, _to_degree(mesh, axis))


def _on_other_ranks(candidate: Candidate, axis: str, degree: int, fits: Callable[[Candidate], bool]) -> list[Change]:
    mesh = replace(candidate.mesh, **{axis: degree})
    fitting = fits(replace(candidate, mesh=mesh))
    return [Change({f"parallel.{axis}": degree}, mesh.world_size)] if fitting else []


def _to_degree(mesh: Mesh, axis: str) -> Change:
    return Change({f"parallel.{axis}": mesh.degree(axis), "parallel.dp_replicate": mesh.dp_replicate})
