"""In: a folder with one wheel and one sdist. Out: whether people who install the wheel, and nothing else, can use it.
Does not build them and uploads nothing (`make release` calls this; docs/release.md has the rest)."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "plots,tensorboard,hub"
"""What the README shows; `make train` installs the same."""
STEPS = ("train.num_steps=20", "train.eval_every=10", "log.sample_tokens=0")
PNG = b"\x89PNG"


class Refused(Exception):
    """The wheel or the sdist is not what a user needs."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Install a wheel in an empty virtual environment and use it.")
    parser.add_argument("dist", type=Path, help="folder with the wheel and the sdist")
    dist = parser.parse_args(words).dist.resolve()
    try:
        wheel, sdist = only(dist, "*.whl"), only(dist, "*.tar.gz")
        check_files(wheel, sdist)
        with tempfile.TemporaryDirectory(prefix="codescent-release-") as folder:
            use(wheel, Path(folder))
    except Refused as problem:
        print(f"release: {problem}", file=sys.stderr)
        return 1
    print(f"release: {wheel.name} and {sdist.name} can be used")
    if not re.search(r"^Project-URL: ", metadata(wheel), re.MULTILINE):
        print("release: do not upload them yet: pyproject.toml names no public address (docs/release.md)")
    return 0


def only(folder: Path, pattern: str) -> Path:
    """The one file of a folder that matches."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise Refused(f"{folder} has {len(found)} files {pattern}; one is needed")
    return found[0]


def metadata(wheel: Path) -> str:
    """The text of METADATA, as an index reads it."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return file.read(name).decode()


def check_files(wheel: Path, sdist: Path) -> None:
    """The files of both are those of the repository, and the text for the index has no link into the repository."""
    with zipfile.ZipFile(wheel) as file:
        inside = set(file.namelist())
    needed = {
        "codescent/py.typed",
        *(f"codescent/{path.relative_to(ROOT)}" for path in (ROOT / "configs").glob("*.toml")),
        *(f"codescent/{path.relative_to(ROOT)}" for path in (ROOT / "studies").iterdir()),
        *(f"codescent/pages/{path.relative_to(ROOT)}" for path in (ROOT / "docs").rglob("*.md")),
    }
    refuse("the wheel lacks", needed - inside)
    refuse("the wheel has", {name for name in inside if not name.startswith(("codescent/", "codescent-"))})
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    refuse("the sdist lacks", {"Makefile", "constraints.txt", "README.md", "tests/conftest.py"} - sources)
    refuse("the sdist has", {name for name in sources if name.startswith((".git/", ".venv", "runs/", "datasets/"))})
    inner = re.findall(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)", metadata(wheel))
    refuse("the text for the index links to", inner)


def refuse(what: str, names: Iterable[str]) -> None:
    """Raise Refused if there are names."""
    if found := sorted(names):
        raise Refused(f"{what} {', '.join(found[:10])}{' ...' * (len(found) > 10)}")


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel, first alone and then with the extras of the README, and use it in an empty folder."""
    venv.create(folder / "venv", with_pip=True)
    user = User(folder / "venv/bin", folder / "empty")
    user.install("torch")
    user.install(str(wheel))
    said = user.run("codescent", "--version")
    if said.split()[1] != wheel.name.split("-")[1]:
        raise Refused(f"codescent --version says {said!r}, the wheel is {wheel.name}")
    user.run("codescent", "plan", "default", "--ranks", "4", "parallel.pp=4", "train.microbatch_size=2")
    user.run("codescent", "train", "default", "run.name=alone", *STEPS)
    lacking = user.run("codescent", "plot", "runs/alone", "--out", "a.png", code=2)
    if 'pip install "codescent[plots]"' not in lacking:
        raise Refused(f"without matplotlib `codescent plot` does not name the extra: {lacking}")
    check_pages(user)
    user.install(f"{wheel}[{EXTRAS}]")
    user.run("codescent", "train", "default", "run.name=two", "--ranks", "2", *STEPS)
    user.run("codescent", "plot", "runs/alone", "runs/two", "--out", "b.png")
    if not (user.folder / "b.png").read_bytes().startswith(PNG):
        raise Refused("b.png is no picture")
    if not list((user.folder / "runs/two/tensorboard").iterdir()):
        raise Refused("runs/two has no TensorBoard files")
    user.run("python", "-m", "pip", "check")


def check_pages(user: User) -> None:
    """Every page that a message of the installed package names is there."""
    package = Path(user.run("python", "-c", "import codescent; print(codescent.__path__[0])").strip())
    if user.bin.parent not in package.parents:
        raise Refused(f"codescent is imported from {package}, not from the virtual environment")
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    for name in sorted(set(re.findall(r"codescent docs ([a-z][\w/#-]*)", text))):
        user.run("codescent", "docs", name)


class User:
    """Somebody who has a virtual environment and an empty folder, and no checkout.

    Attributes:
        bin: programs of the virtual environment.
        folder: where they run.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self.bin, self.folder = programs, folder
        folder.mkdir()
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.env = {name: value for name, value in os.environ.items() if name not in hidden}
        self.env["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.env["XDG_CACHE_HOME"] = str(folder.parent / "cache")

    def install(self, what: str) -> None:
        """Install a package in the versions that the repository is tested with."""
        pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        self.run(*pip, "-c", str(ROOT / "constraints.txt"), what)

    def run(self, program: str, *words: str, code: int = 0) -> str:
        """Run a program; what it printed. Raises Refused: its exit code is another one."""
        print(f"release: $ {program} {' '.join(words)}", flush=True)
        done = subprocess.run(
            [self.bin / program, *words], cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        if done.returncode != code:
            raise Refused(f"{program} {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
