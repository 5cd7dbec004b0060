"""In: the keys of config.json on sliding windows. Out: our sizes `window` and `full_every`, and back.
Does not name a family of transformers: families.py says by which keys each of them says it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codescent.huggingface.kind import Settings, is_true
from codescent.models.llama.declare import LlamaShape

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Windows:
    """By which keys a family says which layers have a sliding window.

    Attributes:
        keys: those that it reads, beside `sliding_window`.
        full: config.json, layers -> of each layer, whether it has no window, where `layer_types` does not say it.
        write: shape -> the keys that say the same.
        default: of `sliding_window`, where config.json does not say it.
        used: a key without which there is no window; "": there is no such key.
        some: whether a part of the layers may have no window.
    """

    keys: Collection[str]
    full: Callable[[Settings, int], Sequence[bool]]
    write: Callable[[LlamaShape], dict[str, Any]]
    default: int | None = 4096
    used: str = ""
    some: bool = True

    def read(self, settings: Settings) -> tuple[dict[str, Any], list[str]]:
        """Our sizes, and error messages."""
        width, layers = settings.get("sliding_window", self.default), settings.get("num_hidden_layers") or 0
        full, types = list(self.full(settings, layers)), settings.get("layer_types")
        if "layer_types" in self.keys and types is not None:
            if unknown := sorted({*types} - {SLIDING, FULL}):
                return {}, [f"layer_types: {', '.join(unknown)}: codescent has no such attention"]
            if len(types) != layers:
                return {}, [f"layer_types: of {len(types)} layers, but num_hidden_layers = {layers}"]
            full = [one == FULL for one in types]
        used = not self.used or is_true(settings, self.used)
        if all(full) or width is None or not used:
            return {}, []
        if type(width) is not int or width < 1:
            return {}, [f"sliding_window = {json.dumps(width)}: not a size"]
        every = full.index(True) + 1 if any(full) else 0
        if full != [bool(every) and layer % every == 0 for layer in range(1, layers + 1)]:
            windowed = ", ".join(str(layer) for layer, whole in enumerate(full) if not whole)
            return {}, [
                f"of {layers} layers these have a sliding window: {windowed} (from 0 on); codescent has windows on all "
                "layers, on none, or on all but every n-th one"
            ]
        return {"window": width} | ({"full_every": every} if every else {}), []


def types_of(shape: LlamaShape) -> list[str]:
    """The key `layer_types`."""
    return [SLIDING if window else FULL for window in shape.windows]


def _from_layer(settings: Settings, layers: int) -> Sequence[bool]:
    return [layer < settings.get("max_window_layers", 28) for layer in range(layers)]


def _write_chosen(shape: LlamaShape) -> dict[str, Any]:
    types = {"layer_types": types_of(shape)} if shape.full_every else {}
    layers = 0 if shape.window else shape.num_layers
    return {"use_sliding_window": shape.window > 0, "max_window_layers": layers, **types}


def alternating(every: int, *keys: str) -> Windows:
    """Without `layer_types` every so-many-th layer has no window; a key of `keys` may say another number."""

    def full(settings: Settings, layers: int) -> Sequence[bool]:
        period = next((settings[key] for key in keys if settings.get(key)), every)
        return [layer % period == 0 for layer in range(1, layers + 1)]

    def write(shape: LlamaShape) -> dict[str, Any]:
        # These classes of transformers make a mask with a window for no layer, too: it needs a width.
        width: Mapping[str, Any] = {} if shape.window else {"sliding_window": shape.seq_len}
        return {"layer_types": types_of(shape), **width}

    return Windows(("layer_types", *keys), full, write)


NEVER = Windows((), lambda _, layers: [True] * layers, lambda _: {}, default=None, some=False)
ALWAYS = Windows((), lambda _, layers: [False] * layers, lambda _: {}, some=False)
"""All layers, unless `sliding_window` is null."""
BY_TYPE = Windows(
    ("max_window_layers", "layer_types"),
    lambda settings, layers: [layer < settings.get("max_window_layers", 62) for layer in range(layers)],
    lambda shape: {"max_window_layers": shape.num_layers, "layer_types": types_of(shape)},
)
"""By the types of layers alone (dots.llm1)."""
ALL_CHOSEN = Windows(
    ("use_sliding_window",),
    lambda _, layers: [False] * layers,
    lambda shape: {"use_sliding_window": shape.window > 0},
    used="use_sliding_window",
    some=False,
)
"""All layers, if `use_sliding_window` says so (Qwen 3 with experts)."""
CHOSEN = Windows(
    ("use_sliding_window", "max_window_layers", "layer_types"), _from_layer, _write_chosen, used="use_sliding_window"
)
"""By `use_sliding_window` and the types of layers (Qwen)."""
