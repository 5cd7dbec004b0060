"""In: configs, sites and nodes that cannot work together, runs that have begun, full disks, schedulers that refuse.
Out: `codescent launch` says so before, with what would do, in one message; it submits and writes nothing.
Does not ask a real scheduler: programs with the names of its commands answer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disks import small_disk
from forker import Forker
from runs import called, make_project

from codescent.build import saved_plan
from codescent.config.load import load
from codescent.jobs import checks, room
from codescent.jobs.device import device_of
from codescent.jobs.submitted import keep, new_folder
from codescent.record import RunFolder

GPT2 = ("gpt2_124m", "data.corpus=corpus.txt")
TINY = ("run.toml", "run.name=tiny")
SLURM = ("--to", "slurm", "--nodes", "1", "--devices", "2", "site.time=04:00:00")
CPU, GPU = "site.devices=none", "site.devices=--gpus-per-node={n}"
MPI = ("--to", "mpirun", "--hosts", "node1:2,node2:2", "site.mpi=openmpi")
SBATCH = """#!/bin/bash
echo "$@" >> sbatch.log
if [ "$1" = --test-only ]; then echo "$TEST_SAID" >&2; exit "${TEST_CODE:-0}"; fi
echo 17
"""
SINFO = """#!/bin/bash
echo "long|7-00:00:00"
echo "short*|4:00:00"
"""
SQUEUE = """#!/bin/bash
echo "${QUEUE_SAYS}"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny config, its corpus, and a scheduler that notes what it is asked."""
    make_project(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("sinfo", SINFO), ("qsub", SBATCH)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CODESCENT_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return called(folder, "launch", *words)


def refused(folder: Path, *words: str) -> list[str]:
    """The problems that `codescent launch` names. Nothing is printed, submitted or written."""
    log = folder / "sbatch.log"

    def found() -> list[Path]:
        """Without the user's cache: it gets the hashes of files that have not changed for two seconds."""
        others = (path for path in folder.rglob("*") if folder / "cache" not in (path, *path.parents))
        return sorted(path for path in others if path != log)

    before = found()
    done = launch(folder, *words)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert not log.exists() or all(line.startswith("--test-only") for line in log.read_text().splitlines())
    assert found() == before
    lines = done.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines), lines
    return [line.removeprefix("error: ") for line in lines]


def notes(folder: Path, *words: str) -> list[str]:
    """What is said beside a script that is printed."""
    done = launch(folder, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n")
    return done.stderr.splitlines()


@pytest.fixture
def prepared(project: Path) -> Path:
    """The project with its corpus prepared, as for the run `tiny`."""
    done = called(project, "data", "corpus.txt", "--tokenizer", "byte", "--validation-fraction", "0.1")
    assert done.returncode == 0, done.stderr
    return project


# numbers that contradict each other


def test_twelve_ranks_on_four_devices_and_forty_accumulations(project: Path) -> None:
    """A notebook of a course: nproc_per_node=12 on nodes of four devices, batch 64, 40 accumulations: 40 % 12 = 4."""
    batch = ["train.microbatch_size=64", "train.global_batch_size=2560"]
    node = ["--to", "torchrun", "--devices", "12", "site.node_devices=4"]
    assert refused(project, *GPT2, *batch, *node) == [
        "--devices 12: a node has 4 devices (site.node_devices), one for each rank; give --devices 4, or --hosts "
        "node1:4,node2:4,node3:4 for 12 ranks",
        "train.global_batch_size = 2560 does not divide into 12 data-parallel ranks; nearest that would do: "
        "train.global_batch_size = 2304 or 3072, or 10 or 20 ranks",
    ]
    # what it says would do
    hosts = ["--to", "torchrun", "--hosts", "node1:4,node2:4,node3:4", "site.node_devices=4"]
    assert launch(project, *GPT2, *batch[:1], "train.global_batch_size=3072", *hosts).returncode == 0
    (problem, _) = refused(project, *GPT2, *batch, *SLURM[:4], "--devices", "12", "site.node_devices=4", GPU, SLURM[-1])
    assert problem.endswith("give --devices 4, or --nodes 3 --devices 4 for 12 ranks")
    (problem, _) = refused(project, *GPT2, *batch, "--to", "local", "--devices", "12", "site.node_devices=4")
    assert problem.endswith("give --devices 4")
    more = [*GPT2, *batch[:1], "--to", "slurm", "--nodes", "3", "--devices", "4", "site.node_devices=4", GPU]
    assert notes(project, *more, "train.global_batch_size=3072", "site.time=04:00:00")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (['site.launcher=["-np", "2"]'], "site.launcher: -np 2"),
        (['site.launcher=["-np=2"]'], "site.launcher: -np 2"),
        (['site.launcher=["-n2"]'], "site.launcher: -n 2"),
        (["parallel.ranks=2"], "parallel.ranks=2"),
        (["parallel.ranks = 2"], "parallel.ranks = 2"),
    ],
)
def test_two_ranks_on_four_slots(project: Path, words: list[str], where: str) -> None:
    """A script of a course had `-np 2` on node1:2,node2:2, which starts two ranks, not four."""
    assert refused(project, *TINY, *MPI, *words) == [
        f"{where}: the script starts a rank on each slot of node1:2,node2:2, which is 4 ranks; leave it out; for "
        "2 ranks: --hosts node1:1,node2:1"
    ]


