"""In: keys and values of new tokens. Out: attention of these tokens to their texts so far (key/value cache, in pages).
Does not decide which pages a text gets (`codescent.inference` does) or choose the next tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.operators.attention import attend_to_seen
from codescent.operators.block_attention import ScoreTraits

# Shapes: N new tokens of all rows of a pass, one row behind the other; T new tokens of a row, S slots that they see; L
# layers, M slots in memory, G key-value heads, R query heads of a group, H = G * R, E = R + 2, K head_dim, D hidden
# size; B rows, P pages of a row; 2: key and value of a head (1, if an entry is both: see `CachedToken`).
_MULTIPLE = 128
"""See `few_lengths`."""


def few_lengths(length: int, most: int, device: torch.device) -> int:
    """The length that attention shall read instead of `length`: on a CPU the same, else the next multiple of 128.

    It is at most `most`. On a GPU, cuDNN's attention plans for each shape anew, which takes 0.1 to 0.5 s. A text that
    grows by one token at a time would bring a new shape with each token.
    """
    return length if device.type == "cpu" else min(most, -(-length // _MULTIPLE) * _MULTIPLE)


def reads_in_place(device: torch.device) -> bool:
    """Whether attention reads keys where they are, if they follow each other. Elsewhere they are copied."""
    return device.type == "cpu"


class CachedToken(NamedTuple):
    """What a layer keeps of a token.

    Attributes:
        groups: key-value heads.
        channels: of a key.
        latent: a key is its own value: so many last channels of it (multi-head latent attention); 0: both are apart.
    """

    groups: int
    channels: int
    latent: int = 0

    @property
    def numbers(self) -> int:
        """Of a layer."""
        return self.groups * self.channels * (1 if self.latent else 2)


class LayerCache(Protocol):
    """What attention of one layer reads and writes in a forward pass with a cache."""

    def attend(self, qkv_1NGEK: Tensor, scores: ScoreTraits) -> Tensor:
        """Keep the new keys and values, and attend to all of each text: [1, N, H * K]. With latents E = R + 1, and the
        result has the channels of a value."""


class Cache(Protocol):
    """What a decoder reads and writes in a forward pass with a cache.

    Attributes:
        positions_1N: position of each new token in its text.
        layers: of each layer of the model.
    """

    positions_1N: Tensor
    layers: Sequence[LayerCache]

    def wanted(self, x_1ND: Tensor) -> Tensor:
        """The rows whose logits are wanted: [B, D]."""


class KeysValues:
    """Memory for keys and values of all layers. A slot holds those of one token.

    A page is `page_size` slots that follow each other. The last page is for tokens that nobody reads (`PagesPass`).

    Attributes:
        token: what a layer keeps of a token.
        of_layers_LMG2K: keys, then values.
        layers: the same, layer by layer.
        kinds: tensors of a head: a key and a value, or an entry that is both.
    """

    def __init__(
        self,
        num_layers: int,
        pages: int,
        page_size: int,
        token: CachedToken,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.token, self.kinds = token, 1 if token.latent else 2
        self.page_size, self.spare = page_size, pages
        slots, head = (pages + 1) * page_size, (token.groups, self.kinds, token.channels)
        # On a CPU, zeros take memory only as they are written.
        self.of_layers_LMG2K = torch.zeros(num_layers, slots, *head, device=device, dtype=dtype)
        self.layers = self.of_layers_LMG2K.unbind(0)

    def parts(self, kv_2K: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of [.., 2, K]."""
        values_K = kv_2K.select(-2, -1)
        return kv_2K.select(-2, 0), values_K[..., -self.token.latent :] if self.token.latent else values_K


