"""In: layers of experts, and whole models with them. Out: what torch's autograd and transformers compute, too.
Does not start ranks: test_expert_parallel does. Folders of Hugging Face: test_families."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.optimizer import Optimizer as OptimizerConfig
from codescent.config.sections import Config
from codescent.models.initialize import initialize_
from codescent.models.part import Part
from codescent.operators import grouped
from codescent.operators.experts import Experts, Router, feed_forwards
from codescent.operators.gated import SWIGLU
from codescent.operators.routing import RouterTraits, choose, every_slot, few_slots, losses
from codescent.plan import Objective
from codescent.plan.objective import Preference
from codescent.train.optimize import Optimizer, Weight

SIZES: dict[str, Any] = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 32, "ffn_dim": 48}
SIZES |= {"vocab_size": 61, "seq_len": 16, "num_experts": 4, "experts_per_token": 2}
DOUBLE = torch.float64


def layer(traits: RouterTraits, *, recompute: bool = False) -> Experts:
    """A layer with random weights, in fp64."""
    torch.manual_seed(7)
    made = Experts(16, 12, traits, SWIGLU).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    made.experts.recompute = recompute
    return made


def plainly(made: Experts, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """The same layer, token by token, by torch's own operators; its logits."""
    traits, (samples, positions, _) = made.router.traits, x_BTD.shape
    logits_BTE = x_BTD @ made.router.weight.t()
    choice = choose(logits_BTE.flatten(0, 1), traits)
    experts_BTK = choice.experts_NK.view(samples, positions, -1)
    weights_BTK = choice.weights_NK.view(samples, positions, -1)
    gate_up_FE2D, down_FED = made.experts.gate_up.weight, made.experts.down.weight
    taken: dict[tuple[int, int], int] = {}
    sums = {(b, t): torch.zeros(x_BTD.shape[-1], dtype=DOUBLE) for b in range(samples) for t in range(positions)}
    for k in range(traits.chosen):  # all first choices come before all second ones
        for b, t in sums:
            expert, x_D = int(experts_BTK[b, t, k]), x_BTD[b, t]
            taken[b, expert] = taken.get((b, expert), 0) + 1
            if traits.capacity and taken[b, expert] > traits.slots(positions):
                continue
            gate_F, up_F = gate_up_FE2D[:, expert, 0] @ x_D, gate_up_FE2D[:, expert, 1] @ x_D
            y_D = (nn.functional.silu(gate_F) * up_F) @ down_FED[:, expert]
            sums[b, t] = sums[b, t] + weights_BTK[b, t, k] * y_D
    return torch.stack(list(sums.values())).view_as(x_BTD), logits_BTE


TRAITS = {
    "mixtral": RouterTraits(5, 2),
    "olmoe": RouterTraits(5, 3, normed=False),
    "one": RouterTraits(3, 1),
    "capacity": RouterTraits(5, 2, capacity=0.8),
    "deepseek": RouterTraits(8, 3, scores="sigmoid", groups=4, chosen_groups=2, scale=2.5),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", TRAITS)
def test_a_layer_and_its_gradients_are_those_of_a_loop_over_tokens(name: str, recompute: bool) -> None:
    """Fault: a row goes to another expert, a weight is left out, or an expert without rows keeps an old gradient."""
    made = layer(TRAITS[name], recompute=recompute)
    x_BTD, d_y_BTD = torch.randn(2, 2, 7, 16, dtype=DOUBLE).unbind(0)
    found = []
    for compute in (made, lambda x: plainly(made, x)[0]):
        x = x_BTD.clone().requires_grad_()
        made.zero_grad()
        y_BTD = compute(x)
        y_BTD.backward(d_y_BTD)
        found.append([y_BTD, x.grad, *(parameter.grad.clone() for parameter in made.parameters())])  # type: ignore[union-attr]
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-10)


