"""A recipe is checked against a schema and the weights beside it before anything is allocated; all or nothing."""

from __future__ import annotations

import json
import resource

import numpy
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lotformer
from lotformer import attention, conversion
from lotformer.conversion.recipe import Recipe
from support.small_models import SMALL, output, torch_encoder

GOOD = {"version": 2, "mechanism": "lot", "options": {"rank": 5}, "layers": ["encoder.layer.0.attention.self"]}

NESTED = {**GOOD, "version": 3, "config": {"rank": 5}}
del NESTED["options"]


def nested(**config):
    return {**NESTED, "config": config}


STRANGE = {
    "text": ("v1", "must be a table, got 'v1'"),
    "number": (3, "must be a table, got 3"),
    "empty": ({}, "version 2 or 3 is expected, got version None"),
    "list": ([GOOD], "must be a table"),
    "older": ({**GOOD, "version": 1}, "version 2 or 3 is expected, got version 1"),
    "newer": ({**GOOD, "version": 4}, "version 2 or 3 is expected, got version 4"),
    "a key too many": ({**GOOD, "code": "x"}, "holds version, mechanism, options and layers"),
    "a mechanism that is no name": ({**GOOD, "mechanism": ["lot"]}, "must be a name"),
    "an unknown mechanism": ({**GOOD, "mechanism": "lott"}, "Unknown mechanism 'lott'"),
    "options that are no table": ({**GOOD, "options": [1]}, "options of a lotformer recipe must be a table"),
    "the model": ({**GOOD, "options": {"model": "x"}}, "does not take these options: model"),
    "the probe": ({**GOOD, "options": {"probe": [1]}}, "does not take these options: probe"),
    "the layers as an option": ({**GOOD, "options": {"layers": ["x"]}}, "does not take these options: layers"),
    "the shape of the site": ({**GOOD, "options": {"head_dim": 4}}, "does not take these options: head_dim"),
    "no layers": ({**GOOD, "layers": []}, "must be a list of names"),
    "layers that are no names": ({**GOOD, "layers": [1]}, "must be a list of names"),
    "a huge rank": ({**GOOD, "options": {"rank": 10**7}}, "rank must be an integer of at most 1,048,576, got 10000000"),
    "a fractional rank": ({**GOOD, "options": {"rank": 8.0}}, "rank must be an integer"),
    "a boolean rank": ({**GOOD, "options": {"rank": True}}, "rank must be an integer"),
    "an infinite eps": ({**GOOD, "options": {"eps": float("inf")}}, "eps must be a finite number"),
    "an eps in words": ({**GOOD, "options": {"eps": "small"}}, "eps must be a finite number"),
    "flat options in the newest version": ({**GOOD, "version": 3}, "holds version, mechanism, config and layers"),
    "a configuration of old": ({**NESTED, "version": 2}, "holds version, mechanism, options and layers"),
    "a configuration that is no table": ({**NESTED, "config": [1]}, "config of a lotformer recipe must be a table"),
    "an option of no part": (nested(window_size=9), "a LOTConfig holds rank, .*, got window_size"),
    "a window without a kind": (nested(window={"size": 9}), "the window of a LOTConfig must hold kind"),
    "a window in a word": (nested(window="1d"), "the window of a LOTConfig must be a table, got '1d'"),
    "a solver in a word": (nested(solver="newton"), "the solver must be one of 'sinkhorn', 'newton', got None"),
    "sweeps of newton": (nested(solver={"name": "newton", "sweeps": 3}), "solver of a LOTConfig holds tol, got sweeps"),
    "a huge nested rank": (nested(rank=10**7), "rank must be an integer of at most 1,048,576, got 10000000"),
    "a number beyond floats": (nested(eps=10**400), "eps must be above 0, got 1000"),
    "an unknown choice": ({**GOOD, "options": {"solver": "magic"}}, "solver must be one of 'sinkhorn', 'newton'"),
}


