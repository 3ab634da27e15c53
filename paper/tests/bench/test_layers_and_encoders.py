"""Benchmarks of layers, solver forms and converted encoders: what they store, and what they refuse to time."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from typer.testing import CliRunner

import lotformer
from lotformer.cli.main import app
from lotformer.ops import backends, reference
from lotformer_paper.bench.agreement import KernelDisagrees, check_backend

QUICK = ["--threads", "1", "--seconds", "0"]


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "250"})
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def stored(folder) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_a_layer_in_all_its_forms(tmp_path):
    said = invoke("layer", "--dim", 16, "--heads", 2, "--rank", 4, "--max-n", 200, *QUICK, "--out", tmp_path)
    (point,) = stored(tmp_path)["points"]
    assert point["forward"].keys() - point["both_ways"].keys() == {"both, folded", "keys, folded"}
    assert all(ms > 0 for times in (point["forward"], point["both_ways"]) for ms in times.values())
    assert f"{point['forward']['softmax'] / point['forward']['keys, folded']:.2f}×" in said
    assert f"{point['forward']['keys, input-aware'] / point['forward']['keys']:.2f}" in said


@pytest.mark.parametrize("direction", [[], ["--backward"]], ids=["forward", "backward"])
def test_forms_of_the_operator_beside_their_solvers(direction, tmp_path):
    said = invoke("solvers", "--rank", 4, "--max-n", 200, *QUICK, *direction, "--out", tmp_path)
    (point,) = stored(tmp_path)["points"]
    ms, residual = point["milliseconds"], point["residual"]
    assert ms.keys() == residual.keys() >= {"sinkhorn keys", "newton keys", "sinkhorn scores"}
    assert max(residual["newton"], residual["newton keys"]) < 1e-4
    assert f"{ms['sinkhorn'] / ms['sinkhorn scores']:.2f}" in said
    assert ("forward + backward" in said) == bool(direction)


def test_the_balance_of_a_runtime_benchmark_is_stored_and_named(tmp_path):
    said = invoke("runtime", "--against", "sdpa", "--balance", "keys", "--max-n", 200, *QUICK, "--out", tmp_path)
    assert stored(tmp_path)["settings"]["balance"] == "keys"
    assert "balance keys" in said


@pytest.mark.parametrize("form", [{"balance": "keys"}, {"scores": True}, {"solver": "newton"}], ids=str)
def test_a_form_that_disagrees_with_the_reference_is_not_timed(form, monkeypatch):
    def wrong(transport, solve):
        result = reference.run(transport, solve)
        off = transport.pivots is None or solve.balance == "keys" or solve.solver == "newton"
        return result._replace(out=result.out * (1.001 if off else 1.0))

    made = backends.Backend("wrong", wrong, lambda: None, lambda transport, solve: None)
    monkeypatch.setattr(backends.TRANSPORT, "backends", (made, *backends.TRANSPORT.backends))
    options = {"rank": 4, "head_dim": 8, "heads": 2, "n": 33, "eps": 1.0, "iters": 2, "backward": False}
    assert check_backend("wrong", **options) == "wrong"
    with pytest.raises(KernelDisagrees, match="relative error"):
        check_backend("wrong", **options, **form)


def test_converted_encoders_are_timed_with_what_they_cost(tmp_path, monkeypatch):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "of", "is"]
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=1010
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    for name in ("original", "converted", "folded"):
        if name == "converted":
            lotformer.convert(model, rank=4, balance="keys", pivots="fixed", window=None)
        if name == "folded":
            lotformer.fold(model)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    said = invoke("encoder", "--original", "original", "--converted", "converted,folded", "--max-n", 32,
                  "--texts", 12, *QUICK)  # fmt: skip
    result = stored(tmp_path / "out/bench/encoder")
    for variant in result["variants"]:
        assert 0 < variant["cosine"] <= 1.0001
        assert variant["residual"] < 1e-3
        assert variant["options"]["balance"] == "keys"
    (point,) = result["points"]
    assert point["milliseconds"].keys() == {"softmax", "converted", "folded"}
    assert f"{point['milliseconds']['softmax'] / point['milliseconds']['folded']:.2f}×" in said
    assert "give --original and --converted" in invoke("encoder", code=1)