class TextPages:
    """The pages of a text, in its order.

    Attributes:
        numbers: of the pages.
        runs: slots [first, end) of pages that follow each other in memory.
    """

    def __init__(self, page_size: int, numbers: Iterable[int] = ()) -> None:
        self._size = page_size
        self.numbers: list[int] = []
        self.runs: list[tuple[int, int]] = []
        for number in numbers:
            self.append(number)

    def append(self, number: int) -> None:
        """Add the next page."""
        self.numbers.append(number)
        first, end = number * self._size, (number + 1) * self._size
        if self.runs and self.runs[-1][1] == first:
            self.runs[-1] = (self.runs[-1][0], end)
        else:
            self.runs.append((first, end))

    def slots(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Slots [first, last) of the tokens at positions [begin, end), in their order."""
        found, at = [], 0
        for first, last in self.runs:
            here, there = max(begin - at, 0), min(last - first, end - at)
            if here < there:
                found.append((first + here, first + there))
            at += last - first
        return found


class RowPart(NamedTuple):
    """What a pass reads of one text: its tokens so far are `length`, of which the last `new` ones are new."""

    new: int
    length: int
    pages: TextPages


class RowsPass:
    """A pass in which each row attends by itself. Keys are read where they are, if a row's pages follow each other.

    Rows may have any number of new tokens. The logits of the last one are wanted, of those rows that say so.
    """

    def __init__(self, memory: KeysValues, parts: Sequence[RowPart], wanted: Sequence[bool]) -> None:
        device = memory.layers[0].device
        positions, slots, last, first = list[int](), list[int](), list[int](), 0
        for part, is_wanted in zip(parts, wanted, strict=True):
            begin = part.length - part.new
            positions += range(begin, part.length)
            for start, end in part.pages.slots(begin, part.length):
                slots += range(start, end)
            first += part.new
            last += [first - 1] * is_wanted
        self.memory, self.parts = memory, parts
        self.news = [part.new for part in parts]
        self.has_single_tokens = reads_in_place(device) and max(self.news) == 1
        self.positions_1N = torch.tensor([positions], device=device)
        self.slots_N = torch.tensor(slots, device=device)
        self._last_B = None if len(last) == first else torch.tensor(last, dtype=torch.int64, device=device)
        self._seen: dict[int, list[_RowKeys]] = {}
        self.layers = [_LayerOfRows(self, layer) for layer in range(len(memory.layers))]

    def wanted(self, x_1ND: Tensor) -> Tensor:
        """See `Cache`."""
        return x_1ND[0] if self._last_B is None else x_1ND[0].index_select(0, self._last_B)

    def seen(self, window: int) -> list[_RowKeys]:
        """What each row reads in layers with this window; computed at its first use in a pass."""
        if window not in self._seen:
            self._seen[window] = [_RowKeys(self.memory, part, window) for part in self.parts]
        return self._seen[window]


class _RowKeys:
    """The keys and values that the new tokens of a row see, in all layers with one window."""

    def __init__(self, memory: KeysValues, part: RowPart, window: int) -> None:
        before, device = part.length - part.new, memory.layers[0].device
        begin = max(0, before + 1 - window) if window else 0
        self._memory, self._part, self._window, self._begin = memory, part, window, begin
        self._slots = part.pages.slots(begin, part.length)
        self._mask_TS: Tensor | None = None
        self._views: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        self._index_S: Tensor | None = None
        in_place, length = reads_in_place(device), part.length - begin
        self.shares_entries = memory.token.latent > 0
        self._read = few_lengths(length, len(memory.layers[0]), device)
        self.is_causal = in_place and before == 0 and not (window and window < part.length)
        if not in_place:
            slots = [slot for first, end in self._slots for slot in range(first, end)]
            spare = [memory.spare * memory.page_size] * (self._read - length)  # a mask hides it
            self._index_S = torch.tensor(slots + spare, device=device)
        elif len(self._slots) == 1:
            # All layers at once: a view of each would cost more than its attention.
            first, end = self._slots[0]
            keys, values = memory.parts(memory.of_layers_LMG2K[:, None, first:end].transpose(2, 3))
            self._views = keys.unbind(0), values.unbind(0)

    @property
    def mask_TS(self) -> Tensor:
        """bool: which of these keys each new token sees; computed at its first use in a pass."""
        if self._mask_TS is None:
            part, device = self._part, self._memory.layers[0].device
            own_T1 = torch.arange(part.length - part.new, part.length, device=device)[:, None]
            seen_S = torch.arange(self._begin, self._begin + self._read, device=device)
            self._mask_TS = seen_S <= own_T1
            if self._window:
                self._mask_TS &= seen_S > own_T1 - self._window
        return self._mask_TS

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer: [1, G, S, K] each."""
        if self._views is not None:
            return self._views[0][layer], self._views[1][layer]
        kv_MG2K = self._memory.layers[layer]
        if self._index_S is not None:
            kv_SG2K = kv_MG2K.index_select(0, self._index_S)
        else:
            kv_SG2K = torch.cat([kv_MG2K[first:end] for first, end in self._slots])
        return self._memory.parts(kv_SG2K[None].transpose(1, 2))


class _LayerOfRows:
    """See `LayerCache`."""

    def __init__(self, rows: RowsPass, layer: int) -> None:
        self._rows, self._layer = rows, layer

    def attend(self, qkv_1NGEK: Tensor, scores: ScoreTraits) -> Tensor:
        """See `LayerCache`."""
        rows, layer = self._rows, self._layer
        qkv_NGEK = qkv_1NGEK[0]
        queries = qkv_NGEK.shape[2] - rows.memory.kinds
        rows.memory.layers[layer].index_copy_(0, rows.slots_N, qkv_NGEK[:, :, queries:])
        q_NGRK, keys = qkv_NGEK[:, :, :queries], rows.seen(scores.window)
        if rows.has_single_tokens and not scores.cap:
            # One token sees all keys alike: the queries of a group are rows that need no mask.
            scale, attend = scores.scale(q_NGRK.shape[3]), F.scaled_dot_product_attention
            of_rows = q_NGRK.unsqueeze(1).unbind(0)
            found = [attend(q_1GRK, *one.of(layer), scale=scale) for q_1GRK, one in zip(of_rows, keys, strict=True)]
        else:
            of_rows = torch.split(q_NGRK, rows.news)
            found = [_attended(q_TGRK, one, layer, scores) for q_TGRK, one in zip(of_rows, keys, strict=True)]
        return (found[0] if len(found) == 1 else torch.cat(found)).reshape(1, len(qkv_NGEK), -1)


def _attended(q_TGRK: Tensor, keys: _RowKeys, layer: int, scores: ScoreTraits) -> Tensor:
    """Attention of the new tokens of a row: [T, H * K]."""
    k_1GSK, v_1GSK = keys.of(layer)
    if keys.shares_entries:  # heads are rows of one product: torch would copy the entries for each of them
        rows_11NK, mask_NS = q_TGRK.flatten(0, 2)[None, None], keys.mask_TS.repeat_interleave(q_TGRK.shape[2], 0)
        y_11NK = attend_to_seen(rows_11NK, k_1GSK, v_1GSK, mask_NS, scores)
        return y_11NK.view(len(q_TGRK), -1)
    q_1HTK = q_TGRK.flatten(1, 2).transpose(0, 1)[None]
    if keys.is_causal and not scores.cap:
        scale, grouped = scores.scale(q_1HTK.shape[3]), q_TGRK.shape[2] > 1
        y_1HTK = F.scaled_dot_product_attention(q_1HTK, k_1GSK, v_1GSK, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        y_1HTK = attend_to_seen(q_1HTK, k_1GSK, v_1GSK, keys.mask_TS, scores)
    return y_1HTK[0].transpose(0, 1).flatten(1)


class PagesPass:
    """A pass with one new token of each row. Its operators have the same shapes for any texts: a CUDA graph repeats it.

    All of a row's pages are gathered by the table of pages, and a mask hides what is not its text. A row that is only
    there to fill the shape has position 0 and the spare page. The tensors are read when the pass runs, so a graph reads
    what they hold then.

    Args:
        memory: of keys and values.
        positions_1B: position of each new token.
        pages_BP: pages of each row; those behind its last one may be any.
    """

    def __init__(self, memory: KeysValues, positions_1B: Tensor, pages_BP: Tensor) -> None:
        self.memory, self.positions_1N, self.pages_BP = memory, positions_1B, pages_BP
        size = memory.page_size
        positions_B = positions_1B[0]
        pages_B = pages_BP.gather(1, (positions_B // size)[:, None])[:, 0]
        self.slots_B = pages_B * size + positions_B % size
        slots_S = torch.arange(pages_BP.shape[1] * size, device=pages_BP.device)
        self._later_BS = slots_S - positions_B[:, None]
        self._seen: dict[int, Tensor] = {}
        self.layers = [_LayerOfPages(self, layer_MG2K) for layer_MG2K in memory.layers]

    def wanted(self, x_1ND: Tensor) -> Tensor:
        """See `Cache`: of all rows."""
        return x_1ND[0]

    def seen(self, window: int) -> Tensor:
        """bool [B, 1, 1, S]: the slots of each row that its new token sees."""
        if window not in self._seen:
            seen_BS = self._later_BS <= 0
            if window:
                seen_BS = seen_BS & (self._later_BS > -window)
            self._seen[window] = seen_BS[:, None, None]
        return self._seen[window]


class _LayerOfPages:
    """See `LayerCache`."""

    def __init__(self, pages: PagesPass, layer_MG2K: Tensor) -> None:
        self._pages, self._layer_MG2K = pages, layer_MG2K

    def attend(self, qkv_1NGEK: Tensor, scores: ScoreTraits) -> Tensor:
        """See `LayerCache`."""
        pages = self._pages
        qkv_BGEK = qkv_1NGEK[0]
        queries = qkv_BGEK.shape[2] - pages.memory.kinds
        self._layer_MG2K.index_copy_(0, pages.slots_B, qkv_BGEK[:, :, queries:])
        head = self._layer_MG2K.shape[1:]
        by_page = self._layer_MG2K.view(-1, pages.memory.page_size, *head)
        kv_BSG2K = by_page.index_select(0, pages.pages_BP.flatten()).view(len(qkv_BGEK), -1, *head)
        keys_BGSK, values_BGSK = pages.memory.parts(kv_BSG2K.transpose(1, 2))
        y_BGRK = attend_to_seen(qkv_BGEK[:, :, :queries], keys_BGSK, values_BGSK, pages.seen(scores.window), scores)
        return y_BGRK.flatten(1)[None]
