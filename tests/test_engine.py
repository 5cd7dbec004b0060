"""In: small models, requests that arrive and leave at any step. Out: the tokens of transformers, whatever else runs.
Does not test how a run folder is opened (test_engine_open.py does) or several ranks (test_engine_ranks.py does)."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from generating import engine_for, tokens_of
from test_huggingface import ours
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from codescent import models
from codescent.base.errors import UserError
from codescent.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer
from codescent.inference.engine import Engine
from codescent.inference.grammar import Grammar
from codescent.inference.graphs import DecodeGraphs
from codescent.inference.pages import NOTHING, PagePool
from codescent.inference.request import Finish, Output, Sampling
from codescent.inference.sampling import DIVERGED, NOTHING_ALLOWED
from codescent.inference.schedule import Capacity
from codescent.inference.text import StopText
from codescent.models.initialize import initialize_
from codescent.operators.cache import CachedToken, KeysValues, PagesPass, RowPart, RowsPass, TextPages

NONE: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GREEDY = Sampling(0.0, max_new_tokens=20)
PROMPTS = [
    [5, 3, 8],
    [1],
    [(7 * n) % 61 for n in range(23)],
    [60, 0, 4, 4, 4, 9],
    [(5 * n + 1) % 61 for n in range(40)],
]


def gpt2() -> Any:
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 61, "n_positions": 96}
    return GPT2LMHeadModel(GPT2Config(**sizes, **NONE))


def windowed() -> Any:
    """A llama with groups of heads and a window that most texts outgrow."""
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 61, "max_position_embeddings": 96}
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=11, **NONE))


def latents() -> Any:
    """Multi-head latent attention: the cache holds latents."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"hidden_size": 48, "intermediate_size": 64, "vocab_size": 61, "max_position_embeddings": 96}
    sizes |= {"kv_lora_rank": 12, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, first_k_dense_replace=2, **NONE))


SLOW_MODELS = [pytest.param(model, marks=pytest.mark.slow) for model in (gpt2, latents)]


@pytest.fixture(scope="module", params=[*SLOW_MODELS, windowed])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, nn.Module]:
    """A model of transformers with far from uniform predictions, and ours with the same weights, in fp64."""
    torch.manual_seed(3)
    theirs = request.param().double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1))
        if request.param is gpt2:  # else a tied head repeats what it reads
            theirs.transformer.ln_f.weight[::2] *= -1.0
    folder = tmp_path_factory.mktemp("weights")
    theirs.save_pretrained(folder)
    return theirs, ours(folder, torch.float64).eval()


