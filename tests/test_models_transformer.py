"""In: an encoder-decoder of ours and torch.nn.Transformer with the same weights. Out: the same outputs and gradients.
Does not test speed; dropout is compared with itself only (torch draws its masks from a generator)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward

from codescent import models
from codescent.base.errors import UserError
from codescent.models.initialize import initialize_
from codescent.models.transformer.declare import PRESETS, TransformerShape, forward_flops, parameters
from codescent.models.transformer.module import Transformer, sinusoids
from codescent.plan.pipeline import cut

COUNTS = {"transformer-base": 44_140_544, "transformer-big": 176_361_472}  # without embeddings, as torch counts them
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")
SIZES = {"num_encoder_layers": 2, "num_decoder_layers": 3, "num_heads": 3, "hidden_dim": 24, "ffn_dim": 40}
SIZES |= {"vocab_size": 61, "source_len": 11, "target_len": 7}
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
THEIRS = {"attn": "self_attn", "cross": "multihead_attn", "mlp.up": "linear1", "mlp.down": "linear2"}
THEIRS |= {f"norm_{number}": f"norm{number}" for number in (1, 2, 3)}


def layers_alone(
    module: Transformer,
    source: Tensor,
    target: Tensor,
    source_padding_BS: Tensor | None = None,
    target_padding_BT: Tensor | None = None,
) -> Tensor:
    """What torch.nn.Transformer computes: without embeddings, positions and head."""
    keys_SB = module.dropout_keys(len(source))
    return module.norm(module._layers(source, target, source_padding_BS, target_padding_BT, keys_SB)[1])


def small(**options: Any) -> TransformerShape:
    others = {name: options.pop(name) for name in ("bias", "dropout") if name in options}
    shape = models.shape_of("transformer", SIZES | options, **others)
    assert isinstance(shape, TransformerShape)
    return shape


def build(shape: TransformerShape, dtype: torch.dtype, chunk: int = 1024, depths: range | None = None) -> Transformer:
    module = Transformer(shape, chunk, "cpu", depths).to(dtype)
    names = {name for name, _ in module.named_parameters()}
    initialize_(module, 7, [parameter for parameter in parameters(shape) if parameter.name in names])
    with torch.no_grad():  # biases and norms away from 0 and 1, where a mistake in them would not show
        for name, tensor in module.named_parameters():
            if tensor.ndim == 1:
                generator = torch.Generator().manual_seed(sum(name.encode()))
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return module


def twin_of(shape: TransformerShape, dtype: torch.dtype, device: str = "cpu") -> nn.Transformer:
    return nn.Transformer(
        shape.hidden_dim,
        shape.num_heads,
        shape.num_encoder_layers,
        shape.num_decoder_layers,
        shape.ffn_dim,
        dropout=0.0,
        activation=shape.activation,
        norm_first=shape.norm == "first",
        bias=shape.bias,
        batch_first=True,
        device=device,
        dtype=dtype,
    )


def with_theirs(
    module: Transformer, tensors: dict[str, Tensor], *, gradients: bool = False
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Our name, our tensor laid out as theirs, and that tensor of theirs (or what is in its place)."""
    shape = module.shape
    for name, parameter in module.named_parameters():
        tensor = parameter.grad if gradients else parameter
        assert tensor is not None
        if name.startswith("norm."):
            yield name, tensor, tensors[f"decoder.{name}"]
            continue
        _, number, leaf = name.split(".", 2)
        layer, stack = int(number), "encoder"
        if layer >= shape.num_encoder_layers:
            layer, stack = layer - shape.num_encoder_layers, "decoder"
        part, _, kind = leaf.rpartition(".")
        if part == "norm_end":
            yield name, tensor, tensors[f"encoder.norm.{kind}"]
        elif part in THEIRS:
            yield name, tensor, tensors[f"{stack}.layers.{layer}.{THEIRS[part]}.{kind}"]
        else:
            attention, _, matrix = part.partition(".")
            at = f"{stack}.layers.{layer}.{THEIRS[attention]}"
            if matrix == "out":
                yield name, tensor, tensors[f"{at}.out_proj.{kind}"]
                continue
            kinds = {"qkv": 3, "kv": 2, "q": 1}[matrix]  # ours head by head, theirs all of q, then of k, then of v
            by_head = tensor.view(shape.num_heads, kinds, shape.head_dim, *tensor.shape[1:])
            width, packed = shape.hidden_dim, tensors[f"{at}.in_proj_{kind}"]
            rows = packed[:width] if matrix == "q" else packed[-kinds * width :]
            yield name, by_head.transpose(0, 1).reshape(tensor.shape), rows


