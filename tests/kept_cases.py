"""In: nothing. Out: models, precisions, kinds of recompute and layouts whose activations are compared.
Does not run any: test_activations does."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

from declared_cases import Case, case

RECOMPUTES = ("none", "selective", "products", "full")
GPT2 = {"num_layers": 2}
LLAMA = {"kind": "llama", "num_kv_heads": 2, "num_layers": 2}
BERT = {"kind": "bert", "num_layers": 2, "vocab_size": 97, "seq_len": 20}
TWO = {"kind": "transformer", "num_encoder_layers": 2, "num_decoder_layers": 3, "source_len": 8, "target_len": 12}
LATENTS: dict[str, Any] = {"kind": "llama", "num_layers": 2, "head_dim": 12, "rotary_dim": 4, "kv_latent_dim": 20}
VECTORS = {"embedding": "none"}
GEMMA: dict[str, Any] = {
    "norm": "both", "norm_plus_one": True, "activation": "gelu", "scale_embedding": True, "full_every": 2,
}  # fmt: skip
GEMMA_2 = GEMMA | {"window": 5, "score_cap": 20.0, "logit_cap": 30.0, "score_dim": 10}
GEMMA_3 = GEMMA | {"window": 5, "qk_norm": "head", "rope_local_theta": 100.0}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": GPT2},
    "gpt2 without biases": {"model": GPT2 | {"bias": False}},
    "gpt2 in chunks": {"model": GPT2, "head_chunk_tokens": 5},
    "gpt2, two blocks of queries": {"model": {"num_layers": 1, "seq_len": 300, "hidden_dim": 256}},
    "gpt2, many tokens": {"model": {"num_layers": 1, "vocab_size": 2100}, "head_chunk_tokens": 5},
    "gpt2, many tokens at once": {"model": {"num_layers": 1, "vocab_size": 2100}},
    "llama": {"model": LLAMA},
    "llama in chunks": {"model": LLAMA, "head_chunk_tokens": 5},
    "llama, tied": {"model": LLAMA | {"num_kv_heads": 1, "tie_head": True}, "head_chunk_tokens": 5},
    "llama as qwen 2": {"model": LLAMA | {"qkv_bias": True}},
    "llama as qwen 3": {"model": LLAMA | {"qk_norm": "head", "head_dim": 12}},
    "llama as olmo 2": {"model": LLAMA | {"qk_norm": "all", "norm": "output"}},
    "llama with experts": {"model": LLAMA | {"num_experts": 4, "experts_per_token": 2, "expert_dim": 24}},
    "llama with shared experts": {
        "model": LLAMA
        | {"num_experts": 8, "experts_per_token": 3, "route_scores": "sigmoid", "route_bias": True, "shared_dim": 40}
        | {"route_groups": 4, "groups_per_token": 2, "route_scale": 2.5}
    },
    "llama with a capacity": {
        "model": LLAMA | {"num_experts": 4, "experts_per_token": 2, "capacity_factor": 1.5, "expert_every": 2}
    },
    "llama with latents": {"model": LATENTS | {"q_latent_dim": 24}},
    "llama with latents of keys": {"model": LATENTS | {"value_dim": 12, "window": 5}, "head_chunk_tokens": 5},
    "llama with latents, documents": {"model": LATENTS | {"q_latent_dim": 24}, "documents": "separate"},
    "llama with latents and experts": {
        "model": LATENTS
        | {"num_experts": 8, "experts_per_token": 3, "route_scores": "sigmoid", "route_bias": True, "shared_dim": 40}
        | {"dense_layers": 1, "expert_dim": 24}
    },
    "llama with latents, two blocks of queries": {
        "model": LATENTS | {"num_layers": 1, "seq_len": 300, "hidden_dim": 256, "q_latent_dim": 24}
    },
    "llama with more tokens": {"model": LLAMA | {"mtp_layers": 2}, "head_chunk_tokens": 5},
    "llama with more tokens, tied": {"model": LLAMA | {"mtp_layers": 1, "tie_head": True}, "documents": "separate"},
    "llama with latents and more tokens": {
        "model": LATENTS
        | {"num_experts": 8, "experts_per_token": 3, "route_scores": "sigmoid", "route_bias": True, "shared_dim": 40}
        | {"dense_layers": 1, "expert_dim": 24, "q_latent_dim": 24, "mtp_layers": 1}
    },
    "llama with a window": {"model": LLAMA | {"window": 5}},
    "llama with a window, three blocks of queries": {
        "model": {"kind": "llama", "num_layers": 1, "seq_len": 300, "hidden_dim": 256, "window": 100}
    },
    "gpt2, documents": {"model": GPT2, "documents": "separate"},
    "llama, documents": {"model": LLAMA, "documents": "separate"},
    "llama as gemma 2, documents": {"model": LLAMA | GEMMA_2, "documents": "separate"},
    "llama as gemma 3, documents": {"model": LLAMA | GEMMA_3, "documents": "separate"},
    "llama as gemma 2": {"model": LLAMA | GEMMA_2},
    "llama as gemma 2, in chunks": {"model": LLAMA | GEMMA_2 | {"tie_head": True}, "head_chunk_tokens": 5},
    "llama as gemma 3": {"model": LLAMA | GEMMA_3},
    "llama as gemma 2, three blocks of queries": {
        "model": {"kind": "llama", "num_layers": 2, "seq_len": 300, "hidden_dim": 256, **GEMMA_2, "window": 100}
    },
    "gpt2, preferences": {"model": GPT2, "task": "dpo"},
    "llama, preferences": {"model": LLAMA, "task": "dpo", "head_chunk_tokens": 5},
    "mlm": {"model": BERT, "task": "mlm"},
    "mlm in chunks": {"model": BERT, "task": "mlm", "head_chunk_tokens": 4},
    "mlm, the embedding in chunks": {"model": BERT, "task": "mlm", "head_chunk_tokens": 8},
    "qa": {"model": BERT, "task": "qa"},
    **{
        f"transformer {embedding} {norm} {activation}": {
            "model": TWO | {"embedding": embedding, "norm": norm, "activation": activation}
        }
        for embedding in ("tied", "untied", "none")
        for norm in ("last", "first")
        for activation in ("relu", "gelu")
    },
    "transformer, not causal": {"model": TWO | {"causal": False}},
    "pairs": {"model": TWO, "task": "seq2seq"},
    "pairs, not causal": {"model": TWO | {"causal": False}, "task": "seq2seq"},
}
"""Each kind of model, with its options."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp_replicate": 2},
    "zero 1": {"dp_shard": 2, "zero_stage": 1, "microbatches": 2},
    "zero 3": {"dp_shard": 2, "precision": "bf16"},
    "tp": {"tp": 2},
    "tp bf16 in chunks": {"tp": 2, "precision": "bf16", "head_chunk_tokens": 5},
    "tp without sequence": {"tp": 2, "sequence_parallel": False},
    "pp": {"pp": 2, "microbatches": 3},
    "pp gpipe": {"pp": 2, "microbatches": 3, "schedule": "gpipe"},
    "pp zero-bubble": {"pp": 2, "microbatches": 2, "schedule": "zero-bubble"},
    "pp 4 zero-bubble": {"pp": 4, "microbatches": 6, "schedule": "zero-bubble"},
    "pp zero-bubble x tp": {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "zero-bubble"},
    "pp zero-bubble x tp without sequence": {
        "pp": 2,
        "tp": 2,
        "microbatches": 2,
        "schedule": "zero-bubble",
        "sequence_parallel": False,
    },
    "pp zero-bubble x cp": {"pp": 2, "cp": 2, "microbatches": 2, "schedule": "zero-bubble"},
    "pp interleaved": {"pp": 2, "microbatches": 4, "schedule": "interleaved", "virtual_stages": 2},
    "pp 4": {"pp": 4, "microbatches": 4},
    "pp x tp": {"pp": 2, "tp": 2, "microbatches": 2, "precision": "bf16", "head_chunk_tokens": 5},
    "pp 4 x tp": {"pp": 4, "tp": 2, "microbatches": 4},
    "zero 3 x tp": {"dp_shard": 2, "tp": 2},
    "cp ring": {"cp": 2},
    "cp all-gather": {"cp": 2, "context": "all-gather", "precision": "bf16"},
    "cp x tp": {"cp": 2, "tp": 2},
    "cp x tp without sequence": {"cp": 2, "tp": 2, "sequence_parallel": False},
    "pp x cp x tp": {"pp": 2, "cp": 2, "tp": 2, "microbatches": 2},
}
IN_LAYOUTS = (
    "gpt2",
    "llama",
    "llama as qwen 3",
    "llama as olmo 2",
    "llama with latents",
    "llama with latents of keys",
    "gpt2, documents",
    "llama, documents",
    "llama as gemma 2, documents",
    "llama as gemma 3, documents",
    "llama as gemma 2",
    "llama as gemma 3",
    "mlm",
    "qa",
    "transformer tied last relu",
    "transformer untied first relu",
    "pairs",
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 3},
    "some": {"rank": 2, "targets": "attn.out, mlp.up", "whole": "norm_2, tok"},
    "one": {"rank": 2, "targets": "mlp.down", "whole": "norm_1"},
}
LARGE = {"num_layers": 1, "seq_len": 700, "hidden_dim": 512}
"""On a CPU its activations are too large to be kept in fp32."""


