"""In: nothing. Out: the files and the sentences of docs/paper_plans.md, with names where figures stand.
Holds no figure that is predicted (paper_plans.py has them from the commands)."""

from __future__ import annotations

TRILLION_FILE = """\
[model]
kind = "gpt2"
num_layers = 128
num_heads = 160
hidden_dim = 25_600
vocab_size = 51_200
seq_len = 2048

[data]
corpus = "synthetic"
seq_len = 2048

[train]
global_batch_size = 3072
microbatch_size = 1
precision = "bf16"

[parallel]
tp = 8
pp = 64
dp_replicate = 6
schedule = "interleaved"
virtual_stages = 2
recompute = "full"
"""

FOUNDING_FILE = """\
[model]
kind = "gpt2"
num_layers = 120
num_heads = 96
hidden_dim = 12_288
vocab_size = 50_257
seq_len = 2048

[data]
corpus = "synthetic"
seq_len = 2048

[train]
global_batch_size = 128
microbatch_size = 128
precision = "bf16"

[parallel]
recompute = "full"
"""

HEAD = """\
# Paper plans

<!-- `python benchmarks/paper_plans.py` writes this page; tests/test_paper_plans.py compares -->

These plans need machines that few have. Each is one command on a laptop, without a GPU and without data.
Seconds and bytes are predicted with constants of data sheets ([how a price is made](prices.md)).

"""

TRILLION = """\
## A trillion parameters on 3,072 devices

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", measured 163
TFLOP/s on each of 3,072 A100. `trillion.toml` is this run, the last row of table 1:

```toml
{file}
```

    $ codescent plan {command}

```text
{screen}
```

The parameters are 12 L h² + 13 L h + (V + s) h + 2 h, with L blocks, h channels, V tokens and s positions. Each takes
20 bytes on a device: 2 of weights, 6 of gradients and 12 of the optimizer. Gradients are in bf16, their sums over
micro-batches in fp32. The master weights and both tensors of Adam are in fp32, too.

The authors had a program of 2021: attention was not fused, and gradients were summed at the end. `selene.toml` has its
traits, those of [benchmarks/prediction_error.py](../benchmarks/README.md):

```toml
{traits}
```

    $ codescent plan {megatron}

{table}

TFLOP/s are those of their equation 3, which counts what is computed again: 96 B s L h² (1 + s / 6 h + V / 16 L h). The
published seconds are these FLOPs over 3,072 times 163 TFLOP/s. The table names no micro-batch: 1 is assumed. No
constant was fitted on this run; smaller runs of the same table are among the [rows](prices.md#how-far-it-errs).
codescent fuses attention and divides norms along the sequence, so it should take less time than their program.
"""

LLAMA = """\
## Llama 3 405B on 16,384 devices

Llama Team 2024, "The Llama 3 Herd of Models", section 3.3 and table 4, reports an MFU of 38 to 43 % on H100, with an
interleaved pipeline.

    $ codescent plan {command}

```text
{screen}
```

{table}

* The second row is the screen above. The first one has `{first}`, the third one `{long}`.
* The last two columns add `parallel.recompute=none`.
* In the paper the first virtual stage is the embedding alone, and the last one the head alone. Here each needs a block.
  With four on a rank each has two blocks, except the first and the last.
* With 8,192 tokens the paper computes nothing again. codescent keeps the gathered inputs of products that `tp` divides.
  So without `parallel.recompute` its stages hold more than a device has.
* The command may take 2.5 s on one core; `benchmarks/startup.py` measures it.
"""

FOUNDING = """\
## The founding document's trillion

The founding document "Distributed training with PyTorch" counts the memory of 10¹² parameters in 16 bits: 2 TB of
parameters, 2 TB of gradients, 4 TB of the optimizer. To this come 0.8 TB of activations of 120 layers, 12K channels and
128 samples of 2K tokens. It says: "So, in total, we will need at least 10.8 TB of memory." `founding.toml` is the same
case:

```toml
{file}
```

With 26,368 channels its 120 blocks have a trillion parameters. One device would hold:

    $ codescent plan {command}

```text
{screen}
```

{table}

* **The sum is wrong.** 2 + 2 + 4 + 0.8 are 8.8 TB.
* **The optimizer takes 12 bytes a parameter, not 4.** Adam's two tensors are in fp32, and so are the master weights.
  Small updates would be lost in 16 bits.
* **The activations are those of a smaller model.** 120 blocks of 12,288 channels have 0.218 · 10¹² parameters.
* **0.8 TB are the inputs of the blocks alone**, as with `parallel.recompute = "full"`. The tool adds what the head
  keeps, and the block that is computed again. With `"none"` a trillion parameters keep {kept} TB.

On 256 B200 the same model has room:

    $ codescent plan {fitting}
    {fits}
"""
