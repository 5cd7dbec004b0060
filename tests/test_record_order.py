"""In: files of the order of pushes, whole and torn. Out: that a resumed run keeps the rows before its checkpoint.
Does not run servers: test_parameter_server_faults.py does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.record import gossip_order, order
from codescent.servers.changes import AGREED, STEPPED, Changed

ROWS = [
    order.Applied(worker=at % 2, number=1 + at // 2, base=at, version=at, step=at // 2, part=at % 2) for at in range(6)
]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_what_came_after_the_checkpoint_is_cut_off(tmp_path: Path, steps: int) -> None:
    order.append(tmp_path, 0, ROWS)
    with order.file_of(tmp_path, 0).open("a", encoding="utf-8") as file:
        file.write('{"worker": 1, "num')
    assert order.rewind(tmp_path, 0, steps) == 2 * steps
    assert order.read(tmp_path, 0, steps, 2) == ROWS[: 2 * steps]
    order.append(tmp_path, 0, ROWS[2 * steps :])
    assert order.read(tmp_path, 0, 3, 2) == ROWS


def test_a_portion_in_two_pushes_is_kept_whole(tmp_path: Path) -> None:
    parts = [order.Applied(0, at, 0, at, step, 0, first, 2) for at, step, first in ((1, 0, 0), (2, 0, 2), (3, 4, 0))]
    order.append(tmp_path, 0, parts)
    assert order.rewind(tmp_path, 0, 4) == 2
    assert order.read(tmp_path, 0, 4, 1, period=4) == parts[:2]


@pytest.mark.parametrize("damage", [b"", b"\0" * 40, b'{"worker": 1, "num', b"[1]\n"])
def test_rows_that_a_power_cut_took_do_not_stop_the_run_and_are_refused_in_a_replay(
    tmp_path: Path, damage: bytes
) -> None:
    order.append(tmp_path, 0, ROWS[:4])
    path = order.file_of(tmp_path, 0)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]) + damage)
    assert order.rewind(tmp_path, 0, 2) == 3
    order.append(tmp_path, 0, ROWS[4:])
    with pytest.raises(UserError, match="does not have each of the 2 parts of the first 3 steps once"):
        order.read(tmp_path, 0, 3, 2)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_resumed_with_other_workers_keeps_its_checkpoint_and_is_not_replayed(
    tmp_path: Path, workers: int
) -> None:
    order.append(tmp_path, 0, ROWS)
    assert order.rewind(tmp_path, 0, 2) == 4  # those of step 2 are lost updates
    order.append(tmp_path, 0, [order.Applied(part, 1, 4, 4 + part, 2, part) for part in range(workers)])
    for parts in (2, workers):
        with pytest.raises(UserError, match="another number of workers"):
            order.read(tmp_path, 0, 3, parts)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_meetings_that_a_power_cut_took_do_not_stop_the_run_and_are_refused_in_a_replay(
    tmp_path: Path, left: int
) -> None:
    rows = [Changed(STEPPED, -1, 0, 0, 0), Changed(AGREED, -1, -1, 1), Changed(STEPPED, -1, 0, 1, 0)]
    gossip_order.append(tmp_path, 0, rows)
    path = gossip_order.file_of(tmp_path, 0)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:left]) + b"\0\0")
    gossip_order.rewind(tmp_path, 0, 2)
    gossip_order.append(tmp_path, 0, [Changed(AGREED, -1, -1, 3)])
    with pytest.raises(UserError, match="cannot be read"):
        gossip_order.read(tmp_path, 0, 3)
    gossip_order.rewind(tmp_path, 0, 0)
    assert not path.exists()


@pytest.mark.parametrize("field", [{"step": -1}, {"step": "1"}, {"part": 1.0}, {"part": -1}, {"partner": None}])
def test_a_change_with_a_wrong_field_is_refused(tmp_path: Path, field: dict[str, object]) -> None:
    row = {**asdict(Changed(STEPPED, -1, 0, 0, 0)), **field}
    order.add_rows(gossip_order.file_of(tmp_path, 0), [row, asdict(Changed(AGREED, -1, -1, 1))])
    with pytest.raises(UserError, match="no whole number of at least"):
        gossip_order.read(tmp_path, 0, 1)


@pytest.mark.parametrize("field", [{"base": -1}, {"base": float("nan")}, {"step": "1"}, {"part": None}])
def test_a_push_with_a_wrong_field_is_refused_and_does_not_stop_a_resume(
    tmp_path: Path, field: dict[str, object]
) -> None:
    order.add_rows(order.file_of(tmp_path, 0), [asdict(ROWS[0]), {**asdict(ROWS[1]), **field}])
    with pytest.raises(UserError, match="no whole number of at least 0"):
        order.read(tmp_path, 0, 1, 2)
    assert order.rewind(tmp_path, 0, 1) == 1


def test_a_row_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    order.file_of(tmp_path, 0).mkdir(parents=True)
    with pytest.raises(UserError, match="server_0"):
        order.append(tmp_path, 0, ROWS)
