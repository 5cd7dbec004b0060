"""In: every scaling of rotary frequencies of transformers. Out: our frequencies, logits and config.json are the same.
Does not test how frequencies turn queries and keys: test_models_llama does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_models import LENGTH, PUBLISHED
from test_huggingface import change, difference, llama, ours

from codescent import models
from codescent.base.errors import UserError
from codescent.config.sections import Model
from codescent.huggingface.folder import keys_of_model, open_folder
from codescent.models import SIZES, shape_of
from codescent.models.llama.declare import LlamaShape
from codescent.operators.frequencies import frequencies, gain_of

WIDE: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6}  # 8 pairs of channels
FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2, 3, 4],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 9.0, 16.0, 30.0],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, LENGTH: 32, "beta_fast": 4.0, "beta_slow": 0.5},
    "yarn, not rounded": {"rope_type": "yarn", "factor": 40.0, LENGTH: 128, "truncate": False},
    "yarn of DeepSeek": {"rope_type": "yarn", "factor": 40.0, LENGTH: 64, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn with a factor": {"rope_type": "yarn", "factor": 2.0, LENGTH: 64, "attention_factor": 1.3},
    "longrope, long": {"rope_type": "longrope", LENGTH: 16, **FACTORS},
    "longrope, short": {"rope_type": "longrope", LENGTH: 64, "factor": 4.0, **FACTORS},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_has_the_frequencies_and_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Catches: a wrong formula, a factor that is read from the wrong key, a list that the other length should read."""
    scaling = SCALINGS[name]
    model = llama(**WIDE, rope_parameters={**scaling, "rope_theta": 500.0}, max_position_embeddings=32)
    model.save_pretrained(tmp_path)
    folder = open_folder(tmp_path)
    assert isinstance(folder.shape, LlamaShape)
    shape, rotary = folder.shape, model.model.rotary_emb
    mine = frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, shape.seq_len)
    assert difference(model, ours(tmp_path)) < 1e-5  # transformers takes the long list at its first long text
    torch.testing.assert_close(mine.float(), rotary.inv_freq, rtol=2e-6, atol=0.0)
    assert gain_of(shape.rope_scaling) == pytest.approx(rotary.attention_scaling, rel=1e-6)
    # the run's config has the same numbers, a plan has them, and an export writes them
    keys = Model(**keys_of_model(tmp_path)).model_dump()
    assert shape_of("llama", {size: keys[size] for size in SIZES if size != "head"}) == shape
    facts = models.facts_of("llama", shape)
    assert models.shape_of_facts(facts) == shape
    written = folder.kind.write(shape)
    change(tmp_path, rope_parameters=None, **written)
    assert open_folder(tmp_path).shape == shape
    assert difference(type(model).from_pretrained(tmp_path).eval(), ours(tmp_path)) < 1e-5


def test_the_scaling_of_a_released_model_is_read(tmp_path: Path) -> None:
    """Catches: keys of a released config.json that are read as another scaling."""
    settings, _ = PUBLISHED["Llama-3.2-1B"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    keys = Model(**keys_of_model(tmp_path)).model_dump()
    shape = shape_of("llama", {size: keys[size] for size in SIZES if size != "head"})
    assert isinstance(shape, LlamaShape)
    assert shape.rope_scaling is not None
    assert (shape.rope_scaling.factor, shape.tie_head, shape.head_dim) == (32.0, True, 64)


def test_scalings_that_cannot_be_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Catches: a model that would be computed with other positions than its own."""
    llama(**WIDE).save_pretrained(tmp_path)
    for rope, message in (
        ({"rope_type": "dynamic", "factor": 2.0}, r'"dynamic": its frequencies change with the length of each text'),
        ({"rope_type": "proportional"}, r'"proportional": codescent has "default", "linear", "llama3", "longrope"'),
        ({"rope_type": "yarn", "factor": "4", LENGTH: 16}, r'factor = "4": yarn needs a number above 0'),
        ({"rope_type": "yarn", "factor": 4.0, LENGTH: 16.5}, r"original_max_position_embeddings = 16.5: yarn needs"),
        ({"rope_type": "longrope", LENGTH: 16}, r"short_factor = null, long_factor = null: longrope needs"),
        ({**SCALINGS["longrope, long"], "long_factor": [1.0, 2.0]}, r"rope_long_factors: 2 numbers; give 8 above 0"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, r"beta_fast = 3\.0: unknown to codescent"),
    ):
        change(tmp_path, rope_parameters={"rope_theta": 500.0, **rope})
        with pytest.raises(UserError, match=message):
            open_folder(tmp_path)
    change(tmp_path, rope_parameters="linear")
    with pytest.raises(UserError, match=r"rope_scaling \(or rope_parameters\) must be an object"):
        keys_of_model(tmp_path)


def test_keys_of_another_scaling_are_refused() -> None:
    """Catches: a key of [model] that would have no effect."""
    sizes: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "vocab_size": 9, "seq_len": 8}
    for keys, message in (
        ({"rope_type": "linear", "rope_factor": 2.0, "rope_beta_fast": 3.0}, r"rope_beta_fast: .* does not read it"),
        ({"rope_type": "yarn", "rope_factor": 2.0}, r"rope_type: given without model\.rope_original_seq_len"),
        ({"rope_type": "longrope", "rope_factor": 2.0, "rope_long_factors": "a"}, r"rope_long_factors: could not"),
        ({"rope_type": "dynamic", "rope_factor": 2.0}, r"rope_type: 'dynamic' is none of llama3, linear, yarn"),
    ):
        with pytest.raises(UserError, match=message):
            shape_of("llama", sizes | keys)
    other = shape_of("llama", {"rope_type": "linear", "rope_factor": 2.0}, "llama3.1-8b")
    assert isinstance(other, LlamaShape)
    assert other.rope_scaling is not None
    assert (other.rope_scaling.method, other.rope_scaling.factor) == ("linear", 2.0)
