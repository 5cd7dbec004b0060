"""In: a sequence split over real ranks. Out: attention, gradients and masks are one device's; messages those declared.
Does not test a model: whoever puts it into one does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ring_ranks
import torch
from batches import selected
from declared_traffic import on_gloo_sent
from forker import Forker

from codescent.strategies.causal_tiles import CausalTiles, balanced_positions
from codescent.strategies.context_parallel import exchange_traffic

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 3e-2}
DTYPE = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}


@pytest.fixture(scope="module")
def found(
    forker: Forker, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """What each rank has found, by size of the group (JSON has strings as keys)."""
    sizes = {params["answers"] for params in selected(request) if "answers" in params}
    folder = tmp_path_factory.mktemp("ring")
    return forker.call("ring_ranks:work", folder, len(ring_ranks.GROUPS), sizes=sorted(sizes))


@pytest.fixture(params=[1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def answers(request: pytest.FixtureRequest, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank of a group of so many found, in the order of the group."""
    of_group = dict(rank[str(request.param)] for rank in found if str(request.param) in rank)
    return [of_group[rank] for rank in range(request.param)]


def test_values_and_gradients_are_those_of_one_device(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert len(answer["cases"]) == len(ring_ranks.CASES)
        for case in answer["cases"]:
            assert all(case["dtypes"])
            for name, errors in case["errors"].items():
                assert max(errors) < TOLERANCE[case["spec"]["precision"]], (name, case["spec"], errors)


def test_both_methods_are_one_to_the_bit(answers: list[dict[str, Any]]) -> None:
    assert all(case["same"] for answer in answers for case in answer["cases"])


def test_what_is_sent_is_what_is_declared(answers: list[dict[str, Any]]) -> None:
    degree = len(answers)
    for case in (case for answer in answers for case in answer["cases"]):
        precision, kv_heads = case["spec"]["precision"], case["spec"]["kv_heads"]
        kv_numel = 2 * ring_ranks.BATCH * kv_heads * (ring_ranks.SEQ_LEN // degree) * ring_ranks.HEAD_DIM
        for name, context in (("ring", "ring"), ("gather", "all-gather")):
            declared: Counter[tuple[object, ...]] = Counter()
            for record in exchange_traffic(context, degree, kv_numel, precision):
                for kind, size in on_gloo_sent(record, degree):
                    declared[kind, record.verb, size, DTYPE[record.dtype]] += record.times
            issued = Counter(tuple(sent) for sent in case["issued"][name])
            assert issued == declared
            assert bool(issued) == (degree > 1)


def test_the_masks_of_some_heads_are_those_of_the_layer(answers: list[dict[str, Any]]) -> None:
    assert max(error for answer in answers for error in answer["some_heads"]) < 1e-12


def test_layers_upon_layers_do_not_mix_their_messages(answers: list[dict[str, Any]]) -> None:
    assert max(error for answer in answers for error in answer["layers"]) < 1e-12


@pytest.mark.parametrize("method", ["ring", pytest.param("gather", marks=pytest.mark.slow)])
def test_compiled_code_stops_before_attention_and_goes_on_after(forker: Forker, tmp_path: Path, method: str) -> None:
    for errors in forker.call("ring_ranks:compiled_on_two", tmp_path, 2, method=method):
        assert len(errors) == 2
        assert max(errors) < 1e-12


def test_probabilities_are_never_all_there(answers: list[dict[str, Any]]) -> None:
    """No tensor is larger than one block of 16 queries' (hashes are made for [B, H, 16, S], too), or than all of kv."""
    length = ring_ranks.LONG // len(answers)
    block = ring_ranks.BATCH * 2 * 16 * length
    kv = 2 * ring_ranks.BATCH * 2 * length * ring_ranks.HEAD_DIM
    for answer in answers:
        assert answer["largest"]["ring"] <= max(block, kv)
        assert answer["largest"]["gather"] <= max(block, kv * len(answers))


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("part", [1, 3])
def test_positions_are_divided(degree: int, part: int) -> None:
    seq_len = 2 * degree * part
    each = [balanced_positions(seq_len, degree, index) for index in range(degree)]
    assert torch.equal(torch.cat(each).sort().values, torch.arange(seq_len))
    for index, mine in enumerate(each):
        assert mine.dtype == torch.int64
        assert torch.equal(mine, mine.sort().values)
        parts = [*range(index * part, (index + 1) * part)]
        assert mine.tolist() == parts + [seq_len - 1 - position for position in reversed(parts)]


def test_positions_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 \* 3 equal parts"):
        balanced_positions(20, 3, 0)
    with pytest.raises(ValueError, match="equally long"):
        CausalTiles(1, 0, 7)


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_tiles_are_what_a_causal_mask_lets_be_seen(degree: int) -> None:
    """Every pair of a query and a key that it may see once; every rank computes the same, and half of what there is."""
    length, work = 300, set()
    for index in range(degree):
        mine = balanced_positions(degree * length, degree, index)
        elements = 0
        for source in range(degree):
            keys = balanced_positions(degree * length, degree, source)
            seen = torch.zeros(length, length, dtype=torch.int64)
            for tile in CausalTiles(degree, index, length).tiles(source):
                ones = torch.ones(tile.queries.stop - tile.queries.start, tile.keys.stop, dtype=torch.int64)
                seen[tile.queries, tile.keys] += ones.tril_(tile.queries.start) if tile.causal else ones
                elements += ones.numel() if source != index else 0
            assert torch.equal(seen, (keys[None, :] <= mine[:, None]).long())
        work.add(elements)
    assert work == {(degree - 1) * length * length // 2}


def test_a_rank_sends_as_much_in_either_way() -> None:
    kv_numel = 2 * 2 * 3 * 16 * 8  # samples, heads, positions, head_dim
    sends, gathers = (exchange_traffic(context, 4, kv_numel, "bf16") for context in ("ring", "all-gather"))
    found = [(one.payload_bytes, one.times, one.during is not None) for one in sends]
    assert found == [(3072, 3, True), (3072, 3, True), (6144, 2, True), (6144, 1, False)]  # the last hop is waited for
    for one in gathers:
        alike = [send for send in sends if (send.verb, send.what) == (one.verb, one.what)]
        assert one.wire_bytes(4) == sum(send.payload_bytes * send.times for send in alike)
