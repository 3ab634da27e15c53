"""Speech models: tokens of sound read their neighbours as words do, and whatever has no window is named."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch import nn

import lotformer
from lotformer import conversion
from lotformer.conversion.hosts.sites import converted, mechanism_of
from support.small_models import torch_encoder
from support.small_speech import features, wav2vec2, whisper

pytestmark = pytest.mark.small_windows


def windows(model: nn.Module) -> set[tuple[str, int, int] | None]:
    lots = [mechanism_of(module) for _, module in converted(model)]
    configs = [lot.config for lot in lots]
    return {None if c.window is None else (c.window.kind, c.window.size, c.prefix_tokens) for c in configs}


class TestWhisper:
    def test_the_encoder_gets_a_window_and_the_decoder_stays_as_it_is(self):
        model = whisper()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = lotformer.convert(model, rank=4)
        assert [layer.name for layer in report.converted] == [f"model.encoder.layers.{i}.self_attn" for i in range(2)]
        assert windows(model) == {("1d", 5, 0)}
        assert report.probe is not None
        reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in report.skipped}
        assert "causal" in reasons["self_attn"]
        assert reasons["encoder_attn"] == "it is cross-attention"
        assert "left alone model.decoder.layers.1.encoder_attn" in str(report)

    def test_its_pivots_are_found_in_the_sound_unless_others_are_asked_for(self):
        def chosen(**options):
            model = whisper()
            return lotformer.convert(model, **options).options

        found = chosen()
        assert (found["pivots"], found["rank"], found["content"], found["balance"]) == ("found", 64, 2, "none")
        assert chosen(rank=32, content=0)["rank"] == 32
        assert chosen(window=None)["window"] is None
        for options in ({"pivots": "input-aware"}, {"eps": 0.2}, {"key_masses": "uniform"}, {"solver": "sinkhorn"}):
            other = chosen(**options)
            assert (other["pivots"], other["rank"], other["content"]) == ("input-aware", 32, 0)

    def test_a_window_that_holds_all_changes_no_word(self):
        model, inputs = whisper(), features()
        expected = model.generate(input_features=inputs, max_new_tokens=6, do_sample=False)
        with torch.no_grad():
            states = model.get_encoder()(inputs).last_hidden_state
        lotformer.convert(model, rank=4, window_size=2 * states.shape[1] + 1)
        with torch.no_grad():
            torch.testing.assert_close(model.get_encoder()(inputs).last_hidden_state, states)
        assert torch.equal(model.generate(input_features=inputs, max_new_tokens=6, do_sample=False), expected)

    def test_calibration_brings_its_states_closer(self):
        model = whisper()
        encoder, inputs = model.get_encoder(), features(4, seed=2)
        with torch.no_grad():
            expected = encoder(inputs).last_hidden_state
        lotformer.convert(encoder, rank=4, pivots="input-aware")
        with torch.no_grad():
            before = (encoder(inputs).last_hidden_state - expected).norm()
        report = lotformer.calibrate(encoder, [{"input_features": features(4, seed=s)} for s in range(3, 9)], steps=60)
        assert report.longest == expected.shape[1]
        with torch.no_grad():
            assert (encoder(inputs).last_hidden_state - expected).norm() < 0.9 * before

    def test_it_loads_again_with_the_same_outputs(self, tmp_path):
        model, inputs = whisper(), features()
        lotformer.convert(model, rank=4)
        model.save_pretrained(tmp_path)
        again = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            assert torch.equal(
                again.get_encoder()(inputs).last_hidden_state, model.get_encoder()(inputs).last_hidden_state
            )

    def test_a_plain_checkpoint_gets_the_same_while_loading(self, tmp_path):
        model = whisper()
        model.save_pretrained(tmp_path)
        loaded = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="lot")
        lotformer.convert(model)
        assert conversion.recipe(loaded) == conversion.recipe(model)


WAVES = ["Wav2Vec2", "Hubert", "UniSpeech", "Data2VecAudio"]


@pytest.mark.parametrize("kind", WAVES)
class TestWaves:
    def test_the_encoder_gets_a_window(self, kind):
        model = wav2vec2(kind)
        report = lotformer.convert(model, rank=4)
        assert len(report.converted) == 2
        assert windows(model) == {("1d", 5, 0)}
        assert report.probe is not None
        assert report.probe.relative_change > 0

    def test_a_padded_wave_is_read_as_if_it_were_alone(self, kind):
        if kind == "Data2VecAudio":
            pytest.skip("its stack of convolutions over time sees the padding, with softmax, too")
        model = wav2vec2(kind)
        lotformer.convert(model, rank=4, pivot_init="unit")
        lengths, generator = (420, 200), torch.Generator().manual_seed(3)
        waves = [torch.randn(1, length, generator=generator) for length in lengths]
        batch, mask = torch.zeros(2, max(lengths)), torch.zeros(2, max(lengths), dtype=torch.long)
        for row, wave in enumerate(waves):
            batch[row, : wave.shape[1]], mask[row, : wave.shape[1]] = wave, 1
        with torch.no_grad():
            together = model(batch, attention_mask=mask).last_hidden_state
            for row, wave in enumerate(waves):
                alone = model(wave, attention_mask=torch.ones_like(wave, dtype=torch.long)).last_hidden_state
                torch.testing.assert_close(together[row, : alone.shape[1]], alone[0], rtol=1e-4, atol=1e-5)

    def test_it_learns_from_padded_batches(self, kind):
        model = wav2vec2(kind)
        lotformer.convert(model, rank=4)
        mask = torch.ones(2, 400, dtype=torch.long)
        mask[1, 250:] = 0
        batches = [{"input_values": torch.randn(2, 400) * mask, "attention_mask": mask} for _ in range(6)]
        report = lotformer.calibrate(model, batches, steps=30)
        assert report.mean_error_after < report.mean_error_before


class TestUnknownTokens:
    def test_layers_without_a_window_are_named_with_what_to_pass(self):
        model = torch_encoder()
        with pytest.warns(UserWarning, match=r'layers\.0\.self_attn.*window="1d".*window="2d".*window=None'):
            report = lotformer.convert(model, rank=4)
        assert report.unasked == tuple(layer.name for layer in report.converted)
        assert "without a window: what its tokens are is not known" in str(report)

    @pytest.mark.parametrize("asked", [{"window": None}, {"window": "1d"}, {"key_masses": "uniform"}], ids=str)
    def test_whoever_says_what_is_wanted_is_not_warned(self, asked):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = lotformer.convert(torch_encoder(), rank=4, **asked)
        assert report.advice == ""
        why = {"window": "as asked for", "key_masses": "so that it is doubly stochastic"}[next(iter(asked))]
        assert (f"without a window, {why}" in str(report)) == (asked != {"window": "1d"})

    def test_the_half_of_a_model_that_has_none_is_named_alone(self):
        """Words beside a plain PyTorch encoder of something else, which counts where it is named."""
        text = transformers.BertModel(
            transformers.BertConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
        )
        model = nn.ModuleDict({"words": text, "rest": torch_encoder()})
        rest = [f"rest.layers.{i}.self_attn" for i in range(2)]
        with pytest.warns(UserWarning, match="no window in 2 layers"):
            report = lotformer.convert(model, rank=4, layers=["words.encoder.layer.0.attention.self", *rest])
        assert report.unasked == tuple(rest)
