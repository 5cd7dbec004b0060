"""In: the arguments of the command `codescent`. Out: the exit code of the process.
Does not parse the arguments and runs no command itself (verbs/cli.py does)."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Entry point of `codescent` and of `python -m codescent`."""
    from codescent.base import ending
    from codescent.verbs.cli import run  # run() answers a Ctrl-C in one line, without a traceback

    try:
        code = run(sys.argv[1:], may_restart=True)
    except BaseException as error:
        ending.end_by(error)
        raise
    ending.end(code)
    gc.collect()  # frees process groups in reference cycles: their threads must end before the interpreter
    sys.exit(code)


if __name__ == "__main__":
    main()
