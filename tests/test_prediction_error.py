"""In: small files of rows. Out: what benchmarks/prediction_error.py scores, reports and refuses.
Does not score published runs: the benchmark itself does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from prediction_scores import fits, memory, priced
from published_programs import cut_of, software_of
from published_rows import row_of

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "prediction_error.py"
MODEL = {"arch": "gpt", "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "gated_mlp": False,
         "vocab": 1024, "seq": 512, "tied_embeddings": True, "causal": True}  # fmt: skip
HARDWARE = {"name": "A100-SXM4-80GB", "peak_bf16_tflops": 312, "mem_gb": 80, "hbm_gbs": 2039, "gpus": 8,
            "gpus_per_node": 8, "links": {"intra": {"type": "NVLink", "GBps_per_gpu_unidir": 300},
                                          "inter": {"type": "none", "GBps_per_gpu_unidir": 0}}}  # fmt: skip


def row(number: int, step_s: float | None = 0.1, **layout: Any) -> dict[str, Any]:
    """A training row of 8 devices."""
    usual = {"dp": 8, "zero": 0, "recompute": "none", "micro_batch": 4, "precision": "bf16", "attention": "flash"}
    layout = {**usual, "global_batch": 32 * number, **layout}
    measured = {} if step_s is None else {"step_s": step_s * number}
    return {"id": f"row {number}", "type": "train_step", "group": "lab", "weight": 1, "score": "absolute",
            "model": MODEL, "hardware": HARDWARE, "layout": layout, "measured": measured}  # fmt: skip


def scored(folder: Path, rows: list[Any], *words: str) -> subprocess.CompletedProcess[str]:
    file = folder / "rows.json"
    file.write_text(json.dumps({"rows": rows}))
    command = [sys.executable, str(BENCHMARK), "--rows", str(file), *words]
    return subprocess.run(command, text=True, capture_output=True, check=False, timeout=120)


def test_constants_of_a_group_predict_each_row_without_itself(tmp_path: Path) -> None:
    """A row that is predicted by its own measurement; a row that fits nothing and counts all the same."""
    report = tmp_path / "report.md"
    rows = [row(number) for number in range(1, 8)]
    done = scored(tmp_path, [*rows, {**row(9, 7.0), "weight": 0}], "--markdown", str(report))
    assert done.returncode == 0, done.stderr
    lines = [
        line.split("|") for line in report.read_text().splitlines() if line.startswith("| time, calibrated | A100")
    ]
    errors = {line[3].strip(): float(line[6].strip().rstrip("%")) for line in lines}
    assert len(errors) == 8
    assert max(abs(error) for name, error in errors.items() if name != "row 9") < 10
    assert errors["row 9"] < -50
    alone = scored(tmp_path, [*rows[:6], row(7, 1.0)], "--markdown", str(report))
    assert alone.returncode == 0
    (strange,) = [line for line in report.read_text().splitlines() if ", calibrated" in line and "| row 7 |" in line]
    assert float(strange.split("|")[6].strip().rstrip("%")) < -80  # the others say a tenth of it


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        ([row(1, None), row(2, dp=3), {**row(3), "hardware": {"name": "Z9"}}],
         ["row row 1: has no measured step_s", "row row 2:", "row row 3: hardware 'Z9' is not known"]),
        ([{"id": "a"}], ["row 0: needs id, type and group"]),
        ([{"id": "b", "type": "train_step", "group": "g"}], ["row b: lacks 'layout'"]),
    ],
)  # fmt: skip
def test_rows_that_make_no_plan_are_named_all_at_once(tmp_path: Path, rows: list[Any], problems: list[str]) -> None:
    """A traceback of a row, or a row that is left out in silence."""
    done = scored(tmp_path, rows)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for problem in problems:
        assert problem in done.stderr


@pytest.mark.parametrize(
    ("group", "layers", "stages", "expected"),
    [
        ("megatron_any", 8, 4, "2,2,2,2"),
        ("bloom_any", 6, 4, "1,2,2,1"),  # embedding and head count as layers
        ("megatron_any", 7, 4, "cost"),
        ("torchtitan_any", 10, 4, "2,3,3,2"),
        ("nanotron", 16, 2, "11,5"),  # the head costs 4 layers: 10 layers are half of all, not more than half
        ("nanotron", 16, 4, "6,5,5,0"),  # the last stage has the head alone
    ],
)
def test_stages_are_cut_as_the_program_cuts_them(group: str, layers: int, stages: int, expected: str) -> None:
    """A fullest or a slowest stage that the program does not have."""
    model = {**MODEL, "layers": layers, "hidden": 2048, "ffn": 8192, "vocab": 131072}
    assert cut_of({"group": group, "model": model}, stages) == expected


def test_traits_follow_from_the_program_and_the_layout() -> None:
    """A loss that ranks of tp divide holds one tensor more; a pipeline keeps gathered weights."""
    found = {
        name: software_of({"id": "a", "group": "torchtitan", "layout": layout, "measured": {}})
        for name, layout in {"alone": {}, "tp": {"tp": 8}, "pp": {"pp": 2}}.items()
    }
    assert {name: (one.logit_bytes, one.units) for name, one in found.items()} == {
        "alone": (12, "again"),
        "tp": (16, "again"),
        "pp": (12, "kept"),
    }


def test_memory_is_that_of_the_stage_that_was_measured_and_nothing_less() -> None:
    """Fault: the fullest stage is compared with rank 0's memory, or a group's constant hides what each plan holds."""
    found = {}
    for group in ("lab", "nanotron"):
        rows = [{**row(number, 0.1, dp=4, pp=2), "group": group, "model": {**MODEL, "layers": 8, "vocab": 131072}}
                for number in range(1, 6)]  # fmt: skip
        for one in rows:
            one["measured"]["memory_gb"] = 0.001  # less than any plan holds
        several = [priced(row_of(one)) for one in rows]
        errors = list(memory(several))
        held = [one.row.software.held_bytes for one in several]
        full = [[stage.total - free for stage in one.first.memory] for one, free in zip(several, held, strict=True)]
        place = 0 if group == "nanotron" else 1
        assert [max(stages) for stages in full] == [stages[1] for stages in full]  # the head's stage
        assert [error.predicted for error in errors] == pytest.approx([stages[place] for stages in full])
        found[group] = [words for _, right, words in fits(several, errors) if right]
    assert len(found["lab"]) == len(found["nanotron"]) == 5
