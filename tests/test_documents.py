"""In: samples of several documents. Out: each document is as if it were alone: attention, positions, losses, gradients.
Does not train on ranks: test_documents_runs.py does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from codescent import models
from codescent.data.documents import ROUNDED, extras_of, separate_samples
from codescent.data.loader import Batch
from codescent.models.decoder import Decoder
from codescent.models.gpt2.module import GPT2
from codescent.models.initialize import initialize_
from codescent.models.llama.module import Llama
from codescent.operators import packed_attention
from codescent.operators.attention import causal_attention
from codescent.operators.block_attention import PLAIN, ScoreTraits, block_attention_op
from codescent.operators.documents import DocumentBounds
from codescent.tasks.conversations.dataset import ResponseSource
from codescent.tasks.conversations.packed import PackedSource, packs_of

END = 60
SIZES = {"num_layers": 2, "num_heads": 4, "hidden_dim": 16, "vocab_size": 61}
KINDS: dict[str, tuple[type[Decoder], str, dict[str, Any]]] = {
    "gpt2": (GPT2, "gpt2", {}),
    "llama": (Llama, "llama", {"num_kv_heads": 2}),
    "llama with a window": (Llama, "llama", {"num_kv_heads": 2, "window": 7}),
    "llama as gemma": (
        Llama,
        "llama",
        {"num_kv_heads": 2, "window": 7, "full_every": 2, "score_cap": 9.0, "rope_local_theta": 100.0},
    ),
}


def built(name: str, seq_len: int) -> Decoder:
    made, kind, more = KINDS[name]
    shape = models.shape_of(kind, {**SIZES, **more, "seq_len": seq_len})
    module = made(shape, 5, "cpu").double()
    initialize_(module, 3, models.parameters_of(kind, shape))
    for parameter in module.parameters():
        parameter.data *= 6.0 if parameter.ndim == 2 else 1.0
    return module


def documents_of(ends: list[list[int]], length: int) -> DocumentBounds:
    """Documents of samples, by the positions behind each but the last one."""
    is_last = np.zeros((len(ends), length), np.bool_)
    for row, places in enumerate(ends):
        is_last[row, np.array(places, np.int64) - 1] = True
    extras = {name: torch.from_numpy(array) for name, array in extras_of(is_last).items()}
    return DocumentBounds.of(extras["begins_BT"], extras["ends_BM"])


def test_where_documents_begin_and_end() -> None:
    is_last = np.zeros((3, 6), np.bool_)
    is_last[0, [1, 4]] = True
    is_last[1, 5] = True
    extras = extras_of(is_last)
    assert extras["begins_BT"].tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6, [0] * 6]
    assert extras["ends_BM"].tolist() == [[2, 5, *[6] * (ROUNDED - 2)], [6] * ROUNDED, [6] * ROUNDED]
    on_device = DocumentBounds.of(*(torch.from_numpy(one).to("meta") for one in extras.values()))
    assert on_device.offsets_N is not None
    assert on_device.offsets_N.shape == (3 * ROUNDED + 1,)


def test_the_last_token_of_a_document_has_no_target() -> None:
    rows = np.array([[5, END, 7, 8, END]])
    samples = separate_samples(rows[:, :-1], rows[:, 1:], END)
    assert samples.targets.tolist() == [[END, -1, 8, END]]
    assert samples.extras["begins_BT"].tolist() == [[0, 0, 2, 2]]


ATTENTIONS: dict[str, Callable[[Tensor, int, DocumentBounds], Tensor]] = {
    "plain": lambda qkv, window, documents: causal_attention(qkv, False, ScoreTraits(window), documents),
    "for the compiler": lambda qkv, window, documents: block_attention_op(qkv, window, begins_BT=documents.begins_BT)[
        0
    ],
}


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_on_a_cpu_is_that_with_a_mask(attention: str, window: int) -> None:
    """A block of queries that reads keys of another sample's documents, or none of its own, is caught here."""
    torch.manual_seed(0)
    length, documents = 300, documents_of([[1, 2, 130, 131, 256], [], [299], [140]], 300)
    qkv_BTGEK = torch.randn(4, length, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    y_BTD = ATTENTIONS[attention](qkv_BTGEK, window, documents)
    d_y_BTD = torch.randn_like(y_BTD)
    (found,) = torch.autograd.grad(y_BTD, qkv_BTGEK, d_y_BTD)
    q_BTGRK, k_BTG1K, v_BTG1K = torch.split(qkv_BTGEK, [2, 1, 1], dim=3)
    q, k, v = (one.flatten(2, 3).transpose(1, 2) for one in (q_BTGRK, k_BTG1K, v_BTG1K))
    seen = documents.seen()
    seen = seen.triu(1 - window) if window else seen
    wanted_BTD = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2).flatten(2)
    (wanted,) = torch.autograd.grad(wanted_BTD, qkv_BTGEK, d_y_BTD)
    torch.testing.assert_close(y_BTD, wanted_BTD, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_a_cpu_computes_no_block_of_keys_of_another_document() -> None:
    """1024 positions of documents of 128 need 8 blocks, where one document needs 36."""
    qkv = torch.randn(1, 1024, 1, 3, 8)

    def flops(documents: DocumentBounds | None) -> int:
        with FlopCounterMode(display=False) as counter:
            causal_attention(qkv, False, PLAIN, documents)
        return int(counter.get_total_flops())

    assert flops(documents_of([list(range(128, 1024, 128))], 1024)) * 36 == flops(None) * 8


def alone(module: Decoder, inputs: Tensor, targets: Tensor, is_last: np.ndarray[Any, Any]) -> Tensor:
    """The sum of the losses of documents that are computed one by one."""
    total = torch.zeros((), dtype=torch.float64)
    for row, last in enumerate(is_last):
        stops = [*(np.flatnonzero(last) + 1).tolist(), len(last)]
        for start, stop in zip([0, *stops], stops):
            if start < stop:
                part = slice(start, stop)
                lengths = torch.tensor([stop - start])
                total = total + module(inputs[row : row + 1, part], targets[row : row + 1, part], lengths_B=lengths)
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_in_a_sample_has_the_losses_and_gradients_that_it_has_alone(kind: str) -> None:
    rng, module = np.random.default_rng(1), built(kind, 40)
    rows = rng.integers(0, 50, (3, 41))
    rows[0, [3, 4, 20, 38]] = rows[2, [39]] = END  # an empty document, and one that ends with its sample
    samples = separate_samples(rows[:, :-1], rows[:, 1:], END)
    batch = Batch.of(samples)
    together = module(batch.inputs, batch.targets, **batch.extras)
    together.backward()
    found = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}  # type: ignore[union-attr]
    module.zero_grad()
    one_by_one = alone(module, batch.inputs, batch.targets, samples.inputs == END)
    one_by_one.backward()
    torch.testing.assert_close(together, one_by_one, rtol=1e-13, atol=0)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-10)


