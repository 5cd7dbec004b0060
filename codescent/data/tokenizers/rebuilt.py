"""In: the text of a tokenizer.json, and the class that its folder names. Out: how the ids of `AutoTokenizer` differ.
transformers 5 makes parts of some classes anew. Does not change a tokenizer: its own file decides its ids."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers as library
from tokenizers import normalizers, pre_tokenizers, processors

OF_MODEL = {
    **dict.fromkeys(("gpt2", "opt", "phi", "gpt_neo", "gptj", "codegen", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt_neox", "olmo"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("roberta", "bart"), "RobertaTokenizer"),
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    "xlm-roberta": "XLMRobertaTokenizer",
    "cohere": "CohereTokenizer",
}
"""By `model_type` of config.json: the class where the folder names none (transformers, `TOKENIZER_MAPPING_NAMES`)."""
AS_THE_FILE = frozenset((
    "mistral", "mixtral", "phi3", "phimoe", "olmo2", "olmo3", "stablelm", "granite", "modernbert", "ernie4_5", "umt5",
    "nemotron", "internlm2",
))  # fmt: skip
"""Models whose tokenizer is read from its file, whatever class the folder names."""
PROBES = (
    "Hello world", " a", "a  b ", "It's DON'T we'LL", "a\n\n b\r\n\tc", "x = foo(bar, 1.5) != y_z;//...",
    "é e\u0301 ﬁ № ½", "日本語 текст", "🙂 …", " ".join(map(str, range(1000))),
)  # fmt: skip
"""Texts on which classes differ: spaces, contractions, line ends, code, composed letters, scripts, digits."""
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How tokenizer.json of Qwen 2 splits a text."""
SPACE = "▁"
AGREE = 'write "tokenizer_class": "PreTrainedTokenizerFast" into tokenizer_config.json, then both read the file'
_BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip


def difference(text: str, name: str, settings: Mapping[str, Any]) -> str | None:
    """How the ids of `AutoTokenizer` of transformers 5 differ from those of the file; None: they do not.

    Args:
        text: of tokenizer.json.
        name: the class that the folder names, without "Fast"; see `class_of`.
        settings: the object in tokenizer_config.json.

    Raises nothing: a class that is not known here is None, and so is a tokenizer of which the class cannot be made.
    """
    try:
        return _difference(text, name, settings)
    except Exception:  # the library raises a bare Exception; a remark ends no command
        return None


def _difference(text: str, name: str, settings: Mapping[str, Any]) -> str | None:
    if name not in CLASSES or (name == "LlamaTokenizer" and '"ByteLevel"' in text):  # then it reads the file
        return None
    model, parts = CLASSES[name](json.loads(text), settings)
    own = json.loads(text)["model"]
    if own.get("type") != model["type"] or own.get("continuing_subword_prefix"):
        return f"its class, {name}, is a {model['type']}, and the file's model is another; {AGREE}"
    ours = library.Tokenizer.from_str(text)
    texts = [*PROBES, *(ours.decode([number]) for number in ours.get_vocab().values())]
    for words, left, right in zip(texts, _ids(ours, texts), _ids(_anew(text, model, parts), texts), strict=True):
        if left != right:
            cut = next(place for place, pair in enumerate(zip([*left, -1], [*right, -1])) if pair[0] != pair[1])
            shown = words if len(words) <= 40 else f"{words[:40]}…"
            return (
                f"its class, {name}, is made anew by transformers 5, and has other ids than the file, which codescent "
                f"reads: {json.dumps(shown, ensure_ascii=False)} has {_some(left, cut)} here and {_some(right, cut)} "
                f"there; {AGREE}"
            )
    return None


def class_of(named: str, model_type: Any) -> str:
    """The class that `AutoTokenizer` makes of a folder, without "Fast"; "": the tokenizer of the file."""
    own = OF_MODEL.get(model_type, "") if isinstance(model_type, str) else ""
    if model_type in AS_THE_FILE:
        return ""
    return own if model_type == "qwen2" or not named else named


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
    fields |= {"normalizer": None, "pre_tokenizer": None, "model": {**fields["model"], **model}}
    made = library.Tokenizer.from_str(json.dumps(fields))
    for part, value in parts.items():
        setattr(made, part, value)
    return made


