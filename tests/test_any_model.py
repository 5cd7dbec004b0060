"""In: small models of `transformers`. Out: as a kind of codescent they are what they are there.
Does not start ranks: test_any_model_runs does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_models import GROUPED, MODELS, MORE_MODELS, SIZES, config_of, sections
from forker import Forker
from kept_ranks import plan_of as kept_plan
from runs import make_project, refused

from codescent import models
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config
from codescent.cost.activations import bytes_by_chunk, is_known
from codescent.models.initialize import initialize_
from codescent.models.llama.declare import LlamaShape
from codescent.models.transformers import library
from codescent.models.transformers.declare import observed, settings_text
from codescent.models.transformers.module import Transformers
from codescent.models.transformers.observed import forward_flops
from codescent.plan import Lora, Plan, Role
from codescent.plan.activations import CPU
from codescent.plan.objective import Objective

HEAD_OF = {"lm": "causal", "mlm": "mlm"}
"""The head of a task."""
ROOT = Path(__file__).resolve().parent.parent


def part_of(name: str, lora: Lora | None = None) -> Transformers:
    """A model with random weights, in training mode. Biases and norms are random, too: so none may be left out."""
    head, config = HEAD_OF[MODELS[name][0]], config_of(name)
    facts = models.facts_of(
        "transformers", models.shape_of("transformers", {"config": config, "head": head}), lora=lora
    )
    part = models.construct(facts, "cpu")
    assert isinstance(part, Transformers)
    initialize_(part, 1, models.parameters_of("transformers", part.shape, lora))
    generator = torch.Generator().manual_seed(3)
    for parameter in part.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return part.train()  # type: ignore[no-any-return]


def theirs(name: str, part: Transformers) -> torch.nn.Module:
    """The model of transformers, made by itself, with the same values."""
    found = library._transformers()
    config = library.config_of(config_of(name))
    auto = found.AutoModelForCausalLM if MODELS[name][0] == "lm" else found.AutoModelForMaskedLM
    net: torch.nn.Module = auto.from_config(config).eval()
    names = observed(part.shape).theirs
    values = {names[ours]: value.detach().clone() for ours, value in part.named_parameters()}
    lacking = net.load_state_dict(values, strict=False)
    assert not lacking.unexpected_keys
    net.tie_weights()  # type: ignore[operator]
    return net


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 300, (2, 13), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_are_those_of_transformers(name: str) -> None:
    """A tie that is cut, a buffer without its values, dropout, a head that is read twice."""
    part = part_of(name)
    net = theirs(name, part)
    inputs, targets = batch()
    if MODELS[name][0] == "mlm":
        targets = torch.where(targets % 3 == 0, targets, -1)
    logits = net(input_ids=inputs).logits
    assert torch.allclose(part(inputs), logits, rtol=1e-5, atol=1e-5)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-1)
    (wanted / 7).backward()
    loss = part(inputs, targets, loss_scale=1 / 7)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    gradients = {id(one): one.grad for one in net.parameters()}
    of = dict(net.named_parameters(remove_duplicate=False))
    for ours, known in observed(part.shape).theirs.items():
        found, expected = part.get_parameter(ours).grad, gradients[id(of[known])]
        assert found is not None, ours
        assert expected is not None, ours
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-6), ours


@pytest.mark.parametrize("name", ["gemma2", "phi", "gpt_neox"])
def test_the_objective_is_that_of_every_kind(name: str) -> None:
    """Heads with capped logits, with a bias and without: smoothing and z-loss as they are defined."""
    part, (inputs, targets) = part_of(name), batch()
    part.objective = Objective(0.1, 1e-2)
    logits = part(inputs).double().flatten(0, 1)
    log_z, log_p = torch.logsumexp(logits, -1), torch.log_softmax(logits, -1)
    entropies = -0.9 * log_p.gather(1, targets.flatten()[:, None]).squeeze(1) - 0.1 * log_p.mean(-1)
    assert part(inputs, targets).item() == pytest.approx((entropies + 1e-2 * log_z.square()).sum().item(), rel=1e-5)
    plain = -log_p.gather(1, targets.flatten()[:, None]).sum()
    assert part.eval()(inputs, targets).item() == pytest.approx(plain.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "roberta", "gemma3_text"])
def test_initial_values_have_the_deviation_and_mean_of_transformers(name: str) -> None:
    """Another deviation for some matrices, norms that begin at 0 and not at 1."""
    declared = models.parameters_of("transformers", part_of(name).shape)
    torch.manual_seed(0)
    net = theirs_as_it_begins(name)
    names = observed(part_of(name).shape).theirs
    values = dict(net.named_parameters(remove_duplicate=False))
    for one in declared:
        value = values[names[one.name]].detach()
        assert value.mean().item() == pytest.approx(one.mean, abs=4e-3), one.name
        assert value.std().item() == pytest.approx(one.std, rel=0.15, abs=1e-6) if value.numel() > 1 else True, one.name


def theirs_as_it_begins(name: str) -> torch.nn.Module:
    found = library._transformers()
    auto = found.AutoModelForCausalLM if MODELS[name][0] == "lm" else found.AutoModelForMaskedLM
    net: torch.nn.Module = auto.from_config(library.config_of(config_of(name)))
    return net


def test_buffers_keep_their_values_and_their_dtype() -> None:
    """Rotary frequencies in bf16, or memory without values."""
    part = part_of("gpt_neox")
    before = {name: buffer.clone() for name, buffer in part.named_buffers()}
    part.to(torch.bfloat16)
    part.to_empty(device="cpu")
    assert before
    assert all(torch.equal(part.get_buffer(name), value) for name, value in before.items())
    assert {parameter.dtype for parameter in part.parameters()} == {torch.bfloat16}


def test_flops_are_those_that_a_llama_declares() -> None:
    """Of a model that codescent has, too, both count the same."""
    text = settings_text({"model_type": "llama", **GROUPED, "tie_word_embeddings": False})
    ours = LlamaShape(2, 4, 2, 32, 64, 300, 32, tie_head=False)
    assert forward_flops(text, "causal", 2, 16) == pytest.approx(models.forward_flops("llama", ours, 16))


def test_roles_and_depths() -> None:
    """What Muon, adapters and units of ZeRO read."""
    found = {one.name: one for one in models.parameters_of("transformers", part_of("opt").shape)}
    assert found["blocks.1.self_attn.k_proj.weight"].role is Role.COLUMN
    assert found["blocks.1.self_attn.k_proj.weight"].depths == (2,)
    assert found["net.model.decoder.embed_tokens.weight"].role is Role.VOCAB
    assert found["net.model.decoder.embed_tokens.weight"].depths == (0, 3)
    assert found["net.model.decoder.embed_positions.weight"].role is Role.POSITION
    assert found["net.model.decoder.final_layer_norm.weight"].depths == (3,)


CASES = {
    **{name: {"name": name} for name in (*MODELS, *MORE_MODELS)},
    "bf16": {"name": "gpt_neox", "train": {"precision": "bf16"}},
    "whole blocks again": {"name": "opt", "parallel": {"recompute": "full"}},
    "adapters": {"name": "opt", "lora": {"rank": 2}},
    "adapters, blocks again": {"name": "opt", "lora": {"rank": 2}, "parallel": {"recompute": "full"}},
    "blocks again, windows": {"name": "gemma2", "parallel": {"recompute": "full"}},
    "blocks again, masked tokens": {"name": "modernbert", "parallel": {"recompute": "full"}},
    "fp64, a head in chunks": {"name": "llama", "train": {"precision": "fp64", "head_chunk_tokens": 10}},
    "zero 3": {"name": "gpt_neox", "parallel": {"dp_shard": 2}, "train": {"microbatch_size": 2}},
}


def check_kept(case: str, forker: Forker, folder: Path) -> None:
    """What fake tensors show is what real ones do, byte by byte."""
    more = {key: value for key, value in CASES[case].items() if key != "name"}
    config = sections(CASES[case]["name"], **more)
    ranks = config.get("parallel", {}).get("dp_shard", 1)
    cases = {case: {"config": config, "world_size": ranks, "ranks": [ranks - 1]}}
    (found,) = forker.call("kept_ranks:on_fake_ranks", folder, cases=cases)
    kept = found[case][str(ranks - 1)]
    assert kept["chunks"] == bytes_by_chunk(kept_plan(cases[case]), 0, CPU, ranks - 1)


def test_a_rank_keeps_what_is_observed(forker: Forker, tmp_path: Path) -> None:
    """A tensor that is counted twice, or not at all."""
    check_kept("opt", forker, tmp_path)


def test_grouped_heads_without_a_mask_keep_no_repeated_keys(forker: Forker, tmp_path: Path) -> None:
    """A mask, and keys of each query head, that transformers makes for fake tensors alone."""
    check_kept("cohere", forker, tmp_path)


def test_a_mask_of_ones_that_a_model_makes_is_none(forker: Forker, tmp_path: Path) -> None:
    """Fault: attention with a mask, which transformers makes because fake tensors do not say that they are ones."""
    check_kept("biogpt", forker, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("opt", "cohere", "biogpt")])
def test_a_rank_keeps_what_is_observed_of_every_model(case: str, forker: Forker, tmp_path: Path) -> None:
    """Heads, windows, adapters, precision, shards."""
    check_kept(case, forker, tmp_path)


def plan_of(name: str, ranks: int = 1, **more: dict[str, Any]) -> Plan:
    return build(Config.model_validate(sections(name, **more)), 257, ranks)


def test_what_is_not_declared_is_not_known() -> None:
    """On CUDA nothing was observed, so no bytes are claimed there."""
    plan = plan_of("opt")
    assert is_known(plan, "cpu")
    assert not is_known(plan, "cuda")


SIZES_OF_MAMBA = {key: value for key, value in SIZES.items() if key != "num_attention_heads"}
REFUSED: dict[str, tuple[dict[str, dict[str, Any]], int, str]] = {
    "tp": ({"parallel": {"tp": 2}}, 2, r"parallel\.tp = 2: codescent does not know the layers"),
    "pp": ({"parallel": {"pp": 2}}, 2, r"parallel\.pp = 2: codescent does not know the layers"),
    "cp": ({"parallel": {"cp": 2}}, 2, r"parallel\.cp = 2: codescent does not know the layers"),
    "selective": ({"parallel": {"recompute": "selective"}}, 1, r'recompute = "selective": chooses tensors inside'),
    "compile": ({"train": {"compile": "blocks"}}, 1, "not verified with torch.compile"),
    "dropout": ({"model": {"dropout": 0.1}}, 1, "torch's generator"),
    "sizes": ({"model": {"num_layers": 3}}, 1, r"model\.num_layers: config\.json decides it"),
    "seq_len": ({"model": {"seq_len": 64}}, 1, r"model\.seq_len = 64: the model reads at most 32"),
    "vocabulary": ({"model": {"config": config_of("opt", vocab_size=200)}}, 1, "vocab_size = 200"),
    "unknown": ({"model": {"config": '{"model_type": "gptneox"}'}}, 1, r"'gptneox'.*nearest: gpt_neox"),
    "code": ({"model": {"config": '{"model_type": "xgptneo", "auto_map": {"A": "b"}}'}}, 1, "runs no code that comes"),
    "no head": ({"model": {"config": '{"model_type": "vit"}'}}, 1, "no AutoModelForCausalLM of it"),
    "experts": (
        {"model": {"config": settings_text({"model_type": "mixtral", **SIZES, "num_local_experts": 4})}},
        1,
        "balance",
    ),
    "experts by default": (  # save_pretrained leaves out what is the default of a class
        {"model": {"config": settings_text({"model_type": "mixtral", **SIZES})}},
        1,
        "num_local_experts: a mixture of experts",
    ),
    "encoder-decoder by default": (
        {"model": {"config": settings_text({"model_type": "bart", **SIZES})}, "data": {"task": "mlm"}},
        1,
        "is_encoder_decoder: ",
    ),
    "an encoder that is to predict": (
        {"model": {"config": settings_text({"model_type": "roberta", **SIZES})}},
        1,
        'is_decoder: not true, so each position sees the later tokens.*data.task = "mlm"',
    ),
    "a decoder of masked tokens": (
        {"model": {"config": config_of("roberta", is_decoder=True)}, "data": {"task": "mlm"}},
        1,
        "is_decoder: true, so no position sees the later tokens",
    ),
    "attention without a mask": (
        {"model": {"config": settings_text({"model_type": "bert-generation", **SIZES})}},
        1,
        "each position sees the later tokens, which it is to predict",
    ),
    "attention of its own without a mask": (
        {"model": {"config": settings_text({"model_type": "cpmant", **SIZES, "dim_head": 8})}},
        1,
        "'cpmant': each position sees the later tokens of its text",
    ),
    "sizes that do not fit": (
        {"model": {"config": settings_text({"model_type": "mistral", **SIZES, "num_key_value_heads": 3})}},
        1,
        r"sizes in config\.json do not fit each other",
    ),
    "layers that differ": (
        {"model": {"config": settings_text({"model_type": "gemma4_text", **SIZES})}},
        1,
        "head_dim: its layers differ in it",
    ),
    "a reason in the second line": (
        {"model": {"config": settings_text({"model_type": "mamba2", **SIZES})}},
        1,
        "transformers refuses it: .*hidden_size",
    ),
    "shared blocks": (
        {"model": {"config": settings_text({"model_type": "albert", **SIZES})}, "data": {"task": "mlm"}},
        1,
        "blocks are not known",
    ),
    "initial values": (
        {"model": {"config": settings_text({"model_type": "mamba", **SIZES})}},
        1,
        "neither normal nor one number.*give model.weights",
    ),
    "no config": ({"model": {"config": None}}, 1, r"model\.config: not given; give the path of a config\.json"),
    "nonsense": ({"model": {"config": '{"model_type": "opt", "hidden_size": "wide"}'}}, 1, "transformers refuses it"),
    "adapters": ({"lora": {"rank": 2, "targets": "self_attn.query"}}, 1, "there is no 'self_attn.query' in this model"),
    "adapters of no layer": ({"model": {"config": config_of("gpt2")}, "lora": {"rank": 2}}, 1, r"no torch\.nn\.Linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Each with its reason, in one message."""
    more, ranks, message = REFUSED[case]
    with pytest.raises(UserError) as error:
        plan_of("opt", ranks, **more)
    assert any(re.search(message, problem) for problem in error.value.problems), error.value.problems


