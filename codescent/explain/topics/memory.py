"""In: a plan. Out: the bytes of a rank by part, the rule of 20 bytes a parameter, and what 10^12 parameters need.
Does not estimate (cost/stage_memory.py does) and does not measure."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.base.amounts import of_bytes, of_share, three_digits
from codescent.clusters.by_links import of_device
from codescent.cost.stage_memory import memory
from codescent.explain.content import Lesson, LessonFrame, TextTable
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, gpt2, multiple
from codescent.plan import AXES, Plan
from codescent.plan.activations import CPU

RULE = (("weights", 2, "bf16"), ("gradients", 2, "bf16"), ("master", 4, "fp32"), ("momentum", 4, "fp32"),
        ("variance", 4, "fp32"), ("sums", 4, "fp32"))  # fmt: skip
"""Bytes of a parameter in mixed precision with Adam, and gradients that are summed in fp32."""
TERA = 10**12
EXAMPLE = (("weights", 2 * TERA), ("gradients", 2 * TERA), ("optimizer", 4 * TERA),
           ("activations", 128 * 120 * 2048 * 12288 * 2))  # fmt: skip
"""10^12 parameters in FP16, with two FP16 moments of Adam. Activations: batch 128, 120 layers, 2048 positions, 12,288
channels, 2 bytes; one tensor a layer."""


def lesson(asked: LessonInput) -> Lesson:
    """The parts of this config, the rule, and the example."""
    say = asked.say
    return Lesson(
        topic="memory",
        title=say("What fills the memory of a rank"),
        about=say("Bytes of each part, from the plan; then the rule of 20 bytes for each parameter."),
        config=asked.config_line,
        frames=(_parts(asked.plan, say), _rule(asked.plan, say), _example(say)),
        see=(
            ("codescent plan CONFIG --cluster NAME", say("whether it fits in the memory of a device")),
            ("codescent explain zero", say("how ranks share what they would all hold")),
        ),
    )


def _parts(plan: Plan, say: Language) -> LessonFrame:
    ranks = [plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}) for stage in range(plan.mesh.pp)]
    held = [memory(plan, rank, of_device(CPU)) for rank in ranks]
    names = {
        "weights": (say("weights"), say("the model itself")),
        "gradients": (say("gradients"), say("how the loss changes with each weight")),
        "optimizer": (say("optimizer state"), say("of Adam two means for each weight, and perhaps a copy in fp32")),
        "activations": (say("activations"), say("what forward keeps for backward: it grows with batch and length")),
        "logits": (say("logits"), say("what the head holds while it computes the loss")),
        "gathered": (say("gathered"), say("parts of other ranks, for a time")),
    }
    rows = []
    whole = [sum(getattr(one, part) for part in names) for one in held]
    for part, (name, what) in names.items():
        sizes = [getattr(one, part) for one in held]
        if any(sizes):
            share = of_share(sizes[0] / whole[0])
            rows.append((name, *map(of_bytes, sizes), share, what))
    rows.append((say("together"), *map(of_bytes, whole), of_share(1.0), ""))
    heads = [say("part"), *(say("rank {number}", number=rank) for rank in ranks), say("share"), say("what it is")]
    numbers = range(1, len(ranks) + 2)
    return LessonFrame(
        say("The parts"), (say("At the fullest moment of a step."),), (TextTable(heads, rows, numbers=numbers),)
    )


def _rule(plan: Plan, say: Language) -> LessonFrame:
    names = {
        "weights": say("weights"),
        "gradients": say("gradients"),
        "master": say("copy of the weights that is updated"),
        "momentum": say("Adam: mean of the gradients"),
        "variance": say("Adam: mean of their squares"),
        "sums": say("gradients that are summed"),
    }
    n = plan.num_parameters
    rows: list[Sequence[str]] = [(names[name], dtype, str(size), of_bytes(size * n)) for name, size, dtype in RULE]
    total = sum(size for _, size, _ in RULE)
    rows.append((say("together"), "", str(total), of_bytes(total * n)))
    rank = memory(plan, 0, of_device(CPU))
    own = rank.weights + rank.gradients + rank.optimizer + rank.host
    heads = (say("what"), say("format"), say("bytes a parameter"), say("{number} parameters", number=f"{n:,}"))
    return LessonFrame(
        say("The rule of 20 bytes"),
        (say("In mixed precision with Adam, each parameter needs about 20 bytes, without activations."),),
        (TextTable(heads, rows, numbers=(2, 3)),),
        (
            say(
                "This config holds {bytes} bytes a parameter on rank 0: its formats and its layout decide.",
                bytes=three_digits(own / n),
            ),
            say("10^10 parameters by this rule: {size}. That is more than two devices of 80 GB hold.",
                size=of_bytes(total * 1e10)),
        ),
    )  # fmt: skip


def _example(say: Language) -> LessonFrame:
    names = {
        "weights": say("weights"),
        "gradients": say("gradients"),
        "optimizer": say("optimizer state"),
        "activations": say("activations"),
    }
    rows = [(names[name], f"{size / TERA:.1f} TB") for name, size in EXAMPLE]
    rows.append((say("together"), f"{sum(size for _, size in EXAMPLE) / TERA:.1f} TB"))
    return LessonFrame(
        say("10^12 parameters"),
        (say("A model of 10^12 parameters in FP16, with two moments of Adam in FP16."),),
        (TextTable((say("part"), say("bytes")), rows, numbers=(1,)),),
        (
            say("Activations: 128 samples x 120 layers x 2,048 positions x 12,288 channels x 2 bytes."),
            say("A rule of thumb: 10^9 parameters are GB, 10^12 are TB. FP8 halves it."),
        ),
    )


def _words(ranks: int) -> tuple[str, ...]:
    return gpt2("train.microbatch_size=1", f"parallel.ranks={ranks}", batch=multiple(4, ranks))


TOPIC = Topic(
    about="bytes of a rank by part, the rule of 20 bytes a parameter, and 10^12 parameters",
    example=Example(_words, ranks=1),
    lesson=lesson,
)
