"""In: a site's devices, options and lines of bash, for a target. Out: what it would not take, or would be told twice.
Does not look at numbers of ranks and nodes (counts.py does)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from codescent.jobs.bash import wrong_bash
from codescent.jobs.site import ALL, KEYS, NONE, LoadedSite

ASKED = {"slurm": "--gpus-per-node={n}", "pbs": "ngpus={n}", "kubernetes": "nvidia.com/gpu: {n}", "torchx": "gpu={n}"}
"""How devices are often asked for."""
FORMS = {
    "slurm": re.compile(r"-\S.*"), "pbs": re.compile(r"[A-Za-z]\w*=\S*"), "kubernetes": re.compile(r"[\w./-]+: *\{n\}"),
}  # fmt: skip
"""What site.devices has to look like, by target. torchx reads only that devices are asked for."""
ASKING = (
    (r"--gpus(?:-per-\w+)?|-G", r".*"),
    (r"--gres|--tres-per-\w+", r"(?:.*,)?(?:gres[/:])?gpu(?:[:=,].*)?"),
    (r"-l", r"(?:.*[:,])?n?gpus=.*"),
)
"""Options that ask for devices: their names, and their values."""

NAME, FOLDER = "the name of the run", "the folder in which codescent launch was called"
LOG, AGAIN = "the log, which --follow reads", "site.requeues"
NODES = "--nodes and --devices of codescent launch"
SLURM: Mapping[str, str] = {
    "-J": NAME, "--job-name": NAME, "-D": FOLDER, "--chdir": FOLDER, "-o": LOG, "--output": LOG, "--open-mode": LOG,
    "--requeue": AGAIN, "--no-requeue": AGAIN, "--signal": "the seconds of the run's saves",
    "-t": "site.time", "--time": "site.time", "-A": "site.account", "--account": "site.account",
    "-p": "site.partition", "--partition": "site.partition", "-q": "site.qos", "--qos": "site.qos",
    "--mem": "site.memory", "-c": "site.cores", "--cpus-per-task": "site.cores", "--mail-user": "site.mail",
}  # fmt: skip
PBS: Mapping[str, str] = {
    "-N": NAME, "-j": LOG, "-k": LOG, "-o": LOG, "-r": AGAIN, "-A": "site.account", "-q": "site.partition",
    "-M": "site.mail", "-l select": NODES, "-l nodes": NODES, "-l place": NODES, "-l walltime": "site.time",
    "-l ncpus": "site.cores", "-l mem": "site.memory",
}  # fmt: skip
SET: Mapping[str, Mapping[str, str]] = {"slurm": SLURM, "pbs": PBS}
"""Options that the script sets, by target: from which key, or from what else."""
CHAIN: Mapping[str, str] = {"-d": "--times", "--dependency": "--times"}
"""Further ones of SLURM where jobs follow each other."""
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "slurm": dict.fromkeys(("-M", "--clusters"), "export SLURM_CLUSTERS instead, which --status reads, too"),
    "pbs": {"-v": "a job that goes on would not have these variables; export them by site.before instead"},
}
"""Options that only the first command would read, by target: what to do instead."""


def problems(name: str, loaded: LoadedSite, keys: frozenset[str], *, is_chain: bool) -> Iterator[str]:
    """What the scheduler of a target would not read as it is meant.

    Args:
        name: of the target.
        loaded: the site.
        keys: those that the target reads.
        is_chain: whether jobs follow each other.
    """
    site, devices = loaded.site, _named(loaded, "devices")
    if (form := FORMS.get(name)) and site.devices not in (None, NONE) and not form.fullmatch(str(site.devices)):
        yield f'{devices}: "{site.devices}" is not a form of {name}; write such as "{ASKED[name]}"'
    if site.memory == ALL and "memory" in keys and name != "slurm":
        yield f"{_named(loaded, 'memory')}: only SLURM gives all of a node for {ALL}; give a number and a unit"
    if "before" in keys and site.before and (said := wrong_bash(site.before)):
        yield f"{_named(loaded, 'before')}: bash does not take these lines: {said}; together they must be complete"
    of_devices = dict.fromkeys(_names(str(site.devices)) if name == "slurm" else (), "site.devices")
    for option in site.options if "options" in keys else ():
        given = f"{_named(loaded, 'options')[:-1]}: {option})"
        if any(map(_asks_for_devices, _options(option))):
            if site.devices == NONE:
                yield f"{devices}: ranks compute on CPUs, but {given} asks for devices; give one of them"
            elif site.devices is not None:
                yield f"{devices} and {given} both ask for devices; give one of them: site.devices"
            continue
        taken = {**of_devices, **SET[name], **(CHAIN if is_chain else {})}
        for word in _names(option):
            if word in taken:
                source = taken[word]
                instead = f"give {source} instead" if source in KEYS else "leave it out"
                yield f"{given}: the script sets {word}, by {source}; {instead}"
            elif word in ELSEWHERE[name]:
                yield f"{given}: {ELSEWHERE[name][word]}"


def _asks_for_devices(option: tuple[str, str]) -> bool:
    """Whether an option, a name with its value, asks for devices."""
    name, value = option
    return any(re.fullmatch(names, name) and re.fullmatch(values, value) for names, values in ASKING)


def _named(loaded: LoadedSite, key: str) -> str:
    """A key and where its value is from."""
    return f"site.{key} ({loaded.origins[f'site.{key}']})"


def _options(line: str) -> Iterator[tuple[str, str]]:
    """The options of a line, each with its value: "--gres=gpu:4", "--gres gpu:4", "-G 4" and "-G4"."""
    words = shlex.split(line)
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        takes = before.startswith("--") and "=" not in before and " " in word  # a value that looks like an option
        if word.startswith("-") and not takes:
            name, _, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
            yield name, value or after


def _names(line: str) -> Iterator[str]:
    """The names of the options in a line; of -l of PBS each resource: "-l select", "-l walltime"."""
    for name, value in _options(line):
        yield name
        if name == "-l":
            yield from (f"-l {one.partition('=')[0]}" for one in value.split(","))