@pytest.fixture
def folder(tmp_path):
    """A converted BERT, saved: its folder, and how to rewrite the recipe in its config.json."""
    model = SMALL["bert"].build()
    lotformer.convert(model, rank=5)
    model.save_pretrained(tmp_path)

    def rewrite(recipe):
        config = json.loads((tmp_path / "config.json").read_text())
        config["lotformer"] = recipe(config["lotformer"]) if callable(recipe) else recipe
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return rewrite


@pytest.mark.parametrize("kind", STRANGE)
class TestStrangers:
    def test_in_a_config(self, kind, folder):
        written, message = STRANGE[kind]
        with pytest.raises(ValueError, match=message) as caught:
            transformers.BertModel.from_pretrained(folder(written))
        assert "lotformer" in str(caught.value)

    def test_in_a_file(self, kind, tmp_path):
        written, message = STRANGE[kind]
        model, batch = torch_encoder(), torch.randn(2, 9, 24)
        before = output(model, batch)
        save_file(model.state_dict(), tmp_path / "model.safetensors", {"lotformer": json.dumps(written)})
        with pytest.raises(ValueError, match=message):
            conversion.load(model, tmp_path / "model.safetensors")
        assert torch.equal(output(model, batch), before)


SENSELESS = {
    "a negative tolerance": ({"solver": "newton", "tol": -1.0}, "tol must be a number between 0 and 1"),
    "a tolerance of one": ({"solver": "newton", "tol": 1.0}, "tol must be a number between 0 and 1"),
    "a huge scale": ({"scale": 1e300}, "scale must be of a size between 1e-06 and 1e"),
    "a scale of zero": ({"scale": 0.0}, "scale must be above 0"),
    "a huge eps": ({"eps": 1e308}, "eps must be between 1e-06 and 1e"),
    "a tiny eps": ({"eps": 1e-308}, "eps must be between 1e-06"),
    "no sweep": ({"solver": "sinkhorn", "iters": 0}, "iters must be at least 1"),
    "an unknown backend": ({"backend": "nonsense"}, "backend must be None or one of 'cpu', 'triton', 'reference'"),
    "a tiny temperature": ({"mass_temperature": 1e-300}, "mass_temperature must be between"),
    "a huge beta": ({"prefix_tokens": 1, "prefix_beta": 1e300}, "prefix_beta must be between"),
    "a huge power": (
        {"prefix_tokens": 1, "polarize_prefix": True, "prefix_beta": 1.0, "polarize_powers": [1e300, 1.0]},
        "the powers of polarisation must be",
    ),
}


def changed(recipe, options):
    """The recipe in the form of version 2, in which every option can be written down."""
    flat = lotformer.LOTConfig.from_dict(recipe["config"]).to_options()
    return {"version": 2, "mechanism": "lot", "options": flat | options, "layers": recipe["layers"]}


@pytest.mark.parametrize("kind", SENSELESS)
class TestSenseless:
    """Of the right type, but no forward can run with it."""

    def test_in_a_layer(self, kind):
        options, message = SENSELESS[kind]
        with pytest.raises(ValueError, match=message):
            lotformer.LOTAttention(24, 3, **options)

    def test_in_a_config(self, kind, folder):
        options, message = SENSELESS[kind]
        path = folder(lambda recipe: changed(recipe, options))
        with pytest.raises(ValueError, match=rf"'lotformer' in the config of .*{message}"):
            transformers.BertModel.from_pretrained(path)

    def test_in_a_file(self, kind, tmp_path):
        options, message = SENSELESS[kind]
        model, path, batch = torch_encoder(), tmp_path / "model.safetensors", torch.randn(2, 9, 24)
        lotformer.convert(model, rank=5)
        conversion.save(model, path)
        with safe_open(path, "pt") as file:
            recipe = json.loads(file.metadata()["lotformer"])
        save_file(load_file(path), path, {"lotformer": json.dumps(changed(recipe, options))})
        fresh = torch_encoder()
        before = output(fresh, batch)
        with pytest.raises(ValueError, match=message):
            conversion.load(fresh, path)
        assert torch.equal(output(fresh, batch), before)
        assert not any(".mechanism" in name for name, _ in fresh.named_modules())


