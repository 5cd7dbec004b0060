"""In: the arguments of `codescent data`: a corpus, a config, or sizes of synthetic tensors. Out: the data prepared, its
summary.
Does not contain the preparation itself: data/text and tasks/tensors do; data_of_run.py has that of a config."""

from __future__ import annotations

import difflib
import glob
from argparse import Namespace
from pathlib import Path

from codescent import tasks
from codescent.base.counted import counted
from codescent.base.errors import UserError, of_each
from codescent.base.home import expanded
from codescent.base.hub_name import is_hub_name, parse_dataset, parse_model
from codescent.base.output import note, say
from codescent.base.own_names import is_own_name
from codescent.config.keys import AUTO
from codescent.config.load import shipped
from codescent.data.text import corpora
from codescent.data.text.dataset import open_dataset, token_shards
from codescent.data.text.prepare import prepare
from codescent.hub.cache import place_of, tokenizer_place
from codescent.hub.needed import corpus_name, for_corpus, for_tokenizer
from codescent.hub.obtain import listed, obtain, pinned
from codescent.tasks import ShownDataset
from codescent.tasks.tensors.dataset import open_tensors
from codescent.tasks.tensors.prepare import make_recipe, parse_sizes, prepare_synthetic
from codescent.verbs.arguments import OVERRIDE
from codescent.verbs.data_of_run import prepare_run

_OF_TEXT = ("tokenizer", "train_bpe", "workers", "text_key", "as_text")
_OF_TENSORS = ("source", "target", "format", "seed")


_IN_A_CONFIG = {
    "tokenizer": "data.tokenizer=NAME",
    "train_bpe": "data.tokenizer=bpe:VOCAB",
    "folder": "data.folder=DIR",
    "validation_fraction": "data.validation_fraction=FRACTION",
    "text_key": "data.text_key=NAME",
    "workers": "",
    "source": "",
    "target": "",
    "format": "data.format=NAME",
    "seed": "",
}
"""Options for a corpus or for random numbers, and what a config has instead; empty: nothing."""


def main(arguments: Namespace) -> int:
    """Prepare or open the corpus, the data of a config, or tensors, and print a summary and the path."""
    if (arguments.synthetic is None) == (arguments.corpus is None):
        raise UserError("codescent data: give a corpus, a config, or --synthetic SAMPLES")
    _put_config_first(arguments)
    if arguments.corpus is not None and (config := _config_of(arguments)) is not None:
        _refuse_options(arguments)
        return prepare_run(config, arguments.overrides, verify=arguments.verify)
    if others := [word for word in arguments.overrides if not OVERRIDE.match(word)]:
        raise UserError(f"{arguments.corpus} {others[0]}: give one corpus; a pattern such as '*.txt' needs quotes")
    if arguments.overrides:
        words = " ".join(arguments.overrides)
        raise UserError(
            f"{words}: an override is for a config, and {arguments.corpus} is a corpus; give options such as "
            f"--tokenizer, or a config: codescent data CONFIG data.corpus={arguments.corpus} {words}"
        )
    arguments.folder = arguments.folder or Path("datasets")
    arguments.validation_fraction = 0.1 if arguments.validation_fraction is None else arguments.validation_fraction
    return _prepare_corpus(arguments)


def _put_config_first(arguments: Namespace) -> None:
    """Overrides may stand before the config, as in other commands. Raises UserError: there are only overrides."""
    words = [arguments.corpus, *arguments.overrides]
    first = next((word for word in words if word is not None and not OVERRIDE.match(word)), None)
    if first is not None:
        words.remove(first)
        arguments.corpus, arguments.overrides = first, words
    elif arguments.corpus is not None and not expanded(arguments.corpus).exists():
        given = " ".join(map(str, words))
        raise UserError(f"{given}: no config to override; give one: codescent data CONFIG {given}")


def _config_of(arguments: Namespace) -> str | None:
    """The config that the first word names, or that trains on the corpus of this name; None: the word is a corpus.

    A file or folder is a corpus, unless its name ends in .toml. Raises UserError: there is nothing of this name.
    """
    word, configs = arguments.corpus, shipped()
    path = expanded(word)
    if arguments.as_text or word in corpora.NAMES or is_hub_name(word) or is_own_name(word):
        return None
    if path.suffix == ".toml" and not path.is_dir() and (path.exists() or not glob.has_magic(word)):
        return str(word)
    if word in tasks.published():  # as data.corpus = "squad" of a config, whatever is in this folder
        return tasks.published()[word]
    if path.exists():
        return None
    if word in configs:
        return str(word)
    if path.name == word and not path.suffix and not path.is_symlink() and not glob.has_magic(word):
        names = [*corpora.NAMES, *tasks.published()]
        beside = [child.name for child in Path().iterdir()]
        near = difflib.get_close_matches(word, [*names, *configs, *beside], n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"{word}: no such file or folder, and not the name of a corpus ({', '.join(names)}) or of a shipped config "
            f"({', '.join(configs)}){meant}"
        )
    return None


