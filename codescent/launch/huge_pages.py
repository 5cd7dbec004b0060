"""In: environment variables. Out: a copy in which torch asks the kernel for huge pages for large tensors on a CPU.
Does not restart the process: torch reads the variable when it first allocates, so this comes before its import."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "THP_MEM_ALLOC_ENABLE"


def with_huge_pages(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` with huge pages (2 MiB on x86), unless the user has decided it.

    For one token a model reads all its matrices. With pages of 4 KiB the processor looks up each of them anew: products
    of a few tokens with matrices of 9 MB took 1.05 to 1.3 times as long (two cores with AMX). Training has them by
    glibc's tunables, after a restart (allocator.py).
    """
    return {VARIABLE: "1", **env}
