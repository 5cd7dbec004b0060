"""In: llm.c's checkout, sizes. Out: llm.c's programs for CPU and CUDA, built with its Makefile; their files.
Does not contain code of llm.c. The file formats follow llm.c's readers (train_gpt2.c, llmc/dataloader.h)."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from measure import SystemFailed
from systems import Started
from work import NUM_TOKENS, Work, random_tokens

HEADER_INTS = 256
DRIVERS = tuple(f"{folder}/libnvidia-ml.so.1" for folder in ("usr/lib/*-linux-gnu", "usr/lib64", "usr/local/nvidia/*"))
MODEL_MAGIC, MODEL_VERSION = 20240326, 3  # version 3: fp32, padded vocabulary
TOKENS_MAGIC, TOKENS_VERSION = 20240520, 1  # version 1: uint16
VOCAB_MULTIPLE = 128


def build(checkout: Path, folder: Path) -> Path:
    """Compile llm.c's unchanged train_gpt2.c and our main with llm.c's Makefile. Returns the path of the program.

    All files are written into `folder`, none into the checkout. Raises SystemFailed with the output of make.
    """
    driver = Path(__file__).with_name("llmc_step.c").read_text(encoding="utf-8")
    source = f'#define TESTING\n#include "{checkout / "train_gpt2.c"}"\n{driver}'
    (folder / "train_gpt2.c").write_text(source, encoding="utf-8")
    return _make(checkout, folder, "train_gpt2")


CUDA_13 = """#include <cuda_runtime.h>
#if CUDART_VERSION >= 13000  // it takes a place where llm.c gives the number of a device, or -1 for the host
static inline cudaError_t cudaMemAdvise(const void* memory, size_t bytes, cudaMemoryAdvise advice, int device) {
    cudaMemLocation place = {};
    place.type = device < 0 ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
    place.id = device < 0 ? 0 : device;
    return cudaMemAdvise(memory, bytes, advice, place);
}
#endif
"""
"""Before llm.c's source, which does not compile with CUDA 13 otherwise."""


def _make(
    checkout: Path, folder: Path, target: str, *variables: str, environment: Mapping[str, str] | None = None
) -> Path:
    command = ["make", "-f", str(checkout / "Makefile"), "NO_MULTI_GPU=1", *variables, target]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise SystemFailed(f"llm.c cannot be built: {error}") from error
    if done.returncode != 0:
        raise SystemFailed(f"llm.c cannot be built; the output of make is:\n{done.stdout}{done.stderr}")
    return folder / target


class OnCuda(Started):
    """llm.c's unchanged program for CUDA, in bf16. It takes no requests: each turn starts it anew.

    Its initial values are random ("d12": 12 layers of 768, vocabulary 50,257 padded to 50,304). It writes no files.
    """

    def __init__(self, checkout: Path, work: Work, warmup: int, folder: Path) -> None:
        super().__init__("llmc", [], os.environ, folder)
        self._checkout, self._work, self._warmup = checkout, work, warmup

    def start(self) -> None:
        """Build the program, write its tokens and take the warm-up steps once. Raises SystemFailed."""
        folder, work = self._folder / "llmc-cuda", self._work
        if (work.num_layers, work.hidden_dim, work.num_heads) != (12, 768, 12) or work.seq_len > 1024:
            raise SystemFailed("llmc: its random models have GPT-2's sizes and at most 1024 positions")
        folder.mkdir()
        self._env = with_libraries(self._env, sys.path, folder / "libraries")
        source = self._checkout / "train_gpt2.cu"
        (folder / source.name).write_text(f'{CUDA_13}#include "{source}"\n', encoding="utf-8")
        program = _make(self._checkout, folder, "train_gpt2cu", "PRECISION=BF16", environment=self._env)
        write_tokens(folder / "tokens.bin", random_tokens(50257, NUM_TOKENS))
        never = "1000000000"
        tokens = str(folder / "tokens.bin")
        self._argv = [
            str(program), "-i", tokens, "-j", tokens, "-e", "d12", "-b", str(work.batch_size), "-t", str(work.seq_len),
            "-l", "6e-4", "-c", "0.1", "-v", never, "-m", "1", "-s", "0", "-r", "0", "-x",
        ]  # fmt: skip
        self.turn(1)

    def turn(self, num_steps: int) -> float:
        """Warm-up steps, then `num_steps` that count. Returns the mean seconds of these, by the program's own clock."""
        first, self._argv = self._argv, [*self._argv, str(self._warmup + num_steps)]
        try:
            code = self._launch().wait()
        finally:
            self._argv = first
        if code != 0:
            raise self._failure()
        milliseconds = step_milliseconds(self._log.read_text(encoding="utf-8", errors="replace"))
        if len(milliseconds) != self._warmup + num_steps:
            raise SystemFailed(f"llmc: {len(milliseconds)} lines of steps, not {self._warmup + num_steps}")
        return sum(milliseconds[self._warmup :]) / num_steps / 1e3


