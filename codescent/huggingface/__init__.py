"""In: a codescent model, or a Hugging Face folder. Out: the model in the other format, by one table per model kind.
Does not read runs or checkpoints (codescent/verbs/export_run.py does). Does not import `transformers`."""

from __future__ import annotations

from codescent.base.errors import UserError
from codescent.huggingface.any_model import kind_of_shape
from codescent.huggingface.bert import BERT
from codescent.huggingface.families import FAMILIES, TRAITS
from codescent.huggingface.gpt2 import GPT2
from codescent.huggingface.kind import Kind
from codescent.models import READ_CONFIG, Shape

KINDS: tuple[Kind, ...] = (GPT2, *(family.kind for family in FAMILIES), BERT)
"""The table of each kind of `transformers`. To add a kind, declare it in a file and list it here."""
NAMES = tuple(dict.fromkeys(kind.name for kind in KINDS))
"""Names of these kinds in codescent; several of `transformers` may be one of ours."""


def kind_of(name: str, shape: Shape) -> Kind:
    """The first kind of `transformers` that computes a model of ours of this shape.

    Raises:
        UserError: there is none.
    """
    if name in READ_CONFIG:
        return kind_of_shape(shape)
    if name not in NAMES:
        known = ", ".join((*NAMES, *READ_CONFIG))
        raise UserError(f'model.kind = "{name}": only these kinds can be exported: {known}')
    found = next((kind for kind in KINDS if kind.name == name and kind.fits(shape)), None)
    if found is None:
        traits = ", ".join(f"model.{trait} = {getattr(shape, trait)}" for trait in TRAITS)
        families = "; ".join(f"{one.model_type}: {one.words()}" for one in FAMILIES)
        raise UserError(f"no family of transformers has {traits} together; families differ in these keys: {families}")
    return found


__all__ = ["KINDS", "NAMES", "Kind", "kind_of"]
