"""In: a BERT of ours and transformers' models with the same weights. Out: the same outputs, losses and gradients.
Does not divide it over ranks (test_models_bert_divided does); dropout is compared with itself only."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import backward
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, BertForQuestionAnswering, BertModel, PreTrainedModel

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build as plan_of
from codescent.config.sections import Config
from codescent.models.bert import module as bert_module
from codescent.models.bert.declare import PRESETS, BertShape, parameters
from codescent.models.bert.module import Bert
from codescent.models.initialize import initialize_
from codescent.plan import Layout, Mesh
from codescent.strategies import Recompute

SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": 3, "hidden_dim": 24, "ffn_dim": 40, "vocab_size": 61}
SIZES |= {"seq_len": 20}
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
COUNTS = {
    ("bert-base-uncased", "mlm"): 109_514_298,
    ("bert-base-uncased", "qa"): 108_893_186,
    ("bert-large-uncased", "mlm"): 335_174_458,
    ("bert-large-uncased", "qa"): 334_094_338,
}
BATCH, LENGTH = 3, 13
LENGTHS_B = torch.tensor([13, 5, 9])
THEIRS = {
    "tok.weight": "bert.embeddings.word_embeddings.weight",
    "pos.weight": "bert.embeddings.position_embeddings.weight",
    "segment.weight": "bert.embeddings.token_type_embeddings.weight",
    "embed_norm": "bert.embeddings.LayerNorm",
    "attn.out": "attention.output.dense",
    "norm_1": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "norm_2": "output.LayerNorm",
    "head.bias": "cls.predictions.bias",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head": "qa_outputs",
}


def small(head: str = "mlm", dropout: float = 0.0, **sizes: Any) -> BertShape:
    shape = models.shape_of("bert", SIZES | {"head": head} | sizes, dropout=dropout)
    assert isinstance(shape, BertShape)
    return shape


def build(shape: BertShape, dtype: torch.dtype, chunk: int = 1024, depths: range | None = None) -> Bert:
    module = Bert(shape, chunk, "cpu", depths).to(dtype)
    names = {name for name, _ in module.named_parameters()}
    initialize_(module, 7, [parameter for parameter in parameters(shape) if parameter.name in names])
    with torch.no_grad():  # as large as after training; biases and norms where a mistake in them would show
        for name, tensor in module.named_parameters():
            if tensor.ndim == 1:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
            else:
                tensor.mul_(10.0)
    return module


def their_config(shape: BertShape) -> BertConfig:
    return BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.ffn_dim,
        max_position_embeddings=shape.seq_len,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def with_theirs(
    module: Bert, tensors: dict[str, Tensor], *, gradients: bool = False
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Our name, our tensor laid out as theirs, and that tensor of theirs."""
    shape = module.shape
    known = THEIRS if module.masked else {name: theirs for name, theirs in THEIRS.items() if name != "head.bias"}
    for name, parameter in module.named_parameters():
        tensor = parameter.grad if gradients else parameter
        assert tensor is not None, name
        whole, _, kind = name.rpartition(".")
        if name in known or whole in known:
            yield name, tensor, tensors[known.get(name) or f"{known[whole]}.{kind}"]
            continue
        _, number, part = whole.split(".", 2)
        at = f"bert.encoder.layer.{number}"
        if part != "attn.qkv":
            yield name, tensor, tensors[f"{at}.{known[part]}.{kind}"]
            continue
        by_head = tensor.view(shape.num_heads, 3, shape.head_dim, *tensor.shape[1:]).transpose(0, 1)
        for rows, which in zip(by_head, ("query", "key", "value"), strict=True):
            yield f"{name} ({which})", rows.flatten(0, 1), tensors[f"{at}.attention.self.{which}.{kind}"]


