"""In: the text of a tokenizer.json, and the class that its folder names. Out: the tokenizer that `AutoTokenizer` makes.
transformers 5 makes parts of some classes anew. Does not read files (beside.py does)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers as library
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from codescent.base.errors import UserError
from codescent.data.tokenizers.bpe import around, of_the_library
from codescent.data.tokenizers.byte_pairs import QWEN2_WORDS
from codescent.data.tokenizers.classes import NOT_MADE

PROBES = (
    "Hello world", " a", "a  b ", "It's DON'T we'LL", "a\n\n b\r\n\tc", "x = foo(bar, 1.5) != y_z;//...",
    "é e\u0301 ﬁ № ½", "日本語 текст", "🙂 …", " ".join(map(str, range(1000))),
)  # fmt: skip
"""Texts on which classes differ: spaces, contractions, line ends, code, composed letters, scripts, digits."""
SPACE = "▁"
ALONE = 'to read the file alone, write "tokenizer_class": "PreTrainedTokenizerFast" into tokenizer_config.json'
ALONE_ELSEWHERE = f"{ALONE}, and put both files into a folder without config.json: this model_type decides the class"
_BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip


@dataclass(frozen=True)
class Rebuilt:
    """A tokenizer with the parts that its class makes anew.

    Attributes:
        name: of the class.
        file, made: the tokenizer of the file alone, and the one with these parts.
        alone: how a user has the file read alone.
    """

    name: str
    file: library.Tokenizer
    made: library.Tokenizer
    alone: str

    @cached_property
    def text(self) -> str:
        """Its JSON, of the library."""
        return str(self.made.to_str())

    @cached_property
    def decides(self) -> dict[str, Any]:
        """What decides its ids, beside vocabulary and merges."""
        return _decides(self.made)

    @cached_property
    def remark(self) -> str | None:
        """A text that has other ids than by the file, with both; None: all texts that were tried have the same."""
        difference = _difference(self.file, self.made)
        if difference is None:
            return None
        return f"parts of its class, {self.name}, are made anew, as by transformers 5: {difference}; {self.alone}"


def rebuilt(
    text: str, name: str, settings: Mapping[str, Any], alone: str = ALONE, *, named: bool = True
) -> Rebuilt | None:
    """The tokenizer that `AutoTokenizer` of transformers 5 makes of a folder; None: it is the file's.

    Args:
        text: of tokenizer.json.
        name: the class that the folder names, without "Fast"; see classes.py.
        settings: the object in tokenizer_config.json.
        alone: how a user has the file read alone.
        named: whether the folder names the class; False: its model does.

    Raises UserError: the class cannot be made of this file.
    """
    if name.removesuffix("Tokenizer") in NOT_MADE:
        raise UserError(
            f"its class, {name}, makes other ids of it in transformers 5, which are not known here; {alone}"
        )
    if name not in CLASSES or (name == "LlamaTokenizer" and named and '"ByteLevel"' in text):  # then it reads the file
        return None
    try:
        with of_the_library(f"its class, {name}, cannot be made of this file"):
            file = library.Tokenizer.from_str(text)
            found = Rebuilt(name, file, _anew(text, *CLASSES[name](json.loads(text), settings)), alone)
            return None if _decides(file) == found.decides else found
    except UserError as error:
        raise UserError(*(f"{problem}; {alone}" for problem in error.problems)) from error


def _decides(tokenizer: library.Tokenizer) -> dict[str, Any]:
    """The parts of a tokenizer that decide ids, and may be made anew."""
    fields: dict[str, Any] = json.loads(tokenizer.to_str(), object_hook=_without_offsets)
    model = {key: value or None for key, value in fields["model"].items() if key not in ("vocab", "merges")}
    ends = around(tokenizer, tokenizer.get_vocab(with_added_tokens=True))
    return {"model": model, "ends": ends, "normalizer": fields["normalizer"], "pre_tokenizer": fields["pre_tokenizer"]}


def _without_offsets(fields: dict[str, Any]) -> dict[str, Any]:
    """A part without what decides only at which character a token begins."""
    return {key: value for key, value in fields.items() if key != "trim_offsets"}


def _difference(file: library.Tokenizer, made: library.Tokenizer) -> str | None:
    texts = [*PROBES, *(file.decode([number]) for number in file.get_vocab().values())]
    for words, alone, used in zip(texts, _ids(file, texts), _ids(made, texts), strict=True):
        if alone != used:
            cut = next(place for place, pair in enumerate(zip([*alone, -1], [*used, -1])) if pair[0] != pair[1])
            shown = json.dumps(words if len(words) <= 40 else f"{words[:40]}…", ensure_ascii=False)
            return f"{shown} has {_some(used, cut)}; by the file alone it has {_some(alone, cut)}"
    return None


def _ids(tokenizer: library.Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text; none for a text that the tokenizer cannot encode."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    try:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    except Exception:  # the library raises a bare Exception, for example because there is no token for the unknown
        return _ids_of_each(tokenizer, texts)


def _ids_of_each(tokenizer: library.Tokenizer, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = []
    for text in texts:
        try:
            found.append(tokenizer.encode(text).ids)
        except Exception:  # as above
            found.append([])
    return found


def _some(ids: list[int], cut: int) -> str:
    """A few ids around the first that differs."""
    start = max(cut - 1, 0)
    return f"[{'…, ' * (start > 0)}{', '.join(map(str, ids[start : start + 4]))}{', …' * (len(ids) > start + 4)}]"


def _anew(text: str, model: Mapping[str, Any], parts: Mapping[str, Any]) -> library.Tokenizer:
    """The tokenizer with the parts that a class makes anew; the ends of a text stay, if the class keeps them."""
    fields = json.loads(text)
    own, prefix = fields["model"], bool(fields["model"].get("continuing_subword_prefix"))
    if own.get("type") != model["type"] or prefix:
        what = f"a {own.get('type')}{' with a prefix' * prefix}"
        raise ValueError(f"it is a {model['type']}, and the file's model is {what}")
    fields |= {"normalizer": None, "pre_tokenizer": None, "model": {**fields["model"], **model}}
    made = library.Tokenizer.from_str(json.dumps(fields))
    for part, value in parts.items():
        setattr(made, part, value)
    return made


_Parts = tuple[dict[str, Any], dict[str, Any]]
"""Of a class: options of its model, and the other parts by their names in the library."""


def _byte_level(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    """GPT-2's: bytes of words."""
    words = pre_tokenizers.ByteLevel(bool(settings.get("add_prefix_space")))
    return _BPE, {"pre_tokenizer": words, "decoder": decoders.ByteLevel()}


