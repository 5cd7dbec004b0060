"""In: one rank of several groups. Out: how attention over a split sequence differs from one device's, for each group.
Does not assert anything (test_ring does) and starts no process (rank_server does)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_server import IN_ORDER, Place
from test_products import NoBf16Product
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from codescent.operators import products
from codescent.operators.attention import attend, hidden_keys
from codescent.operators.dropout import sample_keys
from codescent.plan import Verb
from codescent.strategies import causal_tiles
from codescent.strategies.ring import Gather, Ring, split_attention

BATCH, HEAD_DIM, SEQ_LEN, LONG = 2, 8, 48, 384
BATCH_KEYS = sample_keys(3, 5, torch.arange(BATCH))
GROUPS = [[3], [1, 0], [2, 0, 1], [3, 2, 1, 0]]  # a rank of the group is another of the world
if not IN_ORDER:
    GROUPS = [sorted(ranks) for ranks in GROUPS]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def by(exchange: type[Ring | Gather]) -> Callable[..., Tensor]:
    return lambda q, k, v, group, *rest, **options: split_attention(q, k, v, exchange(group), *rest, **options)


METHODS = {"ring": by(Ring), "gather": by(Gather)}
KINDS = {"send": "send", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
CASES: list[dict[str, Any]] = [
    {"precision": precision, "heads": heads, "kv_heads": kv_heads, "dropout": dropout, "queries": queries}
    for precision in DTYPES
    for heads, kv_heads in ((3, 3), (4, 2), (4, 1))
    for dropout in (0.0, 0.3)
    for queries in (5, 128)  # 5: blocks that reach over the middle, and a shorter last one
    if precision == "fp64" or (heads, queries) == (4, 5)
]


class Watch(TorchDispatchMode):
    """Notes what this rank hands in to the process group, and the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.verb = Verb.FORWARD
        self.issued: list[list[Any]] = []
        self.largest_numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name in KINDS:
            payload = args[0][0] if name == "send" else args[0] if "gather" in name else args[1]
            size = payload.numel() * payload.element_size()
            self.issued.append([KINDS[name], str(self.verb), size, str(payload.dtype).removeprefix("torch.")])
        elif func.namespace == "c10d" and name != "recv_":
            raise AssertionError(f"{name} is not declared")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func.namespace == "aten":
            self.largest_numel = max(self.largest_numel, result.numel())
        return result


def values(heads: int, seed: int, dtype: torch.dtype, seq_len: int = SEQ_LEN) -> Tensor:
    """[B, heads, S, K], the same on every rank; strided as a projection leaves it."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(BATCH, seq_len, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
    return wide.to(dtype).transpose(1, 2)


def one_device(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """The model's own attention with dropped probabilities, in fp64, each kv head repeated for its query heads."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    hidden = hidden_keys(q.transpose(1, 2), None, causal=True)
    return attend(q, k, v, hidden, BATCH_KEYS, dropout, first_head=0)


def relative(mine: list[Tensor], reference: list[Tensor]) -> list[float]:
    return [
        ((one.double() - other).abs().max() / other.abs().max()).item()
        for one, other in zip(mine, reference, strict=True)
    ]


def case(spec: dict[str, Any], group: Any) -> dict[str, Any]:
    """Each method's relative errors of y, d_q, d_k, d_v here; what it issued; whether both y are one to the bit."""
    causal_tiles.BLOCK_QUERIES = spec["queries"]
    dtype, heads, kv_heads, dropout = (spec[key] for key in ("precision", "heads", "kv_heads", "dropout"))
    dtype = DTYPES[dtype]
    inputs = [values(number, seed, dtype) for seed, number in enumerate((heads, kv_heads, kv_heads))]
    upstream = values(heads, 9, dtype)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    y = one_device(*exact, dropout)
    reference = [y.detach(), *torch.autograd.grad(y, exact, upstream.double())]
    here = causal_tiles.balanced_positions(SEQ_LEN, group.size(), group.rank())
    answer: dict[str, Any] = {"spec": spec, "errors": {}, "issued": {}, "dtypes": []}
    outputs = []
    for name, method in METHODS.items():
        local = [tensor[:, :, here].requires_grad_() for tensor in inputs]
        with Watch() as watch:
            y = method(*local, group, BATCH_KEYS if dropout else None, dropout)
            watch.verb = Verb.BACKWARD
            gradients = torch.autograd.grad(y, local, upstream[:, :, here])
        mine = [y.detach(), *gradients]
        answer["errors"][name] = relative(mine, [tensor[:, :, here] for tensor in reference])
        answer["issued"][name] = watch.issued
        answer["dtypes"] += [tensor.dtype == dtype for tensor in mine]
        outputs.append(mine[0])
    answer["same"] = torch.equal(*outputs)
    return answer