def take_weights(twin: nn.Transformer, module: Transformer) -> None:
    theirs = dict(twin.named_parameters())
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(t.numel() for t in module.parameters())
    with torch.no_grad():
        for tensor in theirs.values():
            tensor.fill_(torch.nan)  # what is not taken over shows
        for _, mine, slot in with_theirs(module, {name: tensor.data for name, tensor in theirs.items()}):
            slot.copy_(mine)


def relative(mine: Tensor, theirs: Tensor) -> float:
    error: float = ((mine - theirs).norm() / theirs.norm()).item()
    return error


def vectors(shape: TransformerShape, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Source, target and what is wanted of it."""
    generator = torch.Generator().manual_seed(3)
    lengths = (shape.source_len, shape.target_len, shape.target_len)
    made = [torch.randn(batch, length, shape.hidden_dim, generator=generator, dtype=dtype) for length in lengths]
    return made[0], made[1], made[2]


def tokens(shape: TransformerShape, batch: int = 3) -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, shape.vocab_size, (batch, shape.seq_len + 1), generator=torch.Generator().manual_seed(5))
    return rows[:, :-1], rows[:, 1:]


def compare_with_torch(shape: TransformerShape, dtype: torch.dtype, bound: float, *, padded: bool = False) -> None:
    module, twin = build(shape, dtype), twin_of(shape, dtype)
    take_weights(twin, module)
    source, target, wanted = vectors(shape, 2, dtype)
    mine: dict[str, Tensor] = {}
    theirs: dict[str, Any] = {"tgt_is_causal": shape.causal}
    if padded:
        padding_BS, padding_BT = torch.zeros(2, source.shape[1]).bool(), torch.zeros(2, target.shape[1]).bool()
        padding_BS[0, 6:], padding_BT[1, 4:] = True, True
        mine = {"source_padding_BS": padding_BS, "target_padding_BT": padding_BT}
        theirs |= {"src_key_padding_mask": padding_BS, "memory_key_padding_mask": padding_BS}
        theirs |= {"tgt_key_padding_mask": padding_BT}
    if shape.causal:
        theirs["tgt_mask"] = torch.ones(target.shape[1], target.shape[1]).bool().triu(1)
    inputs, their_inputs = [[t.clone().requires_grad_() for t in (source, target)] for _ in range(2)]
    output = layers_alone(module, inputs[0], inputs[1], **mine)
    expected = twin(their_inputs[0], their_inputs[1], **theirs)
    assert relative(output, expected) < bound
    backward(nn.functional.mse_loss(output, wanted))
    backward(nn.functional.mse_loss(expected, wanted))
    gradients = {name: tensor.grad for name, tensor in twin.named_parameters() if tensor.grad is not None}
    for name, gradient, truth in with_theirs(module, gradients, gradients=True):
        assert relative(gradient, truth) < bound, name
    for tensor, truth in zip(inputs, their_inputs, strict=True):
        assert tensor.grad is not None
        assert truth.grad is not None
        assert relative(tensor.grad, truth.grad) < bound


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_torchs_default_configuration_has_torchs_outputs_and_gradients(dtype: torch.dtype, bound: float) -> None:
    shape = models.shape_of(
        "transformer", {"source_len": 10, "target_len": 6, "causal": False, "embedding": "none"}, "transformer-base"
    )
    assert isinstance(shape, TransformerShape)
    defaults = nn.Transformer(device="meta")
    ours = twin_of(shape, dtype)
    assert [tuple(t.shape) for t in defaults.parameters()] == [tuple(t.shape) for t in ours.parameters()]
    compare_with_torch(shape, dtype, bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"causal": True},
        {"norm": "first"},
        {"activation": "gelu", "norm": "first", "causal": False},
        {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_heads": 1, "hidden_dim": 5},
        {"bias": False},
        {"source_len": 3, "target_len": 140, "num_decoder_layers": 1},
    ],
    ids=str,
)
def test_free_sizes_have_torchs_outputs_and_gradients(
    options: dict[str, Any], dtype: torch.dtype, bound: float
) -> None:
    compare_with_torch(small(**options, embedding="none"), dtype, bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("options", [{"causal": False}, {"causal": True}, {"norm": "first"}], ids=str)
def test_padding_is_hidden_as_torch_hides_it(options: dict[str, Any], dtype: torch.dtype, bound: float) -> None:
    compare_with_torch(small(**options, embedding="none"), dtype, bound, padded=True)


@pytest.mark.parametrize("embedding", ["tied", "untied", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_module_on_meta_has_exactly_the_declared_parameters(embedding: str, bias: bool) -> None:
    for preset in (*PRESETS, None):
        shape = models.shape_of(
            "transformer", (SIZES if preset is None else {}) | {"embedding": embedding}, preset, bias=bias
        )
        assert isinstance(shape, TransformerShape)
        declared = models.parameters_of("transformer", shape)
        module = models.construct(models.facts_of("transformer", shape))
        there = [(name, tuple(tensor.shape)) for name, tensor in module.named_parameters()]
        assert [(parameter.name, parameter.shape) for parameter in declared] == there
        assert all(tensor.is_meta for tensor in module.parameters())
        assert not list(module.buffers())
        assert bias == any(name.endswith("bias") for name, _ in there)
        if preset is not None and bias:
            matrices = {"tied": 1, "untied": 3, "none": 0}[embedding]
            extra = matrices * shape.vocab_size * shape.hidden_dim
            assert sum(parameter.numel for parameter in declared) == COUNTS[preset] + extra
            twin = twin_of(shape, torch.float32, "meta")
            assert sum(tensor.numel() for tensor in twin.parameters()) == COUNTS[preset]


def test_initial_values_have_the_deviations_that_torch_draws() -> None:
    shape = models.shape_of("transformer", {"embedding": "none"}, "transformer-base")
    assert isinstance(shape, TransformerShape)
    module, twin = Transformer(shape, device="cpu"), twin_of(shape, torch.float32)
    initialize_(module, 1, parameters(shape))
    for name, mine, theirs in with_theirs(module, dict(twin.named_parameters())):
        if mine.ndim == 2:
            assert abs(mine.std().item() / theirs.std().item() - 1) < 0.02, name


def one_step(
    parts: list[Transformer], inputs: Tensor, targets: Tensor, masks: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, as a pipeline makes them: each part gets the tensor of the one before, and hands back its
    gradient."""
    passed: list[tuple[Tensor, Tensor]] = []
    x = inputs
    for part in parts:
        part.train()
        part.set_dropout_context(1, 2, torch.arange(3, 3 + len(inputs)))
        x = x.detach() if part is parts[0] else x.detach().requires_grad_()
        y = part(x, targets, loss_scale=0.5, **masks) if part.ends else part(x, **masks)
        if not part.ends:
            assert y.shape == (len(inputs), inputs.shape[1], part.shape.hidden_dim)
        passed.append((x, y))
        x = y
    loss, gradient = x, None
    gradients: dict[str, Tensor] = {}
    for x, y in reversed(passed):
        torch.autograd.backward(y, gradient)
        gradient = x.grad
    for part in parts:
        for name, tensor in part.named_parameters():
            assert tensor.grad is not None, name
            gradients[name] = gradients[name] + tensor.grad if name in gradients else tensor.grad
            tensor.grad = None
    return loss.detach(), gradients


@pytest.mark.parametrize(
    ("embedding", "options", "padded"),
    [
        ("tied", {}, False),
        ("tied", {"norm": "first", "dropout": 0.2}, True),
        ("untied", {"dropout": 0.2}, False),
        ("none", {"norm": "first"}, True),
    ],
)
def test_parts_one_after_the_other_are_the_whole(embedding: str, options: dict[str, Any], padded: bool) -> None:
    shape = small(embedding=embedding, num_decoder_layers=2, **options)
    inputs, targets = tokens(small())
    if embedding == "none":
        inputs, targets = (torch.randn(3, shape.seq_len, shape.hidden_dim).double() for _ in range(2))
    masks: dict[str, Tensor] = {}
    if padded:
        masks["source_lengths_B"] = torch.tensor([shape.source_len, 5, shape.source_len])
        masks["target_lengths_B"] = torch.tensor([shape.target_len, shape.target_len, 6])
    whole = build(shape, torch.float64)
    loss, gradients = one_step([whole], inputs, targets, masks)
    first, end = (2 if embedding == "none" else 1), shape.num_layers + 2  # without embedding, depth 0 is nothing
    for bounds in [(0, at, end) for at in range(first, end)] + [(0, *range(first, end + 1))]:
        parts = [Transformer(shape, 1024, "cpu", range(a, b)).double() for a, b in zip(bounds, bounds[1:])]
        for part, at in zip(parts, bounds):
            declared = [p.name for p in parameters(shape) if any(depth in part_range(bounds, at) for depth in p.depths)]
            assert [name for name, _ in part.named_parameters()] == declared
            part.load_state_dict({name: whole.get_parameter(name) for name in declared})
        loss_of_parts, of_parts = one_step(parts, inputs, targets, masks)
        torch.testing.assert_close(loss_of_parts, loss)
        assert set(of_parts) == set(gradients)
        for name, gradient in gradients.items():
            assert relative(of_parts[name], gradient) < 1e-12, (bounds, name)


def part_range(bounds: tuple[int, ...], first: int) -> range:
    return range(first, bounds[bounds.index(first) + 1])


def test_the_encoder_alone_is_one_part_and_the_decoder_the_other() -> None:
    shape = small()
    encoder = build(shape, torch.float64, depths=range(shape.num_encoder_layers + 1))
    decoder = build(shape, torch.float64, depths=range(shape.num_encoder_layers + 1, shape.num_layers + 2))
    assert not any(".cross." in name for name, _ in encoder.named_parameters())
    assert list(decoder.blocks) == ["2", "3", "4"]
    inputs, _ = tokens(shape)
    logits = build(shape, torch.float64)(inputs)
    assert logits.shape == (3, shape.target_len, shape.vocab_size)
    torch.testing.assert_close(decoder(encoder(inputs)), logits)


@pytest.mark.parametrize("embedding", ["tied", "untied"])
@pytest.mark.parametrize("chunk", [0, 1024, 10])
def test_loss_is_the_cross_entropy_of_the_targets_logits(embedding: str, chunk: int) -> None:
    shape = small(embedding=embedding)
    module = build(shape, torch.float64, chunk)
    inputs, targets = tokens(shape)
    logits = module(inputs)
    of_target = targets[:, shape.source_len :]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), of_target.flatten(), reduction="sum")
    backward(0.25 * expected)
    by_logits = {name: tensor.grad for name, tensor in module.named_parameters()}
    module.zero_grad()
    loss = module(inputs, targets, loss_scale=0.25)
    torch.testing.assert_close(loss, expected)
    backward(loss)
    for name, tensor in module.named_parameters():
        torch.testing.assert_close(tensor.grad, by_logits[name])
    with torch.no_grad():
        torch.testing.assert_close(module(inputs, targets), loss)


