"""In: links, pipes, devices and endless files where this program writes or reads. Out: each is refused in one sentence.
Does not run whole commands: the subjects "strangers" of tests/fuzz do. What may open files: test_opened_files.py."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reported import make_run

from codescent.base import writing
from codescent.base.durable import replace_file, write_synced
from codescent.base.errors import UserError
from codescent.base.output import copy_to
from codescent.base.published import published
from codescent.base.reading import open_regular, read_bytes
from codescent.base.safetensors_header import read_header
from codescent.build.saved import saved_plan
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from codescent.config.toml_file import MOST_DEPTH, read_toml
from codescent.data.prepared import claimed, prepared
from codescent.data.text.prepare import prepare
from codescent.data.text.request import make_request
from codescent.huggingface.folder import open_folder
from codescent.jobs import submitted
from codescent.jobs.lines import appending
from codescent.record import RunFolder, order
from codescent.record.beginning import write_new
from codescent.record.order import Applied
from codescent.results import open_run
from codescent.study import collect, runner
from codescent.study.folder import Definition, StudyFolder
from codescent.study.points import Spec
from codescent.study.result import Kind
from codescent.study.runner import Progress, Turn, run_turns
from codescent.tasks.tensors.files import TensorFile
from codescent.trace import chrome
from codescent.trace.chrome import ChromeTrace
from codescent.verbs.replay import replay_run

SECRET = "export PATH\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of the user, to which links lead."""
    (path := tmp_path / "mine.txt").write_text(SECRET)
    return path


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A folder of the user, to which links lead."""
    (path := tmp_path / "letters").mkdir()
    (path / "letter.txt").write_text("dear reader")
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def endless(path: Path) -> None:
    path.write_text("")
    os.truncate(path, 1 << 42)


def a_socket(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # the name of a socket is short
        made.bind(path.name)


# writing


@pytest.mark.parametrize(
    "write",
    [
        lambda path: writing.open_new(path).close(),
        lambda path: writing.open_new(path, anew=True).close(),
        lambda path: writing.open_own(path).truncate(0),
        lambda path: writing.open_own(path, appends=True, makes=True).write(b"more"),
        lambda path: writing.cut(path, 0),
        lambda path: writing.remove_file(path),
        lambda path: writing.remove_folder(path, ignore_errors=True),
        lambda path: replace_file(path, "new"),
        lambda path: write_synced(path, "new"),
        lambda path: writing.copy_file(path.with_name("mine.txt"), path, 100),
    ],
)
@pytest.mark.parametrize("kind", ["symbolic", "hard", "to nothing"])
def test_nothing_is_written_through_a_link(write: Callable[[Path], object], kind: str, mine: Path) -> None:
    path, absent = mine.with_name("link"), mine.with_name("absent")
    path.hardlink_to(mine) if kind == "hard" else path.symlink_to(mine if kind == "symbolic" else absent)
    with suppress(OSError):
        write(path)
    assert (mine.read_text(), absent.exists()) == (SECRET, False)


def test_a_link_is_named_and_a_folder_above_may_be_the_users_own_link(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    path = tmp_path / "runs" / "a"
    replace_file(path, "1")
    with writing.open_own(path, appends=True) as file:
        file.write(b"2")
    assert (tmp_path / "scratch" / "a").read_text() == "12"
    path.unlink()
    path.symlink_to(mine)
    with pytest.raises(OSError, match=rf"is a symbolic link, and nothing is written through it.*{path}"):
        writing.open_own(path)
    for name in ("file", "folder/file"):
        with pytest.raises(OSError, match=rf"is a symbolic link.*{tmp_path / 'runs'}'"):
            writing.make_folder(tmp_path / "runs" / name, tmp_path)
    replace_file(path, "mine")
    assert (mine.read_text(), path.read_text(), path.is_symlink()) == (SECRET, "mine", False)


@pytest.mark.parametrize("name", ["pipe", "link", "folder"])
def test_a_device_a_pipe_and_a_folder_are_not_replaced(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/null")
    kind = (path := tmp_path / name).lstat().st_mode
    with pytest.raises(OSError, match=r"is a (device|pipe), not a regular file|Is a directory"):
        replace_file(path, "text")
    assert path.lstat().st_mode == kind
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "link", "pipe"]


def test_what_is_deleted_is_not_what_a_link_leads_to(letters: Path, tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "link").symlink_to(letters)
    (tmp_path / "link").symlink_to(letters)
    with pytest.raises(OSError, match="symbolic link"):
        writing.remove_folder(tmp_path / "link")
    handle = os.open(tmp_path / "folder", os.O_RDONLY)
    writing.empty_folder(handle)
    os.close(handle)
    assert (names_in(tmp_path / "folder"), names_in(letters)) == ([], ["letter.txt"])


def test_a_library_writes_into_a_folder_that_nobody_else_may_enter(tmp_path: Path) -> None:
    with writing.hidden_folder(tmp_path) as hidden:
        (hidden / "a").write_text("1")
        (made,) = tmp_path.iterdir()
        assert made.stat().st_mode & 0o777 == 0o700
        writing.move(hidden / "a", tmp_path / "b")
    assert [one.read_text() for one in tmp_path.iterdir()] == ["1"]


# run folders, studies, jobs, data


WRITTEN = ("config.toml", "plan.json", "environment.json", "tokenizer.json", "metrics.csv", "metrics.jsonl")
APPENDED = (
    *WRITTEN[-2:],
    "events.jsonl",
    "ranks.csv",
    "memory.csv",
    ".writer",
    "order/server_0.jsonl",
    "logs/rank-0.log",
)


@pytest.mark.parametrize("name", [".config.toml.partial", *WRITTEN, *APPENDED, "order", "logs", "checkpoints"])
def test_a_link_in_a_run_folder_is_followed_by_nothing_that_writes(
    name: str, tmp_path: Path, mine: Path, letters: Path
) -> None:
    run = make_run(tmp_path / "a", 2)
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    is_folder = name in ("order", "logs", "checkpoints")
    if is_folder:
        with suppress(FileNotFoundError):
            path.rmdir()
    path.unlink(missing_ok=True)
    path.symlink_to(letters if is_folder else mine)
    acts: list[Callable[[], object]] = [
        run.hold,
        lambda: run.write_config("other", run.plan),
        lambda: run.write_environment({}),
        lambda: run.write_task_files({"tokenizer.json": "{}"}),
        lambda: run.event("end"),
        lambda: run.metrics({"step": 50}),
        lambda: run.write_ranks([{**next(iter(run.iter_ranks()))}]),
        lambda: run.write_memory([]),
        lambda: run.rewind(0),
        lambda: order.append(run.path, 0, [Applied(0, 1, 0, 1, 0, 0)]),
        lambda: order.rewind(run.path, 0, 0),
        lambda: copy_to(run.path / "logs" / "rank-0.log"),
        lambda: Checkpoints(run.checkpoints, 1, keep_best=False, of_run=True).clean(),
        lambda: Checkpoints(run.checkpoints, 1, keep_best=False, of_run=True).save(1, {}, {}),
    ]
    for act in acts:
        with suppress(UserError, OSError, StopIteration):
            act()
    run.release()
    assert (mine.read_text(), names_in(letters)) == (SECRET, ["letter.txt"])


def test_a_hard_link_in_a_run_folder_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (tmp_path / "copy").hardlink_to(run.path / "events.jsonl")
    before = (tmp_path / "copy").read_text()
    with pytest.raises(UserError, match=r"events.jsonl: has a second name \(a hard link\).*replace it by a copy"):
        run.event("end")
    assert (tmp_path / "copy").read_text() == before


def test_a_run_folder_under_a_link_of_the_user_works(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    run = make_run(tmp_path / "runs" / "a", 2)
    run.hold()
    run.write_config("[run]\n", run.plan)
    run.event("end")
    run.release()
    assert len(RunFolder.open(tmp_path / "scratch" / "a").read_events()) == 3


def test_a_folder_that_is_put_in_the_place_of_a_link_is_new(tmp_path: Path, letters: Path) -> None:
    """Whoever swaps the hidden folder for a link while files are written gets none of them."""

    def swap_and_write() -> None:
        with published(tmp_path / "run") as making:
            making.rmdir()
            making.symlink_to(letters)
            write_new(making, {"config.toml": "x"})

    with pytest.raises(UserError, match="symbolic link"):
        swap_and_write()
    assert names_in(letters) == ["letter.txt"]


@pytest.mark.parametrize("begin", ["data", "claim"])
def test_a_link_in_the_place_of_unfinished_data_empties_nothing(begin: str, tmp_path: Path, letters: Path) -> None:
    partial = tmp_path / "data" / ".partial-x"
    partial.parent.mkdir()
    if begin == "claim":
        partial.symlink_to(letters)
        with pytest.raises(UserError, match=r"partial-x: is a symbolic link"):
            prepared(partial.with_name("x"), lambda _: None, lambda _: None)
        with pytest.raises(UserError, match=r"partial-x: is a symbolic link"), claimed(partial):
            pass
    else:
        (corpus := tmp_path / "c.txt").write_text("a few words " * 100)
        (hidden := make_request(str(corpus), "byte", 0.1, "text", None).partial_folder(partial.parent)).mkdir()
        (hidden / "tokenizer.new").symlink_to(letters / "letter.txt")
        (hidden / "train_000000.bin").symlink_to(letters / "letter.txt")
        (hidden / "folder").mkdir()
        assert (prepare(str(corpus), "byte", partial.parent) / "train_000000.bin").is_file()
    assert (letters / "letter.txt").read_text() == "dear reader"


@pytest.mark.parametrize("plant", ["link", "pipe", "endless", "device"])
def test_collected_are_known_regular_files_of_a_bounded_size(plant: str, tmp_path: Path, mine: Path) -> None:
    source = make_run(tmp_path / "a", 2).path
    (source / "id_rsa").symlink_to(mine)
    (source / "notes").symlink_to("/dev/zero")
    collect._copy(source, tmp_path / "whole")
    assert {one.name for one in (tmp_path / "whole").iterdir()} == {
        *("config.toml", "plan.json", "environment.json", "metrics.csv", "metrics.jsonl", "events.jsonl"),
        *("ranks.csv", "checkpoints"),
    }
    assert (tmp_path / "whole" / "metrics.csv").read_bytes() == (source / "metrics.csv").read_bytes()
    (path := source / "events.jsonl").unlink()
    if plant == "pipe":
        pipe(path)
    elif plant == "endless":
        endless(path)
    else:
        path.symlink_to(mine if plant == "link" else "/dev/zero")
    with pytest.raises(UserError, match=r"events.jsonl: is a symbolic link|is a pipe|more than 4,294,967,296 bytes"):
        collect._copy(source, tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_a_record_with_half_a_character_is_named(tmp_path: Path) -> None:
    folder = submitted.new_folder(tmp_path / "run")
    made = submitted.keep(folder, "slurm", "7", "n", "n.sbatch", tmp_path)
    assert submitted.jobs_of(tmp_path / "run") == [made]
    record = folder / "job-7.json"
    record.write_text(record.read_text().replace(str(tmp_path), "/a/\\ud800"))
    with pytest.raises(UserError, match=r"job-7.json: not the record of a job \(folder: has half of a surrogate pair"):
        submitted.jobs_of(tmp_path / "run")


@pytest.mark.parametrize("kind", ["none", "file", "link", "pipe"])
def test_a_job_script_appends_to_a_file_alone(kind: str, tmp_path: Path, mine: Path) -> None:
    before, file = mine.read_bytes(), tmp_path / "it's hosts"
    {"none": lambda: None, "file": file.touch, "link": lambda: file.symlink_to(mine), "pipe": lambda: pipe(file)}[
        kind
    ]()
    subprocess.run(["bash", "-euc", f"{appending('echo node1', file)}; echo on"], check=True, timeout=20)
    assert mine.read_bytes() == before
    assert kind in ("link", "pipe") or file.read_text() == "node1\n"


# reading


@pytest.mark.parametrize(
    "read",
    [
        read_bytes,
        lambda path: open_regular(path).read(1),
        read_toml,
        lambda path: read_manifest(path.parent),
        lambda path: read_header(path),
        lambda path: TensorFile(path.rename(path.with_suffix(".h5")), ""),
        lambda path: TensorFile(path.rename(path.with_suffix(".pt")), ""),
        lambda path: TensorFile(path.rename(path.with_suffix(".safetensors")), ""),
        lambda path: ChromeTrace(path),
        lambda path: open_folder(path.rename(path.with_name("config.json")).parent),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "socket"])
def test_what_is_no_regular_file_is_not_read(read: Callable[[Path], object], kind: str, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    {"pipe": pipe, "socket": a_socket, "/dev/zero": lambda one: one.symlink_to(kind)}[kind](path)
    what = {"pipe": "is a pipe", "socket": "is a socket or a device", "/dev/zero": "is a device"}[kind]
    with pytest.raises((UserError, OSError), match=rf"{what}, not a regular file"):
        read(path)


@pytest.mark.parametrize("name", ["config.toml", "plan.json", "environment.json", "events.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "/dev/zero"])
def test_a_run_folder_with_a_file_that_never_ends_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", 2).path / name
    path.unlink()
    {"pipe": pipe, "endless": endless, "/dev/zero": lambda one: one.symlink_to(kind)}[kind](path)
    said = r"is a (pipe|device), not a regular file|has (more than )?[0-9,]+ b"
    with pytest.raises(UserError, match=rf"{name}: ({said})"):
        _ = open_run(tmp_path / "a").columns


def test_a_manifest_is_as_small_as_what_it_describes(tmp_path: Path) -> None:
    """It is read as a whole, so one of a gibibyte beside a small checkpoint is not read."""
    (tmp_path / MANIFEST).touch()
    (tmp_path / "rank_00000_part_000.safetensors").write_bytes(bytes(1000))
    os.truncate(tmp_path / MANIFEST, (1 << 26) + 1)
    with pytest.raises(CheckpointError, match=r"manifest.json: has more than 67,108,864 bytes, which no such file has"):
        read_manifest(tmp_path)
    os.truncate(tmp_path / "rank_00000_part_000.safetensors", 1 << 27)
    with pytest.raises(CheckpointError, match="its bytes were changed"):
        read_manifest(tmp_path)


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 2)
    os.truncate(run.path / "events.jsonl", 1 << 30)
    for act in (run.read_events, lambda: run.event("end")):
        with pytest.raises(UserError, match=r"events.jsonl: has a line of more than 16,777,216 bytes"):
            act()


def test_a_shell_may_give_a_file_by_a_pipe() -> None:
    """As `<(...)` does, such as a table for `study --table`."""
    reader, writer = os.pipe()
    os.write(writer, b"a,b\n")
    os.close(writer)
    assert read_bytes(f"/dev/fd/{reader}") == b"a,b\n"
    os.close(reader)


def test_a_point_of_a_study_that_is_a_link_is_refused(
    tmp_path: Path, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec("one", "one", {}, {}, 1)
    definition = Definition("s", Kind.GRID, "default", 1, 3, 1, {}, [], [spec], {})
    folder = StudyFolder.create(tmp_path / "s", definition)
    (tmp_path / "s" / "one").symlink_to(letters)
    with pytest.raises(UserError, match=r"s/one: is a symbolic link"), folder.hold():
        pass
    (tmp_path / "s" / "one").unlink()
    turns = Progress([Turn(spec, 1)])
    monkeypatch.setattr(runner, "train_run", lambda *_: pytest.fail("a run begins"))
    with folder.hold():
        (tmp_path / "s" / "one").symlink_to(letters)  # after the look of `hold`
        with pytest.raises(UserError, match=r"s/one: is a symbolic link"):
            list(run_turns(folder, turns))
    with pytest.raises(UserError, match=r"is a symbolic link"):
        folder.note(spec, 1, {})
    with pytest.raises(UserError, match=r"is a symbolic link"):
        folder.forget(spec, 1)
    assert names_in(letters) == ["letter.txt"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("external link", "is a link to another file, 'other.h5'"),
        ("link through a group", "is a link to another file, 'other.h5'"),
        ("external storage", "has its numbers in another file, '.*passwd'"),
        ("virtual", "is a virtual dataset"),
        ("circle", "leads in a circle of links"),
        ("to nothing", "is a link that leads nowhere"),
    ],
)
def test_numbers_of_other_files_are_no_samples(make: str, said: str, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path, shape = tmp_path / "a.h5", (4, 2, 3)
    numbers = np.zeros(shape, np.float32)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["source"] = numbers
    with h5py.File(path, "w") as file:
        file["target"] = numbers
        file["other"] = h5py.ExternalLink("/dev/zero", "/x")  # nobody reads it
        if make == "external link":
            file["source"] = h5py.ExternalLink("other.h5", "/source")
        elif make == "link through a group":
            file["group"] = h5py.ExternalLink("other.h5", "/")
            file["source"] = h5py.SoftLink("/group/source")
        elif make == "external storage":
            file.create_dataset("source", shape, "<f4", external=[("/etc/passwd", 0, 96)])
        elif make == "virtual":
            layout = h5py.VirtualLayout(shape, "<f4")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "source", shape)
            file.create_virtual_dataset("source", layout)
        elif make == "circle":
            file["source"], file["again"] = h5py.SoftLink("/again"), h5py.SoftLink("/source")
        else:
            file["source"] = h5py.SoftLink("/absent")
    with pytest.raises(UserError, match=rf'a.h5: "source" {said}'):
        TensorFile(path, "")


def test_a_link_within_a_file_of_samples_is_followed(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group/inner/numbers"] = np.ones((4, 2, 3), np.float32)
        file["group/link"] = h5py.SoftLink("inner/numbers")
        file["source"], file["target"] = h5py.SoftLink("/group/link"), h5py.SoftLink("/source")
    assert TensorFile(tmp_path / "a.h5", "").whole("target").sum() == 24


def test_a_small_trace_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "MOST_SMALL_BYTES", 1 << 20)
    event = b'{"name": "x"},\n'
    path = tmp_path / "rank_00000.json.gz"
    path.write_bytes(gzip.compress(b'{"schemaVersion": 1, "traceEvents": [' + event * 200_000 + event[:-2] + b"]}"))
    seen: list[object] = []
    with pytest.raises(UserError, match=r"damaged: unpacks to more than 1,048,576 bytes, 50 times"):
        seen.extend(ChromeTrace(path).events())
    assert len(seen) < (1 << 20) / len(event) + 1


# sizes of numbers and lists


def test_lists_of_many_lines_are_parsed_twice_and_not_once_for_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[a]\nx = [\n  "]",  # ]\n' + '  "[\\"",\n' * 3000 + "]\ny = '''\nz = 1\n''''\nt = {u = 1}\n[[b]]\nc = 2\n"
    (path := tmp_path / "a.toml").write_text(text)
    parsed, loads = [], tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(len(text)) or loads(text))
    _, lines = read_toml(path)
    assert sum(parsed) == 2 * len(text)
    begins = {("a",): 1, ("a", "x"): 2, ("a", "y"): 3005, ("a", "t"): 3008, ("b",): 3009, ("b", "c"): 3010}
    assert lines == {**begins, ("a", "t", "u"): 3008}


@pytest.mark.parametrize("text", ["a" + ".a" * 100_000 + " = 1\n", "x = 1\n[" + "a . " * MOST_DEPTH + "b]\n"])
def test_a_key_of_endless_parts_is_refused(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.toml").write_text(text)
    with pytest.raises(UserError, match=r"a.toml:[12]:1: not TOML: A key of more than 64 parts"):
        read_toml(path)


def str_of(value: object) -> str:
    return str(value)[:40]


@pytest.fixture(scope="module")
def over_tp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks over tp, to be copied."""
    return make_run(tmp_path_factory.mktemp("tp") / "a", 2, "parallel.tp=2").path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(((("mesh", axis)), value) for axis in ("tp", "pp", "dp_replicate") for value in (10**9, 0, -1)),
        *((("tensors", 0, part, "shards", "tp"), 9) for part in ("weights", "gradients", "optimizer")),
        *((("layout", "servers"), value) for value in (10**9, -1, "zzz")),
        *((("decides",), value) for value in ([1], "x" * 10**6, {"run.seed": 3}, {"parallel.servers": [1]})),
    ],
    ids=str_of,
)
def test_a_plan_of_a_thousand_million_ranks_is_damaged(
    field: tuple[str | int, ...], value: Any, tmp_path: Path, over_tp: Path
) -> None:
    path = shutil.copytree(over_tp, tmp_path / "a") / "plan.json"
    data = at = json.loads(path.read_text())
    for name in field[:-1]:
        at = at[name]
    at[field[-1]] = value
    path.write_text(json.dumps(data))
    why = r"mesh:|layout:|decides:|.*cannot be cut over|.* is not an object|.* is no number and no text"
    for read in (lambda: saved_plan(RunFolder.open(path.parent)), lambda: replay_run(path.parent, as_json=False)):
        with pytest.raises(UserError, match=rf"plan.json: damaged: not the plan of a run \(({why})") as caught:
            read()
        assert len(str(caught.value)) < 300 + len(str(path))
    with pytest.raises(UserError, match=r"plan.json"):
        _ = open_run(path.parent).num_ranks


def test_checkpoints_that_may_not_be_listed_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may list everything, so the system's answer stands in."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"checkpoints: cannot be listed: Permission denied"):
        Checkpoints(make_run(tmp_path / "a").checkpoints, 1, keep_best=False).latest()
