"""In: presets and sizes, right and wrong. Out: shapes, or one error that names every problem and what would be right.
Does not build modules."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from codescent import models
from codescent.base.errors import UserError
from codescent.models.bert import declare as bert
from codescent.models.gpt2 import declare as gpt2
from codescent.models.gpt2.declare import PRESETS
from codescent.models.llama import declare as llama
from codescent.models.shape import Kind
from codescent.models.transformer import declare as transformer
from codescent.plan.model import ModelFacts
from codescent.plan.shard import Role

SIZES: dict[str, int | None] = {
    "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "vocab_size": 65, "seq_len": 32
}  # fmt: skip


def test_sizes_override_a_preset_and_the_feed_forward_follows_the_width() -> None:
    assert models.shape_of("gpt2", {}, "gpt2").ffn_dim == 3072
    narrow = models.shape_of("gpt2", {"hidden_dim": 384, "num_heads": 6, "vocab_size": None}, "gpt2", dropout=0.1)
    assert (narrow.num_layers, narrow.ffn_dim, narrow.head_dim, narrow.vocab_size) == (12, 1536, 64, 50257)
    assert models.shape_of("gpt2", {"ffn_dim": 100}, "gpt2").ffn_dim == 100


def problems(sizes: dict[str, int | None], preset: str | None = None, kind: str = "gpt2", dropout: float = 0.0) -> str:
    with pytest.raises(UserError) as error:
        models.shape_of(kind, sizes, preset, dropout=dropout)
    return str(error.value)


@pytest.mark.parametrize(
    ("preset", "listed"), [("Llama-2-13b-chat", "of llama. Presets: llama3-8b"), ("mistral", "llama: llama3-8b")]
)
def test_a_refused_preset_lists_those_of_its_kind_or_all_and_other_models(preset: str, listed: str) -> None:
    message = problems({}, preset, models.kind_of(None, preset))
    assert listed in message
    assert ("codescent docs own_module" in message) == (preset == "mistral")


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    message = problems({}, "gpt2-meduim")
    assert "model.preset" in message
    assert "did you mean 'gpt2-medium'?" in message
    assert all(preset in message for preset in PRESETS)


def test_all_problems_come_at_once() -> None:
    message = problems({"num_layers": -2, "num_heads": 12, "hidden_dim": 770, "sequence": 3}, dropout=1.0)
    for part in (
        "model.vocab_size, model.seq_len: not given",
        "model.num_layers: -2",
        "model.dropout: 1.0",
        "model.sequence",
        "num_heads = 11 or 14",
        "hidden_dim = 768 or 780",
    ):
        assert part in message, part


def test_an_unknown_kind_is_refused() -> None:
    assert "model.kind" in problems(SIZES, kind="gpt3")


def test_every_role_is_declared_and_columns_meet_rows() -> None:
    declared = models.parameters_of("gpt2", models.shape_of("gpt2", SIZES))
    others = {Role.WHOLE, Role.LOGITS, Role.ADAPTER, Role.ADAPTER_COLUMN, Role.ADAPTER_ROW}  # a bert's, an adapter's
    others |= {Role.HEAD_NORM, Role.COLUMN_NORM, Role.MAGNITUDE, Role.MAGNITUDE_COLUMN}  # a llama's, of DoRA
    others |= {Role.EXPERT_COLUMN, Role.EXPERT_ROW, Role.ROUTER, Role.ROUTER_BIAS, Role.STREAM}  # of experts, latents
    assert {parameter.role for parameter in declared} == set(Role) - others
    for parameter in declared:
        if parameter.role is Role.BIAS_COLUMN:
            matrix = next(other for other in declared if other.name == parameter.name.replace("bias", "weight"))
            assert matrix.role is Role.COLUMN
            assert matrix.shape[0] == parameter.shape[0]


def test_planning_a_model_does_not_import_torch() -> None:
    program = (
        "import sys; from codescent import models;"
        "models.parameters_of('gpt2', models.shape_of('gpt2', {}, 'gpt2'));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("kind", [gpt2.KIND, llama.KIND, bert.KIND, transformer.KIND], ids=lambda kind: kind.name)
def test_the_facts_of_every_preset_give_its_shape_back(kind: Kind) -> None:
    for preset in kind.presets:
        shape = models.shape_of(kind.name, {}, preset)
        facts = models.facts_of(kind.name, shape, 8)
        assert models.shape_of_facts(facts) == shape
        read = ModelFacts(**json.loads(json.dumps(dataclasses.asdict(facts))))
        assert models.shape_of_facts(read) == shape, preset


def test_facts_of_vectors_give_their_shape_back() -> None:
    shape = models.shape_of("transformer", {"embedding": "none"}, "transformer-base")
    assert shape.vocab_size == 0
    assert models.shape_of_facts(models.facts_of("transformer", shape)) == shape
