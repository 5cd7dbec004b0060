"""In: an opened model. Out: a model as lm-evaluation-harness asks one: it scores and generates texts.
Does not choose or load tasks (harness_tasks.py does). It needs the extra `lm-eval`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from codescent.base.errors import UserError
from codescent.inference.open import Opened
from codescent.inference.prompt_logprobs import continuation_scores
from codescent.inference.request import Finish, Sampling

MOST_NEW_TOKENS = 256
"""As in the harness, where a task does not say it."""


class HarnessModel(TemplateLM):
    """A model of this package for `lm_eval.simple_evaluate(model=...)`.

    Texts are encoded and windows are cut as by the harness's own model of transformers, so both have the same scores.
    """

    backend = "causal"

    def __init__(self, opened: Opened) -> None:
        super().__init__()
        self._opened, self._module = opened, opened.engine.module

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; without one, id 0: the harness needs something before a text."""
        stops = sorted(self._opened.engine.stops)
        separator = self._opened.tokenizer.separator
        return separator if separator is not None else stops[0] if stops else 0

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no other before it."""
        opening = self._opened.tokenizer.opening
        return opening[0] if opening else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        return self._opened.seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, behind what begins every text of the tokenizer."""
        tokenizer = self._opened.tokenizer
        opening = [] if add_special_tokens is False else list(tokenizer.opening)
        return [*opening, *tokenizer.encode(string).tolist()]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return continuation_scores(self._module, [(before, scored) for _, before, scored in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The logarithm of the probability of whole texts, in windows of the model's length."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            found.append(sum(score for score, _ in continuation_scores(self._module, pairs)))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each text, up to one of its stop texts."""
        prompts, samplings = [], []
        for number, request in enumerate(requests):
            text, options = request.args
            sampling = _sampling(options, number, self.max_length)
            room = max(1, self.max_length - sampling.max_new_tokens)
            prompts.append((self.tok_encode(text) or [self.prefix_token_id])[-room:])
            samplings.append(sampling)
        texts = dict[int, str]()
        for outputs in self._opened.engine.texts(prompts, samplings):
            for output in outputs:
                if output.finished is Finish.ERROR:
                    raise UserError(output.error)
                texts[output.request] = texts.get(output.request, "") + output.text
        return [texts[request] for request in sorted(texts)]


def _sampling(options: dict[str, Any], number: int, seq_len: int) -> Sampling:
    """How a task wants its texts generated: greedily, if it does not say so."""
    until = options.get("until") or []
    stops = tuple(one for one in ([until] if isinstance(until, str) else until) if one)
    temperature = float(options.get("temperature") or 0.0)
    samples = options.get("do_sample", temperature > 0) and temperature > 0
    most = int(options.get("max_gen_toks") or options.get("max_new_tokens") or MOST_NEW_TOKENS)
    return Sampling(
        temperature=temperature if samples else 0.0,
        top_p=options.get("top_p") if samples else None,
        top_k=options.get("top_k") if samples else None,
        number=number,
        max_new_tokens=max(1, min(most, seq_len - 1)),
        stop=stops,
    )
