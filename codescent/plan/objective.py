"""In: nothing. Out: the dataclass Objective: label smoothing, z-loss and the losses of routers of a run.
Does not compute a loss (operators/softmax.py, operators/routing.py and the heads do)."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.plan.brief import brief


@dataclass(frozen=True)
class Objective:
    """What training minimises for a target y, given logits z of V classes:

        sum over j of q_j (log Z - z_j)  +  z_loss * (log Z)^2
        Z = sum over j of exp(z_j)
        q_j = (1 - label_smoothing) [j = y] + label_smoothing / V

    The first summand is torch.nn.functional.cross_entropy with `label_smoothing` (Szegedy et al. 2016, "Rethinking the
    Inception Architecture", section 7). The second is the z-loss (Chowdhery et al. 2022, "PaLM", section 5). With the
    defaults it is the plain cross-entropy.

    `balance_loss` and `router_z_loss` are coefficients of the losses that routers of experts add, in each layer
    (operators/routing.py). They have gradients, but are not part of the loss that a run reports. By
    `balance_rate` a step changes the biases of routers.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    balance_loss: float = brief(0.0)
    balance_rate: float = brief(0.0)
    router_z_loss: float = brief(0.0)


CROSS_ENTROPY = Objective()
"""The plain cross-entropy, of which validation losses are means."""
