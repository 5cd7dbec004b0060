"""In: the arguments of the command `codescent`. Out: the exit code of the process.
Does not parse the arguments and runs no command itself (verbs/cli.py does)."""
# PYTHON_ARGCOMPLETE_OK: global completion of argcomplete looks for this word

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress


def main() -> None:
    """Entry point of `codescent` and of `python -m codescent`."""
    try:
        code = _run()
        gc.collect()  # frees process groups in reference cycles: their threads must end before the interpreter
    except KeyboardInterrupt:  # before run() can answer it, while modules are imported; or after it
        with suppress(OSError, AttributeError):  # the standard error is closed
            os.write(sys.stderr.fileno(), b"interrupted\n")
        code = 130
    sys.exit(code)


def _run() -> int:
    """Run the command; its exit code. After an error of one rank among several the process ends here."""
    from codescent.base import early, ending

    if "_ARGCOMPLETE" in os.environ:  # a shell asks for words
        from codescent.verbs.completion import complete

        complete()
    if sys.argv[1:2] == ["train"]:
        early.defer_end()  # before the imports that take long
    from codescent.verbs.cli import run

    try:
        code = run(sys.argv[1:], may_restart=True)
    except BaseException as error:
        ending.end_by(error)
        raise
    ending.end(code)
    return code


if __name__ == "__main__":
    main()
