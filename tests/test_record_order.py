"""In: files of the order of pushes, whole and torn. Out: that a resumed run keeps the rows before its checkpoint.
Does not run servers: test_parameter_server_faults.py does."""

from __future__ import annotations

from pathlib import Path

import pytest

from codescent.record import order

ROWS = [
    order.Applied(worker=at % 2, number=1 + at // 2, base=at, version=at, step=at // 2, part=at % 2) for at in range(6)
]


@pytest.mark.parametrize("portions", [0, 1, 4, 6])
def test_a_torn_row_behind_the_checkpoint_is_cut_off(tmp_path: Path, portions: int) -> None:
    order.append(tmp_path, 0, ROWS)
    with order.file_of(tmp_path, 0).open("a", encoding="utf-8") as file:
        file.write('{"worker": 1, "num')
    assert order.rewind(tmp_path, 0, portions) == portions
    assert order.read(tmp_path, 0, portions) == ROWS[:portions]
    order.append(tmp_path, 0, ROWS[portions:])
    assert order.read(tmp_path, 0, 6) == ROWS


def test_a_portion_in_two_pushes_is_kept_whole(tmp_path: Path) -> None:
    parts = [order.Applied(0, number, 0, number, 0, 0, first, 2) for number, first in ((1, 0), (2, 2), (3, 0))]
    order.append(tmp_path, 0, parts)
    assert order.rewind(tmp_path, 0, 1, period=4) == 2
    assert order.read(tmp_path, 0, 1, period=4) == parts[:2]
