"""`lotformer convert` deletes earlier conversions alone, and writes to --out alone, whole or not at all."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from typer.testing import CliRunner

from lotformer.cli import convert
from lotformer.cli.main import app
from lotformer.conversion.hosts.sites import converted
from support.forked import start
from support.small_models import SMALL

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "house", "tree"]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoint"
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=len(WORDS)
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture
def vision(tmp_path) -> Path:
    folder = tmp_path / "vision"
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, image_size=20, patch_size=5,
        num_labels=3,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 20, "width": 20}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["plain", "force"])
def test_what_appears_in_out_meanwhile_stays(force, checkpoint, tmp_path, monkeypatch):
    """Calibration takes minutes, in which somebody else may use the name."""
    out, work = tmp_path / "out", convert._convert

    def while_others_write(*arguments):
        made = work(*arguments)
        out.mkdir()
        (out / "thesis.tex").write_text("precious")
        return made

    monkeypatch.setattr(convert, "_convert", while_others_write)
    code, said = run(checkpoint, "--out", out, "--rank", 4, "--steps", 0, *force)
    assert code == 1
    assert "--out" in said
    assert contents(out) == {"thesis.tex": b"precious"}
    assert not list(tmp_path.glob(".out.*"))


class TestWhatForceReplaces:
    @pytest.mark.parametrize("with_mark", [False, True], ids=["a project", "a conversion under version control"])
    def test_nothing_that_no_conversion_writes(self, with_mark, checkpoint, tmp_path):
        """Anything with a config.json used to count as a checkpoint."""
        out = tmp_path / "project"
        if with_mark:
            assert run(checkpoint, "--out", out, "--rank", 4, "--steps", 0)[0] == 0
        for name in (".git/HEAD", "src/main.py", "notes.txt"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("precious")
        if not with_mark:
            (out / "config.json").write_text('{"model_type": "bert"}')
        before = contents(out)
        code, said = run(checkpoint, "--out", out, "--rank", 4, "--steps", 0, "--force")
        assert contents(out) == before
        assert code == 1
        assert (".git" if with_mark else "is no converted checkpoint") in said

    def test_not_the_source(self, checkpoint):
        before = contents(checkpoint)
        for force in ([], ["--force"]):
            code, said = run(checkpoint, "--out", checkpoint, "--rank", 4, "--steps", 0, *force)
            assert code == 1
            assert "holds the checkpoint to convert" in said
        assert contents(checkpoint) == before

    def test_not_an_original(self, checkpoint, vision):
        before = contents(checkpoint)
        code, said = run(vision, "--out", checkpoint, "--rank", 4, "--steps", 0, "--force")
        assert code == 1
        assert "is no converted checkpoint" in said
        assert contents(checkpoint) == before

    @pytest.mark.parametrize("target", ["a conversion", "an empty folder", "nothing"])
    def test_no_link(self, target, checkpoint, tmp_path):
        real, link = tmp_path / "real", tmp_path / "link"
        if target == "a conversion":
            assert run(checkpoint, "--out", real, "--rank", 4, "--steps", 0)[0] == 0
        elif target == "an empty folder":
            real.mkdir()
        link.symlink_to(real)
        code, said = run(checkpoint, "--out", link, "--rank", 4, "--steps", 0, "--force")
        assert link.is_symlink()
        assert code == 1
        assert f"is a link to {real}" in said

    @pytest.mark.skipif(not os.path.ismount("/proc"), reason="needs a mount point")
    def test_no_mount_point(self, checkpoint):
        code, said = run(checkpoint, "--out", "/proc", "--rank", 4, "--steps", 0, "--force")
        assert code == 1
        assert "/proc is a mount point" in said

    def test_an_earlier_conversion(self, checkpoint, vision, tmp_path):
        out = tmp_path / "out"
        for source, kind in (
            (checkpoint, "BertModel"),
            (vision, "ViTForImageClassification"),
            (checkpoint, "BertModel"),
        ):
            code, said = run(source, "--out", out, "--rank", 4, "--steps", 0, "--force")
            assert code == 0, said
            assert converted(getattr(transformers, kind).from_pretrained(out))


def as_sentence_encoder(checkpoint: Path, *paths: object) -> None:
    """With pooling in a folder of its own, and whatever `paths` modules.json is to name after the encoder."""
    (checkpoint / "1_Pooling").mkdir()
    (checkpoint / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 24}')
    listed = [{"idx": i, "name": str(i), "path": path, "type": "x"} for i, path in enumerate(("", "1_Pooling", *paths))]
    (checkpoint / "modules.json").write_text(json.dumps(listed))


class TestStrangersModules:
    @pytest.mark.parametrize("kind", ["parent", "absolute", "up and down", "backslashes", "drive"])
    def test_lead_nowhere_else(self, kind, checkpoint, tmp_path):
        payload = tmp_path / "payload"
        payload.mkdir()
        (payload / "config.json").write_text("evil")
        aim = {
            "parent": "../payload", "absolute": str(payload), "up and down": "1_Pooling/../../payload",
            "backslashes": "..\\payload", "drive": "C:\\payload",
        }[kind]  # fmt: skip
        as_sentence_encoder(checkpoint, aim)
        out = tmp_path / "deep" / "out"
        (tmp_path / "deep" / "payload").mkdir(parents=True)
        (tmp_path / "deep" / "payload" / "model.safetensors").write_text("precious")
        before = contents(tmp_path)
        code, said = run(checkpoint, "--out", out, "--rank", 4, "--steps", 0)
        assert contents(tmp_path) == before
        assert code == 1
        assert "modules.json: the path" in said
        assert "leads out of the checkpoint" in said

    def test_nor_does_the_encoders(self, checkpoint, tmp_path):
        """It was written to the path, as seen from --out."""
        root, victim = tmp_path / "root", tmp_path / "deep" / "checkpoint"
        root.mkdir()
        victim.mkdir(parents=True)
        (victim / "model.safetensors").write_text("precious")
        (root / "modules.json").write_text('[{"path": "../checkpoint"}]')
        code, said = run(root, "--out", tmp_path / "deep" / "out", "--rank", 4, "--steps", 0)
        assert contents(victim) == {"model.safetensors": b"precious"}
        assert code == 1
        assert "leads out of the checkpoint" in said

    @pytest.mark.parametrize("place", ["1_Pooling/secret.json", "1_Pooling", "1_Pooling/deeper", "vocab.txt"])
    def test_links_out_are_not_followed(self, place, checkpoint, tmp_path):
        secrets = tmp_path / "secrets"
        secrets.mkdir()
        (secrets / "key").write_text("hunter2")
        as_sentence_encoder(checkpoint)
        link = checkpoint / place
        if place == "1_Pooling":
            (link / "config.json").unlink()
            link.rmdir()
        link.unlink(missing_ok=True)
        link.symlink_to(secrets / "key" if link.suffix else secrets)
        code, said = run(checkpoint, "--out", tmp_path / "out", "--rank", 4, "--steps", 0)
        assert code == 1
        assert f"{link}".replace(" ", "") in said.replace(" ", "")
        assert "out of the checkpoint" in said
        assert not (tmp_path / "out").exists()

    def test_links_within_a_cache_of_the_hub_are(self, checkpoint, tmp_path):
        """Its snapshots are links to blobs beside them."""
        as_sentence_encoder(checkpoint)
        snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
        blobs.mkdir(parents=True)
        for i, path in enumerate(path for path in sorted(checkpoint.rglob("*")) if path.is_file()):
            place = snapshot / path.relative_to(checkpoint)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(blobs / str(i))
            place.symlink_to(os.path.relpath(blobs / str(i), place.parent))
        code, said = run(snapshot, "--out", tmp_path / "out", "--rank", 4, "--steps", 0)
        assert code == 0, said
        assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
        assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()

    @pytest.mark.parametrize(
        ("written", "message"),
        [
            ("[]", "expected a list of modules, the encoder first, got []"),
            ('{"path": ""}', "expected a list of modules"),
            ('"x"', "expected a list of modules"),
            ('[{"path": 3}]', "expected the `path` of every module, a text, got {'path': 3}"),
            ('[{"path": ""}, {"path": null}]', "expected the `path` of every module"),
            ("[3]", "expected the `path` of every module"),
            ("[{}]", "expected the `path` of every module"),
            ("[", "cannot be read as JSON"),
            ("\udcff", "cannot be read as JSON"),
            ("[" * 100_000, "cannot be read as JSON"),
            ('[{"path": "a"}, {"path": "a/b"}]', "share a folder"),
        ],
        ids=["empty", "table", "text", "number", "null", "no table", "no path", "cut", "bytes", "deep", "nested"],
    )
    def test_of_another_form_are_one_clear_error(self, written, message, checkpoint, tmp_path):
        (checkpoint / "modules.json").write_bytes(written.encode(errors="surrogateescape"))
        code, said = run(checkpoint, "--out", tmp_path / "out", "--steps", 0)
        assert code == 1
        assert "modules.json" in said
        assert message in said
        assert "Traceback" not in said


class TestProcessorsTravel:
    def test_of_images(self, vision, tmp_path):
        code, said = run(vision, "--out", tmp_path / "out", "--rank", 4, "--steps", 0)
        assert code == 0, said
        classify = transformers.pipeline("image-classification", model=str(tmp_path / "out"))
        from PIL import Image

        found = classify(Image.new("RGB", (30, 40), (200, 10, 10)))
        assert len(found) == 3
        assert converted(classify.model)

    def test_of_calibrated_images(self, vision, tmp_path):
        from support.image_folder import make_image_folder

        make_image_folder(tmp_path / "images", size=(24, 24))
        code, said = run(vision, "--out", tmp_path / "out", "--rank", 4, "--steps", 2, "--images", tmp_path / "images")
        assert code == 0, said
        assert transformers.AutoImageProcessor.from_pretrained(tmp_path / "out").size["height"] == 20
        assert (tmp_path / "out" / "conversion.md").is_file()

    def test_of_speech_to_text(self, tmp_path):
        source = tmp_path / "whisper"
        words = {"<|endoftext|>": 0, "a": 1, "b": 2, "<|startoftranscript|>": 3, "<|notimestamps|>": 4, "c": 5, "d": 6}
        tokenizer = transformers.WhisperTokenizer(vocab=words, merges=[])
        config = transformers.WhisperConfig(
            vocab_size=7, d_model=24, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3, pad_token_id=0,
            decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=20, num_mel_bins=20, bos_token_id=0,
            max_source_positions=100, eos_token_id=0, decoder_start_token_id=3, begin_suppress_tokens=None,
        )  # fmt: skip
        model = transformers.WhisperForConditionalGeneration(config)
        model.generation_config.max_new_tokens = 4
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=2).save_pretrained(source)
        code, said = run(source, "--out", tmp_path / "out", "--rank", 4, "--steps", 0)
        assert code == 0, said
        listen = transformers.pipeline("automatic-speech-recognition", model=str(tmp_path / "out"))
        assert isinstance(listen(numpy.zeros(16000, numpy.float32))["text"], str)
        assert len(converted(listen.model)) == 2
        assert listen.model.generation_config.max_new_tokens == 4
        code, said = run(source, "--out", tmp_path / "other", "--rank", 4)
        assert code == 1
        assert "give a folder of them, --audio" in said

    def test_of_sound(self, tmp_path):
        source = tmp_path / "wav2vec2"
        config = transformers.Wav2Vec2Config(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, conv_dim=(24, 24),
            conv_stride=(10, 8), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, num_labels=3, classifier_proj_size=8,
        )  # fmt: skip
        transformers.Wav2Vec2ForSequenceClassification(config).save_pretrained(source)
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(source)
        code, said = run(source, "--out", tmp_path / "out", "--rank", 4, "--steps", 0)
        assert code == 0, said
        classify = transformers.pipeline("audio-classification", model=str(tmp_path / "out"))
        assert len(classify(numpy.random.default_rng(0).normal(size=8000).astype(numpy.float32))) == 3
        assert len(converted(classify.model)) == 2


def convert_for_ever(source: Path, out: Path) -> None:
    os.chdir(out.parent)
    while True:
        code, said = run(source, "--out", out, "--rank", 4, "--steps", 0, "--force")
        assert code == 0, said


def save_for_ever(path: Path) -> None:
    import lotformer
    from lotformer import conversion

    model = SMALL["torch-encoder"].build()
    model.ballast = torch.nn.Parameter(torch.zeros(2_000_000))
    lotformer.convert(model, rank=4)
    while True:
        conversion.save(model, path)


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
class TestKilled:
    """Wherever a process dies, what is there is whole, and the next one leaves nothing of it behind."""

    KILLS = 4

    def test_while_converting(self, vision, tmp_path):
        place = tmp_path / "work"
        place.mkdir()
        out, dice = place / "out", random.Random(0)
        assert run(vision, "--out", out, "--rank", 4, "--steps", 0)[0] == 0
        for _ in range(self.KILLS):
            self._kill(start(convert_for_ever, vision, out), out / "config.json", dice)
            if not out.exists():  # between two renames: the next to write finds it put back
                assert run(vision, "--out", out, "--rank", 4, "--steps", 0)[0] != 0
            assert converted(transformers.ViTForImageClassification.from_pretrained(out))
            assert (out / "preprocessor_config.json").is_file()
        code, said = run(vision, "--out", out, "--rank", 4, "--steps", 0, "--force")
        assert code == 0, said
        assert [path.name for path in place.iterdir()] == ["out"]

    def test_while_saving_a_file(self, tmp_path):
        from lotformer import conversion

        path, dice = tmp_path / "model.safetensors", random.Random(1)
        for _ in range(self.KILLS):
            self._kill(start(save_for_ever, path), path, dice)
            again = SMALL["torch-encoder"].build()
            again.ballast = torch.nn.Parameter(torch.ones(2_000_000))
            conversion.load(again, path)
            assert not again.ballast.any()
        conversion.save(again, path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    @staticmethod
    def _kill(process, sign_of_life: Path, dice: random.Random) -> None:
        before = sign_of_life.stat().st_mtime_ns if sign_of_life.exists() else 0
        while not sign_of_life.exists() or sign_of_life.stat().st_mtime_ns == before:
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(dice.random() * 0.3)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
