"""In: how its name begins. Out: a folder for temporary files, which goes with this process, however this process ends.
So do the processes that bear its mark. Does not look for folders of earlier processes.

A process that is killed by SIGKILL cannot remove anything. So a small process beside it waits for its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.proc import shows_own_numbers
from codescent.base.stopping import SAVING, STOPPING
from codescent.base.writing import remove_folder

TEMPORARY = "CODESCENT_TEMPORARY"
"""Variable that marks a process: its value is the folder of the command that has started it, and ends with it."""
MOST_S, LOOK_S = 10.0, 0.05
"""Seconds after which what cannot be ended (it waits for a disk) is left; between two looks."""


class TemporaryFolder:
    """A folder for temporary files.

    Args:
        prefix: how its name begins.

    Attributes:
        path: of the folder.
        mark: variables for processes that must not outlive this one.

    Raises:
        UserError: no process can be started.
        OSError: the folder cannot be made.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.mark = {TEMPORARY: str(self.path)}
        root = str(Path(__file__).resolve().parents[2])  # the process imports the same codescent
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        env = {name: value for name, value in os.environ.items() if name != TEMPORARY}  # it outlives who is marked
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [*STOPPING, *SAVING])  # a process inherits the mask
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(self.path)],
                env={**env, "PYTHONPATH": path},
                stdin=subprocess.PIPE,  # its end is that of this process
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # who kills the group of this process does not kill it
            )
        except OSError as error:
            remove_folder(self.path, ignore_errors=True)
            raise UserError(f"no process can be started: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self, *, keep: bool = False) -> None:
        """Remove the folder. `keep`: it stays, and is named to the user."""
        if (code := self._process.poll()) is not None:
            how = f"the process that watches {self.path} has ended early (exit code {code})"
            warn(f"codescent: {how}: had this command been killed, the folder would have stayed")
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not keep:
            remove_folder(self.path, ignore_errors=True)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder for temporary files, which is removed after the block. Raises like TemporaryFolder."""
    folder = TemporaryFolder(prefix)
    try:
        yield folder.path
    finally:
        folder.close()


def is_remover(words: Sequence[str]) -> bool:
    """Whether the words of a command line are those of the process that removes a folder: it ends by itself."""
    return __name__ in words


def main(folder: Path) -> None:
    """Wait for the end of the process that has started this one. Then end what it leaves."""
    while os.read(0, 1):
        pass
    end_s = time.monotonic() + MOST_S
    while time.monotonic() < end_s:
        killed = _kill_marked(folder)
        remove_folder(folder, ignore_errors=True)
        if not (killed or os.path.lexists(folder)):
            return
        time.sleep(LOOK_S)


def _kill_marked(folder: Path) -> int:
    """Kill this user's processes that bear the mark of a folder. Returns how many there were."""
    import psutil  # noqa: PLC0415 - while it waits, this process is to be small

    count = 0
    for process in psutil.process_iter() if shows_own_numbers() else ():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.environ().get(TEMPORARY) == str(folder):
                process.kill()
                count += 1
    return count


if __name__ == "__main__":
    main(Path(sys.argv[1]))
