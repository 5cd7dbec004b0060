"""In: folders that transformers writes, and what can be wrong with one. Out: boxes of our parameters, or a refusal.
Does not run a verb: test_interchange does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from questions import vocabulary
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as LibraryTokenizer
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
)

from codescent import models
from codescent.base.errors import UserError
from codescent.config.sections import Model
from codescent.data.tokenizers import bpe, wordpiece
from codescent.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from codescent.huggingface import kind_of, tokens
from codescent.huggingface.folder import keys_of_model, open_folder, parts_of
from codescent.huggingface.kind import INERT, NEUTRAL
from codescent.huggingface.read import box
from codescent.huggingface.rounding import Rounding
from codescent.huggingface.tokens import CONTROLS, Controls, tokenizer_files, tokenizer_text
from codescent.huggingface.write import shards, write_weights
from codescent.models import SIZES, shape_of
from codescent.models.llama.declare import LlamaShape
from codescent.operators.frequencies import frequencies
from codescent.plan import Parameter

GPT2 = {"n_layer": 2, "n_head": 3, "n_embd": 24, "vocab_size": 61, "n_positions": 32, "bos_token_id": None}
LLAMA = {
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24,
    "intermediate_size": 40, "vocab_size": 61, "max_position_embeddings": 32,
}  # fmt: skip

BERT = {
    "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24, "intermediate_size": 52, "vocab_size": 61,
    "max_position_embeddings": 32,
}  # fmt: skip

BERT_SIZES = {
    "num_layers": 2, "num_heads": 3, "hidden_dim": 24, "ffn_dim": 52, "vocab_size": 61, "seq_len": 32,
}  # fmt: skip


def random_(model: Any) -> Any:
    """No value is that of another place."""
    torch.manual_seed(5)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.2)
    return model.eval()


def gpt2(**changes: Any) -> Any:
    return random_(GPT2LMHeadModel(GPT2Config(**{**GPT2, "eos_token_id": None, **changes})))


def llama(**changes: Any) -> Any:
    return random_(LlamaForCausalLM(LlamaConfig(**LLAMA | changes)))


def bert(kind: Any = BertForMaskedLM, **changes: Any) -> Any:
    return random_(kind(BertConfig(**BERT | changes)))


def ours(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Our model with the weights of a folder."""
    folder = open_folder(path)
    module = models.construct(models.facts_of(folder.kind.name, folder.shape), "cpu").to(dtype)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.copy_(box(folder, name, tuple(slice(0, size) for size in tensor.shape)))
    return module.eval()


def change(path: Path, **keys: Any) -> None:
    """Other values in config.json; None takes a key out."""
    settings = json.loads((path / "config.json").read_text())
    settings |= keys
    text = json.dumps({key: value for key, value in settings.items() if value is not None})
    (path / "config.json").write_text(text)


