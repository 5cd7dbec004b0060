"""In: schedules by name, for the p, m and v that they admit. Out: lists that are whole, in order, without deadlock.
Does not time them: test_cost_simulate does."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.plan import RECEIVES, SENDS, Instruction, Layout, Mesh, ModelFacts, Plan, TaskFacts, Verb, Work
from codescent.plan.pipeline import SCHEDULES, cut, pipeline, refusals
from codescent.plan.schedule import accumulate

Sizes = tuple[str, int, int, int]
ADDS_GRADIENTS = (Verb.BACKWARD, Verb.BACKWARD_WEIGHT)


@st.composite
def admitted(draw: st.DrawFn) -> Sizes:
    """Name, p, m, v."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    if name == "interleaved":
        num_stages = draw(st.integers(2, 6))
        return name, num_stages, num_stages * draw(st.integers(1, 4)), draw(st.integers(2, 4))
    return name, draw(st.integers(1, 8)), draw(st.integers(1, 20)), 1


def messages(program: tuple[Instruction, ...], stage: int, num_stages: int) -> Iterator[tuple[int, int, tuple]]:
    """(from stage, to stage, what) of each send and receive; what: the sender's verb and virtual stage, micro-batch."""
    for at in program:
        if at.verb in SENDS:
            yield stage, at.peer, (at.verb, at.chunk * num_stages + stage, at.microbatch)
        elif at.verb is Verb.RECEIVE_ACTIVATION:
            yield at.peer, stage, (Verb.SEND_ACTIVATION, at.chunk * num_stages + stage - 1, at.microbatch)
        elif at.verb is Verb.RECEIVE_GRADIENT:
            yield at.peer, stage, (Verb.SEND_GRADIENT, at.chunk * num_stages + stage + 1, at.microbatch)


@given(admitted())
def test_every_micro_batch_goes_forward_and_back_once_through_every_chunk(sizes: Sizes) -> None:
    name, _, num_microbatches, num_chunks = sizes
    expected = sorted((chunk, k) for chunk in range(num_chunks) for k in range(num_microbatches))
    backward = (Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT) if name == "zero-bubble" else (Verb.BACKWARD,)
    for program in pipeline(*sizes).programs:
        for verb in (Verb.FORWARD, *backward):
            assert sorted((at.chunk, at.microbatch) for at in program if at.verb is verb) == expected
        for chunk, k in expected:
            of_pair = [at.verb for at in program if (at.chunk, at.microbatch) == (chunk, k)]
            assert [verb for verb in of_pair if verb in (Verb.FORWARD, *backward)] == [Verb.FORWARD, *backward]
        assert [at.verb for at in program[-2:]] == [Verb.REDUCE, Verb.STEP]


@given(admitted())
def test_last_marks_where_the_gradients_of_each_chunk_are_complete(sizes: Sizes) -> None:
    for program in pipeline(*sizes).programs:
        marked = {at.chunk: at for at in program if at.last}
        adding = {at.chunk: at for at in program if at.verb in ADDS_GRADIENTS}  # the last one of each chunk stays
        assert marked == adding
        assert sum(at.last for at in program) == sizes[3]


@given(admitted(), st.integers(0, 9))
def test_every_depth_is_computed_by_the_stage_whose_chunk_has_it(sizes: Sizes, more: int) -> None:
    _, num_stages, _, num_chunks = sizes
    parts = num_stages * num_chunks
    schedule = replace(pipeline(*sizes), depths=cut((1.0,) * (parts + more), parts))
    for stage in range(num_stages):
        for depth in chain.from_iterable(schedule.parts(stage)):
            assert schedule.stages_of([depth]) == (stage,)
    assert sum(len(part) for stage in range(num_stages) for part in schedule.parts(stage)) == parts + more


@given(st.lists(st.integers(1, 9).map(float), min_size=1, max_size=7), st.data())
def test_a_cut_has_the_least_maximum_and_then_the_least_squares(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))

    def price(begins: Sequence[int]) -> tuple[float, float]:
        sums = [sum(costs[first:stop]) for first, stop in zip(begins, [*begins[1:], len(costs)], strict=True)]
        return max(sums), sum(of * of for of in sums)

    found = cut(tuple(costs), parts)
    assert [stop for _, stop in found] == [*(first for first, _ in found[1:]), len(costs)]
    every = ((0, *begins) for begins in combinations(range(1, len(costs)), parts - 1))
    assert price([first for first, _ in found]) == pytest.approx(min(map(price, every)))


