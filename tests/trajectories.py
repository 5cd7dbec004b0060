"""In: trajectories.csv. Out: the table of trajectory runs: tasks, layouts, precisions, dropout ..., all in pairs.
Does not run anything (test_trajectories does). As a program it asks the planner which rows can be, and writes it."""

from __future__ import annotations

import argparse
import csv
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from covering import Covering, Row, Value, cover
from questions import question, squad, vocabulary
from runs import make_project

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.load import load

TABLE = Path(__file__).with_name("trajectories.csv")
STEPS, SAMPLES = 3, 48
COMMON = (
    f"train.num_steps={STEPS}",
    f"train.global_batch_size={SAMPLES}",
    "train.eval_every=2",
    "train.check_every=1",  # no layout's copies may differ by a bit
    "optimizer.learning_rate=3e-3",
    "optimizer.decay_steps=20",
    "optimizer.max_grad_norm=0.1",  # less than that of any step: clipped by the norm of all the parts
)
ODD = ("model.num_heads=4", "model.hidden_dim=20", "model.ffn_dim=45")
"""20 is no multiple of dp_shard = 3, 45 of no tp."""
TWO_STACKS = ("model.kind=transformer", "model.num_layers=auto", "model.seq_len=auto", "model.num_encoder_layers=2")
TWO_STACKS += ("model.num_decoder_layers=3",)
BERT = ("model.kind=bert", "model.num_layers=5", "data.tokenizer=bert:vocab.txt", *ODD)
TASKS: dict[str, tuple[str, ...]] = {
    "gpt2": ("model.num_layers=5", "model.vocab_size=97", "data.tokenizer=char", *ODD),
    "llama": (
        "model.kind=llama",
        "model.num_layers=5",
        "model.num_heads=8",
        "model.num_kv_heads=4",
        "model.hidden_dim=48",
        "model.ffn_dim=45",
        "model.vocab_size=97",
        "data.tokenizer=char",
    ),
    "encoder-decoder": (
        *TWO_STACKS,
        "model.vocab_size=97",
        "model.source_len=12",
        "model.target_len=8",
        "data.tokenizer=char",
        *ODD,
    ),
    "pairs": (
        *TWO_STACKS,
        "model.source_len=12",
        "model.target_len=16",
        "model.embedding=untied",
        "model.causal=false",
        "data.task=seq2seq",
        "data.corpus=lines.txt",
        "data.tokenizer=char",
        *ODD,
    ),
    "tensors": (
        *TWO_STACKS,
        "model.source_len=2",
        "model.target_len=6",
        "model.embedding=none",
        "model.norm=first",
        "model.activation=gelu",
        "data.corpus=synthetic:60",
        *ODD,
    ),
    "masked": (*BERT, "model.seq_len=16", "data.task=mlm"),
    "answers": (
        *BERT,
        "model.seq_len=48",
        "data.task=qa",
        "data.corpus=train.json",
        "data.validation=dev.json",
        "data.seq_len=40",
        "data.stride=8",
        "data.question_len=12",
    ),
    "responses": (
        "model.num_layers=5",
        "model.seq_len=24",
        "data.task=sft",
        "data.corpus=pairs.jsonl",
        "data.template=Say {prompt}: {response}",
        "data.tokenizer=byte",
        *ODD,
    ),
}
LAYOUTS = {
    "": 1,
    "dp_replicate=2": 2,
    "dp_shard=2 zero_stage=1": 2,
    "dp_shard=2 zero_stage=2": 2,
    "dp_shard=3": 3,
    "dp_replicate=2 dp_shard=2": 4,
    "tp=2": 2,
    "tp=2 sequence_parallel=false": 2,
    "tp=4": 4,
    "pp=2": 2,
    "pp=2 schedule=naive": 2,
    "pp=2 schedule=gpipe cut=encoder-decoder": 2,
    "pp=4 schedule=gpipe": 4,
    "pp=4 cut=encoder-decoder": 4,
    "pp=2 schedule=interleaved virtual_stages=2": 2,
    "pp=2 schedule=zero-bubble": 2,
    "cp=2": 2,
    "cp=4 context=all-gather": 4,
    "dp_replicate=4": 4,
    "dp_replicate=2 tp=2": 4,
    "dp_shard=2 tp=2": 4,
    "dp_replicate=2 pp=2 schedule=zero-bubble": 4,
    "pp=2 dp_shard=2 zero_stage=1": 4,
    "pp=2 dp_shard=2": 4,
    "pp=2 tp=2": 4,
    "pp=2 tp=2 cut=encoder-decoder": 4,
    "dp_shard=2 cp=2": 4,
    "cp=2 tp=2": 4,
    "dp_replicate=2 pp=2 tp=2": 8,
}
"""Keys of [parallel] and the number of ranks."""
SIBLINGS = {"dp_shard=2 zero_stage=1", "pp=2 schedule=naive"}
"""What these do for a task, `zero_stage=2` and the other schedules do for it too."""
FACTORS = {
    "task": list(TASKS),
    "layout": list(LAYOUTS),
    "precision": ["fp64", "fp32", "bf16"],
    "recompute": ["none", "selective", "full"],
    "dropout": ["0", "0.1"],
    "microbatches": ["1", "2", "4"],
}
SMOOTHED = ("train.label_smoothing=0.1", "train.z_loss=1e-3")
CP = {layout for layout in LAYOUTS if "cp" in layout}
CUT = {layout for layout in LAYOUTS if "encoder-decoder" in layout}
SEQUENCE_PARALLEL = {layout for layout in LAYOUTS if "tp" in layout and "sequence_parallel=false" not in layout}
NEVER: dict[str, set[str]] = {
    "gpt2": CUT,
    "llama": CUT | {"0.1"},  # no dropout
    "encoder-decoder": CP,
    "pairs": CP,
    "tensors": CP | SEQUENCE_PARALLEL,
    "masked": CP | CUT,
    "answers": CP | CUT,
    "responses": CUT,
    "pp=2 schedule=interleaved virtual_stages=2": {"1"},  # micro-batches: a multiple of the stages
}
"""Values of two factors that no row can have together."""
VOCAB_SIZES = {"tensors": None, "masked": 160, "answers": 160, "responses": 257}
TOWNS = ("rome", "kyiv", "lima", "oslo", "bern", "cairo", "quito", "delhi")


