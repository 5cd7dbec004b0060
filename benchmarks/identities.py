"""In: rows of closed forms: bytes of a state, FLOPs, activations, bytes of a ring. Out: what our plans say of them.
Does not predict a measurement (prediction_scores.py does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codescent.base.dtypes import DTYPE_BYTES
from codescent.build import build
from codescent.config.sections import Config
from codescent.plan import Plan, Role, Traffic, Verb
from codescent.plan.pipeline import pipeline
from codescent.plan.state import state_of_rank
from codescent.plan.traffic import Collective

GIBI, GIGA, MEGA = 2**30, 1e9, 1e6
EXACT = 1e-3
STATE_BYTES = 18
"""Of a parameter in Megatron with bf16: weights 2, gradients 4, master weights and two moments 12."""
Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Identity:
    """A closed form, and what we say."""

    name: str
    what: str
    expected: str
    ours: str
    holds: bool


def identities(rows: Sequence[Mapping[str, Any]]) -> Iterator[Identity]:
    """Each row of type formula. One that we have no form of does not hold."""
    for row in rows:
        if row["type"] != "formula":
            continue
        form = next((form for begin, form in FORMS.items() if row["id"].startswith(begin)), None)
        expected = row["expected"] if isinstance(row["expected"], list) else [row["expected"]]
        ours = [] if form is None else form(row["inputs"])
        holds = len(ours) == len(expected) and all(map(_equal, ours, expected))
        yield Identity(row["id"], row["what"], _text(expected), _text(ours) or "no form", holds)


def _equal(ours: float, expected: float) -> bool:
    """Equal to 0.1 %, or to all digits that the row has."""
    digits = len(repr(float(expected)).partition(".")[2].rstrip("0"))
    return abs(ours / expected - 1.0) <= EXACT or (0 < digits <= 2 and round(ours, digits) == expected)


def _text(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:,.6g}" for number in numbers)


def _plan(layers: int, hidden: int, heads: int, *, vocab: int = 256, seq: int = 128, **more: Any) -> Plan:
    """A plan of a GPT-2 with these sizes. `more`: keys of [parallel] and [train]; `ranks`."""
    ranks, train = more.pop("ranks", 1), more.pop("train", {"global_batch_size": 1})
    model = {
        "kind": "gpt2", "num_layers": layers, "hidden_dim": hidden, "num_heads": heads, "vocab_size": vocab,
        "seq_len": seq,
    }  # fmt: skip
    sections = {"model": model, "data": {"corpus": "synthetic"}, "train": {"precision": "bf16", **train}}
    return build(Config.model_validate({**sections, "parallel": more}), None, ranks)


def _state(inputs: Inputs) -> list[float]:
    """The matrices of blocks alone, on a rank of a middle stage."""
    plan = _plan(inputs["layers"], inputs["hidden"], inputs["heads"])
    matrices = sum(one.parameter.numel for one in plan.tensors if one.parameter.role in (Role.COLUMN, Role.ROW))
    biases = sum(
        one.parameter.numel
        for one in plan.tensors
        if one.parameter.role in (Role.COLUMN, Role.ROW) and len(one.parameter.shape) == 1
    )
    return [STATE_BYTES * (matrices - biases) / (inputs["tp"] * inputs["pp"]) / GIBI]


def _activations(inputs: Inputs) -> tuple[float, float, float]:
    """s b h L, the factor of attention a s / h, and what an interleaved first stage keeps in flight."""
    s, b, h = inputs["seq"], inputs["micro_batch"], inputs["hidden"]
    p, v = inputs["pp"], inputs["virtual_stages"]
    flying = _in_flight(p, v) if p > 1 else 1.0
    return s * b * h * inputs["layers"] / GIBI, inputs["heads"] * s / h, flying


def _without_recompute(inputs: Inputs) -> list[float]:
    """Korthikanti et al. 2022, equation 2: s b h (10 + 24 / t + 5 a s / (h t)) for each layer."""
    size, attention, flying = _activations(inputs)
    return [size * flying * (10.0 + 24.0 / inputs["tp"] + 5.0 * attention / inputs["tp"])]


def _selective(inputs: Inputs) -> list[float]:
    """Korthikanti et al. 2022, equation 6: 34 s b h / t for each layer."""
    size, _, flying = _activations(inputs)
    return [34.0 * size * flying / inputs["tp"]]


def _in_flight(stages: int, chunks: int) -> float:
    """Forward passes in flight on the first stage, relative to those of all of its chunks for p micro-batches."""
    schedule = pipeline("interleaved" if chunks > 1 else "1f1b", stages, 2 * stages, chunks)
    return schedule.most_in_flight(0) / (stages * chunks)


def _zero(inputs: Inputs) -> list[float]:
    """The paper's gradients have two bytes, and are whole up to stage 1. With one micro-batch ours are not."""
    stage, ranks = inputs["zero"], inputs["ranks"]
    sizes = {"vocab": 1024, "ranks": ranks, "train": {"global_batch_size": ranks}, "reduce_dtype": "bf16"}
    whole = _plan(8, 1024, 16, dp_replicate=ranks, **sizes)
    plan = _plan(8, 1024, 16, dp_shard=ranks, zero_stage=stage, **sizes) if stage else whole
    state, held = state_of_rank(plan, 0), whole if stage <= 1 else plan
    gradients = float(state_of_rank(held, 0).gradients_bytes)
    if stage < 3:  # in stage 3 ours have four, and no second copy of the weights
        gradients *= 2 / DTYPE_BYTES[held.tensors[0].gradient_dtype]
    total = state.weights_bytes + state.optimizer_bytes + gradients
    return [total / plan.num_parameters * inputs["params"] / GIGA]


def _flops(inputs: Inputs) -> list[float]:
    sizes = {"vocab": inputs["V"], "seq": inputs["s"], "recompute": inputs["recompute"]}
    train = {"global_batch_size": inputs["B"], "microbatch_size": 1}
    plan = _plan(inputs["l"], inputs["h"], inputs["h"] // 128, train=train, **sizes)
    return [plan.flops().hardware_flops]


def _parameters(inputs: Inputs) -> list[float]:
    plan = _plan(inputs["layers"], inputs["hidden"], 32, vocab=inputs["vocab"], seq=inputs["seq"])
    return [float(plan.num_parameters)]


def _ring(inputs: Inputs) -> list[float]:
    record = Traffic(Collective.ALL_REDUCE, "x", round(inputs["S_MB"] * MEGA), "fp32", Verb.REDUCE, None, "")
    return [record.wire_bytes(ranks) / MEGA for ranks in inputs["n"]]


FORMS: dict[str, Callable[[Inputs], list[float]]] = {
    "id_state": _state,
    "id_act_none": _without_recompute,
    "id_act_selsp": _selective,
    "id_zero": _zero,
    "flops": _flops,
    "params": _parameters,
    "interleave_mem": lambda inputs: [_in_flight(inputs["p"], inputs["v"])],
    "ddp_ring_bytes": _ring,
}
"""By the begin of a row's id."""