def of_kind(name: str, dropout: float = 0.0, layout: dict[str, Any] | None = None, **more: Any) -> Case:
    """A kind of model in a layout, with enough layers for its stages."""
    kind = copy.deepcopy(KINDS[name])
    parallel = {**kind, **(layout or {}), **more}
    model = parallel.pop("model") | ({} if kind["model"].get("kind") == "llama" else {"dropout": dropout})
    if "num_layers" in model and "pp" in parallel:
        model["num_layers"] = 5
    found = case(**{"precision": "fp32", **parallel}, model=model)
    if model.get("embedding") == "none":
        found["config"]["data"] = {"corpus": "synthetic:60"}
    return found


def computes_again(name: str, recompute: str) -> bool:
    """Whether a kind of model has this recompute: experts and latents have products that it does not know."""
    return not (recompute == "products" and KINDS[name]["model"].keys() & {"num_experts", "kv_latent_dim"})


def with_samples(found: Case, samples: int) -> Case:
    """A case with micro-batches of so many samples."""
    train = found["config"]["train"]
    train["global_batch_size"] = train["global_batch_size"] // train["microbatch_size"] * samples
    train["microbatch_size"] = samples
    return found


def kind_cases() -> dict[str, Case]:
    choices = [(precision, recompute, 0.0) for precision, recompute in product(("bf16",), RECOMPUTES)]
    choices += [("fp32", recompute, 0.1) for recompute in RECOMPUTES]
    choices += [("fp32", "none", 0.0), ("fp32", "selective", 0.0), ("fp64", "none", 0.0)]
    return {
        f"{name}-{precision}-{recompute}-dropout {dropout}": of_kind(
            name, dropout, precision=precision, recompute=recompute
        )
        for name, (precision, recompute, dropout) in product(KINDS, choices)
        if computes_again(name, recompute) and not (dropout and "llama" in name)
    }


