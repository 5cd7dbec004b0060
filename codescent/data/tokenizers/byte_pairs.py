"""In: a tokenizer of the tokenizers library, as JSON. Out: an encoding of tiktoken with the same ids, if there is one.
Does not encode a text: `LibraryTokenizer.encode` does, with either library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import tiktoken
import tokenizers as library

GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""How GPT-2 splits a text into words (Radford et al. 2019, encoder.py), without the steps back that cost time."""
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3, OLMo 2 and Phi-4 split a text."""
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
"""How Qwen 2, 2.5 and 3 split a text."""
NO_TEXT = "\U0010ffff"
"""No character. It is tiktoken's special token, for which no text is searched: with none tiktoken is a third slower."""
PROBE = "".join(
    f"{character}'s {character}{character}a1{character}!  {character}\n{character} "
    for character in (
        "aé1٣²!٬_\u00a0\u1680\u180e\u200b\u2028\u3000\x1c\x85漢\u0301\U0001f469\U00010d40\U0001ccf0\U00011bc0\U00016ea0"
    )
)
"""Letters, numbers, spaces and the rest, the last ones of recent versions of Unicode."""


class SameIds:
    """An encoding of tiktoken, and the texts for which its ids are those of the library's tokenizer.

    Attributes:
        encoding: of tiktoken.
        normalizer: of the library, applied to a text before; None: there is none.
        tokens: added tokens that are searched in a text. A text that has one is left to the library.
    """

    def __init__(self, encoding: tiktoken.Encoding, normalizer: Any, tokens: tuple[str, ...]) -> None:
        self.encoding = encoding
        self.normalizer = normalizer
        self.tokens = tokens

    def encode(self, text: str) -> Any:
        """Ids of a text, uint32 [tokens]; None: only the library knows them.

        tiktoken gives up on a long run of white space, for which its regular expression needs more steps than it takes.
        """
        given = text
        if self.normalizer is not None and not text.isascii():  # ASCII is normal already
            text = self.normalizer.normalize_str(text)
        if any(token in given or token in text for token in self.tokens):
            return None
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            raise
        except ValueError:
            return None


@cache
def byte_of_character() -> Mapping[str, int]:
    """GPT-2's characters for the 256 bytes (encoder.py, bytes_to_unicode): each byte has one that can be seen."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{chr(byte): byte for byte in shown}, **{chr(256 + at): byte for at, byte in enumerate(hidden)}}


def same_ids(inner: library.Tokenizer, fields: Mapping[str, Any]) -> SameIds | None:
    """The encoding of tiktoken for a tokenizer of the library, whose JSON is `fields`; None: its ids could differ.

    Both merge the pair of lowest rank first. The library knows ranks of pairs. tiktoken knows the id of what a pair
    makes, whatever the pair. So the ids are equal where two things hold:
    - later merges make larger ids;
    - the library gives each token, taken as a word, the id of this token alone.
    Proof: suppose that tiktoken merges x and y into t, and no merge of the library does. Until then both made the same
    merges, and none across the ends of t. So the library, given t alone, makes the same merges inside, and ends with x
    and y. That contradicts the second condition.
    """
    model, added = fields["model"], fields["added_tokens"]
    words, normalizer = _words(fields["pre_tokenizer"] or {}), fields["normalizer"]
    searched = tuple(token["content"] for token in added if not token["special"])
    if (
        words is None
        or (normalizer is not None and (normalizer != {"type": "NFC"} or not "".join(searched).isascii()))
        or model["type"] != "BPE"
        or any(model[key] for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    ):
        return None
    ranks = _ranks(model)
    if ranks is None:
        return None
    encoding = tiktoken.Encoding(
        "codescent", pat_str=words, mergeable_ranks=ranks, special_tokens={NO_TEXT: max(ranks.values()) + 1}
    )
    found = SameIds(encoding, None if normalizer is None else inner.normalizer, searched)
    ids = found.encode(PROBE)
    same = ids is not None and ids.tolist() == inner.encode(PROBE, add_special_tokens=False).ids
    return found if same else None


def _words(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The regular expression of the words to which merges are confined; None: another way to split a text."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return GPT2_WORDS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(words)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if words in (LLAMA3_WORDS, QWEN2_WORDS):
            return words
    return None


def _ranks(model: Mapping[str, Any]) -> dict[bytes, int] | None:
    """The bytes and the merged tokens with their ids; None: the conditions of `same_ids` do not hold."""
    vocabulary: dict[str, int] = model["vocab"]
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    made = ["".join(pair) for pair in merges]
    tokens = list(dict.fromkeys(made))
    bytes_of = byte_of_character()
    ranks = {token: vocabulary[token] for token in (*bytes_of, *tokens) if token in vocabulary}
    if (
        not bytes_of.keys() <= ranks.keys()
        or any(vocabulary[earlier] > vocabulary[later] for earlier, later in pairwise(made))
        or (model["ignore_merges"] and len(ranks) < len(vocabulary))  # a word that is a token is this token
    ):
        return None
    alone = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=merges))
    for token, encoded in zip(tokens, alone.encode_batch_fast(tokens), strict=True):
        if encoded.ids != [vocabulary[token]]:
            return None
    return {bytes(map(bytes_of.__getitem__, token)): number for token, number in ranks.items()}
