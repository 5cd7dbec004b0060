"""In: a method, hosts, a link. Out: what `codescent train` with a rank on each host recorded: seconds, losses, bytes.
Does not choose methods, keep results between sittings, or make tables."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hosts import Hosts, rank_environment
from measure import ROOT, SystemFailed
from work import GPT2_124M, codescent, environment, training

sys.path.insert(0, str(ROOT))

from codescent.build.saved import saved_plan
from codescent.cost.memory import wire_bytes
from codescent.plan import Plan
from codescent.record import RunFolder

PORT = 29_500
SEQ_LEN = 64
"""Tokens of each rank's one sample: a step's arithmetic is short beside a slow link."""

CHAR, GPT2 = "shakespeare_char_gpu", "gpt2-124m"
WORKS = (CHAR, GPT2)

WARMUP_SHARE = 20
"""Steps over those in which the learning rate rises: 100 of 2,000, as in the config."""

EXACT = "exact"
"""Kernels of fp32 products, `train.matmul`, where no other words are given."""

POLL_S = 0.2

Watch = Callable[[Sequence["subprocess.Popen[str]"], Sequence[Path]], None]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: of the row.
        overrides: key=value of `codescent train`; "{ranks}" is the number of ranks.
        family: the methods that fulfil a goal together; "ddp": none but DDP.
        period: steps after which all ranks have exchanged what they have; times are means over whole periods.
        repeatable: whether the same seed gives the same losses, whatever the link. Asynchronous methods do not.
        servers: further hosts, with a rank each that only serves.
        learns_as: the method whose weights this one has after each step, up to rounding: `codescent prove` shows it.
        least_steps: of a run for times. Where steps are short, a few of them are noise.
        end_steps: last ones of a run for times that do not count: all ranks wait for what is under way then.
    """

    name: str
    overrides: tuple[str, ...]
    family: str = "ddp"
    period: int = 1
    repeatable: bool = True
    servers: int = 0
    learns_as: str = ""
    least_steps: int = 0
    end_steps: int = 0


@dataclass(frozen=True)
class Case:
    """One run: everything that decides its losses, and its link. Its `key` does not depend on the code.

    Attributes:
        work: a name of WORKS.
        schedule_steps: steps of the learning rate's schedule, which a short run shares with the long one.
        steps: steps that are made.
        mbit: wanted payload of the link; None: the links are not shaped.
        round: number of the repetition, of runs whose times are wanted.
        validates: whether the loss over the whole validation split ends the run.
    """

    work: str
    method: Method
    hosts: int
    seed: int
    schedule_steps: int
    steps: int
    mbit: float | None = None
    round: int = 0
    validates: bool = False

    @property
    def key(self) -> str:
        """A hash of all that decides the numbers: not the names of methods and family."""
        fields = asdict(replace(self, method=replace(self.method, name="", family="")))
        del fields["method"]["learns_as"], fields["method"]["least_steps"], fields["method"]["end_steps"]
        if not self.method.servers:
            del fields["method"]["servers"]  # results of before there were servers stay valid
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def ranks(self) -> int:
        """Ranks that train, and those that only serve: a host each."""
        return self.hosts + self.method.servers

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return SEQ_LEN * self.hosts

    def words(self) -> str:
        """The case in words, for progress."""
        link = "not shaped" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        return f"{self.method.name}, {self.hosts} hosts, {link}, seed {self.seed}, {self.steps} steps"


@dataclass(frozen=True)
class Recorded:
    """What a run's folder says, and the counters of the interfaces.

    Attributes:
        seconds: of each step, by rank 0.
        exposed_s: of each step, that ranks waited for communication.
        losses: of each step.
        val_loss: the last one; None if the run does not validate.
        declared_bytes: bytes that a rank sends in a step, by the plan.
        sent_bytes: bytes with headers that the busiest host's link sent, over the steps; start and end included.
        wall_s: from the start of the processes to the end of the last.
        staleness: mean over the steps, of asynchronous methods; None: of others, and of runs recorded without it.
    """

    seconds: list[float]
    exposed_s: list[float]
    losses: list[float]
    val_loss: float | None
    declared_bytes: float
    sent_bytes: float
    wall_s: float
    staleness: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def whole_periods(values: Sequence[float], period: int) -> list[float]:
    """The mean of each whole period, without the first one.

    Raises:
        ValueError: there are fewer than two whole periods.
    """
    count = len(values) // period
    if count < 2:
        raise ValueError(f"{len(values)} steps are less than two periods of {period}")
    return [statistics.mean(values[at * period : (at + 1) * period]) for at in range(1, count)]


