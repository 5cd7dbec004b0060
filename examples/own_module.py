"""In: sizes on the command line, all optional. Out: an encoder-decoder Transformer, trained on any number of ranks.
Does not start ranks: call `python examples/own_module.py`, or `torchrun --nproc-per-node 2 examples/own_module.py`."""

import argparse

import torch

import codescent

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--samples", type=int, default=256)
parser.add_argument("--features", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

ranks = codescent.init()
device = ranks.device

torch.manual_seed(0)

src = torch.rand((args.samples, 1, args.features))
tgt = torch.rand((args.samples, 20, args.features))
dataset = torch.utils.data.TensorDataset(src, tgt)
loader = torch.utils.data.DataLoader(dataset, batch_sampler=codescent.sampler(dataset, batch_size=32))

model = torch.nn.Transformer(
    args.features, 8, args.layers, args.layers, 4 * args.features, args.dropout, batch_first=True
)
model = model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
codescent.distribute(model, optimizer, args.strategy)
torch.manual_seed(ranks.rank)  # each rank draws its own dropout masks
criterion = torch.nn.MSELoss()
model.train()

for epoch in range(args.epochs):
    for source, targets in loader:
        source = source.to(device)
        targets = targets.to(device)
        optimizer.zero_grad()

        output = model(source, targets)
        loss = criterion(output, targets)

        loss.backward()
        optimizer.step()
    ranks.print(f"epoch {epoch}: loss {ranks.mean(loss):.10f}")
