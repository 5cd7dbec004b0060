"""In: a Llama of transformers, answers with rewards. Out: loss and gradients of GRPO are trl's; rewards of users'
functions are checked. Does not run on layouts (test_rewarded_runs does)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from codescent import models, tasks
from codescent.base.errors import UserError
from codescent.config.sections import Data, Model, Train
from codescent.data.loader import Batch
from codescent.data.order import RepeatedOrder, Sampler
from codescent.data.samples import AnswerTokens
from codescent.huggingface.initial import InitialValues
from codescent.models.part import Part
from codescent.operators.policy import WrittenAnswers, advantages, policy_loss
from codescent.plan.objective import Objective, Policy
from codescent.tasks.rewarded.rewards import Rewards
from codescent.tasks.rewarded.samples import RewardedSource

SIZES = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
PROMPTS = ("up", "no", "it")  # equally long: trl moves shorter ones to the right
GROUP, NEW_TOKENS = 3, 6


class Run(NamedTuple):
    """A model of transformers with other weights than its reference, and the same two models as parts of ours."""

    folder: Path
    theirs: Any
    part: Part
    reference_part: Part
    facts: Any


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    folder = tmp_path_factory.mktemp("rewarded")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False, initializer_range=0.3)
    theirs = transformers.LlamaForCausalLM(config)
    reference = deepcopy(theirs)
    with torch.no_grad():
        for weight in reference.parameters():
            weight += 0.05 * torch.randn_like(weight)
    for name, model in {"policy": theirs, "reference": reference}.items():
        model.save_pretrained(folder / name)
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 16, "ffn_dim": 24, "vocab_size": 260}
    shape = models.shape_of("llama", {**sizes, "seq_len": 256, "norm_eps": config.rms_norm_eps})
    facts = models.facts_of("llama", shape, head_chunk_tokens=40)
    return Run(folder, theirs, *(_part(folder / name, facts) for name in ("policy", "reference")), facts)


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


def prepared(
    folder: Path, train: Train, seq_len: int = 40, prompts: Sequence[Any] = (*PROMPTS, "on"), **more: Any
) -> tuple[RewardedSource, Policy]:
    """The prompts of a file, and what is minimised."""
    lines = [{"prompt": prompt, "answer": prompt[::-1]} for prompt in prompts]
    lines = [line if isinstance(line["answer"], str) else {**line, "answer": "yes"} for line in lines]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths: Any = {"corpus": str(folder / "prompts.jsonl"), "folder": folder / "datasets"}
    data = Data(task="grpo", tokenizer="byte", **paths, **more)
    request = tasks.request_of(data, Model(kind="llama"), 1, train)
    found = tasks.prepare_and_open(request, progress=False).source("train", seq_len, seq_len)
    policy = tasks.task_of(request).policy(request)
    assert policy is not None
    return cast(RewardedSource, found), policy


def drawn() -> list[list[AnswerTokens]]:
    """Answers of several lengths; one group has two equal ones."""
    rng = np.random.default_rng(4)
    lengths = [[1, 4, 6], [2, 2, 5], [6, 3, 1]]
    return [
        [AnswerTokens(rng.integers(97, 123, length).tolist(), length == 6) for length in group] for group in lengths
    ]


REWARDS = np.array([[0.0, 1.0, 0.25], [1.0, 1.0, 1.0], [-2.0, 0.5, 0.0]])
GRPO = {"group_size": GROUP, "new_tokens": NEW_TOKENS}
CASES = {
    "grpo": Train(**GRPO),
    "kl": Train(**GRPO, kl=0.3, temperature=0.7),
    "dr grpo": Train(**GRPO, scale_rewards=False, answer_mean="limit"),
    "kl corrected": Train(**GRPO, updates_per_answer=2, kl=0.3, kl_corrected=True),
    "clip": Train(**GRPO, updates_per_answer=2, clip=0.1, clip_high=0.28, kl=0.04),
}


def logs(part: Part, batch: Batch, policy: Policy) -> Tensor:
    """The log-probability of each token by the weights of a part."""
    part.objective = Objective(policy=policy)
    kept = {name: value for name, value in batch.extras.items() if name not in ("rewards_BG", "cut_BG")}
    with torch.no_grad():
        found: Tensor = part.eval()(batch.inputs, batch.targets, **kept)
    return found


def theirs_of(run: Run, train: Train, batch: Batch, answers: list[list[AnswerTokens]], policy: Policy) -> Tensor:
    """trl's loss of the same answers."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from test_preferences import tokenizer  # noqa: PLC0415

    options: dict[str, Any] = {"output_dir": str(run.folder / "trl"), "report_to": [], "use_cpu": True, "bf16": False}
    options |= {"gradient_checkpointing": False, "beta": 0.0, "temperature": train.temperature}
    options |= {"epsilon": policy.clip, "epsilon_high": policy.clip_high, "max_completion_length": NEW_TOKENS}
    options |= {"use_bias_correction_kl": train.kl_corrected}
    options |= {"num_generations": GROUP, "per_device_train_batch_size": GROUP}
    config = trl.GRPOConfig(**options, loss_type="grpo" if train.answer_mean == "answer" else "dr_grpo")
    trainer = trl.GRPOTrainer(
        model=run.theirs,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "t5"}] * 4),
        processing_class=tokenizer(),
    )
    trainer.beta = train.kl  # at the start it would load a reference, whose numbers are given here
    trainer.current_gradient_accumulation_steps = 1
    rows = [answer for group in answers for answer in group]
    width = max(len(row.tokens) for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64).unbind()
    old, reference = torch.zeros(2, len(rows), width).unbind()
    for number, row in enumerate(rows):
        ids[number, : len(row.tokens)], mask[number, : len(row.tokens)] = torch.tensor(row.tokens), 1
        sample, span = divmod(number, GROUP)
        at_T = batch.extras["spans_BT"][sample] == span
        for out, name in ((old, "old_BT"), (reference, "reference_BT")):
            if name in batch.extras:
                out[number, : len(row.tokens)] = batch.extras[name][sample, at_T].float()
    prompts = torch.tensor([list(prompt.encode()) for prompt in PROMPTS]).repeat_interleave(GROUP, 0)
    rewards = torch.from_numpy(REWARDS).float()
    gains = rewards - rewards.mean(1, keepdim=True)
    gains = gains / (rewards.std(1, keepdim=True) + 1e-4) if train.scale_rewards else gains
    inputs = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": ids}
    inputs |= {"completion_mask": mask, "advantages": gains.flatten(), "ref_per_token_logps": reference}
    inputs |= {"old_per_token_logps": old} if "old_BT" in batch.extras else {}
    loss: Tensor = trainer._compute_loss(run.theirs.train(), inputs)
    return loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what trl and transformers say of each other
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_trl(run: Run, case: str) -> None:
    """Fault: an advantage, a ratio, the estimate of the KL term, or what the loss divides by, is another."""
    train, answers = CASES[case], drawn()
    source, policy = prepared(run.folder, train)
    numbers = np.arange(len(PROMPTS))
    order = [source.shown(number, [])["prompt"] for number in numbers.tolist()]
    assert order == list(PROMPTS)
    batch = Batch.of(source.answered(numbers, answers, REWARDS))
    more = dict[str, Tensor]()
    if policy.updates > 1:
        noise = 0.2 * torch.randn(batch.inputs.shape, generator=torch.Generator().manual_seed(2))
        more["old_BT"] = logs(run.part, batch, policy) + noise
    if policy.kl:
        more["reference_BT"] = logs(run.reference_part, batch, policy)
    batch = replace(batch, extras={**batch.extras, **more})
    run.part.objective = Objective(policy=policy)
    run.part.train().zero_grad()
    count = int(source.losses(numbers).sum())
    loss = run.part(batch.inputs, batch.targets, loss_scale=1.0 / count, **batch.extras)
    loss.backward()
    run.theirs.zero_grad()
    wanted = theirs_of(run, train, batch, answers, policy)
    wanted.backward()
    assert loss.item() / count == pytest.approx(wanted.item(), rel=1e-5, abs=1e-7)
    gradients = deepcopy(run.theirs)
    for weight, of in zip(gradients.parameters(), run.theirs.parameters(), strict=True):
        weight.data = of.grad
    gradients.save_pretrained(run.folder / "gradients")
    found = dict(_values(run.folder / "gradients", run.facts))
    largest = max(value.abs().max().item() for value in found.values())
    assert largest > 1e-3
    for name, value in found.items():
        torch.testing.assert_close(run.part.get_parameter(name).grad, value, rtol=1e-5, atol=1e-5 * largest, msg=name)
    sums = dict(zip(policy.measures, run.part.objective_sums.tolist(), strict=True))
    assert sums["reward"] == [pytest.approx(REWARDS.sum()), REWARDS.size]
    assert sums["answer_tokens"] == [30.0, 9.0]
    assert sums["answers_cut"] == [2.0, 9.0]
    assert sums["groups_alike"] == [1.0, 3.0]
    assert case != "clip" or 0 < sums["clipped"][0] < sums["clipped"][1] == 30.0


