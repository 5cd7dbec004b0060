"""In: exported models. Out: llama.cpp's converter reads them; the files that vLLM documents are there.
Does not test transformers (test_huggingface.py does) or lm-evaluation-harness (test_harness.py does)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as library
from runs import codescent, make_project, train
from safetensors.numpy import load_file
from served import TALK

from codescent.inference.open import open_engine
from codescent.inference.request import Sampling

pytestmark = pytest.mark.slow

FEW = ("train.num_steps=2", "train.eval_every=0")
LONG = ("train.num_steps=40", "train.eval_every=0", "data.seq_len=64", "model.seq_len=64")
KINDS = {
    "gpt2": (),
    "llama": ("model.kind=llama", "model.ffn_dim=48", "model.num_kv_heads=1"),
    "chat": ("data.task=sft", "data.corpus=talks.jsonl", "data.chat_template=talk.jinja"),
}
VLLM = {"GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Some of the classes that vLLM's page of supported models has."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """Exports of runs with GPT-2's tokenizer, which other programs know by its ids."""
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    (folder / "talk.jinja").write_text(TALK)
    talks = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in range(40)]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in talks))
    for name, words in KINDS.items():
        train(folder, name, *FEW, "data.tokenizer=gpt2", "model.vocab_size=auto", *words)
        done = codescent(folder, "export", f"runs/{name}", name, "--max-shard-bytes", "2000000")
        assert done.returncode == 0, done.stderr
    return folder


def tensors_of(folder: Path) -> dict[str, Any]:
    """All tensors of an export."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", KINDS)
def test_llama_cpp_converts_an_export(project: Path, name: str) -> None:
    """Fault: config.json lacks a key that the converter reads, the tokenizer is unknown to it, or a tensor is lost."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    checkout = os.environ.get("CODESCENT_LLAMA_CPP")
    if not checkout:
        pytest.skip("CODESCENT_LLAMA_CPP names no checkout of llama.cpp")
    file = project / f"{name}.gguf"
    converter = [sys.executable, str(Path(checkout) / "convert_hf_to_gguf.py"), str(project / name)]
    done = subprocess.run(
        [*converter, "--outfile", str(file), "--outtype", "f32"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reader, ours = gguf.GGUFReader(file), tensors_of(project / name)
    theirs = {one.name: np.asarray(one.data, np.float32) for one in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA if name == "llama" else gguf.MODEL_ARCH.GPT2, 2)
    for tensor, values in ours.items():
        mapped = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        # The converter turns matrices and orders rotary rows anew, so the numbers are compared without their order.
        assert np.array_equal(np.sort(values, axis=None), np.sort(theirs[mapped], axis=None)), tensor
    fields = {key: field.contents() for key, field in reader.fields.items()}
    kind = fields["general.architecture"]
    assert fields[f"{kind}.context_length"] == 16
    assert fields[f"{kind}.block_count"] == 2
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert len(fields["tokenizer.ggml.tokens"]) == 50_257
    assert fields.get("tokenizer.chat_template") == (TALK if name == "chat" else None)


@pytest.mark.parametrize("name", KINDS)
def test_llama_cpp_gives_our_tokens(project: Path, name: str) -> None:
    """Fault: llama.cpp reads an export, but computes another model: rows of heads, norms, or the template differ."""
    server_of = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    checkout = os.environ.get("CODESCENT_LLAMA_CPP")
    if not checkout:
        pytest.skip("CODESCENT_LLAMA_CPP names no checkout of llama.cpp")
    train(project, f"long-{name}", *LONG, "data.tokenizer=gpt2", "model.vocab_size=auto", *KINDS[name])
    folder, file = project / f"hf-{name}", project / f"{name}-long.gguf"
    assert codescent(project, "export", f"runs/long-{name}", folder.name).returncode == 0
    program = [sys.executable, str(Path(checkout) / "convert_hf_to_gguf.py"), str(folder), "--outfile", str(file)]
    subprocess.run([*program, "--outtype", "f32"], capture_output=True, check=True)
    params = server_of.CommonParams()
    params.model.path, params.n_ctx, params.cpuparams.n_threads, params.warmup = str(file), 64, 1, False
    params.use_jinja, wide = True, server_of.ggml_type.GGML_TYPE_F32
    params.cache_type_k = params.cache_type_v = wide
    params.flash_attn_type = server_of.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    theirs, opened = server_of.Server(params), open_engine(project / "runs" / f"long-{name}")
    for words in ("many workers one", "one descent", "loss gradient step rank"):
        asked = {"max_tokens": 16, "temperature": 0, "logprobs": True, "top_logprobs": 1}
        if name == "chat":
            assert opened.chat is not None
            messages = [{"role": "user", "content": words}]
            ids = opened.chat.encode_turns(messages)
            answer = theirs.handle_chat_completions({**asked, "messages": messages})
        else:
            ids = opened.tokenizer.encode(words).tolist()
            answer = theirs.handle_completions({**asked, "prompt": words, "logprobs": 1})
        found = [(one["id"], one["logprob"]) for one in answer["choices"][0]["logprobs"]["content"]]
        sampling = Sampling(temperature=0, max_new_tokens=16, logprobs=0)
        ours = [one for outputs in opened.engine.texts([ids], [sampling]) for one in outputs if one.logprob is not None]
        assert len(ours) >= min(3, len(found))
        for (token, logprob), one in zip(found, ours, strict=False):
            assert token == one.token
            assert one.logprob is not None
            assert logprob == pytest.approx(one.logprob.logprob, abs=1e-2)  # its activations are tables of fp16


@pytest.mark.parametrize("name", KINDS)
def test_an_export_has_the_files_that_vllm_documents(project: Path, name: str) -> None:
    """Fault: a class that vLLM does not list, tensors that its index does not name, or no token that ends a text."""
    folder = project / name
    config = json.loads((folder / "config.json").read_text())
    assert set(config["architectures"]) <= VLLM
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {file.name for file in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    assert set(index["weight_map"]) == set(tensors_of(folder))
    tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= config["vocab_size"]
    assert tokenizer.decode(tokenizer.encode("many workers").ids) == "many workers"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings.get("eos_token")
    assert (folder / "chat_template.jinja").is_file() == (name == "chat")
