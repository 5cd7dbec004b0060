"""In: scripts of faults, arguments of `codescent prove --faults`. Out: the faults, or all that is wrong, before a run.
Does not make a fault: tests/faults/test_injection.py does."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import called

from codescent.base.errors import UserError
from codescent.launch.fault_script import EXAMPLE, Fault, FaultKind, parse_faults
from codescent.verbs.finding import LayoutResult, finding_of
from codescent.verbs.prove_faults import _not_once

RANKS, STEPS = 4, 20
RESTART, SHRINK = (("parallel.ranks=2", f"survive.on_loss={policy}") for policy in ("restart", "shrink"))


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        parse_faults(text, RANKS, STEPS)
    return caught.value.problems


def test_a_script_is_read_in_the_order_of_its_steps() -> None:
    """Fault: the example of the documentation is refused, or another rank or step is meant."""
    found = parse_faults(f" {EXAMPLE} ;", RANKS, STEPS)
    assert found == (
        Fault(FaultKind.KILL, 7, 2),
        Fault(FaultKind.STOP, 12, 1),
        Fault(FaultKind.JOIN, 15),
    )
    assert "; ".join(map(str, found)) == EXAMPLE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" ; ", "it is empty; an example is kill 2 at 7"),
        ("kil 2 at 7", "'kil' is no fault; did you mean kill?"),
        ("2 at 7", "'2' is no fault; write kill RANK at STEP, stop RANK at STEP, join at STEP"),
        ("kill at 7", "names no rank; write kill RANK at STEP, such as kill 2 at 7"),
        ("stop 1", "names no step; write stop RANK at STEP, such as stop 1 at 12"),
        ("stop 1 12", "names no step"),
        ("stop 1 2 at 12", "'1 2' is no number of a rank"),
        ("kill two at 7", "'two' is no number of a rank"),
        ("kill -1 at 7", "'-1' is no number of a rank"),
        ("kill 2 at noon", "'noon' is no number of a step"),
        ("kill 2 at 7 8", "'7 8' is no number of a step"),
        ("kill 2 at 9999999999", "'9999999999' is no number of a step"),
        ("kill ٢ at 7", "'٢' is no number of a rank"),
        ("kill 2 at 7; join 2 at 9", "a rank that joins is not named; write join at STEP, such as join at 15"),
        ("kill 4 at 7", "there is no rank 4: the run has 4 ranks, counted from 0"),
        ("kill 2 at 21", "there is no step 21: the run has 20 steps, counted from 1"),
        ("kill 2 at 0", "there is no step 0: the run has 20 steps, counted from 1"),
        ("join at 7", "no rank is missing then"),
        ("kill 2 at 7; join at 8; join at 9", "'join at 9': no rank is missing then"),
        ("kill 2 at 7; kill 1 at 7", "'kill 1 at 7': another fault is in step 7 already"),
        ("kill 2 at 7; kill 1 at 6", "'kill 1 at 6': comes after a fault in step 7"),
    ],
)
def test_what_is_wrong_with_a_script(text: str, said: str) -> None:
    """Fault: a run begins with a fault that cannot happen, and is called proved; or Python's error is shown."""
    (problem,) = problems(text)
    assert problem.startswith("--faults: ")
    assert said in problem


def test_all_problems_of_a_script_are_said_at_once() -> None:
    """Fault: one problem hides the next one."""
    found = problems("kill 9 at 30; stpo 1 at 3; kill at; join at 2")
    assert len(found) == 6
    assert [problem.split(": ")[1] for problem in found] == [
        "'stpo 1 at 3'",
        "'kill at'",
        "'kill at'",
        "'kill 9 at 30'",
        "'kill 9 at 30'",
        "'join at 2'",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--faults", "kill 9 at 7", "parallel.ranks=2"), "there is no rank 9: the run has 2 ranks"),
        (("--faults", "kill 0 at 7"), "nobody is left when this rank is lost; give at least 2"),
        (
            ("--faults", "kill 1 at 7", "parallel.ranks=2"),
            "a run ends when it loses a rank: set survive.on_loss to restart or shrink",
        ),
        (("--faults", "kill 1 at 7; join at 9", *RESTART), "'join at 9': a rank that is lost comes again by itself"),
        (("--faults", "kill 1 at 7; join at 9", *SHRINK, "survive.spares=1"), "survive.spares = 1: a spare takes"),
        (("--faults", "kill 1 at 7; join at 9", *SHRINK, "parallel.stopped_s=2"), "parallel.stopped_s = 2: all ranks"),
        (
            ("--faults", "kill 0 at 7; kill 1 at 9", *SHRINK),
            "'kill 1 at 9': there is no rank 1 then: the run has 1 rank",
        ),
        (("--faults", "kill 1 at 7; kill 0 at 9", *SHRINK), "no rank is left at the end; let one join before"),
        (("--faults", "kill 1 at 7", "--layouts", "tp=2", "--resume"), "layouts, resume would have no effect"),
        (("--faults", "kill 1 at 7", "parallel.ranks=2", "parallel.tp=3"), "parallel.tp = 3"),
    ],
)
def test_prove_refuses_before_a_run_begins(project: Path, words: tuple[str, ...], said: str) -> None:
    """Fault: a run that nothing lets go on is trained, killed, and told as a difference."""
    done = called(project, "prove", "run.toml", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_each_step_counts_once() -> None:
    """Fault: a step whose samples were taken twice, or never, has no other loss, and nobody sees it."""
    rows = [{"step": step} for step in (1, 2, 2, 4)]
    assert _not_once(rows, 4) == "step 2 is there 2 times; each step must be there once"
    assert _not_once(rows[:2], 3) == "step 3 is there 0 times; each step must be there once"
    assert not _not_once(rows[:2], 2)


def test_other_losses_than_those_of_the_run_left_alone_differ() -> None:
    """Fault: a run that lost a rank and went another way is told as the same."""
    alone = [{"train_loss": 2.0, "grad_norm": 1.0, "val_loss": 3.0}]
    faulted = [{**alone[0], "train_loss": 2.0 + 1e-8}]
    found: LayoutResult = finding_of(EXAMPLE, 4, faulted, alone)
    assert found.verdict(1e-9) == "DIFFERS"