def layout_cases() -> dict[str, Case]:
    """Without recompute each kind of model in each layout; and with one of the others, in turn."""
    cases = {}
    for (number, name), (place, layout) in product(enumerate(IN_LAYOUTS), enumerate(LAYOUTS)):
        if "cp" in LAYOUTS[layout] and not name.startswith(("gpt2", "llama")):
            continue
        turn = (number + place) % len(RECOMPUTES)
        for recompute, dropout in (("none", 0.1), (RECOMPUTES[turn], 0.1 if turn == len(RECOMPUTES) - 1 else 0.0)):
            if not computes_again(name, recompute):
                continue
            case_name = f"{name}-{layout}-{recompute}-dropout {dropout}"
            cases[case_name] = of_kind(name, dropout, LAYOUTS[layout], recompute=recompute)
    return cases


def adapter_cases() -> dict[str, Case]:
    layouts: dict[str, dict[str, Any]] = {
        "one rank": {},
        "tp": {"tp": 2},
        "tp without sequence": {"tp": 2, "sequence_parallel": False},
        "cp": {"cp": 2},
        "pp": {"pp": 2, "microbatches": 2},
        "zero-bubble": LAYOUTS["pp zero-bubble"],
    }
    cases = {}
    for recompute in ("none", "selective", "full"):
        for (words, lora), precision, (name, layout) in product(ADAPTERS.items(), ("fp32", "bf16"), layouts.items()):
            dropout = 0.0 if recompute == "selective" else 0.1
            more = {"precision": precision, "lora": lora, "recompute": recompute}
            cases[f"gpt2 {words} {name}-{precision}-{recompute}"] = of_kind("gpt2", dropout, layout, **more)
        for words, targets in (("all", {}), ("some", {"targets": "attn.qkv, mlp.gate_up", "whole": "norm_2, tok"})):
            more = {"lora": {"rank": 3, **targets}, "recompute": recompute}
            cases[f"llama {words}-{recompute}"] = of_kind("llama", precision="bf16", **more)
            cases[f"llama {words}-cp-{recompute}"] = of_kind("llama", cp=2, **more)
        for kind, dropout in product(("mlm", "qa", "transformer tied last relu"), (0.0, 0.1)):
            more = {"lora": {"rank": 3}, "recompute": recompute}
            cases[f"{kind}-{recompute}-{dropout}"] = of_kind(kind, dropout, **more)
            cases[f"{kind}-zero-bubble-{recompute}-{dropout}"] = of_kind(kind, dropout, layouts["zero-bubble"], **more)
    return cases


