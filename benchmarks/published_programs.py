"""In: a row of a published measurement. Out: what its program does that it does not say: traits, where stages begin.
Does not build a plan (published_rows.py does). Each fact holds for all rows of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from codescent.clusters.cluster import Software

FOREIGN = Software(step_s=5e-3, microbatch_s=4e-3)
"""Programs that are not ours launch operators one by one, and look at each micro-batch."""
MEGATRON = replace(FOREIGN, overlaps=("gathers",), fused=0.6, microbatch_s=1e-2, logit_bytes=10)
"""It sums gradients after the last backward pass, and has kernels for bias, GELU, dropout and sums in one. Its loss is
computed for all tokens, from a copy of the logits in fp32."""
FSDP = replace(FOREIGN, units="again", logit_bytes=10)
"""torch's FSDP gathers for each micro-batch; the loss is computed for all tokens, with copies in fp32."""
TORCHTITAN = replace(FSDP, logit_bytes=12, second_products=True, shards_over_cp=True, joins_outputs=True)
"""Its loss is not compiled: the fp32 logarithm of the softmax and two gradients of it are there at once. It keeps every
second product, and divides state over the ranks of a sequence, too. torch.distributed.pipelining joins outputs."""
LOSS_PARALLEL_BYTES = 16
"""With tp it divides the loss: one tensor in fp32 more is there at once (torch.distributed.tensor.parallel)."""
LLM_C = replace(FOREIGN, fused=0.6)
"""Its kernels join element-wise operators. That of seed_gpt2 does not hide its sums: its logs count them apart."""
FRAMEWORKS: dict[str, Software] = {
    "megatron_core": replace(MEGATRON, microbatch_s=FOREIGN.microbatch_s, overlaps=("gathers", "sums", "layers")),
    "nvidia_fp8": replace(FOREIGN, fused=0.6),
    "megatron": MEGATRON,
    "korthikanti": MEGATRON,
    "vtrain": MEGATRON,
    "bloom": MEGATRON,
    "mt_nlg": MEGATRON,
    "mosaicml": FSDP,
    "torchtitan": TORCHTITAN,
    "ibm_fms": FSDP,
    "nanotron": replace(FOREIGN, overlaps=("gathers",), logit_bytes=10, by_tensor=True),
    "llm.c": LLM_C,
    "seed_gpt2": replace(LLM_C, overlaps=("gathers",)),
    "nvidia_bert": replace(FOREIGN, logit_bytes=10),
    "seed_bert": replace(FOREIGN, logit_bytes=10),
}
"""By the begin of a group. nanotron's ZeRO-1 sends tensor by tensor. Of others FOREIGN is assumed."""

OF_RANK_0 = ("nanotron",)
"""Programs that publish the memory of their rank 0, which is in the first stage. Others publish that of the fullest
rank. nanotron: only world rank 0 calls `write_to_csv` (src/nanotron/helpers.py, log_throughput)."""

IN_BINARY = ("nanotron",)
"""Programs whose source divides bytes by 2^30, while their figure says GB. Rows are read as their file says."""


def software_of(data: Mapping[str, Any]) -> Software:
    """The program of a row: traits of its framework, and what its layout says."""
    layout, group = data["layout"], str(data["group"])
    found = next((one for begin, one in FRAMEWORKS.items() if group.startswith(begin)), FOREIGN)
    precision = str(layout.get("precision"))
    if precision == "fp8":
        found = replace(found, block_products="fp8")
    if precision.startswith("tf32"):
        found = replace(found, precision="tf32")
    if "compile" in str(data["id"]):
        found = replace(found, fused=0.6)
    if "asynctp" in str(data["id"]):
        found = replace(found, overlaps=(*found.overlaps, "layers"))
    if layout.get("zero") == 3 and "gathers" in found.overlaps and found is not FSDP and "megatron" in group:
        found = replace(found, units="again", rings=1)  # DeepSpeed's ZeRO-3 of 2021
    if group.startswith("torchtitan"):  # with a pipeline it does not let go of weights between micro-batches
        piped, divided = int(layout.get("pp") or 1) > 1, int(layout.get("tp") or 1) > 1
        found = replace(found, units="kept" if piped else "again")
        found = replace(found, logit_bytes=LOSS_PARALLEL_BYTES if divided else found.logit_bytes)
    if "fp32 grad" in precision:
        found = replace(found, gradient_bytes=6 if layout.get("zero") else 4)
    elif precision == "fp16":
        found = replace(found, gradient_bytes=2)
    return found


def in_binary(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its GB read as 2^30 bytes, if its program is one of IN_BINARY; else the row."""
    measured = data["measured"]
    if not str(data["group"]).startswith(IN_BINARY) or measured.get("memory_gb") is None:
        return data
    return {**data, "measured": {**measured, "memory_gb": measured["memory_gb"] * 2**30 / 1e9}}


def is_of_rank_0(data: Mapping[str, Any]) -> bool:
    """Whether the memory of a row is that of rank 0, and not the most of all ranks."""
    return str(data["group"]).startswith(OF_RANK_0)


def cut_of(data: Mapping[str, Any], stages: int) -> str:
    """`parallel.cut`: the layers of each virtual stage, as the program of a row divides them."""
    group, model = str(data["group"]), data["model"]
    layers = int(model["layers"])
    if group.startswith("nanotron"):
        numbers = _over_thresholds(model, stages)
    elif group.startswith("torchtitan"):
        numbers = _middle_first(layers, stages)
    elif layers % stages == 0:
        numbers = [layers // stages] * stages
    elif (layers + 2) % stages == 0:  # DeepSpeed's "type:transformer|embedding": embedding and head count as layers
        numbers = [(layers + 2) // stages] * stages
        numbers[0], numbers[-1] = numbers[0] - 1, numbers[-1] - 1
    else:
        return "cost"
    return ",".join(map(str, numbers)) if all(numbers[:-1]) else "cost"


def _middle_first(layers: int, stages: int) -> list[int]:
    """torchtitan's generate_split_points: layers that are left over go to the stages behind the first one."""
    each, left = divmod(layers, stages)
    return [each, *(each + (number < left) for number in range(stages - 2)), each + max(0, left - (stages - 2))]


def _over_thresholds(model: Mapping[str, Any], stages: int) -> list[int]:
    """nanotron's build_model: a stage takes blocks until their cost is above its share of all costs; the block that
    passes it is still its own. A block costs its matrices, with as many keys as queries; the head costs its matrix."""
    hidden, layers = int(model["hidden"]), int(model["layers"])
    layer = hidden * (4 * hidden + 3 * int(model["ffn"]))
    total = layers * layer + hidden * int(model["vocab"])
    stage, numbers = 0, [0] * stages
    for number in range(1, layers + 1):
        numbers[stage] += 1
        stage += number * layer > total * ((stage + 1) / stages)
    return numbers
