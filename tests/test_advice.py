"""In: random models, batches and layouts. Out: each advice of a refusal does, also on a resume of a run.
Does not check the words: test_refusals.py does."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from hypothesis import given
from hypothesis import strategies as st
from refused import Keys, advised, config_of, planned, problems_of

from codescent import tasks
from codescent.base.errors import UserError
from codescent.build import Began, on_resume, task_request
from codescent.config.load import load, to_toml
from codescent.plan import Plan
from codescent.preflight import check, plan_of, plan_with, run_folder
from codescent.record import RunFolder

SMALL = {"hidden_dim": [24, 32, 48, 60, 96, 100], "num_heads": [1, 2, 3, 4, 5, 6, 8, 12, 16, 25]}
SIZES: dict[str, dict[str, list[Any]]] = {
    "gpt2": {**SMALL, "num_layers": [1, 4, 6, 9], "seq_len": [5, 16, 17, 24, 30, 48]},
    "llama": {
        **SMALL,
        "num_layers": [1, 4, 6],
        "seq_len": [16, 17, 24, 30, 48],
        "num_kv_heads": [None, 1, 2, 3, 4, 5, 8],
    },
    "bert": {**SMALL, "num_layers": [1, 4, 6], "seq_len": [16, 17, 24, 30, 48]},
    "transformer": {
        **SMALL,
        "num_encoder_layers": [1, 2, 4],
        "num_decoder_layers": [1, 2, 3],
        "source_len": [6, 8, 9, 12, 17, 24],
        "target_len": [5, 7, 8, 12, 25, 30],
    },
}
PRESETS = {"gpt2": "gpt2-xl", "llama": "llama3-70b", "bert": "bert-base-uncased", "transformer": "transformer-base"}
LAYOUT: dict[str, list[Any]] = {
    **{f"parallel.{axis}": [1, 1, 1, 2, 3, 4, 5, 6, 8] for axis in ("tp", "pp", "cp", "dp_shard")},
    "parallel.dp_replicate": [None, None, 1, 2, 3],
    "parallel.schedule": ["1f1b", "1f1b", "naive", "gpipe", "interleaved", "zero-bubble"],
    "parallel.virtual_stages": [1, 1, 1, 2, 3],
    "parallel.cut": ["cost", "cost", "cost", "2,2", "encoder-decoder"],
    "parallel.sequence_parallel": [True, True, False],
    "parallel.data_parallel": [1, 1, 1, 1, 1, 1, 2, 3, 5],
    "parallel.zero_stage": [3, 3, 1, 2],
    "parallel.reduce_dtype": ["auto", "auto", "bf16"],
    "parallel.offload": ["none", "none", "none", "all"],
    "parallel.recompute": ["none", "none", "full"],
    "train.global_batch_size": [1, 4, 6, 12, 20, 24],
    "train.global_batch_tokens": [None, None, None, 96, 384, 400, 720, 1024],
    "train.microbatch_size": [None, None, 1, 2, 3],
    "data.seq_len": [None, None, None, 8, 17, 64],
}


@st.composite
def asked_for(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """(keys, ranks) of some model and layout, mostly on as many ranks as the layout needs."""
    kind = draw(st.sampled_from(sorted(SIZES)))
    values = {f"model.{size}": possible for size, possible in SIZES[kind].items()}
    if draw(st.booleans()):
        lengths = {"model.source_len": [8, 9, 255], "model.target_len": [7, 12, 250]} if kind == "transformer" else {}
        values = {"model.preset": [PRESETS[kind]], **lengths}
    keys = {key: draw(st.sampled_from(possible)) for key, possible in {**values, **LAYOUT}.items()}
    if kind == "transformer":
        keys["data.seq_len"] = None
    if keys["train.global_batch_tokens"] is not None:
        del keys["train.global_batch_size"]
    copy = math.prod(keys[f"parallel.{axis}"] for axis in ("tp", "pp", "cp", "dp_shard"))
    needed = copy * (keys["parallel.dp_replicate"] or draw(st.sampled_from([1, 1, 2, 3])))
    ranks = draw(st.sampled_from([needed, needed, needed, 1, 2, 6, 8, 36]))
    return {"model.kind": kind, "model.num_layers": None, "model.num_heads": None, "model.hidden_dim": None} | {
        "model.seq_len": None,
        **keys,
    }, ranks


@given(asked_for())
def test_what_is_said_to_do_does(asked: tuple[dict[str, Any], int]) -> None:
    """Each advice leaves fewer problems: none, if there was one. The model's sizes are looked at before the layout."""
    keys, ranks = asked
    problems = problems_of(keys, ranks)
    for problem in problems:
        # Beside other problems a change on as many ranks may leave as many of them, such as a batch that is too small.
        if len(problems) == 1 and problem.startswith("parallel.tp") and "divide into" in problem and "heads" in problem:
            copy = math.prod(keys[f"parallel.{axis}"] for axis in ("pp", "cp", "dp_shard"))
            kept = [change for change in advised(problem) if change.ranks is None and "parallel.tp" in change.values]
            assert kept or ranks % copy, problem
        for change in advised(problem):
            after = {**keys, **change.values}
            config_of(after)  # the values do not contradict each other
            left = problems_of(after, change.ranks or ranks)
            if problem.startswith("model."):
                left = tuple(one for one in left if re.search(r"^model\.|heads", one))
            assert len(left) < len(problems), f"{problem}\n{change} leaves:\n{left}"


