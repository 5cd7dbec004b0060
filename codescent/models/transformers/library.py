"""In: the text of a config.json, what the head predicts. Out: the model of `transformers`, without memory.
Does not observe or train it (observed.py, module.py). No other file imports transformers."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from codescent.base.errors import UserError
from codescent.base.extra import library

EXTRA = "transformers"
OLDEST = 5
"""The first version whose models begin on the meta device."""
_AUTO = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "mlm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
}
"""By head: the class that builds a model, and the table of the classes that it knows."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_ROUTED = re.compile(r"(Experts|MoE|Moe|Mo[Ee]Block|MoELayer|Router)$")
"""How transformers names the classes of layers with experts, or of what chooses among them."""
_SEES_AHEAD = ("cpmant",)
"""Models whose own attention sees later tokens, and no call of torch's attention shows it (`observed._Causal`). The
models with a causal head of transformers 5.23 that small sizes fit were tried with real numbers: no other one does."""
_NEAREST = 3
_LONGEST = 400
"""Characters of a foreign exception that a message repeats."""


@cache
def _transformers() -> Any:
    """The library. Raises UserError: it is not installed, or too old."""
    found = library(EXTRA, f'model.kind = "{EXTRA}"', EXTRA)
    if int(found.__version__.partition(".")[0]) < OLDEST:
        raise UserError(
            f'model.kind = "{EXTRA}" needs transformers {OLDEST} or newer, not {found.__version__}: pip install '
            f'"codescent[{EXTRA}]"'
        )
    found.logging.set_verbosity_error()  # its advice is on calls that are codescent's
    return found


def refusals(settings: Mapping[str, Any], head: str) -> Iterator[str]:
    """Why the model of a config.json cannot be trained here, each as a clause. `head`: "causal" or "mlm".

    Raises UserError: transformers is not installed.
    """
    tables = {each: getattr(_transformers().models.auto.modeling_auto, table) for each, (_, table) in _AUTO.items()}
    known, both = tables[head], set(tables["causal"]) & set(tables["mlm"])
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in known:
        yield _unknown(settings, name, head, known)
        return
    if settings.get("quantization_config"):
        yield "quantization_config: quantised weights cannot be trained; take the weights before they were quantised"
    config = config_of(json.dumps(settings))  # save_pretrained leaves out what is the default of a class
    values = config.to_dict()
    if config.is_encoder_decoder:
        yield "is_encoder_decoder: an encoder and a decoder need pairs of sequences; no task gives them to this kind"
    elif name in both and values.get("is_decoder", head == "causal") is not (head == "causal"):
        yield _wrong_mask(head)
    if head == "causal" and name in _SEES_AHEAD:
        yield f"model_type = {name!r}: each position sees the later tokens of its text, which it is to predict"
    nested = [one for one in (values, *values.values()) if isinstance(one, dict)]
    keys = [key for key in _EXPERTS if any(_several(one.get(key)) for one in nested)]
    if keys and _is_mixture(json.dumps(settings), head):
        yield (
            f"{', '.join(keys)}: a mixture of experts has a loss of its balance, which is no sum over samples: it "
            "would depend on the micro-batch and on the number of ranks; mixtral, qwen3_moe, olmoe and dots1 train "
            'with model.kind = "llama", whose loss of balance is one (codescent docs experts)'
        )


def _is_mixture(text: str, head: str) -> bool:
    """Whether a layer of the model has experts. The number does not say it: a dense Doge or DeepSeek has one, too.
    False of a model that cannot be built: whoever builds it next says why."""
    try:
        net = build(text, head)
    except UserError:
        return False
    return any(_ROUTED.search(type(module).__name__) for module in net.modules())


def _several(experts: object) -> bool:
    """Whether a number of experts, or one of those by layer, is more than one."""
    return any(isinstance(one, int) and one > 1 for one in (experts if isinstance(experts, list) else [experts]))


def _wrong_mask(head: str) -> str:
    """Of models that have both heads, and whose config says what a position sees."""
    if head == "causal":
        return (
            "is_decoder: not true, so each position sees the later tokens, which it is to predict; set data.task = "
            '"mlm", or "is_decoder": true in config.json'
        )
    return (
        "is_decoder: true, so no position sees the later tokens, which a masked token needs; set data.task = "
        '"lm", or "is_decoder": false in config.json'
    )


def _unknown(settings: Mapping[str, Any], name: object, head: str, known: Mapping[str, Any]) -> str:
    auto = _AUTO[head][0]
    if name in _transformers().CONFIG_MAPPING:
        return f"model_type = {name!r}: transformers has no {auto} of it"
    near = difflib.get_close_matches(str(name), known, n=_NEAREST)
    nearest = f"; the nearest: {', '.join(near)}" if near else ""
    if settings.get("auto_map"):
        nearest = "; auto_map names code of the folder, and codescent runs no code that comes with a model" + nearest
    return f"model_type = {name!r}: transformers {_transformers().__version__} has no {auto} of this name{nearest}"


def config_of(text: str) -> Any:
    """The configuration object. Raises UserError: transformers refuses a value."""
    settings = json.loads(text)
    try:
        found = _transformers().CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    except Exception as error:  # its checks raise exceptions of many classes
        raise UserError(f"transformers refuses it: {in_a_line(error)}") from error
    found.use_cache = False
    return found