class TestShapes:
    """The recipe asks for mechanisms that are not the ones in the file: refused before they are built."""

    def test_of_a_checkpoint(self, folder):
        path = folder(lambda recipe: recipe | {"config": recipe["config"] | {"rank": 2**20}})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=r"recipe and weights in .* disagree: .*pivots.* has the shape \(3, 5"):
            transformers.BertModel.from_pretrained(path)
        # one mechanism of this rank takes 96 MiB; kilobytes on Linux
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000

    @pytest.mark.parametrize("loader", ["BertModel", "BertForSequenceClassification"])
    def test_layers_that_the_recipe_does_not_name(self, loader, folder):
        """Their mechanisms would be dropped and softmax would run with weights that were trained for them."""
        path = folder(lambda recipe: recipe | {"layers": [recipe["layers"][0], "encoder.layer.7.attention.self"]})
        with pytest.raises(ValueError, match=r"disagree: the file holds encoder\.layer\.1\..*does not name its layer"):
            getattr(transformers, loader).from_pretrained(path)

    @pytest.mark.parametrize("change", ["rank", "missing", "unexpected", "host"])
    def test_of_a_file_all_or_nothing(self, change, tmp_path):
        model, path = torch_encoder(), tmp_path / "model.safetensors"
        lotformer.convert(model, rank=5)
        conversion.save(model, path)
        with safe_open(path, "pt") as file:
            recipe = json.loads(file.metadata()["lotformer"])
        state = load_file(path)
        if change == "rank":
            recipe["config"]["rank"] = 2**20
        elif change == "missing":
            del state[next(name for name in state if ".mechanism." in name)]
        elif change == "unexpected":
            state["more"] = torch.zeros(2)
        else:
            state["layers.1.linear2.bias"] = torch.zeros(7)
        save_file(state, path, {"lotformer": json.dumps(recipe)})

        fresh, batch = torch_encoder(), torch.randn(2, 9, 24)
        before = output(fresh, batch)
        with pytest.raises(ValueError, match="does not fit TransformerEncoder"):
            conversion.load(fresh, path)
        assert torch.equal(output(fresh, batch), before)
        assert not any(".mechanism" in name for name, _ in fresh.named_modules())
        lotformer.convert(fresh, rank=5)

    def test_tied_weights_are_written_once_and_fit(self, tmp_path):
        def build():
            encoder = torch_encoder()
            encoder.layers[1].linear1.weight = encoder.layers[0].linear1.weight
            return encoder

        model, again, batch = build(), build(), torch.randn(2, 9, 24)
        lotformer.convert(model, rank=5)
        conversion.save(model, tmp_path / "model.safetensors")
        conversion.load(again, tmp_path / "model.safetensors")
        assert torch.equal(output(again, batch), output(model, batch))


@pytest.mark.parametrize("name", attention.names())
def test_every_mechanism_survives_json(name):
    options = {"max_length": 16} if attention.entry(name).fixed_length else {}
    model = torch_encoder()
    lotformer.convert(model, name, **options)
    recipe = conversion.recipe(model)
    assert recipe.layers == ("layers.0.self_attn", "layers.1.self_attn")
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_tuples_survive_json():
    options = {"prefix_tokens": 1, "polarize_prefix": True, "polarize_powers": (1.0, 2.0)}
    recipe = Recipe("lot", options, ("a",))
    assert Recipe.from_json(recipe.to_json()).options["polarize_powers"] == (1.0, 2.0)


