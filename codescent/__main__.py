"""In: the arguments of the command `codescent`. Out: the exit code of the process.
Does not parse the arguments and runs no command itself (verbs/cli.py does)."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Entry point of `codescent` and of `python -m codescent`."""
    from codescent.verbs.cli import run  # run() answers a Ctrl-C in one line, without a traceback

    code = run(sys.argv[1:], may_restart=True)
    gc.collect()  # frees process groups in reference cycles: their threads must end before the interpreter
    sys.exit(code)


if __name__ == "__main__":
    main()
