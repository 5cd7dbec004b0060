"""In: small models of the families of transformers that are llamas with other traits. Out: the same tensors and logits.
Does not test layouts (test_trajectories and test_declared do) or rotary scaling (test_rotary_scaling does)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker
from generating import continued
from peft import PeftModel
from published_models import PUBLISHED
from runs import make_project
from safetensors.torch import load_file
from test_huggingface import LLAMA, change, difference, llama, ours, random_
from test_interchange import UNTRAINED, a_folder, same, weights
from test_interchange import ours as trained
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from codescent import models
from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.config.sections import Model
from codescent.huggingface import kind_of
from codescent.huggingface.families import FAMILIES
from codescent.huggingface.folder import keys_of_model, open_folder
from codescent.huggingface.peft import Adapters
from codescent.models import SIZES, shape_of
from codescent.models.llama.declare import LlamaShape
from codescent.plan.model import Lora
from codescent.verbs.export_run import export_run
from codescent.verbs.import_folder import import_folder

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
WINDOWLESS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}


def mistral(**changes: Any) -> Any:
    sizes = LLAMA | {"head_dim": 10, "sliding_window": None} | changes
    return random_(MistralForCausalLM(MistralConfig(**sizes)))


def qwen2(**changes: Any) -> Any:
    return random_(Qwen2ForCausalLM(Qwen2Config(**LLAMA | WINDOWLESS | changes)))


def qwen3(**changes: Any) -> Any:
    return random_(Qwen3ForCausalLM(Qwen3Config(**LLAMA | WINDOWLESS | {"head_dim": 6} | changes)))


def olmo2(**changes: Any) -> Any:
    return random_(Olmo2ForCausalLM(Olmo2Config(**LLAMA | {"pad_token_id": None, "eos_token_id": None} | changes)))


GEMMA: dict[str, Any] = {"head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 9, "pad_token_id": None}


def gemma2(**changes: Any) -> Any:
    """Eager: the other ways of transformers leave out the cap."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "attn_implementation": "eager"}
    return random_(Gemma2ForCausalLM(Gemma2Config(**LLAMA | GEMMA | caps | {"num_hidden_layers": 3} | changes)))


def gemma3(**changes: Any) -> Any:
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    more = {"num_hidden_layers": 4, "layer_types": types}
    return random_(Gemma3ForCausalLM(Gemma3TextConfig(**LLAMA | GEMMA | more | changes)))


def phi3(**changes: Any) -> Any:
    more = {"pad_token_id": None, "eos_token_id": None, "original_max_position_embeddings": 32}
    return random_(Phi3ForCausalLM(Phi3Config(**LLAMA | more | changes)))


ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def mixtral(**changes: Any) -> Any:
    return random_(MixtralForCausalLM(MixtralConfig(**LLAMA | ROUTED | {"num_local_experts": 5} | changes)))


def qwen3_moe(**changes: Any) -> Any:
    more = {"num_experts": 5, "moe_intermediate_size": 12, "head_dim": 6, "norm_topk_prob": True}
    return random_(Qwen3MoeForCausalLM(Qwen3MoeConfig(**LLAMA | ROUTED | more | changes)))


def olmoe(**changes: Any) -> Any:
    return random_(OlmoeForCausalLM(OlmoeConfig(**LLAMA | ROUTED | {"num_experts": 5} | changes)))


SHARED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4}
SHARED |= {"topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "moe_intermediate_size": 12}
SHARED |= {"routed_scaling_factor": 2.5}


def dots1(**changes: Any) -> Any:
    return _with_biases(random_(Dots1ForCausalLM(Dots1Config(**LLAMA | ROUTED | SHARED | changes))))


LATENT: dict[str, Any] = {"num_key_value_heads": 6, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 6, "v_head_dim": 8, "rms_norm_eps": 1e-4}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.1, "factor": 4.0, "original_max_position_embeddings": 16}