def test_another_document_changes_nothing() -> None:
    """The first tokens of a sample may be any others: what comes behind the end of their document is bitwise equal."""
    module, rows = built("llama", 40).eval(), np.random.default_rng(2).integers(0, 50, (1, 41))
    rows[0, 17] = END
    outputs = []
    for change in (0, 1):
        rows[0, :17] = (rows[0, :17] + change) % 50
        batch = Batch.of(separate_samples(rows[:, :-1], rows[:, 1:], END))
        outputs.append(module(batch.inputs, **batch.extras)[:, 18:])
    assert torch.equal(*outputs)


def test_packs_have_room_and_every_example_once() -> None:
    lengths = np.random.default_rng(3).integers(1, 33, 500)
    packs = packs_of(lengths, 32)
    assert sorted(number for pack in packs for number in pack) == list(range(500))
    filled = [int(lengths[pack].sum()) for pack in packs]
    assert max(filled) <= 32
    assert sum(filled) / (32 * len(packs)) > 0.98
    assert packs == packs_of(lengths.copy(), 32)
    assert packs_of(np.array([], np.int64), 8) == []


def examples() -> ResponseSource:
    """Conversations of one to three responses, and one that is longer than a sample."""
    rng = np.random.default_rng(4)
    sizes = [*rng.integers(6, 24, 30).tolist(), 60]
    begins = np.cumsum([0, *sizes])
    wanted = [(first + 2, first + 4) for first in begins[:-1].tolist()]
    wanted += [(first + 5, first + size) for first, size in zip(begins.tolist(), sizes) if size > 8]
    tokens = rng.integers(0, 61, int(begins[-1]))
    return ResponseSource("train", tokens, begins, np.array(sorted(wanted)), 32)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_conversations_have_the_loss_of_single_ones(kind: str) -> None:
    module, source = built(kind, 32), examples()
    packed = PackedSource(source, 32)
    assert packed.num_samples < 0.6 * source.num_samples
    sums, gradients = [], []
    for one in (source, packed):
        numbers = np.arange(one.num_samples)
        batch = Batch.of(one.read(numbers))
        assert one.losses(numbers).tolist() == (batch.targets >= 0).sum(1).tolist()
        module.zero_grad()
        loss = module(batch.inputs, batch.targets, **batch.extras)
        loss.backward()
        sums.append(loss.item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))  # type: ignore[union-attr]
    assert sums[1] == pytest.approx(sums[0], rel=1e-13)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-8, atol=1e-10)


