"""Recipes that version 2 wrote: they load, with the same outputs, whatever stood in them without effect."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import lotformer
from lotformer import conversion
from lotformer.conversion.recipe import Recipe
from support.small_models import output, torch_encoder

VERSION_2 = {
    "defaults": (
        {
            "rank": 5,
            "eps": 0.1,
            "key_masses": "query-aware",
            "balance": "keys",
            "pivots": "input-aware",
            "solver": "newton",
            "tol": 1e-05,
            "pivot_init": "small",
        },
        342.3756200357748,
    ),
    "sweeps kept beside newton": (
        {
            "rank": 5,
            "eps": 0.1,
            "key_masses": "query-aware",
            "balance": "keys",
            "pivots": "input-aware",
            "solver": "newton",
            "tol": 1e-05,
            "pivot_init": "small",
            "iters": 20,
        },
        342.3756200357748,
    ),
    "sinkhorn": (
        {
            "rank": 5,
            "eps": 0.1,
            "key_masses": "query-aware",
            "balance": "keys",
            "pivots": "input-aware",
            "solver": "sinkhorn",
            "tol": 1e-05,
            "pivot_init": "small",
            "iters": 3,
        },
        342.37977853929624,
    ),
    "pola": (
        {
            "rank": 5,
            "eps": 0.1,
            "key_masses": "query-aware",
            "balance": "keys",
            "pivots": "input-aware",
            "solver": "newton",
            "tol": 1e-05,
            "pivot_init": "small",
            "prefix_tokens": 1,
            "polarize_prefix": True,
            "polarize_powers": [2.0, 0.5],
            "prefix_beta": 1.0,
        },
        351.6671424496453,
    ),
    "idle": (
        {
            "rank": 5,
            "eps": 0.1,
            "key_masses": "query-aware",
            "balance": "keys",
            "pivots": "input-aware",
            "solver": "newton",
            "tol": 1e-05,
            "pivot_init": "small",
            "kernel_size": 5,
            "prefix_beta": 2.0,
            "prefix_tokens": 0,
            "window": None,
        },
        342.3756200357748,
    ),
    "conv": (
        {
            "rank": 5,
            "eps": 0.1,
            "key_masses": "query-aware",
            "balance": "keys",
            "pivots": "input-aware",
            "solver": "newton",
            "tol": 1e-05,
            "pivot_init": "small",
            "local_conv": "1d",
        },
        340.3298421376385,
    ),
    "wide": (
        {
            "window": "1d",
            "window_size": 7,
            "rank": 5,
            "eps": 0.1,
            "key_masses": "query-aware",
            "balance": "keys",
            "pivots": "input-aware",
            "solver": "newton",
            "tol": 1e-05,
            "pivot_init": "small",
            "prefix_tokens": 2,
        },
        346.2125776677858,
    ),
    "uniform": (
        {
            "rank": 5,
            "eps": 0.1,
            "key_masses": "uniform",
            "balance": "both",
            "pivots": "fixed",
            "solver": "newton",
            "tol": 1e-05,
            "pivot_init": "small",
            "scale": 0.5,
            "learn_eps": True,
        },
        327.8967750114389,
    ),
}
"""Options of recipes that version 2 wrote for a seeded encoder, and the sum of the sizes of its outputs there."""


@pytest.mark.parametrize("kind", VERSION_2)
def test_a_recipe_of_version_2_gives_the_same_outputs(kind, tmp_path):
    options, total = VERSION_2[kind]
    old = {"version": 2, "mechanism": "lot", "options": options, "layers": ["layers.0.self_attn", "layers.1.self_attn"]}
    config = lotformer.LOTConfig.from_options(**Recipe.from_dict(old).options)
    torch.manual_seed(0)
    model = torch_encoder().eval()
    torch.manual_seed(1)
    lotformer.convert(model, config=config)
    recipe = conversion.recipe(model)
    assert recipe == Recipe.from_dict(old)
    assert Recipe.from_json(recipe.to_json()) == recipe

    batch = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(2))
    expected = output(model, batch)
    assert float(expected.double().abs().sum()) == pytest.approx(total, rel=1e-6)
    conversion.save(model, tmp_path / "model.safetensors")
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "old.safetensors", {"lotformer": json.dumps(old)})
    torch.manual_seed(0)
    again = torch_encoder().eval()
    conversion.load(again, tmp_path / "old.safetensors")
    assert torch.equal(output(again, batch), expected)
