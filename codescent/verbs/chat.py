"""In: a trained model, lines that a user types. Out: the model's answers, printed as they are generated.
Does not choose tokens or keep the conversation (inference/ does)."""

from __future__ import annotations

import io
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module

from codescent.base import writing
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.output import note, warn
from codescent.base.published import in_words
from codescent.base.visible import visible
from codescent.inference.dialogue import ChatDialogue, Dialogue, dialogue
from codescent.inference.open import open_engine
from codescent.inference.request import Finish, Sampling
from codescent.tasks.conversations.messages import HALF, half_a_character
from codescent.verbs.sampling_options import choices_of, problems_of, refuse_as_options

ASKS = "> "
"""What a terminal shows where the user types."""
MOST_CHARACTERS = 1 << 23
"""The longest line."""
AND_MORE = "\\"
"""A line that ends so goes on in the next one."""


def main(arguments: Namespace) -> int:
    """Talk until /exit, or the end of the input."""
    sampling = Sampling(**choices_of(arguments), max_new_tokens=arguments.tokens)
    _refuse_bytes("--system: the text", arguments.system or "")
    if problems := list(problems_of(sampling)):
        raise UserError(*problems)
    opened = open_engine(
        arguments.run,
        best=arguments.best,
        step=arguments.step,
        ema=arguments.ema,
        device=arguments.device,
        rows=1,
    )
    refuse_as_options(opened.engine, sampling)
    talk = dialogue(opened, sampling, arguments.system or "")
    is_chat = isinstance(talk, ChatDialogue)
    what = "a chat model" if is_chat else "without a chat template: it continues the text that you begin"
    note(f"{', '.join(filter(None, [opened.name, opened.which, what]))}; /help lists the commands")
    Session(talk).run()
    return 0


class Session:
    """Lines of a user, which are commands or messages."""

    def __init__(self, talk: Dialogue) -> None:
        self._talk = talk
        self._commands: Mapping[str, tuple[str, Callable[[str], bool]]] = {
            "/help": ("list the commands", self._help),
            "/reset": ("forget the conversation, but for the system prompt", self._reset),
            "/system": ("TEXT: what the model is told before the conversation; it begins anew", self._system),
            "/save": ("FILE: write the conversation into a new file", self._save),
            "/exit": ("end; so does the end of the input (Ctrl-D)", lambda _: False),
        }

    def run(self) -> None:
        """Answer each line until one ends the session. Ctrl-C ends an answer that is being printed."""
        is_terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is one message, which is refused
        if is_terminal:
            with suppress(ImportError):
                import_module("readline")  # `input` then has a history, and keys that move
        for words in _messages(is_terminal):
            if not self._take(words):
                return
        if is_terminal:
            print()

    def _take(self, words: str) -> bool:
        """Do what a line says. Returns whether the session goes on."""
        name, _, rest = words.strip().partition(" ")
        try:
            if name in self._commands:
                return self._commands[name][1](rest.strip())
            if name.startswith("/") and not name.startswith("//"):
                raise UserError(f"{name}: no such command; /help lists them, and a message that begins so is //...")
            if words.strip():
                self._answer(words[1:] if words.startswith("//") else words)
        except UserError as error:
            warn(*error.problems)
        return True

    def _answer(self, words: str) -> None:
        _refuse_bytes("the message", words)
        pieces = self._talk.say(words)
        with _interruptible() as is_interrupted:
            for piece in pieces:
                print(_printable(piece), end="", flush=True)
                if is_interrupted():
                    pieces.close()
                    print(end=" (interrupted)")
        print(flush=True)
        if self._talk.left_out:
            note(f"(the first {self._talk.left_out} messages have no room in the context, and were not read)")
        if self._talk.ended is Finish.LENGTH and isinstance(self._talk, ChatDialogue):
            note("(ended by the largest number of tokens: --tokens, or the context)")

    def _help(self, _: str) -> bool:
        for name, (what, _act) in self._commands.items():
            print(f"{name:8} {what}")
        print(f"A line that ends in {AND_MORE} goes on in the next one. Ctrl-C ends an answer.")
        return True

    def _reset(self, _: str) -> bool:
        self._talk.reset()
        return True

    def _system(self, text: str) -> bool:
        if not isinstance(self._talk, ChatDialogue):
            raise UserError("/system: the model has no chat template, which would write it")
        _refuse_bytes("/system: the text", text)
        self._talk.system = text
        self._talk.reset()
        return True

    def _save(self, name: str) -> bool:
        if not name:
            raise UserError(f"/save: give the name of a file, such as talk{self._talk.suffix}")
        path, text = expanded(name), self._talk.saved().encode()
        try:
            with writing.open_new(path, within=path.parent) as file:
                try:
                    writing.write_all(file, text)
                except OSError:  # half of a conversation would look like all of it
                    writing.remove_file(path)
                    raise
        except FileExistsError as error:
            raise UserError(f"/save {name}: is there already; give another name") from error
        except ValueError as error:  # a character that names of files cannot have
            raise UserError(f"/save {name}: is no name of a file") from error
        except OSError as error:
            raise UserError(f"/save {name}: {in_words(error)}") from error
        note(f"{path}: written")
        return True


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """A block in which Ctrl-C is noted, and raises nothing: an exception within a step would leave half of it."""
    interrupts = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


def _messages(is_terminal: bool) -> Iterator[str]:
    """What the user types; lines that go on are joined."""
    parts: list[str] = []
    while True:
        try:
            line = _line(is_terminal)
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n(/exit or Ctrl-D ends)")
            parts = []
            continue
        if line is not None and line.endswith(AND_MORE):
            parts.append(line.removesuffix(AND_MORE))
            continue
        if line is not None or parts:
            yield "\n".join([*parts, *([] if line is None else [line])])
            parts = []
        if line is None:
            return


def _refuse_bytes(what: str, words: str) -> None:
    if half_a_character(words):
        raise UserError(f"{what} {HALF}, or bytes that are not UTF-8")


def _line(is_terminal: bool) -> str | None:
    """The next line of the input, without its end; None: there is none. Raises UserError: it never ends."""
    if is_terminal:
        try:
            return input(ASKS)
        except EOFError:
            return None
    line = sys.stdin.readline(MOST_CHARACTERS)
    if len(line) == MOST_CHARACTERS:
        raise UserError(f"the input: a line has {MOST_CHARACTERS:,} characters or more")
    return line.removesuffix("\n") if line else None


def _printable(text: str) -> str:
    """The text of a model: control characters could move the cursor, or worse."""
    encoding = sys.stdout.encoding or "utf-8"
    return visible(text).encode(encoding, "replace").decode(encoding)