def test_the_padding_of_samples_is_counted() -> None:
    source = examples()
    packed = PackedSource(source, 32)
    numbers = np.arange(source.num_samples)
    positions = 32 * source.num_samples
    assert source.padding(numbers).sum() == positions - source.lengths.sum()
    filled = 32 * packed.num_samples - packed.padding(np.arange(packed.num_samples)).sum()
    assert filled == source.lengths.sum()


WAYS = {
    "half precision": (torch.bfloat16, PLAIN, "kernel"),
    "half precision, a window": (torch.bfloat16, ScoreTraits(7), "kernel"),
    "half precision, a cap": (torch.bfloat16, ScoreTraits(7, 20.0), "blocks"),
    "fp32": (torch.float32, PLAIN, "mask"),
    "fp32, a window": (torch.float32, ScoreTraits(7), "blocks"),
}


@pytest.mark.parametrize("case", WAYS)
def test_off_a_cpu_documents_are_a_kernel_of_variable_length_or_blocks_or_a_mask(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The meta device takes the way of CUDA. No number is computed: no CUDA device runs this test."""
    precision, scores, way = WAYS[case]
    taken: list[str] = []
    plain, sdpa = packed_attention.attend, F.scaled_dot_product_attention

    def packed(*given: Any) -> Tensor:
        taken.append("kernel")
        return plain(*given)

    def masked(*given: Any, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        assert attn_mask is not None
        assert attn_mask.shape == (2, 1, 48, 48)
        taken.append("mask")
        return sdpa(*given, attn_mask=attn_mask, **more)

    monkeypatch.setattr(packed_attention, "attend", packed)
    monkeypatch.setattr(F, "scaled_dot_product_attention", masked)
    extras = extras_of(np.zeros((2, 48), np.bool_))
    documents = DocumentBounds.of(*(torch.from_numpy(one).to("meta") for one in extras.values()))
    qkv_BTGEK = torch.empty(2, 48, 2, 4, 16, dtype=precision, device="meta", requires_grad=True)
    y_BTD = causal_attention(qkv_BTGEK, False, scores, documents)
    y_BTD.sum().backward()
    assert y_BTD.shape == (2, 48, 2 * 2 * 16)
    assert qkv_BTGEK.grad is not None
    assert taken == ([] if way == "blocks" else [way])
