"""In: a codescent tokenizer file, or a Hugging Face folder. Out: the tokenizer in the other format.
Does not change the id of a token, encode text or train a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers as library

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_text
from codescent.data.tokenizers import beside, bpe, wordpiece
from codescent.data.tokenizers.byte_pairs import byte_of_character
from codescent.data.tokenizers.tokenizer import SEPARATOR_TEXT

TOKENIZER = "tokenizer.json"
BEGINNINGS = ("<|begin_of_text|>", "<s>")  # known names of the document start; if none: the document end
VOCABULARY, MERGES, WORDPIECES, SETTINGS = "vocab.json", "merges.txt", "vocab.txt", "tokenizer_config.json"
GENERATION = "generation_config.json"
GPT2 = "GPT2Tokenizer"
GENERIC = ("", "PreTrainedTokenizer", "TokenizersBackend")
"""Names of a tokenizer's class, without "Fast", that say nothing of how it splits a text."""
KEPT_FILES = (SETTINGS, "special_tokens_map.json", "added_tokens.json", GENERATION)
CONTROLS = "controls.json"
"""File in a run's folder, see `Controls`."""


def tokenizer_files(text: str, seq_len: int) -> tuple[dict[str, str], dict[str, int | None]]:
    """The files from which `AutoTokenizer` builds a tokenizer with the same ids, and the ids for config.json.

    `text`: a run's tokenizer.json. `seq_len`: the model's longest sequence, in tokens. One difference remains: a text
    with the characters `<|endoftext|>` has a special token for `AutoTokenizer`, and ordinary tokens for codescent.
    """
    inner = library.Tokenizer.from_str(library_text(text))
    vocabulary = inner.get_vocab(with_added_tokens=True)
    fields = json.loads(inner.to_str())
    texts = {number: name for name, number in vocabulary.items()}
    end = next((name for name in bpe.SEPARATORS if name in vocabulary), None)
    match json.loads(text):
        case {"codescent_tokenizer": "library", "end": int() | None as number}:
            end = None if number is None else texts[number]
    opening = bpe.LibraryTokenizer(library.Tokenizer.from_str(inner.to_str()), obeys=True).opening
    begin = texts[opening[0]] if opening else next((name for name in BEGINNINGS if name in vocabulary), end)
    controls, inputs = {"bos_token": begin, "eos_token": end}, ["input_ids", "attention_mask"]
    if wordpiece.is_wordpiece(fields):
        begin, end, inputs = None, None, ["input_ids", "token_type_ids", "attention_mask"]
        controls = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        if fields["post_processor"] is None:
            # [CLS] text [SEP], or [CLS] question [SEP] context [SEP] (Devlin et al. 2019, section 3)
            forms = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
            ids = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
            inner.post_processor = library.processors.TemplateProcessing(*forms, ids)
    lower = (fields["normalizer"] or {}).get("lowercase")  # readers of vocab.txt alone would assume true
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "model_input_names": inputs,
        "clean_up_tokenization_spaces": False,
        **{key: name for key, name in controls.items() if name is not None},
        **({"do_lower_case": lower} if wordpiece.is_wordpiece(fields) and isinstance(lower, bool) else {}),
    }
    files = {TOKENIZER: inner.to_str(pretty=True) + "\n", SETTINGS: json.dumps(settings, indent=2) + "\n"}
    if wordpiece.is_wordpiece(fields):
        files[WORDPIECES] = "".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__))
    if fields["model"]["type"] == "BPE" and (fields["pre_tokenizer"] or {}).get("type") == "ByteLevel":
        merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in fields["model"]["merges"])
        whole = dict(sorted(vocabulary.items(), key=lambda pair: pair[1]))
        files[VOCABULARY] = json.dumps(whole, ensure_ascii=False) + "\n"
        files[MERGES] = "\n".join(["#version: 0.2", *merges]) + "\n"
    return files, {"bos_token_id": vocabulary.get(begin or ""), "eos_token_id": vocabulary.get(end or "")}


@dataclass(frozen=True)
class Controls:
    """What a Hugging Face folder says of control tokens and of generation, which an export writes again.

    Attributes:
        ids: the keys of config.json that end in _token_id, with their values.
        files: files of KEPT_FILES: name -> text.
    """

    ids: Mapping[str, Any]
    files: Mapping[str, str]

    @classmethod
    def of_folder(cls, folder: Path) -> Controls:
        """The controls of a folder. Raises UserError: a file that is not a JSON object."""
        ids = {key: value for key, value in _settings(folder / "config.json").items() if key.endswith("_token_id")}
        names = [name for name in KEPT_FILES if (folder / name).is_file()]
        for name in names:
            _settings(folder / name)
        return cls(ids, {name: _read(folder / name) for name in names})

    @classmethod
    def of_run(cls, run: Path) -> Controls | None:
        """The controls in a run's folder; None: there are none. Raises UserError: they are damaged."""
        if not (run / CONTROLS).is_file():
            return None
        match _settings(run / CONTROLS):
            case {"ids": dict(ids), "files": dict(files)} if set(files) <= set(KEPT_FILES):  # no path leads elsewhere
                for name, text in files.items():
                    _object(text, f"{run / CONTROLS}: {name}")
                return cls(ids, files)
        raise UserError(f'{run / CONTROLS}: damaged: an object with "ids" and "files" is needed')

    def file(self) -> dict[str, str]:
        """The file in a run's folder: name -> text."""
        return {CONTROLS: json.dumps({"ids": self.ids, "files": self.files}, indent=1) + "\n"}

    def put(self, texts: Mapping[str, str]) -> dict[str, str]:
        """The files of an export with these instead of the computed ones; without a tokenizer only GENERATION."""
        kept = self.files if texts else {name: self.files[name] for name in (GENERATION,) if name in self.files}
        return {name: text for name, text in texts.items() if name != SETTINGS} | dict(kept)


