"""In: tables that models read: rotary frequencies, sinusoids. Out: made once for a device, exact, in no state_dict.
Does not test their values (test_models_llama and test_models_transformer do)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from codescent import models
from codescent.models.initialize import initialize_
from codescent.models.llama.module import Llama
from codescent.models.transformer.module import Transformer
from codescent.operators.tables import Table

LLAMA = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 32, "ffn_dim": 48, "vocab_size": 61}
TWO = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "hidden_dim": 12, "vocab_size": 61}
CPU, META = torch.device("cpu"), torch.device("meta")


def built(kind: str, device: str = "cpu") -> Any:
    sizes = {**LLAMA, "seq_len": 16} if kind == "llama" else {**TWO, "source_len": 5, "target_len": 11}
    shape = models.shape_of(kind, sizes)
    module = (Llama if kind == "llama" else Transformer)(shape, 0, device)
    if device == "cpu":
        initialize_(module, 3, models.parameters_of(kind, shape))
    return module


def counted(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the tables of a module make from now on."""
    made: list[Tensor] = []
    for table in module.tables:
        plain = table._make
        monkeypatch.setattr(table, "_make", lambda plain=plain: made.append(plain()) or made[-1])
    return made


@pytest.mark.parametrize("kind", ["llama", "transformer"])
def test_a_table_is_made_once_and_belongs_to_no_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, tokens = built(kind), torch.arange(32).view(2, 16)
    names, made = set(module.state_dict()), counted(module, monkeypatch)
    for _ in range(3):
        module(tokens, tokens).backward()
    assert len(made) == 1  # of Llama's the turns; who samples reads the frequencies
    assert made[0].dtype == torch.float64
    assert set(module.state_dict()) == names
    assert not list(module.buffers())
    narrow = module.to(torch.bfloat16)
    assert narrow(tokens, tokens).isfinite()
    for table in narrow.tables:
        for kept in table.tensors():
            assert torch.equal(kept, made[0].to(kept.dtype))


@pytest.mark.parametrize("kind", ["llama", "transformer"])
def test_a_model_is_built_without_memory_and_gets_its_table_where_it_computes(kind: str) -> None:
    module, tokens = built(kind, "meta"), torch.arange(32).view(2, 16)
    assert not any(list(table.tensors()) for table in module.tables)
    assert module(tokens.to(META), tokens.to(META)).is_meta
    assert {kept.device for table in module.tables for kept in table.tensors()} == {META}
    given = built(kind)
    module.to_empty(device="cpu").load_state_dict(given.state_dict())
    assert torch.equal(module(tokens, tokens), given(tokens, tokens))


def test_a_table_is_rounded_once_for_each_dtype() -> None:
    table = Table(lambda: torch.tensor([0.1, 1 / 3], dtype=torch.float64))
    assert table.on(CPU, torch.float64) is table.on(CPU, torch.float64)
    assert torch.equal(table.on(CPU, torch.bfloat16), table.on(CPU, torch.float64).bfloat16())
    assert len(list(table.tensors())) == 2


def test_a_compiled_model_computes_no_table() -> None:
    """The table is a constant of the graph: it is read, and no angle is computed."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    module, eager, tokens = built("llama"), built("llama"), torch.arange(32).view(2, 16)
    nn.Module.compile(module, backend=backend)
    assert torch.equal(module(tokens, tokens), eager(tokens, tokens))
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert any(node.op == "get_attr" for node in graphs[0].graph.nodes)
    assert sum("pow" in name for name in called) == 0  # theta ** exponents
    assert sum("cos" in name for name in called) == 0
    torch.compiler.reset()