@pytest.mark.parametrize("words", [(), ("data.seq_len=64",), ("data.seq_len=68",), ("data.seq_len=40",)])
def test_an_advice_on_lengths_leaves_room_for_questions(words: tuple[str, ...]) -> None:
    """For SQuAD a window holds a question and some of a context: at least 68 tokens. The model has 64 positions."""

    def squad(*more: str) -> Plan:
        return plan_of(load("bert_squad", ["model.seq_len=64", *words, *more]).config, 1)

    with pytest.raises(UserError) as caught:
        squad()
    changes = [change for problem in caught.value.problems for change in advised(problem)]
    assert changes
    for change in changes:
        assert squad(*(f"{key}={value}" for key, value in change.values.items())).task.name == "qa"


def on_a_resume(keys: Keys, ranks: int, began: Plan) -> tuple[str, ...]:
    """What a resume with `keys` says of a run that began with the plan `began`."""
    with pytest.raises(UserError) as caught:
        planned(keys, ranks)
    return on_resume(caught.value, config_of(keys), 11, ranks, Began.of(began)).problems


def decides(plan: Plan) -> dict[str, Any]:
    """What a resume must keep. Keys of the optimizer are checked elsewhere."""
    return {key: value for key, value in plan.trajectory().items() if not key.startswith("optimizer.")}


@given(asked_for(), st.sampled_from(["none", "none", "linear", "sqrt"]))
def test_a_resume_advises_what_continues_the_run(asked: tuple[dict[str, Any], int], scaling: str) -> None:
    """If the run began with the same model and batch on one rank, there is always an advice: its layout."""
    keys, ranks = {**asked[0], "optimizer.scale_learning_rate": scaling}, asked[1]
    if not problems_of(keys, ranks):
        return
    same = {key: value for key, value in keys.items() if not re.match(r"parallel|train\.microbatch", key)}
    try:
        began = planned(same, 1)
    except UserError:
        same, began = {}, planned({}, 1)
    *_, last = on_a_resume(keys, ranks, began)
    assert bool(advised(last)) or not same
    for change in advised(last):
        assert decides(planned({**keys, **change.values}, change.ranks or ranks)) == decides(began)
    assert (" on a resume: " in last) == bool(advised(last))


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        ({"parallel.cp": 4, "model.seq_len": 44}, 4, "slices; nearest that would do on a resume: parallel.cp = 2 and "),
        ({"train.global_batch_size": 10}, 3, "; nearest that would do on a resume: 2 or 5 ranks"),
        ({"model.num_heads": 5}, 1, "hidden_dim = 24; nearest that would do on a resume: model.num_heads = 12"),
        ({"train.global_batch_tokens": 48 * 12}, 5, "data-parallel ranks; nearest that would do on a resume: 4 or 6 "),
        (
            {"parallel.dp_shard": 5},
            5,
            "5 data-parallel ranks; nearest that would do on a resume: parallel.dp_shard = 1",
        ),
        (
            {"data.validation": "v.txt", "parallel.tp": 5},
            5,
            'on a resume: data.validation = "auto" and parallel.tp = 1',
        ),
        (
            {"model.weights": "moved", "parallel.tp": 5},
            5,
            "on a resume: parallel.tp = 4 on 4 ranks, or parallel.tp = 6",
        ),
        (
            {"train.global_batch_tokens": 96, "parallel.tp": 5},
            5,
            "resume: train.global_batch_tokens = 576 and parallel",
        ),
        ({"run.seed": 5, "parallel.tp": 5}, 5, "on a resume: run.seed = 1337 and parallel.tp = 1 on 1 rank"),
    ],
)
def test_a_resume_advises_what_it_may_change(keys: Keys, ranks: int, said: str) -> None:
    same = {key: value for key, value in keys.items() if key in ("model.seq_len", "train.global_batch_size")}
    (problem,) = on_a_resume(keys, ranks, planned(same, 1))
    assert said in problem


def test_a_resume_with_several_problems_is_advised_what_solves_all() -> None:
    *said, last = on_a_resume({"parallel.dp_replicate": 5}, 2, planned({}, 1))
    assert len(said) == 2
    assert not any(advised(problem) for problem in said)
    assert last == "all of these together; nearest that would do on a resume: parallel.dp_replicate = 2"


def test_what_cannot_be_continued_is_advised_its_own_values() -> None:
    *_, last = on_a_resume({"lora.rank": 2, "parallel.tp": 5}, 5, planned({}, 1))
    assert last == "give the values with which the run began: config.toml in its folder has them"


def test_ranks_that_resume_are_advised_alike(project: Path, forker: Forker) -> None:
    """Where no launcher of ours has looked before them."""
    forker.train(project, "begun", 2, "train.num_steps=1")
    done = forker.run(project, 2, ["run.name=begun", "train.num_steps=1", "parallel.dp_replicate=3"], resume=True)
    assert done.codes == [2, 2]
    assert done.said.count("nearest that would do on a resume: parallel.dp_replicate = 2") == 2


def test_a_resume_with_a_scaled_learning_rate_keeps_the_data_parallel_ranks() -> None:
    scaled = {"optimizer.scale_learning_rate": "linear"}
    began = planned({**scaled, "parallel.tp": 2}, 2)
    (problem,) = on_a_resume({**scaled, "parallel.tp": 5}, 10, began)
    assert problem.endswith("nearest that would do on a resume: parallel.tp = 2 on 2 ranks")


def test_a_run_that_is_resumed_is_advised_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    config = load("run.toml", []).config
    dataset = tasks.prepare_and_open(task_request(config), progress=False)
    config, plan = plan_with(config, dataset, 1)
    RunFolder.create(run_folder(config), to_toml(config), plan.to_json())
    with pytest.raises(UserError, match=r"nearest that would do: train.global_batch_size = 6 or 9, or 2 or 4 ranks$"):
        check(load("run.toml", ["run.name=other"]).config, 3, resume=False)
    with pytest.raises(UserError, match=r"nearest that would do on a resume: 2 or 4 ranks$"):
        check(load("run.toml", []).config, 3, resume=True)