def with_libraries(environment: Mapping[str, str], packages: Sequence[str], links: Path) -> dict[str, str]:
    """The environment in which nvcc and its programs find cuBLAS in the wheels that torch for CUDA brings along.

    nvcc is often installed without cuBLAS. The wheels have its headers, and libraries without the names that a linker
    looks for; so has the driver's libnvidia-ml.

    Args:
        environment: of this process.
        packages: folders with Python's packages.
        links: is made: a folder for links with the names that a linker looks for.
    """
    folders = [folder for path in packages for folder in Path(path).glob("nvidia/*") if folder.is_dir()]
    includes, libraries = (
        [one for folder in folders if (one := folder / name).is_dir()] for name in ("include", "lib")
    )
    links.mkdir()
    of_wheels = (file for folder in libraries for file in sorted(folder.glob("libcublas*.so.*")))
    for library in (*of_wheels, *(file for pattern in DRIVERS for file in Path("/").glob(pattern))):
        link = links / f"{library.name.partition('.so')[0]}.so"
        if not link.exists():
            link.symlink_to(library)
    added = {"CPATH": includes, "LIBRARY_PATH": [links, *libraries], "LD_LIBRARY_PATH": libraries}
    paths = {name: [*filter(None, [environment.get(name)]), *map(str, found)] for name, found in added.items()}
    return {**environment, **{name: os.pathsep.join(path) for name, path in paths.items() if path}}


def step_milliseconds(log: str) -> list[float]:
    """The time of each step, as llm.c's program for CUDA prints it."""
    return [float(found) for found in re.findall(r"^step +\d+/\d+ \|.*\| ([\d.]+) ms \|", log, re.MULTILINE)]


def command(program: Path, model: Path, tokens: Path, work: Work, warmup: int) -> list[str]:
    """The command line of the built program."""
    return [str(program), str(model), str(tokens), str(work.batch_size), str(work.seq_len), str(warmup)]


def environment(threads: int) -> dict[str, str]:
    """The environment of llm.c, which reads its number of threads from OpenMP's variable."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def write_tokens(path: Path, tokens: np.ndarray) -> None:
    """Write a token file in llm.c's format: a header of 256 int32 (only three are used), then uint16 tokens."""
    header = np.zeros(HEADER_INTS, dtype=np.int32)
    header[:3] = TOKENS_MAGIC, TOKENS_VERSION, len(tokens)
    with path.open("wb") as file:
        header.tofile(file)
        tokens.astype(np.uint16).tofile(file)


def write_model(path: Path, work: Work) -> None:
    """Write a model file in llm.c's format with GPT-2's initial values: a header of 256 int32, then fp32 tensors.

    The same tensor of all layers is stored together.
    """
    padded = math.ceil(work.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    header = np.zeros(HEADER_INTS, dtype=np.int32)
    header[:8] = (
        MODEL_MAGIC, MODEL_VERSION, work.max_seq_len, work.vocab_size,
        work.num_layers, work.num_heads, work.hidden_dim, padded,
    )  # fmt: skip
    random = np.random.default_rng(1337)
    with path.open("wb") as file:
        header.tofile(file)
        for numel, std, mean in _tensors(work, padded):
            values = random.standard_normal(numel, dtype=np.float32)
            values *= std
            values += mean
            values.tofile(file)


def _tensors(work: Work, padded: int) -> Iterator[tuple[int, float, float]]:
    """Number of elements, standard deviation and mean of the 16 tensors, in the file's order."""
    hidden, layers = work.hidden_dim, work.num_layers
    residual = 0.02 / math.sqrt(2 * layers)
    yield padded * hidden, 0.02, 0.0  # token embedding
    yield work.max_seq_len * hidden, 0.02, 0.0  # position embedding
    yield layers * hidden, 0.0, 1.0  # first norm: scale, shift
    yield layers * hidden, 0.0, 0.0
    yield layers * 3 * hidden * hidden, 0.02, 0.0  # query, key, value
    yield layers * 3 * hidden, 0.0, 0.0
    yield layers * hidden * hidden, residual, 0.0  # attention's output
    yield layers * hidden, 0.0, 0.0
    yield layers * hidden, 0.0, 1.0  # second norm
    yield layers * hidden, 0.0, 0.0
    yield layers * 4 * hidden * hidden, 0.02, 0.0  # up
    yield layers * 4 * hidden, 0.0, 0.0
    yield layers * 4 * hidden * hidden, residual, 0.0  # down
    yield layers * hidden, 0.0, 0.0
    yield hidden, 0.0, 1.0  # last norm
    yield hidden, 0.0, 0.0
