"""In: what this rank has applied, if it is a server or averages beside the computation. Out: its order files.
Does not know their format (record/order.py and record/gossip_order.py do)."""

from __future__ import annotations

from pathlib import Path

from codescent.record import gossip_order, order
from codescent.strategies.pair_exchange import PairExchange
from codescent.train.execute import Executor


def rewind_order(executor: Executor, path: Path, first_step: int) -> None:
    """Remove from the order of what was applied what came after the checkpoint."""
    if (serving := executor.serving) is not None:
        serving.begin(order.rewind(path, serving.index, first_step))
    if isinstance(executor.exchange, PairExchange):
        gossip_order.rewind(path, executor.exchange.index, first_step)


def append_order(executor: Executor, path: Path) -> None:
    """Write down what this rank has applied since the ranks met before."""
    if executor.serving is not None:
        order.append(path, executor.serving.index, executor.serving.take_order())
    if isinstance(executor.exchange, PairExchange):
        gossip_order.append(path, executor.exchange.index, executor.exchange.take_order())