@torch.no_grad()
def expected(theirs: Any, prompt: list[int], count: int = 20) -> list[int]:
    given = torch.tensor([prompt])
    # Without a mask, transformers takes a token 0 of the prompt for padding.
    mask = torch.ones_like(given)
    found = theirs.generate(given, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def run(engine: Engine) -> dict[int, list[Output]]:
    """All outputs from now on, by request."""
    found: dict[int, list[Output]] = {}
    for _ in range(2000):
        if not engine.busy:
            return found
        for output in engine.step():
            found.setdefault(output.request, []).append(output)
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: list[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


def test_greedy_tokens_are_those_of_transformers_whatever_else_runs(both: tuple[Any, nn.Module]) -> None:
    """Fault: a key of another row, a wrong position or mask after a row has joined, left or waited."""
    theirs, mine = both
    wanted = [expected(theirs, prompt) for prompt in PROMPTS]
    assert len(set(map(tuple, wanted))) == len(PROMPTS)
    assert tokens_of(engine_for(mine), PROMPTS, [GREEDY] * 5) == wanted  # all at once
    engine = engine_for(mine, rows=2, step_tokens=7)  # rows that wait, prompts in several parts
    assert tokens_of(engine, PROMPTS, [GREEDY] * 5) == wanted
    assert engine.pages_used == 0
    engine, found = engine_for(mine), dict[int, list[Output]]()
    order = [4, 0, 2, 1, 3]
    for step in range(60):  # one arrives every third step; another request is cancelled on its way
        if step % 3 == 0 and step // 3 < 5:
            engine.add(PROMPTS[order[step // 3]], GREEDY)
        if step == 4:
            cancelled = engine.add([9] * 30, Sampling(seed=1))
        if step == 8:
            engine.cancel(cancelled)
            engine.cancel(10**9)
        for output in engine.step():
            found.setdefault(output.request, []).append(output)
    assert not engine.busy
    assert found[cancelled][-1].finished is Finish.CANCELLED
    others = [outputs for request, outputs in sorted(found.items()) if request != cancelled]
    assert [tokens(outputs) for outputs in others] == [wanted[number] for number in order]
    assert all(outputs[-1].finished is Finish.LENGTH for outputs in others)


def test_a_row_without_pages_is_read_again(both: tuple[Any, nn.Module]) -> None:
    """Fault: keys of a row that gave up its pages are used later, or it loses tokens."""
    theirs, mine = both
    engine = engine_for(mine, rows=5, pages=16)
    assert tokens_of(engine, PROMPTS, [GREEDY] * 5) == [expected(theirs, prompt) for prompt in PROMPTS]
    assert engine.preemptions > 0
    assert (engine.pages_used, engine.waiting, engine.running) == (0, 0, 0)
    assert engine.seq_len == 64  # all that the pages hold


def test_beginnings_are_shared_and_forgotten(both: tuple[Any, nn.Module]) -> None:
    """Fault: a page of other tokens is shared, or one that the model with its earlier weights has written."""
    theirs, mine = both
    start = [(11 * n) % 61 for n in range(34)]
    prompts = [[*start, 7], [*start, 8, 9], [*start[:17], 1], [*start, 7]]
    wanted = [expected(theirs, prompt) for prompt in prompts]
    engine = engine_for(mine, rows=2)
    assert tokens_of(engine, prompts[:1], [GREEDY]) == wanted[:1]
    assert engine.cached_tokens == 0
    assert tokens_of(engine, prompts[1:], [GREEDY] * 3) == wanted[1:]
    assert engine.cached_tokens == 32 + 16 + 32
    before = engine.cached_tokens
    weight = next(
        parameter for name, parameter in mine.named_parameters() if name.endswith(("qkv.weight", "q_up.weight"))
    )
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(-1.0)
    engine.forget()
    changed = tokens_of(engine, prompts[:1], [GREEDY])
    assert engine.cached_tokens == before
    assert changed == tokens_of(engine_for(mine), prompts[:1], [GREEDY]) != wanted[:1]
    with torch.no_grad():
        weight.copy_(kept)


def test_a_text_of_the_whole_context_ends_there(both: tuple[Any, nn.Module]) -> None:
    """Fault: a position that the model does not have, or a text that ends early."""
    theirs, mine = both
    prompt = [(3 * n) % 61 for n in range(90)]
    engine = engine_for(mine, rows=1)
    request = engine.add(prompt, Sampling(0.0))
    outputs = run(engine)[request]
    assert tokens(outputs) == expected(theirs, prompt, 7)  # six more are read, and one more is chosen
    assert outputs[-1].finished is Finish.LENGTH
    with pytest.raises(UserError, match=r"prompt: 97 tokens, and the model sees at most 96$"):
        engine.add([1] * 97, Sampling())
    with pytest.raises(UserError, match=r"prompt: 97 tokens, and the model sees at most 64, for which the memory"):
        engine_for(mine, pages=16).add([1] * 97, Sampling())
    assert len(tokens_of(engine, [[1] * 97], [Sampling(0.0, max_new_tokens=30, slides=True)])[0]) == 30


def test_a_pass_of_one_shape_has_the_same_logits(both: tuple[Any, nn.Module]) -> None:
    """Fault: what a CUDA graph would repeat reads another page, mask or position than rows by themselves."""
    _, mine = both
    texts = [[(7 * n) % 61 for n in range(14)], [3, 4], [(5 * n) % 61 for n in range(30)]]
    memory = KeysValues(mine.shape.num_layers, 40, 4, _cached(mine), torch.device("cpu"), torch.float64)
    pages = [TextPages(4, numbers) for numbers in ([3, 4, 9, 10], [0], [20, 7, 8, 30, 31, 32, 1, 2])]
    with torch.inference_mode():
        parts = [RowPart(len(text) - 1, len(text) - 1, page) for text, page in zip(texts, pages)]
        first = [token for text in texts for token in text[:-1]]
        mine(torch.tensor([first]), cache=RowsPass(memory, parts, [False] * 3))
        last = torch.tensor([[text[-1] for text in texts]])
        parts = [RowPart(1, len(text), page) for text, page in zip(texts, pages)]
        by_rows = mine(last, cache=RowsPass(memory, parts, [True] * 3))
        table = torch.tensor([(page.numbers + [40] * 8)[:8] for page in pages] + [[40] * 8])
        positions = torch.tensor([[len(text) - 1 for text in texts] + [0]])
        padded = torch.cat([last, torch.zeros(1, 1, dtype=torch.int64)], 1)
        by_pages = mine(padded, cache=PagesPass(memory, positions, table))
        whole = torch.stack([mine(torch.tensor([text]))[0, -1] for text in texts])
    torch.testing.assert_close(by_rows, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_pages[:3], whole, rtol=1e-9, atol=1e-9)


def test_graphs_of_few_shapes_give_the_same_tokens(both: tuple[Any, nn.Module]) -> None:
    """Fault: a graph reads what it was recorded with, not the pass; or there is one for each length."""
    theirs, mine = both
    engine, recorded = engine_for(mine, rows=4), list[Any]()

    def record(device: torch.device, act: Any) -> Any:
        """As CUDA repeats it: the same memory is read and written, and Python does not run again."""
        result = act()
        recorded.append(result.shape)
        return lambda: result.copy_(act()), result

    reader = engine._reader
    reader.graphs = DecodeGraphs(reader.module, reader.memory, record)
    assert tokens_of(engine, PROMPTS, [GREEDY] * 5) == [expected(theirs, prompt) for prompt in PROMPTS]
    assert 2 <= len(recorded) <= 6


def test_a_pass_of_one_shape_never_waits_for_a_device(both: tuple[Any, nn.Module]) -> None:
    """Fault: a number that is read on the host ends the recording of a CUDA graph. The meta device has no numbers."""
    _, mine = both
    meta = copy.deepcopy(mine).to("meta")
    memory = KeysValues(meta.shape.num_layers, 8, 4, _cached(mine), torch.device("meta"), torch.float64)  # type: ignore[union-attr, arg-type]
    numbers = torch.zeros(3, 8, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        logits = meta(numbers[None, :, 0], cache=PagesPass(memory, numbers[None, :, 1], numbers[:, 2:]))
    assert logits.shape == (3, 61)


def _cached(module: nn.Module) -> CachedToken:
    return module.blocks["0"].attn.cached  # type: ignore[index, operator, union-attr, no-any-return]


def small(kind: str = "gpt2", **sizes: Any) -> nn.Module:
    """A model of 257 tokens, for bytes."""
    of_all = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "vocab_size": 257, "seq_len": 128}
    shape = models.shape_of(kind, of_all | sizes)
    module = models.construct(models.facts_of(kind, shape), "cpu").eval()
    initialize_(module, 3, models.parameters_of(kind, shape))
    return module


def test_a_model_trains_on_after_an_engine_has_read_it() -> None:
    """Fault: what the engine's pass makes for later, such as rotary tables, has no gradient; the mode is changed."""
    module = small("llama", ffn_dim=40)
    module.train()
    engine = engine_for(module)
    engine.add([1, 2, 3], Sampling(max_new_tokens=2))
    run(engine)
    assert module.training
    tokens_BT = torch.arange(12).view(2, 6)
    module(tokens_BT, tokens_BT + 1).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def of_bytes(**options: Any) -> Engine:
    module = small()
    return Engine(module, ByteTokenizer(), Capacity(4, 128, 4, 64), **options)  # type: ignore[arg-type]


def test_a_stop_text_ends_a_request_before_it() -> None:
    """Fault: part of the stop text is shown, or text that only looked like its beginning is lost."""
    stop = StopText(["END", "NDX"])
    assert [stop.push(piece) for piece in ("ab", "cE", "N", "x", "yEN", "DX", "z")] == [
        "ab",
        "c",
        "",
        "ENx",
        "y",
        "",
        "",
    ]
    assert stop.found
    whole = StopText(["END"])
    assert whole.push("abEN") + whole.push("", ends=True) == "abEN"
    engine = of_bytes()
    biased = {ord("a"): 100.0, ord("b"): 99.9}
    request = engine.add([65], Sampling(seed=5, max_new_tokens=60, logit_bias=biased))
    text = "".join(output.text for output in run(engine)[request])
    assert set(text) == {"a", "b"}
    first = text.index("ba")
    request = engine.add([65], Sampling(seed=5, max_new_tokens=60, logit_bias=biased, stop=("ba", "zz")))
    outputs = run(engine)[request]
    assert "".join(output.text for output in outputs) == text[:first]
    assert outputs[-1].finished is Finish.STOP
    assert len(outputs) == first + 2


def test_a_stop_token_is_no_part_of_the_text() -> None:
    engine = of_bytes(stops=[256])
    request = engine.add([65], Sampling(logit_bias={256: 1e4}))
    assert run(engine)[request] == [Output(request, None, finished=Finish.STOP)]


def test_logprobs_are_those_of_the_model() -> None:
    """Fault: probabilities after bias or temperature, or of another row."""
    engine = of_bytes()
    prompts = [[65, 66], [67]]
    requests = [engine.add(p, Sampling(3.0, logit_bias={9: 50.0}, logprobs=4, max_new_tokens=1)) for p in prompts]
    found = run(engine)
    for prompt, request in zip(prompts, requests):
        (output,) = found[request]
        assert output.token == 9
        assert output.logprob is not None
        with torch.no_grad():
            logprobs = engine.module(torch.tensor([prompt]))[0, -1].double().log_softmax(-1)
        assert output.logprob.logprob == pytest.approx(float(logprobs[9]), abs=1e-5)
        best = logprobs.topk(4)
        assert [token for token, _ in output.logprob.top] == best.indices.tolist()
        assert [value for _, value in output.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_diverged_model_ends_its_requests_with_a_sentence() -> None:
    """Fault: a request that never ends, or an exception that ends the engine for all."""
    engine = of_bytes()
    engine.module.norm.weight.data[0] = math.nan
    request = engine.add([65], Sampling())
    assert [(one.finished, one.error) for one in run(engine)[request]] == [(Finish.ERROR, DIVERGED)]
    engine.module.norm.weight.data[0] = 1.0
    request = engine.add([65], Sampling(logit_bias=dict.fromkeys(range(257), -math.inf)))
    assert [(one.finished, one.error) for one in run(engine)[request]] == [(Finish.ERROR, NOTHING_ALLOWED)]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_grammar_decides_what_a_text_can_be() -> None:
    """Fault: a token that the grammar forbids, a text that goes on behind its end, a grammar of another request."""
    pytest.importorskip("llguidance")
    engine = of_bytes(stops=[256])
    schema = Grammar("json_schema", json.dumps(SCHEMA))
    more = {"seed": 4, "max_new_tokens": 110}
    ids = [
        engine.add([65], Sampling(grammar=schema, **more)),
        engine.add([66], Sampling(grammar=Grammar("regex", "(ab|cd){3}x"), **more)),
        engine.add([67], Sampling(0.0, grammar=Grammar("lark", 'start: "yes" | "no"'), **more)),
        engine.add([65], Sampling(**more)),
        engine.add([65], Sampling(seed=7, grammar=schema, max_new_tokens=90)),
        engine.add(
            [65], Sampling(grammar=Grammar("regex", "a*"), logit_bias={97: 1e3}, max_new_tokens=9)
        ),  # never ends
    ]
    outputs = run(engine)
    texts = ["".join(output.text for output in outputs[request]) for request in ids]
    for text in (texts[0], texts[4]):
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 99
    assert texts[0] != texts[4]
    assert texts[1].endswith("x")
    assert {texts[1][:-1][i : i + 2] for i in (0, 2, 4)} <= {"ab", "cd"}
    assert texts[2] in ("yes", "no")
    assert texts[5] == "a" * 9
    assert [outputs[request][-1].finished for request in (ids[0], ids[1], ids[2], ids[5])] == [
        Finish.STOP, Finish.STOP, Finish.STOP, Finish.LENGTH,
    ]  # fmt: skip


def test_a_grammar_of_characters(tmp_path: Path) -> None:
    """Fault: ids of a character tokenizer are taken for bytes."""
    pytest.importorskip("llguidance")
    module = small()
    engine = Engine(module, CharTokenizer("0123é", False), Capacity(1, 32, 4, 16), vocab_size=5)  # type: ignore[arg-type]
    request = engine.add([1], Sampling(grammar=Grammar("regex", "é[01]é"), max_new_tokens=9))
    outputs = run(engine)[request]
    assert "".join(output.text for output in outputs) in ("é0é", "é1é")
    assert outputs[-1].finished is Finish.STOP


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000), "nested 10,001 levels deep; at most 64"),
        (Grammar("json_schema", "[" * 10_000), "nested 10,000 levels deep"),
        (Grammar("regex", "(" * 10_000 + ")" * 10_000), "nested 10,000 levels deep"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", "3"), "must be an object"),
        (Grammar("json_schema", '{"type": "nothing"}'), "grammar: "),
        (Grammar("json_schema", '{"$ref": "http://localhost:9/schema"}'), "grammar: "),
        (Grammar("regex", "(ab"), "grammar: "),
        (Grammar("lark", "start: nothing"), "grammar: "),
        (Grammar("regex", "a" * 300_000), "300,000 bytes; at most 262,144"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammar: Grammar, why: str) -> None:
    """Fault: a crash, or time without end, by a schema of a stranger."""
    pytest.importorskip("llguidance")
    with pytest.raises(UserError) as error:
        of_bytes().add([65], Sampling(grammar=grammar))
    assert why in str(error.value)
    assert len(str(error.value)) < 500


def test_a_grammar_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UserError, match=r'a grammar needs llguidance, .*pip install "codescent\[grammar\]"'):
        of_bytes().add([65], Sampling(grammar=Grammar("json")))


def test_pages_are_counted_and_the_oldest_are_freed() -> None:
    """Fault: a page with a reader is given away, one is lost, or the newest text is forgotten first."""
    pool = PagePool(6, 2)
    pages = [pool.take(None)]
    pages.append(pool.take(pages[0]))
    assert pages == [0, 1]  # neighbours
    key = pool.keep(0, [1, 2], NOTHING)
    pool.keep(1, [3, 4], key)
    pool.leave([0, 1])
    assert (pool.used, pool.available()) == (0, 6)
    assert pool.begin([1, 2, 3, 4])[0] == [0]  # the last token is read
    assert pool.begin([1, 2, 3, 4, 5])[0] == [0, 1]
    assert pool.begin([2, 1, 3, 4, 5])[0] == pool.begin([3, 4, 5])[0] == []
    assert pool.used == 2
    taken = [pool.take(None) for _ in range(5)]
    assert sorted(page for page in taken if page is not None) == [2, 3, 4, 5]
    assert taken[-1] is None
    pool.leave([0, 1])
    assert pool.take(None) == 1  # page 0 has another reader
    pool.leave([0])
    assert pool.take(None) == 0
    assert pool.take(None) is None
