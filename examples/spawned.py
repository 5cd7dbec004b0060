"""In: --ranks N, all else optional. Out: a small model, trained on N processes that this program starts by mp.spawn.
Does not start ranks on other machines: a launcher does (`codescent docs launch`)."""

import argparse
import os
import socket

import torch
from torch import multiprocessing as mp

import codescent


def main(rank: int, ranks: int, port: int, epochs: int) -> None:
    """What each process does. mp.spawn gives it its number; the variables are those of torchrun."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with codescent.init() as joined:
        torch.manual_seed(0)
        inputs = torch.randn(256, 16)
        dataset = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=codescent.sampler(dataset, batch_size=32))
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(joined.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        codescent.distribute(model, optimizer)
        for epoch in range(epochs):
            for batch, targets in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(batch.to(joined.device)), targets.to(joined.device))
                loss.backward()
                optimizer.step()
            joined.print(f"epoch {epoch}: loss {joined.mean(loss):.10f}")


def free_port() -> int:
    """A port of this machine at which rank 0 can listen."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":  # mp.spawn imports this file again in each process
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: give at least 1")
    mp.spawn(main, args=(args.ranks, free_port(), args.epochs), nprocs=args.ranks)