def test_products_of_one_kernel_are_those_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: where torch multiplies all experts at once, another matrix, or old memory for an expert without rows."""
    assert grouped.works("cpu")
    x_RD, gate_up_FE2D, down_FED = (torch.randn(*sizes) for sizes in ((12, 16), (24, 4, 2, 16), (24, 4, 16)))
    d_y_RD, found = torch.randn(12, 16), []
    for by_one in (False, True):
        monkeypatch.setattr(grouped, "_by_one_kernel", lambda rows, by_one=by_one: by_one)
        inputs = [one.clone().requires_grad_() for one in (x_RD, gate_up_FE2D, down_FED)]
        y_RD = feed_forwards(*inputs, [5, 0, 4, 3], SWIGLU)
        y_RD.backward(d_y_RD)
        found.append([y_RD, *(one.grad for one in inputs)])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(("name", "per_sample"), [("mixtral", None), ("deepseek", None), ("mixtral", 1.0)])
def test_gradients_of_the_losses_of_a_router_are_those_of_autograd(name: str, per_sample: float | None) -> None:
    """Fault: the losses of a router have a wrong gradient, or change the output of the layer; of pairs of answers they
    are sums over tokens."""
    made = layer(TRAITS[name])
    made.router.losses_per_sample, of_tokens = per_sample, 1.0 if per_sample is None else 1 / 6
    made.router.objective, made.router.loss_scale = Objective(balance_loss=0.3, router_z_loss=0.2), 0.5
    x_BTD = torch.randn(2, 6, 16, dtype=DOUBLE)
    mine = x_BTD.clone().requires_grad_()
    y_BTD = made(mine)
    y_BTD.square().sum().backward()
    expected = x_BTD.clone().requires_grad_()
    again_BTD, logits_BTE = plainly(made, expected)
    logits_NE = logits_BTE.flatten(0, 1)
    found = losses(logits_NE, choose(logits_NE, made.router.traits), samples=2)
    (again_BTD.square().sum() + 0.5 * of_tokens * (0.3 * found.balance + 0.2 * found.z)).backward()
    torch.testing.assert_close(y_BTD, again_BTD)
    torch.testing.assert_close(mine.grad, expected.grad, atol=1e-12, rtol=1e-10)
    *counts, tokens, balance, z, dropped = made.router.taken().tolist()
    assert (tokens, dropped) == (12, 0)
    assert sum(counts) == 12 * made.router.traits.chosen
    assert (balance, z) == pytest.approx((found.balance.item(), found.z.item()))
    assert not made.router.taken().any()


def test_the_loss_of_balance_of_a_sample_is_that_of_transformers() -> None:
    """Fault: another scale or another mean than in the released models, whose coefficients people take over."""
    logits_BTE = torch.randn(3, 10, 5, generator=torch.Generator().manual_seed(3))
    theirs = sum(load_balancing_loss_func((logits_TE,), 5, 2) for logits_TE in logits_BTE)
    logits_NE = logits_BTE.flatten(0, 1)
    mine = losses(logits_NE, choose(logits_NE, RouterTraits(5, 2)), samples=3).balance / 10
    torch.testing.assert_close(mine, theirs)
    alike = losses(torch.zeros(40, 4), choose(torch.zeros(40, 4), RouterTraits(4, 4)), samples=4)
    assert alike.balance.item() == pytest.approx(40 * 4)  # of each token as many as its experts


def test_a_bias_chooses_and_its_gradient_is_how_much_more_than_the_mean_is_chosen() -> None:
    """Fault: a bias that changes weights, or is pushed the wrong way."""
    traits = RouterTraits(4, 2, scores="sigmoid")
    router = Router(8, traits, bias=True).double()
    nn.init.normal_(router.weight)
    with torch.no_grad():
        router.bias.copy_(torch.tensor([9.0, 0.0, 0.0, -9.0]))  # type: ignore[union-attr]
    x_ND = torch.randn(10, 8, dtype=DOUBLE)
    routing = router(x_ND, samples=2)
    assert (routing.experts_NK == 0).any(1).all()
    assert not (routing.experts_NK == 3).any()
    scores_NE = (x_ND @ router.weight.t()).sigmoid()
    chosen_NK = scores_NE.gather(1, routing.experts_NK)
    torch.testing.assert_close(routing.weights_NK, chosen_NK / chosen_NK.sum(1, keepdim=True))
    routing.weights_NK.square().sum().backward()
    counts = torch.bincount(routing.experts_NK.flatten(), minlength=4)
    torch.testing.assert_close(router.bias.grad, counts - 5.0, check_dtype=False)  # type: ignore[union-attr]


def test_a_step_moves_a_bias_by_the_sign_of_its_gradient() -> None:
    """Fault: the learning rate, the clipping or the decay of the run changes a bias; a bias counts in the norm."""
    bias, matrix = torch.zeros(3, dtype=DOUBLE), torch.ones(2, 2, dtype=DOUBLE)
    weights = [
        Weight("bias", bias, bias, decay=False, counted=False, sign_rate=0.25),
        Weight("matrix", matrix, matrix, decay=True),
    ]
    optimizer = Optimizer(weights, OptimizerConfig(kind="adamw", weight_decay=0.1, max_grad_norm=1e-3))
    gradient = torch.full((2, 2), 3.0, dtype=DOUBLE)
    sums = optimizer.step([torch.tensor([2.0, 0.0, -700.0], dtype=DOUBLE), gradient], rate=0.5)
    assert bias.tolist() == [-0.25, 0.0, 0.25]
    assert sums[-1].item() == pytest.approx(4 * 9.0)
    assert (matrix < 1.0).all()


def test_slots_are_a_place_for_each_choice_of_a_token() -> None:
    """Fault: two choices share a row, or a capacity lets samples take each other's rows."""
    experts_NK = torch.tensor([[0, 2], [2, 0], [2, 1], [1, 2], [0, 2], [0, 1]])
    every = every_slot(experts_NK, 3)
    assert every.counts_E.tolist() == [4, 3, 5]
    assert sorted(every.slots_NK.flatten().tolist()) == list(range(12))
    assert every.tokens_R[every.slots_NK].tolist() == [[n, n] for n in range(6)]
    few = few_slots(experts_NK, 3, samples=2, slots=1)
    assert few.slots_NK.tolist() == [[0, -1], [4, -1], [-1, 2], [3, 5], [1, -1], [-1, -1]]
    assert few.tokens_R.tolist() == [0, 4, 2, 3, 1, 3]


