"""In: files of the order of pushes, whole and torn. Out: that a resumed run keeps the rows before its checkpoint.
Does not run servers: test_parameter_server_faults.py does."""

from __future__ import annotations

from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.record import gossip_order, order
from codescent.servers.changes import AGREED, STEPPED, Changed

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


@pytest.mark.parametrize("damage", [b"", b"\0" * 40, b'{"worker": 1, "num', b"[1]\n"])
def test_rows_that_a_power_cut_took_do_not_stop_the_run_and_are_refused_in_a_replay(
    tmp_path: Path, damage: bytes
) -> None:
    order.append(tmp_path, 0, ROWS[:3])
    path = order.file_of(tmp_path, 0)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + damage)
    assert order.rewind(tmp_path, 0, 3) == 2
    order.append(tmp_path, 0, ROWS[3:])
    with pytest.raises(UserError, match="has 5 pushes, the checkpoint 6"):
        order.read(tmp_path, 0, 6)


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


def test_a_row_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    order.file_of(tmp_path, 0).mkdir(parents=True)
    with pytest.raises(UserError, match="server_0"):
        order.append(tmp_path, 0, ROWS)