def test_loss_of_vectors_is_the_squared_error_of_torch_summed_over_positions() -> None:
    shape = small(embedding="none")
    module = build(shape, torch.float64)
    source, target, wanted = vectors(shape, 2, torch.float64)
    output = layers_alone(module, source, target)
    expected = nn.functional.mse_loss(output, wanted)
    backward(expected)
    by_output = {name: tensor.grad for name, tensor in module.named_parameters()}
    module.zero_grad()
    positions = 2 * shape.target_len
    inputs, targets = torch.cat((source, target), 1), torch.cat((torch.zeros_like(source), wanted), 1)
    loss = module(inputs, targets, loss_scale=1 / positions)
    torch.testing.assert_close(loss, expected * positions)
    torch.testing.assert_close(module(inputs), output)
    backward(loss)
    for name, tensor in module.named_parameters():
        torch.testing.assert_close(tensor.grad, by_output[name])


def test_a_position_of_the_target_sees_no_later_one_and_all_of_the_source() -> None:
    shape = small()
    module = build(shape, torch.float64)
    inputs, _ = tokens(shape, 1)
    inputs[0], before = inputs[0] % (shape.vocab_size - 1), module(inputs % (shape.vocab_size - 1))
    for at in range(shape.seq_len):
        changed = inputs.clone()
        changed[0, at] += 1
        differs = (module(changed) - before).abs().amax(-1)[0] > 0
        first = max(0, at - shape.source_len)
        assert differs[first:].all()
        assert not differs[:first].any()


