"""What `convert` asks of LOT by itself: what each kind of model needs, and transport alone where that was asked for."""

from __future__ import annotations

import pytest
import transformers

import lotformer
from lotformer.conversion import recipe
from support.small_models import SMALL

WINDOWS = {
    "bert": ("1d", 0),
    "distilbert": ("1d", 0),
    "marian": ("1d", 0),
    "vit": ("2d", 1),
    "timm-vit": ("2d", 1),
    "torch-encoder": (None, 0),
}


def asked(kind: str, **options: object) -> dict[str, object]:
    model = SMALL[kind].build()
    lotformer.convert(model, rank=3, **options)
    return dict(recipe(model).options)


@pytest.mark.parametrize("kind", WINDOWS)
def test_tokens_read_their_neighbours_where_it_is_known_who_they_are(kind):
    options = asked(kind)
    assert (options.get("window"), options.get("prefix_tokens", 0)) == WINDOWS[kind]
    assert options["pivots"] == "input-aware"


@pytest.mark.parametrize("kind", WINDOWS)
def test_whoever_asks_for_uniform_masses_gets_transport_alone(kind):
    options = asked(kind, key_masses="uniform")
    assert options.get("window") is None
    assert not options.get("prefix_tokens")


def test_what_was_asked_for_wins():
    assert asked("bert", window=None)["window"] is None
    assert asked("vit", window_size=3)["window_size"] == 3
    assert asked("bert", key_masses="uniform", window="1d")["window"] == "1d"


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_checkpoint_that_is_converted_as_it_loads_gets_the_same(kind, tmp_path):
    model = SMALL[kind].build()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="lot")
    lotformer.convert(model)
    assert recipe(loaded) == recipe(model)