def test_options_that_say_the_ranks_again(project: Path) -> None:
    site = ['site.launcher=["--ntasks=3", "--cpu-bind=none"]', 'site.options=["--nodes=2", "--exclusive"]']
    assert refused(project, *TINY, *SLURM, CPU, *site) == [
        "site.launcher: --ntasks 3: the script starts 2 ranks: 1 node with 2 each; leave it out",
        "site.options: --nodes 2: the script starts 2 ranks: 1 node with 2 each; leave it out",
    ]
    site = ['site.options=["--exclusive --nodes=2 -n 4"]']
    assert [problem.partition(": the")[0] for problem in refused(project, *TINY, *SLURM, CPU, *site)] == [
        "site.options: --nodes 2", "site.options: -n 4",
    ]  # fmt: skip
    (problem,) = refused(project, *TINY, *MPI, 'site.launcher=["--host", "c:8"]')
    assert problem.startswith("site.launcher: --host c:8: the script starts a rank on each slot of node1:2,node2:2")
    (problem,) = refused(project, *TINY, *SLURM, CPU, 'site.launcher=["-n", "1"]')
    assert problem.endswith("leave it out; for 1 rank: --nodes 1 --devices 1")


def test_ranks_of_the_file_are_not_read(project: Path) -> None:
    with (project / "run.toml").open("a") as file:
        file.write("\n[parallel]\nranks = 3\n")
    said = "parallel.ranks = 3 is not read here: the script starts 2 ranks: 1 node with 2 each"
    assert said in notes(project, *TINY, *SLURM, CPU)


def test_an_elastic_job_is_looked_at_with_each_number_of_nodes(project: Path) -> None:
    elastic = ["--to", "torchrun", "--nodes", "1:3", "--devices", "2", "--hosts", "a", "train.global_batch_size=8"]
    (problem,) = refused(project, *TINY, *elastic)
    assert problem.startswith("on 6 ranks: train.global_batch_size = 8 does not divide into 6 data-parallel ranks")


def test_many_numbers_of_nodes_are_looked_at_in_some_places(project: Path) -> None:
    elastic = ["--to", "torchrun", "--devices", "1", "--hosts", "a"]
    first, _, third, more = refused(project, *TINY, *elastic, "--nodes", "1:100000")
    assert first.startswith("on 100,000 ranks: train.global_batch_size = 8 does not divide")
    assert third.startswith("on 93,549 ranks: ")
    assert more == "28 more of 32 numbers of ranks do not fit"
    (project / "own.py").write_text("")
    assert launch(project, "own.py", *elastic, "--nodes", "1:100000").returncode == 0
    assert checks._some(range(5)) == [0, 1, 2, 3, 4]
    some = checks._some(range(100))
    assert (some[0], some[-1], len(set(some))) == (0, 99, checks.MOST_LOOKED)


