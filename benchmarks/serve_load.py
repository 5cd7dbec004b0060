"""In: nothing. Out: seconds to the first and last token of 64 clients at once, errors, what the server keeps.
Does not compare with another server: `benchmarks/generate_step.py` measures the engine beside `transformers`."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
from measure import finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json
from work import codescent, environment

CONFIG = """
[model]
num_layers = 4
num_heads = 4
hidden_dim = 128
seq_len = 256
[data]
corpus = "corpus.txt"
tokenizer = "byte"
seq_len = 256
[train]
num_steps = 20
global_batch_size = 8
eval_every = 0
device = "cpu"
[log]
tensorboard = false
"""
WORDS = ("many", "workers", "one", "descent", "loss", "gradient", "step", "rank", "sum", "mean")
MOST_GROWTH = 1.1
"""What the resident memory of the server may be at the end, times that after a sixth of the time."""
KEPT_S = 7.0
"""A connection without a request is closed after 5 seconds."""
HANGS_UP = 0.05
"""Share of the requests whose client hangs up after some tokens, as users do."""


@dataclass
class Load:
    """What the clients have seen. Seconds are from the request on."""

    requests: int = 0
    hung_up: int = 0
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Load `codescent serve` with clients of the package openai, half of which stream.")
    parsed.add_argument("--clients", type=positive, default=64, help="clients at once (default 64)")
    parsed.add_argument("--seconds", type=positive, default=60, help="how long they ask (default 60)")
    parsed.add_argument("--rows", type=positive, default=16, help="--rows of the server (default 16)")
    return parsed.parse_args()


def trained(folder: Path) -> Path:
    """The folder of a small run, which is trained for some steps."""
    rng = random.Random(7)
    lines = (" ".join(rng.choice(WORDS) for _ in range(8)) for _ in range(2000))
    (folder / "corpus.txt").write_text("\n".join(lines) + "\n")
    (folder / "run.toml").write_text(CONFIG)
    command = codescent("train", "run.toml", "run.name=load", "-q")
    subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)
    return folder / "runs" / "load"


async def one_client(client: Any, number: int, end_s: float, load: Load) -> None:
    """Ask again and again until the time is over."""
    rng = random.Random(number)
    while time.monotonic() < end_s:
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 16)))
        most, begin_s = rng.randint(16, 64), time.monotonic()
        options: dict[str, Any] = {"model": "load", "prompt": prompt, "max_tokens": most, "seed": rng.randint(0, 99)}
        load.requests += 1
        try:
            if number % 2:
                answer = await client.completions.create(**options)
                load.tokens += answer.usage.completion_tokens
            elif not await streamed(client, options, rng.random() < HANGS_UP, begin_s, load):
                continue
            load.whole_s.append(time.monotonic() - begin_s)
        except Exception as error:
            load.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)


async def streamed(client: Any, options: dict[str, Any], hangs_up: bool, begin_s: float, load: Load) -> bool:
    """Read a stream to its end, or hang up after some tokens. Returns whether it was read to its end."""
    first = True
    async with await client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ) as pieces:
        async for piece in pieces:
            if first:
                load.first_s.append(time.monotonic() - begin_s)
                first = False
            elif hangs_up:
                load.hung_up += 1
                return False
            load.tokens += piece.usage.completion_tokens if piece.usage is not None else 0
    return True


async def loaded(url: str, clients: int, seconds: int, server: psutil.Process) -> tuple[Load, list[int]]:
    """The load of all clients, and the resident bytes of the server at each second."""
    load, end_s = Load(), time.monotonic() + seconds
    each = [openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) for _ in range(clients)]
    tasks = [asyncio.create_task(one_client(client, number, end_s, load)) for number, client in enumerate(each)]
    sizes = []
    while time.monotonic() < end_s:
        await asyncio.sleep(1)
        sizes.append(server.memory_info().rss)
    await asyncio.gather(*tasks)
    for client in each:
        await client.close()
    return load, sizes


def figure(url: str, name: str) -> float:
    """A figure of /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


def idle_files(server: psutil.Process) -> int:
    """Open files of the server when it has closed the connections of clients that have gone."""
    time.sleep(KEPT_S)
    return int(server.num_fds())


def shares(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile and largest value."""
    cuts = statistics.quantiles(values, n=20) if len(values) > 1 else values * 20
    return {"p50": statistics.median(values), "p95": cuts[18], "most": max(values)}


def main() -> int:
    """Measure and print."""
    arguments, record = arguments_of(), hardware()
    with tempfile.TemporaryDirectory(prefix="codescent-serve-") as name:
        run = trained(Path(name))
        words = ("serve", str(run), "--port", "0", "--rows", str(arguments.rows), "--waiting", str(arguments.clients))
        process = subprocess.Popen(codescent(*words), env=environment(), stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rpartition(" at ")[2].strip()
            server = psutil.Process(process.pid)
            asyncio.run(loaded(url, 1, 2, server))  # what is opened once is open now
            files = idle_files(server)
            begin_s = time.monotonic()
            load, sizes = asyncio.run(loaded(url, arguments.clients, arguments.seconds, server))
            taken_s = time.monotonic() - begin_s
            files_after = idle_files(server)
            left = {name: figure(url, f"codescent_{name}") for name in ("running", "waiting", "pages_used")}
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()
            process.wait()
    first_s, whole_s = shares(load.first_s), shares(load.whole_s)
    growth = sizes[-1] / sizes[len(sizes) // 6]
    for error in sorted(set(load.errors))[:5]:
        say(error)
    claims = [
        must("errors", len(load.errors), 0, at_least=False),
        must("texts and pages that are held at the end", sum(left.values()), 0, at_least=False),
        must("open files at the end, over those at the beginning", files_after - files, 0, at_least=False),
        must("resident memory at the end, times that after a sixth of the time", growth, MOST_GROWTH, at_least=False),
        must("exit code after SIGTERM", code, 0, at_least=False),
    ]
    rows = [
        [what, *(f"{found[key]:.3f}" for key in found)]
        for what, found in (("first token", first_s), ("whole", whole_s))
    ]
    print(machine_line(record), "", table(["seconds to", "p50", "p95", "most"], rows), "", sep="\n")
    print(
        f"{arguments.clients} clients, {taken_s:.0f} s: {load.requests:,} requests, {load.hung_up} hung up, "
        f"{len(load.errors)} errors, {load.tokens / taken_s:.0f} tokens/s"
    )
    print("\n".join(must_lines(claims)))
    facts = {
        "clients": arguments.clients,
        "rows": arguments.rows,
        "seconds": taken_s,
        "tokens_per_s": load.tokens / taken_s,
    }
    seen = {name: value for name, value in asdict(load).items() if name not in ("first_s", "whole_s")}
    result = {**facts, **seen, "first_s": first_s, "whole_s": whole_s, "resident_bytes": sizes, "left": left}
    write_json(arguments.json, {"benchmark": "serve_load", "hardware": record, **result, "musts": claims})
    return 0


if __name__ == "__main__":
    finish(main)
