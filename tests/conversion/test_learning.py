"""Calibration and fine-tuning bring a converted model back to its original, repeatably and safely."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

import lotformer
from lotformer.attention.lot import LOT
from lotformer.conversion import coupling_quality
from lotformer.conversion.hosts.sites import converted
from lotformer.conversion.learning import activations, calibration
from lotformer.conversion.learning.held_back import apart
from support import learning_run
from support.learning import batches, bert
from support.small_models import SMALL, output

pytestmark = pytest.mark.small_windows


def mechanism_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if ".mechanism." in name}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("objective", ["output", "attention", "both"])
def test_calibration_reduces_the_error_of_every_layer(objective):
    model = bert(solver="sinkhorn")
    report = lotformer.calibrate(model, batches(), objective=objective, steps=40, evaluate_every=20)
    for name, before in report.error_before.items():
        assert report.error_after[name] < before
    assert report.mean_error_after < 0.9 * report.mean_error_before


@pytest.mark.parametrize("kind", ["vit", "marian", "timm-vit", "torch-encoder"])
def test_calibration_works_in_every_kind_of_host(kind):
    small = SMALL[kind]
    model = small.build()
    lotformer.convert(model, rank=6, solver="sinkhorn")
    report = lotformer.calibrate(model, [small.batch()], steps=20)
    assert report.mean_error_after < report.mean_error_before


def test_the_report_says_how_long_inputs_were_and_whether_there_was_anything_to_learn():
    """Padding is no input, and texts within the window leave nothing to be transported."""
    given = batches()
    longest = max(int(batch["attention_mask"].sum(-1).max()) for batch in given)
    report = lotformer.calibrate(bert(), given, steps=2)
    assert report.longest == longest
    assert f"on inputs of up to {longest} tokens" in str(report)
    short = lotformer.calibrate(bert(window="1d", window_size=2 * longest - 1), given, steps=2)
    assert "there was nothing to learn" in str(short)
    assert f"at most {longest} tokens" in str(short)
    assert short.steps == 0


@pytest.mark.parametrize(
    "options",
    [{"local_conv": "1d"}, {"prefix_tokens": 1, "polarize_prefix": True}, {"prefix_tokens": 1, "prefix_beta": 2.0}],
)
def test_short_inputs_teach_what_else_a_mechanism_does(options):
    report = lotformer.calibrate(bert(window="1d", window_size=33, **options), batches(), steps=2)
    assert report.steps == 2
    assert report.mean_error_before > 1e-3


def test_padding_inside_a_text_takes_up_room():
    """A window goes by places, whatever is there."""
    model, given = bert(window="1d", window_size=9), batches()
    for batch in given:
        batch["attention_mask"][:, 1:-1:2] = 0
    report = lotformer.calibrate(model, given, steps=2)
    assert report.longest == 9
    assert report.steps == 2


def test_a_padded_grid_has_its_size():
    """Nine places, of which seven and six are real: no square."""
    given = batches()
    for batch in given:
        batch["attention_mask"][:, 7:] = 0
    short = lotformer.calibrate(bert(window="2d", window_size=9, prefix_tokens=0), given, steps=2)
    assert "there was nothing to learn" in str(short)


def test_short_inputs_do_not_raise_what_is_expected_of_long_ones():
    long = batches(12)
    short = [{name: x[:, :3] for name, x in batch.items()} for batch in batches(12)]
    alone, mixed = (lotformer.calibrate(bert(), given, steps=1).forecast.cosine for given in (long, [*short, *long]))
    assert 1 - mixed > 0.5 * (1 - alone)


def test_short_inputs_that_were_kept_back_do_not_judge_what_long_ones_taught():
    """They come out as before whatever is learned."""
    given = batches(10)
    given[5] = {name: x[:, :3] for name, x in given[5].items()}
    _, held = apart(10, 0.1)
    assert held == [5]
    report = lotformer.calibrate(bert(), given, steps=20, evaluate_every=10)
    assert report.best_step > 0
    assert report.mean_error_after < report.mean_error_before


def test_only_the_mechanisms_are_trained():
    model = bert()
    before = {name: value.clone() for name, value in model.state_dict().items() if ".mechanism." not in name}
    lotformer.calibrate(model, batches(), steps=5)
    assert same(before, {name: value for name, value in model.state_dict().items() if ".mechanism." not in name})


def test_calibrated_couplings_are_exact():
    model = bert(key_masses="uniform")
    lotformer.calibrate(model, batches(), steps=10)
    quality = coupling_quality(model, batches(2))
    assert quality is not None
    assert quality.residual_max is not None
    assert quality.residual_max < 1e-4
    assert quality.doubly_stochastic_max < 1e-4
    assert all(m.config.solver.name == "newton" for m in model.modules() if isinstance(m, LOT))


def test_learned_masses_are_exact_but_said_not_to_be_doubly_stochastic():
    model = bert()
    lotformer.calibrate(model, batches(), steps=10)
    quality = coupling_quality(model, batches(2))
    assert quality is not None
    assert quality.residual_max is not None
    assert quality.residual_max < 1e-4
    assert quality.doubly_stochastic_max > 1e-2


def test_calibration_is_deterministic_from_its_seed():
    results = []
    for seed in (0, 0, 1):
        model = bert(solver="sinkhorn")
        lotformer.calibrate(model, batches(), steps=12, seed=seed)
        results.append(mechanism_state(model))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def test_activations_on_disk_give_the_same_result_and_leave_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(activations.tempfile, "tempdir", str(tmp_path))
    results = []
    for limit in (1 << 30, 0):
        model = bert(solver="sinkhorn")
        lotformer.calibrate(model, batches(), steps=8, memory_limit=limit)
        results.append(mechanism_state(model))
    assert same(*results)
    assert not list(tmp_path.iterdir())


class TestWhatTheTeacherRuns:
    def test_no_batch_that_no_step_would_draw(self, monkeypatch):
        """The result is that of a teacher that ran over everything."""
        given, told = batches(20), []
        sparing, lavish = bert(solver="sinkhorn"), bert(solver="sinkhorn")
        lotformer.calibrate(sparing, given, steps=3, on_batch=lambda now, total: told.append((now, total)))
        assert told == [(now, 5) for now in range(1, 6)], "a batch for each step, and a tenth kept back"
        monkeypatch.setattr(calibration, "_drawn", lambda pool, seed, steps: pool)
        lotformer.calibrate(lavish, given, steps=3, on_batch=lambda now, total: told.append((now, total)))
        assert told[-1] == (20, 20)
        assert same(mechanism_state(sparing), mechanism_state(lavish))

    def test_no_batch_twice(self):
        told: list[tuple[int, int]] = []
        lotformer.calibrate(
            bert(solver="sinkhorn"), batches(), steps=20, on_batch=lambda now, total: told.append((now, total))
        )
        assert told[-1] == (6, 6)


class TestInterrupts:
    @staticmethod
    def interrupt_at(step: int, number: int = signal.SIGINT):
        def on_step(now: int, steps: int, loss: float) -> None:
            if now == step:
                signal.raise_signal(number)

        return on_step

    def test_an_interrupted_calibration_resumes_to_the_same_result(self, tmp_path):
        whole, parts = bert(), bert()
        lotformer.calibrate(whole, batches(), steps=12, evaluate_every=5)
        arguments = {"steps": 12, "evaluate_every": 5, "checkpoint": tmp_path / "calibration.pt"}
        with pytest.raises(KeyboardInterrupt):
            lotformer.calibrate(parts, batches(), on_step=self.interrupt_at(7), **arguments)
        assert arguments["checkpoint"].exists()
        fresh = bert()
        report = lotformer.calibrate(fresh, batches(), **arguments)
        assert same(mechanism_state(fresh), mechanism_state(whole))
        assert report.steps == 12

    def test_an_interrupt_leaves_the_model_whole(self):
        model = bert()
        model.train()
        names = [name for name, _ in converted(model)]
        with pytest.raises(KeyboardInterrupt):
            lotformer.calibrate(model, batches(), steps=12, on_step=self.interrupt_at(3))
        assert [name for name, _ in converted(model)] == names
        assert all(m.training for m in model.modules())
        assert all(m.config.solver.name == "newton" for m in model.modules() if isinstance(m, LOT))
        assert output(model.eval(), batches(1)[0]).isfinite().all()

    @pytest.mark.parametrize("rates", [{}, {"lr": 3.0, "evaluate_every": 2}], ids=["gentle", "cut on the way"])
    def test_an_interrupted_fine_tuning_resumes_to_the_same_result(self, rates, tmp_path):
        whole = bert(solver="sinkhorn")
        teacher = SMALL["bert"].build()
        report = lotformer.finetune(whole, batches(), steps=8, teacher=teacher, **rates)
        assert (report.slowed < 1) == bool(rates)
        arguments = {"steps": 8, "teacher": teacher, "checkpoint": tmp_path / "finetuning.pt", **rates}
        parts = bert(solver="sinkhorn")
        with pytest.raises(SystemExit) as ended:
            lotformer.finetune(parts, batches(), on_step=self.interrupt_at(5, signal.SIGTERM), **arguments)
        assert ended.value.code == 143
        fresh = bert(solver="sinkhorn")
        saved = arguments["checkpoint"].read_bytes()
        for model in (fresh, parts):  # as in a new process, and with the model that was interrupted
            arguments["checkpoint"].write_bytes(saved)
            assert lotformer.finetune(model, batches(), **arguments).losses == report.losses
            assert same(dict(model.state_dict()), dict(whole.state_dict()))

    @pytest.mark.parametrize("function", ["calibrate", "finetune"])
    def test_ctrl_c_at_a_random_moment_is_as_good_as_never(self, function, tmp_path):
        whole, parts = tmp_path / "whole", tmp_path / "parts"
        whole.mkdir()
        parts.mkdir()
        command = [sys.executable, learning_run.__file__, function, str(parts)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # the first step is done
        delay = random.SystemRandom().uniform(0, 0.1)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        # the exit code is that of any Python program after a KeyboardInterrupt: with torch._dynamo it may be 1
        assert process.returncode in {-signal.SIGINT, 1}
        assert b"KeyboardInterrupt" in errors, "the process must end as after any Ctrl-C"
        ended = [learning_run.learn(function, folder).state_dict() for folder in (parts, whole)]
        assert same(*map(dict, ended)), f"interrupted after {delay} s"

    def test_outside_the_main_thread(self, tmp_path):
        model = bert(solver="sinkhorn")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lotformer.calibrate, model, batches(), steps=3, checkpoint=tmp_path / "c.pt").result()
        whole = bert(solver="sinkhorn")
        lotformer.calibrate(whole, batches(), steps=3)
        assert same(mechanism_state(model), mechanism_state(whole))


class TestCheckpoints:
    """A checkpoint is taken up by the run it belongs to and by no other."""

    def test_a_broken_one_is_named(self, tmp_path):
        path = tmp_path / "calibration.pt"
        path.write_bytes(b"nonsense")
        with pytest.raises(ValueError, match=r"calibration.pt is not a checkpoint"):
            lotformer.calibrate(bert(), batches(), steps=3, checkpoint=path)

    def test_one_of_another_kind_of_run_is_refused(self, tmp_path):
        lotformer.calibrate(bert(), batches(), steps=2, checkpoint=tmp_path / "run.pt")
        with pytest.raises(ValueError, match="kind is fine-tuning here and calibration there"):
            lotformer.finetune(bert(), batches(), steps=2, checkpoint=tmp_path / "run.pt")

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"steps": 5}, "settings.steps is 5 here and 3 there"),
            ({"lr": 1e-3}, "settings.lr is 0.001 here"),
            ({"seed": 1}, "settings.seed is 1 here and 0 there"),
            ({"data": batches(7)}, "data is"),
            ({"model": lambda: bert(eps=0.2)}, "mechanisms.encoder.layer.0"),
            ({"model": lambda: bert(key_masses="uniform")}, "parameters.encoder"),
        ],
        ids=["steps", "lr", "seed", "data", "mechanism", "parameters"],
    )
    @pytest.mark.parametrize("function", [lotformer.calibrate, lotformer.finetune])
    def test_a_finished_one_of_another_run_is_refused_with_what_differs(self, function, change, told, tmp_path):
        arguments = {"steps": 3, "checkpoint": tmp_path / "run.pt"}
        function(bert(), batches(), **arguments)
        change = dict(change)
        model, data = change.pop("model", bert)(), change.pop("data", batches())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=rf"run.pt belongs to another run: .*{re.escape(told)}"):
            function(model, data, **{**arguments, **change})
        assert same(dict(model.state_dict()), before)

    @pytest.mark.parametrize("function", [lotformer.calibrate, lotformer.finetune])
    def test_one_of_the_same_architecture_with_other_weights_is_refused(self, function, tmp_path):
        arguments = {"steps": 3, "checkpoint": tmp_path / "run.pt"}
        function(bert(), batches(), **arguments)
        other = bert()
        with torch.no_grad():
            other.pooler.dense.weight[0, 0] += 1
        with pytest.raises(ValueError, match=r"weights|teacher"):
            function(other, batches(), **arguments)

    @pytest.mark.parametrize("function", [lotformer.calibrate, lotformer.finetune])
    def test_a_finished_one_gives_the_result_again(self, function, tmp_path):
        models = [bert(), bert()]
        first, second = (function(m, batches(), steps=3, checkpoint=tmp_path / "run.pt") for m in models)
        assert same(dict(models[0].state_dict()), dict(models[1].state_dict()))
        assert first.losses == second.losses

    @pytest.mark.parametrize("function", [lotformer.calibrate, lotformer.finetune])
    def test_a_missing_folder_is_noticed_before_the_first_batch(self, function, tmp_path):
        def untouched():
            raise AssertionError("the batches were read")
            yield

        with pytest.raises(FileNotFoundError, match=r"nowhere .*does not exist: create it first"):
            function(bert(), untouched(), checkpoint=tmp_path / "nowhere" / "run.pt")


class TestLoaders:
    """What data loaders yield."""

    @staticmethod
    def loader(wrap) -> list:
        generator = torch.Generator().manual_seed(0)
        pairs = [(torch.randn(2, 3, 20, 20, generator=generator), torch.tensor([1, 4])) for _ in range(3)]
        return [wrap(pair) for pair in pairs]

    @staticmethod
    def vit() -> torch.nn.Module:
        torch.manual_seed(0)
        model = SMALL["timm-vit"].build()
        lotformer.convert(model, rank=6, solver="sinkhorn")
        return model

    @pytest.mark.parametrize("wrap", [list, tuple])
    def test_pairs_of_images_and_labels_calibrate_as_the_images_alone(self, wrap):
        models = [self.vit(), self.vit()]
        for model, batch in zip(models, (wrap, lambda pair: pair[0]), strict=True):
            lotformer.calibrate(model, self.loader(batch), steps=3)
        assert same(mechanism_state(models[0]), mechanism_state(models[1]))

    def test_a_data_loader_calibrates_and_fine_tunes(self):
        data = torch.utils.data.TensorDataset(torch.randn(6, 3, 20, 20), torch.arange(6) % 5)
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        model = self.vit()
        lotformer.calibrate(model, loader, steps=3)
        task = torch.nn.functional.cross_entropy
        report = lotformer.finetune(model, loader, loss=lambda out, batch: task(out, batch[1]), steps=30, lr=1e-2)
        assert sum(report.losses[-3:]) < sum(report.losses[:3])

    @pytest.mark.parametrize("function", [lotformer.calibrate, lotformer.finetune])
    def test_texts_are_refused_with_what_to_do(self, function):
        with pytest.raises(TypeError, match=r"got str\. Tokenise texts first"):
            function(bert(), ["text"])
        with pytest.raises(TypeError, match=r"got list of str\. Tokenise"):
            function(bert(), [["one", "two"]])
        with pytest.raises(TypeError, match=r"'input_ids' is a list: .*return_tensors='pt'"):
            function(bert(), [{"input_ids": [[1, 5, 2], [1, 6, 2]]}])


def test_something_is_left_to_learn_from_when_all_should_be_held_back():
    report = lotformer.calibrate(bert(solver="sinkhorn"), batches(), steps=2, holdout=1.0)
    assert report.steps == 2


def test_a_layer_that_runs_several_times_learns_from_all_of_them():
    config = transformers.AlbertConfig(
        vocab_size=60,
        embedding_size=8,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=20,
    )
    model = transformers.AlbertModel(config)
    lotformer.convert(model, rank=6)
    with activations.Activations(model, batches(1), memory_limit=1 << 20) as cache:
        (seen,) = cache[0].values()
    assert seen.q.shape[0] == 3 * 4
    assert seen.mask is not None
    assert seen.mask.shape == (3 * 4, 9)


def test_early_stopping_keeps_the_best_parameters():
    model = bert(solver="sinkhorn")
    report = lotformer.calibrate(model, batches(), steps=400, lr=3.0, evaluate_every=1, patience=2)
    assert report.stopped == "no improvement"
    assert report.steps < 400
    assert report.mean_error_after <= report.mean_error_before


class TestHalfPrecision:
    """Steps far below the spacing of bf16 numbers near 1 (0.004) add up instead of being rounded away."""

    @staticmethod
    def half() -> torch.nn.Module:
        model = SMALL["bert"].build().bfloat16()
        torch.manual_seed(0)
        lotformer.convert(model, rank=6)
        return model

    def test_calibration_keeps_small_steps(self):
        model = self.half()
        report = lotformer.calibrate(model, batches(), steps=40, lr=1e-3, evaluate_every=20)
        weights = [m.key_masses.query_weight.bias for m in model.modules() if isinstance(m, LOT)]
        assert all(weight.dtype == torch.bfloat16 for weight in weights)
        assert all((weight != 1).any() for weight in weights)
        assert report.mean_error_after < report.mean_error_before

    def test_fine_tuning_keeps_small_steps(self):
        model = self.half()
        lotformer.finetune(model, batches(), steps=30, lr=4e-4, mechanism_lr=4e-4, holdout=0.0)
        norms = [m.weight for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
        assert all((weight != 1).any() for weight in norms)
        assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())

    def test_weights_it_goes_back_to_are_those_it_goes_on_from(self):
        data = batches(1) * 6
        report = lotformer.finetune(self.half(), data, steps=60, lr=1.0, mechanism_lr=1e-3, evaluate_every=4)
        assert report.slowed < 1e-2
        assert report.held_after < report.held_before

    def test_both_resume_to_the_same_result(self, tmp_path):
        for function in (lotformer.calibrate, lotformer.finetune):
            whole, parts, path = self.half(), self.half(), tmp_path / f"{function.__name__}.pt"
            function(whole, batches(), steps=9)
            with pytest.raises(KeyboardInterrupt):
                function(parts, batches(), steps=9, checkpoint=path, on_step=TestInterrupts.interrupt_at(4))
            fresh = self.half()
            function(fresh, batches(), steps=9, checkpoint=path)
            assert same(dict(fresh.state_dict()), dict(whole.state_dict()))


class TestBadInput:
    def test_an_unconverted_model(self):
        for function in (lotformer.calibrate, lotformer.finetune):
            with pytest.raises(ValueError, match=r"call `lotformer.convert\(model\)` first"):
                function(SMALL["bert"].build(), batches())

    def test_no_batches(self):
        for function in (lotformer.calibrate, lotformer.finetune):
            with pytest.raises(ValueError, match="at least one batch"):
                function(bert(), [])

    @pytest.mark.parametrize("function", [lotformer.calibrate, lotformer.finetune])
    def test_one_batch_is_not_several(self, function):
        """A mapping would be gone through by names, a tensor by rows."""
        for batch in (batches()[0], batches()[0]["input_ids"]):
            with pytest.raises(TypeError, match=r"got one batch .*pass \[batch\]"):
                function(bert(), batch)
        for thing in (None, 5):
            with pytest.raises(TypeError, match="expected an iterable of batches"):
                function(bert(), thing)

    @pytest.mark.parametrize("function", [lotformer.calibrate, lotformer.finetune])
    def test_numbers_that_make_no_sense(self, function):
        with pytest.raises(ValueError, match=r"steps must be an integer, got 2\.5"):
            function(bert(), batches(), steps=2.5)
        for lr in (-1e-3, float("nan"), "fast"):
            with pytest.raises(ValueError, match="lr must be"):
                function(bert(), batches(), lr=lr)

    def test_an_unknown_objective(self):
        with pytest.raises(ValueError, match="objective must be one of"):
            lotformer.calibrate(bert(), batches(), objective="logits")

    def test_a_share_beyond_one(self):
        for name in ("holdout", "exact_share"):
            with pytest.raises(ValueError, match=f"{name} is a share"):
                lotformer.calibrate(bert(), batches(), **{name: 2.0})
        with pytest.raises(ValueError, match="warmup is a share"):
            lotformer.finetune(bert(), batches(), warmup=10)

    def test_a_mechanism_without_parameters(self):
        model = SMALL["bert"].build()
        lotformer.convert(model, "softmax")
        with pytest.raises(ValueError, match="no trainable parameters"):
            lotformer.calibrate(model, batches())