def deepseek_v3(**changes: Any) -> Any:
    """Its norms of latents have another epsilon than the others."""
    config = DeepseekV3Config(**LLAMA | ROUTED | SHARED | LATENT | changes)
    return _with_biases(random_(DeepseekV3ForCausalLM(config)))


def deepseek_v2(**changes: Any) -> Any:
    return random_(DeepseekV2ForCausalLM(DeepseekV2Config(**LLAMA | ROUTED | SHARED | LATENT | V2 | changes)))


V2 = {"norm_topk_prob": False, "topk_method": "greedy", "q_lora_rank": None, "n_group": 1, "topk_group": 1}


def _with_biases(model: Any) -> Any:
    """The bias of routers is not 0: without it they would choose others."""
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return model


LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 500.0, "factor": 4.0}
LONGROPE |= {"long_factor": [1.5, 4.0], "short_factor": [1.0, 1.25]}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(head_dim=6),
    "mistral": mistral,
    "mistral with a window": lambda: mistral(sliding_window=8),
    "qwen2 with a window": lambda: qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "qwen2, yarn": lambda: qwen2(rope_parameters=YARN),
    "qwen3": qwen3,
    "qwen3, tied": lambda: qwen3(tie_word_embeddings=True, num_key_value_heads=6),
    "olmo2": olmo2,
    "olmo2, one key": lambda: olmo2(num_key_value_heads=1),
    "gemma2": gemma2,
    "gemma2, untied": lambda: gemma2(tie_word_embeddings=False, sliding_window=12, query_pre_attn_scalar=6),
    "gemma2, no window": lambda: gemma2(layer_types=["full_attention"] * 3),
    "gemma3_text": gemma3,
    "gemma3_text, scaled": lambda: gemma3(
        rope_parameters=TWO_BASES, final_logit_softcapping=1.5, num_key_value_heads=6
    ),
    "phi3": phi3,
    "phi3, a window": lambda: phi3(sliding_window=5, tie_word_embeddings=True),
    "phi3, partly": lambda: phi3(num_attention_heads=3, num_key_value_heads=1, partial_rotary_factor=0.75),
    "mixtral": mixtral,
    "mixtral, a window": lambda: mixtral(sliding_window=5, tie_word_embeddings=True),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe, some layers": lambda: qwen3_moe(
        num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[0, 1], norm_topk_prob=False, sliding_window=5
    ),
    "dots1": dots1,
    "dots1, a window": lambda: dots1(
        n_group=1, topk_group=1, sliding_window=5, layer_types=["sliding_attention"] * 2, norm_topk_prob=False
    ),
    "deepseek_v3": deepseek_v3,
    "deepseek_v3, mscale": lambda: deepseek_v3(
        q_lora_rank=None, v_head_dim=10, rope_parameters=MSCALE | {"rope_type": "yarn", "rope_theta": 500.0}
    ),
    "deepseek_v3, no experts": lambda: deepseek_v3(first_k_dense_replace=2, tie_word_embeddings=True),
    "deepseek_v2": deepseek_v2,
    "olmoe": olmoe,
    "olmoe, normed": lambda: olmoe(norm_topk_prob=True, num_key_value_heads=1),
    "phi3, longrope": lambda: phi3(
        num_attention_heads=3,
        num_key_value_heads=3,
        partial_rotary_factor=0.5,
        rope_parameters=LONGROPE | {"original_max_position_embeddings": 32, "partial_rotary_factor": 0.5},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_the_logits_texts_and_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    """Catches: a trait that is read otherwise, a tensor in another order, a wrong norm, a cache without a trait."""
    theirs = MODELS[name]()
    theirs.save_pretrained(tmp_path / "hf")
    mine = ours(tmp_path / "hf")
    assert difference(theirs, mine) < 1e-5
    prompt = [5, 3, 8]
    expected = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None)
    (found,) = continued(mine, [prompt], 20, temperature=0.0)
    assert found == expected[0, len(prompt) :].tolist()
    # through a run folder and back: the same bytes, and transformers computes the same
    import_folder(tmp_path / "hf", tmp_path / "run", load("finetune"))
    export_run(tmp_path / "run", tmp_path / "out")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("hf", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[one], after[one]) for one in before)
    again = type(theirs).from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(24)[None]
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    family = json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
    assert family == ("llama" if name == "mistral" else name.split(",")[0].split()[0])  # without a window they are one


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    ["qwen2", "qwen3", "olmo2", "mistral with a window", "gemma2", "gemma3_text", "phi3", "deepseek_v3, no experts"],
)
def test_gradients_are_those_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches: a wrong backward pass of the norms of queries and keys, or of biases."""
    theirs = MODELS[name]()
    theirs.save_pretrained(tmp_path)
    mine = ours(tmp_path, dtype)
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    mine.train()
    mine(tokens, tokens.roll(-1, 1)).backward()
    logits = theirs(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum").backward()
    folder = open_folder(tmp_path)
    bound = 1e-4 if dtype == torch.float64 else 0.2
    for name_of_ours, parts in folder.parts.items():
        gradient = mine.get_parameter(name_of_ours).grad
        expected = [theirs.get_parameter(name).grad for name in dict.fromkeys(part.tensor for part in parts)]
        both = torch.cat([one.flatten() for one in expected]).double()
        # the elements are in another order, so their norms are compared, and their sum
        assert abs(gradient.double().norm() / both.norm() - 1) < bound, name_of_ours
        assert abs(gradient.double().sum() - both.sum()) < bound * both.norm(), name_of_ours


def test_adapters_beside_experts_are_not_written_for_peft() -> None:
    """Fault: a folder that peft loads with other adapters, and without an error."""
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "vocab_size": 61, "seq_len": 16, "num_experts": 4}
    shape = shape_of("llama", sizes | {"experts_per_token": 2, "shared_dim": 8, "expert_dim": 8, "dense_layers": 1})
    (kind,) = (family.kind for family in FAMILIES if family.model_type == "dots1")
    for targets, problems in ((("attn.qkv", "attn.out"), 0), (("attn.qkv", "mlp.shared.down"), 1), (("mlp.down",), 1)):
        found = list(Adapters(kind, shape, Lora(3, 6.0, targets, ())).refusals())
        assert len(found) == problems
        assert all("adapters of experts" in one for one in found)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_taken_by_their_config_alone(name: str, tmp_path: Path) -> None:
    """Catches: a key of a released config.json that is refused or read as another size."""
    settings, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    keys = Model(**keys_of_model(tmp_path)).model_dump()
    shape = shape_of("llama", {size: keys[size] for size in SIZES if size != "head"})
    assert sum(one.numel for one in models.parameters_of("llama", shape)) == parameters
    module = models.construct(models.facts_of("llama", shape))
    assert sum(tensor.numel() for tensor in module.parameters()) == parameters


def test_a_family_that_is_not_known_is_refused_with_the_nearest(tmp_path: Path) -> None:
    """Catches: a model that would be read as its relative, and computed otherwise."""
    qwen2().save_pretrained(tmp_path)
    for keys, message in (
        ({"model_type": "qwen2_moe"}, r"model_type = 'qwen2_moe': known are .*; the nearest: qwen3_moe, qwen2"),
        (
            {
                "model_type": "qwen2",
                "layer_types": ["full_attention", "sliding_attention"],  # Gemma's begin with a window
                "use_sliding_window": True,
                "sliding_window": 8,
            },
            r"of 2 layers these have a sliding window: 1 \(from 0 on\); codescent has windows on all layers, on none,",
        ),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types: chunked_attention: codescent",
        ),
        ({"layer_types": None, "attention_bias": True}, r"attention_bias = true: not known for qwen2"),
    ):
        change(tmp_path, **keys)
        with pytest.raises(UserError, match=message):
            open_folder(tmp_path)


def test_switches_and_types_of_layers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Catches: "false" in quotes, which is true; and layers of which nobody says whether they have a window."""
    for keys, message in (
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings = "false": neither true nor false'),
        ({"use_sliding_window": 1, "sliding_window": 8}, "use_sliding_window = 1: neither true nor false"),
        ({"layer_types": ["full_attention"]}, "layer_types: of 1 layers, but num_hidden_layers = 2"),
    ):
        qwen2().save_pretrained(tmp_path)
        change(tmp_path, **keys)
        with pytest.raises(UserError, match=message):
            open_folder(tmp_path)


