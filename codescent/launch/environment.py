"""In: the environment variables of a launcher (see launchers.py, or our own). Out: the rank of this process.
Does not open connections and does not guess: an incomplete set of variables is an error."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.progress import PROGRESS_FD
from codescent.base.rank import AGENT_RUN, LOOPBACK, Rank
from codescent.launch.launchers import TORCHRUN, TORCHRUN_SET, Launcher, is_set, started_by
from codescent.launch.slurm_lists import counts, hosts

STORE_FD = "CODESCENT_STORE_FD"  # descriptor of the listening socket that local.py passes to rank 0
LATE = "CODESCENT_LATE"  # set by local.py for a process that it starts for a rank that has died
MOST_DIGITS, SHOWN = 9, 40  # of a number; characters of a wrong one that a message shows
PORTS = range(20_000, 30_000)  # computed from the job's name; above service ports, below ephemeral ports

MEANINGS: Mapping[str, str] = {
    "rank": "number of this process among all processes",
    "local_rank": "number of this process among the processes of its machine",
    "world_size": "number of all processes",
    "local_world_size": "number of processes on this machine",
    "node": "number of this machine among the machines of the step",
    "nodes": "number of machines",
    "MASTER_ADDR": "address of rank 0",
    "MASTER_PORT": "port of rank 0",
}
_ROLES = ("rank", "local_rank", "world_size", "local_world_size")  # fields of Launcher and of Rank


def read(env: Mapping[str, str]) -> Rank | None:
    """The rank of this process; None if no launcher started it.

    Raises UserError: variables are missing, malformed or contradict each other. It lists all of them.
    """
    launcher = started_by(env)
    return None if launcher is None else _LauncherVariables(env, launcher).place()


def ancestor(program: str) -> int | None:
    """Process id of the nearest ancestor that runs `program`; None if there is none, or no /proc."""
    number = os.getppid()
    while number > 1:
        try:
            stat = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if name == program:
            return number
        number = int(rest.split()[1])
    return None


class _LauncherVariables:
    """Reads the variables of one launcher and collects all problems."""

    def __init__(self, env: Mapping[str, str], launcher: Launcher) -> None:
        self._env, self._launcher = env, launcher
        self._numbers: dict[str, int] = {}  # by role
        self._names: dict[str, str] = {}  # role to the name of its variable
        self._index: int | None = None  # of this machine in a launcher's lists
        self._problems: list[str] = []

    def place(self) -> Rank:
        """Read all variables. Raises UserError with all problems."""
        launcher, numbers = self._launcher, self._numbers
        for role in _ROLES:
            self._read_role(role)
        world_size = numbers.get("world_size")
        one_machine = launcher.fills and world_size is not None and world_size == numbers.get("local_world_size")
        job = self._job(one_machine)
        address, port = self._address(one_machine), self._port(job)
        attempt = self._number(launcher.attempt, "") if launcher.attempt else None
        store_fd = self._number(STORE_FD, "") if launcher is TORCHRUN else None
        self._contradictions()
        if self._problems:
            raise UserError(*dict.fromkeys(self._problems))
        return Rank(
            **numbers,
            master_addr=address,
            master_port=port,
            attempt=attempt or 0,
            agent_store=launcher is TORCHRUN and self._text("TORCHELASTIC_USE_AGENT_STORE").lower() == "true",
            store_fd=store_fd,
            launcher=launcher.name,
            child=launcher is not TORCHRUN or any(is_set(self._env, name) for name in (AGENT_RUN, PROGRESS_FD)),
            late=launcher is TORCHRUN and is_set(self._env, LATE),
            job=job,
        )

    def _refuse(self, problem: str) -> None:
        self._problems.append(f"environment: {problem}")

    def _text(self, name: str) -> str:
        return self._env.get(name, "").strip()

    def _read_role(self, role: str) -> None:
        """Read the number of a role. A problem: no variable has it, or two variables differ."""
        names = tuple(dict.fromkeys((*getattr(self._launcher, role), *getattr(TORCHRUN, role))))
        given = [name for name in names if is_set(self._env, name)]
        if not given and role == "local_world_size" and self._launcher.nodes:
            self._read_machines(names[0])
            return
        if not given:
            self._missing(" or ".join(names), role)
        said = {name: number for name in given if (number := self._number(name, role)) is not None}
        if not said:
            return
        self._names[role] = first = next(iter(said))
        self._numbers[role] = said[first]
        for name, number in said.items():
            if number != said[first]:
                self._refuse(
                    f"{first} says {said[first]}, {name} says {number} ({MEANINGS[role]}); they come from "
                    f"different jobs, steps or launchers: unset the variables that this process's "
                    f"{self._launcher.name} did not set"
                )

    def _read_machines(self, name: str) -> None:
        """Derive the number of ranks on this machine, where the numbers of ranks and machines leave no choice.

        `name` is the variable that says it otherwise.
        """
        ranks, machines = self._numbers.get("world_size"), self._number(self._launcher.nodes, "nodes")
        if not is_set(self._env, self._launcher.nodes):
            self._missing(f"{self._launcher.nodes} or {name}", "nodes")
        elif machines and ranks and machines in (1, ranks):
            self._names["local_world_size"] = f"{self._names['world_size']} / {self._launcher.nodes}"
            self._numbers["local_world_size"] = ranks // machines
        elif machines is not None and ranks is not None:
            self._refuse(
                f"{name} ({MEANINGS['local_world_size']}) is not set, and {self._launcher.name} does not say how "
                f"{ranks} ranks are divided among {machines} machines; give every rank this number: "
                f"{self._launcher.hand_over}"
            )

    def _number(self, name: str, role: str) -> int | None:
        """The number in a variable; None if it is not set, or is not a number (a problem)."""
        text = self._text(name)
        if role == "local_world_size" and self._launcher.node and name in self._launcher.local_world_size:
            return self._in_list(name)
        if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS:
            return int(text)
        if text:
            shown = f"{text[:SHOWN]}{'...' * (len(text) > SHOWN)}"
            self._refuse(f'{name}: given "{shown}"; must be a whole number >= 0, of at most {MOST_DIGITS} digits')
        return None

    def _in_list(self, name: str) -> int | None:
        """The number of tasks on this machine, from a list with an entry per machine."""
        node = self._launcher.node
        try:
            tasks_per_node = counts(self._text(name))
        except ValueError as error:
            self._refuse(f'{name}: given "{self._text(name)}"; {error}')
            return None
        if self._index is None:
            if not is_set(self._env, node):
                self._missing(node, "node")
            self._index = self._number(node, "")
        if self._index is None:
            return None
        if self._index >= len(tasks_per_node):
            what = f'the number of machines in {name} ("{self._text(name)}")'
            self._refuse(f"{node} is {self._index}; must be below {len(tasks_per_node)}, {what}")
            return None
        return tasks_per_node[self._index]

    def _job(self, one_machine: bool) -> str:
        """An identifier of this start of the job, equal on all its ranks; "" without one."""
        launcher = self._launcher
        for names in launcher.job:
            if all(is_set(self._env, name) for name in names):
                return f"{launcher.name} {'.'.join(map(self._text, names))}"
        number = ancestor(launcher.proxy) if one_machine and launcher.proxy else None
        return "" if number is None else f"{launcher.proxy} {number}"

    def _address(self, one_machine: bool) -> str:
        """Address of rank 0: MASTER_ADDR, else loopback if there is one machine, else the first machine of a list."""
        if is_set(self._env, "MASTER_ADDR"):
            return self._text("MASTER_ADDR")
        if one_machine:
            return LOOPBACK
        for name in self._launcher.hosts:
            if is_set(self._env, name):
                try:
                    return hosts(self._text(name))[0]
                except ValueError as error:
                    self._refuse(f'{name}: given "{self._text(name)}"; {error}')
                    return ""
        if self._launcher.hosts:
            self._missing(" or ".join((*self._launcher.hosts, "MASTER_ADDR")), "MASTER_ADDR")
        elif not self._launcher.fills:
            self._missing("MASTER_ADDR", "MASTER_ADDR")
        elif {"world_size", "local_world_size"} <= self._numbers.keys():
            self._refuse(
                f"MASTER_ADDR ({MEANINGS['MASTER_ADDR']}) is not set, and {self._launcher.name} gives no address: only "
                f"{self._numbers['local_world_size']} of {self._numbers['world_size']} ranks are on this machine; give "
                f"every rank the name of the machine of rank 0: {self._launcher.hand_over}"
            )
        return ""

    def _port(self, job: str) -> int:
        """Port of rank 0: MASTER_PORT, else a hash of the job's identifier."""
        if is_set(self._env, "MASTER_PORT"):
            port = self._number("MASTER_PORT", "")
            if port is not None and not 0 < port < 2**16:
                self._refuse(f"MASTER_PORT is {port}; must be from 1 to 65535")
            return port or 0
        if job:
            return PORTS[zlib.crc32(job.encode()) % len(PORTS)]
        if not self._launcher.fills:
            self._missing("MASTER_PORT", "MASTER_PORT")
        else:
            of = " or ".join(".".join(names) for names in self._launcher.job)
            self._refuse(
                f"MASTER_PORT ({MEANINGS['MASTER_PORT']}) is not set, and the ranks of "
                f"{self._launcher.name} cannot compute a common one ({of} is not set); give every rank the same "
                f"free port of the machine of rank 0: {self._launcher.hand_over}"
            )
        return 0

    def _missing(self, names: str, role: str) -> None:
        launcher = self._launcher
        whole = f"a launcher such as torchrun sets all of {', '.join(TORCHRUN_SET)}"
        sets = whole if launcher is TORCHRUN else f"set by {launcher.name}"
        self._refuse(f"{names} ({MEANINGS[role]}) is not set, but {launcher.mark(self._env)} is; {sets}")

    def _contradictions(self) -> None:
        """Add a problem for each pair of numbers that is impossible together."""
        numbers, names = self._numbers, self._names
        for small, gap, large, why in (
            ("rank", 1, "world_size", ""),
            ("local_rank", 1, "local_world_size", ""),
            ("local_world_size", 0, "world_size", ""),
            ("local_rank", 0, "rank", ", since it counts the lower ranks of this machine"),
        ):
            if small in numbers and large in numbers and numbers[small] + gap > numbers[large]:
                limit = f"must be {'below' if gap else 'at most'} {names[large]} ({numbers[large]}){why}"
                self._refuse(f"{names[small]} is {numbers[small]}; {limit}")
