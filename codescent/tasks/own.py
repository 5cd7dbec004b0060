"""In: the name of a task class of the user, such as mymodule:MyTask. Out: the task.
Does not list the tasks of this package (tasks.TASKS does)."""

from __future__ import annotations

from codescent.base import own_names
from codescent.tasks.task import Task

KEY = "data.task"


def own_task(name: str) -> Task:
    """The task of this name; plans and run folders know it by the same name. Raises UserError: there is none."""
    task = own_names.instance(KEY, name, Task, needs=("kinds", "prepare", "open"))
    task.name = name
    return task
