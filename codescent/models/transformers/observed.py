"""In: the text of a config.json, what the head predicts. Out: what the model of `transformers` has and does:
parameters, initial values, blocks, FLOPs. It is built and run once without memory, on torch's fake tensors of a CPU.
Does not estimate: what cannot be observed is refused."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from codescent.base.errors import UserError
from codescent.models.transformers import library
from codescent.models.transformers.structure import blocks_of, hold_once_, owners
from codescent.plan.shard import Parameter, Role

BLOCKS, NET = "blocks", "net"
"""Names of the blocks and of all else in the module of this kind."""
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
)
"""Fused attention. torch's counter does not know that of a CPU, and that of torch 2.11 refuses grouped heads."""
_TOKENS = 16
"""Tokens of the sample that shows the order of the modules."""
_COPIES = (torch.ops.aten.clone, torch.ops.aten.constant_pad_nd)
"""Operators by which transformers moves a bias into other memory."""
_FAST_ERFINV = math.sqrt(0.5)
"""Deviation of erfinv(u) for u uniform in [-1, 1]: a normal number is sqrt(2) times that."""


@dataclass(frozen=True)
class Observed:
    """What a model is, beside its sizes.

    Attributes:
        class_name: its class in transformers.
        layers: the name of its list of blocks.
        parameters: every parameter, by our name, in the order of the module of this kind.
        theirs: the name of each parameter in transformers, by our name.
        stored: the name of each tensor in a folder, by its name in transformers.
        tied: names in transformers of tied tensors, each with the tensor that it repeats.
        direct: the logits are the output of the head, a linear layer, as it is.
        unlike: parameters whose initial values are neither normal nor one number, as transformers makes them.
        positions: the longest sample; None: the embeddings set no limit.
        buffers: names of its buffers, which older folders store.
    """

    class_name: str
    layers: str
    parameters: tuple[Parameter, ...]
    theirs: Mapping[str, str]
    stored: Mapping[str, str]
    tied: Mapping[str, str]
    direct: bool
    unlike: tuple[str, ...]
    positions: int | None
    buffers: tuple[str, ...]


@lru_cache(maxsize=8)
def observe(text: str, head: str, layers: int) -> Observed:
    """Build the model and run it once.

    Raises:
        UserError: transformers cannot build it; its blocks are not one list that runs in order; it draws random
            numbers, or does what depends on values; a parameter has no gradient.
    """
    with _Writes() as writes:
        net = library.build(text, head)
    blocks = blocks_of(net, layers)
    positions = _positions(net, library.config_of(text))
    named = list(owners(net))
    values = {name: writes.initial(parameter) for name, _, _, parameter in named}
    if scalars := [name for name, _, _, parameter in named if not parameter.dim()]:
        raise UserError(f"{', '.join(scalars[:4])}: a parameter without dims, which cannot be sharded")
    stored, tied = library.stored_names(net), hold_once_(net)
    with _Causal() if head == "causal" else nullcontext():
        seen = watched(net, blocks, min(_TOKENS, positions or _TOKENS))
    if unread := [name for name, parameter in net.named_parameters() if parameter.grad is None]:
        raise UserError(
            f"{len(unread)} parameters get no gradient from a loss of tokens: {', '.join(unread[:4])}"
            f"{', …' * (len(unread) > 4)}; ranks that wait for these gradients would wait forever"
        )
    special = {id(library.embedding_of(net)): Role.VOCAB, id(library.head_of(net)): Role.VOCAB}
    depths = {name: seen.depths.get(id(module), {_inside(name, blocks)}) for name, module, _, _ in named}
    found: dict[str, Parameter] = {}
    for name, module, leaf, parameter in named:
        if name in tied:
            continue
        at = depths[name].union(*(depths[other] for other, source in tied.items() if source == name))
        mean, std = values[name] or (0.0, 0.0)
        ours, role = our_name(name, blocks), _role(module, leaf, parameter, special, _inside(name, blocks))
        found[ours] = Parameter(ours, tuple(parameter.shape), role, std, mean, tuple(sorted(at)))
    inner = [one.name for one in found.values() if len(one.depths) > 1 and set(one.depths) - {0, layers + 1}]
    if inner:
        raise UserError(f"{', '.join(inner[:4])}: is read by several blocks, or by a block and outside of it")
    order = sorted(found, key=lambda name: name.startswith(f"{BLOCKS}."))  # a stable sort
    return Observed(
        class_name=type(net).__name__,
        layers=blocks,
        parameters=tuple(found[name] for name in order),
        theirs={our_name(name, blocks): name for name, *_ in named if name not in tied},
        stored=stored,
        tied=tied,
        direct=seen.direct,
        unlike=tuple(name for name, value in values.items() if value is None and name not in tied),
        positions=positions,
        buffers=tuple(name for name, _ in net.named_buffers()),
    )


