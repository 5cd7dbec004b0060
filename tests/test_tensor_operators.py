"""In: real process groups of 1, 2 and 4 ranks. Out: the operators of tensor parallelism do what one device does.
Does not build a model. One process forks the ranks of each degree, which run every case; (degree, case) is a test."""

from __future__ import annotations

import functools
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import selected
from forker import Forker
from rank_server import Place
from torch import Tensor
from torch.autograd import backward
from torch.utils._python_dispatch import TorchDispatchMode

from codescent.operators import compiled as alone
from codescent.operators import fused_softmax
from codescent.operators.head import head_loss, tied_embedding
from codescent.plan.objective import Objective
from codescent.strategies.sequence import enter, gather_alike, gather_sequence, leave, scatter_sum
from codescent.strategies.vocabulary import SplitVocabulary

DEGREES = (1, 2, 4)
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
KINDS = {
    "allreduce_": "ALL_REDUCE",
    "_allgather_base_": "ALL_GATHER",
    "_reduce_scatter_base_": "REDUCE_SCATTER",
    "send": "SEND",
}
Group = dist.ProcessGroup
Issued = list[tuple[str, int, torch.dtype]]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same on every rank, and in every dtype the same but for its rounding."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_tokens(seed: int, vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def part(x_BTD: Tensor, group: Group) -> Tensor:
    """This rank's positions."""
    return x_BTD.chunk(group.size(), 1)[group.rank()]


def rows(weight_VD: Tensor, group: Group) -> Tensor:
    """This rank's rows: as torch.chunk cuts, and none where that gives fewer chunks than there are ranks."""
    chunks = weight_VD.chunk(group.size())
    return chunks[group.rank()] if group.rank() < len(chunks) else weight_VD[:0]


def relative(mine: Tensor | None, expected: Tensor | None) -> float:
    assert mine is not None
    assert expected is not None
    assert mine.shape == expected.shape, (mine.shape, expected.shape)
    if not expected.numel():
        return 0.0
    error: float = ((mine.double() - expected.double()).norm() / (expected.double().norm() + 1e-300)).item()
    return error


def check(bound: float, *pairs: tuple[Tensor | None, Tensor | None]) -> None:
    errors = [relative(*pair) for pair in pairs]
    assert all(error <= bound for error in errors), errors


@contextmanager
def watched() -> Iterator[Issued]:
    """The collectives that torch issues: kind, payload bytes, dtype."""
    issued: Issued = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d" and func._schema.name != "c10d::recv_":
                name = func._schema.name.removeprefix("c10d::")
                payload = args[0][0] if name in ("allreduce_", "send") else args[0] if "gather" in name else args[1]
                issued.append((KINDS[name], payload.numel() * payload.element_size(), payload.dtype))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield issued