def some_heads(group: Any) -> list[float]:
    """Errors of y where this rank has only the heads from the second on, as tensor parallelism will leave them."""
    q, k, v = (values(4, seed, torch.float64) for seed in range(3))
    here = causal_tiles.balanced_positions(SEQ_LEN, group.size(), group.rank())
    y = one_device(q, k, v, 0.3)[:, 1:, here]
    local = [tensor[:, 1:, here] for tensor in (q, k, v)]
    found = [method(*local, group, BATCH_KEYS, 0.3, first_head=1) for method in METHODS.values()]
    return relative(found, [y, y])


def layers(group: Any) -> list[float]:
    """Errors of the gradient of three layers of each method, one upon the other, in two backward passes."""
    x = values(2, 1, torch.float64)
    here = causal_tiles.balanced_positions(SEQ_LEN, group.size(), group.rank())
    exact, local = x.clone().requires_grad_(), x[:, :, here].requires_grad_()
    y, mine = exact, local
    for _ in range(3):
        for method in METHODS.values():
            y, mine = one_device(y, y, y, 0.0), method(mine, mine, mine, group)
    (expected,) = torch.autograd.grad(y, exact, torch.ones_like(y))
    found = [torch.autograd.grad(mine, local, torch.ones_like(mine), retain_graph=True)[0] for _ in range(2)]
    return relative(found, [expected[:, :, here]] * 2)


def compiled(group: Any, name: str) -> list[float]:
    """Errors of y and d_q of a method in the middle of what torch.compile is given, with dropout."""
    here = causal_tiles.balanced_positions(SEQ_LEN, group.size(), group.rank())
    whole = [values(2, seed, torch.float64) for seed in range(3)]
    exact = whole[0].clone().requires_grad_()
    y = one_device(exact * 2, *whole[1:], 0.3) * 3
    expected = [tensor[:, :, here] for tensor in (y, *torch.autograd.grad(y, exact, torch.ones_like(y)))]
    q, k, v = (tensor[:, :, here] for tensor in whole)
    q.requires_grad_()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return METHODS[name](q * 2, k, v, group, BATCH_KEYS, 0.3) * 3

    mine = torch.compile(layer, backend="aot_eager")(q, k, v)
    return relative([mine.detach(), *torch.autograd.grad(mine, q, torch.ones_like(mine))], expected)


def compiled_on_two(place: Place, method: str) -> list[float]:
    """`compiled`, as one of two ranks."""
    return compiled(place.join(), method)


def largest(group: Any) -> dict[str, int]:
    """Elements of the largest tensor that an operator makes, with blocks of 16 queries of LONG positions."""
    causal_tiles.BLOCK_QUERIES = 16
    here = causal_tiles.balanced_positions(LONG, group.size(), group.rank())
    found = {}
    for name, method in METHODS.items():
        local = [values(2, seed, torch.float32, LONG)[:, :, here].requires_grad_() for seed in range(3)]
        with Watch() as watch:
            method(*local, group, BATCH_KEYS, 0.1).sum().backward()
        found[name] = watch.largest_numel
    return found


def bf16_products(place: Place, method: str) -> list[str]:
    """The products of bf16 matrices that reach torch where the processor has none, with and without dropout."""
    group = place.join()
    products.widen_bf16(True)
    here = causal_tiles.balanced_positions(SEQ_LEN, group.size(), group.rank())
    with NoBf16Product() as mode:
        for dropout, keys in ((0.0, None), (0.3, BATCH_KEYS)):
            q, k, v = (values(2, seed, torch.bfloat16)[:, :, here].requires_grad_() for seed in range(3))
            METHODS[method](q, k, v, group, keys, dropout).sum().backward()
    return mode.found


def work(place: Place, sizes: list[int]) -> dict[int, tuple[int, dict[str, Any]]]:
    """By size of the group, of those sizes: this rank's number in it and what it found."""
    place.join()
    groups = [dist.new_group(ranks, **IN_ORDER) for ranks in GROUPS]
    found = {}
    for ranks, group in zip(GROUPS, groups, strict=True):
        if place.rank not in ranks or len(ranks) not in sizes:
            continue
        assert group.rank() == ranks.index(place.rank)
        answer = {
            "cases": [case(spec, group) for spec in CASES],
            "some_heads": some_heads(group),
            "layers": layers(group),
            "largest": largest(group),
        }
        found[len(ranks)] = group.rank(), answer
    dist.barrier()
    return found