def test_with_pairs_of_answers_losses_of_routers_are_means_over_tokens() -> None:
    """Fault: with a loss of each pair the coefficients of routers count as many times as a pair has tokens."""
    facts = models.facts_of("llama", models.shape_of("llama", SIZES))
    model = cast(Part, models.construct(facts, "cpu"))
    model.losses_per_sample = 1
    for preference, expected in ((None, None), (Preference("simpo", 2.0), 1.0)):
        model.objective = Objective(balance_loss=0.5, preference=preference)
        model(torch.zeros(2, 16, dtype=torch.int64))
        assert [router.losses_per_sample for router in model.routers.values()] == [expected] * 3


def test_samples_do_not_depend_on_each_other() -> None:
    """Fault: a capacity or a loss of balance of the whole micro-batch, so that the layout would decide the losses."""
    shape = models.shape_of("llama", SIZES | {"capacity_factor": 0.75})
    facts, objective = models.facts_of("llama", shape), Objective(balance_loss=0.5, router_z_loss=0.1)
    tokens = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(2))
    gradients = []
    for size in (4, 2, 1):
        model = models.construct(facts, "cpu").double()
        initialize_(model, 1, models.parameters_of("llama", shape))
        model.objective = objective
        for batch in tokens.split(size):
            model.train()(batch, batch.roll(-1, 1), loss_scale=1 / 64).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one in gradients[1:]:
        for mine, expected in zip(one, gradients[0], strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-13, rtol=1e-9)


def test_flops_count_the_experts_of_a_token() -> None:
    """Fault: FLOPs and MFU of all experts, as if a token went through each of them."""
    config = {"model": {"kind": "llama", **SIZES}, "train": {"global_batch_size": 2}}
    routed = build(Config.model_validate(config), 61, 1)
    config["model"] = {"kind": "llama", **SIZES, "ffn_dim": 96, "num_experts": None, "experts_per_token": None}
    dense = build(Config.model_validate(config), 61, 1)
    routers = 3 * 4 * 32
    assert routed.flops().dense_flops == dense.flops().dense_flops + 6 * routers * 32
    assert sum(routed.model.forward_flops) == sum(dense.model.forward_flops) + 2 * routers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": None}, "experts_per_token: not given; of how many of the 4 experts"),
        ({"experts_per_token": 5}, "experts_per_token = 5: there are 4 experts"),
        ({"dense_layers": 3}, "no layer has experts with dense_layers = 3"),
        ({"num_experts": None, "experts_per_token": None, "expert_dim": 8}, "expert_dim: given without"),
        ({"mup_base_dim": 16}, "mu-P has no rule for routers"),
        ({"route_groups": 3, "groups_per_token": 2}, "route_groups = 3: 4 experts do not divide"),
        ({"route_groups": 2}, "give both, or neither"),
        ({"route_groups": 4, "groups_per_token": 1}, "1 group of 1 expert each: fewer experts than a token chooses"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    """Fault: a traceback later, or sizes that are ignored."""
    with pytest.raises(UserError, match=message):
        models.shape_of("llama", SIZES | changes)


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        (
            {},
            {"parallel": {"recompute": "products"}},
            'recompute = "products": keeps the products of whole layers.*"selective" or "full" or "none"',
        ),
        ({}, {"parallel": {"data_parallel": 1024}}, "data_parallel = 1024: torch.nn.DataParallel copies modules"),
        ({}, {"train": {"compile": "blocks"}}, 'compile = "blocks": model.kind = "llama" with model.num_experts'),
        ({"num_experts": None, "experts_per_token": None}, {"train": {"balance_loss": 0.1}}, "no layer of the model"),
        ({}, {"train": {"balance_rate": 0.1}}, "routers of the model have no biases"),
    ],
)
def test_what_experts_cannot_have_is_refused(model: dict[str, Any], more: dict[str, Any], message: str) -> None:
    """Fault: a key that is ignored in silence, or fails in the first step."""
    with pytest.raises(UserError, match=message):
        build(Config.model_validate({"model": {"kind": "llama", **SIZES, **model}, **more}), 61, 1)
