"""What a saved conversion holds is what is loaded: damage and gaps are named, and nothing is half loaded."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lotformer
from lotformer import conversion
from lotformer.conversion.hosts.sites import converted
from support.small_models import SMALL, output, torch_encoder

FLIPS = 120


def flipped(path: Path, dice: random.Random, *, header: bool = False) -> int:
    """Flip one bit of the tensors in a safetensors file, or of what it says of them; returns where."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    place = dice.randrange(8, start) if header else dice.randrange(start, len(content))
    content[place] ^= 1 << dice.randrange(8)
    path.write_bytes(content)
    return place - start


def tensor_at(path: Path, place: int) -> str:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__")
    return next(name for name, x in header.items() if x["data_offsets"][0] <= place < x["data_offsets"][1])


def rewritten(path: Path, change) -> None:
    """Let `change` alter tensors and metadata of a file, as a stranger would: without checksums."""
    with safe_open(path, "pt") as file:
        metadata = {name: text for name, text in file.metadata().items() if name != "lotformer.checksums"}
    state = load_file(path)
    change(state)
    save_file(state, path, metadata)


@pytest.fixture(params=["bert-classifier", "vit"])
def saved(request, tmp_path):
    model = SMALL[request.param].build()
    lotformer.convert(model, rank=5)
    model.save_pretrained(tmp_path)
    return model, tmp_path, SMALL[request.param].batch()


class TestDamage:
    @pytest.mark.parametrize("kind", ["torch-encoder", "timm-vit"])
    def test_of_one_bit_in_a_file_is_named(self, kind, tmp_path):
        model, path, dice = SMALL[kind].build(), tmp_path / "model.safetensors", random.Random(0)
        lotformer.convert(model, rank=5)
        conversion.save(model, path)
        whole, fresh, batch = path.read_bytes(), SMALL[kind].build(), SMALL[kind].batch()
        before = output(fresh, batch)
        for _ in range(FLIPS):
            name = tensor_at(path, flipped(path, dice))
            with pytest.raises(ValueError, match=rf"{path} is damaged: its tensor {name} is not what was saved"):
                conversion.load(fresh, path)
            path.write_bytes(whole)
        assert torch.equal(output(fresh, batch), before)
        conversion.load(fresh, path)
        assert torch.equal(output(fresh, batch), output(model, batch))

    @pytest.mark.parametrize("shards", ["50GB", "9KB"], ids=["one file", "shards"])
    def test_of_one_bit_in_a_checkpoint_is_named(self, shards, saved):
        model, folder, _ = saved
        model.save_pretrained(folder, max_shard_size=shards)
        files = sorted(folder.glob("model-*.safetensors") if shards == "9KB" else folder.glob("model.safetensors"))
        assert (len(files) > 1) == (shards == "9KB")
        (folder / "model.safetensors").unlink() if shards == "9KB" else None
        dice = random.Random(0)
        for i in range(FLIPS):
            path = files[i % len(files)]
            whole = path.read_bytes()
            name = tensor_at(path, flipped(path, dice))
            with pytest.raises(ValueError, match=rf"{path} is damaged: its tensor {name} is not what was saved"):
                type(model).from_pretrained(folder)
            path.write_bytes(whole)
        assert converted(type(model).from_pretrained(folder))

    def test_of_a_header_changes_no_result(self, saved):
        """Names, shapes and the checksums themselves: refused, or without consequence."""
        model, folder, batch = saved
        path, dice, expected, refused = folder / "model.safetensors", random.Random(0), output(model, batch), 0
        whole = path.read_bytes()
        for _ in range(FLIPS):
            flipped(path, dice, header=True)
            try:
                again = type(model).from_pretrained(folder)
            except Exception:
                refused += 1
            else:
                assert torch.equal(output(again.eval(), batch), expected)
            path.write_bytes(whole)
        assert refused > FLIPS / 2


