"""In: a site file and overrides. Out: what a cluster asks for, with the origin of each value; else one error.
Does not say which of it a target needs (targets.py does)."""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from codescent.base.errors import UserError
from codescent.base.secret import is_secret_name, warnings
from codescent.config.given import Given, Problem, read_override, wrong_values
from codescent.config.keys import Section, Text, TextOrPath, auto, key
from codescent.config.named_files import BASE, NamedFiles, TomlFile
from codescent.config.words import Key, key_of, toml_value
from codescent.jobs.device import device_of

SECTION = "site"
FOLDER = Path("sites")
"""A site NAME is the file NAME.toml in this folder, below the working directory."""
DEFAULT = "default"
ARE_WORDS = {"container", "launcher"}
"""Keys whose strings are the words of one command, and not lines."""
LIMIT = re.compile(r"(?:(\d{1,5})-)?(\d{1,7}):([0-5]\d):([0-5]\d)", re.ASCII)
NONE = "none"
"""Value of `devices`: ranks compute on CPUs."""
MEMORY = re.compile(r"([1-9]\d{0,11})([KMGT])", re.ASCII)
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
ALL = "0"
"""Value of `memory` with which SLURM gives all of a node."""


def _check_limit(value: str) -> str:
    if LIMIT.fullmatch(value) is None or not seconds_of(value):
        raise ValueError(
            "must be hours:minutes:seconds, such as 04:00:00, or days-hours:minutes:seconds, of at most 99999 days"
        )
    return value


def seconds_of(limit: str) -> int:
    """Seconds of a time limit that `Site` accepts."""
    found = LIMIT.fullmatch(limit)
    assert found is not None
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_devices(value: str) -> str:
    if value != NONE and value.count("{n}") != 1:
        raise ValueError(f'must have {{n}} in the place of their number, once; "{NONE}": ranks compute on CPUs')
    _check_quotes(value)
    return value


def _check_device_type(value: str) -> str:
    device_of(value)
    return value


def _check_memory(value: str) -> str:
    if value != ALL and MEMORY.fullmatch(value) is None:
        raise ValueError(f"must be a whole number and K, M, G or T, such as 64G; {ALL}: all of a node of SLURM")
    return value


def memory_bytes(memory: str) -> int:
    """Bytes of a value of `memory`. Its units are powers of 1024, as SLURM and PBS count. ALL has no bytes: 0."""
    found = MEMORY.fullmatch(memory)
    return 0 if found is None else int(found[1]) * UNITS[found[2]]


def _check_volume(value: str) -> str:
    claim, _, mounted = value.partition(":")
    if not claim or not mounted.startswith("/"):
        raise ValueError('must be the name of a claim and the folder where it is mounted, such as "data:/workspace"')
    return value


def _check_options(lines: list[str]) -> list[str]:
    for line in _check_lines(lines):
        _check_quotes(line)
        if not line.startswith("-"):
            raise ValueError(f'must be options, which begin with "-": {line}')
    return lines


def _check_quotes(line: str) -> None:
    try:
        shlex.split(line)
    except ValueError as error:
        raise ValueError(f"quotes must be closed: {line}") from error


def _check_lines(lines: list[str]) -> list[str]:
    for line in lines:
        if not line.strip() or not line.isprintable():
            raise ValueError("each string must be one line of printable text")
    return lines


Limit = Annotated[str, AfterValidator(_check_limit)]
Devices = Annotated[Text, AfterValidator(_check_devices)]
DeviceType = Annotated[str, AfterValidator(_check_device_type)]
Memory = Annotated[str, AfterValidator(_check_memory)]
Volume = Annotated[Text, AfterValidator(_check_volume)]
Lines = Annotated[list[str], AfterValidator(_check_lines)]
Options = Annotated[list[str], AfterValidator(_check_options)]


class Site(Section):
    """A cluster: how a job is asked for, and what has to come before its command."""

    account: Text | None = auto("project that pays for the job")
    partition: Text | None = auto("partition of SLURM, or queue of PBS")
    qos: Text | None = auto("quality of service of SLURM")
    time: Limit | None = auto("time limit of a job, such as 04:00:00 or 1-12:00:00")
    memory: Memory | None = auto("memory of a node, such as 64G, in units of 1024; 0: all of it (SLURM)")
    cores: int | None = auto("cores of each rank", ge=1)
    devices: Devices | None = auto(
        "how the scheduler is asked for the devices of a node, with {n} for their number, such as "
        '"--gpus-per-node={n}", "ngpus={n}" or "nvidia.com/gpu: {n}"; "none": ranks compute on CPUs'
    )
    device_type: DeviceType | None = auto(
        'device of a node, such as "A100-80GB", or its memory, such as "80GB": what cannot fit is refused before'
    )
    node_devices: int | None = auto("devices of a node: more ranks on it are refused before", ge=1)
    options: Options = key([], 'further options of the scheduler, such as ["--constraint=a100"]')
    mail: Text | None = auto("address to which the scheduler writes when a job begins, ends or fails")
    modules: Lines = key([], 'modules to load, such as ["cuda/12.4"]')
    before: Lines = key([], "lines of bash before the command")
    environment: TextOrPath | None = auto("virtual environment in which codescent is installed; none: no line for it")
    container: Lines = key([], "words before the command of each rank, which run it in a container")
    interface: Text | None = auto("network interface by which the ranks reach each other")
    binding: Literal["none", "cores"] = key("none", "cores: each rank has cores of its own")
    scratch: TextOrPath | None = auto("fast local folder of each node for temporary files (TMPDIR)")
    mpi: Literal["openmpi", "mpich", "intelmpi"] | None = auto("which mpirun the site has")
    launcher: Lines = key([], "further options of srun, mpirun, mpiexec or torchrun")
    requeues: int = key(20, "how often a job that was saved before its limit is started again", ge=0)
    image: Text | None = auto("container image of Kubernetes and torchx")
    volume: Volume | None = auto('volume claim of Kubernetes and where it is mounted, such as "data:/workspace"')