def write_corpora(folder: Path) -> None:
    """The files that the tasks read, and run.toml."""
    make_project(folder)
    vocabulary(folder)
    text = (folder / "corpus.txt").read_text().replace(" ", "\n", 700)  # lines of very different lengths
    (folder / "lines.txt").write_text(text)
    (folder / "train.json").write_text(json.dumps(towns(0, 60)))
    (folder / "dev.json").write_text(json.dumps(towns(60, 6)))
    words = ("red", "green", "blue", "black", "white", "pink") * 12
    lines = [{"prompt": word * (1 + n % 2), "response": word[::-1], "id": n} for n, word in enumerate(words)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def towns(first: int, count: int) -> dict[str, object]:
    """So many questions, each of a context that says it."""
    paragraphs = []
    for number in range(first, first + count):
        town, year = TOWNS[number % len(TOWNS)], str(1800 + 7 * number)
        context = f"The king of {town} was born in {year} in the city of {TOWNS[(number + 3) % len(TOWNS)]}."
        asked = question(f"q{number}", f"When was the king of {town} born?", year, context=context)
        paragraphs.append((context, [asked]))
    return squad(*paragraphs)


def model_words(row: Row) -> tuple[str, ...]:
    """What a run on one process and one on the layout have in common.

    Rows with dropout also have label smoothing and z-loss, so both have their pairs without more runs. A llama has no
    dropout: its rows always have them. Tensors have no classes.
    """
    dropout = () if row["dropout"] == "0" else (f"model.dropout={row['dropout']}",)
    smoothed = SMOOTHED if (dropout or row["task"] == "llama") and row["task"] != "tensors" else ()
    return (*COMMON, *TASKS[row["task"]], *dropout, *smoothed, f"train.precision={row['precision']}")


def layout_words(row: Row) -> tuple[str, ...]:
    """The keys of the layout. The micro-batches are those of one replica."""
    keys = row["layout"].split()
    degrees = dict(key.split("=") for key in keys)
    replicas = int(degrees.get("dp_replicate", 1)) * int(degrees.get("dp_shard", 1))
    size, rest = divmod(SAMPLES, replicas * int(row["microbatches"]))
    assert not rest
    parallel = (f"parallel.{key}" for key in (*keys, f"recompute={row['recompute']}"))
    return (*parallel, f"train.microbatch_size={size}")


def rows(*, slow: bool) -> list[Row]:
    """The committed rows in which every pair of two factors meets that the planner does not refuse.

    The quick table has each layout of four ranks and more, and each of SIBLINGS, once, for the first task.
    """
    with TABLE.open(newline="") as file:
        return [
            {factor: row[factor] for factor in FACTORS}
            for row in csv.DictReader(file)
            if row["suite"] == ("slow" if slow else "quick")
        ]


def computed(folder: Path, *, slow: bool) -> Covering:
    """The rows anew, by asking the planner; `folder` is where write_corpora has been."""

    def allowed(row: Row) -> bool:
        return refusal(row, folder) is None

    def wanted(one: Value, other: Value) -> bool:
        return not is_never(one, other) and (slow or not is_large(one, other))

    return cover(FACTORS, allowed, wanted)


def is_large(one: Value, other: Value) -> bool:
    """Whether a pair is for the slow table alone: a layout of more than three ranks or a sibling, not of `gpt2`."""
    layouts = [name for factor, name in (one, other) if factor == "layout"]
    return one != ("task", "gpt2") and any(LAYOUTS[layout] > 3 or layout in SIBLINGS for layout in layouts)


def is_never(one: Value, other: Value) -> bool:
    """Whether the planner refuses every row of a pair (a slow test asks it)."""
    return any(other[1] in never for value, never in NEVER.items() if value == one[1])


def refusal(row: Row, folder: Path) -> UserError | None:
    """Why the planner refuses a row, or None."""
    try:
        config = load(folder / "run.toml", [*model_words(row), *layout_words(row)]).config
        build(config, VOCAB_SIZES.get(row["task"], 97), LAYOUTS[row["layout"]])
    except UserError as error:
        return error
    return None


def main(words: Sequence[str] | None = None, table: Path = TABLE) -> None:
    """Write the table anew. A run that ends before its end leaves the old one."""
    argparse.ArgumentParser(description=f"Ask the planner which rows can be, and write {table.name}.").parse_args(words)
    content = io.StringIO(newline="")
    with tempfile.TemporaryDirectory() as name:
        write_corpora(Path(name))
        writer = csv.DictWriter(content, ["suite", *FACTORS], lineterminator="\n")
        writer.writeheader()
        for suite in ("quick", "slow"):
            found = computed(Path(name), slow=suite == "slow")
            assert not found.never, f"the planner refuses every row of these, add them to NEVER: {found.never}"
            writer.writerows({"suite": suite, **row} for row in found.rows)
    replace_file(table, content.getvalue())


if __name__ == "__main__":
    main()
