"""`lotformer convert --audio`: a speech model learns from recordings and is judged by others, word by word."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scipy.io import wavfile
from typer.testing import CliRunner

import lotformer
from lotformer.cli.main import app
from lotformer.cli.recordings import read_recordings
from lotformer.conversion.hosts.sites import converted
from support.small_speech import save_whisper, wav2vec2

pytestmark = pytest.mark.small_windows

RATE = 16_000


def record(folder: Path, count: int, seconds: float = 0.9) -> Path:
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        sound = generator.normal(size=round(seconds * RATE)).astype(np.float32)
        wavfile.write(folder / f"{number:02}.wav", RATE, sound)
    lines = ["file\ttext", *(f"{number:02}.wav\tword5 word{number + 3}" for number in range(count))]
    (folder / "transcripts.tsv").write_text("\n".join(lines))
    return folder


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return result.exit_code, re.sub(r"\s+", " ", result.output)


class TestWhisper:
    def test_it_is_calibrated_compared_and_saved_with_its_feature_extractor(self, tmp_path):
        original = save_whisper(tmp_path / "whisper").get_encoder()
        audio = record(tmp_path / "audio", 12)
        command = ["--out", tmp_path / "out", "--audio", audio, "--rank", 4, "--steps", 4]
        code, said = run(tmp_path / "whisper", *command)
        assert code == 0, said
        assert "2 attention layers now use 'lot'" in said
        assert "left alone model.decoder.layers.0.encoder_attn (WhisperAttention): it is cross-attention" in said
        page = (tmp_path / "out" / "conversion.md").read_text()
        assert "cosine of states | word errors | words unlike the original's" in page
        assert [line.split("|")[1].strip() for line in page.splitlines()[4:]] == ["softmax", "converted", "calibrated"]
        extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "out")
        model = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
        assert len(converted(model)) == 2
        heard = extractor(wavfile.read(audio / "00.wav")[1], sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            states = [m(**heard).last_hidden_state for m in (original, model.get_encoder())]
        assert 0.5 < torch.cosine_similarity(*states, dim=-1).mean() < 1 - 1e-6

    def test_the_layers_it_advises_to_revert_are_in_the_saved_model(self, tmp_path):
        save_whisper(tmp_path / "whisper")
        audio = record(tmp_path / "audio", 12)
        command = ["--out", tmp_path / "out", "--audio", audio, "--rank", 1, "--steps", 1]
        command += ["--window", "none", "--pivots", "fixed"]
        code, said = run(tmp_path / "whisper", *command)
        assert code == 0, said
        advised = re.search(r"layers=\[([^]]*)\]", said)
        assert advised is not None, said
        model = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")
        lotformer.revert(model, layers=[name.strip(" '") for name in advised.group(1).split(",")])

    def test_without_recordings_it_says_what_to_give(self, tmp_path):
        save_whisper(tmp_path / "whisper")
        code, said = run(tmp_path / "whisper", "--out", tmp_path / "out", "--rank", 4, "--steps", 4)
        assert code != 0
        assert "a speech model learns from recordings: give a folder of them, --audio" in said

    def test_without_steps_it_needs_none(self, tmp_path):
        save_whisper(tmp_path / "whisper")
        code, said = run(tmp_path / "whisper", "--out", tmp_path / "out", "--rank", 4, "--steps", 0)
        assert code == 0, said


class TestWaves:
    def test_an_encoder_of_waves_is_compared_by_its_states(self, tmp_path):
        wav2vec2().save_pretrained(tmp_path / "waves")
        transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(tmp_path / "waves")
        audio = record(tmp_path / "audio", 3, seconds=0.1)
        code, said = run(tmp_path / "waves", "--out", tmp_path / "out", "--audio", audio, "--rank", 4, "--steps", 3)
        assert code == 0, said
        assert "cosine of states | residual" in (tmp_path / "out" / "conversion.md").read_text()
        assert len(converted(transformers.Wav2Vec2Model.from_pretrained(tmp_path / "out"))) == 2


def test_no_more_is_read_than_steps_can_use(tmp_path):
    model = save_whisper(tmp_path / "whisper")
    audio = record(tmp_path / "audio", 60)
    found = read_recordings(tmp_path / "whisper", model, transformers, audio, 4, lambda made: (made, made))
    assert 10 <= len(found.learned) <= 12


REAL = Path(os.environ.get("LOTFORMER_WHISPER", "missing"))


@pytest.mark.skipif(not REAL.is_dir(), reason="LOTFORMER_WHISPER names no folder with a real Whisper")
def test_the_encoder_of_a_real_whisper_survives_and_learns():
    model = transformers.WhisperForConditionalGeneration.from_pretrained(REAL).eval()
    extractor, encoder = transformers.AutoFeatureExtractor.from_pretrained(REAL), model.get_encoder()
    time = np.arange(30 * RATE) / RATE
    chirps = [np.sin(2 * np.pi * (200 + 50 * k * np.sin(3 * time)) * time).astype(np.float32) for k in range(3)]
    batches = [dict(extractor(wave, sampling_rate=RATE, return_tensors="pt")) for wave in chirps]
    with torch.no_grad():
        expected = encoder(**batches[0]).last_hidden_state
    lotformer.convert(model)
    report = lotformer.calibrate(encoder, batches, steps=6, evaluate_every=2)
    with torch.no_grad():
        found = encoder(**batches[0]).last_hidden_state
    assert report.mean_error_after < report.mean_error_before
    assert torch.cosine_similarity(found, expected, dim=-1).mean() > 0.9
