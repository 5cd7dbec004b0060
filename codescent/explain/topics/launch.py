"""In: a plan. Out: the commands that start the same run by each launcher, and the variables by which ranks know theirs.
Does not write scripts (`codescent launch` does); the variables are those of launch/launchers.py."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.topic import LessonInput, Topic, replicas
from codescent.launch.launchers import OTHERS, TORCHRUN

MOST_RANKS = 16
CONFIG = "run.toml"
TRAIN = f"codescent train {CONFIG}"


def lesson(asked: LessonInput) -> Lesson:
    """Who is on which machine, the commands, the variables."""
    say, ranks = asked.say, asked.plan.world_size
    nodes = 2 if ranks > 1 and ranks % 2 == 0 else 1
    return Lesson(
        topic="launch",
        title=say("The same run by every launcher"),
        about=say("A launcher starts the processes and numbers them. The config stays the same."),
        config=asked.config_line,
        frames=(_machines(ranks, nodes, say), _one(ranks, say), _several(ranks, nodes, say), _variables(say)),
        see=(
            (f"codescent launch {CONFIG} --to slurm --nodes {nodes}", say("a script for a scheduler, checked before")),
            ("codescent doctor", say("look at the machines before a run")),
            ("codescent docs launch_scripts", say("all targets and their keys")),
            ("codescent docs spawn", say("a program that starts its ranks itself, by mp.spawn")),
        ),
    )


def _machines(ranks: int, nodes: int, say: Language) -> LessonFrame:
    each, rows = ranks // nodes, []
    for node in range(nodes):
        own = range(node * each, (node + 1) * each)[:MOST_RANKS]
        rows.append((say("machine {number}", number=node), [GridCell(str(rank), Tone.WEIGHTS) for rank in own]))
    heads = [say("local {number}", number=local) for local in range(min(each, MOST_RANKS))]
    return LessonFrame(
        say("Who is where"),
        (say("RANK counts all processes, LOCAL_RANK those of one machine. Here {nodes} machines have {each} each.",
             nodes=nodes, each=each),),
        (Grid(heads, rows),),
        (say("Rank 0 listens at MASTER_ADDR and MASTER_PORT. The others look for it there."),),
    )  # fmt: skip


def _one(ranks: int, say: Language) -> LessonFrame:
    rows = (
        ("codescent", f"{TRAIN} --ranks {ranks}", say("starts the ranks, and names one that fails")),
        ("python", f"python -m {TRAIN} --ranks {ranks}", say("the same")),
        (
            "mp.spawn",
            f"mp.spawn(main, nprocs={ranks})",
            say("in a program of your own; main(rank) calls codescent.init"),
        ),
        ("torchrun", f"torchrun --nproc-per-node={ranks} -m {TRAIN}", say("torch's launcher")),
    )
    heads = (say("launcher"), say("command"), say("what it is"))
    return LessonFrame(say("One machine"), (), (TextTable(heads, rows),))


def _several(ranks: int, nodes: int, say: Language) -> LessonFrame:
    each = ranks // nodes
    meets = "--rdzv-id=JOB --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
    fixed = f"torchrun --nnodes={nodes} --nproc-per-node={each} {meets} -m {TRAIN}"
    elastic = f"torchrun --nnodes=1:{max(2, nodes)} --max-restarts=3 --nproc-per-node={each} {meets} -m {TRAIN}"
    torchx = f"torchx run -s slurm dist.ddp -j {nodes}x{each} -m codescent -- train {CONFIG}"
    rows = (
        ("torchrun", fixed, say("the same command on each machine")),
        (say("torchrun, elastic"), f"{elastic} --resume=auto", say("machines come and go")),
        ("torchx", torchx, say("hands a job to a scheduler")),
        ("srun", f"srun --nodes={nodes} --ntasks-per-node={each} {TRAIN}", say("inside of a job of SLURM")),
        ("mpirun", f"mpirun -np {ranks} --map-by ppr:{each}:node {TRAIN}", say("Open MPI")),
        ("PALS", f"mpiexec -n {ranks} --ppn {each} {TRAIN}", say("on machines of HPE Cray")),
    )
    heads = (say("launcher"), say("command"), say("what it is"))
    return LessonFrame(say("Several machines"), (), (TextTable(heads, rows),))


def _variables(say: Language) -> LessonFrame:
    rows: list[Sequence[str]] = []
    names = {TORCHRUN.name: "torchrun", "a launcher with PMI": say("another launcher with PMI")}
    for launcher in (TORCHRUN, *OTHERS):
        fields = (launcher.rank, launcher.local_rank, launcher.world_size)
        name = names.get(launcher.name, launcher.name).replace(" of ", ", ")
        rows.append((name, " ".join(field[0] for field in fields if field)))
    heads = (say("launcher"), say("rank, rank on its machine, number of ranks"))
    return LessonFrame(
        say("Variables"),
        (say("codescent reads the variables of each launcher. No argument has to be given."),),
        (TextTable(heads, rows),),
    )


TOPIC = Topic(
    about="the same run by python, mp.spawn, torchrun, torchx, srun, mpirun and PALS",
    example=replicas(least=1, layers=2, heads=2, width=64),
    lesson=lesson,
)