def _roberta(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    model, parts = _byte_level(fields, settings)
    ends = (_end(fields, settings, "sep_token", "</s>"), _end(fields, settings, "cls_token", "<s>"))
    space = bool(settings.get("add_prefix_space"))
    return model, {**parts, "post_processor": processors.RobertaProcessing(*ends, add_prefix_space=space)}


def _neox(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    """GPT-NeoX's: nothing begins or ends a text, whatever the file and its settings say."""
    model, parts = _byte_level(fields, settings)
    return model, {**parts, "normalizer": normalizers.NFC(), "post_processor": processors.TemplateProcessing("$A")}


def _cohere(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    model, parts = _byte_level(fields, settings)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.Sequence([digits, parts["pre_tokenizer"]])
    return model, {**parts, "normalizer": normalizers.NFC(), "pre_tokenizer": words}


def _qwen2(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    words = pre_tokenizers.Split(library.Regex(QWEN2_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(bool(settings.get("add_prefix_space")), use_regex=False)
    both = pre_tokenizers.Sequence([words, level])
    return _BPE, {"normalizer": normalizers.NFC(), "pre_tokenizer": both, "decoder": decoders.ByteLevel()}


def _llama(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    model = {**_BPE, "fuse_unk": True, "byte_fallback": True}
    never = not settings.get("add_prefix_space", True) and settings["add_prefix_space"] is not None
    scheme = "never" if never else "always" if settings.get("legacy") else "first"
    words = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    strips = [] if never else [decoders.Strip(" ", 1, 0)]
    return model, {"pre_tokenizer": words, "decoder": decoders.Sequence([*_bytes_of_pieces(), *strips])}


def _gemma(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    model = {**_BPE, "fuse_unk": True, "byte_fallback": True, "unk_token": _named(settings, "unk_token", "<unk>")}
    words, decoder = pre_tokenizers.Split(" ", "merged_with_previous"), decoders.Sequence(_bytes_of_pieces())
    return model, {"normalizer": normalizers.Replace(" ", SPACE), "pre_tokenizer": words, "decoder": decoder}


def _bytes_of_pieces() -> list[Any]:
    """How pieces of SentencePiece become a text, with bytes for what the vocabulary lacks."""
    return [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _t5(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    """Pieces of words, each with a space before it; T5 ends a text."""
    end = _end(fields, settings, "eos_token", "</s>")
    ends = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", end[1])]
    )
    return _pieces(fields, 2, "always", ends)


def _xlm_roberta(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    names = [_end(fields, settings, key, usual) for key, usual in (("bos_token", "<s>"), ("eos_token", "</s>"))]
    begin, end = (name for name, _ in names)
    pair = [begin, "$A", end, end, "$B", end]
    ends = processors.TemplateProcessing(single=[begin, "$A", end], pair=pair, special_tokens=names)
    return _pieces(fields, 3, "always" if settings.get("add_prefix_space", True) else "never", ends)


def _pieces(fields: Mapping[str, Any], unknown: int, scheme: str, ends: Any) -> _Parts:
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, scheme)])
    parts = {"pre_tokenizer": words, "post_processor": ends, "decoder": decoders.Metaspace(SPACE, scheme)}
    if charsmap := _charsmap(fields.get("normalizer")):
        parts["normalizer"] = normalizers.Precompiled(base64.b64decode(charsmap))
    return {"type": "Unigram", "unk_id": unknown, "byte_fallback": False}, parts


def _charsmap(normalizer: Mapping[str, Any] | None) -> str | None:
    """SentencePiece's table of characters, the only part of a normalizer that these classes keep."""
    several = (normalizer or {}).get("normalizers", [normalizer or {}])
    return next((one["precompiled_charsmap"] for one in several if one.get("type") == "Precompiled"), None)


def _named(settings: Mapping[str, Any], key: str, usual: str) -> str:
    """A token that the folder names, or else the class."""
    token = settings.get(key)
    text = usual if token is None else str(token.get("content") if isinstance(token, dict) else token)
    if not text:
        raise ValueError(f"its {key} is empty")
    return text


def _end(fields: Mapping[str, Any], settings: Mapping[str, Any], key: str, usual: str) -> tuple[str, int]:
    """A token that begins or ends a text, with its id. Raises ValueError: the vocabulary does not have it."""
    token = _named(settings, key, usual)
    number = library.Tokenizer.from_str(json.dumps(fields)).token_to_id(token)
    if number is None:
        shown = json.dumps(token, ensure_ascii=False)
        raise ValueError(f"it puts its {key}, {shown}, around a text, and the vocabulary has no such token")
    return token, int(number)


CLASSES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], _Parts]] = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer"), _byte_level),
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "LEDTokenizer", "MvpTokenizer", "LukeTokenizer"), _roberta),
    "GPTNeoXTokenizer": _neox,
    "CohereTokenizer": _cohere,
    "Qwen2Tokenizer": _qwen2,
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
    "T5Tokenizer": _t5,
    "XLMRobertaTokenizer": _xlm_roberta,
}
"""By the name of a class, what it makes anew; as in transformers 5.23, `models/*/tokenization_*.py`."""
