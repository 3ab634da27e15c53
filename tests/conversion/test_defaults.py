"""What `convert` asks of LOT by itself: what each kind of model needs, and transport alone where that was asked for."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace

import pytest
import torch
import transformers

import lotformer
from lotformer.conversion import defaults, recipe
from lotformer.conversion.hosts.sites import converted, mechanism_of
from lotformer_paper.experiments.forms import WIDE
from support.small_models import SMALL

WINDOWS = {
    "bert": ("1d", 129, 0),
    "distilbert": ("1d", 129, 0),
    "marian": ("1d", 129, 0),
    "vit": ("2d", 9, 1),
    "timm-vit": ("2d", 9, 1),
    "torch-encoder": (None, None, 0),
}


def asked(kind: str, **options: object) -> dict[str, object]:
    model = SMALL[kind].build()
    lotformer.convert(model, rank=3, **options)
    return dict(recipe(model).options)


def long_bert() -> transformers.BertModel:
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=60,
        max_position_embeddings=100,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


@pytest.mark.parametrize("kind", WINDOWS)
def test_tokens_read_their_neighbours_where_it_is_known_who_they_are(kind):
    options = asked(kind)
    assert (options.get("window"), options.get("window_size"), options.get("prefix_tokens", 0)) == WINDOWS[kind]
    assert options["pivots"] == "input-aware"


@pytest.mark.parametrize("kind", WINDOWS)
def test_whoever_asks_for_uniform_masses_gets_transport_alone(kind):
    options = asked(kind, key_masses="uniform")
    assert options.get("window") is None
    assert not options.get("prefix_tokens")


def test_texts_within_the_window_are_read_as_before_and_longer_ones_are_not():
    """65 tokens see each other, of 66 the first and the last do not."""
    model = long_bert()
    twice = copy.deepcopy(model)
    lotformer.convert(twice, rank=3)
    for tokens, alike in ((65, True), (66, False)):
        ids = torch.randint(3, 60, (2, tokens), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(2, tokens + 5, dtype=torch.long)
        mask[0, :5], mask[1, tokens:] = 0, 0
        padded = torch.zeros(2, tokens + 5, dtype=torch.long)
        padded[0, 5:], padded[1, :tokens] = ids
        with torch.no_grad():
            ours, theirs = (m(input_ids=padded, attention_mask=mask).last_hidden_state for m in (twice, model))
        assert torch.allclose(ours[mask.bool()], theirs[mask.bool()], atol=1e-5) == alike


def test_nothing_is_said_of_plans_that_are_not_used():
    model = long_bert()
    lotformer.convert(model, rank=3)
    short, long = ({"input_ids": torch.randint(3, 60, (2, tokens))} for tokens in (60, 70))
    assert lotformer.conversion.coupling_quality(model, [short]).residual_max is None
    assert lotformer.conversion.coupling_quality(model, [short, long]).residual_max < 1e-3


def test_the_fresh_model_is_probed_with_texts_longer_than_its_window():
    report = lotformer.convert(long_bert(), rank=3)
    assert report.probe is not None
    assert report.probe.relative_change > 1e-4


def test_layers_cannot_be_chosen_by_inputs_that_all_of_them_read_as_before():
    model, ids = SMALL["bert"].build(), torch.randint(3, 60, (2, 12))
    with pytest.raises(ValueError, match="within the window"):
        lotformer.convert(model, layers="auto", budget=1, probe={"input_ids": ids})
    assert not converted(model)


def test_the_form_that_experiments_call_wide_is_the_default():
    assert asked("bert") == {**asked("bert"), **WIDE}


@pytest.mark.parametrize(
    ("kind", "options"), [("torch-encoder", {}), ("bert", {"window": None}), ("bert", {"key_masses": "uniform"})]
)
def test_a_width_of_no_window_is_an_error(kind, options):
    model = SMALL[kind].build()
    with pytest.raises(ValueError, match="window_size=9 needs a window"):
        lotformer.convert(model, rank=3, window_size=9, **options)
    assert not converted(model)


def test_presets_are_what_convert_chooses():
    text, image = lotformer.LOTConfig.for_text(), lotformer.LOTConfig.for_images()
    assert asked("bert") == replace(text, rank=3).to_options()
    assert asked("timm-vit") == replace(image, rank=3).to_options()


@pytest.mark.parametrize("kind", ["bert", "timm-vit"])
def test_a_configuration_is_taken_as_it_is(kind):
    config = lotformer.LOTConfig(rank=3)
    model = SMALL[kind].build()
    report = lotformer.convert(model, config=config)
    assert report.options == recipe(model).options == config.to_options()
    assert all(mechanism_of(module).config == config for _, module in converted(model))


def test_what_was_asked_for_wins():
    assert asked("torch-encoder", window="1d")["window_size"] == 129
    assert asked("bert", window="2d", prefix_tokens=1)["prefix_tokens"] == 1
    assert asked("bert", window="2d")["window_size"] == 9, "a grid is not as wide as a text"
    assert asked("bert", window=None)["window"] is None
    assert asked("vit", window_size=3)["window_size"] == 3
    assert asked("bert", key_masses="uniform", window="1d")["window"] == "1d"


def dinov2() -> transformers.PreTrainedModel:
    """Its encoder is a model of its own, which does not know of the patches."""
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, mlp_ratio=1, image_size=20, patch_size=5
    )
    return transformers.Dinov2Model(config).eval()


LOADED = {"bert": SMALL["bert"].build, "vit": SMALL["vit"].build, "dinov2": dinov2}


@pytest.mark.parametrize("kind", LOADED)
def test_a_checkpoint_that_is_converted_as_it_loads_gets_the_same(kind, tmp_path):
    model = LOADED[kind]()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="lot")
    lotformer.convert(model)
    assert recipe(loaded) == recipe(model)


def test_a_model_whose_encoder_is_a_model_of_its_own_sees_its_grid_again(tmp_path):
    model, pixels = dinov2(), torch.randn(1, 3, 10, 40)  # as many patches as a square has
    lotformer.convert(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(pixels).last_hidden_state, model(pixels).last_hidden_state)


def test_a_window_that_a_model_cannot_have_is_refused_and_the_model_stays_as_it_was():
    """YOLOS has tokens behind its patches."""
    config = transformers.YolosConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=[20, 20],
        patch_size=5, num_detection_tokens=3,
    )  # fmt: skip
    model, pixels = transformers.YolosModel(config).eval(), torch.randn(1, 3, 20, 20)
    with pytest.raises(ValueError, match="window=None, prefix_tokens=0"):
        lotformer.convert(model, probe={"pixel_values": pixels})
    assert not converted(model)
    lotformer.convert(model, window=None, prefix_tokens=0)
    assert converted(model)


def test_the_defaults_of_convert_are_stated_once_in_words_and_once_in_its_signature():
    named = inspect.signature(lotformer.convert).parameters
    assert {name: named[name].default for name in defaults.DEFAULTS} == defaults.DEFAULTS