def test_traits_that_no_family_has_together_are_not_exported() -> None:
    """Catches: an export that transformers would compute otherwise."""
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "vocab_size": 9, "seq_len": 8}
    mixed = shape_of("llama", sizes | {"qkv_bias": True, "qk_norm": "head"})
    with pytest.raises(UserError, match=r"no family of transformers has model\.qkv_bias = True, .*; qwen2: qkv_bias"):
        kind_of("llama", mixed)
    assert isinstance(mixed, LlamaShape)
    assert mixed.head_dim == 4
    for wrong, message in (
        (
            {"head_dim": 5},
            r"head_dim: 5 channels of a head; .*must be even; nearest that would do: model\.head_dim = 4 or 6",
        ),
        ({"head_dim": 6, "num_kv_heads": 3}, r"3 heads of keys and values cannot be shared equally by 2 heads"),
        ({"qk_norm": "each"}, r"qk_norm: 'each' is none of none, head, all"),
        ({"norm": "last"}, r"norm: 'last' is none of first, output, both"),
    ):
        with pytest.raises(UserError, match=message):
            shape_of("llama", sizes | wrong)


TARGETS = {
    "dots1": ("lora.targets=attn.qkv, attn.out",),  # peft takes others for experts
    "deepseek_v3": ("lora.targets=attn.down, attn.q_up, attn.kv_up, attn.out",),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3_text", "phi3", "mixtral", "dots1", "deepseek_v3"]
)
def test_a_folder_is_trained_on_layouts_and_its_adapters_are_those_of_peft(
    name: str, tmp_path: Path, forker: Forker
) -> None:
    """Catches: a slice of a bias or a scale that is read from the wrong place; an adapter of another matrix."""
    builders: dict[str, Callable[..., Any]] = {"mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "olmo2": olmo2}
    builders |= {"gemma2": gemma2, "gemma3_text": gemma3, "phi3": phi3, "dots1": dots1, "deepseek_v3": deepseek_v3}
    builders["mixtral"] = partial(mixtral, num_local_experts=4)
    make_project(tmp_path)
    folder = a_folder(tmp_path / "hf", builders[name](vocab_size=260))
    import_folder(folder, tmp_path / "run", load("finetune"))
    expected = weights(tmp_path / "run")
    _, _, rest = (tmp_path / "run.toml").read_text().partition("[data]")
    keys = keys_of_model(folder) | {"weights": str(folder)}
    sizes = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    (tmp_path / "run.toml").write_text(f"[model]\n{sizes}\n[data]{rest}")
    common = (f"data.tokenizer={folder}/tokenizer.json", "data.seq_len=16", "train.global_batch_size=8")
    layouts = ("tp=2", "dp_shard=2", "pp=2", *(("ep=2",) if "num_experts" in keys else ()))
    for number, layout in enumerate(layouts):
        words = (*common, *UNTRAINED, f"parallel.{layout}", "train.microbatch_size=2")
        found = forker.train(tmp_path, f"begins{number}", 2, *words)
        assert same(weights(found.path), expected), layout
    adapted = forker.train(
        tmp_path,
        "adapted",
        2,
        *common,
        "lora.rank=3",
        *TARGETS.get(name, ()),
        "parallel.tp=2",
        "train.num_steps=3",
        "optimizer.learning_rate=3e-2",
    )
    export_run(adapted.path, tmp_path / "merged")
    export_run(adapted.path, tmp_path / "adapters", as_adapters=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with_adapters = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapters"
    ).eval()
    tokens = torch.randint(0, 260, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours_now, *others = (model(tokens) for model in (trained(adapted.path), merged, with_adapters))
    for other in others:
        assert float((ours_now - other.logits).abs().max()) < 1e-5
