"""A converted checkpoint in the hands of plain transformers: it loads with lotformer imported and fails without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import lotformer
from support.small_models import SMALL, output

LOAD = """
import transformers
for line in sys.stdin.read().split():
    folder, loader = line.split(":")
    try:
        getattr(transformers, loader).from_pretrained(folder)
    except Exception as error:
        print(f"{line} failed: {error}")
    else:
        print(f"{line} loaded")
"""

# transformers needs an importable torchvision, which lotformer's helper sees to without the rest of lotformer
WITHOUT_LOTFORMER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("helper", {str(Path(lotformer.__file__).with_name("_torchvision.py"))!r})
helper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helper)
helper.prepare()
{LOAD}
assert "lotformer" not in sys.modules
"""
WITH_LOTFORMER = f"import sys, lotformer\n{LOAD}"


def load(code: str, lines: list[str]) -> list[str]:
    """What happens to each `folder:loader` in a fresh process."""
    run = subprocess.run([sys.executable, "-c", code], input="\n".join(lines), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [line for line in run.stdout.splitlines() if line.startswith(tuple(lines))]


def test_it_loads_with_lotformer_and_fails_without_naming_it(tmp_path):
    converted = []
    for kind, options, loaders in (
        ("bert-classifier", {}, ("AutoModel", "BertModel", "BertForSequenceClassification")),
        ("bert", {"mechanism": "hydra"}, ("AutoModel", "BertModel", "AutoModelForSequenceClassification")),
        ("roberta", {"layers": ["encoder.layer.1.attention.self"]}, ("AutoModel", "RobertaModel")),
        ("marian", {}, ("AutoModelForSeq2SeqLM", "MarianMTModel", "MarianModel")),
        ("vit", {}, ("AutoModel", "ViTModel")),
    ):
        model = SMALL[kind].build()
        lotformer.convert(model, **options)
        model.save_pretrained(tmp_path / kind)
        converted += [f"{tmp_path / kind}:{loader}" for loader in loaders]
    again = transformers.BertModel.from_pretrained(tmp_path / "bert")
    lotformer.revert(again)
    again.save_pretrained(tmp_path / "reverted")
    reverted = f"{tmp_path / 'reverted'}:BertModel"

    *failures, free = load(WITHOUT_LOTFORMER, [*converted, reverted])
    assert len(failures) == len(converted)
    for line, failure in zip(converted, failures, strict=True):
        assert failure.startswith(f"{line} failed:")
        assert "lotformer" in failure.removeprefix(line)
    assert free == f"{reverted} loaded"
    assert load(WITH_LOTFORMER, converted) == [f"{line} loaded" for line in converted]


class TestOtherImplementations:
    """Softmax never runs behind the back of a converted model."""

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("kind", ["bert", "bert-classifier", "marian", "vit"])
    def test_set_on_a_converted_model(self, kind, implementation):
        model, batch = SMALL[kind].build(), SMALL[kind].batch()
        lotformer.convert(model, rank=5)
        expected = output(model, batch)
        model.set_attn_implementation(implementation)
        with pytest.raises(RuntimeError, match=rf"{implementation}.*lotformer.revert\(model\)"):
            output(model, batch)
        (model.get_encoder() if kind == "marian" else model).set_attn_implementation("lot")
        torch.testing.assert_close(output(model, batch), expected)
        lotformer.revert(model)
        assert output(model, batch).isfinite().all()

    def test_set_where_some_layers_are_softmax(self):
        """It means the layers that were not converted, and has its effect on them."""
        model, batch = SMALL["bert"].build(), SMALL["bert"].batch()
        lotformer.convert(model, rank=5, layers=["encoder.layer.1.attention.self"])
        expected = output(model, batch)
        model.set_attn_implementation("eager")
        assert model.encoder.layer[0].attention.self.config._attn_implementation == "eager"
        torch.testing.assert_close(output(model, batch), expected)

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("loader", ["BertModel", "AutoModel", "BertForSequenceClassification"])
    def test_asked_for_on_loading(self, loader, implementation, tmp_path):
        model = SMALL["bert"].build()
        lotformer.convert(model, rank=5)
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=rf"{implementation}.*converted to 'lot'.*lotformer.revert\(model\)"):
            getattr(transformers, loader).from_pretrained(tmp_path, attn_implementation=implementation)
