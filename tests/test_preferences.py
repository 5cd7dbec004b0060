"""In: a Llama of transformers, pairs of answers, judged answers. Out: losses and gradients of preferences are trl's;
lines are read in the forms of its data sets. Does not run on layouts (test_preferences_runs does)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad

from codescent import models, tasks
from codescent.base.errors import UserError
from codescent.build import build
from codescent.config.sections import Config, Data, Model, Train
from codescent.data.loader import Batch
from codescent.huggingface.initial import InitialValues
from codescent.models.part import Part
from codescent.operators.token_losses import token_losses
from codescent.plan.objective import Objective
from codescent.tasks.preferences.encode import write_preferences
from codescent.tasks.preferences.lines import read_judged
from codescent.tasks.preferences.samples import PreferenceSource, cut_to
from codescent.train.references import key_of

SIZES = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
WORDS = ("up", "down", "left and right", "here", "there")
PAIRS = [{"prompt": f"Where is {word}?", "chosen": word[::-1], "rejected": f"not {word}"} for word in WORDS]
JUDGED = [{"prompt": f"{word}:", "completion": word[::-1], "label": len(word) % 2 == 0} for word in WORDS * 2]


class Run(NamedTuple):
    """A model of transformers with other weights than its reference, and the same two models as parts of ours."""

    folder: Path
    theirs: Any
    reference: Any
    part: Part
    reference_part: Part
    facts: Any


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    folder = tmp_path_factory.mktemp("preferences")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False, initializer_range=0.3)
    theirs = transformers.LlamaForCausalLM(config)
    reference = deepcopy(theirs)
    with torch.no_grad():
        for weight in reference.parameters():
            weight += 0.05 * torch.randn_like(weight)
    for name, lines in {"pairs": PAIRS, "judged": JUDGED}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, model in {"policy": theirs, "reference": reference}.items():
        model.save_pretrained(folder / name)
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 16, "ffn_dim": 24, "vocab_size": 260}
    shape = models.shape_of("llama", {**sizes, "seq_len": 256, "norm_eps": config.rms_norm_eps})
    facts = models.facts_of("llama", shape, head_chunk_tokens=40)
    return Run(folder, theirs, reference, *(_part(folder / name, facts) for name in ("policy", "reference")), facts)


def _part(folder: Path, facts: Any) -> Part:
    part = models.construct(facts, "cpu")
    for name, value in _values(folder, facts):
        part.get_parameter(name).data.copy_(value)
    return cast(Part, part)


def _values(folder: Path, facts: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a folder of transformers, as ours are named and laid out."""
    values = InitialValues(0, replace(facts, weights=str(folder)), "fp32")
    for parameter in models.parameters_of("llama", models.shape_of_facts(facts)):
        yield parameter.name, values.box(parameter, tuple(slice(0, size) for size in parameter.shape))


def source_of(run: Run, train: Train, seq_len: int = 120) -> tuple[PreferenceSource, Objective]:
    """The samples of a file, and what is minimised."""
    singles = train.preference == "kto"
    corpus = str(run.folder / ("judged.jsonl" if singles else "pairs.jsonl"))
    data = Data(task="dpo", corpus=corpus, tokenizer="byte", folder=run.folder / "datasets", answers_per_sample=3)
    request = tasks.request_of(data, Model(kind="llama"), 1, train)
    dataset = tasks.prepare_and_open(request, progress=False)
    found = dataset.source("train", seq_len, seq_len)
    return cast(PreferenceSource, found), Objective(preference=tasks.task_of(request).preference(request))


def loss_of(run: Run, source: PreferenceSource, objective: Objective, numbers: Any) -> Tensor:
    """Our mean loss; its gradients are in `run.part`."""
    assert objective.preference is not None
    part, samples = run.part, source.read(numbers)
    batch = Batch.of(samples)
    extras = dict(batch.extras)
    if objective.preference.referenced:
        run.reference_part.objective = objective
        with torch.no_grad():
            extras["references_BK"] = run.reference_part.eval()(batch.inputs, batch.targets, **extras)
    part.objective = objective
    part.train().zero_grad()
    count = int(source.losses(numbers).sum())
    loss = part(batch.inputs, batch.targets, loss_scale=1.0 / count, **extras)
    loss.backward()
    return loss.detach() / count