# the site's devices


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("A100", 'given "A100"; has 40 GB or 80 GB: say which, such as "A100-80GB"'),
        ("A10O", 'did you mean "A10"?'),
        ("ngpus={n}", "how devices are asked for is site.devices"),
        ("-1GB", "must be a device of the table"),
    ],
)
def test_a_device_that_is_not_known(project: Path, value: str, said: str) -> None:
    (problem,) = refused(project, *TINY, *SLURM, CPU, f"site.device_type={value}")
    assert problem.startswith("command line: site.device_type: given")
    assert said in problem


def test_devices_by_name_and_by_memory() -> None:
    assert device_of("A100-80GB").memory_bytes == 80 * 2**30
    assert device_of("nvidia h100 sxm5").peak_flops_per_s("bf16") == 989.4e12
    assert device_of("V100-SXM2-32GB").peak_flops_per_s("bf16") is None  # no such products in hardware
    assert device_of("A30").peak_flops_per_s("fp32") == 82e12  # a run may use tf32
    size = device_of("80GB")
    assert (size.memory_bytes, size.peak_flops_per_s("bf16")) == (80 * 10**9, None)


def test_what_does_not_fit_in_the_device_is_refused_with_what_does(project: Path) -> None:
    words = [*GPT2, "model.preset=gpt2-xl", "train.global_batch_size=4", "train.microbatch_size=2", *SLURM, GPU]
    (problem,) = refused(project, *words, "site.device_type=18GB")
    assert problem.startswith(
        "rank 0 of 2: weights, gradients and optimizer state (23.21 GiB) and activations take 25.51 GiB, "
    )
    assert "but 18GB (site.device_type) has at most 16.76 GiB; nearest that would do: " in problem
    first = problem.partition("nearest that would do: ")[2].partition(" (")[0]
    keys = [part.replace(" = ", "=").replace('"', "") for part in first.split(" and ")]
    assert notes(project, *words, "site.device_type=18GB", *keys)
    assert notes(project, *words, "site.device_type=A100-40GB")


def test_activations_that_are_needed_at_least_are_counted(project: Path) -> None:
    words = [*GPT2, "train.global_batch_size=512", "train.microbatch_size=128", *SLURM, GPU]
    (problem,) = refused(project, *words, "site.device_type=5GB")
    assert problem.startswith("rank 0 of 2: weights, gradients and optimizer state (2.32 GiB) and activations take ")
    assert "nearest that would do: train.microbatch_size = " in problem
    assert notes(project, *words, "site.device_type=5GB", "train.microbatch_size=4")


def test_ranks_on_cpus_share_the_memory_of_a_node(project: Path) -> None:
    words = [*GPT2, *SLURM, CPU, "site.device_type=T4"]  # there is no device, whatever its type
    (problem,) = refused(project, *words, "site.memory=4G")
    assert problem == (
        "weights, gradients and optimizer state of 2 ranks of a node take 4.64 GiB, but site.memory = 4G: ask for "
        "more, at most 1 rank on a node, or divide the model (parallel.dp_shard, tp, pp)"
    )
    assert notes(project, *words, "site.memory=8G")
    assert notes(project, *words, "site.memory=0")  # all of the node


def test_the_fullest_host_must_have_the_memory(project: Path) -> None:
    words = [*GPT2, CPU, "--to", "ssh", "site.memory=3G", "train.global_batch_size=12", "train.microbatch_size=3"]
    assert notes(project, *words, "--hosts", "node1:1,node2:1")
    (problem,) = refused(project, *words, "--hosts", "node1:1,node2:3")
    assert "of 3 ranks of a node take " in problem


# the data


def test_data_that_is_not_there(project: Path) -> None:
    (project / "corpus.txt").unlink()
    said = "data.corpus: corpus.txt: no such file"
    assert refused(project, *TINY, *SLURM, CPU, "--submit") == [said]
    assert said in notes(project, *TINY, *SLURM, CPU)  # it may come before the script starts
    assert refused(project, *TINY, "data.corpus=texts", *SLURM, CPU, "--submit") == [
        "data.corpus: texts: no such file or folder"
    ]


def test_a_tokenizer_that_the_plan_does_not_need_may_be_on_the_other_machine(project: Path) -> None:
    words = [*TINY, "data.tokenizer=elsewhere/tokenizer.json", "model.vocab_size=512", *SLURM, CPU]
    said = "data.tokenizer: elsewhere/tokenizer.json: no such file"
    assert said in notes(project, *words)
    assert refused(project, *words, "--submit") == [said]


