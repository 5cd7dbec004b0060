"""In: command lines of `codescent plan --search`. Out: the screen, its JSON, its config, what is refused.
Does not check what is found: test_search.py does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import called

from codescent.config.load import load

SMALL = ("default", "data.corpus=synthetic", "model.vocab_size=2048", "train.global_batch_size=16",
         "train.microbatch_size=2", "parallel.recompute=none")  # fmt: skip
SEARCH = ("--cluster", "h100-sxm", "--ranks", "4", "--search")


def asked(folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    done = called(folder, "plan", *words)
    return done.returncode, done.stdout, done.stderr


def found(folder: Path, *words: str) -> dict[str, Any]:
    code, text, said = asked(folder, *words, "--json")
    assert code == 0, said
    (one,) = json.loads(text)
    return dict(one)


def test_the_screen_has_ten_layouts_with_reasons_and_what_was_left_out(tmp_path: Path) -> None:
    """A layout without a reason, or numbers of layouts that do not add up."""
    code, text, said = asked(tmp_path, *SMALL, *SEARCH)
    assert code == 0, said
    rows = [line.split("  ", 1)[0] for line in text.splitlines()]
    assert [name for name in rows if name.isdecimal()] == [str(number) for number in range(1, 11)]
    assert text.count(" slower: ") + text.count("as fast; ") == 9
    assert "its largest loss: " in text
    assert "least memory" in rows
    assert "train.microbatch_size = 2 (command line)" in text
    counts = found(tmp_path, *SMALL, *SEARCH)["counts"]
    left = counts["admissible"] + counts["refused"] + counts["unpriced"] + counts["other_losses"]
    assert left == counts["combinations"]
    assert counts["unfit"] + counts["ruled_out"] + counts["simulated"] == counts["admissible"]


def test_the_config_that_it_writes_is_the_first_layout(tmp_path: Path) -> None:
    """A key that is forgotten, so that the run has another layout or another model; a base that is not found."""
    own = tmp_path / "configs" / "own.toml"
    own.parent.mkdir()
    own.write_text('base = "default.toml"\n[train]\nglobal_batch_size = 16\nmicrobatch_size = 4\n')
    words = ("data.corpus=synthetic", "model.vocab_size=2048", "model.num_layers=3")
    for config in (str(own), "default"):
        out = tmp_path / f"{Path(config).stem}_best.toml"
        more = () if config != "default" else ("train.global_batch_size=16",)
        one = found(tmp_path, config, *words, *more, *SEARCH, "--free", "all", "--out", str(out))
        code, text, said = asked(tmp_path, str(out), "--cluster", "h100-sxm", "--json")
        assert code == 0, said
        assert "no effect" not in said
        assert json.loads(text)["step_s"] == pytest.approx(one["best"][0]["step_s"])
        assert load(out).config.model.num_layers == 3
        assert load(out).config.parallel.ranks == 4


def test_numbers_of_ranks_are_compared(tmp_path: Path) -> None:
    """The best layout of one number of ranks beside that of another, with the wrong speeds."""
    words = (*SMALL, "--cluster", "h100-sxm", "--search", "--ranks", "2,8", "train.num_steps=100")
    code, text, said = asked(tmp_path, *words)
    assert code == 0, said
    assert "2 ranks" in text
    assert "of those on 2 devices" in text
    _, listed, _ = asked(tmp_path, *words, "--json")
    assert [one["ranks"] for one in json.loads(listed)] == [2, 8]


def test_a_model_that_fits_nowhere_is_said_with_the_ranks_that_would_do(tmp_path: Path) -> None:
    """An empty list of layouts, or advice that does not do."""
    changes = ("--with", "device.memory=80MB", "--with", "software.codescent.held_bytes=1e6",
               "--with", "node.host_bandwidth=auto")  # fmt: skip
    words = (*SMALL, "model.num_layers=60", "--free", "all", "--cluster", "h100-sxm", *changes, "--search", "--ranks")
    code, text, said = asked(tmp_path, *words, "2")
    assert (code, text) == (2, "")
    assert "no layout of 2 ranks fits: the one with the least memory needs" in said
    assert "Give 4 ranks, on which one does" in said
    code, _, said = asked(tmp_path, *words, "4")
    assert code == 0, said


def test_without_a_cluster_the_rules_of_the_page_answer(tmp_path: Path) -> None:
    """Options that are read and forgotten: a slow link, a small memory."""
    out = tmp_path / "rules.toml"
    words = ("gpt2_1558m_openwebtext", "train.global_batch_size=64", "model.vocab_size=50257", "--ranks", "8",
             "--free", "all", "--search", "--memory", "16GiB", "--flops-per-s", "25e12", "--link")  # fmt: skip
    code, text, said = asked(tmp_path, *words, "10gbit", "--per-host", "1", "--out", str(out))
    assert code == 0, said
    assert "by the rules of `codescent docs which`: nothing was simulated" in text
    assert "needs 20,000 (F/W), so pp between hosts" in text
    assert load(out).config.parallel.pp == 8
    code, text, said = asked(tmp_path, *words, "100GB/s", "--per-host", "8", "--json")
    assert code == 0, said
    assert "parallel.dp_shard" in json.loads(text)["layout"]


@pytest.mark.slow
def test_offload_is_searched_where_nothing_fits_without_it(tmp_path: Path) -> None:
    """A slower layout among the ten, twice the work, or a model that is said to fit nowhere."""
    words = (*SMALL, "--free", "all", "--cluster", "h100-sxm", "--search", "--ranks", "2")
    _, text, said = asked(tmp_path, *words)
    assert "parallel.offload is left out: it makes no layout faster" in text, said
    assert "offload optimizer" not in text
    tiny = ("--with", "device.memory=80MB", "--with", "software.codescent.held_bytes=1e6", "model.num_layers=60")
    code, text, said = asked(tmp_path, *words, *tiny)
    assert code == 0, said
    assert "offload" in text
    assert "is left out" not in text


REFUSED = [
    (("--search",), ["--search: needs --cluster, such as --cluster h100-sxm; or, for the rules"]),
    (("--search", "--ranks", "4", "--memory", "8GB"), ["--memory SIZE, --link RATE and --flops-per-s N"]),
    (("--search", "--memory", "8GB", "--link", "fast"), ["--link: ", "fast"]),
    ((*SEARCH, "--memory", "8GB", "--inside", "1GB/s"), ["--memory: --cluster says it", "--inside: --cluster says it"]),
    ((*SEARCH, "--link", "49mbit"), ["--link: --cluster says it; leave it out"]),  # not as if it were not there
    (("--free", "all"), ["--free: is of --search"]),
    (("--out", "x.toml"), ["--out: is of --search"]),
    (("--ranks", "1,2"), ["--ranks 1,2: a plan has one number of ranks"]),
    (
        (*SEARCH, "--free", "parallel.ddp", "--most", "data.seq_len", "--operators", "--out", "x.json"),
        ["--free parallel.ddp: is no key of a search", "--most: is of one plan", "--operators: is of one plan",
         "--out x.json: is a config, whose name ends with .toml"],
    ),
    ((*SEARCH[:2], "--search", "--ranks", "4,4"), ["--ranks 4,4: has a number twice"]),
    ((*SEARCH[:2], "--search", "--ranks", "2,4", "--out", "x.toml"), ["--out: is the config of one number of ranks"]),
    (("--cluster", "h100", "--search", "train.num_stepz=3"), ["h100", "num_stepz"]),
    ((*SEARCH[:2], "--search", "--ranks", "12"), ["12 devices do not fill nodes of 8"]),
    ((*SEARCH, "parallel.tp=3"), ["is refused with parallel.tp, ", "as given (--free all searches them, too)"]),
    ((*SEARCH, "parallel.servers=1"), ["ranks that are given portions of work have no common step"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_is_wrong_is_said_at_once(tmp_path: Path, words: tuple[str, ...], said: list[str]) -> None:
    """A traceback, a problem at a time, or a search of minutes before an option is refused."""
    code, text, errors = asked(tmp_path, *SMALL, *words)
    assert (code, text) == (2, "")
    assert "Traceback" not in errors
    assert not [one for one in said if one not in errors], errors
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    out = tmp_path / "best.toml"
    out.write_text("mine")
    code, _, said = asked(tmp_path, *SMALL, *SEARCH, "--out", str(out))
    assert code == 2
    assert "is there already" in said
    assert out.read_text() == "mine"
