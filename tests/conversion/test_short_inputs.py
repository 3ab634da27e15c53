"""Inputs on which softmax is faster are read by softmax, exactly; what is learned and said is said of LOT."""

from __future__ import annotations

import dataclasses
import random

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lotformer
from lotformer import conversion
from lotformer.attention import LOTConfig, build
from lotformer.conversion import defaults
from lotformer.conversion.hosts.sites import converted, mechanism_of, softmax_up_to, transporting
from lotformer.conversion.measuring import break_even as measuring
from lotformer.conversion.measuring.break_even import break_even
from lotformer.conversion.recipe import Recipe

HEADS, DIM = 3, 8


def lot(**options):
    torch.manual_seed(0)
    return build("lot", head_dim=DIM, num_heads=HEADS, rank=4, solver="newton", pivot_init="unit", **options).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, batch, HEADS, length, DIM, generator=torch.Generator().manual_seed(seed))


def bert() -> transformers.BertModel:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=60,
        max_position_embeddings=80, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def ids(length: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def states(model: nn.Module, length: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model(input_ids=ids(length), attention_mask=mask).last_hidden_state


def length_of(model: nn.Module) -> set[int]:
    return {mechanism_of(module).config.softmax_up_to for _, module in converted(model)}


class TestTheMechanism:
    @given(
        length=st.integers(2, 20),
        limit=st.integers(1, 20),
        padded=st.integers(0, 19),
        window=st.sampled_from([None, "1d"]),
        prefix=st.integers(0, 2),
    )
    @torch.no_grad()
    def test_up_to_its_length_it_is_softmax_and_from_there_on_lot(self, length, limit, padded, window, prefix):
        options = {"window": window, "prefix_tokens": prefix, "key_masses": "query-aware"}
        short, always = lot(softmax_up_to=limit, **options), lot(**options)
        q, k, v = tokens(2, length)
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[1, length - min(padded, length - 1) :] = False
        out = short(q, k, v, mask, mask)
        if length > limit:
            assert torch.equal(out, always(q, k, v, mask, mask))
            assert not short.is_softmax(length) or window == "1d"
            return
        assert short.is_softmax(length)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        torch.testing.assert_close(out, expected * mask[:, None, :, None])

    @torch.no_grad()
    def test_the_padded_length_decides_and_no_value_does(self):
        short, always = lot(softmax_up_to=10), lot()
        q, k, v = tokens(2, 11)
        mask = torch.zeros(2, 11, dtype=torch.bool)
        mask[:, :3] = True
        assert torch.equal(short(q, k, v, mask, mask), always(q, k, v, mask, mask))

    def test_padding_may_hold_anything(self):
        short = lot(softmax_up_to=10)
        q, k, v = tokens(2, 6)
        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[0, 4:], mask[1, :] = False, False
        with torch.no_grad():
            clean = short(q, k, v, mask, mask)
            dirty = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (q, k, v)]
            torch.testing.assert_close(short(*dirty, mask, mask), clean)
            assert (clean[1] == 0).all()

    def test_while_gradients_are_recorded_it_is_lot(self):
        q, k, v = tokens(2, 6)
        assert torch.equal(lot(softmax_up_to=10)(q, k, v), lot()(q, k, v))
        out = (mechanism := lot(softmax_up_to=10))(q, k, v)
        out.square().sum().backward()
        assert all(p.grad is not None for p in mechanism.pivots.parameters())

    def test_an_exported_model_is_lot_at_every_length(self):
        q, k, v = tokens(1, 12)
        with torch.no_grad():
            exported = torch.export.export(
                lot(softmax_up_to=20), (q, k, v), dynamic_shapes=[{2: torch.export.Dim("n", min=4, max=64)}] * 3
            ).module()
            torch.testing.assert_close(exported(q, k, v), lot()(q, k, v))

    def test_keys_of_another_input_count(self):
        q, k, v = tokens(1, 4)[0], *tokens(1, 30, seed=1)[1:]
        with torch.no_grad():
            assert torch.equal(lot(softmax_up_to=10)(q, k, v), lot()(q, k, v))

    def test_it_is_compiled_whole(self):
        short = lot(softmax_up_to=10)
        compiled = torch.compile(short, fullgraph=True, backend="eager", dynamic=False)
        with torch.no_grad():
            for length in (8, 12):
                q, k, v = tokens(1, length)
                torch.testing.assert_close(compiled(q, k, v), short(q, k, v))

    def test_queries_and_keys_stay_formed(self):
        layer = lotformer.LOTAttention(24, 3, rank=4, softmax_up_to=10).eval()
        x = torch.randn(2, 7, 24)
        assert "softmax_up_to=10" in layer.mechanism.why_formed()
        with torch.no_grad():
            q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
            expected = layer.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            torch.testing.assert_close(layer(x), expected)

    @pytest.mark.parametrize("length", [-1, 2.5, True])
    def test_it_is_a_number_of_tokens(self, length):
        with pytest.raises(ValueError, match="softmax_up_to"):
            lot(softmax_up_to=length)


class TestTheMeasurement:
    CONFIG = dataclasses.replace(LOTConfig.for_text(), rank=4)

    def test_it_is_a_length_and_measured_once(self, monkeypatch):
        measuring._measured.cache_clear()
        found = break_even(3, 8, self.CONFIG, torch.zeros(1))
        assert 0 <= found <= 4096
        monkeypatch.setattr(measuring, "_ratio", lambda *_: pytest.fail("measured again"))
        assert break_even(3, 8, self.CONFIG, torch.zeros(1)) == found

    def test_random_numbers_stay_as_they_were(self):
        measuring._measured.cache_clear()
        state = torch.get_rng_state(), random.getstate()
        break_even(3, 8, self.CONFIG, torch.zeros(1))
        assert torch.equal(torch.get_rng_state(), state[0])
        assert random.getstate() == state[1]

    @given(crossing=st.floats(30, 6000))
    def test_it_finds_where_lot_begins_to_win(self, crossing):
        """A machine on which LOT's gain grows with the length, as `length / crossing`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "_ratio", lambda softmax, lot: measuring._GAIN * softmax().shape[2] / crossing)
            measuring._measured.cache_clear()
            found = break_even(1, 8, dataclasses.replace(self.CONFIG, window=None), torch.zeros(1))
        measuring._measured.cache_clear()
        if crossing <= 64:
            assert found == 0
        elif crossing > 4096:
            assert found == 4096
        else:
            assert found == pytest.approx(crossing, rel=0.01)

    def test_images_are_measured_on_their_grid_with_their_special_tokens(self, monkeypatch):
        seen = set()

        def ratio(softmax, lot):
            lot()
            seen.add(softmax().shape[2])
            return 2.0

        monkeypatch.setattr(measuring, "_ratio", ratio)
        measuring._measured.cache_clear()
        break_even(2, 8, dataclasses.replace(LOTConfig.for_images(2), rank=4), torch.zeros(1))
        measuring._measured.cache_clear()
        assert {int((n - 2) ** 0.5) ** 2 + 2 for n in seen} == seen


@pytest.mark.small_windows
class TestConversion:
    @pytest.fixture(autouse=True)
    def _measured(self, monkeypatch):
        monkeypatch.setattr(defaults, "break_even", lambda *_: 30)

    def test_short_texts_come_out_as_they_did(self):
        model = bert()
        mask = torch.ones(2, 30, dtype=torch.long)
        mask[1, 20:] = 0
        before, padded, longer = states(model, 30), states(model, 30, mask), states(model, 31)
        report = lotformer.convert(model, rank=4)
        torch.testing.assert_close(states(model, 30), before)
        torch.testing.assert_close(states(model, 30, mask)[mask.bool()], padded[mask.bool()])
        assert (states(model, 31) - longer).abs().max() > 1e-3
        assert report.softmax_up_to == {"inputs": 30}
        assert "reads inputs of up to 30 tokens, padding included, by softmax" in str(report)
        assert report.probe is not None
        assert report.probe.relative_change > 1e-3

    @pytest.mark.parametrize("asked", [0, 12])
    def test_whoever_says_a_length_is_obeyed(self, asked):
        model = bert()
        report = lotformer.convert(model, rank=4, softmax_up_to=asked)
        assert length_of(model) == {asked}
        assert ("by softmax, which is faster" in str(report)) == bool(asked)

    @pytest.mark.parametrize(
        "asked", [{"window": None}, {"key_masses": "uniform"}, {"config": LOTConfig.for_text()}], ids=str
    )
    def test_whoever_asks_for_transport_alone_or_says_everything_gets_lot_at_every_length(self, asked):
        model = bert()
        lotformer.convert(model, **asked)
        assert length_of(model) == {0}

    def test_it_is_saved(self, tmp_path):
        model = bert()
        lotformer.convert(model, rank=4)
        model.save_pretrained(tmp_path)
        again = transformers.AutoModel.from_pretrained(tmp_path).eval()
        assert length_of(again) == {30}
        assert conversion.recipe(again) == conversion.recipe(model)
        assert torch.equal(states(again, 25), states(model, 25))

    def test_recipes_that_do_not_know_of_it_read_everything_by_lot(self):
        written = Recipe("lot", {"rank": 4}, ("a",)).to_dict()
        del written["config"]["softmax_up_to"]
        assert Recipe.from_dict(written).options["softmax_up_to"] == 0

    def test_towers_have_a_length_each(self, monkeypatch):
        monkeypatch.setattr(
            defaults, "break_even", lambda heads, dim, config, like: {"1d": 11, "2d": 9}[config.window.kind]
        )
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
        text = {**sizes, "vocab_size": 60, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.SiglipConfig(
            text_config={**text, "pad_token_id": 0}, vision_config={**sizes, "image_size": 20, "patch_size": 5}
        )
        model = transformers.SiglipModel(config)
        report = lotformer.convert(model, rank=4)
        assert report.softmax_up_to == {"text": 11, "image": 9}
        found = {mechanism_of(module).near.kind: mechanism_of(module).config for _, module in converted(model)}
        assert {kind: own.softmax_up_to for kind, own in found.items()} == {"1d": 11, "2d": 9}

    def test_images_of_few_patches_come_out_as_they_did(self):
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=20, patch_size=4, embed_dim=24, num_heads=3, depth=2, num_classes=5
        ).eval()
        pixels = torch.randn(2, 3, 20, 20)
        with torch.no_grad():
            before = model(pixels)
            lotformer.convert(model, rank=4)
            torch.testing.assert_close(model(pixels), before)
            with transporting(model):
                assert (model(pixels) - before).abs().max() > 1e-5

    def test_it_cannot_be_folded_and_says_why(self):
        model = bert()
        lotformer.convert(model, rank=4, window=None, pivots="fixed", softmax_up_to=20)
        with pytest.raises(ValueError, match="softmax_up_to=20"):
            lotformer.fold(model)

    def test_calibration_teaches_lot_on_short_texts_and_says_that_they_are_read_by_softmax(self):
        model = bert()
        lotformer.convert(model, rank=4)
        report = lotformer.calibrate(model, [{"input_ids": ids(24, 4, seed)} for seed in range(8)], steps=40)
        assert report.mean_error_after < 0.9 * report.mean_error_before
        assert report.forecast is not None
        assert report.forecast.cosine < 1 - 1e-5, "what is said is said of LOT"
        assert "inputs this short, of up to 30 tokens, by softmax" in str(report)
        assert length_of(model) == {30}

    def test_what_is_learned_does_not_depend_on_it(self):
        learned = []
        for length in (0, 30):
            model = bert()
            torch.manual_seed(1)
            lotformer.convert(model, rank=4, softmax_up_to=length)
            batches = [{"input_ids": ids(24, 4, seed)} for seed in range(6)]
            calibrated = lotformer.calibrate(model, batches, steps=20, evaluate_every=5)
            tuned = lotformer.finetune(model, batches, steps=10, evaluate_every=5)
            assert length_of(model) == {length}
            learned.append((model.state_dict(), calibrated.error_after, calibrated.forecast, tuned.held_after))
        assert learned[0][1:] == learned[1][1:]
        assert all(torch.equal(learned[0][0][name], value) for name, value in learned[1][0].items())

    def test_an_interrupted_calibration_goes_on_whatever_was_measured(self, monkeypatch, tmp_path):
        batches = [{"input_ids": ids(24, 4, seed)} for seed in range(6)]

        class Enough(Exception):
            pass

        def stop(step: int, steps: int, loss: float) -> None:
            if step == 10:
                raise Enough

        for length, on_step in ((30, stop), (41, None)):
            monkeypatch.setattr(defaults, "break_even", lambda *_, length=length: length)
            model = bert()
            torch.manual_seed(1)
            lotformer.convert(model, rank=4)
            options = {"steps": 20, "evaluate_every": 5, "checkpoint": tmp_path / "progress"}
            if on_step is None:
                assert lotformer.calibrate(model, batches, **options).steps == 20
            else:
                with pytest.raises(Enough):
                    lotformer.calibrate(model, batches, on_step=on_step, **options)

    def test_couplings_of_short_texts_are_looked_at(self):
        model = bert()
        lotformer.convert(model, rank=4)
        quality = conversion.coupling_quality(model, [{"input_ids": ids(24)}])
        assert quality is not None
        assert quality.residual_max is not None, "there are plans to look at"

    def test_layers_are_chosen_by_what_lot_does(self):
        report = lotformer.convert(bert(), rank=4, layers="auto", budget=1, probe={"input_ids": ids(24)})
        assert len(report.converted) == 1

    def test_softmax_is_back_even_after_an_error(self):
        model = bert()
        lotformer.convert(model, rank=4)
        inside = []

        def fail() -> None:
            with transporting(model):
                inside.append(softmax_up_to(model))
                raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            fail()
        assert inside == [0]
        assert softmax_up_to(model) == 30


def test_a_conversion_measures(monkeypatch):
    """The real thing, once: what is measured is stored, and the same for a second model of this shape."""
    monkeypatch.setattr(defaults, "break_even", break_even)
    models = [bert(), bert()]
    for model in models:
        lotformer.convert(model, rank=4)
    assert conversion.recipe(models[0]) == conversion.recipe(models[1])
    assert length_of(models[0]) == {conversion.recipe(models[0]).options["softmax_up_to"]}