def asked_devices(site: Site, count: int) -> str:
    """How the scheduler is asked for so many devices of a node; empty: ranks compute on CPUs."""
    return "" if site.devices in (None, NONE) else site.devices.replace("{n}", str(count))


KEYS: Mapping[str, Key] = {
    f"{SECTION}.{name}": key_of(SECTION, name, field) for name, field in Site.model_fields.items()
}
"""All keys by "site.key", in order."""


def keys_markdown() -> str:
    """All keys as a table of Markdown."""
    rows = [f"| `{key.name}` | {key.wanted} | `{key.default}` | {key.description} |" for key in KEYS.values()]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])


@dataclass(frozen=True)
class LoadedSite:
    """A site, and the origin of each "site.key": "default", "FILE:LINE" or "command line"."""

    site: Site
    origins: Mapping[str, str]

    def given(self) -> list[str]:
        """The names of the keys that somebody gave, without "site."."""
        return [name for name in Site.model_fields if self.origins[f"{SECTION}.{name}"] != DEFAULT]

    def secrets(self) -> Iterator[str]:
        """A sentence for each value that looks like a secret."""
        values = {name: getattr(self.site, name) for name in self.given()}
        texts = {
            name: (" " if name in ARE_WORDS else "\n").join(value) if isinstance(value, list) else str(value)
            for name, value in values.items()
        }
        where = ((f"{self.origins[f'{SECTION}.{name}']}: {SECTION}.{name}", text) for name, text in texts.items())
        return warnings(where, "scripts and site files are")

    def rows(self) -> list[tuple[str, str, str]]:
        """Each key with its value as TOML and its origin."""
        return [(name, toml_value(getattr(self.site, of.name)), self.origins[name]) for name, of in KEYS.items()]


def load_site(name: str | None, overrides: Sequence[str] = ()) -> LoadedSite:
    """Read a site file and overrides of the form site.key=value. The last one wins.

    Args:
        name: of a site, which is sites/NAME.toml, or the path of a file: its keys are at the top, or in [site], where
            other sections are not read. It may stand on another one (`base`). None: no file.
        overrides: a value is TOML; a string needs no quotes.

    Raises:
        UserError: all problems of the file and the overrides, each with its origin and the correct form.
    """
    problems: list[Problem] = []
    given: dict[str, Given] = {}
    for file in SITES.read(name, problems) if name is not None else ():
        given |= dict(_values(file, problems))
    for override in overrides:
        given |= read_override(override, _key_of, "site.time=04:00:00", problems)
    values = {full.removeprefix(f"{SECTION}."): one.value for full, one in given.items()}
    wrong = wrong_values(Site, values, lambda key: KEYS[f"{SECTION}.{key}"])
    problems += [Problem(given[f"{SECTION}.{key}"].origin, f"{SECTION}.{key}", text) for key, text in wrong.items()]
    if problems:
        raise UserError(*dict.fromkeys(map(str, problems)))
    origins = {full: given[full].origin if full in given else DEFAULT for full in KEYS}
    return LoadedSite(Site.model_validate(values), origins)


def _sites() -> Mapping[str, Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))} if FOLDER.is_dir() else {}


def _others() -> str:
    if names := _sites():
        return f"the sites in {FOLDER}/ are {', '.join(names)}"
    return f"write {FOLDER}/NAME.toml (its keys: codescent docs sites), or give the path of a file"


SITES = NamedFiles(_sites, _others, option="--site", are_shipped=False)


def _values(file: TomlFile, problems: list[Problem]) -> Iterator[tuple[str, Given]]:
    """The values of a site file by "site.key". All others are added to `problems`."""
    table = file.table
    within = isinstance(table.get(SECTION), dict)
    if not within and (sections := [f"[{name}]" for name, value in table.items() if isinstance(value, dict)]):
        what = f"has {', '.join(sections)}, and no section [{SECTION}]; give the file of a site"
        problems.append(Problem(file.origin(), "", what))
        return
    for name in [name for name, value in table.items() if within and not isinstance(value, dict)]:
        what = f"stands above all sections, where nothing is read; move it into [{SECTION}]"
        problems.append(Problem(file.origin(name), name, what))
    for name, value in (table[SECTION] if within else table).items():
        full = f"{SECTION}.{name}"
        origin = file.origin(SECTION, name) if within else file.origin(name)
        if full in KEYS:
            yield full, Given(value, origin)
        else:
            above = f"stands in a section; write it above [{SECTION}]"
            problems.append(Problem(origin, full, above if name == BASE else _unknown(name)))


def _key_of(name: str) -> Key | str:
    return KEYS.get(name) or _unknown(name.removeprefix(f"{SECTION}."))


def _unknown(name: str) -> str:
    if is_secret_name(name):
        return "a site file is read by many: it has no secrets; export a variable where you start the command"
    near = difflib.get_close_matches(name.lower().replace("-", "_"), Site.model_fields, n=1)
    hint = f"did you mean {SECTION}.{near[0]}?" if near else f"the keys are {', '.join(Site.model_fields)}"
    return f"unknown key of a site; {hint}"


def in_environment(loaded: LoadedSite) -> Site:
    """The site, with the environment of this command where it names none: a virtual one, or one of conda."""
    is_own = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    if loaded.site.environment is not None or not is_own:
        return loaded.site
    return loaded.site.model_copy(update={"environment": sys.prefix})
