"""In: configs. Out: what `codescent plan --operators` prints: sizes in letters, FLOPs, bytes; and what it refuses.
Does not compare the numbers with what runs: test_computed does."""

from __future__ import annotations

import re

import pytest
from refused import planned
from rich.console import Console

from codescent.plan import Plan
from codescent.plan.activations import CPU, CUDA
from codescent.verbs import cli
from codescent.verbs.plan_operators import tables


def printed(plan: Plan, device: str = CUDA) -> list[list[str]]:
    """The rows of all tables: cells without blanks around them."""
    console = Console(width=80, highlight=False)
    with console.capture() as found:
        for one in tables(plan, device):
            console.print(one)
    return [re.split(r"  +", line.strip()) for line in found.get().splitlines() if line.strip()]


def test_operators_of_a_decoder_have_their_sizes_in_letters_and_alike_layers_are_one_group() -> None:
    keys = {"model.num_layers": 3, "train.microbatch_size": 1, "train.global_batch_size": 2}
    rows = printed(planned(keys, 1))
    assert rows[0] == ["Operators on cuda: 2 micro-batches, in MFLOP and KiB"]
    names = [row[0] for row in rows]
    assert [name for name in names if name.startswith(("embedding", "layer", "head"))] == [
        "embedding", "layers 0 to 2", "head and loss",
    ]  # fmt: skip
    sizes = {row[0]: row[1] for row in rows if len(row) > 3}
    assert sizes | {"norm_1": "B*T*C", "attn.qkv": "B*T*C*3C", "attn scores": "B*NH*T*T*HS", "loss": "B*T*V"} == sizes
    assert names.index("attn.qkv") < names.index("attn scores") < names.index("attn.out") < names.index("mlp.up")
    assert names.index("norm") < len(names) - 1 - names[::-1].index("tok") < names.index("loss")


def test_a_rank_has_its_part_of_the_sizes_and_a_stage_its_layers() -> None:
    whole = printed(planned({}, 1), CPU)
    stages = printed(planned({"parallel.pp": 2, "parallel.tp": 2, "train.microbatch_size": 1}, 4), CPU)
    assert [row[0] for row in stages if row[0].startswith("Operators")] == [
        f"Operators of stage {stage} on cpu: 12 micro-batches, in MFLOP and MiB" for stage in (0, 1)
    ]
    (one,) = [row for row in whole if row[0] == "attn.qkv"]
    parts = [row for row in stages if row[0] == "attn.qkv"]
    assert {row[1] for row in (one, *parts)} == {"B*T*C*3C"}
    assert sum(2 * float(row[2]) for row in parts) == pytest.approx(float(one[2]), rel=0.01)


def test_layers_of_several_chunks_are_named_apart_and_devices_share_samples() -> None:
    keys = {"parallel.pp": 2, "parallel.schedule": "interleaved", "parallel.virtual_stages": 2, "model.num_layers": 8}
    rows = printed(planned(keys | {"train.microbatch_size": 1}, 2))
    assert [row[0] for row in rows if row[0].startswith("layers")] == ["layers 0 to 1, 4 to 5", "layers 2 to 3, 6 to 7"]
    shared = printed(planned({"parallel.data_parallel": 2, "train.microbatch_size": 4}, 1))
    sizes = {row[0]: row[1] for row in shared if len(row) > 3}
    assert (sizes["attn.qkv"], sizes["norm_1"], sizes["loss"]) == ("B*T*C*3C", "B*T*C", "B*T*V")
    assert any(row[0].startswith("B 2 samples of a micro-batch on a device") for row in shared)


def test_two_sequences_have_two_letters() -> None:
    keys = {
        "model.kind": "transformer", "model.num_layers": None, "model.num_encoder_layers": 1, "data.task": "seq2seq",
        "model.num_decoder_layers": 1, "model.source_len": 8, "model.target_len": 12, "model.seq_len": None,
        "data.seq_len": None,
    }  # fmt: skip
    sizes = {row[0]: row[1] for row in printed(planned(keys, 1)) if len(row) > 3}
    assert (sizes["cross scores"], sizes["cross.kv"]) == ("B*NH*T*S*HS", "B*S*C*2C")


def test_the_table_and_json_are_not_given_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "default", "--operators", "--json"]) == 2
    assert "--operators: prints a table, and --json the plan; give one of them" in capsys.readouterr().err