class Runner:
    """Starts ranks on hosts, one run after the other. Run folders and prepared data are in `folder`.

    Args:
        words: further key=value of each run.
        samples: of each rank in a step.
        watch: called again and again with the processes of the ranks, and the folder of each rank's run.

    Raises:
        SystemFailed: a rank ended with another code than 0; the message has the end of its output.
    """

    def __init__(
        self,
        folder: Path,
        data: Path | None,
        tokens: Path | None,
        words: Sequence[str] = (),
        watch: Watch | None = None,
        *,
        samples: int = 1,
    ) -> None:
        self._folder, self._tokens, self._words, self._samples = folder, tokens, words, samples
        self._watch: Watch = watch or (lambda started, runs: None)
        self._env = {**environment(), "OMP_NUM_THREADS": "1", "CODESCENT_TOKEN": secrets.token_hex(16)}
        self._env.pop("GLOO_SOCKET_IFNAME", None)  # of this machine: the hosts have interfaces of their own
        if data is not None:
            self._env["CODESCENT_DATA_DIR"] = str(data)

    def with_words(self, *words: str) -> Runner:
        """The same with further key=value of each run."""
        other = copy.copy(self)
        other._words = [*self._words, *words]
        return other

    def run(self, case: Case, hosts: Hosts) -> Recorded:
        """Run `codescent train` with a rank on each of the first `case.ranks` hosts."""
        with tempfile.TemporaryDirectory(prefix="run-", dir=self._folder) as made:
            run = Path(made) / "run"
            argv = self._argv(case, run, case.hosts)
            before = [hosts.sent_bytes(host) for host in range(case.ranks)]
            begin_s = time.monotonic()
            with ExitStack() as stack:
                started = []
                for rank in range(case.ranks):
                    log = stack.enter_context((Path(made) / f"rank{rank}.log").open("w", encoding="utf-8"))
                    env = rank_environment(self._env, rank, case.ranks, PORT)
                    started.append(hosts.start(rank, argv, env, Path(made), log))
                    stack.callback(_kill, started[-1])
                _wait(started, Path(made), case.words(), lambda: self._watch(started, [run] * case.ranks))
            wall_s = time.monotonic() - begin_s
            sent = max(hosts.sent_bytes(host) - at for host, at in enumerate(before))
            return _recorded(run, sent / case.steps, wall_s)

    def alone(self, case: Case, hosts: Hosts) -> list[Recorded]:
        """As many runs of one rank as the case has hosts, at the same time: a rank's work without a network."""
        with tempfile.TemporaryDirectory(prefix="alone-", dir=self._folder) as made, ExitStack() as stack:
            started, runs = [], []
            begin_s = time.monotonic()
            for rank in range(case.hosts):
                runs.append(Path(made) / f"run{rank}")
                log = stack.enter_context((Path(made) / f"rank{rank}.log").open("w", encoding="utf-8"))
                one = replace(case, method=replace(case.method, overrides=()), seed=case.seed + rank)
                started.append(hosts.start(rank, self._argv(one, runs[-1], 1), self._env, Path(made), log))
                stack.callback(_kill, started[-1])
            _wait(started, Path(made), f"without network, {case.hosts} ranks", lambda: self._watch(started, runs))
            return [_recorded(run, 0.0, time.monotonic() - begin_s) for run in runs]

    def coding(self, cases: Sequence[Case]) -> dict[str, list[float]]:
        """How fast the ranks of the cases code what they exchange, all of them at the same time: for each case by its
        key the means over ranks of `Coding.encode_s`, `decode_s` and `stream_s`."""
        plans = {case.key: self.plan(case).to_json() for case in cases}
        with tempfile.TemporaryDirectory(prefix="coding-", dir=self._folder) as made, ExitStack() as stack:
            path = Path(made) / "plans.json"
            path.write_text(json.dumps(plans), encoding="utf-8")
            argv = [sys.executable, str(Path(__file__).with_name("coding_rank.py")), str(path)]
            started = []
            for _ in range(cases[0].hosts):
                pipe = subprocess.PIPE
                started.append(subprocess.Popen(argv, env=self._env, cwd=made, stdin=pipe, stdout=pipe, text=True))
                stack.callback(_kill, started[-1])
            return coding_together(started, list(plans))

    def plan(self, case: Case) -> Plan:
        """The plan of a case, from `codescent plan`."""
        argv = self._argv(case, self._folder / "planned", case.hosts)
        at = argv.index("train")
        options = ["--ranks", str(case.ranks), "--json"]
        words = [word for word in argv[at + 1 :] if not word.startswith("run.folder=")]
        return Plan.from_json(json.loads(self._output([*argv[:at], "plan", *words, *options])))

    def prepare(self) -> None:
        """Prepare the corpus once, so that no run does."""
        if self._tokens is None:
            argv = codescent("data", "shakespeare", "--tokenizer", "char", "--folder", str(self._folder / "datasets"))
            self._output(argv)

    def _output(self, argv: Sequence[str]) -> str:
        """What a command prints."""
        done = subprocess.run(argv, env=self._env, cwd=self._folder, check=False, text=True, capture_output=True)
        if done.returncode != 0:
            said = (done.stdout + done.stderr)[-2000:]
            raise SystemFailed(f"{' '.join(argv)} ended with exit code {done.returncode}:\n{said}")
        return done.stdout

    def _argv(self, case: Case, run: Path, ranks: int) -> list[str]:
        """The command line of each rank."""
        overrides = [
            f"run.folder={run}", f"run.seed={case.seed}", f"data.folder={self._folder / 'datasets'}",
            f"data.seq_len={SEQ_LEN}", f"train.num_steps={case.steps}",
            f"train.global_batch_size={ranks * self._samples}",
            "train.precision=fp32", "train.compile=none", f"train.matmul={EXACT}", "train.num_threads=1",
            "train.check_every=0", f"train.eval_every={case.steps if case.validates else 0}",
            "model.dropout=0.0", f"optimizer.decay_steps={case.schedule_steps}",
            "checkpoint.every=0", "checkpoint.last=false", "log.metrics_every=1", "log.every=100",
            "parallel.timeout_s=3600",
            *self._words, *(word.format(ranks=ranks) for word in case.method.overrides),
        ]  # fmt: skip
        if case.validates:
            overrides.append("checkpoint.keep_best=false")
        if self._tokens is not None:
            return training(
                replace(GPT2_124M, batch_size=ranks * self._samples, seq_len=SEQ_LEN), self._tokens, run, *overrides
            )
        warmup = case.schedule_steps // WARMUP_SHARE
        return codescent("train", CHAR, f"optimizer.warmup_steps={warmup}", *overrides)