def documents_of(source: PreferenceSource, numbers: Any) -> list[list[tuple[list[int], int]]]:
    """Of each sample the tokens of each document, and how many of them are the prompt's."""
    samples = source.read(numbers)
    found = []
    for row in range(len(numbers)):
        begins = samples.extras["begins_BT"][row]
        documents = []
        for document, first in enumerate(np.unique(begins)[: source.documents].tolist()):
            places = np.flatnonzero(begins == first)
            places = places[samples.targets[row, places] >= 0] if document == source.documents - 1 else places
            last = int(places[-1])
            tokens = [*samples.inputs[row, first : last + 1].tolist(), int(samples.targets[row, last])]
            asked = int(np.argmax(samples.extras["spans_BT"][row, first:] == document)) + 1
            documents.append((tokens, asked))
        found.append(documents)
    return found


def padded(rows: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    """Rows as trl has them: tokens, which are no padding, and which are the answer's."""
    longest = max(len(tokens) for tokens, _ in rows)
    names = ("input_ids", "attention_mask", "completion_mask")
    out = {name: torch.zeros(len(rows), longest, dtype=torch.int64) for name in names}
    for row, (tokens, asked) in enumerate(rows):
        out["input_ids"][row, : len(tokens)] = torch.tensor(tokens)
        out["attention_mask"][row, : len(tokens)] = 1
        out["completion_mask"][row, asked : len(tokens)] = 1
    return out


def tokenizer() -> Any:
    words = {f"t{number}": number for number in range(SIZES["vocab_size"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t1"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"eos_token": "t256", "pad_token": "t0", "unk_token": "t1"}
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def trainer(run: Run, train: Train) -> Any:
    """trl's trainer of a loss. Its data set is not read: a batch of ours is given to its loss."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    options: dict[str, Any] = {"output_dir": str(run.folder / "trl"), "report_to": [], "use_cpu": True, "bf16": False}
    options |= {"beta": 0.3, "gradient_checkpointing": False}
    pairs = datasets.Dataset.from_list([{"prompt": "t5", "chosen": "t6", "rejected": "t7"}] * 4)
    given: dict[str, Any] = {"model": run.theirs, "processing_class": tokenizer()}
    kind = train.preference
    if kind in ("dpo", "ipo"):
        config = trl.DPOConfig(**options, loss_type="sigmoid" if kind == "dpo" else "ipo")
        return trl.DPOTrainer(ref_model=run.reference, args=config, train_dataset=pairs, **given)
    if kind == "kto":
        judged = datasets.Dataset.from_list([{"prompt": "t5", "completion": "t6", "label": True}] * 4)
        weights = {"desirable_weight": train.chosen_weight, "undesirable_weight": train.rejected_weight}
        config = trl.KTOConfig(**options, **weights, train_sampling_strategy="sequential")
        return trl.KTOTrainer(ref_model=run.reference, args=config, train_dataset=judged, **given)
    if kind == "orpo":
        orpo = pytest.importorskip("trl.experimental.orpo")
        return orpo.ORPOTrainer(args=orpo.ORPOConfig(**options), train_dataset=pairs, **given)
    cpo = pytest.importorskip("trl.experimental.cpo")
    config = cpo.CPOConfig(**options, loss_type="simpo", cpo_alpha=0.0, simpo_gamma=train.margin)
    return cpo.CPOTrainer(args=config, train_dataset=pairs, **given)


def their_batch(kind: str, documents: list[list[tuple[list[int], int]]], labels: Any) -> dict[str, Any]:
    if kind in ("dpo", "ipo"):
        return padded([*(pair[0] for pair in documents), *(pair[1] for pair in documents)])
    if kind == "kto":
        (sample,) = documents
        own, others = (padded(half) for half in (sample[: len(sample) // 2], sample[len(sample) // 2 :]))
        return {**own, **{f"KL_{name}": value for name, value in others.items()}, "label": torch.from_numpy(labels)}
    out: dict[str, Any] = {}
    for which, name in enumerate(("chosen", "rejected")):
        rows = padded([pair[which] for pair in documents])
        mask = rows.pop("completion_mask")
        out |= {f"{name}_{key}": value for key, value in rows.items()}
        out[f"{name}_labels"] = rows["input_ids"].masked_fill(mask == 0, -100)
    return out


CASES = [
    Train(preference="dpo", beta=0.3),
    Train(preference="ipo", beta=0.3),
    Train(preference="simpo", beta=0.3, margin=0.7),
    Train(preference="orpo", beta=0.3),
    Train(preference="kto", beta=0.3, chosen_weight=1.25, rejected_weight=0.5),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what trl and transformers say of each other
@pytest.mark.parametrize("train", [pytest.param(train, id=train.preference) for train in CASES])
def test_loss_and_gradients_are_those_of_trl(run: Run, train: Train) -> None:
    """Fault: a formula, the tokens that it counts, or what it divides by, is not that of the field's library."""
    source, objective = source_of(run, train)
    # trl divides the likelihood of ORPO by the tokens of a batch, we by those of each pair: one pair is the same.
    numbers = np.arange(1 if train.preference in ("orpo", "kto") else 3)
    mine = loss_of(run, source, objective, numbers)
    labels = source.read(numbers).extras.get("wanted_BA")
    batch = their_batch(train.preference, documents_of(source, numbers), None if labels is None else labels[0] == 1)
    theirs = trainer(run, train)
    run.theirs.train().zero_grad()
    loss = theirs.compute_loss(run.theirs, batch)
    loss.backward()
    assert mine.item() == pytest.approx(loss.item(), rel=1e-5)
    gradients = deepcopy(run.theirs)
    for weight, of in zip(gradients.parameters(), run.theirs.parameters(), strict=True):
        weight.data = of.grad
    gradients.save_pretrained(run.folder / "gradients")
    found = dict(_values(run.folder / "gradients", run.facts))
    largest = max(value.abs().max().item() for value in found.values())
    assert largest > 1e-3
    for name, wanted in found.items():
        torch.testing.assert_close(run.part.get_parameter(name).grad, wanted, rtol=1e-5, atol=1e-5 * largest, msg=name)


@settings(max_examples=40, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 7, 2999]),  # the last one in pieces
    tokens=st.integers(0, 9),
    chunk=st.sampled_from([0, 1, 4, 100]),
    cap=st.sampled_from([0.0, 3.0]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_losses_of_tokens_and_their_gradients_are_those_of_autograd(
    vocab: int, tokens: int, chunk: int, cap: float, ignored: float, seed: int
) -> None:
    """Fault: backward's logits are not those of forward, or a chunk adds to the wrong rows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x_ND, weight_VD, d_N = (3.0 * draw(tokens, 5)).requires_grad_(), draw(vocab, 5).requires_grad_(), draw(tokens)
    targets_N = torch.randint(0, vocab, (tokens,), generator=generator)
    targets_N[torch.rand(tokens, generator=generator) < ignored] = -1
    found_N = token_losses(x_ND, weight_VD, targets_N, chunk, cap=cap)
    logits_NV = F.linear(x_ND, weight_VD)
    logits_NV = cap * torch.tanh(logits_NV / cap) if cap else logits_NV
    wanted_N = F.cross_entropy(logits_NV, targets_N, reduction="none", ignore_index=-1)
    torch.testing.assert_close(found_N, wanted_N, rtol=1e-12, atol=1e-12)
    for mine, other in zip(grad(found_N, (x_ND, weight_VD), d_N), grad(wanted_N, (x_ND, weight_VD), d_N), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=8), room=st.integers(8, 80))
def test_documents_are_cut_to_one_length_and_no_shorter_than_need_be(lengths: list[int], room: int) -> None:
    """Fault: a sample is longer than it may be, or a short answer is cut for a long one."""
    (cut,) = cut_to(np.array([lengths]), room).tolist()
    assert sum(cut) <= room
    level = max(cut)
    assert cut == [min(length, level) for length in lengths]
    assert cut == lengths or sum(min(length, level + 1) for length in lengths) > room


def said(role: str, *contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for content in contents]


ASKED, BEST, OTHER = said("user", "Where?"), said("assistant", "Here."), said("assistant", "There.")
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Where?", "chosen": "Here.", "rejected": "There."},
    "messages": {"prompt": ASKED, "chosen": BEST, "rejected": OTHER},
    "conversations": {"chosen": ASKED + BEST, "rejected": ASKED + OTHER, "score_chosen": 8.0},
    "conversations with the prompt as a text": {"prompt": "Where?", "chosen": ASKED + BEST, "rejected": ASKED + OTHER},
    "a prompt as a text": {"prompt": "Where?", "chosen": BEST, "rejected": OTHER},
}


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in FORMS.items()])
def test_lines_have_the_forms_of_data_sets_of_trl(tmp_path: Path, line: dict[str, Any]) -> None:
    """Fault: a prompt is learned as a part of the answer, or an answer is taken for a prompt."""
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(line) + "\n")
    (one,) = read_judged(file, Data(task="dpo"), with_template=True, singles=False)
    assert list(one.prompt) == ASKED
    assert [list(answer) for answer in one.answers] == [BEST, OTHER]
    assert (one.wanted, one.line) == ((True, False), 1)
    assert one.unused == (("score_chosen",) if "score_chosen" in line else ())


def test_a_prompt_that_is_not_given_is_what_both_texts_begin_with(tmp_path: Path) -> None:
    """Fault: a word is divided between prompt and answer, as in data sets such as hh-rlhf."""
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"chosen": "Q: up? A: it is", "rejected": "Q: up? A: in"}) + "\n")
    (one,) = read_judged(file, Data(task="dpo"), with_template=False, singles=False)
    texts = [messages[0]["content"] for messages in (one.prompt, *one.answers)]
    assert texts == ["Q: up? A: i", "t is", "n"] or texts == ["Q: up? A:", " it is", " in"]


def test_an_answer_without_a_token_is_refused(tmp_path: Path) -> None:
    """Fault: a tokenizer that leaves out what it does not know makes an answer of no token, which is compared."""
    vocabulary = tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[])
    tokenizers.Tokenizer(vocabulary).save(str(tmp_path / "tokenizer.json"))
    lines = [{"prompt": "ab", "chosen": "a", "rejected": rejected} for rejected in ("b", "zz", "b", "ba")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus, tokenizer = str(tmp_path / "pairs.jsonl"), str(tmp_path / "tokenizer.json")
    data = Data(task="dpo", corpus=corpus, tokenizer=tokenizer, template="{prompt}{response}")
    with pytest.raises(UserError, match=r"pairs\.jsonl:2: the answer has no token with this tokenizer"):
        write_preferences(data, None, tmp_path, False, answers=0)


def test_references_are_of_one_model_and_shared_by_losses_and_layouts() -> None:
    """Fault: a run with products in fp8 or with quantized weights reads the numbers of another model."""
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 64, "seq_len": 16}
    given: dict[str, dict[str, Any]] = {
        "data": {"task": "dpo", "tokenizer": "byte"},
        "model": sizes,
        "lora": {"rank": 2},
    }

    def of(ranks: int = 1, **more: dict[str, Any]) -> dict[str, Any]:
        merged = {name: {**given.get(name, {}), **more.get(name, {})} for name in given | more}
        plan = build(Config.model_validate(merged), 256, ranks)
        return key_of(plan, "samples", "weights")

    first = of()
    assert of(train={"preference": "ipo", "beta": 0.3}) == first
    assert of(2, parallel={"tp": 2}) == first
    assert of(lora={"quantize": "nf4"}) != first
    assert of(train={"precision": "bf16"}) != first
    without = of(lora={"rank": None})
    assert of(lora={"rank": None}, train={"fp8": "rowwise", "fp8_emulated": True}) != without