def test_no_traceback_of_torch_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    """A refusal of one line below fifty lines of torch's log."""
    with pytest.raises(UserError):
        plan_of("opt", model={"config": settings_text({"model_type": "mistral", **SIZES, "num_key_value_heads": 3})})
    assert caplog.text == ""


def test_an_encoder_with_a_mask_predicts_the_next_token() -> None:
    """A refusal of BERT whatever its config says."""
    plan = plan_of("roberta", data={"task": "lm"}, model={"config": config_of("roberta", is_decoder=True)})
    assert plan.model.num_layers == 2


@pytest.mark.parametrize(
    ("experts", "several"), [(4, True), ([1, 4], True), (1, False), ([1, 1], False), (None, False), ("4", False)]
)
def test_experts_are_one_number_or_one_of_each_layer(experts: object, several: bool) -> None:
    """A traceback where a config has a list."""
    assert library._several(experts) is several


@pytest.mark.parametrize("name", ["doge", "deepseek_v3"])
def test_experts_that_no_layer_has_are_not_refused(name: str) -> None:
    """A refusal by a number in config.json, of which save_pretrained writes every default."""
    dense = plan_of(name)
    assert dense.model.num_layers == 2
    several = {"doge": {"is_moe": True}, "deepseek_v3": {"first_k_dense_replace": 1}}[name]
    with pytest.raises(UserError, match=r"(num|n_routed)_experts: a mixture of experts has a loss"):
        plan_of(name, model={"config": config_of(name, **several)})