def over_gloo(declared: Issued, n: int) -> Issued:
    """What n ranks issue for these collectives over gloo: messages where by_messages.py makes a collective of them."""
    issued: Issued = []
    for kind, size, dtype in declared if n > 1 else []:
        if kind == "REDUCE_SCATTER" or (kind == "ALL_GATHER" and n == 2):
            issued += [("SEND", size // n, dtype)] * (n - 1)
        else:
            issued.append((kind, size, dtype))
    return issued


# ---- cases: each runs on every rank of a group; all that communicates comes before anything that may fail ----


def conjugates(group: Group) -> None:
    """Each operator and its gradient, in every dtype, one sample and several, one collective each way."""
    n, rank = group.size(), group.rank()
    answers = []
    for dtype in BOUND:
        for samples in (1, 3):
            shape = (samples, 4 * n, 5)
            each = [draw(seed, *shape, dtype=dtype) for seed in range(n)]  # one whole tensor of each rank
            total, whole = sum(each[1:], each[0]), draw(99, *shape, dtype=dtype)
            size = whole.numel() * whole.element_size()
            gather, scatter = [("ALL_GATHER", size, dtype)], [("REDUCE_SCATTER", size, dtype)]
            reduce: Issued = [("ALL_REDUCE", size, dtype)]
            for operator, x, weight, value, gradient, forward, back in (
                (gather_sequence, part(whole, group), each[rank], whole, part(total, group), gather, scatter),
                (scatter_sum, each[rank], part(whole, group), part(total, group), whole, scatter, gather),
                (enter, whole, each[rank], whole, total, [], reduce),
                (leave, each[rank], whole, total, whole, reduce, []),
                (gather_alike, part(whole, group), each[0], whole, part(each[0], group), gather, []),
            ):
                x = leaf(x)
                with watched() as sent:
                    y = operator(x, group)
                with watched() as sent_back:
                    backward((y * weight).sum())
                answers.append((dtype, operator, x, y, value, gradient, sent, sent_back, forward, back))
    for dtype, operator, x, y, value, gradient, sent, sent_back, forward, back in answers:
        assert y.dtype == dtype
        assert y.is_contiguous() or n == 1
        check(BOUND[dtype], (y.detach(), value), (x.grad, gradient))
        assert (sent, sent_back) == (over_gloo(forward, n), over_gloo(back, n)), operator
        assert n > 1 or y is x


def strides(group: Group) -> None:
    """Inputs and gradients that are not contiguous, and inputs that others hold too: they stay as they are."""
    n = group.size()
    transposed = leaf(draw(1, 4 * n, 3, 5).transpose(0, 1))
    together = scatter_sum(transposed, group)
    backward(together.sum())  # an expanded gradient
    local = leaf(draw(2, 2, 5, 3).transpose(1, 2))
    gathered = gather_sequence(local, group)
    backward(gathered.sum())
    shared = leaf(draw(3, 2, 4, 5))
    held = shared * 1.0
    backward((leave(held, group) + enter(held, group) + held).sum())
    check(1e-15, (together.detach(), n * part(transposed.detach(), group)))
    check(1e-15, (transposed.grad, torch.ones_like(transposed)), (local.grad, torch.full_like(local, n)))
    check(1e-15, (held.detach(), shared.detach()), (shared.grad, torch.full_like(shared, 2 + n)))


def feed_forward(group: Group) -> None:
    """A column-parallel and a row-parallel matrix between the operators are the two matrices of one device."""
    n, rank = group.size(), group.rank()
    answers = []
    for dtype in (torch.float64, torch.float32):
        x, up, down = leaf(draw(1, 2, 4 * n, 6, dtype=dtype)), draw(2, 6, 8, dtype=dtype), draw(3, 8, 6, dtype=dtype)
        weights = leaf(up), leaf(down)
        y = F.gelu(x @ weights[0]) @ weights[1]
        backward(y.square().sum())
        for sequence_parallel in (False, True):
            mine = leaf(part(x.detach(), group) if sequence_parallel else x.detach())
            shards = leaf(up.chunk(n, 1)[rank]), leaf(down.chunk(n, 0)[rank])
            hidden = F.gelu((gather_sequence if sequence_parallel else enter)(mine, group) @ shards[0])
            out = (scatter_sum if sequence_parallel else leave)(hidden @ shards[1], group)
            # Whole on every rank, the loss is one number that each computes; divided, each has its part of it.
            backward(out.square().sum())
            expected = [part(t, group) if sequence_parallel else t for t in (y.detach(), x.grad)]  # type: ignore[arg-type]
            answers.append((dtype, out.detach(), expected[0], mine.grad, expected[1]))
            answers.append((dtype, shards[0].grad, weights[0].grad.chunk(n, 1)[rank], *(None, None)))  # type: ignore[union-attr]
            answers.append((dtype, shards[1].grad, weights[1].grad.chunk(n, 0)[rank], *(None, None)))  # type: ignore[union-attr]
    for dtype, a, b, c, d in answers:
        check(BOUND[dtype], (a, b), *([] if c is None else [(c, d)]))


def compiled(group: Group) -> None:
    """Each operator as a graph of its own, whose outputs torch may take for views of its inputs."""
    n, rank = group.size(), group.rank()
    if n != 2:  # what is compiled does not depend on the number of ranks, and takes long
        return
    answers = []
    each, whole = [draw(seed, 1, 4 * n, 5) for seed in range(n)], draw(99, 1, 4 * n, 5)
    total = sum(each[1:], each[0])
    for operator, x, weight, value, gradient in (
        (gather_sequence, part(whole, group), each[rank], whole, part(total, group)),
        (scatter_sum, each[rank], part(whole, group), part(total, group), whole),
        (enter, whole, each[rank], whole, total),
        (leave, each[rank], whole, total, whole),
    ):
        x = leaf(x)
        y = torch.compile(lambda x, act=operator: act(x, group).flatten(0, 1), backend="aot_eager")(x)
        backward((y * weight.flatten(0, 1)).sum())
        answers.append((y.detach(), value.flatten(0, 1), x.grad, gradient))
    for y, value, mine, gradient in answers:
        check(1e-12, (y, value), (mine, gradient))


class Ends:
    """The two ends of a model, on one device and divided, with the same numbers.

    Between them the activations are made as large as they would be after a norm, so that softmax has work to do.
    """

    def __init__(
        self, group: Group, vocab_size: int, dtype: torch.dtype, sequence_parallel: bool, sharpness: float = 2.0
    ) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.tokens_BT = draw_tokens(1, vocab_size, 2, 8)
        self.targets_BT = draw_tokens(2, vocab_size, 2, 8)
        self.weight_VD, self.noise_BTD = draw(3, vocab_size, 12, dtype=dtype), draw(4, 2, 8, 12, dtype=dtype)
        self.sharpness = sharpness
        self.split = SplitVocabulary(group, vocab_size, sequence_parallel=sequence_parallel)

    def local(self, x_BTD: Tensor) -> Tensor:
        return part(x_BTD, self.group) if self.sequence_parallel else x_BTD

    def alone(
        self, chunk: int, scale: float, port_dtype: torch.dtype | None, factor: float, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Loss, embedded tokens, gradients of the matrix and of what is added to them: this rank's part of each."""
        weight_VD, noise_BTD = leaf(self.weight_VD.to(dtype)), leaf(self.noise_BTD.to(dtype))
        if port_dtype is None:
            x_BTD, port_VD = F.embedding(self.tokens_BT, weight_VD), None
        else:
            x_BTD, port_VD = tied_embedding(weight_VD, self.tokens_BT, port_dtype)
        x_ND = (self.sharpness * x_BTD + noise_BTD).flatten(0, 1)
        loss = head_loss(x_ND, weight_VD, self.targets_BT.flatten(), chunk, scale, port_VD)
        backward(factor * loss)
        assert weight_VD.grad is not None
        assert noise_BTD.grad is not None
        gradients = rows(weight_VD.grad, self.group), self.local(noise_BTD.grad)
        return loss.detach(), self.local(x_BTD.detach()), *gradients

    def divided(
        self, chunk: int, scale: float, port_dtype: torch.dtype | None, factor: float
    ) -> tuple[Tensor | None, ...]:
        """The same by SplitVocabulary."""
        weight_vD, noise = leaf(rows(self.weight_VD, self.group)), leaf(self.local(self.noise_BTD))
        x, port_vD = self.split.embed(weight_vD, self.tokens_BT, port_dtype)
        h = self.sharpness * x + noise
        loss = self.split.loss(h, weight_vD, self.targets_BT, chunk, scale, port_vD)
        backward(factor * loss)
        return loss.detach(), x.detach(), weight_vD.grad, noise.grad


def vocabulary_is_that_of_one_device(group: Group, vocab_size: int) -> list[str]:
    """Loss and gradients in fp64 and fp32, tied by a port or not, in chunks or not; the loss to the bit, to compare."""
    answers = []
    for dtype in (torch.float64, torch.float32):
        for sequence_parallel in (False, True):
            ends = Ends(group, vocab_size, dtype, sequence_parallel)
            assert (ends.split.last - ends.split.first, 12) == rows(ends.weight_VD, group).shape
            for chunk in (0, 7, 16, 1000):
                for port_dtype in (None, dtype):
                    scale, factor = (0.25, 1.0) if chunk else (1.0, 3.0)
                    mine = ends.divided(chunk, scale, port_dtype, factor)
                    answers.append((dtype, mine, ends.alone(chunk, scale, port_dtype, factor)))
    for dtype, mine, expected in answers:
        for a, b in zip(mine, expected, strict=True):
            assert a is not None
            assert a.dtype == b.dtype
            if group.size() == 1:
                assert torch.equal(a, b)
        check(BOUND[dtype], *zip(mine, expected, strict=True))
    return [float(mine[0]).hex() for _, mine, _ in answers if mine[0] is not None]


def some_rows(group: Group) -> None:
    """Of some positions, or of none, and with a bias: loss and gradients of one device; what the docstring says is
    sent."""
    answers = []
    for dtype in (torch.float64, torch.float32):
        for sequence_parallel in (False, True):
            for vocab_size, chunk, places in ((97, 2, [3, 4, 12]), (5, 0, [0, 15]), (97, 0, []), (5, 7, [])):
                ends, wanted_M = Ends(group, vocab_size, dtype, sequence_parallel), torch.tensor(places).long()
                bias_V, targets_M = draw(5, vocab_size, dtype=dtype), ends.targets_BT.flatten()[wanted_M]
                whole = [leaf(tensor) for tensor in (ends.weight_VD, bias_V, ends.noise_BTD)]
                logits_MV = F.linear(whole[2].flatten(0, 1)[wanted_M], whole[0], whole[1])
                truth = F.cross_entropy(logits_MV, targets_M, reduction="sum")
                backward(0.25 * truth)
                mine = [leaf(rows(tensor, group)) for tensor in (ends.weight_VD, bias_V)] + [
                    leaf(ends.local(ends.noise_BTD))
                ]
                with watched() as sent:
                    x_MD = ends.split.every_row(mine[2]).flatten(0, 1)[wanted_M]
                    loss = ends.split.loss_of_rows(x_MD, mine[0], mine[1], targets_M, chunk, 0.25, None)
                with watched() as back:
                    backward(loss)
                grads = [tensor.grad for tensor in whole]
                assert grads[0] is not None
                assert grads[1] is not None
                assert grads[2] is not None
                expected = rows(grads[0], group), rows(grads[1], group), ends.local(grads[2])
                pairs = [(loss.detach(), truth.detach()), *zip([tensor.grad for tensor in mine], expected)]
                answers.append(
                    (dtype, pairs, [sent, back], declared_of_rows(dtype, sequence_parallel, chunk, len(places)))
                )
    for dtype, pairs, sent_both, expected_both in answers:
        check(BOUND[dtype], *pairs)
        assert sent_both == [over_gloo(expected, group.size()) for expected in expected_both]


def smoothed(group: Group) -> list[str]:
    """Label smoothing and z-loss: what torch has on one device, in chunks or not, with targets that have no loss; a
    group sends nothing more."""
    answers, e, coefficient = [], 0.1, 0.01
    for vocab_size, chunk, sequence_parallel in ((97, 7, True), (5, 0, False), (5003, 5, False), (2, 0, True)):
        for objective in (Objective(e, coefficient), Objective(e), Objective(z_loss=coefficient)):
            ends = Ends(group, vocab_size, torch.float64, sequence_parallel)
            ends.targets_BT[0, 2:5] = -1
            whole = [leaf(ends.weight_VD), leaf(ends.noise_BTD)]
            logits_NV = F.linear(3.0 * whole[1].flatten(0, 1), whole[0])
            kept_N = ends.targets_BT.flatten() >= 0
            logits_MV, targets_M = logits_NV[kept_N], ends.targets_BT.flatten()[kept_N]
            smoothing = objective.label_smoothing
            truth = F.cross_entropy(logits_MV, targets_M, reduction="sum", label_smoothing=smoothing)
            truth = truth + objective.z_loss * torch.logsumexp(logits_MV, -1).square().sum()
            backward(0.25 * truth)
            mine = [leaf(rows(ends.weight_VD, group)), leaf(ends.local(ends.noise_BTD))]
            given = (mine[0], ends.targets_BT, chunk, 0.25, None)
            with watched() as sent:
                loss = ends.split.loss(3.0 * mine[1], *given, skip_negative=True, objective=objective)
            backward(loss)
            with watched() as plain, torch.no_grad():
                ends.split.loss(3.0 * mine[1], *given, skip_negative=True)
            assert whole[0].grad is not None
            assert whole[1].grad is not None
            expected = truth.detach(), rows(whole[0].grad, group), ends.local(whole[1].grad)
            answers.append(((loss.detach(), mine[0].grad, mine[1].grad), expected, sent, plain))
    for found, expected, sent, plain in answers:
        check(1e-12, *zip(found, expected, strict=True))
        assert sent == plain
    return [float(found[0]).hex() for found, _, _, _ in answers]


def smoothed_elsewhere(group: Group) -> list[str]:
    """`smoothed` by the function that is compiled on other devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_softmax, "serves", lambda _: True)
        patch.setattr(alone, "alone", lambda function: function)
        return smoothed(group)


def declared_of_rows(dtype: torch.dtype, sequence_parallel: bool, chunk: int, wanted: int) -> list[Issued]:
    """Of so many of 16 tokens: the loss; its backward."""
    chunks = [min(chunk or wanted, wanted - start) for start in range(0, wanted, chunk or wanted or 1)]
    loss = [("ALL_REDUCE", numbers * n * dtype.itemsize, dtype) for n in chunks for numbers in (1, 2)]
    if sequence_parallel:
        size = 2 * 8 * 12 * dtype.itemsize
        return [[("ALL_GATHER", size, dtype), *loss], [("REDUCE_SCATTER", size, dtype)]]
    return [loss, [("ALL_REDUCE", wanted * 12 * dtype.itemsize, dtype)]]


def bf16(group: Group) -> list[str]:
    """As exact as one device in bf16, or nearly (partial sums of x's gradient are rounded before they are added)."""
    answers = []
    for vocab_size in (5, 97, 5003):
        for sequence_parallel in (False, True):
            ends = Ends(group, vocab_size, torch.bfloat16, sequence_parallel, sharpness=1.0)
            for chunk, port_dtype in ((0, None), (7, torch.float32), (0, torch.bfloat16)):
                mine = ends.divided(chunk, 0.25, port_dtype, 1.0)
                peer = ends.alone(chunk, 0.25, port_dtype, 1.0)
                answers.append((mine, peer, ends.alone(0, 0.25, None, 1.0, torch.float64)))
    for mine, peer, truth in answers:
        assert mine[0] is not None
        assert mine[0].dtype == torch.float32
        check(5e-3, (mine[0], truth[0]))
        for index in (1, 2, 3):
            bound = 2.0 * relative(peer[index], truth[index]) + 1e-3
            assert relative(mine[index], truth[index]) <= bound, (index, bound, relative(mine[index], truth[index]))
    return [float(mine[0]).hex() for mine, _, _ in answers if mine[0] is not None]


def confident(group: Group) -> None:
    """Logits of hundreds: no overflow; where the target's p is nearly 1, p - 1 is exact; and where it is nearly 0."""
    answers = []
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-3)):
        for vocab_size in (5, 5003):
            ends = Ends(group, vocab_size, dtype, True, sharpness=40.0)
            ends.targets_BT[0] = ends.tokens_BT[0]  # whose logit is the largest, as x is nearly their row
            mine, expected = ends.divided(7, 1.0, None, 1.0), ends.alone(7, 1.0, None, 1.0, torch.float64)
            answers.append((bound, mine, expected))
    # Two logits, 6 apart: p = 0.9975, which is 0.996 or 1 in bf16.
    two = SplitVocabulary(group, 2, sequence_parallel=False)
    sure = leaf(torch.tensor([[[6.0]]], dtype=torch.bfloat16))
    weight_v1 = leaf(rows(torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16), group))
    backward(two.loss(sure, weight_v1, torch.tensor([[0]]), 0, 1.0, None))
    for bound, mine, expected in answers:
        check(bound, *zip(mine, expected, strict=True))
    rest = 1.0 / (1.0 + math.exp(6.0))
    check(1e-2, (sure.grad, torch.tensor([[[-rest]]])))
    check(1e-2, (weight_v1.grad, rows(6.0 * torch.tensor([[-rest], [rest]]), group)))


def validation(group: Group) -> None:
    """Without gradients: the same loss, what backward would send is not sent, and no gradient is made."""
    answers = []
    for sequence_parallel in (False, True):
        ends = Ends(group, 97, torch.float64, sequence_parallel)
        weight_vD = leaf(rows(ends.weight_VD, group))
        with torch.no_grad():
            x, port_vD = ends.split.embed(weight_vD, ends.tokens_BT, None)
            h = ends.sharpness * x + ends.local(ends.noise_BTD)
            loss = ends.split.loss(h, weight_vD, ends.targets_BT, 7, 1.0, port_vD)
        answers.append((loss, ends.alone(7, 1.0, None, 1.0)[0]))
    for loss, expected in answers:
        assert not loss.requires_grad
        check(1e-12, (loss, expected))


def traffic(group: Group) -> None:
    """What torch issues is what SplitVocabulary's docstring says, with gradients and without."""
    answers = []
    for dtype, wide in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        for sequence_parallel in (False, True):
            for vocab_size, chunk, port_dtype in ((97, 7, wide), (97, 0, None), (5, 16, dtype), (5, 5, None)):
                ends = Ends(group, vocab_size, dtype, sequence_parallel)
                weight_vD = leaf(rows(ends.weight_VD, group))
                sent: list[Issued] = []
                for wanted in (True, False):
                    with torch.set_grad_enabled(wanted):
                        with watched() as embedding:
                            x, port_vD = ends.split.embed(weight_vD, ends.tokens_BT, port_dtype)
                        with watched() as head:
                            loss = ends.split.loss(x, weight_vD, ends.targets_BT, chunk, 1.0, port_vD)
                    with watched() as back:
                        if wanted:
                            backward(loss)
                    sent += [embedding, head, back]
                answers.append((declared(dtype, wide, sequence_parallel, chunk), sent))
    for expected, sent in answers:
        assert sent == [over_gloo(each, group.size()) for each in expected]


def declared(dtype: torch.dtype, wide: torch.dtype, sequence_parallel: bool, chunk: int) -> list[Issued]:
    """Of 16 tokens: embed, loss, their backward; and the same without gradients."""
    size = 2 * 8 * 12 * dtype.itemsize
    chunks = [min(chunk or 16, 16 - start) for start in range(0, 16, chunk or 16)]
    loss = [("ALL_REDUCE", numbers * n * wide.itemsize, wide) for n in chunks for numbers in (1, 2)]
    gather, scatter = ("ALL_GATHER", size, dtype), ("REDUCE_SCATTER", size, dtype)
    reduce = ("ALL_REDUCE", size, dtype)
    if sequence_parallel:
        forward: list[Issued] = [[scatter], [gather, *loss]]
        return [*forward, [scatter, gather], *forward, []]
    return [[reduce], loss, [reduce], [reduce], loss, []]


def outside(group: Group) -> None:
    """A token or a target that no rank holds is an error on each rank, and none waits for another."""
    for sequence_parallel in (False, True):
        for token in (97, -1):
            ends = Ends(group, 97, torch.float32, sequence_parallel)
            weight_vD = rows(ends.weight_VD, group)
            ends.tokens_BT[0, 3] = ends.targets_BT[1, 2] = token
            with pytest.raises((IndexError, RuntimeError)):
                ends.split.embed(weight_vD, ends.tokens_BT, None)
            with pytest.raises((IndexError, RuntimeError)):
                ends.split.loss(ends.local(ends.noise_BTD), weight_vD, ends.targets_BT, 0, 1.0, None)


CASES: dict[str, Callable[[Group], list[str] | None]] = {
    case.__name__: case
    for case in (
        conjugates,
        strides,
        feed_forward,
        compiled,
        some_rows,
        smoothed,
        smoothed_elsewhere,
        bf16,
        confident,
        validation,
        traffic,
        outside,
    )
}
for _vocab_size in (97, 5, 5003):  # 97 is odd; 5 on 4 ranks is 2, 2, 1, 0; 5003 is large (other kernels)
    CASES[f"vocabulary_{_vocab_size}"] = functools.partial(vocabulary_is_that_of_one_device, vocab_size=_vocab_size)


SLOW_ON_FOUR = {"some_rows", "smoothed", "smoothed_elsewhere", "bf16", "traffic", "vocabulary_97", "vocabulary_5003"}
"""Two ranks do these in the quick tests; on four the quick ones see what is particular: a rank without rows."""


def work(place: Place, names: list[str]) -> dict[str, Any]:
    """One rank does these cases; by case, what it returned or how it failed."""
    group = place.join(40)
    answers: dict[str, Any] = {}
    for name, case in ((name, CASES[name]) for name in names):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)  # of names that torch gives up
                answers[name] = {"returned": case(group)}
        except (Exception, pytest.fail.Exception):
            answers[name] = {"failed": traceback.format_exc()}
    dist.barrier()
    return answers


@pytest.fixture(scope="module")
def answers(
    forker: Forker, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[int], list[dict[str, Any]]]:
    """By degree: of each rank, by case, what it returned."""
    folder = tmp_path_factory.mktemp("operators")

    @functools.cache
    def of(degree: int) -> list[dict[str, Any]]:
        names = [params["name"] for params in selected(request) if params.get("degree") == degree]
        return forker.call(f"{__name__}:work", folder, degree, names=names)

    return of


@pytest.mark.timeout(160)
@pytest.mark.parametrize(
    ("degree", "name"),
    [
        pytest.param(degree, name, marks=[pytest.mark.slow] * (degree == 4 and name in SLOW_ON_FOUR))
        for degree in DEGREES
        for name in CASES
    ],
)
def test_operators_do_what_one_device_does(
    answers: Callable[[int], list[dict[str, Any]]], degree: int, name: str
) -> None:
    ranks = answers(degree)
    failures = [rank[name].get("failed") for rank in ranks]
    assert failures == [None] * degree, "\n".join(filter(None, failures))
    # What a case returns is the same on every rank, to the bit.
    assert all(rank[name] == ranks[0][name] for rank in ranks)
