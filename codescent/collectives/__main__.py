"""In: the folder of a task, a rank's environment. Out: this process is a rank that does the task.
Does not save anything, so Ctrl-C ends it at once, in whichever call it is; also while torch is imported."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from codescent.collectives.rank import run

    run(Path(sys.argv[1]))
