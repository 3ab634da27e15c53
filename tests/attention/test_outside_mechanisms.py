"""Another package brings a mechanism: it is built, converted to and checked by name, and can be taken away."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import lotformer
from lotformer import attention
from lotformer.conversion import recipe
from support.small_models import torch_encoder


class Averaging(attention.Attention):
    """Every token reads the mean of the real values, times one learned number a head and the same for itself."""

    def __init__(self, head_dim: int, num_heads: int, *, start: float = 0.5, own: bool = True) -> None:
        super().__init__(head_dim, num_heads)
        self.share = nn.Parameter(torch.full((num_heads, 1, 1), start))
        self.own = own

    def attend(self, inputs: attention.Inputs) -> Tensor:
        q, k, v, key_mask, *_ = inputs
        real = torch.ones_like(k[:, :, :, :1], dtype=torch.bool) if key_mask is None else key_mask[:, None, :, None]
        values = v.masked_fill(~real, 0).float()
        mean = values.sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp_min(1)
        out = self.share.float() * mean.expand(*q.shape[:3], -1)
        if self.own and q.shape[2] == k.shape[2]:
            out = out + (1 - self.share.float()) * values
        return inputs.finished(out)


class Careless(Averaging):
    """Forgets that there is padding, and mixes samples."""

    def attend(self, inputs: attention.Inputs) -> Tensor:
        return self.share * inputs.v.mean((0, 2), keepdim=True).expand(*inputs.q.shape[:3], -1)


def cost(n: int, d: int, **_: object) -> attention.Cost:
    return attention.Cost(flops=4.0 * n * d, bytes=16.0 * n * d)


def entry(name: str = "averaging", build=Averaging, **promises: object) -> attention.Entry:
    return attention.Entry(name, build, "The mean of all values.", "nobody", cost, time="n", **promises)


@pytest.fixture
def averaging():
    attention.register(entry())
    yield
    attention.unregister("averaging")


def test_it_keeps_the_promises_of_the_registry(averaging):
    attention.check("averaging", start=0.4)


def test_a_check_names_every_promise_that_is_broken_and_leaves_the_random_numbers_alone():
    attention.register(entry("careless", Careless))
    before = torch.get_rng_state()
    try:
        with pytest.raises(AssertionError, match=r"'careless' breaks . of 12 promises") as failure:
            attention.check("careless")
    finally:
        attention.unregister("careless")
    assert torch.equal(torch.get_rng_state(), before)
    for promise in ("the contents of padding never matter", "samples do not depend on their batch"):
        assert f"- {promise}: " in str(failure.value)
    assert "every input and parameter gets a gradient" not in str(failure.value)


def test_a_wrong_cost_is_seen():
    attention.register(attention.Entry("averaging", Averaging, "", "", cost, time="n²"))
    try:
        with pytest.raises(AssertionError, match=r"its time is n², its flops grow as n\^1.00"):
            attention.check("averaging")
    finally:
        attention.unregister("averaging")


def test_it_is_found_by_name_until_it_is_taken_away():
    attention.register(entry())
    assert attention.names()[-1] == "averaging"
    layer = lotformer.AttentionLayer(16, 2, "averaging", start=0.25)
    assert layer(torch.randn(2, 5, 16)).shape == (2, 5, 16)
    assert bool((layer.mechanism.share == 0.25).all())
    attention.unregister("averaging")
    assert "averaging" not in attention.names()
    with pytest.raises(ValueError, match="Unknown mechanism 'averaging'"):
        lotformer.AttentionLayer(16, 2, "averaging")
    assert layer(torch.randn(2, 5, 16)).shape == (2, 5, 16)  # what is built stays


def test_a_model_is_converted_to_it_saved_loaded_and_reverted(averaging, tmp_path):
    model, batch = torch_encoder(), torch.randn(2, 16, 24)
    original = model(batch)
    lotformer.convert(model, "averaging", start=0.25)
    assert recipe(model).mechanism == "averaging"
    after = model(batch)
    lotformer.conversion.save(model, tmp_path / "model.safetensors")
    again = torch_encoder()
    lotformer.conversion.load(again, tmp_path / "model.safetensors")
    assert torch.equal(again(batch), after)
    lotformer.revert(model)
    assert torch.equal(model(batch), original)


def test_its_options_are_checked_by_their_annotations(averaging):
    with pytest.raises(ValueError, match="start must be a finite number, got 'half'"):
        lotformer.convert(torch_encoder(), "averaging", start="half")
    with pytest.raises(ValueError, match="own must be True or False, got 3"):
        lotformer.convert(torch_encoder(), "averaging", own=3)
    with pytest.raises(ValueError, match=r"does not take these options: star\. Did you mean 'start'"):
        lotformer.convert(torch_encoder(), "averaging", star=1.0)


def from_a_function(head_dim: int, num_heads: int, start=0.5) -> Averaging:
    return Averaging(head_dim, num_heads, start=start)


@pytest.mark.parametrize("build", [from_a_function, partial(Averaging, own=False)], ids=["function", "partial"])
def test_it_may_be_built_by_anything_that_can_be_called(build):
    attention.register(entry(build=build))
    try:
        model = torch_encoder()
        lotformer.convert(model, "averaging", start=0.25)
        assert recipe(model).options == {"start": 0.25}
    finally:
        attention.unregister("averaging")


class TestRefusals:
    def test_a_name_that_is_taken(self, averaging):
        with pytest.raises(ValueError, match=r"'averaging' already .*or unregister\('averaging'\) first"):
            attention.register(entry())
        with pytest.raises(ValueError, match=r"'softmax' already \(Softmax attention .*\): choose another name\.$"):
            attention.register(entry("softmax"))

    def test_what_is_no_entry(self):
        with pytest.raises(TypeError, match=r"expected a lotformer\.attention\.Entry, got .*Averaging"):
            attention.register(Averaging)

    def test_a_build_that_does_not_take_the_heads(self):
        with pytest.raises(TypeError, match="must take head_dim and num_heads by keyword"):
            attention.register(entry(build=lambda dim: None))

    @pytest.mark.parametrize("name", ["lot", "averaging"])
    def test_taking_away_what_was_not_registered(self, name):
        with pytest.raises(ValueError, match=f"no mechanism '{name}' was registered"):
            attention.unregister(name)