def test_data_that_must_be_downloaded_is_prepared_before(project: Path) -> None:
    words = ["gpt2_124m", "data.corpus=openwebtext", "data.folder=a b", *SLURM, GPU, "--submit"]
    assert refused(project, *words) == [
        "data.corpus = openwebtext: is not prepared, and openwebtext/openwebtext.tar.xz, gpt2/encoder.json, "
        "gpt2/vocab.bpe have to be downloaded, which nodes without internet cannot; prepare it here: codescent data "
        "openwebtext --tokenizer gpt2 --folder 'a b' --validation-fraction 0.0005"
    ]


def test_data_of_this_machine_may_be_prepared_by_the_job(project: Path) -> None:
    command = "codescent data corpus.txt --tokenizer byte --folder datasets --validation-fraction 0.1"
    said = (
        "data.corpus = corpus.txt: is not prepared: the job would do it first, in its own time; prepare it here: "
        f"{command}"
    )
    assert said in notes(project, *TINY, *SLURM, CPU)
    assert called(project, *command.split()[1:]).returncode == 0
    assert not any("not prepared" in line for line in notes(project, *TINY, *SLURM, CPU))


def test_a_layout_that_needs_the_vocabulary_is_said_to_be_unchecked(project: Path) -> None:
    words = [*TINY, "data.tokenizer=char", *SLURM, CPU]
    assert "the data is not prepared, so it is not checked whether the layout fits the ranks" in notes(project, *words)


def test_damaged_data_and_splits_that_are_too_short(prepared: Path) -> None:
    (problem,) = refused(prepared, *TINY, *SLURM, CPU, "train.global_batch_size=100000")
    assert "the training split has" in problem
    shard = next((prepared / "datasets").glob("*/train*.bin"))
    os.truncate(shard, 100)
    problems = refused(prepared, *TINY, *SLURM, CPU)
    assert any(shard.name in problem for problem in problems)


# the run folder


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Path:
    """A folder with a run `tiny` of 6 steps on one rank, which has ended."""
    folder = tmp_path_factory.mktemp("begun")
    make_project(folder)
    forker.train(folder, "tiny", 1, "train.num_steps=6", "optimizer.decay_steps=20", "train.eval_every=0")
    return folder


ONE = ("--to", "slurm", "--devices", "1", CPU, "train.eval_every=0", "optimizer.decay_steps=20")
MORE = (*TINY, *ONE, "train.num_steps=20", "site.time=04:00:00")


@pytest.fixture
def run(begun: Path, project: Path) -> Path:
    """The run of `begun`, in the folder of the scheduler."""
    shutil.copytree(begun / "runs", project / "runs")
    assert called(project, "data", "corpus.txt", "--tokenizer", "byte").returncode == 0
    return project / "runs" / "tiny"


def test_a_run_that_goes_on_may_be_submitted(project: Path, run: Path) -> None:
    done = launch(project, *MORE, "--submit")
    assert done.returncode == 0, done.stderr
    assert "job 17 of slurm is submitted" in done.stdout
    tested, submitted = (project / "sbatch.log").read_text().splitlines()
    assert tested.startswith("--test-only ")
    assert not Path(tested.split()[1]).exists()
    assert submitted.startswith("--parsable ")


def test_another_run_and_other_files_are_not_touched(project: Path, run: Path) -> None:
    problems = refused(project, *MORE, "--submit", "optimizer.learning_rate=1", "run.seed=5")
    assert [problem.split(":")[0] for problem in problems][:2] == ["run.seed", "optimizer.learning_rate"]
    assert problems[-1] == "give the same values to continue runs/tiny, or start a new run.name"
    (project / "full").mkdir()
    (project / "full" / "thing").write_text("")
    (problem,) = refused(project, *MORE, "--submit", "run.folder=full")
    assert problem.startswith("full: not a run folder")
    (problem,) = refused(project, *MORE, "--submit", "run.folder=corpus.txt/run")
    assert problem.endswith("is a file, not a folder: choose another run.folder")


