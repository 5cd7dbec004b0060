"""In: a decoder, its tokenizer, requests at any time. Out: at each step, the new tokens and texts of the requests.
Does not open files (open.py does), and reads no clock: a caller measures around `step`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from codescent.base.errors import UserError
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.inference.grammar import Grammars, GrammarState
from codescent.inference.pages import PagePool
from codescent.inference.reader import Pass, Reader
from codescent.inference.request import Finish, Output, Sampling
from codescent.inference.rows import TextRow
from codescent.inference.sampling import Draw, NextToken, choose
from codescent.inference.schedule import Capacity, TextScheduler
from codescent.inference.text import StopText, TextStream
from codescent.models.decoder import Decoder


class _Request:
    """A request: its row, its text so far, and where it is in its grammar."""

    def __init__(self, row: TextRow, tokenizer: Tokenizer | None, grammar: GrammarState | None) -> None:
        self.row, self.grammar = row, grammar
        self.text = None if tokenizer is None else TextStream(tokenizer.decode)
        self.stop = StopText(row.sampling.stop)
        self.is_counted = False

    def push(self, token: int) -> str:
        """Add a token. Returns the text that is certain now."""
        return "" if self.text is None else self.stop.push(self.text.push(token))

    def rest(self) -> str:
        """The text that was withheld."""
        return "" if self.text is None else self.stop.push(self.text.finish(), ends=True)


class Engine:
    """A model that generates for many requests at once (continuous batching; Yu et al. 2022, "Orca").

    The tokens of a request do not depend on the others, except by rounding of the logits. Not safe for several threads
    at once: one thread calls all methods. The module is put into evaluation mode while it reads; its weights are read
    where they are, so a change of them holds from the next step on (`forget` what was read before).

    Args:
        module: the decoder. Under tensor parallelism, this rank's part of it (see `ranks`).
        tokenizer: decodes the tokens; None: outputs have no text, and requests neither stop texts nor a grammar.
        capacity: rows, pages and tokens at a time.
        stops: tokens that end a request. They are not among its tokens.
        vocab_size: only ids below it are chosen, if the tokenizer has fewer ids than the model; None: all.
        reader: reads the passes; None: a `Reader` of the module.

    Attributes:
        capacity: as given.
        seq_len: tokens of a text that the model sees at most: those of the model, or all that the pages hold.
        prompt_tokens, cached_tokens: tokens of all prompts so far, and those found in pages of earlier requests.
    """

    def __init__(
        self,
        module: Decoder,
        tokenizer: Tokenizer | None,
        capacity: Capacity = Capacity(),  # noqa: B008 - frozen
        *,
        stops: Collection[int] = (),
        vocab_size: int | None = None,
        reader: Reader | None = None,
    ) -> None:
        if problems := list(capacity.problems()):
            raise UserError(*problems)
        self.module, self.tokenizer, self.capacity = module, tokenizer, capacity
        self.stops = frozenset(stops)
        self.vocab_size = module.shape.vocab_size if vocab_size is None else min(vocab_size, module.shape.vocab_size)
        self.seq_len = min(module.shape.seq_len, capacity.pages * capacity.page_size)
        self.prompt_tokens = self.cached_tokens = 0
        self._reader = Reader(module, capacity.pages, capacity.page_size) if reader is None else reader
        self._grammars = None if tokenizer is None else Grammars(tokenizer, sorted(self.stops), self.vocab_size)
        self._requests: dict[int, _Request] = {}
        self._cancelled: list[int] = []
        self._next = 0
        self._begin()

    def _begin(self) -> None:
        self._pool = PagePool(self.capacity.pages, self.capacity.page_size)
        self._schedule = TextScheduler(self._pool, self.capacity)

    def add(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """Add a request. Returns its id, which no other request has.

        Raises:
            UserError: all that is wrong with it, at once.
        """
        problems = list(self._prompt_problems(prompt, sampling))
        try:
            grammar = self.prepare(sampling)
        except UserError as error:
            raise UserError(*problems, *error.problems) from error
        if problems:
            raise UserError(*problems)
        request, self._next = self._next, self._next + 1
        row = TextRow(request, list(map(int, prompt)), sampling, self._pool, self.seq_len)
        self._requests[request] = _Request(row, self.tokenizer, grammar)
        self._schedule.waiting.append(row)
        return request

    def prepare(self, sampling: Sampling) -> GrammarState | None:
        """Whether this engine can choose tokens so. Returns where a text begins in the grammar; None: there is none.

        A grammar is compiled at its first use, so a caller may ask before the first request.

        Raises:
            UserError: all that is wrong with it, at once.
        """
        problems, grammar = [*sampling.problems()], None
        for token in sampling.logit_bias:
            if not 0 <= token < self.vocab_size:
                problems.append(f"logit_bias: token {token} is outside the vocabulary of {self.vocab_size}")
        if self._grammars is None and (sampling.stop or sampling.grammar is not None):
            problems.append("stop, grammar: they are about text, and this engine has no tokenizer")
        elif self._grammars is not None and sampling.grammar is not None:
            try:
                grammar = self._grammars.begin(sampling.grammar)
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*problems)
        return grammar

    def _prompt_problems(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[str]:
        if not prompt:
            yield "prompt: no tokens"
        elif not all(0 <= token < self.module.shape.vocab_size for token in prompt):
            wrong = next(token for token in prompt if not 0 <= token < self.module.shape.vocab_size)
            yield f"prompt: token {wrong} is outside the vocabulary of {self.module.shape.vocab_size}"
        if len(prompt) > self.seq_len and not sampling.slides:
            less = "" if self.seq_len == self.module.shape.seq_len else ", for which the memory of this engine has room"
            yield f"prompt: {len(prompt):,} tokens, and the model sees at most {self.seq_len:,}{less}"

    def cancel(self, request: int) -> None:
        """End a request; the next step gives its last output. An id that has ended, or is unknown, changes nothing."""
        if request in self._requests and request not in self._cancelled:
            self._cancelled.append(request)

    def step(self) -> list[Output]:
        """One forward pass of the running requests. Returns what is new of each; [] if there are none.

        A request may have no output in a step: while its prompt is read, or while it waits.
        """
        outputs = [self._end(self._requests[request], None, Finish.CANCELLED) for request in self._cancelled]
        self._cancelled = []
        chosen = self._schedule.next()
        if not chosen:
            return outputs
        wanted = [row.unread == new for row, new in chosen.items()]
        tokens = [token for row, new in chosen.items() for token in row.next_tokens(new)]
        logits_BV = self._read(Pass(tokens, [row.part(new) for row, new in chosen.items()], wanted))
        for row, new in chosen.items():
            if not (request := self._requests[row.request]).is_counted:
                request.is_counted = True
                self.prompt_tokens += row.prompt_tokens
                self.cached_tokens += row.shared
            row.has_read(new)
        requests = [self._requests[row.request] for row, is_wanted in zip(chosen, wanted, strict=True) if is_wanted]
        if requests:
            draws = [
                Draw(one.row.sampling, one.row.new_tokens, None if one.grammar is None else one.grammar.allowed())
                for one in requests
            ]
            found = choose(logits_BV[:, : self.vocab_size], draws)
            outputs += [self._output(one, choice) for one, choice in zip(requests, found, strict=True)]
        return outputs

    def texts(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> Iterator[list[Output]]:
        """Add a request for each prompt, and yield the outputs of each step until all have ended.

        Ids are those of `add`: they count up from that of the first prompt. If the caller stops early, what is left is
        cancelled.
        """
        added = list[int]()
        try:
            for prompt, sampling in zip(prompts, samplings, strict=True):
                added.append(self.add(prompt, sampling))
            while any(request in self._requests for request in added):
                yield self.step()
        finally:
            for request in added:
                self.cancel(request)

    def forget(self) -> None:
        """Read all texts again, from the next step on, and share no page of before: the weights have changed."""
        for row in [*self._schedule.running, *self._schedule.waiting]:
            row.leave()
        self._pool.forget()

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or has an output left."""
        return bool(self._requests)

    @property
    def waiting(self) -> int:
        """Requests that have no row yet, or gave up their pages to others."""
        return len(self._schedule.waiting)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._schedule.running)

    @property
    def pages_used(self) -> int:
        """Pages that hold texts of running requests."""
        return self._pool.used

    @property
    def pages_total(self) -> int:
        """All pages."""
        return self.capacity.pages

    @property
    def preemptions(self) -> int:
        """How often a request gave up its pages to others, to be read again later."""
        return self._schedule.preemptions

    @torch.inference_mode()
    def _read(self, work: Pass) -> torch.Tensor:
        if not self.module.training:  # to set the mode of all modules takes as long as a layer
            return self._reader.read(work)
        self.module.eval()
        try:
            return self._reader.read(work)
        finally:
            self.module.train()

    def _output(self, request: _Request, choice: NextToken) -> Output:
        row, token = request.row, choice.token
        if token is None:
            return self._end(request, None, Finish.ERROR, choice.error)
        if token in self.stops:
            return self._end(request, None, Finish.STOP)
        row.tokens.append(token)
        text = request.push(token)
        if request.grammar is not None:
            request.grammar.accept(token)
        finished = None
        if request.stop.found or (request.grammar is not None and request.grammar.ended):
            finished = Finish.STOP
        elif row.new_tokens >= row.sampling.max_new_tokens:
            finished = Finish.LENGTH
        elif row.unread + row.read > self.seq_len:
            if row.sampling.slides:
                row.slide()
            else:
                finished = Finish.LENGTH
        if finished is None:
            return Output(row.request, token, text, choice.logprob)
        return self._end(request, token, finished, text=text, choice=choice)

    def _end(
        self,
        request: _Request,
        token: int | None,
        finished: Finish,
        error: str = "",
        *,
        text: str = "",
        choice: NextToken | None = None,
    ) -> Output:
        self._schedule.remove(request.row)
        del self._requests[request.row.request]
        return Output(
            request.row.request,
            token,
            text + request.rest(),
            None if choice is None else choice.logprob,
            finished,
            error,
        )