def method_cases() -> dict[str, Case]:
    """Adapters with DoRA and dropout."""
    layouts: dict[str, dict[str, Any]] = {"one rank": {}, "tp": {"tp": 2}, "cp x pp": {"cp": 2, "pp": 2}}
    lora = {"rank": 3, "dora": True, "dropout": 0.1}
    choices = product(("gpt2", "llama", "mlm"), ("fp32", "bf16"), layouts.items(), ("none", "selective", "full"))
    sizes, packed = {"num_layers": 2, "hidden_dim": 128, "ffn_dim": 256}, {"rank": 3, "quantize": "nf4"}
    latents = {"kind": "llama", "kv_latent_dim": 64, "q_latent_dim": 64, "head_dim": 48, "rotary_dim": 16}
    kinds: tuple[dict[str, Any], ...] = ({}, {"kind": "llama", "num_kv_heads": 2}, latents)
    quantized = {
        f"{kind} nf4-{precision}-{recompute}-{tp}": case(
            precision, model=sizes | kind, lora=packed, recompute=recompute, tp=tp
        )
        for kind, precision, recompute, tp in product(kinds, ("fp32", "bf16"), ("none", "full"), (1, 2))
    }
    return quantized | {
        f"{kind} {name}-{precision}-{recompute}": of_kind(
            kind, 0.0, layout, lora=lora, recompute=recompute, precision=precision
        )
        for kind, precision, (name, layout), recompute in choices
        if not (kind == "mlm" and "cp" in layout)
    }


def sample_cases() -> dict[str, Case]:
    """Of one sample some parts of a tensor are views, of several they are copies."""
    names = ("pp", "tp", "pp 4", "pp zero-bubble", "pp 4 x tp", "pp 4 zero-bubble", "pp zero-bubble x tp")
    layouts = ({}, *(LAYOUTS[name] for name in names))
    choices = [(recompute, 0.0) for recompute in ("none", "products", "full")] + [("none", 0.1)]
    return {
        f"one sample-{name}-{recompute}-{layout}-{dropout}": with_samples(
            of_kind(name, dropout, layout, recompute=recompute), 1
        )
        for name, (recompute, dropout), layout in product(IN_LAYOUTS, choices, layouts)
        if computes_again(name, recompute)
    }


def large_cases() -> dict[str, Case]:
    models = {"gpt2": {}, "llama": {"kind": "llama", "num_kv_heads": 2}, "bert": {"kind": "bert", "vocab_size": 97}}
    return {
        f"large {name}-{precision}-{recompute}-{tp}": case(
            precision, model=model | LARGE, task="qa" if name == "bert" else "lm", recompute=recompute, tp=tp
        )
        for (name, model), precision, recompute, tp in product(
            models.items(), ("fp32", "bf16"), ("none", "selective"), (1, 2)
        )
    }


def objective_cases() -> dict[str, Case]:
    cases = {}
    for smoothing, z_loss, name, tp in product((0.0, 0.1), (0.0, 1e-4), ("mlm", "qa", "gpt2"), (1, 2)):
        found = of_kind(name, precision="bf16", tp=tp)
        found["config"]["train"] |= {"label_smoothing": smoothing, "z_loss": z_loss}
        cases[f"{name}-{smoothing}-{z_loss}-{tp}"] = found
    return cases


def preference_cases() -> dict[str, Case]:
    """Answers that are compared, in each layout, and with adapters."""
    cases = {}
    for name, (place, layout) in product(("gpt2, preferences", "llama, preferences"), enumerate(LAYOUTS)):
        recompute = RECOMPUTES[place % len(RECOMPUTES)]
        cases[f"{name}-{layout}-{recompute}"] = of_kind(name, 0.0, LAYOUTS[layout], recompute=recompute)
    for layout in ("tp", "pp", "cp ring"):
        cases[f"llama with adapters-{layout}"] = of_kind("llama, preferences", 0.0, LAYOUTS[layout], lora={"rank": 3})
    return cases


