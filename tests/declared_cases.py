"""In: nothing. Out: layouts of every strategy and hybrids, with the ranks that are looked at.
Does not run any: test_declared does on the CPU, test_fake_ranks on a device that is none."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

Case = dict[str, Any]
DEGREES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
SECOND_DROPOUT = ("-none-dropout 0.1", "-selective-dropout 0.0", "-full-dropout 0.0")
FSDP_SLOW = (("naive", 2), ("naive", 3), ("gpipe", 1), ("gpipe", 3), ("interleaved", 1), ("interleaved", 2))


def case(
    precision: str = "fp32",
    microbatches: int = 1,
    *,
    model: dict[str, Any] | None = None,
    task: str = "lm",
    head_chunk_tokens: int = 1024,
    lora: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    documents: str = "joined",
    **parallel: int | str | bool,
) -> Case:
    """A layout, and the ranks that are looked at: the first of each pipeline stage, and the last of all."""
    degrees = {axis: int(parallel.get(axis, 1)) for axis in DEGREES}
    sizes: dict[str, Any] = {"num_heads": 4, "hidden_dim": 32, "dropout": 0.0, **(model or {})}
    if "source_len" not in sizes:
        sizes = {"num_layers": 3, "seq_len": 16, **sizes}
    config: dict[str, dict[str, Any]] = {
        "model": sizes,
        "lora": lora or {},
        "optimizer": optimizer or {},
        "data": {"task": task, "documents": documents},
        "train": {
            "global_batch_size": 2 * microbatches * prod(degrees[axis] for axis in ("dp_replicate", "dp_shard", "ep")),
            "microbatch_size": 2,
            "precision": precision,
            "head_chunk_tokens": head_chunk_tokens,
        },
        "parallel": {"bucket_bytes": 20_000, **degrees, **parallel},
    }
    if period := int(parallel.get("average_every", 0)):
        config["train"] |= {"num_steps": 20 * period, "eval_every": 0}
        config["checkpoint"] = {"every": 0}
    world_size = prod(degrees.values())
    firsts = [stage * (world_size // degrees["pp"]) for stage in range(degrees["pp"])]
    return {"config": config, "world_size": world_size, "ranks": sorted({*firsts, world_size - 1})}


def replicate_cases() -> dict[str, Case]:
    layouts = [(1, "fp32", 3), (1, "bf16", 3), (2, "fp32", 1), (64, "fp32", 3), (64, "bf16", 1), (64, "bf16", 3)]
    cases = {f"{n}-{precision}-{m}": case(precision, m, dp_replicate=n) for n, precision, m in layouts}
    cases["8-fp64-2"] = case("fp64", 2, dp_replicate=8)
    cases["2-bf16-1-fp32 on the wire"] = case("bf16", 1, dp_replicate=2, reduce_dtype="fp32")
    cases["2-fp32-1-bf16 on the wire"] = case("fp32", 1, dp_replicate=2, reduce_dtype="bf16")
    cases["2-fp32-2-bf16 on the wire"] = case("fp32", 2, dp_replicate=2, reduce_dtype="bf16")
    cases["2-bf16-2-fp32 on the wire"] = case("bf16", 2, dp_replicate=2, reduce_dtype="fp32")
    return cases


def zero_cases() -> dict[str, Case]:
    layouts = [(1, 2, "fp32", 1), (1, 5, "fp64", 3), (1, 64, "bf16", 1), (2, 4, "bf16", 3), (8, 8, "fp32", 2)]
    return {
        f"stage {stage}-{copies}x{shards}-{precision}-{m}": case(
            precision, m, dp_replicate=copies, dp_shard=shards, zero_stage=stage, model={"hidden_dim": 36}
        )
        for stage in (1, 2, 3)
        for copies, shards, precision, m in layouts
    }


def tensor_cases() -> dict[str, Case]:
    layouts = [(2, "fp32", 1, 0), (4, "bf16", 2, 5), (4, "fp64", 1, 7), (2, "bf16", 2, 1024)]
    cases = {
        f"tp {tp}-{precision}-{m}-chunks of {chunk}-sequence {sequence}": case(
            precision, m, tp=tp, head_chunk_tokens=chunk, sequence_parallel=sequence
        )
        for tp, precision, m, chunk in layouts
        for sequence in (True, False)
    }
    wide = {"num_heads": 64, "hidden_dim": 128, "seq_len": 64}  # 97 rows of 2 each: the last ranks have none
    cases["tp 64"] = case(tp=64, model=wide)
    cases["tp 64-sequence False"] = case(tp=64, model=wide, sequence_parallel=False)
    cases["tp 2-without biases"] = case(tp=2, model={"bias": False})
    return cases


def context_cases() -> dict[str, Case]:
    layouts = [(2, "fp32", 1, 0.0), (4, "bf16", 2, 0.1), (8, "fp64", 1, 0.0), (64, "bf16", 1, 0.0)]
    return {
        f"cp {cp}-{context}-{precision}-{m}-dropout {dropout}": case(
            precision, m, cp=cp, context=context, model={"seq_len": 4 * cp, "dropout": dropout}
        )
        for cp, precision, m, dropout in layouts
        for context in ("ring", "all-gather")
    }


def pipeline_cases() -> dict[str, Case]:
    cases = {}
    for schedule in ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble"):
        chunks = 2 if schedule == "interleaved" else 1
        for pp, precision, m in ((2, "fp32", 2), (2, "bf16", 4), (4, "fp64", 4), (4, "bf16", 8)):
            layers = {"num_layers": 9 if schedule == "interleaved" and pp == 4 else 5}
            cases[f"{schedule}-pp {pp}-{precision}-{m}"] = case(
                precision, m, pp=pp, schedule=schedule, virtual_stages=chunks, model=layers
            )
    cases["1f1b-pp 4-fp32-1"] = case("fp32", 1, pp=4, schedule="1f1b", model={"num_layers": 5})
    cases["gpipe-pp 64"] = case("fp32", 2, pp=64, schedule="gpipe", model={"num_layers": 64})
    cases["gpipe-pp 64"]["ranks"] = [0, 31, 63]
    return cases


def recompute_cases() -> dict[str, Case]:
    layouts: dict[str, dict[str, Any]] = {
        "zero 3": {"dp_shard": 4},
        "zero 3 bf16": {"dp_shard": 4, "precision": "bf16", "microbatches": 2},
        "zero 1": {"dp_shard": 4, "zero_stage": 1, "microbatches": 2},
        "tp": {"tp": 2},
        "tp bf16": {"tp": 4, "precision": "bf16", "microbatches": 2},
        "tp without sequence": {"tp": 2, "sequence_parallel": False},
        "cp ring": {"cp": 2},
        "cp all-gather": {"cp": 4, "context": "all-gather", "precision": "bf16"},
        "pp": {"pp": 2, "schedule": "zero-bubble", "microbatches": 2},
        "tp x zero 3": {"tp": 2, "dp_shard": 2, "microbatches": 2},
        "tp x cp": {"tp": 2, "cp": 2},
    }
    return {
        f"{name}-{what}-dropout {dropout}": case(**layout, recompute=what, model={"num_layers": 2, "dropout": dropout})
        for name, layout in layouts.items()
        for what in ("none", "selective", "products", "full")
        for dropout in (0.0, 0.1)
    }


def hybrid_cases() -> dict[str, Case]:
    five = {"num_layers": 5}
    return {
        "dp x tp": case("bf16", 2, dp_replicate=2, tp=2),
        "dp x tp 64": case("fp32", 1, dp_replicate=16, tp=4, sequence_parallel=False),
        "dp x pp 1f1b": case("bf16", 4, dp_replicate=2, pp=2, schedule="1f1b", model=five),
        "dp x pp interleaved": case(
            "fp32", 4, dp_replicate=4, pp=2, schedule="interleaved", virtual_stages=2, model=five
        ),
        "dp x pp zero-bubble": case("bf16", 4, dp_replicate=2, pp=4, schedule="zero-bubble", model=five),
        "fsdp x tp": case("fp32", 2, dp_shard=2, tp=2),
        "fsdp x tp bf16": case("bf16", 2, dp_shard=4, tp=2, zero_stage=1),
        "fsdp x tp 64": case("bf16", 1, dp_shard=16, tp=4, zero_stage=2, sequence_parallel=False),
        "pp x tp gpipe": case("fp32", 2, pp=2, tp=2, schedule="gpipe", model=five),
        "pp x tp 1f1b": case("bf16", 4, pp=4, tp=2, schedule="1f1b", sequence_parallel=False, model=five),
        "pp x tp zero-bubble": case("fp32", 4, pp=2, tp=4, schedule="zero-bubble", model=five),
        "pp x tp interleaved": case("fp32", 4, pp=2, tp=2, schedule="interleaved", virtual_stages=2, model=five),
        "fsdp x cp": case("fp32", 2, dp_shard=2, cp=2),
        "fsdp x cp all-gather": case("bf16", 2, dp_shard=4, cp=2, context="all-gather", zero_stage=2),
        "fsdp x cp 64": case("fp64", 1, dp_shard=8, cp=8, zero_stage=1, model={"seq_len": 32}),
        "dp x pp x tp": case("fp32", 4, dp_replicate=2, pp=2, tp=2, schedule="1f1b", model=five),
        "dp x pp x tp 64": case("bf16", 8, dp_replicate=4, pp=4, tp=4, schedule="zero-bubble", model=five),
        "everything 64": case("bf16", 4, dp_replicate=2, pp=2, dp_shard=4, cp=2, tp=2, model=five),
        "pp x cp": case("fp32", 4, pp=2, cp=2, schedule="zero-bubble", model=five),
        **{
            f"pp x fsdp {schedule} stage {stage}": case(
                precision,
                4,
                pp=2,
                dp_shard=2,
                schedule=schedule,
                zero_stage=stage,
                virtual_stages=2 if schedule == "interleaved" else 1,
                model=five,
            )
            for schedule in ("naive", "gpipe", "1f1b", "interleaved")
            for stage, precision in ((1, "bf16"), (2, "fp32"), (3, "bf16"))
        },
        "pp x fsdp, the head alone": case("fp32", 2, pp=2, dp_shard=2, model={"num_layers": 2, "vocab_size": 4000}),
        "pp x fsdp 32": case("fp32", 8, pp=4, dp_shard=8, schedule="1f1b", model={"num_layers": 9}),
    }


def bert_cases() -> dict[str, Case]:
    layouts: dict[str, dict[str, Any]] = {
        "replicate": {"dp_replicate": 2, "microbatches": 2},
        "zero 3": {"dp_shard": 4, "precision": "bf16", "microbatches": 2},
        "zero 1": {"dp_shard": 2, "zero_stage": 1, "microbatches": 2},
        "tp": {"tp": 2, "head_chunk_tokens": 3},
        "tp bf16": {"tp": 4, "precision": "bf16", "microbatches": 2},
        "tp without sequence": {"tp": 2, "sequence_parallel": False, "head_chunk_tokens": 0},
        "tp, full": {"tp": 2, "recompute": "full"},
        "tp, products": {"tp": 2, "recompute": "products"},
        "pp zero-bubble": {"pp": 2, "schedule": "zero-bubble", "microbatches": 4},
        "pp x tp": {"pp": 2, "tp": 2, "microbatches": 2},
        "pp x fsdp": {"pp": 2, "dp_shard": 2, "microbatches": 2},
        "fsdp x tp without sequence": {"dp_shard": 2, "tp": 2, "sequence_parallel": False},
        "everything 32": {"dp_replicate": 2, "pp": 2, "dp_shard": 4, "tp": 2, "microbatches": 4},
    }
    # Of 20 positions the head reads 3: the share in the plan, and what the task masks of those without control tokens.
    model = {"kind": "bert", "num_layers": 2, "vocab_size": 97, "dropout": 0.1, "seq_len": 20}
    return {
        f"{name}-{head}": case(**layout, model=model, task=head)
        for name, layout in layouts.items()
        for head in ("mlm", "qa")
    }


def lora_cases() -> dict[str, Case]:
    layouts: dict[str, dict[str, Any]] = {
        "replicate": {"dp_replicate": 2, "precision": "bf16", "microbatches": 2},
        "zero 1": {"dp_shard": 4, "zero_stage": 1, "precision": "bf16", "microbatches": 2},
        "zero 2": {"dp_shard": 4, "zero_stage": 2, "precision": "bf16"},
        "zero 3": {"dp_shard": 4, "precision": "bf16", "microbatches": 2},
        "hsdp, full": {"dp_replicate": 2, "dp_shard": 2, "recompute": "full"},
        "tp": {"tp": 2, "precision": "bf16"},
        "tp without sequence, full": {"tp": 4, "sequence_parallel": False, "recompute": "full", "microbatches": 2},
        "cp": {"cp": 2},
        "pp zero-bubble": {"pp": 2, "schedule": "zero-bubble", "microbatches": 4},
        "pp x tp": {"pp": 3, "tp": 2, "schedule": "1f1b", "microbatches": 3},
        "pp x fsdp": {"pp": 2, "dp_shard": 2, "precision": "bf16", "microbatches": 2},
        "fsdp x tp": {"dp_shard": 2, "tp": 2, "zero_stage": 2},
        "everything 32": {"dp_replicate": 2, "pp": 2, "dp_shard": 2, "cp": 2, "tp": 2, "microbatches": 4},
    }
    adapters: dict[str, dict[str, Any]] = {
        "all": {"rank": 3},
        "some": {"rank": 2, "targets": "attn.out, mlp.up", "whole": "norm_2, tok"},
    }
    cases = {f"{n}-{w}": case(**layout, lora=lora) for n, layout in layouts.items() for w, lora in adapters.items()}
    head_alone = {"num_layers": 2, "vocab_size": 4000}
    for stage in (1, 2, 3):
        words = {"zero_stage": stage, "model": head_alone, "lora": {"rank": 3}}
        cases[f"pp, the head alone, zero {stage}"] = case("fp32", 2, pp=2, dp_shard=2, **words)
    bert = {"kind": "bert", "num_layers": 2, "vocab_size": 97}
    for tp in ({"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"tp": 2, "dp_shard": 2}):
        cases[f"bert {tp}"] = case(**tp, model=bert, task="qa", lora={"rank": 3})
    dora: dict[str, Any] = {"rank": 3, "dora": True, "dropout": 0.1}
    for name in ("zero 2", "zero 3", "tp", "tp without sequence, full", "pp x tp", "fsdp x tp", "everything 32"):
        cases[f"dora, {name}"] = case(**layouts[name], lora=dora)
    wide: dict[str, Any] = {"rank": 3, "quantize": "nf4"}
    for name in ("zero 1", "zero 3", "tp", "pp x fsdp"):
        cases[f"nf4, {name}"] = case(**layouts[name], model={"hidden_dim": 128, "ffn_dim": 256}, lora=wide)
    cases["dora, llama x tp"] = case(tp=2, model={"kind": "llama", "num_kv_heads": 2}, lora=dora)
    return cases


def muon_cases() -> dict[str, Case]:
    layouts: dict[str, dict[str, Any]] = {
        "alone": {},
        "replicate": {"dp_replicate": 2, "precision": "bf16", "microbatches": 2},
        "replicate 64": {"dp_replicate": 64},  # more ranks than matrices
        "zero 1": {"dp_shard": 4, "zero_stage": 1, "precision": "bf16", "microbatches": 2},
        "zero 2 of 5": {"dp_shard": 5, "zero_stage": 2, "model": {"hidden_dim": 36}},
        "zero 3": {"dp_shard": 2, "precision": "fp64"},
        "zero 3 of 64": {"dp_shard": 64, "model": {"hidden_dim": 36}},  # the last ranks have empty shards
        "hsdp": {"dp_replicate": 2, "dp_shard": 4, "precision": "bf16"},
        "tp": {"tp": 2, "precision": "bf16"},
        "cp": {"cp": 2},
        "pp": {"pp": 2, "schedule": "zero-bubble", "microbatches": 2},
        "pp, the head alone": {"pp": 2, "dp_shard": 2, "model": {"num_layers": 2, "vocab_size": 4000}},
        "fsdp x tp": {"dp_shard": 4, "tp": 2, "zero_stage": 2},
        "everything 64": {"dp_replicate": 2, "pp": 2, "dp_shard": 4, "cp": 2, "tp": 2, "microbatches": 4},
    }
    muon: dict[str, Any] = {"kind": "muon"}
    cases = {name: case(**layout, optimizer=muon) for name, layout in layouts.items()}
    llama = {"kind": "llama", "num_kv_heads": 2}
    cases["llama, fsdp x tp"] = case(dp_shard=4, tp=2, model=llama, optimizer=muon | {"muon_precision": "bf16"})
    for name in ("hsdp", "tp", "everything 64"):
        cases[f"lora, {name}"] = case(**layouts[name], lora={"rank": 3}, optimizer=muon)
    return cases


def gloo_cases() -> dict[str, Case]:
    five = {"num_layers": 5}
    return {
        "pp on 2": case("bf16", 4, pp=2, schedule="interleaved", virtual_stages=2, recompute="full", model=five),
        "pp x fsdp on 4": case("bf16", 4, pp=2, dp_shard=2, schedule="1f1b", model=five),
        "fsdp x cp on 4": case("fp32", 2, dp_shard=2, cp=2, recompute="full", model={"dropout": 0.1}),
        "muon, hsdp on 4": case("bf16", 2, dp_replicate=2, dp_shard=2, optimizer={"kind": "muon"}),
        "muon, fsdp x tp on 4": case(dp_shard=2, tp=2, model=five, optimizer={"kind": "muon"}),
        "experts, dp x ep on 4": expert_cases()["dp x ep"],
        "experts, ep x tp on 4": expert_cases()["ep x tp without sequence"],
        "dp x pp x tp on 8": case("fp32", 4, dp_replicate=2, pp=2, tp=2, schedule="zero-bubble", model=five),
    }


def offload_cases() -> dict[str, Case]:
    layouts: dict[str, dict[str, Any]] = {
        "alone": {"microbatches": 2},
        "replicate": {"dp_replicate": 2, "microbatches": 2},
        "tp": {"tp": 2},
        "pp": {"pp": 2, "microbatches": 2},
        "zero 1": {"dp_shard": 4, "zero_stage": 1, "microbatches": 2},
        "zero 2": {"dp_shard": 4, "zero_stage": 2, "microbatches": 2},
        "zero 3": {"dp_shard": 4, "microbatches": 2},
        "all": {"dp_shard": 4, "offload": "all", "microbatches": 2},
        "all, hsdp": {"dp_replicate": 2, "dp_shard": 2, "offload": "all"},
    }
    cases = {name: case("bf16", **{"offload": "optimizer", **layout}) for name, layout in layouts.items()}
    cases["muon, zero 3"] = case("bf16", dp_shard=4, offload="optimizer", optimizer={"kind": "muon"})
    return cases


def preference_cases() -> dict[str, Case]:
    """Answers that are compared: ranks of cp add their parts of the log-probabilities, and scalars are more."""
    layouts: dict[str, dict[str, Any]] = {
        "replicate": {"dp_replicate": 2, "microbatches": 2},
        "zero 3 x tp": {"dp_shard": 2, "tp": 2, "microbatches": 2},
        "tp without sequence": {"tp": 2, "sequence_parallel": False},
        "pp x cp": {"pp": 2, "cp": 2, "schedule": "zero-bubble", "microbatches": 2},
        "cp x tp": {"cp": 2, "tp": 2, "head_chunk_tokens": 5, "microbatches": 2},
    }
    return {name: case("bf16", task="dpo", **layout) for name, layout in layouts.items()}


def kind_cases() -> dict[str, Case]:
    layouts: dict[str, dict[str, Any]] = {
        "replicate": {"dp_replicate": 2, "microbatches": 2},
        "zero 3, full": {"dp_shard": 4, "recompute": "full"},
        "tp": {"tp": 2, "recompute": "selective"},
        "tp without sequence": {"tp": 2, "sequence_parallel": False, "dp_shard": 2},
        "pp": {"pp": 2, "schedule": "1f1b", "microbatches": 2},
        "pp zero-bubble": {"pp": 2, "schedule": "zero-bubble", "tp": 2, "microbatches": 2},
    }
    kinds: dict[str, dict[str, Any]] = {
        "llama": {"kind": "llama", "num_kv_heads": 2},
        "transformer": {
            "kind": "transformer",
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "source_len": 6,
            "target_len": 10,
        },
    }
    cases = {
        f"{kind}: {name}": case("bf16", **layout, model=model)
        for kind, model in kinds.items()
        for name, layout in layouts.items()
    }
    for context in ("ring", "all-gather"):
        cases[f"llama: cp {context}"] = case("bf16", cp=2, tp=2, context=context, model=kinds["llama"])
    return cases


def trait_cases() -> dict[str, Case]:
    """Traits of a llama that add collectives or parameters that are divided otherwise."""
    traits: dict[str, dict[str, Any]] = {
        "qwen 2": {"qkv_bias": True},
        "qwen 3": {"qk_norm": "head", "head_dim": 12},
        "olmo 2": {"qk_norm": "all", "norm": "output"},
        "gemma 3": {"qk_norm": "head", "norm": "both", "norm_plus_one": True, "window": 5, "full_every": 2},
    }
    layouts: dict[str, dict[str, Any]] = {
        "zero 3 x tp, full": {"dp_shard": 2, "tp": 2, "recompute": "full"},
        "tp without sequence": {"tp": 2, "sequence_parallel": False, "microbatches": 2},
        "pp zero-bubble x tp": {"pp": 2, "schedule": "zero-bubble", "tp": 2, "microbatches": 2},
        "cp x tp, products": {"cp": 2, "tp": 2, "recompute": "products"},
    }
    return {
        f"{kind}: {name}": case("bf16", **layout, model={"kind": "llama", "num_kv_heads": 2, **sizes})
        for kind, sizes in traits.items()
        for name, layout in layouts.items()
    }


def expert_cases() -> dict[str, Case]:
    """Layers of experts. Of the layers of each model one has none."""

    def layers(layout: dict[str, Any]) -> dict[str, Any]:
        return {"num_layers": 5 if "pp" in layout else 3}

    sizes = {"kind": "llama", "num_kv_heads": 2, "num_experts": 4, "experts_per_token": 2, "expert_dim": 24}
    sizes |= {"dense_layers": 1}
    shared = {"shared_dim": 20, "route_scores": "sigmoid", "route_bias": True}
    layouts: dict[str, dict[str, Any]] = {
        "ep": {"ep": 2, "microbatches": 2},
        "ep bf16, full": {"ep": 4, "precision": "bf16", "recompute": "full"},
        "ep, capacity": {"ep": 2, "model": {"capacity_factor": 1.3}},
        "ep, lora": {"ep": 2, "lora": {"rank": 3}},
        "dp x tp": {"dp_replicate": 2, "tp": 2, "precision": "bf16"},
        "dp x ep": {"dp_replicate": 2, "ep": 2, "precision": "bf16", "microbatches": 2},
        "ep x cp": {"ep": 2, "cp": 2},
        "ep x tp": {"ep": 2, "tp": 2, "recompute": "selective"},
        "ep x tp without sequence": {"ep": 2, "tp": 2, "sequence_parallel": False, "recompute": "full"},
        "shared, ep x tp, full": {"ep": 2, "tp": 2, "recompute": "full", "model": shared},
        "shared, pp zero-bubble x tp": {
            "pp": 2,
            "tp": 2,
            "microbatches": 2,
            "schedule": "zero-bubble",
            "model": shared,
        },
        "shared, fsdp x ep": {"dp_shard": 2, "ep": 2, "precision": "bf16", "recompute": "full", "model": shared},
        "fsdp x ep": {"dp_shard": 2, "ep": 2, "precision": "bf16"},
        "fsdp 1 x ep x tp": {"dp_shard": 2, "ep": 2, "tp": 2, "zero_stage": 1, "microbatches": 2},
        "pp zero-bubble x ep": {"pp": 2, "ep": 2, "microbatches": 4, "schedule": "zero-bubble"},
        "everything 64": {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2, "cp": 2, "tp": 2, "microbatches": 4},
    }
    return {
        name: case(**{**layout, "model": sizes | layers(layout) | layout.get("model", {})})
        for name, layout in layouts.items()
    }


def latent_cases() -> dict[str, Case]:
    """Attention with latents. Ranks of tp send each other latents, and not the residual stream."""
    queries = {"kind": "llama", "head_dim": 12, "rotary_dim": 4, "kv_latent_dim": 20, "q_latent_dim": 24}
    keys = {"kind": "llama", "head_dim": 12, "rotary_dim": 4, "kv_latent_dim": 20, "value_dim": 12}
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 24, "dense_layers": 1, "shared_dim": 20}
    experts |= {"route_scores": "sigmoid", "route_bias": True}
    layouts: dict[str, dict[str, Any]] = {
        "tp": {"tp": 2},
        "tp without sequence, full": {"tp": 2, "sequence_parallel": False, "recompute": "full"},
        "fsdp x tp, full": {"dp_shard": 2, "tp": 2, "recompute": "full", "precision": "bf16"},
        "pp zero-bubble x tp": {"pp": 2, "tp": 2, "microbatches": 2, "schedule": "zero-bubble"},
        "cp x tp": {"cp": 2, "tp": 2},
        "dora, tp": {"tp": 2, "lora": {"rank": 3, "dora": True, "dropout": 0.1}},
        "dp": {"dp_replicate": 2, "precision": "bf16"},
    }
    cases = {
        f"{name}, {what}": case(**layout, model=sizes)
        for (what, sizes), (name, layout) in product({"queries": queries, "keys": keys}.items(), layouts.items())
    }
    cases["experts, ep x tp"] = case(ep=2, tp=2, model=queries | experts)
    more = {"mtp_layers": 2, "num_layers": 2}
    cases["more tokens, tp"] = case(tp=2, head_chunk_tokens=5, model=queries | more)
    cases["more tokens, tp without sequence, full"] = case(
        "bf16", tp=2, sequence_parallel=False, recompute="full", model=keys | more | {"tie_head": True}
    )
    cases["more tokens, experts, fsdp x tp, full"] = case(
        dp_shard=2, tp=2, recompute="full", model=queries | experts | more
    )
    return cases


WIRES = ("none", "bf16", "int8", "int4", "sign", "powersgd:2", "topk:0.1")


def round_cases() -> dict[str, Case]:
    """Several steps of each: replicas that train apart, and gradients, in each format of `wire`."""
    outer: dict[str, Any] = {"average_every": 4, "outer_optimizer": "nesterov"}
    stream: dict[str, Any] = {**outer, "fragments": 2, "overlap_steps": 1, "synchronous_steps": 4, "wire_from": 6}
    cases: dict[str, Case] = {}
    for wire in WIRES:
        for ranks in (2, 3):
            cases[f"rounds on {ranks}, {wire}"] = case(dp_replicate=ranks, wire=wire, average_every=2)
            if wire != "none":
                cases[f"ddp on {ranks}, {wire}"] = case("bf16", 2, dp_replicate=ranks, wire=wire, wire_from=1)
        cases[f"stream on 64, {wire}"] = case("bf16", dp_replicate=64, wire=wire, **stream)
        if wire != "none":
            cases[f"ddp on 64, {wire}"] = case("fp32", 2, dp_replicate=32, tp=2, wire=wire)
    five = {"num_layers": 5}
    cases |= {
        "stream x tp": case("fp32", dp_replicate=2, tp=2, wire="int4", **stream),
        "stream x pp": case("bf16", 4, dp_replicate=3, pp=2, wire="powersgd:2", model=five, **stream),
        "stream x zero 1": case("bf16", 2, dp_replicate=2, dp_shard=2, zero_stage=1, wire="int8", **stream),
        "stream x zero 3": case(
            "fp32", dp_replicate=4, dp_shard=4, wire="topk:0.1", model={"hidden_dim": 36}, **stream
        ),
        "outer x cp": case(dp_replicate=2, cp=2, **outer),
        "outer x muon": case(dp_replicate=2, dp_shard=2, optimizer={"kind": "muon"}, **outer),
        "outer x lora": case(dp_replicate=2, tp=2, lora={"rank": 3}, wire="int8", **outer),
        "outer x everything 64": case("bf16", 4, dp_replicate=4, pp=2, dp_shard=2, cp=2, tp=2, model=five, **outer),
        "ddp x cp x tp, sign": case("fp32", dp_replicate=2, cp=2, tp=2, wire="sign", model={"num_heads": 4}),
        "ddp x pp, int4": case("fp32", 4, dp_replicate=2, pp=2, wire="int4", model=five),
    }
    return cases


ROUNDS = round_cases()
ON_GLOO = (
    "rounds on 2, none",
    "rounds on 3, int4",
    "rounds on 2, bf16",
    "rounds on 3, bf16",
    "rounds on 2, sign",
    "rounds on 3, sign",
    "rounds on 2, topk:0.1",
    "rounds on 3, topk:0.1",
    "ddp on 2, powersgd:2",
    "ddp on 3, int8",
    "stream x tp",
    "stream x zero 1",
)
"""Of ROUNDS: those that run on real ranks, too."""


def named(**kinds: dict[str, Case]) -> dict[str, Case]:
    return {f"{kind}: {name}": of for kind, cases in kinds.items() for name, of in cases.items()}


SLOW_TRAITS = {"qwen 3: pp zero-bubble x tp", "qwen 3: cp x tp, products", "olmo 2: zero 3 x tp, full"}
SLOW = {
    "stages": {
        *(f"recompute: {name}" for name in recompute_cases() if name.endswith(SECOND_DROPOUT)),
        *(f"pipeline: {name}" for name in pipeline_cases() if name.endswith("pp 4-bf16-8")),
    },
    "strategies": {"context: cp 64-ring-bf16-1-dropout 0.0"},
    "hybrids": {
        "pp x fsdp 32",
        "dp x pp x tp 64",
        *(f"pp x fsdp {schedule} stage {stage}" for schedule, stage in FSDP_SLOW),
    },
    "experts": expert_cases().keys() - {"ep", "fsdp 1 x ep x tp"},
    "latents": latent_cases().keys() - {"tp, queries"},
    "traits": {name for name in trait_cases() if name.startswith("qwen 2") or name in SLOW_TRAITS},
    "preferences": {"replicate", "zero 3 x tp", "tp without sequence"},
}
"""Cases whose siblings are quick."""

CASES = {
    "strategies": named(replicate=replicate_cases(), zero=zero_cases(), tensor=tensor_cases(), context=context_cases()),
    "stages": named(pipeline=pipeline_cases(), recompute=recompute_cases()),
    "hybrids": hybrid_cases(),
    "bert": bert_cases(),
    "lora": lora_cases(),
    "muon": muon_cases(),
    "traits": trait_cases(),
    "experts": expert_cases(),
    "latents": latent_cases(),
    "preferences": preference_cases(),
    "gloo": gloo_cases(),
}


ON_DEVICES = named(offload=offload_cases(), kind=kind_cases())
"""Further ones, not for the CPU: there is nothing to offload, and other kinds differ in what they compute."""


def is_slow(group: str, name: str) -> bool:
    return name in SLOW.get(group, ())
