"""A saved conversion comes back bit for bit, in a fresh process, by the loaders people already use."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import lotformer
from lotformer import conversion
from lotformer.conversion.hosts.sites import converted
from support.full_disk import full_disk, needs_limits
from support.small_models import SMALL, output

HUGGING_FACE = [name for name in SMALL if not name.startswith(("timm-", "torch-"))]

LOADER = """
import sys, torch, lotformer
from pathlib import Path
assert "transformers" not in sys.modules, "importing lotformer must not import transformers"
import transformers
torch.set_num_threads(1)
for name in sys.argv[2:]:
    folder = Path(sys.argv[1], name)
    model = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        torch.save(model(**torch.load(folder / "batch.pt"))[0], folder / "out.pt")
"""


def trained(model: torch.nn.Module) -> torch.nn.Module:
    """Mechanism parameters that no initialiser would produce."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mechanism." in name:
                parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_save_pretrained_and_from_pretrained_are_exact(kind, tmp_path):
    small = SMALL[kind]
    model, batch = small.build(), small.batch()
    lotformer.convert(model, rank=5, eps=0.2, key_masses="linear", pivots="input-aware")
    trained(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert [name for name, _ in converted(again)] == [name for name, _ in converted(model)]
    assert torch.equal(output(again, batch), output(model, batch))
    lotformer.revert(model)
    lotformer.revert(again)
    assert torch.equal(output(again, batch), output(model, batch))


def test_a_fresh_process_needs_no_more_than_the_import(tmp_path):
    expected = {}
    for kind in ("bert-classifier", "marian", "vit"):
        model, batch = SMALL[kind].build(), SMALL[kind].batch()
        lotformer.convert(model, rank=5)
        folder = tmp_path / type(model).__name__
        trained(model).save_pretrained(folder)
        torch.save(batch, folder / "batch.pt")
        expected[folder] = output(model, batch)
    names = [folder.name for folder in expected]
    run = subprocess.run([sys.executable, "-c", LOADER, str(tmp_path), *names], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for folder, result in expected.items():
        assert torch.equal(torch.load(folder / "out.pt"), result)


def test_a_part_of_the_layers_survives_the_round_trip(tmp_path):
    model, batch = SMALL["bert-classifier"].build(), SMALL["bert-classifier"].batch()
    lotformer.convert(model, rank=5, layers=["bert.encoder.layer.1.attention.self"])
    trained(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert [name for name, _ in converted(again)] == ["bert.encoder.layer.1.attention.self"]
    assert torch.equal(output(again, batch), output(model, batch))


def test_a_head_can_be_put_on_a_saved_body(tmp_path):
    body, batch = SMALL["bert"].build(), SMALL["bert"].batch()
    lotformer.convert(body, rank=5)
    trained(body).save_pretrained(tmp_path)
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(output(model.bert, batch), output(body, batch))


def test_a_plain_checkpoint_loads_with_lot_attention(tmp_path):
    plain, batch = SMALL["marian"].build(), SMALL["marian"].batch()
    plain.save_pretrained(tmp_path)
    model = transformers.MarianMTModel.from_pretrained(tmp_path, attn_implementation="lot").eval()
    names = [name for name, _ in converted(model)]
    assert names == ["model.encoder.layers.0.self_attn", "model.encoder.layers.1.self_attn"]
    points = model.model.encoder.layers[0].self_attn.mechanism.pivots.points.bias
    assert 0.015 < float(points.detach().std()) < 0.025
    assert float(model.model.encoder.layers[0].self_attn.mechanism.key_masses.query_weight.bias.detach().min()) == 1.0
    assert output(model, batch).isfinite().all()
    lotformer.revert(model)
    assert torch.equal(output(model, batch), output(plain, batch))


def test_a_causal_checkpoint_does_not_load_with_lot_attention(tmp_path):
    config = transformers.GPT2Config(n_embd=24, n_layer=1, n_head=3, vocab_size=60, bos_token_id=1, eos_token_id=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="causal"):
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path, attn_implementation="lot")


@pytest.mark.parametrize("kind", ["timm-vit", "torch-encoder"])
class TestPlainModules:
    def test_state_dicts_carry_everything(self, kind):
        small = SMALL[kind]
        model, again, batch = small.build(), small.build(), small.batch()
        for m in (model, again):
            lotformer.convert(m, rank=5)
        again.load_state_dict(trained(model).state_dict())
        assert torch.equal(output(again, batch), output(model, batch))

    def test_a_file_carries_the_recipe_too(self, kind, tmp_path):
        small = SMALL[kind]
        model, again, batch = small.build(), small.build(), small.batch()
        lotformer.convert(model, rank=5, eps=0.3, pivots="input-aware")
        conversion.save(trained(model), tmp_path / "model.safetensors")
        conversion.load(again, tmp_path / "model.safetensors")
        assert conversion.recipe(again) == conversion.recipe(model)
        assert torch.equal(output(again, batch), output(model, batch))


class TestWriting:
    def test_the_file_has_the_users_permissions(self, tmp_path):
        model = SMALL["torch-encoder"].build()
        lotformer.convert(model, rank=3)
        before = os.umask(0o027)
        try:
            conversion.save(model, tmp_path / "model.safetensors")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640

    @needs_limits
    def test_a_full_disk_is_one_clear_error_and_the_old_file_stays(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"old")
        model = SMALL["torch-encoder"].build()
        lotformer.convert(model, rank=3)
        with full_disk(), pytest.raises(OSError, match=r"model.safetensors could not be written: .*too large"):
            conversion.save(model, path)
        assert path.read_bytes() == b"old"
        assert [file.name for file in tmp_path.iterdir()] == [path.name]


class TestUnreadable:
    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "no such file"), (b"not a checkpoint", "not a readable safetensors file")],
        ids=["missing", "garbage"],
    )
    def test_files_get_one_clear_error(self, content, message, tmp_path):
        path = Path(tmp_path / "model.safetensors")
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            conversion.load(SMALL["torch-encoder"].build(), path)

    def test_weights_without_a_conversion(self, tmp_path):
        from safetensors.torch import save_file

        save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="holds weights but no conversion"):
            conversion.load(SMALL["torch-encoder"].build(), tmp_path / "model.safetensors")

    def test_a_conversion_of_another_model(self, tmp_path):
        model = SMALL["timm-vit"].build()
        lotformer.convert(model, rank=5)
        conversion.save(model, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="no attention module is called"):
            conversion.load(SMALL["torch-encoder"].build(), tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "first",
    [
        "import transformers, lotformer",
        "import lotformer, transformers",
        "import transformers, lotformer.conversion.hosts.huggingface",
        "import lotformer.conversion.hosts.dispatch",
        "import lotformer.conversion.pretrained_files",
        "import lotformer, transformers.modeling_utils",
    ],
)
def test_the_implementation_is_registered_whatever_is_imported_first(first):
    code = f"{first}\nfrom transformers import AttentionInterface\nassert 'lot' in AttentionInterface()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