def test_another_run_is_known_without_its_data(project: Path, run: Path) -> None:
    shutil.rmtree(project / "datasets")
    (problem,) = refused(project, *MORE, "--submit", "run.seed=5", "optimizer.learning_rate=1")
    assert problem.startswith("run.seed: the run in runs/tiny has ")


def test_a_run_that_has_ended_needs_no_job(project: Path, run: Path) -> None:
    words = [*MORE, "train.num_steps=6"]
    said = "runs/tiny: the run has ended after step 6: a job would have nothing to do; give more steps"
    assert refused(project, *words, "--submit")[0].startswith(said)
    assert any(line.startswith(said) for line in notes(project, *words))


def test_a_checkpoint_that_is_deleted_meanwhile(project: Path, run: Path) -> None:
    (run / "checkpoints" / "step_00000001").mkdir()
    (run / "checkpoints" / "step_00000001" / "gone").symlink_to("nowhere")
    (run / "checkpoints" / "step_x").write_text("no folder")
    done = launch(project, *MORE)
    assert done.returncode == 0, done.stderr


def test_the_name_of_a_writer_is_one_line(project: Path, run: Path) -> None:
    with (run / ".writer").open("w") as file:
        file.write("process 4711 on evil\x1b[31m\nerror: host")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        (problem,) = refused(project, *MORE, "--submit")
    assert "is being written by process 4711 on evil\\x1b[31m\\nerror: host: wait" in problem


