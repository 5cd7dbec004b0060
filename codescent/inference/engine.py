"""In: a decoder, its tokenizer, requests at any time. Out: at each step, the new tokens and texts of the requests.
Does not open files (open.py does), and reads no clock: a caller measures around `step`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.inference.request import Output, Sampling
from codescent.models.decoder import Decoder


@dataclass(frozen=True)
class Capacity:
    """How much an engine holds at a time.

    Attributes:
        rows: requests that run at a time; others wait.
        pages: pages of keys and values in memory.
        page_size: tokens of a page. Only whole pages are shared between requests.
        step_tokens: tokens that a step reads at most. A longer prompt is read in several steps, beside other requests.
    """

    rows: int = 16
    pages: int = 1024
    page_size: int = 16
    step_tokens: int = 512


class Engine:
    """A model that generates for many requests at once (continuous batching; Yu et al. 2022, "Orca").

    Not safe for several threads at once: one thread calls all methods.

    Attributes:
        waiting, running: requests that wait, and that have a row.
        pages_used, pages_total: pages of keys and values.
        prompt_tokens, cached_tokens: tokens of all prompts so far, and those found in pages of earlier requests.
        preemptions: how often a request gave up its pages to others, to be read again later.
    """

    def __init__(
        self, module: Decoder, tokenizer: Tokenizer | None, capacity: Capacity, *, stops: Collection[int] = ()
    ) -> None:
        raise NotImplementedError

    def add(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Add a request. Returns its id, which no other request has.

        Raises:
            UserError: all that is wrong with it, at once.
        """
        raise NotImplementedError

    def cancel(self, request: int) -> None:
        """End a request; the next step gives its last output. An id that has ended, or is unknown, changes nothing."""
        raise NotImplementedError

    def step(self) -> list[Output]:
        """One forward pass of the running requests. Returns what is new of each; [] if there are none."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        raise NotImplementedError