def coding_together(started: Sequence[subprocess.Popen[str]], keys: Sequence[str]) -> dict[str, list[float]]:
    """Have all processes of coding_rank.py measure one plan after the other, each at the same time. See Runner.coding.

    Raises SystemFailed: one of them ended.
    """
    found = {}
    for key in ("ready", *keys):
        for process in started:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: it does not answer
                print(key, file=process.stdin, flush=True)
        lines = [process.stdout.readline() if process.stdout is not None else "" for process in started]
        if not all(lines):
            raise SystemFailed("a rank that measures how fast it codes has ended")
        found[key] = [statistics.mean(values) for values in zip(*map(json.loads, lines), strict=True)]
    del found["ready"]
    return found


def _wait(started: Sequence[subprocess.Popen[str]], folder: Path, words: str, watch: Callable[[], None]) -> None:
    """Wait for all ranks, and watch; the first that fails ends the wait."""
    while True:
        watch()
        codes = [process.poll() for process in started]
        bad = next((rank for rank, code in enumerate(codes) if code), None)
        if bad is not None:
            output = (folder / f"rank{bad}.log").read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SystemFailed(f"{words}: rank {bad} ended with exit code {codes[bad]}:\n{output}")
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_S)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _recorded(run: Path, sent_bytes: float, wall_s: float) -> Recorded:
    folder = RunFolder.open(run)
    rows = folder.read_metrics()
    ages = [float(row["staleness_mean"]) for row in rows if row["staleness_mean"] is not None]
    values = [float(row["val_loss"]) for row in rows if row["val_loss"] is not None]
    return Recorded(
        seconds=[float(row["step_s"]) for row in rows],
        exposed_s=[float(row["exposed_comm_s"] or 0.0) for row in rows],
        losses=[float(row["train_loss"]) for row in rows],
        val_loss=values[-1] if values else None,
        declared_bytes=wire_bytes(saved_plan(folder)),
        sent_bytes=sent_bytes,
        wall_s=wall_s,
        staleness=statistics.mean(ages) if ages else None,
    )