def test_the_gradient_is_that_of_autograd() -> None:
    """Fault: a token beyond its limit has a gradient, or one within it has none."""
    generator = torch.Generator().manual_seed(6)
    losses_BT = torch.rand(2, 7, generator=generator, dtype=torch.float64).requires_grad_()
    spans_BT = torch.tensor([[-1, 0, 0, 1, 1, 1, -1], [0, 1, 1, -1, -1, -1, -1]])
    old_BT, reference_BT = -torch.rand(2, 2, 7, generator=generator, dtype=torch.float64)
    rewards_BG, cut_BG = torch.tensor([[1.0, 0.0], [0.5, 2.0]], dtype=torch.float64), torch.tensor([[0, 1], [0, 0]])
    policy = Policy(2, 4, kl=0.2, clip=0.2, clip_high=0.4, updates=2)
    answers = WrittenAnswers(spans_BT, rewards_BG, cut_BG, old_BT, reference_BT)
    loss, measured = policy_loss(losses_BT, answers, policy, 0.5)
    (mine_BT,) = torch.autograd.grad(loss, losses_BT)
    logs_BT, is_token_BT, at_BT = -losses_BT, spans_BT >= 0, spans_BT.clamp(min=0)
    ratio_BT, gain_BT = (logs_BT - old_BT).exp(), advantages(rewards_BG, scaled=True).gather(1, at_BT)
    clipped_BT = ratio_BT.clamp(0.8, 1.4) * gain_BT
    over_BT = reference_BT - logs_BT
    each_BT = -torch.minimum(ratio_BT * gain_BT, clipped_BT) + 0.2 * (over_BT.exp() - over_BT - 1.0)
    counts_BG = torch.stack([(spans_BT == span).sum(1) for span in range(2)], 1)
    wanted = (each_BT * is_token_BT / counts_BG.gather(1, at_BT)).sum()
    (wanted_BT,) = torch.autograd.grad(0.5 * wanted, losses_BT)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine_BT, wanted_BT, rtol=1e-12, atol=1e-12)
    assert 0 < float(measured[-1, 0]) < float(measured[-1, 1]) == 8.0


