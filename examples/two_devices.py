"""In: sizes on the command line, all optional. Out: a module whose halves lie on two devices, trained on any number of
ranks: each rank has a replica on two devices of its own.
Does not start ranks: `python examples/two_devices.py`, or `torchrun --nproc-per-node 2 examples/two_devices.py`."""

import argparse

import torch
from torch import nn

import codescent


class TwoHalves(nn.Module):
    """A perceptron. Its first half is on one device, its second half on another."""

    def __init__(self, features: int, width: int, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.second = second
        self.front = nn.Sequential(nn.Linear(features, width), nn.GELU()).to(first)
        self.back = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)).to(second)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs on the first device, outputs on the second: activations cross over here, and gradients come back."""
        outputs: torch.Tensor = self.back(self.front(inputs).to(self.second))
        return outputs


parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--samples", type=int, default=256)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--device", default="auto", help="cpu: both halves are on the CPU")
args = parser.parse_args()

ranks = codescent.init(args.device, devices_per_rank=2)
first, second = ranks.devices

torch.manual_seed(0)
inputs = torch.randn(args.samples, 16)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(dataset, batch_sampler=codescent.sampler(dataset, batch_size=32))

model = TwoHalves(16, args.width, first, second)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
codescent.distribute(model, optimizer)

for epoch in range(args.epochs):
    for batch, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch.to(first)), targets.to(second))
        loss.backward()
        codescent.clip_(model, 1.0)
        optimizer.step()
    ranks.print(f"epoch {epoch}: loss {ranks.mean(loss):.10f}")
