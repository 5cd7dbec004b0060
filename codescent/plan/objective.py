"""In: nothing. Out: the dataclasses Objective (what a run minimises), Preference (a loss that compares answers), Policy
(a loss of answers that the model writes itself).
Does not compute a loss (operators/softmax.py, preferences.py, policy.py, routing.py and the heads do)."""

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


OF_POLICY = ("reward", "reward_std", "answer_tokens", "answers_cut", "groups_alike")
"""Measures of answers with rewards: mean reward, standard deviation in a group, tokens, the share of answers that ended
at their limit, the share of groups whose answers all have the same reward."""
KL, CLIPPED, VAL_REWARD = "kl", "clipped", "val_reward"
POLICY_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "group": "group_size",
        **{name: name for name in ("new_tokens", "temperature", "top_k", "top_p", "kl", "kl_corrected")},
        "scaled": "scale_rewards",
        "mean": "answer_mean",
        "clip": "clip",
        "clip_high": "clip_high",
        "updates": "updates_per_answer",
    }
)
"""The attributes of a `Policy`, each with its key of [train]."""


@dataclass(frozen=True)
class Policy:
    """The loss of answers that the model writes before each step, by their rewards: see operators/policy.py.

    Attributes:
        group: answers to a prompt, whose rewards are compared.
        new_tokens: an answer ends after so many tokens.
        temperature, top_k, top_p: how tokens are chosen; None: among all.
        scaled: an advantage is divided by the standard deviation of its group.
        mean: "answer": each answer counts by the mean over its tokens; "limit": by their sum / new_tokens.
        kl: coefficient of the KL divergence from the model with its initial weights; 0: there is no reference.
        kl_corrected: the estimate of this divergence is multiplied by the ratio of probabilities.
        clip, clip_high: the ratio of probabilities counts within [1 - clip, 1 + clip_high].
        updates: steps that learn from the same answers.
    """

    group: int
    new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    scaled: bool = True
    mean: str = "answer"
    kl: float = 0.0
    kl_corrected: bool = False
    clip: float = 0.2
    clip_high: float = 0.2
    updates: int = 1

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the means that a step has beside its loss: see `operators.policy`."""
        return measures_of_policy(kl=self.kl, updates=self.updates)


def measures_of_policy(*, kl: float, updates: int) -> tuple[str, ...]:
    """The measures of a `Policy` with these values."""
    return (*OF_POLICY, *([KL] if kl else []), *([CLIPPED] if updates > 1 else []))


@dataclass(frozen=True)
class Objective:
    """What training minimises for a target y, given logits z of V classes:

        sum over j of q_j (log Z - z_j)  +  z_loss * (log Z)^2
        Z = sum over j of exp(z_j)
        q_j = (1 - label_smoothing) [j = y] + label_smoothing / V

    The first summand is torch.nn.functional.cross_entropy with `label_smoothing` (Szegedy et al. 2016, "Rethinking the
    Inception Architecture", section 7). The second is the z-loss (Chowdhery et al. 2022, "PaLM", section 5). With the
    defaults it is the plain cross-entropy.

    With `preference` it is the loss of the answers of a sample instead, with `policy` that of answers which the model
    has written. Label smoothing and z-loss have no effect then.

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
    policy: Policy | None = field(default=None, metadata={BRIEF: True})

    @property
    def validated(self) -> Objective:
        """What validation losses are means of: without the terms that only help training."""
        return CROSS_ENTROPY if not self.by_token else Objective(preference=self.preference, policy=self.policy)

    @property
    def by_token(self) -> bool:
        """Whether the head has a loss of each token first, and computes logits again in backward."""
        return self.preference is not None or self.policy is not None

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the means that a step has beside its loss."""
        found = self.preference or self.policy
        return found.measures if found is not None else OF_MODULES if self.mtp_weight else ()

    @property
    def needs_run(self) -> bool:
        """Whether samples get numbers or answers of the model, which a run computes, and nothing else does."""
        return self.policy is not None or (self.preference is not None and self.preference.referenced)

    @property
    def headline(self) -> str:
        """The measure that says more of a step than its loss; "": there is none."""
        return OF_POLICY[0] if self.policy is not None else ""

    def of_validation(self, loss: float | None) -> dict[str, float | None]:
        """What a validation loss means beside: of answers with rewards it is the negative of the mean reward."""
        return {} if self.policy is None else {VAL_REWARD: None if loss is None else -loss}


CROSS_ENTROPY = Objective()
"""The plain cross-entropy, of which validation losses are means."""
