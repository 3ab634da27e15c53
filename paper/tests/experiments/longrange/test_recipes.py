"""Recipes: the paper's values are LOT's defaults, and whatever is chosen wins."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lotformer import attention
from lotformer.cli.main import app
from lotformer.settings import name_value_pairs
from lotformer_paper.experiments.longrange.settings import settings_for
from lotformer_paper.experiments.longrange.task import build_model

PAPER = {  # task: learning rate, ε, temperature of the reference masses
    "text": (1e-4, 5.0, 0.05),
    "listops": (1e-3, 0.05, 8.0),
    "retrieval": (3e-4, 0.1, 0.1),
    "pathfinder": (2e-4, 0.05, 0.5),
    "image": (2e-3, 0.05, 4.0),
}
SKYFORMER = {  # task: batch size, learning rate, warm-up
    "listops": (32, 1e-4, 1000),
    "text": (32, 1e-4, 80),
    "retrieval": (16, 2e-4, 800),
    "pathfinder": (128, 2e-4, 312),
    "image": (256, 1e-4, 175),
}


@pytest.mark.parametrize("task", PAPER)
def test_the_papers_values_are_the_defaults(task):
    settings = settings_for(task=task)
    options = name_value_pairs(settings.attention_options)
    assert (settings.lr, options["eps"], options["mass_temperature"]) == PAPER[task]
    assert (settings.steps, settings.warmup_steps, settings.final_lr) == (50_000, 5_000, 0.1)
    lot = build_model(settings).blocks[0].attn.mechanism
    assert lot.eps == options["eps"]
    assert lot.pivots.mass_temperature == options["mass_temperature"]
    assert lot.config.solver.sweeps == 5


@pytest.mark.parametrize("task", SKYFORMER)
def test_skyformers_protocol(task):
    settings = settings_for(task=task, recipe="skyformer", attention="softmax")
    assert (settings.batch_size, settings.lr, settings.warmup_steps) == SKYFORMER[task]


@pytest.mark.parametrize("recipe", ["paper", "skyformer"])
def test_every_mechanism_has_its_recipe(recipe):
    for name in attention.names():
        build_model(settings_for(task="image", attention=name, recipe=recipe))


def test_what_is_chosen_wins_option_by_option():
    settings = settings_for(task="image", attention_options=("eps=1.0", "solver=newton"), lr=0.5)
    options = name_value_pairs(settings.attention_options)
    assert settings.lr == 0.5
    assert options == {"rank": 8, "eps": 1.0, "mass_temperature": 4.0, "solver": "newton"}


def test_fewer_steps_shorten_the_warm_up():
    assert settings_for(steps=1000).warmup_steps == 100
    assert settings_for(steps=1000, warmup_steps=7).warmup_steps == 7


def test_film_pairs_follow_retrieval():
    assert settings_for(task="film-pairs").lr == settings_for(task="retrieval").lr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "papre"], "paper"),
        (["--task", "imag"], "image"),
        (["--attention-options", "eps"], "name=value"),
        (["--attention", "sofmax"], "softmax"),
        (["--attention-options", "rnak=3"], "rank"),
    ],
)
def test_the_command_line_says_what_was_wrong(arguments, said, tmp_path):
    result = CliRunner().invoke(app, ["train", "lra", *arguments, "--data-dir", str(tmp_path)])
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert "Traceback" not in result.output
