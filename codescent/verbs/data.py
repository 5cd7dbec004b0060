"""In: the arguments of `codescent data`: a corpus, or sizes of synthetic tensors. Out: the data prepared, its summary.
Does not contain the preparation itself: data/text and tasks/tensors do."""

from __future__ import annotations

from argparse import Namespace

from codescent import tasks
from codescent.base.counted import counted
from codescent.base.errors import UserError, of_each
from codescent.base.hub_name import is_hub_name, parse_dataset, parse_model
from codescent.base.output import note, say
from codescent.config.keys import AUTO
from codescent.data.text import corpora
from codescent.data.text.dataset import open_dataset, token_shards
from codescent.data.text.prepare import prepare
from codescent.hub.cache import place_of, tokenizer_place
from codescent.hub.needed import corpus_name, for_corpus, for_tokenizer
from codescent.hub.obtain import listed, obtain, pinned
from codescent.tasks import ShownDataset
from codescent.tasks.tensors.dataset import open_tensors
from codescent.tasks.tensors.prepare import make_recipe, parse_sizes, prepare_synthetic

_OF_TEXT = ("tokenizer", "train_bpe", "workers", "text_key", "as_text")
_OF_TENSORS = ("source", "target", "format", "seed")


def main(arguments: Namespace) -> int:
    """Prepare or open the corpus or tensors, and print a summary and the path."""
    if (arguments.synthetic is None) == (arguments.corpus is None):
        raise UserError("codescent data: give a corpus, or --synthetic SAMPLES")
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
            f'{file}: holds {task.form}, and this command prepares text; data.task = "{task.name}" '
            f"(model.kind = {' or '.join(task.kinds)}) reads them: `codescent train` prepares them by itself; to "
            "prepare them as text all the same, give --as-text"
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
