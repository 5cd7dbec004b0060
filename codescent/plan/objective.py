"""In: nothing. Out: the dataclasses Objective (what a run minimises) and Preference (a loss that compares answers).
Does not compute a loss (operators/softmax.py, operators/preferences.py, operators/routing.py and the heads do)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from codescent.plan.brief import BRIEF, brief

BETAS: Mapping[str, float] = MappingProxyType({"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0})
"""The losses of preferences, each with the beta that a run has if it gives none."""
REFERENCED = ("dpo", "ipo", "kto")
"""Losses that compare with a reference: the model with the weights that it has before the first step."""
CHOSEN, REJECTED, PROMPT = 0, 1, 2
"""The sums of a pair: of its answers, and of the prompt of the chosen one."""
OF_PAIRS = ("chosen_rewards", "rejected_rewards", "reward_margins", "reward_accuracy")
OF_MODULES = ("mtp_loss",)
"""The mean cross-entropy of all tokens that modules behind the blocks predict."""
OF_ANSWERS = ("chosen_rewards", "rejected_rewards", "reward_accuracy", "reference_kl")


@dataclass(frozen=True)
class Preference:
    """The loss of answers of which one is preferred; operators/preferences.py has the formulas and their sources.

    Attributes:
        kind: a key of BETAS.
        beta: how much the differences of log-probabilities count. IPO: tau; ORPO: lambda.
        margin: SimPO: by how much the reward of the chosen answer should be higher (gamma).
        chosen_weight, rejected_weight: KTO: factors of the losses of answers that are wanted, and of others.
        answers: KTO: answers of a sample, which share an estimate of the KL term; 0: a sample is a pair.
    """

    kind: str
    beta: float
    margin: float = 0.0
    chosen_weight: float = 1.0
    rejected_weight: float = 1.0
    answers: int = 0

    @property
    def referenced(self) -> bool:
        """Whether a sample needs the log-probabilities of the reference."""
        return self.kind in REFERENCED

    @property
    def sums(self) -> int:
        """Sums of log-probabilities of a sample: of each answer and, behind, of the prompt of a pair; with KTO of each
        answer, and of the answers that have another one's prompt."""
        return 2 * self.answers if self.answers else len(("chosen", "rejected", "prompt"))

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the means that a step has beside its loss: see `operators.preferences`."""
        return OF_ANSWERS if self.answers else OF_PAIRS


@dataclass(frozen=True)
class Objective:
    """What training minimises for a target y, given logits z of V classes:

        sum over j of q_j (log Z - z_j)  +  z_loss * (log Z)^2
        Z = sum over j of exp(z_j)
        q_j = (1 - label_smoothing) [j = y] + label_smoothing / V

    The first summand is torch.nn.functional.cross_entropy with `label_smoothing` (Szegedy et al. 2016, "Rethinking the
    Inception Architecture", section 7). The second is the z-loss (Chowdhery et al. 2022, "PaLM", section 5). With the
    defaults it is the plain cross-entropy.

    With `preference` it is the loss of the answers of a sample instead, and label smoothing and z-loss have no effect.

    `balance_loss` and `router_z_loss` are coefficients of the losses that routers of experts add, in each layer
    (operators/routing.py). They have gradients, but are not part of the loss that a run reports. By
    `balance_rate` a step changes the biases of routers.

    `mtp_weight` is that of the losses of modules that predict tokens behind the next one (`models.multi_token`). It is
    no part of the reported loss either: their mean is a measure of its own.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    balance_loss: float = brief(0.0)
    balance_rate: float = brief(0.0)
    router_z_loss: float = brief(0.0)
    mtp_weight: float = brief(0.0)
    preference: Preference | None = field(default=None, metadata={BRIEF: True})

    @property
    def validated(self) -> Objective:
        """What validation losses are means of: without the terms that only help training."""
        return CROSS_ENTROPY if self.preference is None else Objective(preference=self.preference)

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the means that a step has beside its loss."""
        if self.preference is not None:
            return self.preference.measures
        return OF_MODULES if self.mtp_weight else ()


CROSS_ENTROPY = Objective()
"""The plain cross-entropy, of which validation losses are means."""
