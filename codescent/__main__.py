"""In: the command line. Out: the exit code of the verb that it names.
Does not do anything itself: cli does."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Entry point of `codescent` and of `python -m codescent`."""
    from codescent.verbs.cli import run  # after the interpreter is up: a Ctrl-C from here on is answered in one line

    code = run(sys.argv[1:], may_restart=True)
    gc.collect()  # process groups in reference cycles: their threads must be joined before the interpreter is gone
    sys.exit(code)


if __name__ == "__main__":
    main()
