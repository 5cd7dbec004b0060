"""In: the text of a config.json. Out: the kind of model "transformers": sizes, and what is observed of its model.
Does not import torch: what observes a model does, when the first plan of such a model is made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.models.mup import KEYS as MUP
from codescent.models.shape import Kind, Shape
from codescent.operators.saved_tensors import ForwardPass
from codescent.plan.activations import SavedTensor
from codescent.plan.model import Lora, Size
from codescent.plan.shard import Parameter

NAME = "transformers"
HEADS = ("causal", "mlm")
"""Heads: "causal" predicts each next token, "mlm" masked tokens. The first head is the default."""
GIVEN = ("config", "head", "seq_len")
"""The sizes that a user may give. All others are in config.json."""
UNREAD = ("transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "architectures", "use_cache")
"""Keys of config.json that change nothing of the model."""
_NO_ROLES = "codescent does not know what the parameters of this kind do, so mu-P has no rates for them"
_ONE_MODEL = "codescent does not know the layers of this kind, so it cannot divide them"


@dataclass(frozen=True)
class TransformersShape(Shape):
    """Sizes of a model of `transformers`.

    Attributes:
        config: the text of its config.json, without UNREAD.
        head: one of HEADS.
        num_heads, num_kv_heads, head_dim, ffn_dim: as config.json says; 1 or 0 for a model without attention.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    config: str
    head_dim: int = 0
    head: str = HEADS[0]
    bias: bool = True
    dropout: float = 0.0
    own_layers: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(("pp", "tp", "cp"), _ONE_MODEL)
    refuses_values: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "recompute": (
            ("selective", "products"),
            "chooses tensors inside of codescent's own layers, which this kind does not have; "
            '"full" computes whole blocks again',
        ),
        "data_parallel": (
            tuple(range(2, 1025)),  # all that there are but 1
            "torch.nn.DataParallel copies modules, and this kind holds tied parameters outside of them; "
            "parallel.dp_replicate gives each device its own rank",
        ),
    }

    @property
    def causal_layers(self) -> int:
        """All layers of a head that predicts the next token."""
        return self.num_layers if self.head == HEADS[0] else 0

    @property
    def needs_weights(self) -> str:  # type: ignore[override]
        """See `Shape`: initial values of codescent are normal numbers, or one number."""
        unlike = observed(self).unlike
        if not unlike:
            return ""
        shown = ", ".join(unlike[:3]) + ", …" * (len(unlike) > 3)
        return (
            f'model.kind = "{NAME}": transformers gives {len(unlike)} parameters initial values that are neither '
            f"normal nor one number ({shown}), which codescent does not make; give model.weights"
        )


def settings_text(settings: Mapping[str, Any]) -> str:
    """The value of model.config for the content of a config.json: one line, without keys that change nothing."""
    return json.dumps({key: value for key, value in settings.items() if key not in UNREAD}, sort_keys=True)


def values_of(text: str) -> dict[str, Any]:
    """Every key of a config, with its default where the text lacks it. Raises UserError: transformers refuses it."""
    from codescent.models.transformers import library  # noqa: PLC0415 - keeps torch out of planning

    found: dict[str, Any] = library.config_of(text).to_dict()
    return found


@dataclass(frozen=True)
class ConfigKind(Kind):
    """A kind whose sizes are those of a config.json."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """See `Kind`."""
        return GIVEN

    def resolve(
        self,
        sizes: Mapping[str, Size | None],
        preset: str | None,
        bias: bool | None,
        dropout: float,
        where: str,
        tp: int = 1,
    ) -> TransformersShape:
        """See `Kind`. The sizes are read from the config. Raises UserError: every reason why it cannot be trained."""
        problems = [
            f"{where}.{name}: {_NO_ROLES if name in MUP else 'config.json decides it'}; leave it out"
            for name, size in sizes.items()
            if size is not None and name not in GIVEN
        ]
        if bias is not None:
            problems.append(f"{where}.bias: config.json decides it; leave it out")
        if dropout:
            problems.append(
                f"{where}.dropout = {dropout}: the layers of transformers draw by torch's generator, so masks would "
                "depend on the layout; leave it out: this kind is trained without dropout"
            )
        config = sizes.get("config")
        if not isinstance(config, str):
            problems.append(
                f"{where}.config: not given; give the path of a config.json or a name of a hub, or {where}.weights, "
                "which has one"
            )
            raise UserError(*problems)
        head, seq_len = str(sizes.get("head") or HEADS[0]), sizes.get("seq_len")
        try:
            found, most = _read(config, head)
        except UserError as error:
            raise UserError(*problems, *(f"{where}.config: {problem}" for problem in error.problems)) from error
        if seq_len is None and most is None:
            problems.append(f"{where}.seq_len: config.json sets no limit; give the tokens of the longest sample")
        if isinstance(seq_len, int) and most is not None and seq_len > most:
            problems.append(f"{where}.seq_len = {seq_len}: the model reads at most {most} tokens by its config.json")
        if problems:
            raise UserError(*problems)
        longest = seq_len if isinstance(seq_len, int) else most or 0
        return TransformersShape(**found, seq_len=longest, config=config, head=head)

    def kept(self, shape: Any, forward: ForwardPass, lora: Lora | None) -> Iterator[SavedTensor]:
        """See `Kind`. It is observed with the adapters."""
        from codescent.models.transformers.kept import kept  # noqa: PLC0415 - keeps torch out of planning

        return kept(shape, forward, lora)


def _read(config: str, head: str) -> tuple[dict[str, Any], int | None]:
    """Sizes of a model, and its longest sample. Raises UserError: every reason why it cannot be trained."""
    from codescent.models.transformers import library  # noqa: PLC0415 - keeps torch out of planning

    try:
        settings = json.loads(config)
    except ValueError as error:
        raise UserError(f"neither a file nor JSON ({json_problem(error)})") from error
    if refused := list(library.refusals(settings, head)):
        raise UserError(*refused)
    found = library.sizes_of(config)
    return found, _observe(config, head, found["num_layers"]).positions


def _observe(config: str, head: str, layers: int) -> Any:
    from codescent.models.transformers.observed import observe  # noqa: PLC0415 - keeps torch out of planning

    return observe(config, head, layers)


def observed(shape: TransformersShape) -> Any:
    """What the model is, beside its sizes: an `Observed`."""
    return _observe(shape.config, shape.head, shape.num_layers)


def parameters(shape: TransformersShape) -> Iterator[Parameter]:
    """Every parameter: those outside of the blocks, then the blocks."""
    yield from observed(shape).parameters


def forward_flops(shape: TransformersShape, seq_len: int) -> tuple[float, ...]:
    """FLOPs of a forward pass per token at each depth, counted by torch for each product and attention."""
    from codescent.models.transformers.observed import forward_flops as counted  # noqa: PLC0415 - see above

    return counted(shape.config, shape.head, shape.num_layers, seq_len)


KIND = ConfigKind(
    NAME,
    TransformersShape,
    "Transformers",
    {},
    parameters,
    lambda full: {},
    lambda shape, forward: iter(()),  # see `kept`
    lambda shape, forward: iter(()),  # what is no product is not declared: docs/any_model.md
    forward_flops,
    options=(),
    uncompiled="has blocks that codescent has not verified with torch.compile",
)