@given(admitted())
def test_gradients_are_summed_in_the_order_of_the_micro_batches(sizes: Sizes) -> None:
    _, _, num_microbatches, num_chunks = sizes
    for program in pipeline(*sizes).programs:
        for chunk in range(num_chunks):
            order = [at.microbatch for at in program if at.verb in ADDS_GRADIENTS and at.chunk == chunk]
            assert order == list(range(num_microbatches))


@given(admitted())
def test_the_first_stage_loads_tokens_and_the_last_one_targets(sizes: Sizes) -> None:
    _, num_stages, num_microbatches, num_chunks = sizes
    for stage, program in enumerate(pipeline(*sizes).programs):
        for place, at in enumerate(program):
            if at.verb is Verb.LOAD:
                following = program[place + 1]
                assert (following.verb, following.microbatch, following.chunk) == (
                    Verb.FORWARD,
                    at.microbatch,
                    at.chunk,
                )
        loads = sorted((at.chunk, at.microbatch) for at in program if at.verb is Verb.LOAD)
        chunks = {0: 0, num_stages - 1: num_chunks - 1}
        expected = [(chunks[stage], k) for k in range(num_microbatches)] if stage in chunks else []
        assert loads == expected


@given(admitted())
def test_both_ends_of_every_channel_have_the_same_messages_in_the_same_order(sizes: Sizes) -> None:
    _, num_stages, num_microbatches, num_chunks = sizes
    sent: dict[tuple[int, int], list] = {}
    received: dict[tuple[int, int], list] = {}
    for stage, program in enumerate(pipeline(*sizes).programs):
        for source, to, what in messages(program, stage, num_stages):
            (sent if source == stage else received).setdefault((source, to), []).append(what)
    assert sent == received
    total = sum(len(channel) for channel in sent.values())
    assert total == 2 * (num_stages * num_chunks - 1) * num_microbatches


@given(admitted())
def test_lists_end_where_every_send_waits_for_its_receive(sizes: Sizes) -> None:
    """A referee that knows nothing of time: a message passes when it is what both its stages are at."""
    _, num_stages, _, _ = sizes
    rest = [list(messages(program, stage, num_stages)) for stage, program in enumerate(pipeline(*sizes).programs)]
    while any(rest):
        ready = [heads[0] for heads in rest if heads]
        passing = next((head for head in ready if ready.count(head) == 2), None)
        assert passing is not None, f"all wait: {ready}"
        for heads in rest:
            if heads and heads[0] == passing:
                heads.pop(0)


@given(admitted())
def test_what_is_computed_has_been_received_and_what_is_sent_has_been_computed(sizes: Sizes) -> None:
    _, num_stages, _, num_chunks = sizes
    for stage, program in enumerate(pipeline(*sizes).programs):
        place = {(at.verb, at.chunk, at.microbatch): index for index, at in enumerate(program)}
        for (verb, chunk, k), index in place.items():
            virtual = chunk * num_stages + stage
            if verb is Verb.FORWARD and virtual > 0:
                assert place[Verb.RECEIVE_ACTIVATION, chunk, k] < index
            if verb in (Verb.BACKWARD, Verb.BACKWARD_INPUT) and virtual < num_stages * num_chunks - 1:
                assert place[Verb.RECEIVE_GRADIENT, chunk, k] < index
            if verb is Verb.SEND_ACTIVATION:
                assert place[Verb.FORWARD, chunk, k] < index
            if verb is Verb.SEND_GRADIENT:
                computed = [place.get((part, chunk, k)) for part in (Verb.BACKWARD, Verb.BACKWARD_INPUT)]
                assert max(at for at in computed if at is not None) < index
        assert sum(at.verb in RECEIVES for at in program) == sum(verb in RECEIVES for verb, _, _ in place)


@given(st.sampled_from(["naive", "1f1b"]), st.integers(1, 9))
def test_one_stage_accumulates(name: str, num_microbatches: int) -> None:
    assert pipeline(name, 1, num_microbatches).programs == accumulate(num_microbatches).programs


