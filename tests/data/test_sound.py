"""Recordings: decoded, resampled, strung to clips; and how many words of a transcript are wrong."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.io import wavfile

from lotformer.data.sound import clips, read_sound, sound_files, transcripts, word_error_rate, words

RATE = 16_000


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate).astype(np.float32)


def write(path: Path, sound: np.ndarray, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    wavfile.write(path, rate, sound)
    return path


class TestReading:
    @pytest.mark.parametrize("kind", ["float32", "int16", "int32", "uint8"])
    def test_samples_are_read_whatever_they_are_stored_as(self, kind, tmp_path):
        sound = 0.5 * tone(0.1)
        stored = sound if kind == "float32" else (sound * 2**15).astype(np.int16)
        stored = (sound * 2**31).astype(np.int32) if kind == "int32" else stored
        stored = np.round(128 + 128 * sound).astype(np.uint8) if kind == "uint8" else stored
        found = read_sound(write(tmp_path / "a.wav", stored), RATE)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, sound, atol=0.005 if kind == "uint8" else 1e-4)

    def test_what_another_program_wrote(self, tmp_path):
        with wave.open(str(tmp_path / "a.wav"), "wb") as file:
            file.setparams((2, 2, RATE, 0, "NONE", "not compressed"))
            file.writeframes(np.array([[100, 300], [-200, 0]], "<i2").tobytes())
        np.testing.assert_allclose(read_sound(tmp_path / "a.wav", RATE), np.array([200, -100]) / 2**15)

    def test_another_rate_keeps_the_pitch_and_the_length(self, tmp_path):
        found = read_sound(write(tmp_path / "a.wav", tone(1.0, 44_100), 44_100), RATE)
        assert len(found) == RATE
        assert np.argmax(np.abs(np.fft.rfft(found))) == 440

    def test_flac(self, tmp_path):
        soundfile = pytest.importorskip("soundfile")
        soundfile.write(str(tmp_path / "a.flac"), 0.5 * tone(0.1), RATE)
        np.testing.assert_allclose(read_sound(tmp_path / "a.flac", RATE), 0.5 * tone(0.1), atol=1e-4)

    @pytest.mark.parametrize("content", [b"", b"no sound", b"RIFF\x04\x00\x00\x00WAVE"])
    def test_a_damaged_file_is_named(self, content, tmp_path):
        (tmp_path / "bad.wav").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.wav"):
            read_sound(tmp_path / "bad.wav", RATE)

    def test_a_file_without_sound_is_named(self, tmp_path):
        with pytest.raises(ValueError, match=r"a\.wav holds no sound"):
            read_sound(write(tmp_path / "a.wav", np.zeros(0, np.int16)), RATE)

    def test_a_folder_without_recordings_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="holds no recording"):
            sound_files(tmp_path)


class TestClips:
    def test_recordings_share_a_clip_with_their_texts_as_long_as_they_fit(self, tmp_path):
        files = [write(tmp_path / f"{name}.wav", tone(seconds)) for name, seconds in zip("abc", (2, 3, 4), strict=True)]
        (tmp_path / "transcripts.tsv").write_text("file\ttext\na.wav\tone\nb.wav\ttwo, three.\nc.wav\tfour\n")
        found = clips(files, RATE, 6)
        assert [clip.text for clip in found] == ["one two, three.", "four"]
        assert [len(clip.wave) / RATE for clip in found] == [5.5, 4.0], "with half a second between two"

    def test_one_that_is_too_long_is_cut_and_its_text_is_not_known(self, tmp_path):
        files = [write(tmp_path / "a.wav", tone(1)), write(tmp_path / "b.wav", tone(5))]
        (tmp_path / "transcripts.tsv").write_text("file\ttext\na.wav\tone\nb.wav\ttwo\n")
        found = clips(files, RATE, 2)
        assert [(len(clip.wave) / RATE, clip.text) for clip in found] == [
            (1.0, "one"), (2.0, None), (2.0, None), (1.0, None),
        ]  # fmt: skip

    def test_a_clip_is_told_if_all_of_it_is(self, tmp_path):
        files = [write(tmp_path / f"{name}.wav", tone(1)) for name in "ab"]
        (tmp_path / "transcripts.tsv").write_text("file\ttext\na.wav\tone\n")
        assert [clip.text for clip in clips(files, RATE, 10)] == [None]

    def test_transcripts_are_those_beside_a_file(self, tmp_path):
        files = [write(tmp_path / name / "a.wav", tone(0.1)) for name in ("x", "y")]
        (tmp_path / "x" / "transcripts.tsv").write_text("file\ttext\na.wav\tof x\n")
        assert transcripts(files) == {files[0]: "of x"}

    def test_a_table_without_tabs_is_named_with_its_line(self, tmp_path):
        files = [write(tmp_path / "a.wav", tone(0.1))]
        (tmp_path / "transcripts.tsv").write_text("file\ttext\na.wav one\n")
        with pytest.raises(ValueError, match=r"transcripts\.tsv, line 2"):
            transcripts(files)


class TestWordErrors:
    def test_case_and_punctuation_do_not_count(self):
        assert words("Don't stop, NOW.") == ["don't", "stop", "now"]
        assert word_error_rate(["he said don't"], ["He said: “Don't!”"]) == 0

    @pytest.mark.parametrize(
        ("found", "expected", "rate"),
        [("a b c", "a b c", 0), ("a c", "a b c", 1 / 3), ("a x c", "a b c", 1 / 3), ("", "a b", 1), ("a b c", "b", 2)],
    )
    def test_changes_over_the_words_expected(self, found, expected, rate):
        assert word_error_rate([found], [expected]) == pytest.approx(rate)

    @given(a=st.text("ab ", max_size=12), b=st.text("ab ", max_size=12), c=st.text("ab ", max_size=12))
    def test_it_is_a_distance(self, a, b, c):
        def distance(x: str, y: str) -> float:
            return word_error_rate([x], [y]) * max(1, len(words(y)))

        assert distance(a, b) == pytest.approx(distance(b, a))
        assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-9
        assert (distance(a, b) == 0) == (words(a) == words(b))
