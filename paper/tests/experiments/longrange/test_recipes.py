"""Recipes: the paper's values are LOT's defaults, and whatever is chosen wins."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lotformer import attention
from lotformer.cli.main import app
from lotformer.settings import name_value_pairs
from lotformer_paper.experiments.longrange.rows import as_printed
from lotformer_paper.experiments.longrange.settings import settings_for
from lotformer_paper.experiments.longrange.table import ArenaSettings
from lotformer_paper.experiments.longrange.task import build_model
from lotformer_paper.results.paper import TABLE_2

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


AUTHORS = {  # task: batch size, learning rate, warm-up, steps, pivots, ε, sweeps
    "listops": (32, 1e-4, 5000, 50_000, 4, 0.1, 25),
    "pathfinder": (128, 1e-4, 5000, 60_000, 64, 0.1, 25),
    "retrieval": (16, 1e-4, 5000, 50_000, 64, 0.1, 25),
    "text": (32, 1e-4, 4000, 50_000, 32, 0.1, 25),
    "image": (64, 1e-3, 1000, 50_000, 8, 25.0, 2),
}


@pytest.mark.parametrize("task", AUTHORS)
def test_the_authors_code(task):
    s = settings_for(task=task, recipe="authors")
    options = name_value_pairs(s.attention_options)
    found = (s.batch_size, s.lr, s.warmup_steps, s.steps, options["rank"], options["eps"], options["iters"])
    assert found == AUTHORS[task]
    assert (s.final_lr, s.betas, s.clip_norm, s.weight_decay) == (0.4, (0.9, 0.98), 5.0, 0.0)
    assert s.brackets is (task != "listops")
    model = build_model(s)
    assert model.pooling == "published"
    lot = model.blocks[0].attn.mechanism
    assert lot.config.solver.sweeps == options["iters"]
    assert lot.config.pivots.init == "small"
    assert not lot.config.pivots.learn_masses


def test_the_papers_rows_stand_for_themselves_and_their_recipes_pool():
    settings = ArenaSettings(rows=("lot-exact", "paper", "lot"), recipe="authors")
    assert len(TABLE_2) == 21
    assert settings.rows == ("lot-exact", *TABLE_2)
    for name in TABLE_2:
        run = settings.run("image", name, 0)
        assert run.pooling == "published"
        build_model(run)
    assert settings.run("image", "lot-wide-pooled", 0).pooling == "learned"
    assert ArenaSettings().run("image", "lot", 0).pooling == "real"


def test_the_papers_names_and_numbers_stand_beside_rows_that_it_has():
    [table] = as_printed(["lot-exact", "polaformer+dwc", "local"], {"image": "Image", "text": "Text"})
    assert table.columns == ("Attention", "in the paper", "Image", "Text")
    assert table.rows == (
        ("polaformer+dwc", "PolaFormer†, α = 3", "42.15", "73.06"),
        ("local", "LocalAttn", "41.46", "52.98"),
    )
    assert as_printed(["lot-exact"], {"image": "Image"}) == []


@pytest.mark.parametrize("recipe", ["paper", "skyformer", "authors"])
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