def _refuse_options(arguments: Namespace) -> None:
    """Raise UserError for each option that a config has instead."""
    given = [name for name in _IN_A_CONFIG if getattr(arguments, name) is not None]
    instead = {name: f"give {key}" if (key := _IN_A_CONFIG[name]) else "leave it out" for name in given}
    if given:
        raise UserError(
            *(
                f"--{name.replace('_', '-')}: is not for {arguments.corpus}, which is prepared as a config says; {what}"
                for name, what in instead.items()
            )
        )


def _prepare_corpus(arguments: Namespace) -> int:
    """Prepare or open a corpus or tensors without a config."""
    _download(arguments)
    files = None if arguments.corpus is None else corpora.pattern_files(arguments.corpus)
    if files:
        note(f"{arguments.corpus}: no file has this name, so it is read as a pattern (glob): {counted(files, 'file')}")
    opened = None if arguments.corpus is None else tasks.open_corpus(arguments.corpus, arguments.validation_fraction)
    _refuse_unused(arguments, opened)
    dataset = opened or (_tokens(arguments) if arguments.synthetic is None else _tensors(arguments))
    if arguments.verify:
        dataset.verify()
    verified = ["verified: all stored hashes match"] if arguments.verify else []
    say([*dataset.summary(), *verified, str(dataset.path)])
    return 0


def _refuse_unused(arguments: Namespace, opened: ShownDataset | None) -> None:
    """Raise UserError for each option without an effect. `opened`: the corpus, if it is prepared already."""
    vectors = arguments.corpus is None or (opened is not None and opened.vocab_size is None)
    is_prepared = opened is not None or (not vectors and token_shards(arguments.corpus) is not None)
    of_text = "for text only, not for tensors" if vectors else f"for text, and {arguments.corpus} is prepared already"
    why = dict.fromkeys(_OF_TEXT, of_text) if vectors or is_prepared else {}
    if not why and arguments.as_text:
        why["text_key"] = "for JSON lines and tables, and --as-text reads every file as plain text"
    elif not why and arguments.text_key is not None and not corpora.may_have_columns(arguments.corpus):
        why["text_key"] = f"for JSON lines and tables, and there are none in {arguments.corpus}"
    if not arguments.synthetic:
        why |= dict.fromkeys(_OF_TENSORS, "for --synthetic only")
    given = [name for name in why if getattr(arguments, name) is not None and getattr(arguments, name) is not False]
    if given:
        raise UserError(*(f"--{name.replace('_', '-')}: {why[name]}; leave it out" for name in given))


def _download(arguments: Namespace) -> None:
    """Put the places in the cache instead of names of a hub, and download what the cache lacks. Raises UserError."""
    words = {key: getattr(arguments, key) for key in ("corpus", "tokenizer") if is_hub_name(getattr(arguments, key))}

    def place(key: str) -> str:
        is_corpus = key == "corpus"
        try:
            name = (parse_dataset if is_corpus else parse_model)(words[key])
        except ValueError as error:
            raise UserError(f"{words[key]}: {error}") from error
        name = pinned(name)
        name = corpus_name(name, listed(name)) if is_corpus else name
        obtain(name, for_corpus if is_corpus else for_tokenizer)
        return place_of(str(name)) if is_corpus else tokenizer_place(str(name))

    vars(arguments).update(of_each(words, place))


def _tokens(arguments: Namespace) -> ShownDataset:
    task, file = (None, "") if arguments.as_text else tasks.beside_text(arguments.corpus)
    if task is not None:
        raise UserError(
            f'{file}: holds {task.form}, and without a config this command prepares text; data.task = "{task.name}" '
            f"(model.kind = {' or '.join(task.kinds)}) reads them: `codescent data CONFIG` prepares them for the run "
            "of a config; to prepare them as text all the same, give --as-text"
        )
    path = prepare(
        arguments.corpus,
        arguments.tokenizer,
        arguments.folder,
        train_bpe=arguments.train_bpe,
        validation_fraction=arguments.validation_fraction,
        text_key=None if arguments.text_key == AUTO else arguments.text_key,
        as_text=arguments.as_text,
        num_workers=arguments.workers,
        progress=True,
    )
    return open_dataset(path)


def _tensors(arguments: Namespace) -> ShownDataset:
    sizes = parse_sizes(arguments.source or "1x512", arguments.target or "20x512")
    recipe = make_recipe(arguments.synthetic, sizes, arguments.seed or 0, arguments.validation_fraction)
    path = prepare_synthetic(recipe, arguments.format or "hdf5", arguments.folder, progress=True)
    return open_tensors(str(path), arguments.validation_fraction)
