"""In: a plan. Out: its model, batch and layout in a line, for lessons and below the title of a figure.
Does not print, and does not know the machine of a run."""

from __future__ import annotations

from codescent.base.counted import counted
from codescent.plan.mesh import AXES
from codescent.plan.plan import Plan


def line_of(plan: Plan) -> str:
    """Model, batch and layout of a plan, in one line. Terms of the config, alike in every language."""
    return f"{model_line(plan)}; {layout_line(plan)}"


def model_line(plan: Plan) -> str:
    """The model of a plan."""
    model = plan.model
    sizes = f"num_layers={model.num_layers}, hidden_dim={model.hidden_dim}, {plan.num_parameters:,} parameters"
    return f"{model.kind}: {sizes}"


def layout_line(plan: Plan) -> str:
    """The batch and the layout of a plan."""
    axes = ", ".join(f"{axis}={plan.mesh.degree(axis)}" for axis in AXES if plan.mesh.degree(axis) > 1)
    batch = f"global_batch_size={plan.work.global_batch_size}"
    return "; ".join(filter(None, (batch, counted(plan.world_size, "rank"), axes)))