def test_events_that_are_no_measurements(project: Path, run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        for more in ("", '"seconds": "x"', '"seconds": 1e400', '"seconds": -1e9', '"seconds": null'):
            file.write("{" + ", ".join(filter(None, ('"kind": "checkpoint"', more))) + "}\n")
        file.write("{}\n")
    done = launch(project, *MORE)
    assert done.returncode == 0, done.stderr


HOLD = """
import sys
from pathlib import Path
from codescent.record import RunFolder
RunFolder.open(Path("runs/tiny")).hold()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(project: Path, run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes the run."""
    with holding(project) as process:
        yield process


@contextmanager
def holding(project: Path) -> Iterator[subprocess.Popen[str]]:
    """Have a process write the run."""
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=project, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.communicate("", timeout=30)


def test_a_folder_that_a_process_writes_is_held(project: Path, holder: subprocess.Popen[str]) -> None:
    assert refused(project, *MORE, "--submit") == [
        f"runs/tiny: is being written by process {holder.pid} on {os.uname().nodename}: wait for its end, or stop it"
    ]
    notes(project, *MORE)  # a script may be written for later
    holder.communicate("", timeout=30)
    assert launch(project, *MORE, "--submit").returncode == 0


def test_a_folder_that_a_job_holds(project: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = keep(new_folder(run), "slurm", "41", "tiny", "tiny.sbatch", project)
    monkeypatch.setenv("QUEUE_SAYS", "RUNNING, 0:10 of 4:00:00, n7")
    assert refused(project, *MORE, "--submit") == [
        f"runs/tiny: job 41 of slurm, submitted {made.moment}, holds it (running, 0:10 of 4:00:00, n7): wait for its "
        "end, or end it: codescent launch runs/tiny --cancel"
    ]
    assert launch(project, *MORE, "--submit", "--times", "2").returncode == 0  # these wait for it
    with holding(project):  # the ranks of the job
        assert launch(project, *MORE, "--submit", "--times", "2").returncode == 0
        monkeypatch.setenv("QUEUE_SAYS", "COMPLETED, 0:10 of 4:00:00, ")
        (project / "sbatch.log").unlink()
        (problem,) = refused(project, *MORE, "--submit", "--times", "2")
        assert "is being written by" in problem
    monkeypatch.setenv("QUEUE_SAYS", "COMPLETED, 0:10 of 4:00:00, ")
    assert launch(project, *MORE, "--submit").returncode == 0


# the disk


def test_a_disk_without_room_for_the_checkpoints(project: Path) -> None:
    words = [*GPT2, "data.tokenizer=byte", *SLURM, CPU, "train.num_steps=9000", "run.folder=disk/run"]
    with small_disk(project / "disk", 4 * 2**30) as disk:
        (problem,) = refused(project, *words, "--submit")
        assert problem.startswith("disk/run: 5 checkpoints of 1.39 GiB need 6.95 GiB more, but 4.00 GiB are free there")
        assert problem.endswith("free some space, give a run.folder on another disk")
        assert not list(disk.iterdir())
        less = refused(project, *words, "--submit", "checkpoint.keep_last=3", "checkpoint.keep_best=false")
        assert less[0].endswith(", or checkpoint.keep_last=1")
        few = ["train.num_steps=300", "checkpoint.every=100", "checkpoint.keep_best=false"]  # three saves in all
        assert refused(project, *words, "--submit", "checkpoint.keep_last=10", *few)[0].endswith("keep_last=1")
        fits = [*words, "checkpoint.keep_last=1", "checkpoint.keep_best=false"]
        assert launch(project, *fits, "--submit").returncode == 0
        once = [*words, "checkpoint.every=0", "train.eval_every=0"]  # the last step alone is saved
        assert launch(project, *once, "--submit", "run.folder=disk/once").returncode == 0


@pytest.mark.parametrize(("every", "eval_every", "most"), [(100, 40, 9), (100, 50, 6), (0, 100, 3), (300, 0, 1)])
def test_a_step_that_two_periods_save_is_one_checkpoint(every: int, eval_every: int, most: int) -> None:
    words = [f"checkpoint.every={every}", f"train.eval_every={eval_every}", "train.num_steps=300"]
    assert room.most_checkpoints(load("gpt2_124m", [*words, "checkpoint.keep_last=20"]).config) == most


def test_the_plan_knows_the_size_of_a_checkpoint(begun: Path) -> None:
    run = RunFolder.open(begun / "runs" / "tiny")
    (saved,) = run.checkpoints.glob("step_*")
    real = sum(file.stat().st_size for file in saved.iterdir() if file.suffix == ".safetensors")
    assert room.checkpoint_bytes(saved_plan(run)) == pytest.approx(real, rel=0.2)
    assert room.checkpoint_bytes(saved_plan(run)) <= real


# the time


def test_measured_steps_must_fit_into_the_jobs(project: Path, run: Path) -> None:
    metrics = run / "metrics.jsonl"
    rows = [json.loads(line) | {"step_s": 0.5} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "metrics.csv").unlink()
    found = RunFolder.open(run)
    assert [row["step_s"] for row in found.read_metrics()] == [0.5] * 6
    words = [*MORE, "train.num_steps=126", "site.requeues=2", "checkpoint.every=0"]
    (problem,) = refused(project, *words, "site.time=00:01:10")
    assert problem.startswith("site.time = 00:01:10: 120 steps of 500 ms, as measured, take 60.")
    assert "but 3 starts of a job (site.requeues = 2) have 30.0 s; give more time, or site.requeues=" in problem
    assert "or --times 3" in problem
    assert notes(project, *words, "site.time=00:01:10", "site.requeues=6") is not None
    assert notes(project, *words, "site.time=00:01:10", "--times", "3") is not None
    local = [word for word in words if word not in ("--to", "slurm", "--nodes", CPU)]
    local = [*TINY, "--to", "local", "--devices", "1", *words[words.index(CPU) + 1 :]]
    said = "the run saves and stops before its end; start it 7 times"
    assert any(said in line for line in notes(project, *local, "site.time=00:01:10"))
    # a printed script of PBS does not submit itself again; Kubernetes starts a pod again
    words = [*words[:2], "--devices", "1", *words[words.index(CPU) :], "site.time=00:01:10"]
    assert any(said in line for line in notes(project, *words, "--to", "pbs"))
    (problem,) = refused(project, *words, "--to", "pbs", "--out", "job.pbs")
    assert "but 3 starts of a job (site.requeues = 2) have 30.0 s" in problem
    (problem,) = refused(project, *words, "--to", "kubernetes", "site.image=x")
    assert "but 3 starts of a job (site.requeues = 2) have 30.0 s" in problem


def test_steps_of_another_layout_say_nothing(project: Path, run: Path) -> None:
    said = "\n".join(notes(project, *("2" if word == "1" else word for word in MORE)))
    assert "it is not known whether 14 steps fit: its steps were measured with another layout (1 rank)" in said


def test_no_run_is_faster_than_the_peak(project: Path) -> None:
    words = [*GPT2, *SLURM, GPU, "train.precision=bf16", "site.requeues=0"]
    device = "site.device_type=A100-80GB"
    (problem,) = refused(project, *words, device, "train.num_steps=10000000")
    assert problem.startswith("site.time = 04:00:00: 10,000,000 steps take at least ")
    assert "at the peak of A100-80GB, which no run reaches (no step of this run was measured), but 1 start" in problem
    (said,) = [line for line in notes(project, *words, device, "train.num_steps=100") if "site.time" in line]
    assert said.endswith("whether they fit is not known")
    (said,) = [line for line in notes(project, *words, "train.num_steps=10000000") if "site.time" in line]
    assert said == (
        "site.time = 04:00:00: it is not known whether 10,000,000 steps fit: no step of this run was measured"
    )


def test_a_limit_without_time_for_a_step(project: Path) -> None:
    (problem,) = refused(project, *TINY, *SLURM[:-1], CPU, "site.time=00:01:00")
    assert problem.startswith(
        "site.time=00:01:00 (command line): the run saves 60 s before it, so there would be no time"
    )


# the scheduler's own test, and all at once


def test_what_the_scheduler_refuses_is_not_submitted(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_CODE", "1")
    monkeypatch.setenv("TEST_SAID", "allocation failure: Invalid account")
    words = [*TINY, *SLURM, CPU]
    assert refused(prepared, *words, "--submit") == [
        "sbatch --test-only: exit code 1: allocation failure: Invalid account"
    ]
    assert notes(prepared, *words)
    monkeypatch.delenv("TEST_CODE")
    assert launch(prepared, *words, "--submit").returncode == 0


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (["site.time=04:00:01"], "site.time = 04:00:01: partition short allows 4:00:00: the job would wait forever"),
        (["site.time=7-00:00:01", "site.partition=short,long"], "partition short,long allows less"),
        (["site.time=7-00:00:00", "site.partition=long"], None),
        (["site.time=7-00:00:00", "site.partition=short,long"], None),
        (["site.time=7-00:00:00", "site.partition=other"], None),  # what sbatch says of it is enough
    ],
)
def test_a_job_that_would_wait_forever_is_refused(prepared: Path, site: list[str], said: str | None) -> None:
    words = [*TINY, *SLURM[:-1], CPU, *site, "--submit"]
    if said is None:
        assert launch(prepared, *words).returncode == 0
    else:
        assert said in "\n".join(refused(prepared, *words))


def test_a_script_of_ones_own_is_tested_by_the_scheduler(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "train.py").write_text("")
    monkeypatch.setenv("TEST_CODE", "1")
    assert refused(project, "train.py", *SLURM, CPU, "--submit")[0].startswith("sbatch --test-only: exit code 1")


def test_pbs_has_no_test(prepared: Path) -> None:
    words = [*TINY, "--to", "pbs", *SLURM[2:], CPU, "--submit"]
    done = launch(prepared, *words)
    assert done.returncode == 0, done.stderr
    assert "PBS has no test of a script: whether its limits allow the job, qsub says" in done.stderr


def test_everything_comes_in_one_message(project: Path, run: Path, holder: subprocess.Popen[str]) -> None:
    words = [*TINY, "--to", "slurm", "--nodes", "1", "--devices", "3", "site.node_devices=2", "site.devices=-G{n}"]
    problems = refused(project, *words, "--submit", "data.corpus=none.txt", "train.num_steps=20", "run.seed=5")
    starts = [
        "--to slurm needs the time limit", "--devices 3: a node has 2 devices", "data.corpus: none.txt: no such file",
        "train.global_batch_size = 8 does not divide", "runs/tiny: is being written by",
    ]  # fmt: skip
    assert [problem[: len(start)] for problem, start in zip(problems, starts, strict=True)] == starts


def test_a_config_that_is_wrong_is_still_one_message(project: Path) -> None:
    problems = refused(project, *TINY, *SLURM, "train.num_stepz=1", "site.devices=4")
    assert len(problems) == 2