@lru_cache(maxsize=32)
def forward_flops(text: str, head: str, layers: int, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth, as torch counts them for every product and attention."""
    net = library.build(text, head)
    hold_once_(net)
    seen = watched(net, blocks_of(net, layers), seq_len, backward=False)
    return tuple(seen.flops[depth] / seq_len for depth in range(layers + 2))


def our_name(name: str, blocks: str) -> str:
    """The name of a parameter in the module of this kind: "model.layers.0.mlp.x" is "blocks.0.mlp.x"."""
    rest = name.removeprefix(f"{blocks}.")
    return f"{NET}.{name}" if rest == name else f"{BLOCKS}.{rest}"


def _inside(name: str, blocks: str) -> int:
    """The depth of a parameter by its name: that of its block, else 0."""
    rest = name.removeprefix(f"{blocks}.")
    return 0 if rest == name else int(rest.partition(".")[0]) + 1


def _role(module: nn.Module, leaf: str, parameter: nn.Parameter, special: Mapping[int, Role], depth: int) -> Role:
    """A linear layer of a block is COLUMN: adapters and Muon take it. Axes that divide a matrix are refused."""
    role = special.get(id(module), Role.POSITION if isinstance(module, nn.Embedding) else Role.WHOLE)
    if isinstance(module, nn.Linear) and depth:
        role = Role.COLUMN
    if parameter.dim() > 1:
        return role
    if isinstance(module, nn.Linear) or leaf == "bias":
        return Role.BIAS_COLUMN if role in (Role.COLUMN, Role.VOCAB) else Role.BIAS_ROW
    return Role.NORM


def _positions(net: nn.Module, config: Any) -> int | None:
    """Positions of the longest sample. An embedding with a row for padding counts positions from behind this row."""
    tokens = library.embedding_of(net)
    given: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    for module in net.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == given and module is not tokens:
            return given if module.padding_idx is None else module.num_embeddings - module.padding_idx - 1
    return given


@dataclass
class Seen:
    """What a run shows: FLOPs by depth; by the id of each module with parameters the depths that call it."""

    flops: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    depths: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    depth: int = 0
    direct: bool = False


def watched(net: nn.Module, blocks: str, tokens: int, *, backward: bool = True) -> Seen:
    """Run a model of this length on fake tensors, which replace its parameters. Raises UserError: see `observe`."""
    layers, seen = net.get_submodule(blocks), Seen()
    assert isinstance(layers, nn.ModuleList)
    outputs: list[torch.Tensor] = []
    head = library.head_of(net)
    handles = [head.register_forward_hook(lambda _m, _i, y: outputs.append(y))] if isinstance(head, nn.Linear) else []
    for number, block in enumerate(layers):
        handles.append(block.register_forward_pre_hook(partial(_enter, seen, number)))
        handles.append(block.register_forward_hook(partial(_leave, seen, len(layers))))
    for module in net.modules():
        handles.append(module.register_forward_pre_hook(lambda m, _i: seen.depths[id(m)].add(seen.depth)))
    with faked(net), _Ops(seen):
        try:
            logits = library.logits_of(net, torch.zeros(1, tokens, dtype=torch.long))
            if backward:
                logits.sum().backward()  # type: ignore[no-untyped-call]
        except UserError:
            raise
        except Exception as error:  # of torch, or of the model: what it does depends on values
            raise UserError(
                "it does not run on tensors without values: sizes in config.json do not fit each other, or what it "
                f"does depends on values ({library.in_a_line(error)})"
            ) from error
    if seen.depth != len(layers) + 1:
        raise UserError(f"its {len(layers)} blocks do not run once each, in order")
    seen.direct = any(output is logits for output in outputs)
    for handle in handles:
        handle.remove()
    return seen


@contextmanager
def faked(net: nn.Module) -> Iterator[FakeTensorMode]:
    """Replace all tensors of a module by fake ones of a CPU: they have a shape and no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _quiet(), library.one_sequence():
        net._apply(  # type: ignore[no-untyped-call]
            lambda x: torch.empty_like(x, device="cpu") if x.is_meta else mode.from_tensor(x)
        )
        yield mode


@contextmanager
def _quiet() -> Iterator[None]:
    """An operator that fails is an error with a message. torch prints a traceback besides."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _enter(seen: Seen, number: int, *_: object) -> None:
    if seen.depth != number:
        raise UserError(f"its blocks do not run once each, in order: block {number} follows {seen.depth - 1}")
    seen.depth = number + 1


def _leave(seen: Seen, layers: int, *_: object) -> None:
    seen.depth += seen.depth == layers


class _Causal(TorchFunctionMode):
    """Refuses attention of all positions to all: a model that predicts the next token must not see it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else options.get("attn_mask")
            is_causal = args[5] if len(args) > 5 else options.get("is_causal", False)
            if mask is None and not is_causal and args[0].shape[-2] > 1:
                raise UserError(
                    "each position sees the later tokens, which it is to predict (attention without a mask); "
                    'config.json may have a key for a mask, such as "is_decoder": true'
                )
        return func(*args, **options)


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of each operator, and refuses random numbers."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _dropout(func, args, options) != 0.0:
            raise UserError(
                f"it draws random numbers in evaluation mode ({func}), by torch's generator: they would differ between "
                "layouts"
            )
        out = func(*args, **options)
        known: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        count = _attention_flops if func.overloadpacket in _ATTENTION else known
        if count is not None:
            self.seen.flops[self.seen.depth] += count(*args, **options, out_val=out)
        return out


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Both products of attention (B, heads, T, channels), without a mask. Several query heads may share a key head."""
    batch, heads, queries, channels = query.shape
    return int(2 * batch * heads * queries * key.shape[-2] * (channels + value.shape[-1]))


def _dropout(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> float:
    """The probability that attention drops; 1: the operator has no such argument."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[at] if at < len(args) else options.get("dropout_p", argument.default_value)
            return float(value)
    return 1.0


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how initial values are written into tensors of the meta device: (mean, deviation), or None."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[int, tuple[float, float] | None] = {}
        self._uniform: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            self._write(func._schema.name.partition("::")[2], args[0], args[1:])
        elif func.overloadpacket in _COPIES and args[0].is_meta and out.shape == args[0].shape:
            self._found[_key(out)] = self._found.get(_key(args[0]))
        return out

    def _write(self, name: str, tensor: torch.Tensor, values: tuple[Any, ...]) -> None:
        """A part of a tensor does not count: transformers sets the embedding of padding to 0 there."""
        key, numbers = _key(tensor), [value for value in values if isinstance(value, int | float)]
        if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            return
        mean, std = self._found.get(key) or (0.0, 0.0)
        is_uniform = key in self._uniform
        self._uniform.discard(key)
        match name, numbers:
            case "normal_", [mean, std]:
                self._found[key] = (float(mean), float(std))
            case "normal_", []:
                self._found[key] = (0.0, 1.0)
            case "zero_", _:
                self._found[key] = (0.0, 0.0)
            case "fill_", [value]:
                self._found[key] = (float(value), 0.0)
            case "uniform_", _:
                self._found[key] = None
                self._uniform.add(key)
            case "erfinv_", _ if is_uniform:  # a normal number is made of it, truncated or not
                self._found[key] = (0.0, _FAST_ERFINV)
            case "mul_", [factor] if self._found.get(key):
                self._found[key] = (mean * factor, std * abs(factor))
            case "add_", [shift] if self._found.get(key):
                self._found[key] = (mean + shift, std)
            case "clamp_" | "clamp_min_" | "clamp_max_", _ if self._found.get(key):
                pass
            case _:
                self._found[key] = None

    def initial(self, parameter: nn.Parameter) -> tuple[float, float] | None:
        """Mean and deviation of the initial values of a parameter; None: they are of another kind."""
        key, constant = _key(parameter), getattr(parameter, "constant", None)
        if key in self._found:
            return self._found[key]
        return None if constant is None else (constant, 0.0)


def _key(tensor: torch.Tensor) -> int:
    """What names the memory of a tensor."""
    found: int = tensor.untyped_storage()._cdata
    return found
