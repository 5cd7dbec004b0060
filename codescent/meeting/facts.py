"""In: this process, its backend and libraries. Out: what must be equal on all ranks beside their config.
Does not compare (compared.py does). Data and plan follow when they are known (train/open.py)."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from codescent.base.reading import read_bytes

KERNELS = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
"""Environment variables by which libraries choose kernels. The config's own choices are made by all ranks together."""


def facts_of_process(code: str, backend: str, libraries: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """By name in messages: the value on this rank.

    Args:
        code: digest of the sources of this package.
        backend: of the process groups.
        libraries: their versions, by name.
        env: environment variables.
    """
    return {
        "codescent": code,
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        **libraries,
        "backend": backend,
        **{name: env[name] for name in KERNELS if name in env},
        **_script(),
    }


def _script() -> dict[str, str]:
    """A digest of the script that this process runs, such as an own loop; none at a prompt, and of `codescent`."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None or Path(path).name == "codescent":
        return {}
    try:
        return {f"script {Path(path).name}": hashlib.sha256(read_bytes(path)).hexdigest()[:16]}
    except OSError:
        return {}
