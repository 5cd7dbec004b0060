"""In: every form of `wire`. Out: its codecs' errors are bounded; ranks' sums, residuals and traffic are as declared.
Does not train: what a wire does to losses is measured in benchmarks/."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forker import Forker
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import planned
from runs import called
from torch import Tensor
from wire_ranks import flat
from wire_ranks import given as given_by

from codescent.base.range_names import collective_name
from codescent.base.wire_form import PLAIN
from codescent.build import plan_of
from codescent.config.parallel import Parallel
from codescent.plan import Collective, Verb
from codescent.plan.wire import BLOCK, CODE_BITS, Wire
from codescent.strategies import wire as wire_module
from codescent.strategies.wire import Channel
from codescent.strategies.wire_codecs import codec, largest
from codescent.strategies.wire_sums import PowerSGD

NARROW = ("bf16", "int8", "int4", "sign")
WIRES = ("none", *NARROW, "powersgd:2", "powersgd:99", "topk:0.05", "topk:1")
SHAPES = ((40, 17), (17,), (3, 5, 11), (), (1, 300), (600,))
NUMEL = sum(map(prod, SHAPES))
STEPS = 6
TORCH = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "uint8": "uint8"}
Sums = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def sums(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Sums:
    """By number of ranks and dtype: what each rank has found of every wire."""
    folder = tmp_path_factory.mktemp("wire")

    @functools.cache
    def of(ranks: int, dtype: str) -> list[dict[str, Any]]:
        options = {"wires": WIRES, "shapes": SHAPES, "dtype": dtype, "steps": STEPS}
        return forker.call("wire_ranks:sums", folder, ranks, **options)

    return of


FOUR = [pytest.param(4, dtype, marks=pytest.mark.slow) for dtype in ("fp64", "fp32")]
RANKS = pytest.mark.parametrize(("ranks", "dtype"), [(2, "fp32"), (2, "fp64"), (3, "fp32"), *FOUR])


# the text


@pytest.mark.parametrize("words", [("parallel.average_every=50",), ("parallel.gossip=ring",), ("parallel.servers=1",)])
def test_topk_of_more_elements_than_an_index_can_name_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    of_8b = (
        "llama3_8b",
        "parallel.dp_shard=1",
        "train.global_batch_size=2",
        "checkpoint.every=50",
        "train.eval_every=0",
    )
    ranks = "3" if "parallel.servers=1" in words else "2"
    words = ("plan", *of_8b, *words, "--ranks", ranks, "parallel.wire=topk:0.01")
    done = called(tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(
        'error: parallel.wire = "topk:0.01": its indices are int32, too short for a message of 8,030,261,248 elements; '
        'shorter ones need parallel.fragments, or more parallel.servers; or set parallel.wire = "int8"'
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", [*WIRES, "topk:1e-05", "powersgd:32", "topk:0.3"])
def test_a_wire_is_its_text(text: str) -> None:
    wire = Wire.parse(text)
    assert Wire.parse(str(wire)) == wire
    assert wire.exact == (text in ("none", "topk:1"))
    assert wire.lossy != wire.exact


def test_methods_with_scales_are_written_without_a_number() -> None:
    assert ("none", "bf16", *CODE_BITS) == PLAIN


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("topk:.5", "topk:0.5"),
        ("topk:1E-2", "topk:0.01"),
        ("topk:1.", "topk:1.0"),
        ("topk:1e+0", "topk:1.0"),
        ("powersgd:04", "powersgd:4"),
    ],
)
def test_two_texts_of_one_form_are_one_value(text: str, meant: str) -> None:
    assert str(Wire.parse(text)) == Parallel(wire=text).wire == meant


def test_a_run_of_another_text_of_the_same_wire_goes_on() -> None:
    """plan.json of an earlier version has the text of the config, and not what decides the losses."""
    now = planned({"parallel.wire": "powersgd:4"}, 2)
    older = {key: value for key, value in now.to_json().items() if key != "decides"}
    before, other = (plan_of(older | {"layout": older["layout"] | {"wire": f"powersgd:{r}"}}) for r in ("04", "5"))
    assert before.differing(now) == {}
    assert set(other.differing(now)) == {"parallel.wire"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "fp16", "int8:2", "none:", "INT8", "sign:", "powersgd", "powersgd:0", "powersgd:-1", "powersgd:1.5"),
        *("powersgd:1000000000", "topk: 0.1", "topk:0.1\n", "topk:1_0e-2", "topk:٠.٥", "topk:-", "topk:1e", "topk:."),
        *("powersgd:²", "topk", "topk:", "topk:0", "topk:1.01", "topk:nan", "topk:inf", "topk:-0.1", "topk:x"),
    ],
)
def test_another_text_is_refused_with_all_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"none, bf16, int8, int4, sign, powersgd:r .* topk:share") as error:
        Wire.parse(text)
    assert f"'{text}'" in str(error.value)


def test_sums_are_in_fp32_or_fp64() -> None:
    with pytest.raises(ValueError, match="not in bf16"):
        Wire.parse("int8").collectives(SHAPES, "bf16", 2)


# bytes


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_bytes_beside_an_all_reduce_of_fp32(ranks: int) -> None:
    shapes = ((4096, 256), (1024,))  # whole blocks for each of 64 ranks but 1,024 elements
    whole = Wire.parse("none").sent_bytes(shapes, "fp32", ranks)
    assert whole == 2 * (ranks - 1) / ranks * 4 * (4096 * 256 + 1024)
    shares = {"bf16": 1 / 2, "int8": (1 + 4 / BLOCK) / 4, "int4": (1 / 2 + 4 / BLOCK) / 4}
    shares["sign"] = (1 / 8 + 4 / BLOCK) / 4
    for text, share in shares.items():
        assert Wire.parse(text).sent_bytes(shapes, "fp32", ranks) / whole == pytest.approx(share, rel=0.02)
    # Gathered: each rank sends n-1 ranks' 8 bytes for each of the elements, 1 % of them.
    assert Wire.parse("topk:0.01").sent_bytes(shapes, "fp32", ranks) / whole == pytest.approx(0.01 * ranks, rel=0.01)
    factors = (4096 + 256) * 4 + 1024
    assert Wire.parse("powersgd:4").sent_bytes(shapes, "fp32", ranks) / whole == factors / (4096 * 256 + 1024)


def test_powersgd_is_exact_where_it_factors_nothing() -> None:
    shapes = [(8, 4), (4,), (4, 3, 2)]
    assert not Wire.parse("powersgd:2").exact_for(shapes)
    assert all(Wire.parse(text).exact_for(shapes) for text in ("powersgd:4", "none", "topk:1"))
    assert not Wire.parse("int8").exact_for([(4,)])


def test_one_rank_and_no_elements_send_nothing() -> None:
    for text in WIRES:
        wire = Wire.parse(text)
        for shapes, ranks in ((SHAPES, 1), ((), 4), (((0, 3), (0,)), 4)):
            assert wire.collectives(shapes, "fp32", ranks) == ()
            assert wire.state(shapes, "fp32", ranks) == ()
            assert wire.held_bytes(shapes, "fp32", ranks) == 0


def test_a_record_of_the_plan() -> None:
    (sent,) = Wire.parse("int8").collectives([(512,)], "fp32", 2)
    record = sent.traffic("dp_replicate", Verb.REDUCE, None, "gradients", stage=1)
    assert (record.collective, record.payload_bytes, record.dtype) == (Collective.ALL_GATHER, 2 * (512 + 8), "uint8")
    assert (record.what, record.stage, record.times) == ("gradients: int8", 1, 1)


def test_powersgd_factors_only_what_gets_smaller() -> None:
    found = Wire.parse("powersgd:2").factored(SHAPES)
    assert [(one.index, one.rows, one.columns) for one in found] == [(0, 40, 17), (2, 3, 55)]
    assert Wire.parse("powersgd:17").factored(SHAPES) == []
    names = {one.name: one.shape for one in Wire.parse("powersgd:2").state(SHAPES, "fp64", 3)}
    assert names == {"residual": (40 * 17 + 165,), "projector": (2 * (17 + 55),)}


# codecs


def coded(text: str, values: Tensor) -> tuple[Tensor, Tensor, bool]:
    """What a vector decodes to, padded to whole blocks; the padded vector; whether its message says it is finite."""
    wire = Wire.parse(text)
    part = wire.part(len(values), 2)
    padded = values.new_zeros(1, part)
    padded[0, : len(values)] = values
    dtype = torch.bfloat16 if text == "bf16" else torch.uint8
    message = torch.full((1, wire.message(part)), 77, dtype=dtype)
    one, found = codec(wire), torch.full_like(padded, 5.0)
    before = padded.clone()
    one.encode(padded, message, torch.empty_like(padded))
    assert torch.equal(padded, before) or before.isnan().any()
    one.decode(message, found)
    return found, padded, bool(one.finite(message))


def vectors(most: int = 700) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=most)


@given(vectors(), st.sampled_from(NARROW), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=150)
def test_errors_of_a_block_are_bounded(numbers: list[float], text: str, dtype: torch.dtype) -> None:
    found, values, finite = coded(text, torch.tensor(numbers, dtype=dtype))
    assert finite
    error = (found - values).abs().double()
    if text == "bf16":
        assert bool((error <= values.abs().double() / 256 + 1e-40).all())
        return
    blocks, error = values.view(-1, BLOCK).abs().double(), error.view(-1, BLOCK)
    if text == "sign":  # the best length for these signs; nothing is longer than before
        mean = blocks.mean(1, keepdim=True)
        assert bool((error <= (blocks - mean).abs() * (1 + 1e-5) + mean * 1e-5 + 1e-37).all())
        assert bool((error.norm(dim=1) <= blocks.norm(dim=1) * (1 + 1e-5) + 1e-36).all())
        return
    scale = blocks.amax(1, keepdim=True) / (127 if text == "int8" else 7)
    assert bool((error <= scale * (0.5 + 1e-4) + (scale < 1.2e-38) * 127 * 1.2e-38).all())


@given(st.integers(1, 600), st.integers(0, 2**31), st.sampled_from(("int8", "int4")))
def test_codes_themselves_return_unchanged(numel: int, seed: int, text: str) -> None:
    top = 127 if text == "int8" else 7
    values = torch.randint(-top, top + 1, (numel,), generator=torch.Generator().manual_seed(seed)).float()
    values[::BLOCK] = top  # so that each scale is 1
    found, padded, _ = coded(text, values)
    assert torch.equal(found, padded)


@given(st.integers(1, 600), st.integers(0, 2**31))
def test_signs_of_any_length_return_unchanged(numel: int, seed: int) -> None:
    values = torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1
    found, padded, _ = coded("sign", values)
    assert torch.equal(found[0, :numel].sign(), padded[0, :numel])
    whole = numel // BLOCK * BLOCK
    assert torch.equal(found[0, :whole], padded[0, :whole])


@pytest.mark.parametrize(("text", "dtype"), list(product(NARROW, (torch.float32, torch.float64))))
def test_zeros_and_the_smallest_numbers(text: str, dtype: torch.dtype) -> None:
    values = torch.zeros(3 * BLOCK, dtype=dtype)
    values[BLOCK + 3] = 1e-40  # the inverse of such a scale is infinite in fp32
    values[2 * BLOCK] = 3.0
    found, _, finite = coded(text, values)
    assert finite
    assert bool(found.isfinite().all())
    assert found[0, :BLOCK].abs().max() == 0
    assert found[0, BLOCK : 2 * BLOCK].abs().max() <= (1.1e-40 if text == "bf16" else 0)
    assert found[0, 2 * BLOCK] > 0
    if text != "sign":
        assert found[0, 2 * BLOCK] == pytest.approx(3.0)


@given(st.integers(1, 600), st.data(), st.sampled_from(NARROW), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_stays_so(numel: int, data: st.DataObject, text: str, bad: float) -> None:
    values = torch.randn(numel)
    place = data.draw(st.integers(0, numel - 1))
    values[place] = bad
    found, _, finite = coded(text, values)
    assert not finite
    assert not found[0, place].isfinite()


@given(st.integers(1, 3000), st.floats(0.001, 1), st.integers(0, 2**31), st.booleans())
def test_the_largest_elements(numel: int, share: float, seed: int, ties: bool) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    values = values.round() if ties else values
    count = Wire.parse(f"topk:{share}").top(numel)
    indices = largest(values, count, torch.empty_like(values))
    assert len(set(indices.tolist())) == len(indices) == count
    assert torch.equal(values[indices].abs().sort().values, values.abs().topk(count).values.sort().values)


@pytest.mark.parametrize("skewed", [False, True])
def test_the_largest_of_many_elements(skewed: bool) -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    if skewed:  # the sample sees large elements alone: the threshold is too high, so that all are looked at
        values[::61] *= 100
    indices = largest(values, 2000, torch.empty_like(values))
    assert torch.equal(values[indices].abs().sort().values, values.abs().topk(2000).values.sort().values)
    values[777] = math.nan
    assert 777 in largest(values, 2000, torch.empty_like(values))


# sums on ranks


@RANKS
def test_all_ranks_get_the_same_bits(sums: Sums, ranks: int, dtype: str) -> None:
    found = sums(ranks, dtype)
    for text in WIRES:
        assert all(one[text]["bits"] == found[0][text]["bits"] for one in found), text
        assert all(one[text]["begins"] == found[0][text]["begins"] for one in found), text
        assert len(set(found[0][text]["bits"])) == STEPS, text
    assert found[0]["none"]["bits"] == found[0]["plain"]
    assert found[0]["int8"]["bits"] != found[0]["plain"]


@RANKS
def test_a_loaded_state_goes_on_with_the_same_bits(sums: Sums, ranks: int, dtype: str) -> None:
    for one, text in product(sums(ranks, dtype), WIRES):
        assert one[text]["resumed"] == one[text]["bits"][STEPS // 2 :], text


@RANKS
def test_state_is_what_the_wire_declares(sums: Sums, ranks: int, dtype: str) -> None:
    for one, text in product(sums(ranks, dtype), WIRES):
        declared = Wire.parse(text).state(SHAPES, dtype, ranks)
        wanted = {state.name: [list(state.shape), f"torch.{TORCH[state.dtype]}"] for state in declared}
        assert one[text]["shapes"] == wanted, text
        assert bool(wanted) == (Wire.parse(text).lossy and text != "powersgd:99"), text
        assert one[text]["held"] == Wire.parse(text).held_bytes(SHAPES, dtype, ranks), text


@RANKS
def test_issued_is_what_the_wire_declares(sums: Sums, ranks: int, dtype: str) -> None:
    for one, text in product(sums(ranks, dtype), WIRES):
        assert one[text]["issued"] == declared(text, dtype, ranks), text


@pytest.mark.parametrize("ranks", [8, 64])
def test_issued_on_many_ranks(forker: Forker, tmp_path: Path, ranks: int) -> None:
    options = {"wires": WIRES, "shapes": SHAPES, "dtype": "fp32", "world_size": ranks}
    (found,) = forker.call("wire_ranks:on_fake_ranks", tmp_path, **options)
    for text in WIRES:
        assert found[text] == [declared(text, "fp32", ranks)] * 2, text


def declared(text: str, dtype: str, ranks: int) -> list[list[Any]]:
    return [
        [str(sent.collective), list(range(ranks)), sent.payload_bytes, TORCH[sent.dtype], str(Verb.REDUCE)]
        for sent in Wire.parse(text).collectives(SHAPES, dtype, ranks)
        for _ in range(sent.times)
    ]


@RANKS
def test_what_is_not_finite_reaches_all_ranks_and_no_residual(sums: Sums, ranks: int, dtype: str) -> None:
    for one, text in product(sums(ranks, dtype), WIRES):
        assert one[text]["poisoned"] == [True, True], text
        assert one[text]["state is as before"], text


def wanted_sum(ranks: int, dtype: str) -> Tensor:
    """The sum of all that ranks have given in all steps."""
    vectors = [flat(given_by(SHAPES, rank, step, dtype)).double() for rank in range(ranks) for step in range(STEPS)]
    return torch.stack(vectors).sum(0)


@RANKS
def test_given_is_delivered_or_kept(sums: Sums, ranks: int, dtype: str) -> None:
    """Sum of all that was delivered + residuals of ranks and owners = sum of all that was given."""
    found, wanted = sums(ranks, dtype), wanted_sum(ranks, dtype)
    near = 1e-9 if dtype == "fp64" else 2e-4
    for text in WIRES:
        wire = Wire.parse(text)
        total = torch.tensor(found[0][text]["delivered"], dtype=torch.float64)
        unsent = torch.zeros(NUMEL, dtype=torch.float64)
        for rank, one in enumerate(found):
            kept = {name: torch.tensor(values, dtype=torch.float64) for name, values in one[text]["kept"].items()}
            if wire.method == "powersgd" and kept:
                unsent[:680] += kept["residual"][:680]
                unsent[697:862] += kept["residual"][680:]
            elif kept:
                unsent += kept["residual"]
            if "owner_residual" in kept:
                part = wire.part(NUMEL, ranks)
                mine = unsent[rank * part : (rank + 1) * part]
                mine += kept["owner_residual"][: len(mine)]
                assert not kept["owner_residual"][len(mine) :].any()
        assert float((total + unsent - wanted).abs().max()) < near * float(wanted.abs().max()), text
        assert (float(unsent.abs().max()) > 1e-3) == bool(wire.state(SHAPES, dtype, ranks)), text


@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_wires_are_exact(sums: Sums, ranks: int) -> None:
    wanted = wanted_sum(ranks, "fp64")
    for text in ("none", "topk:1", "powersgd:99"):
        delivered = torch.tensor(sums(ranks, "fp64")[0][text]["delivered"], dtype=torch.float64)
        assert float((delivered - wanted).abs().max()) < 1e-9, text


@pytest.mark.parametrize("ranks", [2, 3])
def test_matrices_with_a_sum_of_low_rank_arrive_exactly(forker: Forker, tmp_path: Path, ranks: int) -> None:
    options = {"text": "powersgd:4", "rows": 40, "columns": 30, "true_rank": 4}
    for found in forker.call("wire_ranks:low_rank", tmp_path, ranks, **options):
        assert max(found) < 1e-9
    options["true_rank"] = 8
    for found in forker.call("wire_ranks:low_rank", tmp_path, ranks, **options):
        assert min(found) > 1e-2


def test_powersgd_goes_on_from_the_last_right_factors(forker: Forker, tmp_path: Path) -> None:
    for found in forker.call("wire_ranks:warm_start", tmp_path, 2, text="powersgd:4", rows=40, columns=30):
        assert max(found) < 1e-9


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_delivered_approaches_what_is_given(forker: Forker, tmp_path: Path, ranks: int) -> None:
    """A residual is bounded, so the error of the mean of T sums falls like 1/T.

    A contraction by d (error <= d |x|, in the largest element) keeps |residual| <= d / (1 - d) |g|. The owner adds
    n (1 + d) / (1 - d) |g| to its residual and keeps at most d / (1 - d) of that.
    """
    steps = 40
    limits = {"bf16": 1 / 256, "int8": 1 / 254, "int4": 1 / 14}
    options = {"wires": (*limits, "sign", "topk:0.1"), "numel": 1000, "steps": steps}
    for found in forker.call("wire_ranks:constant", tmp_path, ranks, **options):
        for text, d in limits.items():
            kept = ranks * d / (1 - d)
            bound = kept + (kept * (1 + d) / (1 - d) if ranks > 2 else 0.0)
            assert 0 < found[text] < bound * 1.01, text
        # No such bound in the largest element: less than half of what 40 lost sums of the largest element would be.
        assert 0 < found["sign"] < steps * ranks / 2
        assert 0 < found["topk:0.1"] < steps * ranks / 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_beside_other_work(forker: Forker, tmp_path: Path, ranks: int) -> None:
    options = {"wires": WIRES, "shapes": SHAPES, "steps": 3}
    for found in forker.call("wire_ranks:beside", tmp_path, ranks, **options):
        for text in WIRES:
            started, blocking, states = found[text]
            assert started == blocking, text
            assert len(set(started)) == 6
            assert states, text


@pytest.mark.parametrize("text", ["int8", "powersgd:2"])
def test_a_profile_names_collectives_of_the_thread(forker: Forker, tmp_path: Path, text: str) -> None:
    for names in forker.call("wire_ranks:profiled", tmp_path, 3, text=text, shapes=SHAPES):
        kinds = [sent.collective for sent in Wire.parse(text).collectives(SHAPES, "fp32", 3)]
        assert names == [collective_name(kind, "dp_replicate") for kind in kinds]


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_waits_for_the_device(forker: Forker, tmp_path: Path, ranks: int) -> None:
    options = {"wires": WIRES, "shapes": SHAPES, "world_size": ranks}
    assert forker.call("wire_ranks:waits_for_no_device", tmp_path, **options) == [list(WIRES)]


def test_an_error_of_the_thread_is_raised_where_it_is_awaited(forker: Forker, tmp_path: Path) -> None:
    said, _ = forker.call("wire_ranks:fails", tmp_path, 2)
    assert len(said) == 5
    assert said[0] == "one error"  # the thread does not try the second sum on a broken group
    assert said[1]
    assert "(999,)" in said[2]
    assert "float64" in said[3]
    assert "shapes []" in said[4]


def test_one_rank_alone(forker: Forker, tmp_path: Path) -> None:
    assert forker.call("wire_ranks:alone", tmp_path, wires=WIRES) == [[True] * len(WIRES)]


@pytest.mark.parametrize("ranks", [3, 4])
def test_fewer_elements_than_ranks(forker: Forker, tmp_path: Path, ranks: int) -> None:
    options = {"wires": WIRES, "shapes": ((2,), (0, 4)), "dtype": "fp64", "steps": 2}
    found = forker.call("wire_ranks:sums", tmp_path, ranks, **options)
    for text in WIRES:
        assert all(one[text]["bits"] == found[0][text]["bits"] for one in found), text
        assert all(any(one[text]["poisoned"]) and one[text]["state is as before"] for one in found), text


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_in_pieces_have_the_same_bits_and_bytes(forker: Forker, tmp_path: Path, ranks: int) -> None:
    options = {"wires": ("bf16", "int4", "sign", "topk:0.3"), "shapes": SHAPES, "piece_bytes": 96}
    for rank in forker.call("wire_ranks:in_pieces", tmp_path, ranks, **options):
        for text, found in rank.items():
            assert len(set(found["bits"])) == 1, text
            whole, pieces = found["sizes"]
            assert sum(pieces) == sum(whole)
            assert len(pieces) > len(whole)
            assert max(pieces) <= 96 * ranks


def test_a_rank_that_ends_by_an_error_does_not_wait_for_a_sum_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks of the sum may wait for this one (decision 19)."""
    channel, ended = Channel(torch.device("cpu")), threading.Event()
    channel.start(ended.wait)
    thread = channel.thread
    assert thread is not None
    monkeypatch.setattr(wire_module, "is_failing", lambda: True)
    channel.close()
    assert thread.is_alive()
    ended.set()
    thread.join()


def test_powersgd_finds_small_gradients_again() -> None:
    """Its right factors keep the norm 1 from sum to sum: products with gradients of 1e-21 keep their digits."""
    exchanges: Any = SimpleNamespace(all_reduce=lambda values, group: None)  # the others have zeros
    wire, shapes = Wire.parse("powersgd:1"), [(6, 5)]
    state = {one.name: torch.zeros(one.shape) for one in wire.state(shapes, "fp32", 2)}
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    one = PowerSGD(wire, shapes, group, state, torch.empty(0))
    rows, columns = (torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (6, 5))
    gradient = torch.outer(rows, columns) * 1e-21
    for _ in range(3):
        summed = gradient.clone()
        one.sum_([summed], exchanges)
        assert float((summed - gradient).double().norm()) < 1e-5 * float(gradient.double().norm())