class TestWhole:
    """What was not damaged loads, by every path."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_in_another_precision(self, dtype, saved):
        model, folder, _ = saved
        again = type(model).from_pretrained(folder, dtype=dtype)
        assert {p.dtype for p in again.parameters()} == {dtype}
        again.save_pretrained(folder)
        assert {p.dtype for p in type(model).from_pretrained(folder, dtype="auto").parameters()} == {dtype}

    def test_learned_further_and_saved_again(self, saved):
        model, folder, batch = saved
        again = type(model).from_pretrained(folder)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.mul_(1.01)
        again.save_pretrained(folder, max_shard_size="9KB")
        (folder / "model.safetensors").unlink()
        twice = type(model).from_pretrained(folder)
        assert torch.equal(output(twice.eval(), batch), output(again.eval(), batch))
        assert not torch.equal(output(twice, batch), output(model, batch))

    def test_without_checksums_as_earlier_versions_saved_it(self, saved):
        model, folder, batch = saved
        rewritten(folder / "model.safetensors", lambda state: None)
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert list(file.metadata()) == ["format"]
        again = type(model).from_pretrained(folder).eval()
        assert torch.equal(output(again, batch), output(model, batch))

    def test_a_file_without_checksums(self, tmp_path):
        model, again, batch = torch_encoder(), torch_encoder(), torch.randn(2, 9, 24)
        lotformer.convert(model, rank=5)
        conversion.save(model, tmp_path / "model.safetensors")
        rewritten(tmp_path / "model.safetensors", lambda state: None)
        conversion.load(again, tmp_path / "model.safetensors")
        assert torch.equal(output(again, batch), output(model, batch))

    def test_checksums_are_for_conversions_only(self, tmp_path):
        SMALL["bert"].build().save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert list(file.metadata()) == ["format"]

    def test_adapters_and_their_base(self, saved, tmp_path):
        peft = pytest.importorskip("peft")
        model, folder, batch = saved
        config = peft.LoraConfig(target_modules=["query", "q_proj"], modules_to_save=["mechanism"])
        adapted = peft.get_peft_model(type(model).from_pretrained(folder), config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1)
        adapted.save_pretrained(tmp_path / "adapter")
        base = type(model).from_pretrained(folder)
        again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert torch.equal(output(again.eval(), batch), output(adapted.eval(), batch))


class TestGaps:
    """A recipe finds everything it needs beside it, of its kind."""

    @pytest.mark.parametrize("rank", [5, 2**20], ids=["", "huge"])
    def test_weights_of_the_original_beside_a_recipe(self, rank, tmp_path):
        model = SMALL["bert"].build()
        plain = {name: x.clone() for name, x in model.state_dict().items()}
        lotformer.convert(model, rank=5)
        model.save_pretrained(tmp_path)
        save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        config["lotformer"]["config"]["rank"] = rank
        (tmp_path / "config.json").write_text(json.dumps(config))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match=r"disagree: the files do not hold .*\.mechanism\..* and \d+ more"):
            transformers.BertModel.from_pretrained(tmp_path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000

    @pytest.mark.parametrize("loader", ["AutoModel", "BertModel", "BertForTokenClassification"])
    def test_a_mechanism_with_one_tensor_less(self, loader, tmp_path):
        model = SMALL["bert-classifier"].build()
        lotformer.convert(model, rank=5)
        model.save_pretrained(tmp_path)
        name = next(name for name in model.state_dict() if name.endswith("pivots.points.bias"))
        rewritten(tmp_path / "model.safetensors", lambda state: state.pop(name))
        with pytest.raises(ValueError, match=r"do not hold .*attention.self.mechanism.pivots.points.bias, which"):
            getattr(transformers, loader).from_pretrained(tmp_path)

    def test_layers_of_which_none_is_in_the_model(self, tmp_path):
        model = SMALL["bert"].build()
        lotformer.convert(model, rank=5)
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["lotformer"]["layers"] = ["encoder.layer.7.attention.self"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="does not name its layer"):
            transformers.BertModel.from_pretrained(tmp_path)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.complex64])
    @pytest.mark.parametrize("part", ["mechanism", "weight"])
    def test_numbers_of_another_kind(self, dtype, part, saved):
        model, folder, _ = saved
        state = load_file(folder / "model.safetensors")  # some have other names there
        name = next(name for name, x in state.items() if part in name and x.dim() > 1)

        def change(state: dict[str, torch.Tensor]) -> None:
            state[name] = state[name].to(dtype)

        rewritten(folder / "model.safetensors", change)
        with pytest.raises(ValueError, match=rf"{name} is {dtype} in it, torch.float32 in the model"):
            type(model).from_pretrained(folder)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
    def test_numbers_of_another_kind_in_a_file(self, dtype, tmp_path):
        model, fresh, path, batch = (
            torch_encoder(),
            torch_encoder(),
            tmp_path / "model.safetensors",
            torch.randn(2, 9, 24),
        )
        lotformer.convert(model, rank=5)
        conversion.save(model, path)
        rewritten(path, lambda state: state.update({"layers.0.linear1.weight": torch.ones(20, 24, dtype=dtype)}))
        before = output(fresh, batch)
        with pytest.raises(ValueError, match=rf"linear1.weight is {dtype} in the file, torch.float32 in the converted"):
            conversion.load(fresh, path)
        assert torch.equal(output(fresh, batch), before)

    def test_tied_weights_that_differ_in_the_file_change_nothing(self, tmp_path):
        def build():
            encoder = torch_encoder()
            encoder.layers[1].linear1.weight = encoder.layers[0].linear1.weight
            return encoder

        model, fresh, path, batch = build(), build(), tmp_path / "model.safetensors", torch.randn(2, 9, 24)
        lotformer.convert(model, rank=5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        conversion.save(model, path)
        ones = {f"layers.{i}.linear1.weight": torch.full((20, 24), float(i)) for i in range(2)}
        rewritten(path, lambda state: state.update(ones))
        before = output(fresh, batch)
        with pytest.raises(ValueError, match="are one tensor in the model, but two in the file"):
            conversion.load(fresh, path)
        assert torch.equal(output(fresh, batch), before)
        assert not any(".mechanism" in name for name, _ in fresh.named_modules())