def twin_of(module: Bert, dtype: torch.dtype) -> PreTrainedModel:
    kind = BertForMaskedLM if module.masked else BertForQuestionAnswering
    twin: PreTrainedModel = kind(their_config(module.shape)).to(dtype).eval()
    theirs = dict(twin.named_parameters())
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(t.numel() for t in module.parameters())
    with torch.no_grad():
        for tensor in theirs.values():
            tensor.fill_(torch.nan)  # what is not taken over shows
        for _, mine, slot in with_theirs(module, {name: tensor.data for name, tensor in theirs.items()}):
            slot.copy_(mine)
    return twin


def relative(mine: Tensor, theirs: Tensor) -> float:
    error: float = ((mine - theirs).norm() / theirs.norm()).item()
    return error


def batch(shape: BertShape, *, padded: bool) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Tokens and targets, and what else reads a padded batch of pairs: ours, theirs. Token 0 is not among them: their
    embedding makes no gradient of it."""
    generator = torch.Generator().manual_seed(5)
    tokens_BT = torch.randint(1, shape.vocab_size, (BATCH, LENGTH), generator=generator)
    if shape.head == "mlm":
        wanted = torch.rand(BATCH, LENGTH, generator=generator) < 0.3
        wanted &= torch.arange(LENGTH) < LENGTHS_B[:, None]
        targets = torch.randint(1, shape.vocab_size, (BATCH, LENGTH), generator=generator).masked_fill(~wanted, -100)
    else:
        targets = torch.tensor([[3, 8], [0, 0], [8, 8]])
    if not padded:
        return tokens_BT, targets, {}, {}
    segments_BT = (torch.arange(LENGTH) >= torch.tensor([6, 2, 9])[:, None]).long()
    mask_BT = (torch.arange(LENGTH) < LENGTHS_B[:, None]).long()
    ours = {"segments_BT": segments_BT, "lengths_B": LENGTHS_B}
    return tokens_BT, targets, ours, {"token_type_ids": segments_BT, "attention_mask": mask_BT}


def their_loss(logits: Tensor, targets: Tensor, lengths_B: Tensor | None) -> Tensor:
    """As a sum, written out: theirs of answers is a mean, and takes padding for a place where one may begin."""
    if targets.shape[1] > 2:
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    if lengths_B is not None:
        padding_BT = torch.arange(logits.shape[1]) >= lengths_B[:, None]
        logits = logits.masked_fill(padding_BT[..., None], -torch.inf)
    return torch.stack([cross_entropy(logits[..., end], targets[:, end], reduction="sum") / 2 for end in (0, 1)]).sum()


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("head", ["mlm", "qa"])
def test_logits_losses_and_gradients_are_theirs(head: str, padded: bool, dtype: torch.dtype, bound: float) -> None:
    module = build(small(head), dtype, chunk=5)
    twin = twin_of(module, dtype)
    tokens_BT, targets, mine, theirs = batch(module.shape, padded=padded)
    answer = twin(tokens_BT, **theirs)
    logits = answer.logits if head == "mlm" else torch.stack((answer.start_logits, answer.end_logits), -1)
    with torch.no_grad():
        assert relative(module(tokens_BT, **mine), logits) < bound
    expected = their_loss(logits, targets, mine.get("lengths_B"))
    backward(expected)
    loss = module(tokens_BT, targets, loss_scale=0.25, **mine)
    backward(loss)
    assert loss.item() == pytest.approx(expected.item(), rel=bound)
    with torch.no_grad():
        assert module(tokens_BT, targets, **mine).item() == pytest.approx(expected.item(), rel=bound)
    gradients = {name: tensor.grad for name, tensor in twin.named_parameters() if tensor.grad is not None}
    largest = max(tensor.norm().item() for tensor in gradients.values())
    for name, gradient, truth in with_theirs(module, gradients, gradients=True):
        if truth.norm() > 1e-6 * largest:
            assert relative(gradient * 4, truth) < bound, name
        else:  # of keys' biases, which add the same to all the scores of a query: rounding alone
            assert (gradient * 4).norm() < 1e-6 * largest, name


@pytest.mark.parametrize("head", ["mlm", "qa"])
def test_the_loss_that_they_report_is_our_sum_divided(head: str) -> None:
    module = build(small(head), torch.float64)
    tokens_BT, targets, _, _ = batch(module.shape, padded=False)
    labels = {"labels": targets}
    if head == "qa":
        labels = {"start_positions": targets[:, 0], "end_positions": targets[:, 1]}
    theirs = twin_of(module, torch.float64)(tokens_BT, **labels).loss
    number = (targets >= 0).sum() if head == "mlm" else BATCH
    assert (module(tokens_BT, targets) / number).item() == pytest.approx(theirs.item(), rel=1e-10)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_last_hidden_state_is_theirs(padded: bool, dtype: torch.dtype, bound: float) -> None:
    shape = small("qa")
    module = build(shape, dtype)
    twin = BertModel(their_config(shape), add_pooling_layer=False).to(dtype).eval()
    twin.load_state_dict(twin_of(module, dtype).bert.state_dict())
    tokens_BT, _, mine, theirs = batch(shape, padded=padded)
    body = build(shape, dtype, depths=range(shape.num_layers + 1))
    body.load_state_dict(module.state_dict(), strict=False)
    with torch.no_grad():
        assert relative(body(tokens_BT, **mine), twin(tokens_BT, **theirs).last_hidden_state) < bound


@pytest.mark.parametrize(("preset", "head"), COUNTS)
def test_presets_have_the_published_parameters(preset: str, head: str) -> None:
    shape = models.shape_of("bert", {"head": head}, preset)
    assert isinstance(shape, BertShape)
    assert sum(parameter.numel for parameter in parameters(shape)) == COUNTS[preset, head]
    with torch.device("meta"):
        twin = (BertForMaskedLM if head == "mlm" else BertForQuestionAnswering)(their_config(shape))
    twin.tie_weights()  # on "meta" not all versions have tied them
    assert sum(tensor.numel() for tensor in twin.parameters()) == COUNTS[preset, head]
    assert models.kind_of(None, preset) == "bert"


@pytest.mark.parametrize("preset", [*PRESETS, None])
@pytest.mark.parametrize("head", ["mlm", "qa"])
def test_declared_parameters_are_the_modules(preset: str | None, head: str) -> None:
    shape = models.shape_of("bert", (SIZES if preset is None else {}) | {"head": head}, preset)
    declared = models.parameters_of("bert", shape)
    module = models.construct(models.facts_of("bert", shape))
    there = [(name, tuple(tensor.shape)) for name, tensor in module.named_parameters()]
    assert there == [(parameter.name, parameter.shape) for parameter in declared]
    for depths in (range(1), range(1, 2), range(2, shape.num_layers + 2)):
        part = models.construct(models.facts_of("bert", shape), depths=depths)
        assert [name for name, _ in part.named_parameters()] == [
            parameter.name for parameter in declared if any(depth in depths for depth in parameter.depths)
        ]


@pytest.mark.parametrize("head", ["mlm", "qa"])
def test_parts_one_after_the_other_are_the_whole(head: str) -> None:
    """With dropout: every part makes the masks of its own places."""
    shape = small(head, dropout=0.1)
    module = build(shape, torch.float64)
    tokens_BT, targets, mine, _ = batch(shape, padded=True)
    parts = [build(shape, torch.float64, depths=depths) for depths in (range(1), range(1, 3), range(3, 4))]
    for part in (module, *parts):
        part.train()
        part.set_dropout_context(1, 2, torch.arange(BATCH))
    x = tokens_BT
    for part in parts[:-1]:
        x = part(x, **mine)
    torch.testing.assert_close(parts[-1](x, targets, **mine), module(tokens_BT, targets, **mine), rtol=1e-12, atol=0)


@pytest.mark.parametrize("head", ["mlm", "qa"])
def test_dropout_is_the_same_for_any_micro_batches(head: str) -> None:
    shape = small(head, dropout=0.2)
    module = build(shape, torch.float64)
    module.train()
    tokens_BT, targets, mine, _ = batch(shape, padded=True)
    ids = torch.tensor([7, 3, 11])

    def step(samples: list[int]) -> tuple[float, list[Tensor]]:
        module.zero_grad()
        module.set_dropout_context(3, 4, ids[samples])
        some = {name: tensor[samples] for name, tensor in mine.items()}
        loss = module(tokens_BT[samples], targets[samples], **some)
        backward(loss)
        return loss.item(), [tensor.grad.clone() for tensor in module.parameters() if tensor.grad is not None]

    loss, gradients = step([0, 1, 2])
    pieces = [step(samples) for samples in ([2], [0, 1])]
    assert sum(piece[0] for piece in pieces) == pytest.approx(loss, rel=1e-12)
    for whole, first, second in zip(gradients, pieces[0][1], pieces[1][1], strict=True):
        torch.testing.assert_close(first + second, whole, rtol=1e-9, atol=1e-9)
    module.eval()
    assert abs(module(tokens_BT, targets, **mine).item() - loss) > 1e-3


def test_training_with_dropout_asks_for_the_samples() -> None:
    module = build(small(dropout=0.1), torch.float32)
    with pytest.raises(RuntimeError, match="set_dropout_context"):
        module(torch.ones(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("head", ["mlm", "qa"])
def test_what_is_padding_changes_nothing(head: str) -> None:
    module = build(small(head), torch.float64)
    tokens_BT, targets, mine, _ = batch(module.shape, padded=True)
    others_BT = tokens_BT.clone()
    others_BT[torch.arange(LENGTH) >= LENGTHS_B[:, None]] = 1
    assert not torch.equal(others_BT, tokens_BT)
    assert module(tokens_BT, targets, **mine).item() == pytest.approx(
        module(others_BT, targets, **mine).item(), rel=1e-12
    )


@pytest.mark.parametrize("chunk", [0, 2, 1024])
def test_nothing_wanted_is_a_loss_of_zero_and_gradients_of_zero(chunk: int) -> None:
    module = build(small(), torch.float32, chunk)
    tokens_BT, targets, mine, _ = batch(module.shape, padded=True)
    loss = module(tokens_BT, torch.full_like(targets, -100), **mine)
    backward(loss)
    assert loss.item() == 0.0
    for name, tensor in module.named_parameters():
        assert tensor.grad is not None, name
        assert not tensor.grad.any(), name


def test_rows_of_the_vocabulary_in_chunks_are_the_same() -> None:
    found = []
    for chunk in (0, 1, 3, 1024):
        module = build(small(), torch.float64, chunk)
        tokens_BT, targets, mine, _ = batch(module.shape, padded=True)
        loss = module(tokens_BT, targets, **mine)
        backward(loss * 0.5)
        found.append([loss.detach(), *(tensor.grad for tensor in module.parameters())])
    for other in found[1:]:
        for mine_, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine_, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("what", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_made_again_it_is_the_same_bitwise(what: str, dropout: float) -> None:
    found = []
    for recompute in ("none", what):
        shape = small(dropout=dropout)
        module = build(shape, torch.float32)
        this_rank: Any = SimpleNamespace(plan=SimpleNamespace(layout=Layout(recompute=recompute), mesh=Mesh()))
        if recompute != "none":
            Recompute().divide(module, this_rank)
        module.train()
        module.set_dropout_context(1, 2, torch.arange(BATCH))
        tokens_BT, targets, mine, _ = batch(shape, padded=True)
        backward(module(tokens_BT, targets, **mine))
        found.append([tensor.grad for tensor in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)


def test_in_bf16_it_is_near() -> None:
    shape = small(dropout=0.0)
    wide, narrow = build(shape, torch.float32), build(shape, torch.float32).to(torch.bfloat16)
    tokens_BT, targets, mine, _ = batch(shape, padded=True)
    losses = [module(tokens_BT, targets, **mine) for module in (wide, narrow)]
    for loss in losses:
        backward(loss)
    assert losses[1].dtype == torch.float32
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    assert narrow.head.bias.grad is not None
    assert narrow.head.bias.grad.dtype == torch.bfloat16


def test_flops_of_the_head_are_of_the_tokens_that_it_reads() -> None:
    shape = models.shape_of("bert", {}, "bert-base-uncased")
    assert isinstance(shape, BertShape)
    flops = models.forward_flops("bert", shape, 128)
    assert len(flops) == 14
    assert flops[1] == 2 * 12 * 768**2 + 4 * 128 * 768
    assert flops[-1] == pytest.approx(0.15 * 2 * 768 * (768 + 30522))


@pytest.mark.parametrize(
    ("sizes", "others", "words"),
    [
        ({"head": "nsp"}, {}, "model.head: 'nsp' is none of mlm, qa"),
        ({}, {"bias": False}, "a BERT has biases"),
        ({"num_heads": 5}, {}, "5 heads do not divide"),
        ({"num_kv_heads": 1}, {}, "bert has no such size"),
        ({}, {"dropout": 1.0}, "not a probability"),
    ],
)
def test_what_is_refused(sizes: dict[str, Any], others: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        models.shape_of("bert", SIZES | sizes, **others)


@pytest.mark.parametrize(
    ("sections", "ranks", "words"),
    [
        ({"parallel": {"cp": 2}}, 2, "parallel.cp = 2: context parallelism computes causal attention only"),
        ({"train": {"compile": "blocks"}}, 1, "train.compile"),
        ({"log": {"sample_tokens": 5}}, 1, "log.sample_tokens"),
    ],
)
def test_what_a_plan_refuses(sections: dict[str, Any], ranks: int, words: str) -> None:
    config = Config.model_validate({"model": SIZES | {"kind": "bert"}, **sections})
    with pytest.raises(UserError) as caught:
        plan_of(config, 61, ranks)
    assert [words in problem for problem in caught.value.problems] == [True]


def test_a_plan_knows_what_is_read_beside_tokens_and_how_much_the_head_reads() -> None:
    plan = plan_of(Config.model_validate({"model": SIZES | {"kind": "bert"}}), 61, 1)
    assert (plan.model.kind, plan.task.extras, plan.task.head_share) == ("bert", True, 3 / 20)


@pytest.mark.parametrize("found", [0, 4, 9])
def test_on_a_device_the_head_computes_as_many_rows_whatever_the_targets(
    monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    """Their number is the task's, 3 of a sample. Rows without a target have no loss and no gradient."""
    shape = small()
    tokens_BT = torch.randint(0, 61, (BATCH, 20), generator=torch.Generator().manual_seed(0))
    targets_BT = torch.full_like(tokens_BT, -1)
    chosen = torch.randperm(targets_BT.numel(), generator=torch.Generator().manual_seed(1))[:found]
    targets_BT.view(-1)[chosen] = torch.arange(found)
    results = []
    for rows in (bert_module.rows_with_target, bert_module.as_many_rows):
        monkeypatch.setattr(bert_module, "rows_with_target", rows)
        module = build(shape, torch.float64, chunk=4)
        module.losses_per_sample = 3
        loss = module(tokens_BT, targets_BT)
        backward(loss)
        results.append([loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    rows_M, targets_M, too_many = bert_module.as_many_rows(targets_BT, 3)
    assert (len(rows_M), int((targets_M >= 0).sum()), bool(too_many)) == (9, found, False)


def test_more_targets_than_the_task_has_said_have_no_finite_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert_module, "rows_with_target", bert_module.as_many_rows)
    tokens_BT = torch.zeros(BATCH, 20, dtype=torch.int64)
    targets_BT = torch.where(torch.arange(20) < 4, 1, -1).expand(BATCH, 20)
    module = build(small(), torch.float64)
    module.losses_per_sample = 3
    assert module(tokens_BT, targets_BT).isnan()