_Parts = tuple[dict[str, Any], dict[str, Any]]
"""Of a class: options of its model, and the other parts by their names in the library."""


def _byte_level(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    """GPT-2's: bytes of words."""
    return _BPE, {"pre_tokenizer": pre_tokenizers.ByteLevel(bool(settings.get("add_prefix_space")))}


def _roberta(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    model, parts = _byte_level(fields, settings)
    ends = (_named(fields, settings, "sep_token", "</s>"), _named(fields, settings, "cls_token", "<s>"))
    return model, {**parts, "post_processor": processors.RobertaProcessing(*ends)}


def _neox(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    model, parts = _byte_level(fields, settings)
    return model, {**parts, "normalizer": normalizers.NFC()}


def _cohere(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    model, parts = _neox(fields, settings)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return model, {**parts, "pre_tokenizer": pre_tokenizers.Sequence([digits, parts["pre_tokenizer"]])}


def _qwen2(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    words = pre_tokenizers.Split(library.Regex(QWEN2), "isolated")
    level = pre_tokenizers.ByteLevel(bool(settings.get("add_prefix_space")), use_regex=False)
    return _BPE, {"normalizer": normalizers.NFC(), "pre_tokenizer": pre_tokenizers.Sequence([words, level])}


def _llama(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    model = {**_BPE, "fuse_unk": True, "byte_fallback": True}
    before = settings.get("add_prefix_space")
    scheme = "never" if before is False else "always" if settings.get("legacy") else "first"
    return model, {"pre_tokenizer": pre_tokenizers.Metaspace(SPACE, scheme, split=False)}


def _gemma(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    unknown = _named(fields, settings, "unk_token", "<unk>")[0]
    model = {**_BPE, "fuse_unk": True, "byte_fallback": True, "unk_token": unknown}
    words = pre_tokenizers.Split(" ", "merged_with_previous")
    return model, {"normalizer": normalizers.Replace(" ", SPACE), "pre_tokenizer": words}


def _t5(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    """Pieces of words, each with a space before it; T5 ends a text."""
    end = _named(fields, settings, "eos_token", "</s>")
    ends = processors.TemplateProcessing(single=["$A", "</s>"], special_tokens=[("</s>", end[1])])
    return _pieces(fields, 2, "always", ends)


def _xlm_roberta(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> _Parts:
    names = [_named(fields, settings, key, usual) for key, usual in (("bos_token", "<s>"), ("eos_token", "</s>"))]
    single = [names[0][0], "$A", names[1][0]]
    ends = processors.TemplateProcessing(single=single, special_tokens=names)
    return _pieces(fields, 3, "always" if settings.get("add_prefix_space", True) else "never", ends)


def _pieces(fields: Mapping[str, Any], unknown: int, scheme: str, ends: Any) -> _Parts:
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, scheme)]
    parts = {"pre_tokenizer": pre_tokenizers.Sequence(splits), "post_processor": ends}
    if charsmap := _charsmap(fields.get("normalizer")):
        parts["normalizer"] = normalizers.Precompiled(base64.b64decode(charsmap))
    return {"type": "Unigram", "unk_id": unknown, "byte_fallback": False}, parts


def _charsmap(normalizer: Mapping[str, Any] | None) -> str | None:
    """SentencePiece's table of characters, the only part of a normalizer that these classes keep."""
    several = (normalizer or {}).get("normalizers", [normalizer or {}])
    return next((one["precompiled_charsmap"] for one in several if one.get("type") == "Precompiled"), None)


def _named(fields: Mapping[str, Any], settings: Mapping[str, Any], key: str, usual: str) -> tuple[str, int]:
    """A token that the folder names, or else the class, with its id."""
    token = settings.get(key) or usual
    text = str(token.get("content") if isinstance(token, dict) else token)
    number = library.Tokenizer.from_str(json.dumps(fields)).token_to_id(text)
    return text, 0 if number is None else number


CLASSES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], _Parts]] = {
    "GPT2Tokenizer": _byte_level,
    "RobertaTokenizer": _roberta,
    "BartTokenizer": _roberta,
    "GPTNeoXTokenizer": _neox,
    "CohereTokenizer": _cohere,
    "Qwen2Tokenizer": _qwen2,
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
    "T5Tokenizer": _t5,
    "XLMRobertaTokenizer": _xlm_roberta,
}