def sizes_of(text: str) -> dict[str, int]:
    """Sizes of a model by its config.json, by our names. Raises UserError: a size is missing."""
    try:
        config = config_of(text).get_text_config()
    except ValueError as error:
        raise UserError(f"has not one text model: {in_a_line(error)}") from error
    needed = {"num_layers": "num_hidden_layers", "hidden_dim": "hidden_size", "vocab_size": "vocab_size"}
    found: dict[str, Any] = {ours: _value(config, theirs) for ours, theirs in needed.items()}
    if missing := [theirs for ours, theirs in needed.items() if not isinstance(found[ours], int)]:
        raise UserError(f"has no {', '.join(missing)}, which every language model of transformers has")
    heads = _value(config, "num_attention_heads")
    if not heads:  # a model without attention
        return {**found, "num_heads": 1, "num_kv_heads": 1, "head_dim": 0, "ffn_dim": 0}
    return {
        **found,
        "num_heads": heads,
        "num_kv_heads": _value(config, "num_key_value_heads") or heads,
        "head_dim": _value(config, "head_dim") or found["hidden_dim"] // heads,
        "ffn_dim": _value(config, "intermediate_size") or 0,
    }


def _value(config: Any, name: str) -> Any:
    """A value of a config; None: it has none. Raises UserError: its layers differ in it."""
    try:
        return getattr(config, name, None)
    except Exception as error:  # of a class of transformers, which older versions do not have
        raise UserError(f"{name}: its layers differ in it, and codescent knows one value for all") from error


def build(text: str, head: str) -> nn.Module:
    """The model, in evaluation mode: parameters on the meta device, in fp32; buffers on the CPU, with their values.

    In evaluation mode no model drops activations or layers. Raises UserError: transformers cannot build it.
    """
    auto, config = getattr(_transformers(), _AUTO[head][0]), config_of(text)
    try:
        with torch.device("cpu"), _parameters_on_meta():
            net: nn.Module = auto.from_config(config, dtype=torch.float32)
    except Exception as error:  # see config_of
        raise UserError(f"transformers cannot build it: {in_a_line(error)}") from error
    for module in net.modules():  # they are made from config.json, so no checkpoint has them
        module._non_persistent_buffers_set.update(module._buffers)
    return net.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters are on the meta device as soon as a module has them. Memory of a CPU is taken when it is written."""
    before = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            constant = _constant(parameter)
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            parameter.constant = constant  # type: ignore[attr-defined]
        before(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = before  # type: ignore[method-assign]


def _constant(parameter: nn.Parameter) -> float | None:
    """The number that all elements of a vector are; None: they differ, or it is a larger tensor, which is not read."""
    if parameter.dim() > 1 or not parameter.numel():
        return None
    values = parameter.detach().flatten()
    return float(values[0]) if bool((values == values[0]).all()) else None


def stored_names(net: nn.Module) -> dict[str, str]:
    """The name of each tensor of a model in a folder, by its name in the model: `save_pretrained` renames some.

    Raises UserError: a folder has tensors that it joins or divides.
    """
    alone = {name: torch.empty_like(one, device="meta") for name, one in net.named_parameters(remove_duplicate=False)}
    conversion = importlib.import_module(f"{EXTRA}.core_model_loading")
    names = {id(one): name for name, one in conversion.revert_weight_conversion(net, dict(alone)).items()}
    if other := [name for name, one in alone.items() if id(one) not in names]:
        raise UserError(
            f"{', '.join(other[:4])}{', …' * (len(other) > 4)}: a folder of transformers has these tensors joined or "
            "divided, which codescent does not read"
        )
    return {name: names[id(one)] for name, one in alone.items()}


def logits_of(net: nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    """[B, T, V]: what the model returns for tokens int64 [B, T] without padding."""
    found: torch.Tensor = net(input_ids=tokens_BT).logits
    return found


@contextmanager
def one_sequence() -> Iterator[None]:
    """A block in which transformers takes each sample for one sequence without padding, as it finds in a run.

    Positions that a model makes by itself run on, and its mask of tokens (BioGPT's) is all ones. Fake tensors have no
    values that say so. Without this block transformers would make a mask for attention.

    Raises UserError: the installed version has not the functions that decide it.
    """
    masks: Any = importlib.import_module(f"{EXTRA}.masking_utils")
    before = {name: getattr(masks, name, None) for name in _DECIDE_MASKS}
    if missing := [name for name, function in before.items() if function is None]:
        raise UserError(
            f"transformers {_transformers().__version__} has no {', '.join(missing)}: codescent cannot observe when it "
            "makes a mask"
        )
    try:
        for name, decide in _DECIDE_MASKS.items():
            setattr(masks, name, decide(before[name]))
        yield
    finally:
        for name, function in before.items():
            setattr(masks, name, function)


def _no_boundaries(_before: Any) -> Any:
    """In place of what looks for positions that begin again."""
    return lambda *_, **__: None


def _without_padding(before: Any) -> Any:
    """In place of what looks whether a mask of tokens has padding: `before` is called as for none."""
    return lambda padding_mask, *more, **options: before(None, *more, **options)


_DECIDE_MASKS = {
    "find_packed_sequence_indices": _no_boundaries,
    "_ignore_causal_mask_sdpa": _without_padding,
    "_ignore_bidirectional_mask_sdpa": _without_padding,
}
"""The functions of transformers that decide by values whether attention needs a mask, with what replaces them."""


def head_of(net: nn.Module) -> nn.Module | None:
    """The layer that makes the logits, as the model names it."""
    found: nn.Module | None = net.get_output_embeddings()  # type: ignore[operator]
    return found


def embedding_of(net: nn.Module) -> nn.Embedding:
    """The embedding of the tokens."""
    found: nn.Embedding = net.get_input_embeddings()  # type: ignore[operator]
    return found


def in_a_line(error: Exception) -> str:
    """What an exception of transformers or torch says. The reason may stand in any of its lines."""
    said = textwrap.shorten(str(error), _LONGEST, placeholder=" ...")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
