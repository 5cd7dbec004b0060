"""In: the syntax of the package. Out: whether files are opened by `base/writing.py` and `base/reading.py` alone.
Does not run anything: tests/test_planted.py tries what the two modules refuse."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache

from sources import sources

WRITES = frozenset(
    {
        *("write_text", "write_bytes", "touch", "mkdir", "makedirs", "unlink", "rmdir", "removedirs", "rmtree"),
        *(
            "rename",
            "renames",
            "symlink_to",
            "hardlink_to",
            "symlink",
            "link",
            "chmod",
            "chown",
            "copyfile",
            "copyfileobj",
        ),
        *("copy2", "copymode", "copytree", "mkfifo", "mknod", "mkstemp", "mkdtemp", "NamedTemporaryFile"),
        *("TemporaryDirectory", "TemporaryFile", "savez", "savez_compressed", "save_file", "savetxt", "tofile"),
        *("export_chrome_trace", "memmap", "SummaryWriter", "savefig", "extractall", "extract"),
    }
)
"""Methods and functions that write, whatever they are called on."""
OF_MODULES = {
    "os": {"replace", "remove", "truncate", "open"},
    "shutil": {"copy", "move"},
    "np": {"save"},
    "torch": {"save"},
}
READS = frozenset({"read_text", "read_bytes", "safe_open", "load_file", "fromfile", "loadtxt", "genfromtxt"})
READS_OF_MODULES = {"np": {"load"}, "torch": {"load"}, "json": {"load"}, "library": {"File"}, "tomllib": {"load"}}
ROOMS_OWN = {"base/writing.py", "base/reading.py"}

ALLOWED_TO_WRITE = {
    "base/memory_file.py": 1,  # a temporary file without a name, where the system has no memory of that kind
    "base/stacks.py": 1,  # a file of memory of another rank, known by its inode
    "base/cause.py": 1,  # the launcher's own word: a file that it has named and made
    "base/durable.py": 1,  # a folder is opened for fsync
    "base/output.py": 1,  # /dev/null
    "base/stopping.py": 1,  # the script's own word: a file that it has named and made
    "base/temporary_folder.py": 1,  # a folder that only the user may enter
    "base/token.py": 4,  # made with O_EXCL in a folder that only the user may enter
    "checkpoint/hold.py": 2,  # a lock: nothing is written
    "collectives/task.py": 2,
    "data/prepared.py": 1,  # a folder is opened for its lock, and never through a link
    "data/text/download.py": 2,  # made with O_EXCL and a random name, by tempfile
    "jobs/ready.py": 1,  # a lock is looked at: nothing is written
    "jobs/tested.py": 1,  # a temporary file that only the user may read
    "launch/once.py": 4,  # made with O_EXCL, opened through no link, and of this user alone
    "launch/hang_record.py": 1,  # a temporary folder that only the user may enter
    "launch/local.py": 1,  # files in a temporary folder that only the user may enter
    "measure/trial_runs.py": 1,  # a file in a temporary folder that only the user may enter
    "own/profile.py": 1,  # by the descriptor of a folder that only the user may enter
    "record/run_folder.py": 1,  # the folder is opened, to know it after a renaming
    "report/style.py": 1,  # into memory
    "tasks/tensors/prepare.py": 1,  # into an open file
    "train/profile.py": 1,  # by the descriptor of a folder that only the user may enter
    "verbs/cli.py": 1,  # /dev/null
    "verbs/report.py": 1,  # a folder that the user has named
}
"""Calls in each file that may write and are not in `base/writing.py`. A number may only fall."""

ALLOWED_TO_READ = {
    "base/code_digest.py": 1,  # the package itself
    "base/cores.py": 4,  # /sys and /proc, here and below
    "base/proc.py": 1,
    "collectives/task.py": 2,  # a temporary folder that only the user may enter
    "doctor/facts.py": 3,
    "doctor/pairs.py": 1,
    "huggingface/folder.py": 1,  # after refuse_unreadable, here and below
    "huggingface/merged.py": 1,
    "huggingface/peft_folder.py": 1,
    "huggingface/read.py": 1,
    "launch/environment.py": 1,
    "launch/memory_kills.py": 3,
    "launch/once.py": 1,
    "own/waits.py": 1,
    "launch/process_state.py": 1,
    "own/stopping.py": 1,
    "study/runner.py": 1,
    "tasks/conversations/chat_renderer.py": 1,
    "tasks/tensors/files.py": 1,  # after `Watched` has opened it, here and below
    "tasks/tensors/hdf5.py": 1,
    "tasks/tensors/prepare.py": 1,  # writes into an open file
    "meeting/clocks.py": 1,
    "train/pace.py": 1,
    "train/machine.py": 1,
    "train/memory.py": 1,
    "train/threads.py": 1,
}
"""Calls in each file that open a file for reading and are not in `base/reading.py`. A number may only fall."""


@cache
def _calls() -> list[tuple[str, ast.Call]]:
    names = {"open", "FileIO", "replace", *WRITES, *READS}.union(*OF_MODULES.values(), *READS_OF_MODULES.values())
    return [
        (file, node)
        for file, tree in sources(*(f"{name}(" for name in names))
        if file not in ROOMS_OWN
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def _name(call: ast.Call) -> tuple[str, str]:
    """What a call is called on, if that is a name, and the function."""
    if isinstance(call.func, ast.Attribute):
        return (call.func.value.id if isinstance(call.func.value, ast.Name) else "", call.func.attr)
    return "", call.func.id if isinstance(call.func, ast.Name) else ""


def _mode(call: ast.Call) -> str:
    """The mode of a call of open or FileIO, as far as it is written there."""
    texts = [one.value for one in [*call.args, *(keyword.value for keyword in call.keywords)] if _is_text(one)]
    return next((text for text in texts if text and set(text) <= set("rwaxbt+")), "r")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _opens(call: ast.Call) -> bool:
    """Whether a call is open(...), io.open, gzip.open, PATH.open(...) or FileIO(...), and of no class of ours."""
    on, name = _name(call)
    if name == "FileIO":
        return True
    of_open_file = any(keyword.arg == "fileobj" for keyword in call.keywords)
    if name != "open" or of_open_file or on in ("os", "webbrowser"):
        return False
    own = {"RunFolder", "StudyFolder", "task", "cls", "self", "ChatTemplate"}
    takes_path = isinstance(call.func, ast.Attribute) and not (call.args and not _is_text(call.args[0]))
    return on not in own and (takes_path or isinstance(call.func, ast.Name) or on in ("io", "gzip"))


def _found(kind: str) -> Iterator[tuple[str, int]]:
    for file, call in _calls():
        on, name = _name(call)
        if on == "writing":
            continue
        replaces = name == "replace" and on not in ("dataclasses",) and len(call.args) == 1 and not call.keywords
        writes = name in WRITES or name in OF_MODULES.get(on, ()) or replaces
        is_ours = isinstance(call.func, ast.Name) and name != "safe_open"  # imported from base/reading.py
        reads = (name in READS and not is_ours) or name in READS_OF_MODULES.get(on, ())
        if _opens(call):
            writes, reads = bool(set(_mode(call)) & set("wax+")), not set(_mode(call)) & set("wax+")
        if writes if kind == "write" else reads:
            yield file, call.lineno


def _compare(kind: str, allowed: dict[str, int], instead: str) -> None:
    found: dict[str, list[int]] = {}
    for file, line in _found(kind):
        found.setdefault(file, []).append(line)
    more = {file: lines for file, lines in found.items() if len(lines) > allowed.get(file, 0)}
    assert not more, f"{instead}: {more}"
    counts = Counter({file: len(lines) for file, lines in found.items()})
    fewer = {file: counts[file] for file, number in allowed.items() if counts[file] < number}
    assert not fewer, f"lower the numbers of the list: {fewer}"


def test_files_are_opened_for_writing_in_one_module() -> None:
    _compare("write", ALLOWED_TO_WRITE, "use codescent/base/writing.py or durable.py: a link may be there")


def test_files_are_opened_for_reading_in_one_module() -> None:
    _compare("read", ALLOWED_TO_READ, "use codescent/base/reading.py: a pipe, a device or an endless file may be there")
