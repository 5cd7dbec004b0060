"""In: tokens of a source, then of a target, or vectors; what is wanted of the target. Out: the summed loss, or logits.
Does not hold optimizer, device placement or parallelism: strategies wrap it from outside."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from codescent.models.decoder import wanting_gradient
from codescent.models.transformer.blocks import DROPOUT_SITES, DecoderBlock, EncoderBlock
from codescent.models.transformer.declare import TransformerShape
from codescent.operators.dropout import drop, sample_keys, site_keys
from codescent.operators.head import ScaledGradient, Vocabulary
from codescent.operators.linear import Later, Linear

# Shapes: B samples, S positions of the source, T of the target, X = S + T, D hidden_dim, V vocab_size, L layers.


class Transformer(nn.Module):
    """The encoder-decoder of Vaswani et al. 2017, "Attention Is All You Need", as torch.nn.Transformer has it, with
    embeddings and a head; or a part of it.

    One residual stream [B, X, D] goes through all depths: the source's rows, then the target's. The encoder changes
    the first and hands on the others; the decoder reads the first and changes the others. So what a part hands to the
    next is one tensor, wherever the model is cut; inside a part the two are kept apart.

    Args:
        shape: sizes of the whole.
        head_chunk_tokens: rows of logits that exist at a time while training; 0: all at once.
        device: where the parameters lie.
        depths: the part: 0 the embeddings, 1 to num_layers the layers of the encoder and then of the decoder,
            num_layers + 1 the norm and the head; None: all.

    Attributes:
        blocks: the layers by their number in the whole, one nn.Module each, to compile or to shard one by one.
        vocabulary: what reads embeddings and head.
        tokens_T: the order in which the embedding of a tied matrix reads the X tokens, None: theirs. Where rows are
            divided between ranks, those of a rank lie side by side in it.
        rows_T: the positions, of X, whose rows are in its residual stream, the source's in front; None: all.
        later: what the backward passes of its linear layers have put off; None: nothing is.
    """

    def __init__(
        self,
        shape: TransformerShape,
        head_chunk_tokens: int = 1024,
        device: str = "meta",
        depths: range | None = None,
    ) -> None:
        super().__init__()
        depths = range(shape.num_layers + 2) if depths is None else depths
        self.shape, self.head_chunk_tokens = shape, head_chunk_tokens
        self.embeds, self.ends = 0 in depths, shape.num_layers + 1 in depths
        self.vocabulary = Vocabulary()
        self.tokens_T: Tensor | None = None
        self.rows_T: Tensor | None = None
        self.later: Later | None = None
        # Built on meta and then moved: torch's modules would draw values here that are thrown away.
        if shape.embedding == "tied" and (self.embeds or self.ends):
            self.tok = nn.Embedding(shape.vocab_size, shape.hidden_dim, device="meta")
        if shape.embedding == "untied" and self.embeds:
            self.source_tok = nn.Embedding(shape.vocab_size, shape.hidden_dim, device="meta")
            self.target_tok = nn.Embedding(shape.vocab_size, shape.hidden_dim, device="meta")
        layers = [depth - 1 for depth in depths if 1 <= depth <= shape.num_layers]
        self.blocks = nn.ModuleDict({str(layer): _block(shape, layer) for layer in layers})
        if self.ends:
            self.norm = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device="meta")
        if shape.embedding == "untied" and self.ends:
            self.head = Linear(shape.hidden_dim, shape.vocab_size, False, "meta")
        self._dropout_keys_B: Tensor | None = None
        if device != "meta":
            self.to_empty(device=device)

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: Tensor) -> None:
        """Says which samples the next forward pass reads; needed while training with dropout > 0.

        Args:
            seed: the run's seed.
            step: number of the step.
            sample_ids_B: number of each sample of the micro-batch in the global batch of this step, on its device.
        """
        if self.shape.dropout > 0.0:
            self._dropout_keys_B = sample_keys(seed, step, sample_ids_B)

    def forward(
        self,
        inputs: Tensor,
        targets_BX: Tensor | None = None,
        *,
        loss_scale: float = 1.0,
        source_lengths_B: Tensor | None = None,
        target_lengths_B: Tensor | None = None,
    ) -> Tensor:
        """The sum of the losses of the target's positions where targets are given, else logits; of a part without the
        head, activations.

        Args:
            inputs: tokens int64 [B, X], the source's and then the target's; of a part without the embeddings, the
                activations [B, X, D] of the part before; of a model that has none, vectors [B, X, D].
            targets_BX: int64, what follows each token, as a loader gives them: those of the source are not read; where
                there are `target_lengths_B`, negative where nothing is wanted. Of a model without embeddings, vectors
                [B, X, D].
            loss_scale: factor on the gradients (not on the value): 1 / (target positions of the global batch).
            source_lengths_B, target_lengths_B: int64, at least 1: positions behind so many are padding, which nobody
                sees; None: there is none.

        Returns:
            A scalar (fp32; fp64 in fp64): the sum of the cross-entropies, or without embeddings of the squared errors,
            each position's averaged over channels. Or logits [B, T, V] or vectors [B, T, D]; activations [B, X, D].
        """
        x_BXD, port_VD = inputs, None
        keys_SB = self._site_keys(len(inputs))
        if self.embeds and self.shape.embedding != "none":
            x_BXD, port_VD = self._embed(inputs, hands_in=targets_BX is not None)
            if keys_SB is not None:
                x_BXD = drop(x_BXD, keys_SB[0], self.shape.dropout, self._rows(x_BXD))
        source_rows, _ = self._rows_of_streams(x_BXD)
        source_BSD, target_BTD = x_BXD[:, : len(source_rows)], x_BXD[:, len(source_rows) :]
        padding_BS = _padding(source_lengths_B, self.shape.source_len)
        # What is behind a target is hidden by causality from all that anything is wanted of.
        padding_BT = None if self.shape.causal else _padding(target_lengths_B, self.shape.target_len)
        source_BSD, target_BTD = self._layers(source_BSD, target_BTD, padding_BS, padding_BT, keys_SB)
        if not self.ends:
            return torch.cat((source_BSD, target_BTD), dim=1)
        some = target_lengths_B is not None
        return self._end(self.norm(target_BTD), targets_BX, loss_scale, port_VD, some=some)

    def forward_tensors(
        self,
        source_BSD: Tensor,
        target_BTD: Tensor,
        *,
        source_padding_BS: Tensor | None = None,
        target_padding_BT: Tensor | None = None,
    ) -> Tensor:
        """What torch.nn.Transformer computes: the decoder's output [B, T, D], without embeddings, positions and head.

        Args:
            source_BSD, target_BTD: vectors, of any lengths.
            source_padding_BS, target_padding_BT: bool, True at positions that nobody sees.
        """
        if not (self.embeds and self.ends):
            raise RuntimeError("forward_tensors is of a whole model, not of a part")
        keys_SB = self._site_keys(len(source_BSD))
        _, target_BTD = self._layers(source_BSD, target_BTD, source_padding_BS, target_padding_BT, keys_SB)
        y_BTD: Tensor = self.norm(target_BTD)
        return y_BTD

    def _layers(
        self,
        source_BSD: Tensor,
        target_BTD: Tensor,
        source_padding_BS: Tensor | None,
        target_padding_BT: Tensor | None,
        keys_SB: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Both streams after the layers of this part."""
        rows_S, rows_T = None, None
        if self.rows_T is not None:
            rows_S, rows_T = self._rows_of_streams(source_BSD)
        for name, block in self.blocks.items():
            first = 1 + int(name) * DROPOUT_SITES
            keys_6B = None if keys_SB is None else keys_SB[first : first + DROPOUT_SITES]
            if int(name) < self.shape.num_encoder_layers:
                source_BSD = block(source_BSD, source_padding_BS, keys_6B, rows_S)
            else:
                target_BTD = block(target_BTD, source_BSD, target_padding_BT, source_padding_BS, keys_6B, rows_T)
        return source_BSD, target_BTD

    def _embed(self, tokens_BX: Tensor, *, hands_in: bool) -> tuple[Tensor, Tensor | None]:
        """Embedded tokens with their positions, and on a CPU the port through which the head hands in its gradient of
        `tok.weight`."""
        port_VD = None
        if self.shape.embedding == "tied":
            port_dtype, weight_VD, target_tokens = None, self.tok.weight, tokens_BX[:, self.shape.source_len :].numel()
            if hands_in and self.ends and tokens_BX.device.type == "cpu" and not torch.compiler.is_compiling():
                # Several chunks of the head are added in fp32: the embedding's rows too then, and the sum rounded once.
                in_chunks = 0 < self.head_chunk_tokens < target_tokens
                port_dtype = torch.promote_types(weight_VD.dtype, torch.float32) if in_chunks else weight_VD.dtype
            if self.tokens_T is not None:
                tokens_BX = tokens_BX[:, self.tokens_T.to(tokens_BX.device)]
            x_BXD, port_VD = self.vocabulary.embed(weight_VD, tokens_BX, port_dtype)
        else:
            source_BS, target_BT = tokens_BX[:, : self.shape.source_len], tokens_BX[:, self.shape.source_len :]
            source_BSD, _ = self.vocabulary.embed(self.source_tok.weight, source_BS, None)
            target_BTD, _ = self.vocabulary.embed(self.target_tok.weight, target_BT, None)
            x_BXD = torch.cat((source_BSD, target_BTD), dim=1)
        positions_XD = torch.cat([self._positions(rows, x_BXD) for rows in self._rows_of_streams(x_BXD)])
        return wanting_gradient(x_BXD) * math.sqrt(self.shape.hidden_dim) + positions_XD, port_VD

    def _positions(self, rows: Tensor, like: Tensor) -> Tensor:
        longest = max(self.shape.streams)
        return sinusoids(longest, self.shape.hidden_dim, like.dtype, like.device)[rows]

    def _end(
        self, x_BTD: Tensor, targets_BX: Tensor | None, loss_scale: float, port_VD: Tensor | None, *, some: bool
    ) -> Tensor:
        """The sum of the losses, or logits, or vectors."""
        if self.shape.embedding == "none":
            if targets_BX is None:
                return x_BTD
            return squared_error(x_BTD, targets_BX[:, self.shape.source_len :], loss_scale)
        weight_VD = self.tok.weight if self.shape.embedding == "tied" else self.head.weight
        if targets_BX is None:
            logits: Tensor = x_BTD @ weight_VD.t()
            return logits
        targets_BT = targets_BX[:, self.shape.source_len :]
        chunk = self.head_chunk_tokens
        return self.vocabulary.loss(x_BTD, weight_VD, targets_BT, chunk, loss_scale, port_VD, some=some)

    def _rows(self, like: Tensor) -> Tensor:
        """The positions, of X, whose rows are in the residual stream."""
        if self.rows_T is None:
            return torch.arange(like.shape[1], device=like.device)
        return self.rows_T.to(like.device)

    def _rows_of_streams(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The same for each stream, counted from its own beginning."""
        rows_X, source_len = self._rows(like), self.shape.source_len
        source = source_len if self.rows_T is None else int((self.rows_T < source_len).sum())
        return rows_X[:source], rows_X[source:] - source_len

    def _site_keys(self, batch: int) -> Tensor | None:
        if not (self.training and self.shape.dropout > 0.0):
            return None
        keys_B = self._dropout_keys_B
        if keys_B is None or len(keys_B) != batch:
            raise RuntimeError("training with dropout: call set_dropout_context with this micro-batch's sample numbers")
        return site_keys(keys_B, 1 + DROPOUT_SITES * self.shape.num_layers)


def _padding(lengths_B: Tensor | None, length: int) -> Tensor | None:
    """bool [B, length], True behind each sample's length."""
    return None if lengths_B is None else torch.arange(length, device=lengths_B.device) >= lengths_B[:, None]


def _block(shape: TransformerShape, layer: int) -> nn.Module:
    if layer < shape.num_encoder_layers:
        return EncoderBlock(shape, "meta", last=layer == shape.num_encoder_layers - 1)
    return DecoderBlock(shape, "meta")


@lru_cache(maxsize=8)
def sinusoids(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[length, width]: at position p, channels 2i and 2i + 1 are sine and cosine of p / 10000^(2i / width) (Vaswani et
    al. 2017, section 3.5). Made in fp64 on a CPU: the same values on every device."""
    rates_D = 10000.0 ** (-(torch.arange(width) // 2 * 2).double() / width)
    angles_TD = torch.arange(length)[:, None].double() * rates_D
    angles_TD[:, 0::2] = angles_TD[:, 0::2].sin()
    angles_TD[:, 1::2] = angles_TD[:, 1::2].cos()
    return angles_TD.to(device, dtype)


def squared_error(y_BTD: Tensor, targets_BTD: Tensor, loss_scale: float) -> Tensor:
    """SUM over positions of the mean squared error of their channels; gradients are multiplied by `loss_scale`, the
    value is not. Divided by the number of positions it is torch.nn.MSELoss."""
    wide = torch.promote_types(y_BTD.dtype, torch.float32)
    loss = (y_BTD.to(wide) - targets_BTD.to(wide)).square().sum() / y_BTD.shape[-1]
    scaled: Tensor = ScaledGradient.apply(loss, loss_scale)  # type: ignore[no-untyped-call]
    return scaled