SLOW = {
    "preferences": preference_cases,
    "kinds": kind_cases,
    "layouts": layout_cases,
    "adapters": adapter_cases,
    "methods": method_cases,
    "samples": sample_cases,
    "large": large_cases,
    "objectives": objective_cases,
}
QUICK = {
    "gpt2-none": lambda: of_kind("gpt2", 0.0),
    "gpt2-full-dropout": lambda: of_kind("gpt2", 0.1, precision="bf16", recompute="full"),
    "gpt2-products": lambda: of_kind("gpt2 in chunks", 0.0, precision="bf16", recompute="products"),
    "gpt2-selective-dropout-pp x cp x tp": lambda: of_kind("gpt2", 0.1, LAYOUTS["pp x cp x tp"], recompute="selective"),
    "gpt2-zero 3": lambda: of_kind("gpt2", 0.0, LAYOUTS["zero 3"]),
    "llama-bf16": lambda: of_kind("llama", precision="bf16"),
    "llama-cp ring": lambda: of_kind("llama in chunks", 0.0, LAYOUTS["cp ring"], recompute="full"),
    "llama-interleaved": lambda: of_kind("llama", 0.0, LAYOUTS["pp interleaved"], recompute="products"),
    "mlm-tp": lambda: of_kind("mlm", 0.1, LAYOUTS["tp"]),
    "qa-tp without sequence": lambda: of_kind("qa", 0.0, LAYOUTS["tp without sequence"], recompute="selective"),
    "transformer-pp 4 x tp": lambda: of_kind("transformer untied first relu", 0.1, LAYOUTS["pp 4 x tp"]),
    "transformer-zero-bubble": lambda: of_kind("transformer tied last relu", 0.0, LAYOUTS["pp zero-bubble"]),
    "llama-4 zero-bubble": lambda: of_kind(
        "llama", 0.0, LAYOUTS["pp 4 zero-bubble"], precision="bf16", recompute="full"
    ),
    "llama as qwen 3-cp x tp": lambda: of_kind("llama as qwen 3", 0.0, LAYOUTS["cp x tp"], precision="bf16"),
    "llama as olmo 2": lambda: of_kind("llama as olmo 2", precision="bf16"),
    "llama as olmo 2-zero-bubble x tp": lambda: of_kind("llama as olmo 2", 0.0, LAYOUTS["pp zero-bubble x tp"]),
    "llama as olmo 2-products": lambda: of_kind(
        "llama as olmo 2", 0.0, LAYOUTS["tp without sequence"], recompute="products"
    ),
    "llama with a window-cp": lambda: of_kind("llama with a window", 0.0, LAYOUTS["cp x tp"]),
    "llama with a window, blocks": lambda: of_kind("llama with a window, three blocks of queries"),
    "gpt2, documents": lambda: of_kind("gpt2, documents", 0.0),
    "gpt2, documents-cp x tp": lambda: of_kind("gpt2, documents", 0.0, LAYOUTS["cp x tp"], recompute="full"),
    "llama, documents-pp": lambda: of_kind("llama, documents", 0.0, LAYOUTS["pp"], recompute="products"),
    "llama as gemma 2, documents-cp x tp": lambda: of_kind("llama as gemma 2, documents", 0.0, LAYOUTS["cp x tp"]),
    "gpt2, documents-dropout": lambda: of_kind("gpt2, documents", 0.1, recompute="selective"),
    "llama as gemma 2-tp": lambda: of_kind("llama as gemma 2", 0.0, LAYOUTS["tp"], precision="bf16"),
    "llama as gemma 2, blocks": lambda: of_kind("llama as gemma 2, three blocks of queries"),
    "llama as gemma 3-cp x tp": lambda: of_kind("llama as gemma 3", 0.0, LAYOUTS["pp x cp x tp"]),
    "llama as gemma 3-zero-bubble": lambda: of_kind("llama as gemma 3", 0.0, LAYOUTS["pp zero-bubble"]),
    "pairs-full": lambda: of_kind("pairs, not causal", 0.0, LAYOUTS["pp"], recompute="full"),
    "adapters": lambda: of_kind("gpt2", 0.1, {"tp": 2}, lora=ADAPTERS["some"]),
    "large": lambda: case("fp32", model=LARGE),
}