def test_a_polarised_prefix_states_its_temperature():
    recipe = Recipe("lot", {"prefix_tokens": 1, "polarize_prefix": True}, ("a",))
    assert recipe.options["prefix_beta"] == 1.0
    assert Recipe.from_json(recipe.to_json()) == recipe
    old = {"version": 2, "mechanism": "lot", "layers": ["a"]}
    with pytest.raises(ValueError, match="must state prefix_beta"):
        Recipe.from_dict({**old, "options": {"prefix_tokens": 1, "polarize_prefix": True}})


class TestCalls:
    """The same checks meet whoever calls `convert`."""

    @pytest.mark.parametrize("name", ["bert-base-uncased", "./folder"])
    def test_a_name_is_no_model(self, name):
        with pytest.raises(TypeError, match=rf"expected a model, got the name '{name}': .*AutoModel.from_pretrained"):
            lotformer.convert(name)

    @pytest.mark.parametrize("thing", [None, 3, {"a": 1}, torch.zeros(2), torch.nn.Linear])
    @pytest.mark.parametrize("function", [lotformer.convert, lotformer.revert])
    def test_things_are_no_models(self, thing, function):
        with pytest.raises(TypeError, match="expected a model"):
            function(thing)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rank": 8.0}, "rank must be an integer of at most 1,048,576, got 8.0"),
            ({"rank": "8"}, "rank must be an integer"),
            ({"rank": True}, "rank must be an integer"),
            ({"eps": None}, "eps must be a finite number, got None"),
            ({"key_masses": "none"}, "key_masses must be one of 'uniform'"),
            ({"learn_eps": 1}, "learn_eps must be True or False, got 1"),
            ({"polarize_powers": (1.0,)}, r"polarize_powers must be a tuple \(a finite number, a finite number\)"),
            ({"ranks": 8}, "does not take these options: ranks. Did you mean 'rank'"),
            ({"layers": "layers.0.self_attn"}, "layers must be a list of names"),
        ],
    )
    def test_options_of_the_wrong_kind(self, options, message):
        model, batch = torch_encoder(), torch.randn(2, 9, 24)
        before = output(model, batch)
        with pytest.raises(ValueError, match=message):
            lotformer.convert(model, **options)
        assert torch.equal(output(model, batch), before)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"iters": 20}, 'iters=20 needs sweeps: solver="sinkhorn"'),
            ({"solver": "sinkhorn", "tol": 1e-5}, "tol=1e-05 needs the exact solver"),
            ({"kernel_size": 4}, "kernel_size=4 needs a convolution"),
            ({"prefix_beta": 2.0}, "prefix_beta=2.0 needs a prefix"),
            ({"config": lotformer.LOTConfig(), "rank": 8}, "config=… holds every option of LOT: put rank into it"),
            ({"config": lotformer.LOTConfig(), "window": "1d"}, "put window into it"),
            ({"config": lotformer.LOTConfig(), "mechanism": "performer"}, "describes LOT, but .* 'performer'"),
        ],
    )
    def test_options_without_their_part(self, options, message):
        model = torch_encoder()
        with pytest.raises(ValueError, match=message):
            lotformer.convert(model, **options)
        assert not any(".mechanism" in name for name, _ in model.named_modules())

    def test_numbers_of_numpy_are_numbers(self, tmp_path):
        model = torch_encoder()
        lotformer.convert(model, rank=numpy.int64(5), eps=numpy.float64(0.5), mass_temperature=numpy.float32(2))
        options = lotformer.conversion.recipe(model).options
        assert [type(options[name]) for name in ("rank", "eps", "mass_temperature")] == [int, float, float]
        lotformer.conversion.save(model, tmp_path / "saved")  # JSON knows no numpy

    def test_other_mechanisms_too(self):
        with pytest.raises(ValueError, match=r"features must be an integer of at most 1,048,576 or None, got 3\.5"):
            lotformer.convert(torch_encoder(), "performer", features=3.5)
