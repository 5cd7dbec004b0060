"""In: containers/. Out: images that train, built by the tools that this machine has; without a tool a reason to skip.
Does not push an image, and builds nothing where the base image cannot be fetched."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from codescent.base.pages import pages_in

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ("train", "default", "train.num_steps=5", "train.eval_every=0", "log.sample_tokens=0")
FETCH_S = 300


def done(*words: str | Path, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)


def docker() -> str:
    """A program that builds Dockerfiles and fetches their base image. Skips the test if there is none."""
    tools = [tool for tool in ("docker", "podman") if shutil.which(tool) and done(tool, "info").returncode == 0]
    if not tools:
        pytest.skip("no docker or podman that works on this machine: the Dockerfile is not built")
    base = re.search(r"^FROM (\S+)$", (ROOT / "containers/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert base is not None
    fetch_or_skip(lambda: done(tools[0], "pull", base[1], timeout_s=FETCH_S), base[1])
    return tools[0]


def apptainer() -> str:
    """A program that builds Apptainer definitions. Skips the test if there is none."""
    tools = [tool for tool in ("apptainer", "singularity") if shutil.which(tool)]
    if not tools:
        pytest.skip("no apptainer or singularity on this machine: the definition is not built")
    return tools[0]


def fetch_or_skip(fetch: Callable[[], subprocess.CompletedProcess[str]], image: str) -> None:
    try:
        fetched = fetch().returncode == 0
    except subprocess.TimeoutExpired:
        fetched = False
    if not fetched:
        pytest.skip(f"the image {image} cannot be fetched on this machine")


@pytest.fixture
def image() -> Iterator[tuple[str, str]]:
    tool, name = docker(), "codescent-of-the-tests"
    built = done(tool, "build", "-f", "containers/Dockerfile", "-t", name, ".")
    assert built.returncode == 0, built.stdout + built.stderr
    yield tool, name
    done(tool, "rmi", "-f", name)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_image_of_the_dockerfile_trains(image: tuple[str, str], tmp_path: Path) -> None:
    """Fault: a file that the build needs is not copied, or a library that a run needs is not in the image."""
    tool, name = image
    ran = done(tool, "run", "--rm", "-v", f"{tmp_path}:/work", name, *TRAIN)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "runs/default/metrics.csv").is_file()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_image_of_apptainer_trains(tmp_path: Path) -> None:
    """Fault: as above; and %files of the definition lacks what the build of the package reads."""
    tool = apptainer()
    base = re.search(r"^From: (\S+)$", (ROOT / "containers/codescent.def").read_text(encoding="utf-8"), re.MULTILINE)
    assert base is not None
    pull = (tool, "pull", tmp_path / "base.sif", f"docker://{base[1]}")
    fetch_or_skip(lambda: done(*pull, timeout_s=FETCH_S), base[1])
    built = done(tool, "build", tmp_path / "codescent.sif", "containers/codescent.def")
    assert built.returncode == 0, built.stdout + built.stderr
    ran = done(tool, "run", "--pwd", tmp_path, "--bind", tmp_path, tmp_path / "codescent.sif", *TRAIN)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "runs/default/metrics.csv").is_file()


def copied(definition: str) -> Sequence[str]:
    """The paths that %files of an Apptainer definition copies."""
    return re.findall(
        r"^    (\S+) /opt/codescent/\1$", definition.partition("%files")[2].partition("%post")[0], re.MULTILINE
    )


def test_the_definition_of_apptainer_copies_what_the_build_reads() -> None:
    """Fault: a new page or folder is needed by the wheel, and the image cannot be built."""
    paths = copied((ROOT / "containers/codescent.def").read_text(encoding="utf-8"))
    needed = {path.relative_to(ROOT).parts[0] for path in pages_in(ROOT).values()}
    needed |= {"LICENSE", "pyproject.toml", "constraints.txt", "codescent", "configs", "studies", "release"}
    assert set(paths) == needed
