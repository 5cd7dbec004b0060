"""In: Hugging Face folders, run folders, paths that are neither. Out: an engine that generates, or one sentence.
Does not compare tokens with transformers (test_engine.py does)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_huggingface import bert, llama
from test_interchange import a_folder
from transformers import GPT2Config, GPT2LMHeadModel

from codescent import models
from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.inference.layouts import store_for_few_tokens_
from codescent.inference.open import capacity_of, open_engine
from codescent.inference.request import Finish, Sampling
from codescent.models.decoder import Decoder
from codescent.models.initialize import initialize_
from codescent.operators.linear import Linear
from codescent.operators.reordered import ReorderedVocabulary, multiplies_bf16
from codescent.verbs.import_folder import import_folder

GPT2_SIZES: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "vocab_size": 37, "seq_len": 512}
LLAMA_SIZES = GPT2_SIZES | {"num_kv_heads": 1, "ffn_dim": 24}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]"
    "{% else %}>{{ m['content'] }}<|endoftext|>{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def of_bytes(path: Path) -> Path:
    """A folder of transformers with a tokenizer of bytes."""
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 260, "n_positions": 32}
    return a_folder(path, GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)))


def test_a_folder_of_hugging_face_is_opened_as_it_is(tmp_path: Path) -> None:
    """Fault: its end tokens or its chat template are not found, or options of a run are ignored."""
    path = of_bytes(tmp_path / "hf")
    opened = open_engine(path, device="cpu", rows=3)
    assert (opened.name, opened.which, opened.seq_len, opened.chat) == ("hf", "", 32, None)
    assert opened.engine.capacity.rows == 3
    text, tokens = opened.prompts.encode("ab")
    assert opened.tokenizer.decode(tokens) == text == "ab"
    opened.engine.add(tokens, Sampling(seed=1, max_new_tokens=4))
    found = [output for _ in range(4) for output in opened.engine.step()]
    assert found[-1].finished in (Finish.LENGTH, Finish.STOP)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    again = open_engine(path, device="cpu")
    assert again.engine.stops == {7, 9, 256}  # the last one ends a turn
    assert again.chat is not None
    assert again.prompts.encode("ab")[0] == "[ab]>"
    import_folder(path, tmp_path / "run", load("finetune"))
    of_run = open_engine(tmp_path / "run", device="cpu")
    assert of_run.chat is not None
    assert of_run.prompts.encode("ab")[0] == "[ab]>"
    assert (of_run.name, of_run.which, of_run.engine.stops) == ("run", "step 0", {256})
    with pytest.raises(UserError, match="one set of weights; leave out best, step"):
        open_engine(path, device="cpu", best=True, step=3)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_matrices_by_columns_give_the_same_logits(kind: str) -> None:
    """Fault: a matrix is transposed, or one of two halves loses their order; or an embedding is read by columns."""
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "vocab_size": 37, "seq_len": 64}
    shape = models.shape_of(kind, sizes | ({"ffn_dim": 24} if kind == "llama" else {}))
    module = models.construct(models.facts_of(kind, shape), "cpu").double().eval()
    initialize_(module, 3, models.parameters_of(kind, shape))
    tokens_BT = torch.arange(37)[None]
    with torch.inference_mode():
        before = module(tokens_BT)
    assert isinstance(module, Decoder)
    store_for_few_tokens_(module, 1 << 40)
    up = module.get_parameter("blocks.0.mlp.up.weight" if kind == "gpt2" else "blocks.0.mlp.gate_up.weight")
    assert up.stride()[-1] == up.numel() // 16
    assert module.get_parameter("tok.weight").is_contiguous()
    with torch.inference_mode():
        torch.testing.assert_close(module(tokens_BT), before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module(tokens_BT), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [GPT2_SIZES, LLAMA_SIZES, LLAMA_SIZES | {"tie_head": True}])
def test_copies_of_matrices_give_the_same_logits(
    sizes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a copy of another matrix, halves that are swapped, or one that training or many tokens read wrongly."""
    if dtype == torch.bfloat16 and not multiplies_bf16():
        pytest.skip("this processor does not multiply bf16")
    monkeypatch.setattr("codescent.inference.layouts.BIG_BYTES", 0)
    kind = "llama" if "ffn_dim" in sizes else "gpt2"
    shape = models.shape_of(kind, sizes)
    module = models.construct(models.facts_of(kind, shape), "cpu").to(dtype).eval()
    initialize_(module, 3, models.parameters_of(kind, shape))
    assert isinstance(module, Decoder)
    few, many = torch.arange(2)[None], (torch.arange(1500) % 37).view(5, -1)
    with torch.inference_mode():
        expected = [module(tokens) for tokens in (few, many)]
    store_for_few_tokens_(module, 1 << 30)
    with torch.inference_mode():
        found = [module(tokens) for tokens in (few, many)]
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    assert [layer for layer in layers if layer.reordered is None] == []
    assert isinstance(module.vocabulary, ReorderedVocabulary)
    near = {"rtol": 0.0, "atol": 3e-2 if dtype == torch.bfloat16 else 1e-6}
    for one, other in zip([*found, module(few)], [*expected, expected[0]], strict=True):
        torch.testing.assert_close(one, other, **near)
    loss = module(many, many)  # training reads the weights themselves
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_copies_of_matrices_stay_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: copies fill the memory of a machine that holds the model just once."""
    monkeypatch.setattr("codescent.inference.layouts.BIG_BYTES", 0)
    shape = models.shape_of("gpt2", GPT2_SIZES)
    module = models.construct(models.facts_of("gpt2", shape), "cpu").eval()
    initialize_(module, 3, models.parameters_of("gpt2", shape))
    assert isinstance(module, Decoder)
    qkv, out = 4 * 3 * 16 * 16, 4 * 16 * 16
    store_for_few_tokens_(module, qkv + out)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Linear)}
    assert [name for name, layer in layers.items() if layer.reordered] == ["blocks.0.attn.qkv", "blocks.0.attn.out"]
    assert not isinstance(module.vocabulary, ReorderedVocabulary)


def test_what_cannot_generate_is_refused_at_once(tmp_path: Path) -> None:
    """Fault: a traceback, or only the first of several problems."""
    bert().save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError) as error:
        open_engine(tmp_path / "bert", device="cpu")
    assert 'model_type = "bert": only gpt2 and llama can generate text' in str(error.value)
    assert "has no tokenizer" in str(error.value)
    llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match="has no tokenizer that the tokenizers library can read"):
        open_engine(tmp_path / "llama", device="cpu")
    with pytest.raises(UserError, match="no such run folder"):
        open_engine(tmp_path / "absent", device="cpu")
    with pytest.raises(UserError, match="--device tpu"):
        open_engine(tmp_path / "absent", device="tpu")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("generation_config.json", '{"eos_token_id": [7, 260]}', "eos_token_id 260: outside the vocabulary of 260"),
        ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id -1: outside the vocabulary of 260"),
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        ("generation_config.json", None, "generation_config.json: Is a directory"),
    ],
)
def test_what_ends_texts_must_be_readable(tmp_path: Path, name: str, text: str | None, why: str) -> None:
    """Fault: a damaged file is ignored, and texts never end; or a token that no text can have is an end."""
    path = of_bytes(tmp_path / "hf")
    (path / name).unlink(missing_ok=True)
    if text is None:
        (path / name).mkdir()
    else:
        (path / name).write_text(text)
    with pytest.raises(UserError, match=why):
        open_engine(path, device="cpu")


def test_little_memory_makes_texts_shorter_and_none_is_refused(tmp_path: Path) -> None:
    """Fault: pages beyond the memory, or an engine that can hold no text."""
    opened = open_engine(of_bytes(tmp_path / "hf"), device="cpu", memory=2 * 16 * 16 * 4)
    assert opened.engine.capacity.pages == 1
    assert opened.seq_len == 16
    with pytest.raises(UserError, match="prompt: 17 tokens, and the model sees at most 16, for which the memory"):
        opened.engine.add([1] * 17, Sampling())
    with pytest.raises(UserError, match="2,047 bytes, and a page of 16 tokens takes 2,048 bytes"):
        capacity_of(opened.engine.module, 1, 2047)
