"""In: folders with a tokenizer.json of every shape, and files beside it. Out: the ids are those of `AutoTokenizer`.
Does not train: test_huggingface and test_interchange use such folders whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from codescent.base.errors import UserError
from codescent.data.text.chunks import cut_chunks
from codescent.data.text.prepare import prepare
from codescent.data.text.records import DocumentPiece
from codescent.data.text.request import make_request, tokenizer_of
from codescent.data.tokenizers import beside, classes, rebuilt
from codescent.data.tokenizers.tokenizer import document_end, encode_segments, load
from codescent.huggingface.tokens import library_text, tokenizer_files, tokenizer_text
from codescent.tasks.conversations.conversations import Conversation
from codescent.tasks.conversations.dataset import pair_encoder, parse_template
from codescent.tasks.task import Prompts

BOS, EOS = 256, 257
TEXTS = ["Hello  World 12", " a", "naïve Ünï ½ 漢字\n\n x", "xyz <tool> <tool>xyz tool", "fifi ﬁ"]


def byte_level(**model: Any) -> Tokenizer:
    vocabulary = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": BOS, "</s>": EOS, "ab": 258, "ll": 259, "llo": 260}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("l", "l"), ("ll", "o")], **model))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    return inner


def pieces(model: Any, pre: Any = None, decoder: Any = None) -> Tokenizer:
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre
    inner.decoder = decoder or decoders.Fuse()
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def letters(extra: tuple[str, ...] = ()) -> dict[str, int]:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzHW12", *extra]
    return {name: number for number, name in enumerate(names)}


def with_(inner: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(inner, name, part)
    return inner


def added(inner: Tokenizer, **flags: bool) -> Tokenizer:
    inner.add_tokens([AddedToken("<tool>", **flags)])
    return inner


def limited(inner: Tokenizer) -> Tokenizer:
    inner.enable_truncation(3)
    inner.enable_padding(length=9, pad_id=EOS, pad_token="</s>")
    return inner


ONE, TWO = [("<s>", BOS)], [("<s>", BOS), ("</s>", EOS)]
TEMPLATE = processors.TemplateProcessing(single="<s> $A", special_tokens=ONE)
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
UNIGRAM = [(name, -float(number % 7)) for name, number in letters().items()]
FOLDERS: dict[str, Callable[[], Tokenizer]] = {
    "no post-processor": byte_level,
    "template": lambda: with_(byte_level(), post_processor=TEMPLATE),
    "template, both ends": lambda: with_(
        byte_level(), post_processor=processors.TemplateProcessing(single="<s> $A </s>", special_tokens=TWO)
    ),
    "template, end": lambda: with_(
        byte_level(), post_processor=processors.TemplateProcessing(single="$A </s>", special_tokens=TWO[1:])
    ),
    "BERT's": lambda: with_(byte_level(), post_processor=processors.BertProcessing(("</s>", EOS), ("<s>", BOS))),
    "RoBERTa's": lambda: with_(byte_level(), post_processor=processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS))),
    "byte-level": lambda: with_(byte_level(), post_processor=processors.ByteLevel(trim_offsets=True)),
    "Llama 3's sequence": lambda: with_(
        byte_level(), post_processor=processors.Sequence([processors.ByteLevel(trim_offsets=False), TEMPLATE])
    ),
    "truncation and padding": lambda: with_(limited(byte_level()), post_processor=TEMPLATE),
    "prefix space": lambda: with_(byte_level(), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits": lambda: with_(
        byte_level(),
        pre_tokenizer=pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        ]),
    ),
    "split": lambda: with_(
        byte_level(),
        pre_tokenizer=pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r"\p{L}+|\s+|\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]),
    ),
    "ignore_merges": lambda: byte_level(ignore_merges=True),
    **{
        f"normalizer {type(one).__name__}": (lambda one=one: with_(byte_level(), normalizer=one))  # type: ignore[misc]
        for one in (
            normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase(),
            normalizers.Strip(), normalizers.StripAccents(), normalizers.Nmt(), normalizers.Replace("l", "ab"),
            normalizers.Prepend("_"), normalizers.BertNormalizer(), normalizers.Sequence([normalizers.NFKC()]),
        )
    },
    "added": lambda: added(byte_level()),
    "added, strips": lambda: added(byte_level(), lstrip=True, rstrip=True),
    "added, single word": lambda: added(byte_level(), single_word=True),
    "added, not normalized": lambda: with_(added(byte_level(), normalized=False), normalizer=normalizers.NFKC()),
    "Llama 2, byte_fallback": lambda: with_(
        pieces(
            models.BPE(
                letters(("ab", "▁a")), [("a", "b"), ("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
            ),
            decoder=decoders.Sequence([
                decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
            ]),
        ),
        normalizer=LLAMA_2,
    ),
    **{
        f"fuse_unk {fuses}": (
            lambda fuses=fuses: pieces(  # type: ignore[misc]
                models.BPE({"<unk>": 0, "a": 1, "b": 2}, [], unk_token="<unk>", fuse_unk=fuses),
                pre_tokenizers.Whitespace(),
            )
        )
        for fuses in (True, False)
    },
    "continuing prefix and end of a word": lambda: pieces(
        models.BPE(
            {"<unk>": 0, "a": 1, "##b": 2, "a</w>": 3, "##b</w>": 4, "ab</w>": 5}, [("a", "##b</w>")],
            unk_token="<unk>", continuing_subword_prefix="##", end_of_word_suffix="</w>",
        ),
        pre_tokenizers.Whitespace(), decoders.BPEDecoder(),
    ),
    "unigram": lambda: pieces(
        models.Unigram(UNIGRAM, 0, True), pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    ),
    "words": lambda: pieces(
        models.WordLevel({"<unk>": 0, "Hello": 1, "a": 2}, "<unk>"), pre_tokenizers.WhitespaceSplit()
    ),
    "wordpiece": lambda: pieces(
        models.WordPiece({"<unk>": 0, "a": 1, "##b": 2, "x": 3, "##y": 4, "##z": 5}, unk_token="<unk>"),
        pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(),
    ),
}  # fmt: skip


def write(folder: Path, inner: Tokenizer, **settings: Any) -> Path:
    inner.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    named = {key: value for key, value in named.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_and_texts_are_those_of_autotokenizer(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, FOLDERS[name]())
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_of(str(path))
    ours.save(tmp_path / "saved.json")  # what a run and prepared data keep
    for tokenizer in (ours, load(tmp_path / "saved.json")):
        for text in TEXTS:
            ids = [*tokenizer.opening, *tokenizer.encode(text).tolist(), *tokenizer.closing]
            assert ids == theirs(text).input_ids, text
            assert tokenizer.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert tokenizer.separator == theirs.eos_token_id
    # and an export of a run gives them again
    exported = tmp_path / "out"
    exported.mkdir()
    for file, text in tokenizer_files((tmp_path / "saved.json").read_text(), 64)[0].items():
        (exported / file).write_text(text)
    again = AutoTokenizer.from_pretrained(exported)
    assert [again(text).input_ids for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    assert again.eos_token == "</s>"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json", "config.json", "list", "none"])
def test_the_end_of_a_document_is_the_one_that_the_folder_names(where: str, tmp_path: Path) -> None:
    inner = byte_level()
    inner.add_special_tokens(["[EOS]"])
    path = write(tmp_path, inner, eos_token="[EOS]" if where == "tokenizer_config.json" else None)
    end = inner.token_to_id("[EOS]")
    if where == "special_tokens_map.json":
        (tmp_path / where).write_text(json.dumps({"eos_token": {"content": "[EOS]", "lstrip": False}}))
    if where in ("config.json", "list"):
        file = "config.json" if where == "config.json" else "generation_config.json"
        (tmp_path / file).write_text(json.dumps({"eos_token_id": [end, 5] if where == "list" else end}))
    tokenizer = tokenizer_of(str(path))
    assert tokenizer.separator == (EOS if where == "none" else end)
    tokenizer.save(tmp_path / "saved.json")
    assert load(tmp_path / "saved.json").separator == tokenizer.separator
    assert tokenizer_text(tmp_path) == ((tmp_path / "saved.json").read_text() if where != "none" else path.read_text())


def test_documents_begin_and_end_in_every_chunk_and_split(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(str(write(tmp_path, FOLDERS["template"]())))
    blocks = [
        DocumentPiece("abc", True),
        DocumentPiece("", True),
        DocumentPiece("x" * 400_000, False),
        DocumentPiece("y" * 400_000, True),
    ]
    chunks = list(cut_chunks(blocks, 300_003, True, tokenizer.cut_is_safe))
    assert [chunk.begins for chunk in chunks] == [True, False]  # validation begins inside a document
    ids = np.concatenate([encode_segments(tokenizer, chunk.segments, True, chunk.begins) for chunk in chunks]).tolist()
    assert ids[:6] == [BOS, *tokenizer.encode("abc").tolist(), EOS, BOS, EOS]
    assert [ids.count(BOS), ids.count(EOS)] == [3, 3]
    both = tokenizer_of(str(write(tmp_path, FOLDERS["template, both ends"]())))
    assert document_end(both) == (EOS,)  # the tokenizer's own end is not repeated
    assert encode_segments(both, [("a", True)], False).tolist() == [BOS, *both.encode("a").tolist(), EOS]


def test_only_ids_that_changed_get_another_name_and_files_of_codescent_stay_as_they_were(tmp_path: Path) -> None:
    def key(path: Path) -> str:
        return str(make_request("python-stdlib", str(path), 0.1, "text", None).key["tokenizer"])

    plain = write(tmp_path, byte_level())
    assert key(plain).count(":") == 1
    begins = write(tmp_path, FOLDERS["template"]())
    assert key(begins).count(":") == 2
    assert key(Path(f"bare:{begins}")) == key(begins).rpartition(":")[0]  # the name that earlier versions gave
    assert tokenizer_of(f"bare:{begins}").opening == ()
    (tmp_path / "description.json").write_text("{}")  # prepared data: read as it was written
    assert tokenizer_of(str(begins)).opening == ()


def test_prompts_and_pairs_begin_as_the_folder_says(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(str(write(tmp_path, FOLDERS["template"]())))
    text = tokenizer.encode("Q: a").tolist()
    assert Prompts(tokenizer).encode("Q: a") == ("Q: a", [BOS, *text])
    assert Prompts(tokenizer).encode("") == ("", [BOS])
    encode = pair_encoder(parse_template("{prompt}{response}"), tokenizer)
    messages = [{"role": "user", "content": "Q: a"}, {"role": "assistant", "content": " b"}]
    ids, spans = encode(Conversation("a.jsonl:1", tuple(messages)))
    response = tokenizer.encode(" b").tolist()
    assert ids == [BOS, *text, *response, EOS]
    assert spans == [(1 + len(text), len(ids))]


def test_what_cannot_be_obeyed_is_refused(tmp_path: Path) -> None:
    twice = processors.TemplateProcessing(single="$A <s> $A", special_tokens=ONE)
    absent = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 999)])
    for inner, settings, message in (
        (byte_level(dropout=0.1), {}, r"model\.dropout = 0\.1: ids would be drawn at random"),
        (with_(byte_level(), post_processor=twice), {}, r"tokenizer\.json: its post_processor has a text 2 times"),
        (with_(byte_level(), post_processor=absent), {}, r"adds the ids \[999\], which no token has"),
        (byte_level(), {"eos_token": "[END]"}, r'"\[END\]": named beside the vocabulary, which has no such token'),
        (byte_level(), {"added_tokens_decoder": {"300": {"content": "<new>"}}}, r'"<new>": named beside'),
        (
            FOLDERS["words"](),
            {"tokenizer_class": "GPT2TokenizerFast"},
            r"GPT2Tokenizer, cannot .* model is a WordLevel",
        ),
        (
            byte_level(),
            {"tokenizer_class": "RobertaTokenizer", "cls_token": "[C]"},
            r'cls_token, "\[C\]", around a text',
        ),
        (byte_level(), {"tokenizer_class": "CLIPTokenizer"}, "CLIPTokenizer, makes other ids .* write .*TokenizerFast"),
    ):
        path = write(tmp_path, inner, **settings)
        with pytest.raises(UserError, match=message):
            tokenizer_of(str(path))
    assert tokenizer_of(str(write(tmp_path, byte_level(dropout=0.0)))).separator == EOS


def decoder_of(inner: Tokenizer, **changed: Any) -> dict[str, Any]:
    """added_tokens_decoder as transformers writes it; `changed`: fields of <tool>."""
    found = {
        str(one["id"]): {k: v for k, v in one.items() if k != "id"}
        for one in json.loads(inner.to_str())["added_tokens"]
    }
    return {key: one | (changed if one["content"] == "<tool>" else {}) for key, one in found.items()}


@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_a_folder_whose_files_contradict_each_other_is_refused(class_name: str, tmp_path: Path) -> None:
    inner = added(byte_level())
    write(tmp_path, inner, tokenizer_class=class_name, added_tokens_decoder=decoder_of(inner))
    path = tmp_path / "tokenizer.json"
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_of(str(path))
    assert [_whole(ours, text) for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    for flag in ("lstrip", "rstrip", "single_word"):
        write(tmp_path, inner, tokenizer_class=class_name, added_tokens_decoder=decoder_of(inner, **{flag: True}))
        with pytest.raises(
            UserError, match=f'"<tool>" has another {flag} in tokenizer_config.json than in tokenizer.json'
        ):
            tokenizer_of(str(path))
    (tmp_path / "special_tokens_map.json").write_text('{"add_bos_token": true}')
    write(tmp_path, inner, tokenizer_class=class_name)
    with pytest.raises(UserError, match=r"add_bos_token is in special_tokens_map\.json, and decides nothing"):
        tokenizer_of(str(path))


def test_tokens_that_a_class_would_number_anew_are_refused(tmp_path: Path) -> None:
    inner = added(byte_level())
    fields = json.loads(inner.to_str())
    fields["added_tokens"][-1]["id"] += 4
    path = write(tmp_path, inner, tokenizer_class="GPT2Tokenizer")
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="the ids of its added tokens have gaps, or another order: 265"):
        tokenizer_of(str(path))
    write(tmp_path, inner, tokenizer_class="GPT2Tokenizer", added_tokens_decoder={})
    with pytest.raises(UserError, match=r'"<s>" is in tokenizer\.json, and not in added_tokens_decoder'):
        tokenizer_of(str(path))


def test_what_makes_the_library_panic_is_one_sentence(tmp_path: Path) -> None:
    fields = json.loads(byte_level().to_str())
    path = write(tmp_path, byte_level(), tokenizer_class="T5Tokenizer")
    for part in (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ):
        path.write_text(json.dumps(fields | part))
        with pytest.raises(UserError, match=r"tokenizer\.json: (not a tokenizer|the tokenizers library)"):
            tokenizer_of(str(path))
    path.write_text("5")
    with pytest.raises(UserError, match="not a tokenizer: not a JSON object"):
        tokenizer_of(str(path))


CLASSES: dict[str, list[str]] = {
    "no post-processor": ["GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizer", "LlamaTokenizerFast"],
    "template": ["GPT2Tokenizer", "LlamaTokenizer", "NoSuchTokenizer"],
    "prefix space": ["GPT2Tokenizer"],
    "digits": ["GPT2TokenizerFast", "CodeGenTokenizer"],
}


@pytest.mark.parametrize(("name", "class_name"), [(name, one) for name, found in CLASSES.items() for one in found])
def test_a_class_that_agrees_with_the_file_has_the_ids_of_autotokenizer(
    name: str, class_name: str, tmp_path: Path
) -> None:
    keys = {"add_prefix_space": True} if name == "prefix space" else {}
    path = write(tmp_path, FOLDERS[name](), tokenizer_class=class_name, **keys)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_of(str(path))
    for text in TEXTS:
        assert [*ours.opening, *ours.encode(text).tolist(), *ours.closing] == theirs(text).input_ids


VOCABULARY_ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "begins": {"add_bos_token": True},
    "ends": {"add_eos_token": True},
    "both": {"add_bos_token": True, "add_eos_token": True},
    "space": {"add_prefix_space": True},
    "space and begins": {"add_prefix_space": True, "add_bos_token": True},
}


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("keys", VOCABULARY_ALONE.values(), ids=VOCABULARY_ALONE)
def test_gpt2s_vocabulary_without_a_tokenizer_json_obeys_the_settings_beside_it(
    keys: dict[str, Any], where: str, tmp_path: Path
) -> None:
    model = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    settings, names = {"tokenizer_class": "GPT2Tokenizer", **keys}, {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    named = names if where == "tokenizer_config.json" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | named))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer_text(tmp_path)
    assert text is not None
    (tmp_path / "saved.json").write_text(text)
    ours = load(tmp_path / "saved.json")
    for words in TEXTS:
        assert [*ours.opening, *ours.encode(words).tolist(), *ours.closing] == theirs(words).input_ids
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UserError, match=r"a Qwen2Tokenizer, and of vocab\.json with merges\.txt only GPT2"):
        tokenizer_text(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                {"add_prefix_space": True},
                {"legacy": True},
                {"add_prefix_space": False, "add_bos_token": True, "add_eos_token": True},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("class_name", rebuilt.CLASSES)
def test_a_class_that_is_made_anew_is_read_as_autotokenizer_makes_it(
    class_name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    said, refused = 0, list[str]()
    for number, (name, make) in enumerate(FOLDERS.items()):
        (folder := tmp_path / str(number)).mkdir()
        path = write(folder, make(), tokenizer_class=class_name, **settings)
        try:
            ours = tokenizer_of(str(path))
        except UserError as error:
            refused.append(str(error))
            continue
        theirs = AutoTokenizer.from_pretrained(folder)
        remark = beside.remark(path)
        said += remark is not None
        for text in (*rebuilt.PROBES, *TEXTS):
            wanted, ids = _ids(theirs.backend_tokenizer, text), _whole(ours, text)
            assert ids == wanted, (name, text)
            assert wanted is None or ours.decode(wanted) == theirs.decode(wanted, clean_up_tokenization_spaces=False)
            differs = _ids(Tokenizer.from_str(path.read_text()), text) != wanted
            assert remark is not None or not differs, (name, text)
        # what is kept of it is read with the same ids, by the same class too
        kept = tokenizer_text(folder) or ""
        (folder / "tokenizer.json").write_text(library_text(kept))
        again = tokenizer_of(str(path))
        assert [_whole(again, text) for text in TEXTS] == [_whole(ours, text) for text in TEXTS], name
        assert beside.remark(path) is None, name
    assert said
    assert all(re.search(r"cannot be made of this file: .* and the file's model is", one) for one in refused)


def _whole(tokenizer: Any, text: str) -> list[int] | None:
    try:
        return [*tokenizer.opening, *tokenizer.encode(text).tolist(), *tokenizer.closing]
    except UserError:
        return None


def test_each_class_of_transformers_is_made_here_refused_or_reads_the_file(tmp_path: Path) -> None:
    """A class that a later version of transformers makes anew, and that is not known here."""
    inner = FOLDERS["digits"]()
    alone = [_ids(inner, text) for text in rebuilt.PROBES]
    unknown = []
    for name in {found.removesuffix("Fast") for found in TOKENIZER_MAPPING_NAMES.values() if found}:
        if name in rebuilt.CLASSES or name.removesuffix("Tokenizer") in classes.NOT_MADE:
            continue
        write(tmp_path, inner, tokenizer_class=name)
        try:
            made = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
        except Exception:  # whatever a class raises that needs other files
            unknown.append(name)
            continue
        if [_ids(made, text) for text in rebuilt.PROBES] != alone:
            unknown.append(name)
    assert not unknown


def _ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    try:
        return tokenizer.encode(text).ids
    except Exception:  # the library raises a bare Exception
        return None


NAMED = [
    None,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("PreTrainedTokenizerFast", "GPTNeoXTokenizerFast")),
]


@pytest.mark.parametrize("named", NAMED)
def test_a_folder_is_judged_by_the_class_that_autotokenizer_makes(named: str | None, tmp_path: Path) -> None:
    wrong = []
    for model_type, usual in TOKENIZER_MAPPING_NAMES.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        is_of_pieces = classes.OF_MODEL.get(model_type) in ("T5Tokenizer", "XLMRobertaTokenizer")
        if usual is None or (is_of_pieces and named and "NeoX" in named):
            continue  # a BPE's class cannot be of pieces
        write(tmp_path, FOLDERS["unigram" if is_of_pieces else "split"](), tokenizer_class=named)
        made = classes.class_of_model(beside.class_of(tmp_path), model_type)
        try:
            theirs = type(AutoTokenizer.from_pretrained(tmp_path)).__name__
        except Exception:
            assert made.removesuffix("Tokenizer") in classes.NOT_MADE, model_type  # it needs other files
            continue
        reads_the_file = theirs in ("TokenizersBackend", "FNetTokenizer", "ParakeetTokenizer")
        if made != theirs and not (reads_the_file and made not in rebuilt.CLASSES):
            wrong.append((model_type, made, theirs))
    assert not wrong


def test_the_remark_shows_a_text_with_both_ids_and_how_to_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads(FOLDERS["digits"]().to_str())
    fields["model"]["vocab"]["12"], fields["model"]["merges"] = 261, [["1", "2"]]
    inner = Tokenizer.from_str(json.dumps(fields))
    path = write(tmp_path, inner, tokenizer_class="GPT2Tokenizer")
    (tmp_path / "corpus.txt").write_text("a 12 b" * 200)
    for _ in range(2):
        prepare(str(tmp_path / "corpus.txt"), str(path), tmp_path / "data")
    said = capsys.readouterr().err
    assert said.count("are made anew, as by transformers 5") == 1
    assert re.search(r'"0 1 2 [^"]*…" has \[.*\]; by the file alone it has \[.*\]; .* "tokenizer_class": "PreTr', said)
    key = make_request("python-stdlib", str(path), 0.1, "text", None).key["tokenizer"]
    assert key.count(":") == 2  # data of the file's ids is other data
    write(tmp_path, inner)
    assert make_request("python-stdlib", str(path), 0.1, "text", None).key["tokenizer"] == key.rpartition(":")[0]
    assert beside.remark(path) is None
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a 12").input_ids == tokenizer_of(str(path)).encode("a 12").tolist()
