"""In: parallel.recompute = "products". Out: exactly the named products and attention are kept; the same gradients.
Does not train on layouts with messages (test_declared and test_hybrids do)."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.models.initialize import initialize_
from codescent.models.part import Part
from codescent.operators import kept
from codescent.operators.kept import ATTENTION, PRODUCTS
from codescent.plan import Plan
from codescent.strategies import Recompute, ThisRank

WIDTHS = {"num_heads": 2, "hidden_dim": 32}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"kind": "gpt2", "num_layers": 2, "seq_len": 24},
    "llama": {"kind": "llama", "num_layers": 2, "seq_len": 24, "ffn_dim": 96, "num_kv_heads": 1},
    "bert": {"kind": "bert", "num_layers": 2, "seq_len": 24, "ffn_dim": 96},
    "transformer": {
        **{"kind": "transformer", "num_encoder_layers": 1, "num_decoder_layers": 1, "ffn_dim": 96},
        **{"source_len": 10, "target_len": 14},
    },
}
VOCAB = 1100  # above it the embedding's gradient has no product
LENGTH, BATCH = 24, 2


def plan_of(kind: str, recompute: str, precision: str = "fp64", dropout: float = 0.0, **sections: Any) -> Plan:
    values = {
        "model": KINDS[kind] | WIDTHS | ({"dropout": dropout} if dropout else {}),
        "data": {"task": "mlm"} if kind == "bert" else {},
        "train": {"precision": precision, "global_batch_size": BATCH, "head_chunk_tokens": 0},
        "parallel": {"recompute": recompute},
    }
    return build(Config.model_validate(values | sections), VOCAB, 1)


def module_of(plan: Plan) -> Part:
    part = cast(Part, models.construct(plan.model))
    if Recompute().active(plan):
        Recompute().divide(part, ThisRank(plan, 0, {}))
    part.to_empty(device="cpu")
    initialize_(part, 1, [tensor.parameter for tensor in plan.tensors])
    part.to({"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[plan.work.precision])
    if plan.model.dropout:
        part.set_dropout_context(1, 0, torch.arange(BATCH))
    return part


def loss_of(part: Part, kind: str) -> Tensor:
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 37 % VOCAB
    extras = {}
    if kind == "bert":
        extras = {"segments_BT": torch.zeros_like(tokens), "lengths_B": torch.full((BATCH,), LENGTH)}
    return cast(Tensor, part(tokens, tokens.roll(-1, 1), **extras))


class Counted(TorchDispatchMode):
    """How often each product and each attention was computed. What a context of a checkpoint returns again is not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.calls[{True: "attention"}.get(name in ATTENTION, name)] += name in ATTENTION or name in PRODUCTS
        return func(*args, **(kwargs or {}))


def forward_and_backward(plan: Plan) -> tuple[float, list[Tensor], Counter[str], Counter[str]]:
    """The loss, the gradients, and what was counted in forward and in backward."""
    part, kind = module_of(plan), plan.model.kind
    with Counted() as forward:
        loss = loss_of(part, kind)
    with Counted() as backward:
        loss.backward()
    return (
        float(loss.detach()),
        [p.grad for p in part.parameters() if p.grad is not None],
        forward.calls,
        backward.calls,
    )


@pytest.mark.parametrize(("precision", "dropout"), [("fp64", 0.0), ("fp32", 0.0), ("bf16", 0.0), ("fp32", 0.2)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_without_recompute_to_the_bit(kind: str, precision: str, dropout: float) -> None:
    if kind == "llama" and dropout:
        return
    expected, found = (forward_and_backward(plan_of(kind, what, precision, dropout)) for what in ("none", "products"))
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1]) > 0
    for mine, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(mine, other)


# Of a block: products that backward computes again, on a CPU also the last one (in one node with the activation).
AGAIN = {"gpt2": [2, 2], "llama": [2, 2], "bert": [2, 2], "transformer": [2, 3]}


