"""In: nothing. Out: the class of the config section [optimizer]: the update rule and its learning rate.
Does not read files (load.py does) and does not update weights (train/optimize.py does)."""

from __future__ import annotations

from typing import Literal

from codescent.config.keys import OwnName, Section, auto, key, one_of, one_or_own, other_than
from codescent.config.rate_schedules import DecayForm, ScheduleName, of_schedule

_MUON = one_of("optimizer.kind", "muon")


class Optimizer(Section):
    """The update rule and its learning rate."""

    kind: Literal["adamw", "adam", "sgd", "adagrad", "adadelta", "rmsprop", "muon"] | OwnName = key(
        "adamw",
        "update rule; muon: Muon for the matrices of blocks, AdamW for embeddings, head, norms and biases; a name: a "
        "class of yours (codescent docs own_names)",
    )
    learning_rate: float = key(6e-4, "highest learning rate, reached after the warm-up", gt=0)
    min_learning_rate: float = key(
        0.0,
        "learning rate at the end of the decay; inverse-sqrt falls to it",
        ge=0,
        only=of_schedule("min_learning_rate"),
    )
    weight_decay: float = key(0.1, "weight decay of matrices and embeddings; biases and norms have none", ge=0)
    beta1: float = key(
        0.9, "decay of the mean of gradients", ge=0, lt=1, only=one_or_own("optimizer.kind", "adamw", "adam", "muon")
    )
    beta2: float = key(
        0.95,
        "decay of the mean of squared gradients",
        ge=0,
        lt=1,
        only=one_or_own("optimizer.kind", "adamw", "adam", "rmsprop", "adadelta", "muon"),
    )
    eps: float = key(1e-8, "added to denominators", gt=0, only=other_than("optimizer.kind", "sgd"))
    momentum: float = key(0.9, "momentum", ge=0, lt=1, only=one_or_own("optimizer.kind", "sgd", "rmsprop"))
    fused: bool = key(
        True,
        "one kernel for the whole update, if torch has one for this update rule",
        only=one_of("optimizer.kind", "adamw", "adam", "sgd", "muon"),
    )
    muon_learning_rate: float | None = auto(
        "highest learning rate of the matrices that Muon updates, with the same schedule; auto: learning_rate",
        gt=0,
        only=_MUON,
    )
    muon_momentum: float = key(0.95, "momentum of Muon", ge=0, lt=1, only=_MUON)
    muon_nesterov: bool = key(True, "Nesterov momentum in Muon", only=_MUON)
    muon_ns_steps: int = key(5, "Newton-Schulz steps that orthogonalise a matrix", ge=1, le=99, only=_MUON)
    muon_adjust_lr_fn: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "factor on Muon's learning rate, for a matrix of A x B: match_rms_adamw: 0.2 sqrt(max(A, B)), updates as large "
        "as AdamW's; original: sqrt(max(1, A / B))",
        only=_MUON,
    )
    muon_precision: Literal["auto", "fp32", "bf16"] = key(
        "auto",
        "number format of the Newton-Schulz steps; auto: train.precision; bf16: as in torch.optim.Muon",
        only=_MUON,
    )
    max_grad_norm: float = key(
        1.0, "gradients are clipped: times min(1, this / (global norm + 1e-6)); 0: no clipping", ge=0
    )
    schedule: ScheduleName | OwnName = key(
        "cosine",
        "decay of the learning rate after the warm-up; wsd: none until the last steps, a share of all; "
        "constant-cooldown: none until the last cooldown_steps; a name: a class of yours (codescent docs own_names)",
    )
    warmup_steps: int = key(
        0, "so many first steps: step s, from 0, has (s + 1) / (warmup_steps + 1) of the rate", ge=0
    )
    decay_steps: int | None = auto(
        "step at which min_learning_rate is reached, counted from 0; auto: train.num_steps",
        ge=1,
        only=of_schedule("decay_steps"),
    )
    decay_power: float = key(
        1.0, "power of what is left of the steps of a polynomial decay", gt=0, le=100, only=of_schedule("decay_power")
    )
    decay_share: float = key(
        0.1, "share of decay_steps, at their end, in which the rate falls", gt=0, le=1, only=of_schedule("decay_share")
    )
    cooldown_steps: int | None = auto(
        "steps before decay_steps in which the rate falls; constant-cooldown needs it",
        ge=1,
        only=of_schedule("cooldown_steps"),
    )
    decay_form: DecayForm = key(
        "1-sqrt",
        "how the rate falls from the highest to the least: 1-sqrt: fast at first, by 1 - the square root of the "
        "progress",
        only=of_schedule("decay_form"),
    )
    timescale: int | None = auto(
        "the rate is divided by the square root of 1 + (steps after the warm-up) / timescale; auto: warmup_steps, "
        "10,000 without a warm-up",
        ge=1,
        only=of_schedule("timescale"),
    )
    scale_learning_rate: Literal["none", "linear", "sqrt"] = key(
        "none", "multiply both learning rates by the number of data-parallel ranks, or by its square root"
    )
    scale_ranks: int | None = auto(
        "data-parallel ranks that scale_learning_rate counts, such as those with which a resumed run began; auto: all "
        "of the run",
        ge=1,
        only=other_than("optimizer.scale_learning_rate", "none"),
    )

    @property
    def peak_of_muon(self) -> float:
        """The highest learning rate of the matrices that Muon updates, before `muon_adjust_lr_fn`."""
        return self.learning_rate if self.muon_learning_rate is None else self.muon_learning_rate
