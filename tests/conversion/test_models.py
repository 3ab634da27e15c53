"""Converting swaps attention, nothing else, in every kind of model; reverting brings the original back."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
import transformers
from torch import nn

import lotformer
from lotformer import attention
from lotformer.attention.lot import LOT
from support.small_models import SMALL, output, torch_encoder

pytestmark = pytest.mark.small_windows


def fingerprint(model: nn.Module) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
        if ".mechanism." not in name
    }


@pytest.mark.parametrize("kind", SMALL)
class TestEveryKindOfModel:
    def test_every_layer_is_accounted_for_and_the_output_changes(self, kind):
        small = SMALL[kind]
        model, batch = small.build(), small.batch()
        before = output(model, batch)
        report = lotformer.convert(model, rank=5, probe=batch)
        assert (len(report.converted), len(report.skipped)) == (small.converted, small.skipped)
        assert all(layer.reason for layer in report.skipped)
        mechanisms = [m for m in model.modules() if isinstance(m, LOT)]
        assert len(mechanisms) == small.converted
        assert report.parameters_added == sum(p.numel() for m in mechanisms for p in m.parameters())
        after = output(model, batch)
        assert not torch.allclose(before, after, atol=1e-4)
        assert report.probe is not None
        assert report.probe.relative_change == pytest.approx(float((after - before).norm() / before.norm()))

    def test_nothing_but_attention_changes(self, kind):
        small = SMALL[kind]
        model = small.build()
        names, before = [n for n, _ in model.named_modules()], fingerprint(model)
        lotformer.convert(model, rank=5)
        assert fingerprint(model) == before
        assert [n for n, _ in model.named_modules() if ".mechanism" not in n] == names

    def test_softmax_by_way_of_conversion_is_the_original_model(self, kind):
        small = SMALL[kind]
        model, batch = small.build(), small.batch()
        before = output(model, batch)
        lotformer.convert(model, "softmax")
        after = output(model, batch)
        if isinstance(batch, dict) and "input_ids" in batch and after.shape[:2] == batch["input_ids"].shape:
            real = batch["attention_mask"].bool()  # padded rows differ, and nobody reads them
            before, after = before[real], after[real]
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)

    def test_reverting_restores_outputs_bit_for_bit(self, kind):
        small = SMALL[kind]
        model, batch = small.build(), small.batch()
        before, state = output(model, batch), fingerprint(model)
        config = copy.deepcopy(getattr(model, "config", None))
        lotformer.convert(model, rank=5)
        lotformer.revert(model)
        assert torch.equal(output(model, batch), before)
        assert fingerprint(model) == state
        assert not any(isinstance(m, LOT) for m in model.modules())
        if config is not None:
            assert model.config.to_dict() == config.to_dict()
            assert model.config._attn_implementation == config._attn_implementation

    def test_every_new_parameter_gets_a_gradient(self, kind):
        from lotformer.conversion.calling import call
        from lotformer.data.batches import main_tensor

        small = SMALL[kind]
        model, batch = small.build(), small.batch()
        lotformer.convert(model, rank=5, pivot_init="unit")
        main_tensor(call(model, batch)).square().mean().backward()
        added = {name: p for name, p in model.named_parameters() if ".mechanism." in name}
        assert added
        for name, parameter in added.items():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name

    def test_converting_twice_is_refused(self, kind):
        model = SMALL[kind].build()
        lotformer.convert(model, rank=5)
        with pytest.raises(ValueError, match="already converted"):
            lotformer.convert(model, rank=5)

    def test_a_copy_is_converted_too_and_on_its_own(self, kind):
        small = SMALL[kind]
        model, batch = small.build(), small.batch()
        lotformer.convert(model, rank=5)
        twin, expected = copy.deepcopy(model), output(model, batch)
        assert torch.equal(output(twin, batch), expected)
        lotformer.revert(twin)
        assert torch.equal(output(model, batch), expected)


def test_the_decoder_of_an_encoder_decoder_is_untouched():
    small = SMALL["marian"]
    model, batch = small.build(), small.batch()
    encoded = transformers.modeling_outputs.BaseModelOutput(torch.randn(2, 9, 24))
    inputs = {"encoder_outputs": encoded, **{k: v for k, v in batch.items() if k != "input_ids"}}
    before = output(model, inputs)
    report = lotformer.convert(model, rank=5)
    assert torch.equal(output(model, inputs), before)
    assert {layer.name.split(".")[1] for layer in report.skipped} == {"decoder"}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_unconverted_layers_keep_their_own_implementation(implementation):
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    model.set_attn_implementation(implementation)
    name = "encoder.layer.1.attention.self"
    report = lotformer.convert(model, rank=5, layers=[name])
    assert [layer.name for layer in report.converted] == [name]
    assert model.config._attn_implementation == implementation
    assert model.encoder.layer[0].attention.self.config._attn_implementation == implementation
    assert output(model, batch).isfinite().all()


def test_long_padded_inputs_never_meet_a_square_mask(monkeypatch):
    """The layers of a fully converted model get a mask of N entries per sample, not N²."""
    model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(model, rank=5)
    seen = []
    from lotformer.conversion.hosts import sites

    original = sites.key_mask_from
    monkeypatch.setattr(
        sites, "key_mask_from", lambda mask, *a: (seen.append(tuple(mask.shape)), original(mask, *a))[1]
    )
    output(model, batch)
    assert seen == [(2, 9), (2, 9)]


@pytest.mark.parametrize("name", attention.names())
def test_any_mechanism_goes_in_by_name(name):
    entry = attention.entry(name)
    model, batch = torch_encoder(), torch.randn(2, 16, 24)
    options = {"max_length": 16} if entry.fixed_length else {}
    report = lotformer.convert(model, name, **options)
    assert len(report.converted) == 2
    assert output(model, batch).isfinite().all()


class TestFastPath:
    """`nn.TransformerEncoderLayer` has a fused path that reads the weights and runs softmax by itself."""

    @pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
    @pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
    def test_inference_and_training_mode_agree(self, norm_first, padded):
        encoder, x = torch_encoder(norm_first=norm_first, dropout=0.0), torch.randn(2, 9, 24)
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 5:] = padded
        arguments = {"src_key_padding_mask": padding} if padded else {}
        lotformer.convert(encoder, rank=5)
        with torch.no_grad():
            encoder.eval()
            fast = encoder(x, **arguments)
            encoder.train()
            slow = encoder(x, **arguments)
        torch.testing.assert_close(fast[~padding], slow[~padding])

    def test_a_single_layer_is_not_bypassed(self):
        layer, x = torch_encoder().layers[0], torch.randn(2, 9, 24)
        with torch.no_grad():
            softmax = layer(x)
            lotformer.convert(layer, rank=5)
            assert not torch.allclose(layer(x), softmax, atol=1e-4)
            lotformer.revert(layer)
            assert torch.equal(layer(x), softmax)


class TestRefusals:
    @pytest.mark.parametrize("name", ["deltanet", "mamba2"])
    def test_a_recurrent_mechanism_without_its_backward_pass(self, name):
        model, batch = torch_encoder(), torch.randn(2, 9, 24)
        before = output(model, batch)
        with pytest.raises(ValueError, match=f"'{name}' with bidirectional=False only looks back"):
            lotformer.convert(model, name, bidirectional=False)
        assert torch.equal(output(model, batch), before)

    def test_a_causal_model_by_name_and_reason(self):
        config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=3, vocab_size=60, bos_token_id=1, eos_token_id=2)
        with pytest.raises(ValueError, match=r"GPT2Model.*2 × GPT2Attention: it is causal"):
            lotformer.convert(transformers.GPT2Model(config))

    def test_a_model_with_a_relative_position_bias(self):
        config = transformers.MPNetConfig(
            hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20, vocab_size=60
        )
        with pytest.raises(ValueError, match="MPNetSelfAttention: it computes its own scores"):
            lotformer.convert(transformers.MPNetModel(config))

    def test_t5_and_swin_for_their_bias(self):
        t5 = transformers.T5Config(vocab_size=60, d_model=24, d_kv=8, d_ff=20, num_layers=1, num_heads=3)
        with pytest.raises(ValueError, match="position bias"):
            lotformer.convert(transformers.T5EncoderModel(t5))
        swin = transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=12, depths=[1], num_heads=[3], window_size=4
        )
        with pytest.raises(ValueError, match="position bias"):
            lotformer.convert(transformers.SwinModel(swin))

    def test_a_model_without_attention(self):
        with pytest.raises(ValueError, match="nothing to convert in Sequential: it holds no attention module"):
            lotformer.convert(nn.Sequential(nn.Linear(3, 3)))

    def test_an_unknown_mechanism(self):
        with pytest.raises(ValueError, match=r"Unknown mechanism 'lott'. Did you mean 'lot'"):
            lotformer.convert(SMALL["bert"].build(), "lott")

    def test_a_rank_of_zero_leaves_the_model_alone(self):
        model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
        before = output(model, batch)
        with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
            lotformer.convert(model, rank=0)
        assert torch.equal(output(model, batch), before)
        lotformer.convert(model)

    def test_an_option_the_mechanism_does_not_know(self):
        with pytest.raises(ValueError, match=r"'lot' does not take these options.*pivot_count"):
            lotformer.convert(SMALL["bert"].build(), pivot_count=3)

    def test_a_layer_that_does_not_exist_or_cannot_be(self):
        with pytest.raises(ValueError, match=r"no attention module is called 'encoder.layer.7'"):
            lotformer.convert(SMALL["bert"].build(), layers=["encoder.layer.7"])
        with pytest.raises(ValueError, match="it is causal"):
            lotformer.convert(SMALL["marian"].build(), layers=["model.decoder.layers.0.self_attn"])

    def test_a_probe_the_mechanism_cannot_run_undoes_the_conversion(self):
        encoder, x = torch_encoder(), torch.randn(2, 7, 24)
        before = output(encoder, x)
        with pytest.raises(ValueError, match="7 tokens do not form a square"):
            lotformer.convert(encoder, rank=5, local_conv="2d", probe=x)
        assert torch.equal(output(encoder, x), before)

    def test_reverting_what_was_never_converted(self):
        with pytest.raises(ValueError, match="nothing to revert"):
            lotformer.revert(SMALL["bert"].build())

    def test_cross_attention_through_a_converted_multihead_attention(self):
        module = nn.MultiheadAttention(24, 4, batch_first=True)
        lotformer.convert(module, rank=5)
        x, y = torch.randn(2, 2, 9, 24).unbind(0)
        assert module(x, x, x)[0].shape == x.shape
        with pytest.raises(ValueError, match="self-attention"):
            module(x, y, y)

    def test_setting_the_implementation_without_converting(self):
        model = SMALL["bert"].build()
        model.set_attn_implementation("lot")
        with pytest.raises(RuntimeError, match=r"call `lotformer.convert\(model\)`|Call `lotformer.convert\(model\)`"):
            output(model, SMALL["bert"].batch())
