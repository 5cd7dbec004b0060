"""In: docs/config.md and the models. Out: the page's tables are what the models say.
Does not write the page: when a key changes, what `codescent config --keys` prints goes below the marker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.config.sections import SECTIONS
from codescent.config.words import KEYS, keys_markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
MARKER = "<!-- the tables are generated: tests/test_config_docs.py says how -->"


def test_the_page_has_the_tables_of_the_models() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(MARKER)[2].strip() == keys_markdown().strip()


def test_every_key_says_what_it_means() -> None:
    for key in KEYS.values():
        assert key.description, f"{key.section}.{key.name}"
        assert key.wanted, f"{key.section}.{key.name}"


def test_tables_have_a_row_for_every_field_and_no_broken_cells() -> None:
    rows = [line for line in keys_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(model.model_fields) for model in SECTIONS.values())
    assert all(row.count("|") == 5 for row in rows)


def test_keys_are_written_in_our_style() -> None:
    names = [key.name for key in KEYS.values()]
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


def test_the_example_of_problems_is_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wide.toml").write_text('[model]\nnum_head = 4\nhidden_dim = "256"\n\n[train]\nlearning_rate = 1e-3\n')
    with pytest.raises(UserError) as caught:
        load("wide.toml", ["train.precision=fp61"])
    assert f"```text\n{caught.value}\n```" in PAGE.read_text(encoding="utf-8")


def test_the_first_example_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = PAGE.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    Path("wider.toml").write_text(example)
    resolved = load("wider.toml")
    assert resolved.config.model.hidden_dim == 256
    assert resolved.config.model.num_layers == load("default").config.model.num_layers
