"""In: a dataset, and a checkpoint. Out: a refusal if the checkpoint is of other data.
Does not compare the ranks' data (open.py does)."""

from __future__ import annotations

from codescent.base.errors import UserError
from codescent.checkpoint.checkpoints import Saved
from codescent.data.samples import AnyDataset
from codescent.data.tokenizers.bpe import is_recorded
from codescent.data.tokenizers.rebuilt import ALONE


def _as_before(dataset: AnyDataset) -> str:
    """The keys that give the tokens of earlier versions, which read this data otherwise; "": none does."""
    ways = []
    match dataset.description:
        case {"corpus": {"json_lines": [_, *_]}}:
            ways.append("give data.as_text=true")
    if is_recorded(dataset.tokenizer_text or ""):
        ways.append(f"give data.tokenizer=bare:FILE, or, {ALONE}")
    if not ways:
        return ""
    return f"; if an earlier version of codescent began the run, {', and '.join(ways)}: as that version read the data"


def check_same_tokens(dataset: AnyDataset, saved: Saved) -> None:
    """Raise UserError if a dataset is not that of a checkpoint, or if the checkpoint is not of `codescent train`."""
    if "dataset" not in saved.state:
        raise UserError(f"{saved.path}: not a checkpoint of `codescent train`: its state names no dataset")
    recorded = saved.state["dataset"]
    if recorded not in (dataset.fingerprint, dataset.earlier):
        raise UserError(
            f"{dataset.path}: not the tokens that the run in {saved.path.parent.parent} was trained on ({recorded}, "
            f"here {dataset.fingerprint}); the order of samples would change{_as_before(dataset)}"
        )
