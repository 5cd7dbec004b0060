"""In: a plan. Out: what is in the memory of the device and of the host, with each value of parallel.offload
(Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021, "ZeRO-Infinity").
Does not place a tensor (strategies/offload.py does) and does not copy one."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.base.amounts import of_bytes, of_seconds
from codescent.base.errors import UserError
from codescent.cost.memory import inside_bytes
from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, gpt2, multiple
from codescent.explain.topics import server
from codescent.plan import Plan
from codescent.plan.state import StateBytes, state_of_rank

FORMS = ("none", "optimizer", "all")
BUS_BYTES_PER_S = 25e9
"""PCIe 4.0 x16, as copies reach it."""


def lesson(asked: LessonInput) -> Lesson:
    """The memories for each form, then what is copied."""
    say = asked.say
    shown = list(_plans(asked))
    return Lesson(
        topic="offload",
        title=say("Offload: the host's memory as a shelf"),
        about=say("What a step seldom needs can be in the memory of the host. It is copied, both ways."),
        config=asked.config_line,
        frames=[*(_memories(form, plan, say) for form, plan in shown), _copies(shown, say)],
        see=(
            ("codescent docs offload", say("what each value does, on which devices")),
            ("codescent explain zero", say("the memory of other ranks instead")),
        ),
    )


def _plans(asked: LessonInput) -> list[tuple[str, Plan]]:
    found = []
    for form in FORMS:
        try:
            found.append((form, asked.other({"parallel.offload": form})))
        except UserError:  # "all" needs ZeRO 3
            continue
    return found


def _memories(form: str, plan: Plan, say: Language) -> LessonFrame:
    state = state_of_rank(plan, 0)
    names = (say("weights"), say("gradients"), say("optimizer state"))
    tones = (Tone.WEIGHTS, Tone.GRADIENTS, Tone.OPTIMIZER)
    on_device = state.on_device
    on_host = _on_host(state)
    rows = []
    for where, sizes in ((say("device"), on_device), (say("host"), on_host)):
        rows.append((where, [GridCell(of_bytes(size) if size else "", tone if size else Tone.NOTHING)
                             for size, tone in zip(sizes, tones, strict=True)]))  # fmt: skip
    why = {
        "none": say("Everything is in the memory of the device."),
        "optimizer": say("The optimizer state is on the host, where the CPU updates the weights."),
        "all": say("The weights are on the host, too. Those of one layer at a time are on the device."),
    }[form]
    total = say("Between two steps rank 0 has {size} on the device.", size=of_bytes(state.device_bytes))
    return LessonFrame(f"parallel.offload = {form}", (why,), (Grid(names, rows),), (total,))


def _on_host(state: StateBytes) -> tuple[int, int, int]:
    rest = state.host_bytes - state.host_weights_bytes - state.host_gradients_bytes
    return state.host_weights_bytes, state.host_gradients_bytes, rest


def _copies(shown: Sequence[tuple[str, Plan]], say: Language) -> LessonFrame:
    rows = []
    for form, plan in shown:
        copied = inside_bytes(plan)
        rows.append((form, of_bytes(copied), of_seconds(copied / BUS_BYTES_PER_S)))
    heads = ("parallel.offload", say("copied in a step"), say("time at 25 GB/s"))
    return LessonFrame(
        say("What it costs"),
        (say("Copies between device and host, of a rank."),),
        (TextTable(heads, rows, numbers=(1, 2)),),
        (say("A larger batch hides them better: the copies stay the same, the arithmetic grows."),),
    )


def refuses(plan: Plan) -> str:
    """Ranks outside of the mesh may hold the optimizer state."""
    return server.why_not_without(plan)


def _words(ranks: int) -> tuple[str, ...]:
    """ZeRO 3, which "all" needs; one rank divides nothing."""
    zero = [f"parallel.dp_shard={ranks}", "parallel.zero_stage=3"] if ranks > 1 else []
    return gpt2("train.device=cuda", f"parallel.ranks={ranks}", *zero, batch=multiple(8, ranks))


TOPIC = Topic(
    about="what is on the device and on the host, with each value of parallel.offload",
    example=Example(_words, ranks=2),
    lesson=lesson,
    refuses=refuses,
)
