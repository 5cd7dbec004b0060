"""In: the options of `codescent plan` that begin with --cluster, a plan. Out: what a step costs there, in rows or JSON.
Does not compute a price (cost/price.py does) and does not read cluster files (clusters/ does)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping

from codescent.base.amounts import of_bytes, of_number, of_rate, of_seconds, of_share
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster
from codescent.clusters.files import load_cluster, software_of
from codescent.config.sections import Config
from codescent.cost.price import Price, price
from codescent.cost.stage_memory import PARTS, StageMemory
from codescent.cost.time_parts import NAMES
from codescent.plan import Plan
from codescent.planner.bands import falls, grows
from codescent.planner.checkpoints import best_interval
from codescent.planner.links import slow_of
from codescent.planner.most import most
from codescent.planner.prediction import not_priced, software_of_run
from codescent.planner.prediction import price_json as price_json
from codescent.verbs.cluster_here import HERE, cluster_here

NEEDS_CLUSTER = ("software", "changes", "most", "mtbf", "save_s")
"""Options that have an effect with --cluster only."""
BAR, FULL, EMPTY = 24, "#", "."
MOST_STAGES = 8
"""With more stages the first, the fullest and the last one are shown."""
HOUR_S, KILO = 3600.0, 1000.0
Rows = Iterator[tuple[str, list[str]]]

COMPUTING = {"products_s": "products", "attention_s": "attention", "moved_s": "element-wise"}
MESSAGES = {"inside_s": "inside nodes", "between_s": "between nodes", "bus_s": "to the host"}
OTHERS = {
    "host_s": "launching operators",
    "bubble_s": "bubble",
    "imbalance_s": "waiting for the slowest rank",
    "update_s": "optimizer",
    "microbatch_s": "beside micro-batches",
    "step_s": "beside steps",
}
DATA = "data_s"

LESS: Mapping[str, str] = {
    "attention_s": "a shorter data.seq_len, or cp",
    "moved_s": 'train.compile = "blocks", which joins these operators',
    "host_s": "a larger train.microbatch_size",
    "inside_s": "a smaller parallel.tp, or sequence_parallel",
    "between_s": "tp and dp_shard inside of nodes, more micro-batches in a step, or dp_shard with a smaller zero_stage",
    "bus_s": 'parallel.offload = "none" where memory allows it',
    "bubble_s": 'more micro-batches (a smaller train.microbatch_size), or parallel.schedule = "interleaved"',
    "imbalance_s": "ranks that are equally fast: see software.NAME.imbalance",
    "update_s": "parallel.dp_shard, which divides the optimizer's state",
    "data_s": "more ranks, or samples that are read faster: see software.NAME.load_bytes_per_s",
    "microbatch_s": "a larger train.microbatch_size",
    "step_s": "a larger train.global_batch_size, which is another trajectory",
}
"""By part: what would make it smaller."""


def cluster_of(arguments: Namespace) -> Cluster | None:
    """The cluster of a command line; None: without --cluster. Raises UserError: every option that is wrong."""
    if arguments.cluster is None:
        given = [f"--{_option(name)}" for name in NEEDS_CLUSTER if getattr(arguments, name)]
        if given:
            raise UserError(*(f"{name}: needs --cluster, such as --cluster h100-sxm" for name in given))
        return None
    problems = []
    if (arguments.mtbf is None) != (arguments.save_s is None):
        problems.append("--mtbf and --save-s: the interval of checkpoints needs both")
    cluster = None
    for changes in (
        arguments.changes or [],
        [],
    ):  # without wrong what-ifs, it may be seen whether the software is there
        try:
            here = arguments.cluster == HERE
            cluster = cluster_here(changes) if here else load_cluster(arguments.cluster, changes)
            software_of(cluster, arguments.software)
            break
        except UserError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    try:
        slow_of(arguments.slow or "0: 1x")
    except ValueError as error:
        problems.append(f"--slow: {error}")
    if problems:
        raise UserError(*problems)
    return cluster


def _option(name: str) -> str:
    return {"changes": "with", "save_s": "save-s"}.get(name, name)


def priced(arguments: Namespace, plan: Plan, config: Config, cluster: Cluster) -> Price:
    """The price of a plan. Raises UserError: the cluster cannot run it."""
    slow = slow_of(arguments.slow) if arguments.slow else {}
    reasons = (f"--cluster: {reason}" for reason in not_priced(plan, cluster, config.train.device))
    if problems := [*reasons, *_absent(slow, plan)]:
        raise UserError(*problems)
    return price(plan, cluster, software_of_run(cluster, config, arguments.software), slow=slow)


def _absent(slow: Mapping[int, float], plan: Plan) -> Iterator[str]:
    last = plan.world_size - 1
    yield from (f"--slow: rank {rank}: the plan has ranks 0 to {last}" for rank in slow if rank > last)


def price_rows(found: Price, config: Config, arguments: Namespace) -> Rows:
    """The screen of a price."""
    cluster, software = found.cluster, found.software
    nodes = -(-found.devices // cluster.devices)
    yield "cluster", [f"{cluster.name}: {cluster.what}"]
    yield "", [f"{counted(found.devices, 'device')} on {counted(nodes, 'node')}: {_constants(found)}"]
    yield from _memory_rows(found)
    parts, band = found.parts, grows(found.step_s, software.band)
    said = f"{of_seconds(found.step_s)} ({band.words(of_seconds)}); in brackets 8 of 10 such predictions"
    yield "step", [said]
    computing = {words: getattr(parts, name) for name, words in COMPUTING.items()}
    yield "  computing", [_part(sum(computing.values()), found), *_several(computing)]
    exposed = {words: getattr(parts, name) for name, words in MESSAGES.items()}
    yield "  messages", [f"{_part(parts.exposed_s, found)}: what no computation hides", *_several(exposed)]
    for name, words in OTHERS.items():
        if getattr(parts, name) >= 0.005 * found.step_s:
            yield f"  {words}", [_part(getattr(parts, name), found)]
    yield "  data", [_data(found)]
    yield from _speed_rows(found)
    if arguments.most is not None:
        yield "most", [_most(found, config, arguments.most)]
    yield from _run_rows(found, config)
    name = max((name for name in NAMES), key=lambda name: float(getattr(parts, name)))
    largest = f"{_words(name)}, {of_share(getattr(parts, name) / found.step_s)} of a step"
    yield "largest term", [f"{largest}; less with {_less(name, found)}"]
    if arguments.mtbf is not None:
        interval = best_interval(arguments.mtbf * HOUR_S, arguments.save_s)
        yield (
            "checkpoints",
            [
                f"best every {of_seconds(interval.seconds)}, {of_number(interval.seconds / found.step_s)} steps "
                f"({_slower(found, interval.seconds / found.step_s, of_number)}): "
                f"{of_share(interval.effective)} of the time trains"
            ],
        )


def _most(found: Price, config: Config, key: str) -> str:
    """The largest value of a key that fits, and what the next one would need."""
    largest, size = most(config, found.plan, key, found.cluster, found.software), found.cluster.device.memory_bytes
    behind = ""
    if largest.next_value is not None:
        band = grows(largest.next_bytes, found.software.memory_band).words(of_bytes)
        behind = f"; {largest.next_value:,} would need {of_bytes(largest.next_bytes)} ({band}) of {of_bytes(size)}"
    if largest.value is None:
        return f"{key}: no value fits{behind}"
    return f"{key} = {largest.value:,} is the largest that fits{behind}"


def _constants(found: Price) -> str:
    """On what the constants stand."""
    if found.software.fitted_on:
        return f"constants fitted on {found.software.fitted_on}"
    return "constants of data sheets, not fitted here"


def _part(seconds: float, found: Price) -> str:
    return f"{of_seconds(seconds)}, {of_share(seconds / found.step_s)}"


def _data(found: Price) -> str:
    """What a step waits for its samples, and why it does not wait longer."""
    work, part = found.plan.work, _part(found.parts.data_s, found)
    if not work.prefetch:
        return f"{part}: with data.prefetch = 0 samples are read when they are needed"
    return f"{part}: what reading {counted(work.prefetch, 'step')} ahead does not hide"


def _several(parts: Mapping[str, float]) -> list[str]:
    several = [f"{words} {of_seconds(seconds)}" for words, seconds in parts.items() if seconds]
    return [", ".join(several)] if len(several) > 1 else []


def _words(name: str) -> str:
    return {**COMPUTING, **{part: f"messages {words}" for part, words in MESSAGES.items()}, **OTHERS, DATA: "data"}[
        name
    ]


def _less(name: str, found: Price) -> str:
    """What would make a part smaller, in this plan."""
    layout = found.plan.layout
    if name == "products_s":
        return 'parallel.recompute = "none"' if layout.recompute != "none" else "more ranks: nothing is computed twice"
    if name == DATA and not found.plan.work.prefetch:
        return "data.prefetch above 0, which reads while others compute"
    if name == "update_s" and layout.offload != "none":
        return LESS["bus_s"]
    if name == "bubble_s" and layout.schedule == "interleaved":
        return "more micro-batches, or more parallel.virtual_stages"
    return LESS[name]


def _memory_rows(found: Price) -> Rows:
    """A bar for each stage against the memory of a device; equal stages are one."""
    size, fullest = found.cluster.device.memory_bytes, found.memory[found.fullest]
    share = f"{of_bytes(fullest.total)} of {of_bytes(size)}, {of_share(fullest.total / size)}"
    yield "memory", [f"{found.verdict}: {share}"]
    for stage, held in enumerate(found.memory):
        ends = stage in (0, found.fullest, len(found.memory) - 1)
        if (stage and held == found.memory[stage - 1]) or (len(found.memory) > MOST_STAGES and not ends):
            continue
        bar = FULL * max(1, min(BAR, round(BAR * held.total / size)))
        over = "!" if held.total > size else ""
        name = f"  stage {stage}" if len(found.memory) > 1 else "  a rank"
        band = grows(held.total, found.software.memory_band).words(of_bytes)
        yield (
            name,
            [
                f"[{bar:{EMPTY}<{BAR}}]{over} {of_bytes(held.total)} ({band})",
                *([_held(held)] if held is fullest else []),
            ],
        )
    yield "  highest", [_highest(found)]


def _highest(found: Price) -> str:
    """The stage and the instruction of the peak."""
    if found.peak is None:
        return "it is not declared what operators keep here"
    stage = f"stage {found.peak.stage}, " if len(found.memory) > 1 else ""
    return f"{stage}{found.peak.words}"


def _held(held: StageMemory) -> str:
    parts = {PARTS[name]: size for name, size in held.parts().items()}
    known = {name: size for name, size in parts.items() if size >= 0.005 * held.total}
    return ", ".join(f"{name} {of_bytes(size)}" for name, size in sorted(known.items(), key=lambda one: -one[1]))


def _speed_rows(found: Price) -> Rows:
    flops = found.plan.flops()
    mfu, hfu = found.utilization(flops.total_flops), found.utilization(flops.hardware_flops)
    rates = [f"{of_number(found.tokens_per_s)} tokens/s ({_slower(found, found.tokens_per_s, of_number)})"]
    rates.append(f"MFU {of_share(mfu)} ({_slower(found, mfu, of_share)})")
    again = f"HFU {of_share(hfu)} ({_slower(found, hfu, of_share)}) with what is computed again"
    precision = found.cluster.device.format_of(found.software.precision or found.plan.work.precision)
    yield (
        "speed",
        [
            "; ".join(rates),
            *([again] if flops.recomputed_flops else []),
            f"of {of_rate(found.peak_flops_per_s, 'FLOP/s')} in {precision}, by 6 N + 12 L h s FLOPs a token, unmasked",
        ],
    )


def _slower(found: Price, number: float, words: Callable[[float], str]) -> str:
    """The band of a number that falls when a step takes longer."""
    return falls(number, found.software.band).words(words)


def _run_rows(found: Price, config: Config) -> Rows:
    """Time, device-hours, money and energy to the end of the run."""
    if config.train.num_epochs is not None:
        yield "run", ["its steps follow from the data (train.num_epochs): not known here"]
        return
    steps, cluster = config.train.num_steps, found.cluster
    seconds = steps * found.step_s
    hours = seconds / HOUR_S * found.devices

    def banded(number: float, words: Callable[[float], str] = of_number) -> str:
        return f"{words(number)} ({grows(number, found.software.band).words(words)})"

    costs = [f"{banded(hours)} device-hours"]
    if cluster.device_hour is not None:
        costs.append(f"{banded(hours * cluster.device_hour)} at {cluster.device_hour:g} an hour")
    if cluster.watts is not None:
        costs.append(f"{banded(hours * cluster.watts / KILO)} kWh")
    yield (
        "run",
        [f"{counted(steps, 'step')}: {banded(seconds, of_long)}, without validation and saving", *costs],
    )


def of_long(seconds: float) -> str:
    """Such as "3.2 days", or as `of_seconds`."""
    days = seconds / (24 * HOUR_S)
    return f"{of_number(days)} days" if days >= 2 else of_seconds(seconds)
