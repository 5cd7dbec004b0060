"""In: a hub on loopback. Out: configs that name it train, plan, import and resume; nothing needless is downloaded.
Does not reach another host: HF_ENDPOINT is the hub of the test."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_files import DATASET, MODEL, SHORT, corpus_files, model_files
from hub_server import Hub, Repository, hub_server
from huggingface_hub import constants
from runs import called, environment

from codescent.base import early
from codescent.base.errors import UserError
from codescent.base.hub_name import HubName, meant, parse
from codescent.config.load import load
from codescent.data.text.corpora import resolve
from codescent.hub import listing, obtain, once
from codescent.record import RunFolder
from codescent.verbs import train_ranks

NAMES = (
    f"model.weights=hf://{MODEL}",
    f"data.tokenizer=hf://{MODEL}",
    f"data.corpus=hf://datasets/{DATASET}/data/train.txt",
)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return model_files()


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model and a data set, and an empty cache, for this process and for those that it starts."""
    with hub_server() as found:
        found.models[MODEL], found.datasets[DATASET] = Repository(), Repository()
        found.models[MODEL].push(dict(files))
        found.datasets[DATASET].push(corpus_files())
        home = tmp_path / "hf"
        for name, value in {"HF_ENDPOINT": found.url, "HF_HOME": home, "XDG_CACHE_HOME": tmp_path / "cache"}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing leaves loopback, whatever is wrong
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        of_file = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", of_file)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_HOME", str(home))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        again(monkeypatch)
        (tmp_path / "run.toml").write_text('base = "finetune"\n')
        yield found


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that begins now."""
    monkeypatch.setattr(once, "began_ns", time.time_ns())
    monkeypatch.setattr(listing, "_known", {})


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def cached(tmp_path: Path, kind: str = "models", repo: str = MODEL) -> set[str]:
    """The files in the snapshots of a repository in the cache."""
    snapshots = tmp_path / "hf" / "hub" / f"{kind}--{repo.replace('/', '--')}" / "snapshots"
    (snapshot,) = snapshots.iterdir()
    return {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("allenai/c4", "hf://datasets/allenai/c4"),
        ("allenai/c4@main", "hf://datasets/allenai/c4@main"),
        ("https://huggingface.co/datasets/allenai/c4/tree/main/en", "hf://datasets/allenai/c4"),
        ("https://hf.co/allenai/c4?x=1", "hf://datasets/allenai/c4"),
        ("books/one.txt", ""),
        ("books", ""),
        ("./books/one", ""),
        ("https://other.example/allenai/c4", ""),
    ],
)
def test_a_name_as_it_stands_elsewhere_is_refused_with_the_right_one(text: str, name: str) -> None:
    """Fault: who writes OWNER/NAME reads that there is no such file, and not what to write."""
    assert meant(text, is_dataset=True) == name
    with pytest.raises(UserError) as error:
        resolve(text)
    (said,) = error.value.problems
    assert said.endswith(f"; a data set of the hub is named {name}" if name else "openwebtext)")


def test_names_are_read_as_they_are_written() -> None:
    """A name that is misread names another revision, or another file."""
    assert parse("hf://Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B")
    assert parse("hf://a/b@refs%2Fpr%2F1") == HubName("a/b", revision="refs/pr/1")
    assert str(HubName("a/b", revision="refs/pr/1")) == "hf://a/b@refs%2Fpr%2F1"
    assert parse("hf://datasets/a/b@v1.0/x/*.txt") == HubName("a/b", True, "v1.0", "x/*.txt")
    assert parse("hf://datasets/a/b@refs/convert/parquet/x") == HubName("a/b", True, "refs/convert/parquet", "x")
    wrong = (
        "hf://gpt2",
        "hf://",
        "hf://a/b/c",
        "hf://a/b@",
        "hf://datasets/a/b/../c",
        "hf://a/b@../x",
        *("hf://datasets/a", "hf://a/b.git", "hf://a/b--c", "hf://a..b/c", "hf://a/b@x%00", "hf://datasets/a/b/c\x00"),
    )
    for text in wrong:
        with pytest.raises(ValueError, match="write hf://"):
            parse(text)


def test_a_run_of_names_downloads_what_it_needs_and_resumes_the_same_commit(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickles and needless files are downloaded; or a resumed run follows the branch to other weights or texts."""
    done = called(tmp_path, "train", "run.toml", *NAMES, *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cached(tmp_path) == {
        *("config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    }
    assert cached(tmp_path, "datasets", DATASET) == {"data/train.txt"}
    folder = RunFolder.open(tmp_path / "runs" / "finetune")
    config, (weights, corpus) = load(folder.path / "config.toml").config, commits(hub)
    assert (config.model.weights, config.data.tokenizer) == (f"hf://{MODEL}@{weights}",) * 2
    assert config.data.corpus == f"hf://datasets/{DATASET}@{corpus}/data/train.txt"
    (start,) = (one for one in folder.read_events() if one["kind"] == "start")
    assert start["weights"]["folder"] == config.model.weights
    assert len(hub.asked("GET", "/revision/")) == 2  # one for each repository

    hub.models[MODEL].push(model_files(seed=1))
    hub.datasets[DATASET].push({"data/train.txt": b"other words\n" * 100})
    hub.requests.clear()
    again(monkeypatch)
    done = called(
        tmp_path, "train", "run.toml", *NAMES, *SHORT, "train.num_steps=3", "optimizer.decay_steps=2", "--resume"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not hub.requests
    assert load(folder.path / "config.toml").config.model.weights == f"hf://{MODEL}@{weights}"


def commits(hub: Hub) -> tuple[str, str]:
    return hub.models[MODEL].refs["main"], hub.datasets[DATASET].refs["main"]


def test_a_plan_needs_config_json_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of a large model downloads its weights; or offline it ends in a traceback."""
    done = called(tmp_path, "plan", "run.toml", *NAMES, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["weights"] == f"hf://{MODEL}@{commits(hub)[0]}"
    assert cached(tmp_path) == {"config.json"}
    offline(monkeypatch)
    again(monkeypatch)
    assert called(tmp_path, "plan", "run.toml", *NAMES).returncode == 0
    done = called(tmp_path, "plan", "run.toml", "model.weights=hf://tiny-lab/other")
    assert done.returncode == 2
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert "codescent fetch hf://tiny-lab/other" in done.stderr
    done = called(tmp_path, "train", "run.toml", *NAMES, *SHORT)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3, done.stderr  # weights, tokenizer, corpus
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("key", ["config", "weights"])
def test_a_plan_of_any_model_has_the_content_of_its_config(key: str, hub: Hub, tmp_path: Path) -> None:
    """Its weights are downloaded for a plan; or the run depends on a file of the cache."""
    done = called(
        tmp_path,
        "plan",
        "run.toml",
        *NAMES[1:],
        *SHORT,
        "model.kind=transformers",
        f"model.{key}=hf://{MODEL}",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    model = json.loads(done.stdout)["model"]
    assert json.loads(model["sizes"]["config"])["model_type"] == "gpt2"
    assert cached(tmp_path) == {"config.json"}


def test_fetch_lists_downloads_and_repairs(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node leaves out a file that the nodes need; or a damaged copy is taken for good."""
    done = called(tmp_path, "fetch", "run.toml", *NAMES, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors  (to download)" in done.stdout
    assert "pytorch_model.bin" not in done.stdout
    assert not hub.asked("GET", "/resolve/") or cached(tmp_path) == {"config.json"}
    done = called(tmp_path, "fetch", "run.toml", *NAMES)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "hf" / "hub") in done.stdout
    blob = next((tmp_path / "hf").rglob("model.safetensors")).resolve()
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = called(tmp_path, "fetch", f"hf://{MODEL}")
    assert done.returncode == 0, done.stderr
    assert "it is downloaded again" in done.stderr
    assert next((tmp_path / "hf").rglob("model.safetensors")).read_bytes() == whole
    next((tmp_path / "hf").rglob("model.safetensors")).resolve().write_bytes(whole[:-9])
    offline(monkeypatch)
    again(monkeypatch)
    done = called(tmp_path, "train", "run.toml", *NAMES, *SHORT)
    assert done.returncode == 2
    assert "is damaged" in done.stderr
    assert f"codescent fetch hf://{MODEL}" in done.stderr


def test_fetch_repairs_what_it_reads_first_and_names_every_problem(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged config.json ends `fetch`, whose message says to call `fetch`; or the second wrong name comes after an
    hour of downloading the first; or weights are read twice."""
    assert called(tmp_path, "fetch", f"hf://{MODEL}").returncode == 0
    blob = next((tmp_path / "hf").rglob("config.json")).resolve()
    whole = blob.read_bytes()
    for damaged in (whole[:-9], b"[" + whole[1:]):
        blob.write_bytes(damaged)
        done = called(tmp_path, "fetch", f"hf://{MODEL}")
        assert done.returncode == 0, done.stderr
        assert next((tmp_path / "hf").rglob("config.json")).read_bytes() == whole
    hub.requests.clear()
    done = called(tmp_path, "fetch", f"hf://datasets/{DATASET}/data/train.txt", "hf://tiny-lab/none", "hf://x", "a=b")
    assert done.returncode == 2
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["hf://tiny-lab/none", "hf://x", "a=b"]
    assert not hub.asked("GET", "/resolve/")
    bad = ("model.weights=hf://tiny-lab/gpt2-tiny", "data.corpus=hf://datasets/tiny-lab/rhymes/none.txt")
    done = called(tmp_path, "fetch", "run.toml", *bad, "data.validation=hf://datasets/tiny-lab/rhymes/no", "--dry-run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2, done.stderr
    read = list[str]()
    differs = listing.HubFile.differs
    monkeypatch.setattr(listing.HubFile, "differs", lambda self, path: read.append(self.path) or differs(self, path))
    assert called(tmp_path, "fetch", "run.toml", NAMES[0]).returncode == 0
    assert read.count("model.safetensors") == 1


def test_a_mirror_and_a_full_disk(
    hub: Hub, tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password in HF_ENDPOINT is shown or kept; a new commit of weights that are there is refused: no room."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url.replace("//", "//me:hunter2@"))
    done = called(tmp_path, "fetch", "hf://tiny-lab/none")
    assert f"{hub.url} has no such model" in done.stderr
    kept = "".join(path.read_text() for path in (tmp_path / "cache").rglob("*.json"))
    assert f"tiny-lab/none at {hub.url} for" in kept
    assert "hunter2" not in done.stdout + done.stderr + kept
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    assert called(tmp_path, "fetch", f"hf://{MODEL}").returncode == 0
    hub.models[MODEL].push({**files, "README.md": b"another text"})
    again(monkeypatch)
    monkeypatch.setattr(obtain.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 0))
    done = called(tmp_path, "fetch", f"hf://{MODEL}")
    assert done.returncode == 0, done.stderr
    assert not hub.asked("GET", "README.md")


def test_corpora_of_a_mixture_are_fetched_and_pinned(hub: Hub, tmp_path: Path) -> None:
    """A corpus of a mixture that is not pinned is another one after a resume; or nodes lack it."""
    (tmp_path / "own.txt").write_text("one descent of many workers\n" * 200)
    name = f"hf://datasets/{DATASET}/data/train.txt"
    mixture = f'data.mixture=[{{corpus="{name}", name="rhymes", weight=1}}, {{corpus="own.txt", weight=1}}]'
    done = called(tmp_path, "fetch", "run.toml", *NAMES[:2], mixture)
    assert done.returncode == 0, done.stderr
    assert "data.mixture.rhymes.corpus: hf://datasets/" in done.stdout
    assert cached(tmp_path, "datasets", DATASET) == {"data/train.txt"}
    done = called(tmp_path, "train", "run.toml", "run.name=mixed", *NAMES[:2], mixture, *SHORT)
    assert done.returncode == 0, done.stderr
    rhymes, own = load(tmp_path / "runs" / "mixed" / "config.toml").config.data.mixture or ()
    assert rhymes.corpus == f"hf://datasets/{DATASET}@{commits(hub)[1]}/data/train.txt"
    assert own.corpus == "own.txt"


def test_a_download_goes_on_and_is_verified(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken download begins anew, or a byte that changed on the way is trained on."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.breaks["model.safetensors"] = 5000
    done = called(tmp_path, "fetch", f"hf://{MODEL}")
    assert done.returncode == 0, done.stderr
    assert "bytes=5000-" in {part for _, _, part in hub.asked("GET", "model.safetensors")}
    for path in (tmp_path / "hf").rglob("*.safetensors"):
        path.resolve().unlink()
        path.unlink()
    hub.damages = True
    done = called(tmp_path, "fetch", f"hf://{MODEL}")
    assert done.returncode == 2
    assert "has the sha256" in done.stderr
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_a_download_ends_where_the_run_is_asked_to_stop(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's time is over, and its run downloads on until it is killed; or half a file stays in the cache."""
    assert called(tmp_path, "plan", "run.toml", *NAMES).returncode == 0
    monkeypatch.setattr(early, "_first", signal.SIGUSR1)
    done = called(tmp_path, "train", "run.toml", *NAMES, *SHORT)
    assert done.returncode not in (0, 2), done.stderr
    assert "SIGUSR1: stopped before the run began" in done.stderr
    assert cached(tmp_path) == {"config.json"}
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


def test_shards_and_pickles(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    """A shard is left out; or a pickle is downloaded where there is nothing else."""
    hub.models["tiny-lab/shards"] = Repository()
    hub.models["tiny-lab/shards"].push(model_files(shard_bytes="20KB"))
    done = called(tmp_path, "import", "hf://tiny-lab/shards", "runs/tiny")
    assert done.returncode == 0, done.stderr
    assert sum(name.startswith("model-0000") for name in cached(tmp_path, repo="tiny-lab/shards")) > 1
    weights = load(tmp_path / "runs" / "tiny" / "config.toml").config.model.weights
    assert weights == f"hf://tiny-lab/shards@{hub.models['tiny-lab/shards'].refs['main']}"
    hub.models["tiny-lab/pickled"] = Repository()
    hub.models["tiny-lab/pickled"].push({name: data for name, data in files.items() if "safetensors" not in name})
    done = called(tmp_path, "import", "hf://tiny-lab/pickled", "runs/pickled")
    assert done.returncode == 2
    assert "a pickle may run any code" in done.stderr
    assert not hub.asked("GET", "pytorch_model.bin")


REFUSED = {
    f"hf://{MODEL.replace('tiny', 'tini')}": "has no such model, or it is private",
    "hf://tiny-lab/gpt2-tini": f"did you mean {MODEL}?",
    f"hf://{MODEL}@mian": "has no revision mian; give a branch, a tag or a commit; did you mean main?",
    f"hf://datasets/{DATASET}/data/*.csv": "no file of the data set has the path data/*.csv; it has data/train.txt",
    f"hf://datasets/{DATASET}/[z-a]": "[z-a] is not a pattern (glob): bad character range z-a",
    f"hf://datasets/{DATASET}": f"add the path of a file, a folder or a pattern: hf://datasets/{DATASET}",
    f"hf://{MODEL}/config.json": "write hf://OWNER/NAME",
    "hf://tiny-lab/gated": "is gated: accept its terms at",
    "hf://tiny-lab/mamba": "model_type = 'mamba': known are",
}


def test_what_cannot_be_had_is_refused_with_what_to_do(
    hub: Hub, tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the library is a traceback, or does not say what to do."""
    for name in ("gated", "mamba"):
        hub.models[f"tiny-lab/{name}"] = Repository(gated=name == "gated")
        hub.models[f"tiny-lab/{name}"].push({**files, "config.json": b'{"model_type": "mamba"}'})
    for word, said in REFUSED.items():
        done = called(tmp_path, "fetch", word)
        assert done.returncode == 2, (word, done)
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert said in done.stderr, done.stderr
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert "model_type = 'mamba'" in called(tmp_path, "fetch", "hf://tiny-lab/gated").stderr
    with monkeypatch.context() as patch:
        patch.setattr(obtain.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 0))
        done = called(tmp_path, "fetch", f"hf://{MODEL}")
    assert done.returncode == 2
    assert re.search(r"no space left on the disk: its files need 8\d\d bytes, and", done.stderr), done.stderr
    again(monkeypatch)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = called(tmp_path, "fetch", f"hf://{MODEL}")
    assert done.returncode == 2
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_ranks_of_a_machine_ask_once_and_fail_together(hub: Hub, tmp_path: Path) -> None:
    """Every rank asks the hub and downloads; or one waits for a rank that could not download."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = [sys.executable, *torchrun, "-m", "codescent", "train", "run.toml", *NAMES, *SHORT]

    def ranks(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=120, check=False
        )

    hub.refused.add("model.safetensors")
    done = ranks()
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "answers 403 (not for you)" in errors[0], done.stderr
    assert not (tmp_path / "runs").exists()
    assert len(hub.asked("GET", "/revision/")) == 2, hub.requests  # one for each repository
    assert len(hub.asked("GET", "train.txt")) == 1, hub.requests
    hub.refused.clear()
    hub.requests.clear()
    done = ranks()
    assert done.returncode == 0, done.stderr
    assert len(hub.asked("GET", "/revision/")) == 2, hub.requests
    assert len(hub.asked("GET", "model.safetensors")) == 1, hub.requests


def test_ranks_that_this_process_starts_ask_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are given the branch, and each asks the hub for its commit."""
    given: list[list[str]] = []

    def run_ranks(words: list[str], *_: object, **__: object) -> int:
        given.append(words)
        return 0

    monkeypatch.setattr(train_ranks, "run_ranks", run_ranks)
    monkeypatch.setattr(train_ranks, "record_lost", lambda *_: None)
    done = called(tmp_path, "train", "run.toml", *NAMES, *SHORT, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    weights, corpus = commits(hub)
    said = (f"hf://{MODEL}@{weights}", f"hf://datasets/{DATASET}@{corpus}/data/train.txt")
    assert {f"model.weights={said[0]}", f"data.tokenizer={said[0]}", f"data.corpus={said[1]}"} <= {*given[0]}


def test_a_cache_that_has_moved_and_files_of_others(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run wants the old place of the cache; or a cache that `hf download` has filled is of no use offline."""
    hub.datasets[DATASET].push({"train.txt": corpus_files()["data/train.txt"], "README.md": b"one text"})
    names = (*NAMES[:2], f"data.corpus=hf://datasets/{DATASET}")
    done = called(tmp_path, "train", "run.toml", *names, *SHORT)
    assert done.returncode == 0, done.stderr
    (tmp_path / "hf").rename(tmp_path / "moved")
    for folder in (tmp_path / "moved").rglob("codescent"):
        shutil.rmtree(folder)  # our listings: other tools keep none
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "moved" / "hub"))
    offline(monkeypatch)
    again(monkeypatch)
    more = ("train.num_steps=3", "optimizer.decay_steps=2", "--resume")
    done = called(tmp_path, "train", "run.toml", *names, *SHORT, *more)
    assert done.returncode == 0, done.stderr
    config = load(tmp_path / "runs" / "finetune" / "config.toml").config
    assert config.data.corpus == f"hf://datasets/{DATASET}@{commits(hub)[1]}/train.txt"


def test_a_job_is_told_what_the_nodes_would_lack(hub: Hub, tmp_path: Path) -> None:
    """A script is written, and its job fails on nodes without internet."""
    site = ("--to", "slurm", "--nodes", "1", "--devices", "1", "site.time=00:10:00", "site.devices=none")
    words = ("launch", "run.toml", *NAMES, *SHORT, *site)
    done = called(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("do it here: codescent fetch hf://") == 3, done.stderr
    assert called(tmp_path, "fetch", "run.toml", *NAMES).returncode == 0
    assert "codescent fetch" not in called(tmp_path, *words).stderr


def test_text_of_a_hub_is_prepared_by_hand(hub: Hub, tmp_path: Path) -> None:
    """`codescent data` takes the name for a path."""
    words = (f"hf://datasets/{DATASET}/data/train.txt", "--tokenizer", f"hf://{MODEL}")
    done = called(tmp_path, "data", *words)
    assert done.returncode == 0, done.stderr
    done = called(tmp_path, "train", "run.toml", *NAMES, *SHORT)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "datasets").iterdir())) == 1


def test_the_data_of_a_config_is_all_that_a_job_without_network_needs(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a login node has prepared less than the job reads, or the command that it prints does not train there."""
    words = [*NAMES, *SHORT]
    done = called(tmp_path, "data", "run.toml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"/snapshots/{commits(hub)[0]}") == 2  # weights and tokenizer
    assert re.search(r"^prepared: \S+ \w+ in datasets/", done.stdout, re.MULTILINE)
    (command,) = re.findall(r"internet: (HF_HUB_OFFLINE=1 codescent .+)$", done.stdout, re.MULTILINE)
    variables = re.findall(r"(\w+=[^ ,]+)(?:, |$)", done.stdout.splitlines()[-1].partition("the same ")[2])
    assert f"HF_HOME={tmp_path / 'hf'}" in variables

    alone = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    if subprocess.run([*alone, "ip link set lo up"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    before = sorted((tmp_path / "datasets").iterdir())
    hub.requests.clear()
    monkeypatch.delenv("HF_ENDPOINT")
    line = command.replace("codescent", f"{sys.executable} -m codescent", 1)
    job = subprocess.run(
        [*alone, f"ip link set lo up && {line} --ranks 2"], cwd=tmp_path,
        env=environment(PYTHONPATH=str(Path(__file__).resolve().parent.parent)), text=True, capture_output=True,
        timeout=150, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    assert not hub.requests
    assert sorted((tmp_path / "datasets").iterdir()) == before