def test_embeddings_are_scaled_and_positions_are_those_of_the_paper() -> None:
    table = sinusoids(50, 6)
    for position in (0, 1, 49):
        for channel in range(6):
            angle = torch.tensor(position / 10000 ** (channel // 2 * 2 / 6), dtype=torch.float64)
            torch.testing.assert_close(table[position, channel], angle.cos() if channel % 2 else angle.sin())
    shape = small()
    embedding = build(shape, torch.float64, depths=range(1))
    inputs, _ = tokens(shape)
    table = sinusoids(11, 24)
    expected = embedding.tok.weight[inputs] * 24**0.5 + torch.cat((table, table[:7]))
    torch.testing.assert_close(embedding(inputs), expected)


def test_recomputing_changes_no_bit() -> None:
    shape = small(dropout=0.1)
    inputs, targets = tokens(shape)
    module = build(shape, torch.float32)
    loss, gradients = one_step([module], inputs, targets, {})
    for block in module.blocks.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: torch.utils.checkpoint.checkpoint(  # type: ignore[method-assign]
            forward, *args, use_reentrant=False
        )
        for layer in block.modules():
            if hasattr(layer, "recompute"):
                layer.recompute = True
    again, same = one_step([module], inputs, targets, {})
    assert torch.equal(again, loss)
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)


def test_dropout_drops_by_sample_step_and_seed_alone() -> None:
    shape = small(dropout=0.3)
    module = build(shape, torch.float64).train()
    inputs, targets = tokens(shape, 4)
    with pytest.raises(RuntimeError, match="set_dropout_context"):
        module(inputs, targets)

    def loss(rows: slice, step: int = 0) -> float:
        module.set_dropout_context(1, step, torch.arange(4)[rows])
        value: float = module(inputs[rows], targets[rows]).item()
        return value

    whole = loss(slice(0, 4))
    assert whole == pytest.approx(loss(slice(0, 2)) + loss(slice(2, 4)), rel=1e-12)
    assert whole != loss(slice(0, 4), step=1)
    module.eval()
    assert module(inputs, targets).item() != whole


def test_products_that_are_put_off_are_the_same() -> None:
    shape = small(norm="first")
    inputs, targets = tokens(shape)
    module = build(shape, torch.float64)
    _, gradients = one_step([module], inputs, targets, {})
    deferred: list[Any] = []
    for layer in module.modules():
        if hasattr(layer, "deferred"):
            layer.deferred = deferred
    backward(module(inputs, targets, loss_scale=0.5))
    for weight, make in deferred:
        weight.grad = make()
    matrices = [p for p in parameters(shape) if p.role in ("column", "row")]
    assert len(deferred) == len(matrices)
    for name, tensor in module.named_parameters():
        torch.testing.assert_close(tensor.grad, gradients[name])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"sizes": {**SIZES, "num_heads": 5}},
            ["5 heads do not divide", "num_heads = 4 or 6", "hidden_dim = 20 or 25"],
        ),
        ({"sizes": {"num_heads": 8}}, ["model.num_encoder_layers", "transformer-base"]),
        ({"sizes": {}, "preset": "transformer-bse"}, ["did you mean 'transformer-base'"]),
        ({"sizes": {**SIZES, "seq_len": 3}}, ["model.seq_len: transformer has no such size"]),
        ({"sizes": {**SIZES, "source_len": 0}, "dropout": 1.0}, ["model.source_len: 0", "model.dropout"]),
        ({"sizes": SIZES | {"norm": "middle", "embedding": "some"}}, ["none of last, first", "none of tied, untied"]),
    ],
)
def test_impossible_shapes_are_refused_in_words(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        models.shape_of("transformer", **arguments)
    for word in words:
        assert word in str(refusal.value)


def test_flops_are_those_of_the_matrices_and_of_attention() -> None:
    shape = small(source_len=8, target_len=8)
    per_position = forward_flops(shape, shape.seq_len)
    assert len(per_position) == shape.num_layers + 2
    tensors = tuple(parameters(shape))
    for depth, attentions in ((1, 1), (shape.num_encoder_layers + 1, 2)):
        matrices = sum(p.numel for p in tensors if p.depths == (depth,) and len(p.shape) == 2)
        pairs = attentions * 8 * 8
        assert per_position[depth] * 16 == 2 * 8 * matrices + 4 * pairs * shape.hidden_dim
    # Stages of a pipeline may part the two stacks: with as much work on either side, the dearest part is least there.
    balanced = small(num_encoder_layers=4, num_decoder_layers=3, source_len=8, target_len=8, vocab_size=1)
    assert cut(forward_flops(balanced, 16), 2)[0] == (0, balanced.num_encoder_layers + 1)


def test_what_it_does_not_go_with_it_says() -> None:
    assert set(small().refuses) == {"cp"}
    assert set(small(embedding="none").refuses) == {"cp", "sequence_parallel"}