@pytest.mark.parametrize("kind", KINDS)
def test_backward_computes_only_the_other_products_again(kind: str) -> None:
    none, products, full = (forward_and_backward(plan_of(kind, what)) for what in ("none", "products", "full"))

    def again(which: tuple[Any, ...], *names: str) -> int:
        return sum(which[3][name] - none[3][name] for name in names)

    assert sum(none[2][name] for name in PRODUCTS) > 0
    assert again(products, *PRODUCTS) == sum(AGAIN[kind])
    assert again(products, "attention") == 0
    assert again(full, *PRODUCTS) > again(products, *PRODUCTS)


@pytest.mark.parametrize("kind", KINDS)
def test_less_is_kept_than_without_and_more_than_with_full(kind: str) -> None:
    """What autograd saves in blocks are their inputs alone; the results that are kept are counted by the operators."""
    sizes = {}
    for what in ("none", "products", "full"):
        part, saved = module_of(plan_of(kind, what)), dict[int, int]()
        parameters = {p.untyped_storage().data_ptr() for p in part.parameters()}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(part, kind)
        sizes[what] = sum(size for place, size in saved.items() if place not in parameters)
    assert sizes["none"] > sizes["products"] == sizes["full"]


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_compiled_block_is_one_graph_with_the_same_gradients(kind: str) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    expected = forward_and_backward(plan_of(kind, "products"))
    part = module_of(plan_of(kind, "products"))
    for block in part.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    torchs = logging.getLogger("torch._higher_order_ops.wrap")
    torchs.addHandler(handler)
    torch._logging.warning_once.cache_clear()
    loss = loss_of(part, kind)
    loss.backward()
    torchs.removeHandler(handler)
    assert said == []  # not torch's warning of in-place operators: a user could do nothing about it
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert float(loss.detach()) == pytest.approx(expected[0], rel=1e-12)
    for mine, other in zip([p.grad for p in part.parameters()], expected[1], strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    torch.compiler.reset()


def test_adapters_are_refused() -> None:
    with pytest.raises(UserError, match=r'do: parallel.recompute = "selective" or "full"'):
        plan_of("gpt2", "products", lora={"rank": 2})


def test_flops_are_those_of_the_products_into_the_residual_stream() -> None:
    width, tokens = WIDTHS["hidden_dim"], BATCH * LENGTH
    assert plan_of("gpt2", "products").flops().recomputed_flops == 2 * 2 * tokens * width**2
    # Dropout needs the last result, too, and no kernel computes its attention as a whole.
    both = 2 * 2 * tokens * (width**2 + 4 * width**2) + 2 * 4 * tokens * LENGTH * width
    assert plan_of("gpt2", "products", dropout=0.1).flops().recomputed_flops == both
    encoder, decoder = BATCH * 10, BATCH * 14  # norms after the sums read every result
    rows = 2 * encoder * (width**2 + 96 * width) + 2 * decoder * (2 * width**2 + 96 * width)
    assert plan_of("transformer", "products").flops().recomputed_flops == rows
    for kind in KINDS:
        amounts = [plan_of(kind, what).flops().recomputed_flops for what in ("none", "products", "full")]
        assert amounts[0] == 0 < amounts[1] < amounts[2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_what_advice_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers per position: those of COLUMN products; attention as often as the blocks have it."""
    products, attentions, decide = 0, 0, kept._Policy.__call__

    def watch(policy: Any, context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        nonlocal products, attentions
        decision = decide(policy, context, operator, *args, **options)
        if decision is CheckpointPolicy.MUST_SAVE and not context.is_recompute:
            attentions += str(operator) in ATTENTION
            if str(operator) in PRODUCTS:
                products += args[-2].shape[0] * args[-1].shape[1]
        return decision

    monkeypatch.setattr(kept._Policy, "__call__", watch)
    plan = plan_of(kind, "products")
    loss_of(module_of(plan), kind)
    width = WIDTHS["hidden_dim"]
    encoder, decoder = BATCH * 10, BATCH * 14
    expected = {
        "gpt2": 2 * BATCH * LENGTH * (3 * width + 4 * width),
        "llama": 2 * BATCH * LENGTH * (2 * width + 2 * 96),
        "bert": 2 * BATCH * LENGTH * (3 * width + 96),
        "transformer": encoder * (3 * width + 96 + 2 * width) + decoder * (3 * width + width + 96),
    }
    assert products == expected[kind]
    assert attentions == (3 if kind == "transformer" else 2)
