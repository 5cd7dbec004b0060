"""In: schedules and costs. Out: a simulated step with the field's closed forms, every second accounted for.
Does not run anything on a device: the lists alone are walked, wrong ones too, whose deadlocks are named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codescent.cost.simulate import Costs, Deadlock, Sends, Simulation, simulate
from codescent.plan import SENDS, Instruction, Schedule, Verb
from codescent.plan.pipeline import SCHEDULES, pipeline
from codescent.plan.schedule import accumulate

EXACT = 1e-6
seconds = st.floats(0.1, 10.0)
stages, microbatches = st.integers(1, 8), st.integers(1, 20)


def run(name: str, p: int, m: int, v: int = 1, *, sends: Sends = Sends.BUFFERED, **costs: Any) -> Simulation:
    return simulate(pipeline(name, p, m, v), Costs(**costs), sends)


HEAVY_LAST = {"forward_s": (1.0, 1.0, 1.0, 1.5), "backward_s": (2.0, 2.0, 2.0, 3.0)}


@pytest.mark.parametrize(
    ("sizes", "costs", "makespan", "bubble"),
    [
        (("gpipe", 4, 8), {}, 33.0, 0.272727),
        (("1f1b", 4, 8), {}, 33.0, 0.272727),
        (("1f1b", 8, 64), {}, 213.0, 0.098592),
        (("interleaved", 4, 8, 2), {"forward_s": 0.5, "backward_s": 1.0}, 28.5, 0.157895),
        (("1f1b", 4, 8), {"latency_s": 0.1}, 34.6, 0.306358),
        (("1f1b", 4, 8), {"transfer_s": 0.1}, 34.6, 0.306358),
        (("1f1b", 4, 16), HEAVY_LAST, 81.0, 0.111111),
        (("1f1b", 8, 32), {"latency_s": 0.1}, 123.8, 0.224556),
    ],
)
def test_golden_makespans(sizes: tuple, costs: dict, makespan: float, bubble: float) -> None:
    """The rows `pipeline_dag` of the planner's reference data (measured_runs.json), which another simulation made.

    The last one is of its text. A message costs the receiver 0.1 and the sender nothing; the bubble is the share of the
    makespan beyond the busiest stage's work.
    """
    simulation = run(*sizes, **costs)
    assert simulation.makespan_s == pytest.approx(makespan, abs=EXACT)
    assert simulation.bubble_of_total == pytest.approx(bubble, abs=EXACT)


@given(stages, microbatches, seconds, seconds)
def test_closed_forms_of_naive_gpipe_and_1f1b(p: int, m: int, f: float, b: float) -> None:
    costs = {"forward_s": f, "backward_s": b}
    assert run("naive", p, m, **costs).makespan_s == pytest.approx(m * p * (f + b), rel=EXACT)
    for name in ("gpipe", "1f1b"):
        simulation = run(name, p, m, **costs)
        assert simulation.makespan_s == pytest.approx((m + p - 1) * (f + b), rel=EXACT)
        assert simulation.bubble_of_ideal == pytest.approx((p - 1) / m, abs=EXACT)
        assert simulation.bubble_of_total == pytest.approx((p - 1) / (m + p - 1), abs=EXACT)


@given(stages, microbatches, seconds, seconds, st.floats(0, 5))
def test_gpipe_waits_for_messages_in_filling_and_draining_only(p: int, m: int, f: float, b: float, c: float) -> None:
    expected = (m + p - 1) * (f + b) + 2 * (p - 1) * c
    assert run("gpipe", p, m, forward_s=f, backward_s=b, latency_s=c).makespan_s == pytest.approx(expected, rel=EXACT)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), seconds, seconds)
def test_closed_form_of_interleaved(p: int, groups: int, v: int, f: float, b: float) -> None:
    """f and b are those of a stage; each of its v chunks takes a v-th of them."""
    m = groups * p
    simulation = run("interleaved", p, m, v, forward_s=f / v, backward_s=b / v)
    assert simulation.makespan_s == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v, rel=EXACT)
    assert simulation.bubble_of_ideal == pytest.approx((p - 1) / (v * m), abs=EXACT)


@given(st.integers(1, 8), st.integers(0, 12), seconds, seconds, st.floats(0.01, 1))
def test_closed_form_of_zero_bubble(p: int, more: int, f: float, x: float, share: float) -> None:
    """Holds from m = p on, with weight parts that take no longer than forward passes and input parts."""
    m, w = p + more, share * min(f, x)
    simulation = run("zero-bubble", p, m, forward_s=f, backward_input_s=x, backward_weight_s=w)
    assert simulation.makespan_s == pytest.approx(m * (f + x + w) + (p - 1) * (f + x - w), rel=EXACT)


@given(stages, microbatches)
def test_live_micro_batches_are_those_of_the_formulas(p: int, m: int) -> None:
    def peaks(name: str) -> list[int]:
        return [stage.peak_live for stage in run(name, p, m).stages]

    assert peaks("naive") == [1] * p
    assert peaks("gpipe") == [m] * p
    assert peaks("1f1b") == [min(m, p - i) for i in range(p)]
    assert peaks("zero-bubble") == [min(m, p)] * p


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_live_chunks_of_interleaved(p: int, groups: int, v: int) -> None:
    m = groups * p
    expected = [min(m * v, 2 * (p - 1 - i) + (v - 1) * p + 1) for i in range(p)]
    assert [stage.peak_live for stage in run("interleaved", p, m, v).stages] == expected
    if groups > 1:  # FORMULAS: 1 + (p - 1) / (p v) times the activations of p micro-batches of a stage
        assert expected[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """Any schedule, each virtual stage and each verb at a cost of its own."""
    name, p, m, v = draw(st.sampled_from(sorted(SCHEDULES))), draw(st.integers(1, 5)), draw(st.integers(1, 10)), 1
    if name == "interleaved":
        p, v = max(p, 2), draw(st.integers(2, 3))
        m = p * draw(st.integers(1, 3))
    each = st.tuples(*[st.floats(0, 5)] * (p * v))
    costs = Costs(*(draw(each) for _ in range(5)), draw(st.floats(0, 5)), *(draw(each) for _ in range(3)))
    return pipeline(name, p, m, v), costs


@given(cases(), st.sampled_from(Sends))
def test_every_list_is_walked_in_order_and_every_second_accounted_for(
    case: tuple[Schedule, Costs], sends: Sends
) -> None:
    schedule, costs = case
    simulation = simulate(schedule, costs, sends)
    for index, (program, stage) in enumerate(zip(schedule.programs, simulation.stages)):
        spans = [span for span in simulation.timeline if span.stage == index]
        assert tuple(span.instruction for span in spans) == program
        assert all(before.end_s <= after.start_s for before, after in zip(spans, spans[1:]))
        parts = stage.busy_s + stage.data_wait_s + stage.comm_wait_s + stage.idle_end_s
        assert parts == pytest.approx(simulation.makespan_s, rel=EXACT)
        work = sum(span.end_s - span.start_s for span in spans if span.instruction.peer is None)
        assert stage.busy_s == pytest.approx(work, rel=EXACT, abs=EXACT)
    assert simulation.ideal_s <= simulation.makespan_s * (1 + EXACT)


@given(cases())
def test_nothing_is_computed_before_what_it_reads_has_arrived(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    p, timeline = len(schedule.programs), simulate(schedule, costs).timeline
    end = {
        (at.instruction.verb, at.stage, at.instruction.chunk, at.instruction.microbatch): at.end_s for at in timeline
    }
    for span in timeline:
        at = span.instruction
        if at.verb is Verb.FORWARD and (at.chunk, span.stage) != (0, 0):
            chunk, stage = divmod(at.chunk * p + span.stage - 1, p)
            made = end[Verb.FORWARD, stage, chunk, at.microbatch]
            assert span.start_s >= made + costs.latency_s + costs.transfer_s[chunk * p + stage] - EXACT  # type: ignore[index]


@given(st.sampled_from(["naive", "gpipe", "1f1b", "zero-bubble"]), stages, microbatches)
def test_sends_that_block_cost_no_time_where_messages_take_none(name: str, p: int, m: int) -> None:
    assert run(name, p, m, sends=Sends.BLOCKING).makespan_s == run(name, p, m).makespan_s


@given(cases())
def test_the_more_must_be_waited_for_the_longer_it_takes(case: tuple[Schedule, Costs]) -> None:
    buffered, posted, blocking = (simulate(*case, sends).makespan_s for sends in Sends)
    assert buffered <= posted * (1 + EXACT)
    assert posted <= blocking * (1 + EXACT)


@pytest.mark.parametrize(
    ("sizes", "makespans"),
    [
        (("gpipe", 8, 32), [118.4, 124.6, 131.8]),
        (("1f1b", 8, 32), [123.8, 124.4, 131.7]),
        (("interleaved", 8, 32, 2), [216.0, 219.5, 327.9]),
        (("zero-bubble", 8, 32), [105.8, 108.1, 117.8]),
    ],
)
def test_what_docs_schedules_says_of_the_three_ways_to_send(sizes: tuple, makespans: list[float]) -> None:
    assert [run(*sizes, sends=sends, latency_s=0.1).makespan_s for sends in Sends] == pytest.approx(
        makespans, abs=EXACT
    )


def test_a_posted_message_leaves_when_its_receive_is_reached() -> None:
    """The second receive stands behind a backward pass: its message, sent at 2, leaves at 5 and is there at 6."""
    first = program("forward 0", "send_activation 0 1", "forward 1", "send_activation 1 1", "receive_gradient 0 1")
    second = program("receive_activation 0 0", "forward 0", "backward 0", "send_gradient 0 0", "receive_activation 1 0")
    lists = Schedule((first, (*second, *program("forward 1"))))
    ends = {sends: simulate(lists, Costs(latency_s=1.0), sends).makespan_s for sends in (Sends.BUFFERED, Sends.POSTED)}
    assert ends == {Sends.BUFFERED: 6.0, Sends.POSTED: 7.0}


def test_messages_of_one_link_leave_one_after_the_other() -> None:
    """Four activations of 10 s each: the last arrives at 41; four gradients after the backward passes from 42 on."""
    assert run("gpipe", 2, 4, transfer_s=10.0).makespan_s == 44 + 4 * 10 + 2
    assert run("gpipe", 2, 4, latency_s=10.0).makespan_s == (4 + 1) * 3 + 2 * 10


def test_waiting_is_split_into_data_and_communication() -> None:
    """F on stage 0 to 1, message to 1.5, F and B on stage 1 to 4.5, message to 5, B on stage 0 to 7; reduce, step."""
    simulation = run("1f1b", 2, 1, latency_s=0.2, transfer_s=0.3, reduce_s=(1.0, 2.0), step_s=0.5)
    first, second = simulation.stages
    assert simulation.makespan_s == pytest.approx(8.5)
    assert (first.busy_s, first.data_wait_s, first.comm_wait_s, first.idle_end_s) == pytest.approx((4.5, 3.5, 0.5, 0))
    assert (second.busy_s, second.data_wait_s, second.comm_wait_s, second.idle_end_s) == pytest.approx(
        (5.5, 1.0, 0.5, 1.5)
    )
    blocking = run("1f1b", 2, 1, sends=Sends.BLOCKING, latency_s=0.2, transfer_s=0.3)
    assert [stage.comm_wait_s for stage in blocking.stages] == pytest.approx([1.0, 1.0])


def test_one_stage_is_accumulation() -> None:
    simulation = simulate(accumulate(3), Costs(load_s=0.5, reduce_s=1.0, step_s=2.0))
    assert simulation.makespan_s == 3 * 3.5 + 3
    assert (simulation.bubble_of_total, simulation.bubble_of_ideal) == (0, 0)
    assert simulation.stages[0].peak_live == 1


def program(*words: str) -> tuple[Instruction, ...]:
    """Instructions from "verb microbatch [peer]"."""
    split = (word.split() for word in words)
    return tuple(Instruction(Verb(w[0]), int(w[1]), peer=int(w[2]) if w[2:] else None) for w in split)


def test_a_deadlock_is_named() -> None:
    """1F1B where both neighbours send before they receive: what buffered sends allow, and blocking ones do not."""
    first = program("forward 0", "send_activation 0 1", "forward 1", "send_activation 1 1", "receive_gradient 0 1")
    second = program("receive_activation 0 0", "forward 0", "backward 0", "send_gradient 0 0", "receive_activation 1 0")
    crossing = Schedule(((*first, *program("backward 0")), (*second, *program("forward 1"))))
    assert simulate(crossing).makespan_s > 0
    with pytest.raises(Deadlock) as caught:
        simulate(crossing, sends=Sends.BLOCKING)
    assert str(caught.value) == (
        "deadlock: stage 0 waits at 'send_activation 1 to stage 1' for stage 1 to receive it; "
        "stage 1 waits at 'send_gradient 0 to stage 0' for stage 0 to receive it"
    )
    assert {stage: at.verb for stage, (at, _) in caught.value.waiting.items()} == {
        0: Verb.SEND_ACTIVATION,
        1: Verb.SEND_GRADIENT,
    }


@pytest.mark.parametrize("sends", Sends)
@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ("send_activation 0 to stage 1", "stage 1 waits at '"),
        ("receive_activation 0 from stage 0", "stage 1"),
        ("receive_gradient 1 from stage 1", "for stage 0 to receive it|for the gradient from stage 1"),
        ("send_gradient 1 to stage 0", "stage 0 waits at '"),
    ],
)
def test_a_list_with_one_instruction_missing_never_ends(left_out: str, words: str, sends: Sends) -> None:
    programs = pipeline("1f1b", 2, 3).programs
    broken = tuple(tuple(at for at in program if str(at) != left_out) for program in programs)
    assert sum(map(len, programs)) - sum(map(len, broken)) == 1
    with pytest.raises(Deadlock, match=words):
        simulate(Schedule(broken), sends=sends)


def test_a_message_that_nobody_receives_is_a_deadlock_even_where_sends_do_not_block() -> None:
    with pytest.raises(Deadlock, match="stage 0 waits at 'send_activation 0 to stage 1' for stage 1 to receive it"):
        simulate(Schedule((program("forward 0", "send_activation 0 1"), program("load 0"))))


def test_a_message_in_the_wrong_order_is_found_where_sends_block() -> None:
    first, second = pipeline("gpipe", 2, 2).programs
    sends = [place for place, at in enumerate(first) if at.verb in SENDS]
    swapped = list(first)
    swapped[sends[0]], swapped[sends[1]] = swapped[sends[1]], swapped[sends[0]]
    with pytest.raises(Deadlock, match=r"'send_activation 1 to stage 1'.*'receive_activation 0 from stage 0'"):
        simulate(Schedule((tuple(swapped), second)), sends=Sends.BLOCKING)


def test_a_backward_pass_needs_its_forward_pass() -> None:
    with pytest.raises(KeyError):
        simulate(Schedule((program("backward 0"),)))