def tokenizer_text(folder: Path) -> str | None:
    """The tokenizer of a Hugging Face folder, as the text of our file; None if the folder has no tokenizer.

    Raises:
        UserError: a file is not a tokenizer.
    """
    path = folder / TOKENIZER
    if path.is_file():
        found = beside.read(path)
        return found.text if isinstance(found, bpe.LibraryTokenizer) and found.is_recorded else _read(path)
    settings = _settings(folder / SETTINGS)
    if (folder / WORDPIECES).is_file():
        lower = settings.get("do_lower_case", True)
        return beside.read_bert(f"{'bert' if lower else 'bert-cased'}:{folder / WORDPIECES}", settings).text
    if not ((folder / VOCABULARY).is_file() and (folder / MERGES).is_file()):
        return None
    if (name := beside.class_of(folder)) not in (GPT2, *GENERIC):
        raise UserError(
            f"{folder}: its tokenizer is a {name}, and of {VOCABULARY} with {MERGES} only {GPT2} is read: others "
            f"split a text into other words; {beside.SAVE_AGAIN}, then it has a {TOKENIZER}"
        )
    try:
        vocabulary = json.loads(_read(folder / VOCABULARY))
        inner = _with_settings(bpe.from_merges(vocabulary, _read(folder / MERGES)), beside.named_tokens(folder))
        return beside.in_folder(bpe.LibraryTokenizer(inner, obeys=True), folder).text
    except UserError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"{folder / VOCABULARY}, {MERGES}: not a BPE: {error}") from error


def _with_settings(inner: Any, settings: Mapping[str, Any]) -> Any:
    """A GPT-2 tokenizer with the keys of tokenizer_config.json that decide ids where there is no tokenizer.json."""
    if settings.get("add_prefix_space"):
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    ends = {}
    for key in ("bos_token", "eos_token"):
        token = settings.get(key, SEPARATOR_TEXT)  # the default of GPT2Tokenizer
        text = token.get("content") if isinstance(token, dict) else token
        if settings.get(f"add_{key}") and (number := inner.token_to_id(str(text))) is not None:
            ends[key] = (str(text), number)
    if ends:
        single = f"{'$BOS ' * ('bos_token' in ends)}$A{' $EOS' * ('eos_token' in ends)}"
        names = {"bos_token": "$BOS", "eos_token": "$EOS"}
        for key, (text, _) in ends.items():
            single = single.replace(names[key], text)
        inner.post_processor = library.processors.TemplateProcessing(
            single=single, special_tokens=list(dict.fromkeys(ends.values()))
        )
    return inner


def library_text(text: str) -> str:
    """Convert the text of our tokenizer file to the JSON of the library `tokenizers`, with the same ids."""
    fields = json.loads(text)
    match fields:
        case {"codescent_tokenizer": "char", "characters": str(characters), "separator": bool(with_separator)}:
            return str(_characters(characters, with_separator).to_str())
        case {"codescent_tokenizer": "byte"}:
            return str(_bytes().to_str())
        case {"codescent_tokenizer": "library", "tokenizer": dict(inner)}:
            return json.dumps(inner)
    return text


def has_same_tokens(text: str | None, other: str | None) -> bool:
    """Whether two tokenizers have the same tokens with the same ids; None: no tokenizer, so false."""
    return text is not None and other is not None and _vocabulary(text) == _vocabulary(other)


def differing_tokens(text: str, folders: str) -> list[str]:
    """Tokens whose id differs in the folder's vocabulary. They would read the embedding of another token."""
    ours, theirs = _vocabulary(text), _vocabulary(folders)
    return sorted((token for token, number in ours.items() if theirs.get(token) != number), key=ours.__getitem__)


def _vocabulary(text: str) -> Mapping[str, int]:
    found: dict[str, int] = library.Tokenizer.from_str(library_text(text)).get_vocab(with_added_tokens=True)
    return found


def _characters(characters: str, with_separator: bool) -> Any:
    """A word-level tokenizer whose words are characters. An unknown character is an error, as in our tokenizer."""
    vocabulary = {character: number for number, character in enumerate(characters)}
    inner = library.Tokenizer(library.models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"(?m:.)"), "isolated")
    inner.decoder = library.decoders.Fuse()
    return _with_separator(inner) if with_separator else inner


def _bytes() -> Any:
    """A BPE of the 256 bytes, without merges."""
    vocabulary = dict(byte_of_character())
    return _with_separator(bpe.byte_level(library.models.BPE(vocab=vocabulary, merges=[]), use_regex=False))


def _with_separator(inner: Any) -> Any:
    inner.add_special_tokens([library.AddedToken(SEPARATOR_TEXT, special=True, normalized=False)])
    return inner


def _settings(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file does not exist. Raises UserError: it is not a JSON object."""
    return _object(_read(path), str(path)) if path.is_file() else {}


def _object(text: Any, where: str) -> dict[str, Any]:
    """The JSON object in a text. Raises UserError: it is something else."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({json_problem(error)})") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: not a JSON object")
    return found


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
