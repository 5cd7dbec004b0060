"""In: a prompt with its answers as text, data.reward. Out: a reward of each answer; what is wrong with those of a user.
Does not decode tokens (samples.py does). A function of a user runs in this process, in a thread of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codescent.base import own_names
from codescent.base.counted import a_type
from codescent.base.errors import UserError
from codescent.tasks.rewarded.lines import EXACT

KEY = "data.reward"
Reward = Callable[..., Any]


class Rewards:
    """What gives rewards.

    A function of a user is called once for each prompt, so that its rewards cannot depend on the layout of a run. As
    functions for `trl` it gets `prompts` and `completions`, lists of equal length, and each other key of the line as
    such a list. It returns a number for each answer.

    Args:
        name: `EXACT`, or a name of users' code.
        prompt_key, answer_key: keys of a line.
        timeout_s: how long the function may take for a prompt.

    Raises:
        UserError: the name stands for no function.
    """

    def __init__(self, name: str, prompt_key: str, answer_key: str, timeout_s: float) -> None:
        self._name, self._prompt_key, self._answer_key, self._timeout_s = name, prompt_key, answer_key, timeout_s
        self._function = None if name == EXACT else function_of(name)

    def __call__(self, line: Mapping[str, Any], answers: Sequence[str], where: str) -> list[float]:
        """The rewards of the answers to a line. Raises UserError: the function fails; `where` names line and step."""
        if self._function is None:
            wanted = str(line[self._answer_key]).strip()
            return [float(answer.strip() == wanted) for answer in answers]
        columns = {key: [value] * len(answers) for key, value in line.items() if key != self._prompt_key}
        prompts = [line[self._prompt_key]] * len(answers)
        found = self._within_time(where, prompts=prompts, completions=list(answers), **columns)
        return self._checked(found, len(answers), where)

    def _within_time(self, where: str, **arguments: Any) -> Any:
        """What the function returns. A thread that hangs is left behind: it ends with the process."""
        outcome = list[tuple[Any, BaseException | None]]()

        def call() -> None:
            assert self._function is not None
            try:
                outcome.append((self._function(**arguments), None))
            except BaseException as error:  # also SystemExit: it is a failure of this call
                outcome.append((None, error))

        thread = threading.Thread(target=call, name="reward", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not outcome:
            said = f"no reward after {self._timeout_s:g} s; raise data.reward_timeout_s, or mend the function"
            raise UserError(f"{KEY} = {self._name}: {where}: {said}")
        value, error = outcome[0]
        if error is not None:
            words = own_names.in_words(error, _file_of(self._function))
            raise UserError(f"{KEY} = {self._name}: {where}: raised {words}") from error
        return value

    def _checked(self, found: Any, count: int, where: str) -> list[float]:
        """The rewards as numbers. Raises UserError: they are none, not finite, or more or fewer than the answers."""
        given = f"{KEY} = {self._name}: {where}"
        try:
            values = list(found)
        except TypeError as error:
            raise UserError(f"{given}: returned {a_type(found)}; must return a list of numbers") from error
        if len(values) != count:
            raise UserError(f"{given}: returned {len(values)} rewards for {count} answers")
        rewards = []
        for number, value in enumerate(values, 1):
            try:
                rewards.append(float(value))
            except (TypeError, ValueError) as error:
                raise UserError(f"{given}: answer {number} has the reward {str(value)[:40]!r}, no number") from error
            if not math.isfinite(rewards[-1]):
                raise UserError(f"{given}: answer {number} has the reward {rewards[-1]}; must be finite")
        return rewards


def function_of(name: str) -> Reward:
    """The function of this name. Raises UserError: there is none."""
    found, file = own_names.load(KEY, name, "function")
    if not callable(found) or isinstance(found, type):
        raise UserError(f"{KEY} = {name}: {file}: must be a function, and is {a_type(found)}")
    function: Reward = found
    return function


def _file_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return str(getattr(code, "co_filename", ""))