def test_each_answer_is_a_document_behind_its_prompt(tmp_path: Path) -> None:
    """Fault: an answer sees another one, or a token is learned as that of another answer."""
    source, _ = prepared(tmp_path, CASES["grpo"])
    numbers = np.arange(2)
    samples = source.answered(numbers, [one[:2] for one in drawn()[:2]], REWARDS[:2, :2])
    for row, group in enumerate(drawn()[:2]):
        for span, answer in enumerate(group[:2]):
            at = np.flatnonzero(samples.extras["spans_BT"][row] == span)
            assert samples.targets[row, at].tolist() == answer.tokens
            begin = int(samples.extras["begins_BT"][row, at[0]])
            assert samples.inputs[row, begin : at[0] + 1].tolist() == list(PROMPTS[row].encode())
            assert samples.inputs[row, at[1:]].tolist() == answer.tokens[:-1]
    assert (samples.targets >= 0).sum() == sum(len(answer.tokens) for one in drawn()[:2] for answer in one[:2])
    assert (source.read(numbers).targets < 0).all()


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


@pytest.mark.slow
def test_messages_are_written_by_the_chat_template(tmp_path: Path) -> None:
    """Fault: the words of the assistant begin in the prompt, or nothing asks for them."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    said = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "up?"}]
    prompts = [said, "up?", said]
    source, _ = prepared(tmp_path, CASES["grpo"], prompts=prompts, chat_template=tmp_path / "chat.jinja")
    texts = [bytes(prompt).decode() for prompt in source.prompts(np.arange(2))]
    assert texts == ["system: Be short.;user: up?;bot:", "user: up?;bot:"]
    assert source.end == 256
    answers = [AnswerTokens([*b"yes", 256], False), AnswerTokens(list(b"no"), True)]
    assert source.rewards(0, answers, "step 1") == [1.0, 0.0]
    assert source.shown(0, answers)["answers"] == ["yes", "no"]


def test_steps_that_share_answers_take_the_same_prompts() -> None:
    """Fault: prompts are left out whose answers no step has learned from."""
    order = Sampler(3, 40, 8)
    found = RepeatedOrder(order, 3).indices_of_steps(2, 5, 1, 7)
    assert found.tolist() == [order.indices_of_steps(step // 3, 1, 1, 7)[0].tolist() for step in range(2, 7)]


def test_an_exact_answer_is_rewarded() -> None:
    """Fault: white space or a number is no right answer."""
    rewards = Rewards("exact", "prompt", "answer", 1.0)
    assert rewards({"prompt": "2+2", "answer": 4}, ["4", " 4\n", "5", "4."], "x") == [1.0, 1.0, 0.0, 0.0]


def hang(**_: Any) -> None:
    time.sleep(60.0)


def leave(**_: Any) -> None:
    raise SystemExit(3)


def gives(value: Any) -> Callable[..., Any]:
    return lambda **_: value


BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (lambda **_: 1 / 0, "raised ZeroDivisionError: division by zero"),
    "ends the process": (leave, "raised SystemExit: 3"),
    "NaN": (gives([1.0, float("nan")]), "answer 2 has the reward nan; must be finite"),
    "too few": (gives([1.0]), "returned 1 rewards for 2 answers"),
    "no list": (gives(None), "returned a NoneType; must return a list of numbers"),
    "a text": (gives([1.0, "good"]), "answer 2 has the reward 'good', no number"),
    "hangs": (hang, "no reward after 0.2 s; raise data.reward_timeout_s, or mend the function"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_reward_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Fault: a run hangs, ends in a traceback, or learns from what is no reward."""
    function, said = BROKEN[case]
    monkeypatch.setitem(globals(), "wanted", function)
    rewards = Rewards(f"{__name__}:wanted", "prompt", "answer", 0.2)
    with pytest.raises(UserError) as caught:
        rewards({"prompt": "a", "more": 1}, ["b", "c"], "file.jsonl:7, step 3")
    (problem,) = caught.value.problems
    assert problem.startswith(f"data.reward = {__name__}:wanted: file.jsonl:7, step 3: {said}")


def test_a_function_gets_what_functions_of_trl_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a key of the line is missing, or is no list."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setitem(globals(), "wanted", lambda **given: seen.append(given) or [0, True])
    rewards = Rewards(f"{__name__}:wanted", "question", "answer", 5.0)
    assert rewards({"question": "q", "hint": 2}, ["a", "b"], "") == [0.0, 1.0]
    assert seen == [{"prompts": ["q", "q"], "completions": ["a", "b"], "hint": [2, 2]}]