def test_a_model_without_attention_has_no_flops_of_attention() -> None:
    """An MFU above what the model computes."""
    assert library.sizes_of(settings_text({"model_type": "mamba", **SIZES_OF_MAMBA}))["head_dim"] == 0


def test_a_library_that_is_not_there_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without transformers has all other kinds, and says what to install."""
    library._transformers.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match=re.escape('pip install "codescent[transformers]"')):
        library.config_of(config_of("opt"))


def test_a_version_that_decides_masks_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a traceback, or masks that no run has, where a version of transformers renames its functions."""
    monkeypatch.delattr("transformers.masking_utils._ignore_causal_mask_sdpa")
    with (
        pytest.raises(
            UserError, match=r"transformers [\d.]+ has no _ignore_causal_mask_sdpa: codescent cannot observe"
        ),
        library.one_sequence(),
    ):
        pytest.fail("it was entered")


def test_one_file_imports_transformers() -> None:
    """The extra is needed nowhere else."""
    found = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "codescent").rglob("*.py")
        if re.search(r"^\s*(import transformers|from transformers)|EXTRA = \"transformers\"", file.read_text(), re.M)
    }
    assert found == {"codescent/models/transformers/library.py"}


def test_a_config_names_a_file_or_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The content is recorded, so a run does not depend on the file. A file that is not there is one message."""
    make_project(tmp_path)
    kind = ("model.kind=transformers", "model.num_layers=auto", "model.num_heads=auto", "model.hidden_dim=auto")
    said = refused(tmp_path, capsys, *kind, "model.seq_len=auto", "model.config=absent/config.json")
    assert "model.config: absent/config.json: No such file" in said
    assert said.count("\n") == 1