def retensor(path: Path, act: Callable[[dict[str, Tensor]], object]) -> None:
    """Other tensors in model.safetensors."""
    tensors = load_file(path / "model.safetensors")
    act(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


@torch.no_grad()
def difference(theirs: Any, mine: Any) -> float:
    x_BT = torch.randint(0, 61, (3, 32), generator=torch.Generator().manual_seed(1))
    out = theirs(x_BT)
    if not hasattr(out, "start_logits"):
        name = "logits" if "logits" in out else "prediction_logits"
        return float((out[name] - mine(x_BT)).abs().max())
    return float((torch.stack([out.start_logits, out.end_logits], -1) - mine(x_BT)).abs().max())


@pytest.mark.parametrize(
    "build",
    [
        gpt2,
        lambda: gpt2(n_inner=52, activation_function="gelu_pytorch_tanh"),
        llama,
        lambda: llama(num_key_value_heads=6, tie_word_embeddings=True, rms_norm_eps=1e-4, rope_theta=500.0),
        lambda: llama(num_key_value_heads=1),
        bert,
        lambda: bert(BertForQuestionAnswering),
        lambda: bert(BertForPreTraining),
    ],
    ids=["gpt2", "gpt2-wide", "llama", "llama-tied", "llama-one-kv-head", "bert", "bert-qa", "bert-pretraining"],
)
def test_the_same_logits(build: Callable[[], Any], tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    assert difference(model, ours(tmp_path)) < 1e-5


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size=10_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert difference(model, ours(tmp_path)) < 1e-5


def test_llama_3_1_has_its_rotary_scaling_in_the_words_of_transformers_4_and_5(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    model = llama(rope_parameters={**scaling, "rope_theta": 500000.0}, max_position_embeddings=16384)
    model.save_pretrained(tmp_path)
    assert difference(model, ours(tmp_path)) < 1e-5
    change(tmp_path, rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)
    assert difference(model, ours(tmp_path)) < 1e-5


@pytest.mark.parametrize(
    ("factor", "low", "high", "length"),
    [(32.0, 1.0, 4.0, 8192), (2, 0.5, 7.5, 40), (0.5, 1, 2, 16), (8.0, 1.0, 4.0, None)],
)
def test_any_rotary_scaling_of_llama_3_has_the_frequencies_and_logits_of_transformers(
    factor: float, low: float, high: float, length: int | None, tmp_path: Path
) -> None:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    scaling |= {} if length is None else {"original_max_position_embeddings": length}
    model = llama(rope_parameters={**scaling, "rope_theta": 500.0}, max_position_embeddings=16384)
    model.save_pretrained(tmp_path)
    folder = open_folder(tmp_path)
    assert isinstance(folder.shape, LlamaShape)
    found = frequencies(folder.shape.head_dim, folder.shape.rope_theta, folder.shape.rope_scaling)
    torch.testing.assert_close(found.float(), model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0.0)
    assert difference(model, ours(tmp_path)) < 1e-5
    # the run's config has the same factors, and an export writes them
    keys = Model(**keys_of_model(tmp_path)).model_dump()
    assert shape_of("llama", {name: keys[name] for name in SIZES if name != "head"}) == folder.shape
    assert open_folder(tmp_path).kind.write(folder.shape)["rope_scaling"] == {
        **scaling,
        "original_max_position_embeddings": length or 16384,
    }


def test_rotary_scaling_that_is_none_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    scaling = {"rope_type": "llama3", "factor": "8", "low_freq_factor": float("inf"), "high_freq_factor": 4.0}
    change(tmp_path, rope_parameters={**scaling, "original_max_position_embeddings": 0})
    with pytest.raises(UserError, match=r'factor = "8", low_freq_factor = Infinity, .*: llama3 needs a number above 0'):
        open_folder(tmp_path)
    numbers = {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
    change(tmp_path, rope_parameters={**scaling, **numbers})
    with pytest.raises(UserError, match=r"rope_low_freq_factor = 4\.0: must be below .*rope_high_freq_factor = 4\.0"):
        open_folder(tmp_path)
    with pytest.raises(UserError, match=r"model\.rope_original_seq_len: given without model\.rope_factor"):
        shape_of(
            "llama", {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "vocab_size": 9, "rope_original_seq_len": 8}
        )


@pytest.mark.parametrize("build", [gpt2, llama, bert])
def test_keys_that_change_no_logit_in_transformers_are_taken_and_named(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    before = open_folder(tmp_path)
    assert not before.inert
    kind = before.kind
    values = {"num_labels": 3, "_num_labels": 1, "top_k": 3, "temperature": 0.3, "min_length": 2, "num_beams": 2}
    values |= {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "prefix": "a", "is_decoder": False}
    keys = {name: values.get(name, 1) for name in (*INERT.split(), *kind.inert.split())}
    keys |= {name: spellings[0] for name, spellings in {**NEUTRAL, **kind.neutral}.items()}
    known = set(json.loads((tmp_path / "config.json").read_text())) | set(kind.fixed) | set(kind.ignored.split())
    keys = {name: value for name, value in keys.items() if name not in known and value is not None}
    change(tmp_path, **keys)
    assert {"transformers.js_config", "_num_labels"} <= set(keys)
    assert (
        type(model).from_pretrained(tmp_path)(torch.arange(9)[None]).logits.equal(model(torch.arange(9)[None]).logits)
    )
    folder = open_folder(tmp_path)
    assert set(folder.inert) == set(keys)
    assert folder.shape == before.shape
    assert difference(model, ours(tmp_path)) < 1e-5


@pytest.mark.parametrize(
    "keys",
    [{"rope_interleaved": True}, {"sliding_window": 8}, {"pruned_heads": {"0": [1]}}, {"is_encoder_decoder": True}],
)
def test_the_same_keys_with_values_that_change_the_model_are_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    change(tmp_path, **keys)
    with pytest.raises(UserError, match=f"{next(iter(keys))} = .*: not known for llama.*delete it from config"):
        open_folder(tmp_path)


def test_a_folder_without_prefixes_and_with_old_buffers(tmp_path: Path) -> None:
    """As OpenAI's GPT-2 lies on the hub: of the model without its head, with the masks of its time."""
    model = gpt2()
    model.save_pretrained(tmp_path / "whole")
    GPT2Model.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path)
    change(tmp_path, architectures=["GPT2LMHeadModel"])

    def masks(tensors: dict[str, Tensor]) -> None:
        assert "wte.weight" in tensors
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    retensor(tmp_path, masks)
    assert difference(model, ours(tmp_path)) < 1e-5


def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path)
    retensor(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()}))
    assert difference(model, ours(tmp_path)) < 1e-5
    retensor(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(2.0))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        open_folder(tmp_path)


def test_berts_as_google_released_them(tmp_path: Path) -> None:
    """Norms have gamma and beta, the tied matrix is there twice; pooler and next sentence are left out."""
    model = bert(BertForPreTraining)
    model.save_pretrained(tmp_path)

    def old(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[new] = tensors.pop(name)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]

    retensor(tmp_path, old)
    assert difference(model, ours(tmp_path)) < 1e-5
    spare = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert set(open_folder(tmp_path).spare) == spare | {"cls.seq_relationship.weight", "cls.seq_relationship.bias"}


def test_a_bert_without_a_head_lacks_it(tmp_path: Path) -> None:
    bert(BertModel).save_pretrained(tmp_path)
    folder = open_folder(tmp_path)
    missing = {"head.bias", "head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias"}
    assert set(folder.missing) == missing
    for head in ("mlm", "qa"):
        shape = models.shape_of("bert", {**BERT_SIZES, "head": head})
        lacking = {one.name for one in models.parameters_of("bert", shape) if not folder.has(one)}
        assert lacking == (missing if head == "mlm" else {"head.weight", "head.bias"})


@pytest.mark.parametrize("build", [gpt2, llama, bert])
def test_any_box_is_that_of_the_whole(build: Callable[[], Any], tmp_path: Path) -> None:
    """Rows that cut heads and pairs apart, columns, single elements, nothing."""
    build().bfloat16().save_pretrained(tmp_path)
    folder, rng = open_folder(tmp_path), np.random.default_rng(3)
    for name, parts in folder.parts.items():
        shape = parts[0].parameter.shape
        whole = box(folder, name, tuple(slice(None) for _ in shape))
        assert tuple(whole.shape) == shape
        assert whole.dtype == torch.bfloat16
        for _ in range(12):
            cuts = [sorted(rng.integers(0, size + 1, 2)) for size in shape]
            slices = tuple(slice(int(start), int(stop)) for start, stop in cuts)
            assert torch.equal(box(folder, name, slices), whole[slices]), (name, slices)


@pytest.mark.parametrize("build", [gpt2, llama, bert])
def test_each_way_is_the_other_backwards(build: Callable[[], Any], tmp_path: Path, monkeypatch: Any) -> None:
    """Written back from our parameters, in blocks of a few elements: the same tensors, bit by bit."""
    monkeypatch.setattr("codescent.huggingface.write.BLOCK_NUMEL", 300)
    model = build()
    model.save_pretrained(tmp_path)
    folder = open_folder(tmp_path)
    made = tmp_path / "made"
    made.mkdir()
    files = shards([part for parts in folder.parts.values() for part in parts], "F32", 9_000)
    assert max(file.size_bytes for file in files if len(file.parts) > 1) <= 9_000
    write_weights(made, files, "F32", lambda name, at: box(folder, name, at), frozenset(), Rounding("fp32"))
    found = {name: tensor for file in files for name, tensor in load_file(made / file.file).items()}
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_declared_parameter_of_a_kind_has_its_place() -> None:
    for kind, preset in (
        ("gpt2", "gpt2"),
        ("llama", "llama3-8b"),
        ("llama", "llama-tiny"),
        ("bert", "bert-base-uncased"),
    ):
        shape = models.shape_of(kind, {}, preset)
        parts = parts_of(kind_of(kind, shape), shape)
        assert {p.name: p.shape for p in models.parameters_of(kind, shape)} == {
            name: of_one[0].parameter.shape for name, of_one in parts.items()
        }
        for of_one in parts.values():
            parameter: Parameter = of_one[0].parameter
            assert sum(int(np.prod(part.shape)) for part in of_one) == parameter.numel


# What is refused


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "model.safetensors: not a whole safetensors file"),
    "missing tensor": (
        lambda path: retensor(path, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.bias")),
        r"transformer\.h\.1\.mlp\.c_fc\.bias: missing",
    ),
    "extra tensor": (
        lambda path: retensor(path, lambda tensors: tensors.update({"score.weight": torch.ones(2, 24)})),
        r"score\.weight: not a tensor of this model",
    ),
    "wrong shape": (
        lambda path: retensor(path, lambda tensors: tensors.update({"transformer.wpe.weight": torch.ones(31, 24)})),
        r"transformer\.wpe\.weight is \[31, 24\], not \[32, 24\]",
    ),
    "integers": (
        lambda path: retensor(path, lambda t: t.update({"transformer.ln_f.bias": torch.ones(24, dtype=torch.int8)})),
        r"transformer\.ln_f\.bias is I8",
    ),
    "pickle": (pickle, r"model\.bin: not read: a pickle may run any code.*GPT2LMHeadModel as M.*save_pretrained"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "no weights"),
    "architecture": (
        lambda path: change(path, model_type="mamba"),
        "model_type = 'mamba': known are gpt2, llama, mistral, qwen2, qwen3, olmo2, gemma2, gemma3_text, phi3, "
        "mixtral, qwen3_moe, dots1, deepseek_v3, deepseek_v2, olmoe, bert",
    ),
    "activation": (
        lambda path: change(path, activation_function="relu"),
        'function = "relu": codescent.s gpt2 supports only',
    ),
    "scaled": (lambda path: change(path, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    "untied": (lambda path: change(path, tie_word_embeddings=False), "tie_word_embeddings = false"),
    "unknown key": (lambda path: change(path, sliding_window=8), "sliding_window = 8: not known for gpt2"),
    "quantized": (lambda path: change(path, quantization_config={"bits": 4}), "quantization_config"),
    "no size": (lambda path: change(path, n_layer=None), "n_layer: missing"),
    "no number": (lambda path: change(path, n_layer="2"), 'n_layer = "2": not a size'),
    "half a layer": (lambda path: change(path, n_layer=2.5), r"n_layer = 2\.5: not a size"),
    "many heads": (lambda path: change(path, n_head=10**18), f"n_head = {10**18}: not a size"),
    "many channels": (lambda path: change(path, n_embd=10**18), f"n_embd = {10**18}: not a size"),
    "many layers": (lambda path: change(path, n_layer=10**9), f"{10**9} layers by config.json, but only \\d+ tensors"),
    "dropouts": (lambda path: change(path, attn_pdrop=0.0), "one probability for all three"),
    "heads": (lambda path: change(path, n_head=7), "7 heads do not divide"),
    "one architecture": (lambda path: change(path, architectures=1), "architectures: given 1; must be a list of names"),
    "not JSON": (lambda path: (path / "config.json").write_text("{"), "config.json: not JSON"),
    "no config": (lambda path: (path / "config.json").unlink(), "not a Hugging Face folder"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    gpt2().save_pretrained(path)
    return path


@pytest.mark.parametrize("what", WRONG)
def test_what_our_model_is_not_is_refused_by_name(what: str, saved: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    spoil, message = WRONG[what]
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        open_folder(tmp_path)


def test_llamas_that_ours_is_not(tmp_path: Path) -> None:
    llama(attention_bias=True, sliding_window=4, hidden_act="gelu").save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        open_folder(tmp_path)
    for part in ("attention_bias = true", "sliding_window = 4", 'hidden_act = "gelu"'):
        assert part in str(caught.value)


def test_berts_that_ours_is_not(tmp_path: Path) -> None:
    bert(hidden_act="relu", type_vocab_size=3, attention_probs_dropout_prob=0.0).save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        open_folder(tmp_path)
    for part in ('hidden_act = "relu"', "type_vocab_size = 3", "attention_probs_dropout_prob = 0.0: codescent has one"):
        assert part in str(caught.value)


def test_an_index_with_holes_or_ways_out(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path, max_shard_size=10_000)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    (tmp_path / "model-00002-of-00005.safetensors").unlink(missing_ok=True)
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    first.rename(tmp_path / "away")
    with pytest.raises(UserError, match=rf"{first.name}: missing, though model\.safetensors\.index\.json lists it"):
        open_folder(tmp_path)
    index.write_text(text.replace(first.name, "../" + first.name))
    with pytest.raises(UserError, match="not the name of a safetensors file in the same folder"):
        open_folder(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_folder(tmp_path / "absent")


# Tokenizers

TEXT = "To be, or not to be: that's the question!\n\n  Größe 中文 😀\tx1234 \r\n e\u0301"


def trained_bpe() -> Tokenizer:
    return bpe.train(iter([TEXT * 20]), 300)


@pytest.mark.parametrize(
    "make",
    [
        ByteTokenizer,
        lambda: CharTokenizer("".join(sorted(set(TEXT))), False),
        lambda: CharTokenizer("".join(sorted(set(TEXT))), True),
        trained_bpe,
    ],
    ids=["byte", "char", "char-with-separator", "bpe"],
)
def test_tokenizers_give_the_same_ids_and_texts(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    check_tokenizer(make(), tmp_path)


def test_gpt2s_tokenizer(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(data_dir))
    check_tokenizer(bpe.gpt2(), tmp_path)
    assert (tmp_path / "merges.txt").is_file()
    (tmp_path / "tokenizer.json").unlink()  # as GPT-2's own folder was for years
    text = tokens.tokenizer_text(tmp_path)
    assert text is not None
    assert bpe.LibraryTokenizer.from_json(text, "").encode(TEXT).tolist() == bpe.gpt2().encode(TEXT).tolist()


def check_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "ours.json")
    gpt2().save_pretrained(tmp_path)
    files, ends = tokens.tokenizer_files((tmp_path / "ours.json").read_text(), 32)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(TEXT).tolist()
    assert theirs.encode(TEXT, add_special_tokens=False) == ids
    assert theirs.decode(ids) == tokenizer.decode(ids) == TEXT
    assert theirs.eos_token_id == tokenizer.separator == ends["eos_token_id"]
    assert len(theirs) == tokenizer.vocab_size
    back = tokens.tokenizer_text(tmp_path)
    assert back is not None
    again = bpe.LibraryTokenizer.from_json(back, "")
    assert again.encode(TEXT).tolist() == ids
    assert (again.vocab_size, again.separator) == (tokenizer.vocab_size, tokenizer.separator)
    assert tokens.differing_tokens((tmp_path / "ours.json").read_text(), back) == []


def test_wordpieces(tmp_path: Path) -> None:
    mine = wordpiece.bert(f"bert:{vocabulary(tmp_path)}")
    (tmp_path / "ours.json").write_text(mine.text)
    bert().save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    for name, text in tokens.tokenizer_files((tmp_path / "ours.json").read_text(), 32)[0].items():
        (tmp_path / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "The King was born; who walked?"
    ids = mine.encode(text).tolist()
    assert theirs.encode(text, add_special_tokens=False) == ids
    both = theirs("who?", text)
    assert both["input_ids"] == [mine.begin, *mine.encode("who?").tolist(), mine.end, *ids, mine.end]
    assert both["token_type_ids"][-len(ids) - 1 :] == [1] * (len(ids) + 1)
    assert (theirs.pad_token_id, theirs.mask_token_id) == (mine.pad, mine.mask)
    for left in ("tokenizer.json", "vocab.txt"):  # by either file alone
        back = tokens.tokenizer_text(tmp_path)
        assert back is not None
        assert tokens.differing_tokens(mine.text, back) == []
        assert bpe.LibraryTokenizer.from_json(back, "").encode(text).tolist() == ids
        (tmp_path / left).unlink()


def test_a_character_that_the_alphabet_lacks_is_an_error_there_too(tmp_path: Path) -> None:
    CharTokenizer("abc", False).save(tmp_path / "ours.json")
    gpt2().save_pretrained(tmp_path)
    for name, text in tokens.tokenizer_files((tmp_path / "ours.json").read_text(), 32)[0].items():
        (tmp_path / name).write_text(text)
    with pytest.raises(Exception, match=r"unk|UNK"):
        AutoTokenizer.from_pretrained(tmp_path).encode("abx")


def test_a_cased_wordpiece_stays_cased_where_only_its_words_are_read(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "the"]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    for kind, wanted in (("bert-cased", [5, 6]), ("bert", [6, 6])):
        files, _ = tokenizer_files(wordpiece.bert(f"{kind}:{tmp_path / 'vocab.txt'}").text, 16)
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("vocab.txt", "tokenizer_config.json"):
            (folder / name).write_text(files[name])
        text = tokenizer_text(folder)
        assert text is not None
        assert LibraryTokenizer.from_str(text).encode("The the", add_special_tokens=False).ids == wanted


@pytest.mark.parametrize(
    "files",
    [{"generation_config.json": "{"}, {"tokenizer_config.json": "[]"}, {"added_tokens.json": 1}, {"../x": "{}"}],
)
def test_damaged_control_tokens_of_a_run_are_refused(files: dict[str, Any], tmp_path: Path) -> None:
    """An export neither parses them nor writes a file outside of its folder."""
    (tmp_path / CONTROLS).write_text(json.dumps({"ids": {}, "files": files}))
    with pytest.raises(UserError, match=CONTROLS):
        Controls.of_run(tmp_path)


def test_a_dtype_that_makes_values_infinite_is_refused() -> None:
    rounding = Rounding("fp16")
    for name, value in (("small", 2.0), ("large", 7e4), ("nothing", 0.0), ("no number", math.nan)):
        wide = torch.tensor([value, 1.0])
        rounding.add(wide, wide.half())
        rounding.end(name)
    assert rounding.infinite == ["large"]
    with pytest.raises(UserError, match=r"--dtype fp16: 1 tensor would have infinite values \(large\)"):
        rounding.check()
    exact = Rounding("bf16")
    exact.add(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.0], dtype=torch.bfloat16))
    exact.end("small")
    assert list(exact.lines()) == ["every value is the trained one"]