def test_1f1b_on_two_stages_in_full() -> None:
    first, second = pipeline("1f1b", 2, 2).programs
    assert [str(at) for at in first] == [
        *("load 0", "forward 0", "send_activation 0 to stage 1"),
        *("load 1", "forward 1", "send_activation 1 to stage 1"),
        *("receive_gradient 0 from stage 1", "backward 0"),
        *("receive_gradient 1 from stage 1", "backward 1", "reduce", "step"),
    ]
    assert [str(at) for at in second] == [
        *("receive_activation 0 from stage 0", "load 0", "forward 0"),
        *("receive_activation 1 from stage 0", "backward 0", "send_gradient 0 to stage 0"),
        *("load 1", "forward 1", "backward 1", "send_gradient 1 to stage 0", "reduce", "step"),
    ]


def test_zero_bubble_puts_weight_parts_off_by_the_stage() -> None:
    short = {Verb.FORWARD: "F", Verb.BACKWARD_INPUT: "B", Verb.BACKWARD_WEIGHT: "W"}
    lists = [
        " ".join(f"{short[at.verb]}{at.microbatch}" for at in program if at.verb in short)
        for program in pipeline("zero-bubble", 3, 4).programs
    ]
    assert lists == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_interleaved_takes_p_micro_batches_through_a_chunk_at_a_time() -> None:
    first = pipeline("interleaved", 2, 4, 2).programs[0]
    forwards = [(at.microbatch, at.chunk) for at in first if at.verb is Verb.FORWARD]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert str(next(at for at in first if at.verb in RECEIVES)) == "receive_activation 0 of chunk 1 from stage 1"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (("pipedream", 2, 4, 1), "there is naive, gpipe, 1f1b, interleaved, zero-bubble"),
        (("1f1b", 0, 4, 1), "0 pipeline stages; the least is 1"),
        (("gpipe", 2, 0, 1), "0 micro-batches; the least is 1"),
        (("zero-bubble", 2, 4, 2), 'parallel.virtual_stages = 1, or parallel.schedule = "interleaved"'),
        (("interleaved", 2, 4, 1), 'nearest that would do: parallel.virtual_stages = 2, or parallel.schedule = "1f1b"'),
        (("interleaved", 1, 4, 2), "1 pipeline stage has no neighbour"),
        (("interleaved", 4, 6, 2), "6 micro-batches are no multiple of 4 pipeline stages"),
    ],
)
def test_what_a_schedule_does_not_admit_is_said(sizes: Sizes, words: str) -> None:
    assert [words in problem for problem in refusals(*sizes)] == [True]
    with pytest.raises(ValueError, match=re.escape(words)):
        pipeline(*sizes)


@given(st.integers(2, 9), st.integers(1, 40), st.integers(2, 4))
def test_interleaved_names_the_nearest_numbers_of_micro_batches(p: int, m: int, v: int) -> None:
    problems = list(refusals("interleaved", p, m, v))
    assert bool(problems) == (m % p != 0)
    for problem in problems:
        nearest = [int(number) for number in re.findall(r"\d+", problem.partition("pipeline stages (")[2])]
        assert [list(refusals("interleaved", p, near, v)) for near in nearest] == [[]] * len(nearest)
        assert nearest == [near for near in (m // p * p, m // p * p + p) if near]


def test_a_plan_with_stages_round_trips_and_one_of_before_them_still_loads() -> None:
    model, task, work = ModelFacts("gpt2", 2, 8, 2, 2, 4, 11), TaskFacts("lm"), Work(16, 8, 2, 4, "fp32")
    plan = Plan(Mesh(pp=2), model, task, work, Layout(), (), pipeline("interleaved", 2, 4, 2))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    before = Plan(Mesh(), model, task, work, Layout(), (), accumulate(2))
    data = before.to_json()
    for at in data["schedule"]["programs"][0]:
        del at["chunk"], at["peer"]
    assert Plan.from_json(data) == before
    del data["work"]["seq_len"]
    with pytest.raises(TypeError, match="seq_len"):
        Plan.from_json(data)


def test_python_looks_for_cycles_again_after_a_schedule() -> None:
    """A program whose memory grows, because a schedule was built in it."""
    assert gc.isenabled()
    pipeline("1f1b", 3, 7)
    assert gc.isenabled()
    gc.disable()
    try:
        pipeline("1f1b", 3, 8)
        assert not gc.isenabled()
    finally:
        gc.enable()
