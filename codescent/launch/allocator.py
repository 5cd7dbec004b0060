"""In: the environment. Out: one in which glibc's malloc keeps big blocks for the next step, and whether that is new.
Does not restart the process: tunables are read when a process starts, so the command line does, once."""

from __future__ import annotations

import os
from collections.abc import Mapping

MARKER = "CODESCENT_ALLOCATOR"
"""Set in an environment that was tuned, so that a process is restarted at most once."""

TUNABLES: Mapping[str, str] = {
    "glibc.malloc.mmap_max": "0",  # freed big blocks go back to the heap, not to the kernel: no page faults
    "glibc.malloc.trim_threshold": str(16 * 2**30),  # and the heap's end stays, too
    "glibc.malloc.top_pad": str(256 * 2**20),  # the heap grows in large pieces
    "glibc.malloc.hugetlb": "1",  # of huge pages: fewer entries in the translation cache
}
"""Worth 1.16 times the tokens per second on GPT-2 124M in bf16 (two cores, 4 x 64 tokens); docs/launch.md."""


def tuned_environment(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` with GLIBC_TUNABLES for training; tunables that the user has set stay as they are.

    Equal to `env` where glibc's malloc is not what allocates: not Linux, another libc, an allocator preloaded.
    """
    tuned = dict(env)
    if not _is_glibc() or "malloc" in env.get("LD_PRELOAD", ""):
        return tuned
    own = env.get("GLIBC_TUNABLES", "")
    set_already = {part.partition("=")[0] for part in own.split(":")}
    added = [f"{name}={value}" for name, value in TUNABLES.items() if name not in set_already]
    tuned["GLIBC_TUNABLES"] = ":".join([*([own] if own else []), *added])
    tuned[MARKER] = "tuned"
    return tuned


def needs_restart(env: Mapping[str, str]) -> bool:
    """Whether a process that started with `env` gains by starting again with `tuned_environment(env)`."""
    return MARKER not in env and tuned_environment(env).get("GLIBC_TUNABLES", "") != env.get("GLIBC_TUNABLES", "")


def _is_glibc() -> bool:
    name = "CS_GNU_LIBC_VERSION"
    if name not in os.confstr_names:
        return False
    try:
        return (os.confstr(name) or "").startswith("glibc")
    except (OSError, ValueError):  # musl knows the name of the question, not the answer
        return False
