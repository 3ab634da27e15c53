"""Fine-tuning: what is learned, what is kept of it, and what happens where rates are too high."""

from __future__ import annotations

import copy

import pytest
import torch

import lotformer
from lotformer.attention.lot import LOT
from lotformer.conversion.learning.held_back import apart
from lotformer.data.batches import main_tensor
from lotformer.training.finite import NonFiniteError
from support.learning import batches, bert
from support.small_models import SMALL, output

pytestmark = pytest.mark.small_windows


class TestFinetuning:
    def test_imitation_without_labels_brings_outputs_closer(self):
        original = SMALL["bert"].build()
        model = bert(solver="sinkhorn")
        probe = batches(1)[0]
        before = (output(model, probe) - output(original, probe)).norm()
        tables = copy.deepcopy(model.embeddings.word_embeddings.weight)
        report = lotformer.finetune(model, batches(), steps=30, lr=1e-3, holdout=0.0)
        assert (output(model, probe) - output(original, probe)).norm() < before
        assert report.losses[-1] < report.losses[0]
        assert torch.equal(model.embeddings.word_embeddings.weight, tables)
        assert model.embeddings.word_embeddings.weight.requires_grad

    def test_a_rate_that_is_too_high_leaves_the_model_as_it_was(self):
        model = bert(solver="sinkhorn")
        before = copy.deepcopy(model.state_dict())
        report = lotformer.finetune(model, batches(), steps=6, lr=10.0, evaluate_every=2)
        assert report.best_step == 0
        assert report.held_before == report.held_after
        assert "the model is as it was" in str(report)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_the_weights_that_did_best_on_held_back_batches_stay(self):
        """The same batch over and over: what is learned holds for the one that is held back."""
        model, data = bert(solver="sinkhorn"), batches(1) * 6
        report = lotformer.finetune(model, data, steps=20, lr=1e-3, evaluate_every=5)
        assert report.held_after < report.held_before
        assert report.best_step in (5, 10, 15, 20)
        assert f"kept the weights of step {report.best_step}" in str(report)
        twin = bert(solver="sinkhorn")
        again = lotformer.finetune(twin, data, steps=20, lr=1e-3, evaluate_every=20)
        assert again.held_after >= report.held_after

    def test_what_was_read_as_before_judges_nothing(self):
        """The only batch that is held back is short, where learning can but lose."""
        data = batches(1) * 6
        _, (held,) = apart(6, 0.1)
        data[held] = {name: x[:, :3] for name, x in data[held].items()}
        report = lotformer.finetune(bert(solver="sinkhorn"), data, steps=20, lr=1e-3, evaluate_every=5)
        assert report.best_step == report.steps == 20
        assert report.held_before is None
        assert report.losses[-1] < report.losses[0]

    def test_rates_that_are_too_high_are_cut_until_something_is_learned(self):
        model, data = bert(solver="sinkhorn"), batches(1) * 6
        report = lotformer.finetune(model, data, steps=60, lr=1.0, mechanism_lr=1e-3, evaluate_every=4)
        assert report.slowed < 1e-2
        assert report.held_after < report.held_before
        assert "rates cut to" in str(report)

    def test_a_loss_that_is_not_a_number_is_told_before_the_first_step(self):
        model = bert(solver="sinkhorn")
        with torch.no_grad():
            model.encoder.layer[-1].output.dense.bias[0] = float("nan")
        with pytest.raises(ValueError, match="before the first step"):
            lotformer.finetune(model, batches(), steps=2)

    def test_with_few_batches_or_a_task_nothing_is_held_back(self):
        assert lotformer.finetune(bert(), batches(4), steps=2).held_before is None
        assert lotformer.finetune(bert(), batches(), steps=2, holdout=0.0).best_step == 2

    def test_following_the_layers_brings_the_inputs_of_every_layer_closer(self):
        original, probe = SMALL["bert"].build(), batches(1)[0]

        def error_in_the_middle(weight: float) -> float:
            model = bert(solver="sinkhorn")
            lotformer.finetune(model, batches(), steps=30, lr=1e-3, hidden_weight=0.0, layer_weight=weight)
            ours, theirs = (m.eval()(**probe, output_hidden_states=True).hidden_states[1] for m in (model, original))
            return ((ours - theirs) * probe["attention_mask"][..., None]).norm().item()

        assert error_in_the_middle(10.0) < 0.9 * error_in_the_middle(0.0)

    @pytest.mark.parametrize("teacher", ["vit", None], ids=["another-architecture", "no-teacher"])
    def test_following_the_layers_needs_a_teacher_that_has_them(self, teacher):
        arguments = {"loss": lambda out, _: main_tensor(out).sum()} if teacher is None else {}
        teacher = None if teacher is None else SMALL[teacher].build()
        with pytest.raises(ValueError, match=r"`layer_weight`.*teacher"):
            lotformer.finetune(bert(), batches(), teacher=teacher, layer_weight=1.0, **arguments)

    def test_a_task_is_learned_from_its_loss(self):
        model = SMALL["bert-classifier"].build()
        lotformer.convert(model, rank=6, solver="sinkhorn")
        data = [{**batch, "labels": batch["input_ids"][:, 1] % 2} for batch in batches(2)]
        report = lotformer.finetune(model, data, loss=lambda out, _: out.loss, steps=60, lr=3e-3)
        assert sum(report.losses[-6:]) < 0.5 * sum(report.losses[:6])


class TestAutocast:
    """`precision="bf16"`: products in bf16, everything else as it was."""

    def test_fine_tuning_learns_nearly_the_same(self):
        wide, narrow = bert(solver="sinkhorn"), bert(solver="sinkhorn")
        expected = lotformer.finetune(wide, batches(), steps=10, lr=1e-4)
        report = lotformer.finetune(narrow, batches(), steps=10, lr=1e-4, precision="bf16")
        assert report.losses != expected.losses
        torch.testing.assert_close(torch.tensor(report.losses), torch.tensor(expected.losses), rtol=0.1, atol=0)
        assert all(parameter.dtype == torch.float32 for parameter in narrow.parameters())
        assert not torch.is_autocast_enabled("cpu")

    def test_an_autocast_around_it_stays(self):
        """What the caller has chosen is not undone by the default."""
        outside, inside = bert(solver="sinkhorn"), bert(solver="sinkhorn")
        with torch.autocast("cpu", torch.bfloat16):
            expected = lotformer.finetune(outside, batches(), steps=1)
        assert lotformer.finetune(inside, batches(), steps=1, precision="bf16").losses == expected.losses

    def test_another_precision_is_refused(self):
        with pytest.raises(ValueError, match="got 'fp16'"):
            lotformer.finetune(bert(), batches(), precision="fp16")


class Trouble(Exception):
    pass


def spoil(model, at: int, where: str = "encoder.layer.1.output"):
    """The outputs of a model in training are NaN the `at`-th time, as if a batch or the machine had gone wrong."""
    calls = 0

    def hook(module, args, output):
        nonlocal calls
        if torch.is_grad_enabled():
            calls += 1
            if calls == at:
                return output * float("nan")
        return output

    return model.get_submodule(where).register_forward_hook(hook)


def state(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, before) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class TestNothingFiniteIsLost:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_a_loss_that_is_not_a_number_stops_with_the_best_weights(self, dtype):
        model, data = bert(solver="sinkhorn").to(dtype), batches(1) * 6
        lotformer.finetune(copy.deepcopy(model), data, steps=4, lr=1e-3, evaluate_every=4)
        twin, before = copy.deepcopy(model), state(model)
        spoil(model, at=7)
        with pytest.raises(NonFiniteError, match=r"step 7: the loss is nan\. Nothing .* skip_nonfinite=1"):
            lotformer.finetune(model, data, steps=20, lr=1e-3, evaluate_every=2)
        assert not same(model, before)  # of step 6, which did better than none
        with pytest.raises(Trouble):
            lotformer.finetune(twin, data, steps=20, lr=1e-3, evaluate_every=2, on_step=raise_at(7, Trouble()))
        assert same(model, state(twin))

    @pytest.mark.parametrize("where", ["embeddings", "encoder.layer.1.output"])
    def test_or_the_step_is_tried_again(self, where):
        """Also where a layer on the way refuses what it gets."""
        model = bert(solver="sinkhorn")
        spoil(model, 7, where)
        report = lotformer.finetune(model, batches(1) * 6, steps=12, lr=1e-3, skip_nonfinite=1)
        assert (report.steps, report.skipped) == (12, 1)
        assert report.held_after < report.held_before
        assert "1 tries skipped" in str(report)

    @pytest.mark.parametrize("lr", [1e2, 1e4, 1e8, 1e15])
    @pytest.mark.parametrize("task", [False, True], ids=["imitation", "task"])
    def test_rates_out_of_this_world_leave_nothing_that_is_not_finite(self, lr, task):
        model = bert(solver="sinkhorn")
        before = state(model)
        loss = (lambda output, batch: output[0].square().mean()) if task else None
        with pytest.raises(
            NonFiniteError, match=r"step \d: .* not finite|step \d: the .* is nan.*Lower the learning rate"
        ):
            lotformer.finetune(model, batches(), loss=loss, steps=9, lr=lr, mechanism_lr=lr, evaluate_every=3)
        if not task:
            assert same(model, before)
        assert all(value.isfinite().all() for value in model.state_dict().values())

    def test_calibration_stops_with_the_best_parameters_too(self):
        model, twin = bert(solver="sinkhorn"), bert(solver="sinkhorn")
        mechanism = next(m for m in model.modules() if isinstance(m, LOT))
        calls = 0

        def hook(module, args, output):
            nonlocal calls
            calls += torch.is_grad_enabled()
            return output * float("nan") if calls == 7 and torch.is_grad_enabled() else output

        mechanism.register_forward_hook(hook)
        with pytest.raises(NonFiniteError, match=r"step 7: .*Nothing of it was applied") as caught:
            lotformer.calibrate(model, batches(), steps=20, lr=1e-2, exact_share=1.0, evaluate_every=3)
        assert "skip_nonfinite" not in str(caught.value)
        with pytest.raises(Trouble):
            lotformer.calibrate(
                twin, batches(), steps=20, lr=1e-2, exact_share=1.0, evaluate_every=3, on_step=raise_at(7, Trouble())
            )
        assert same(model, state(twin))

    @pytest.mark.parametrize("error", [Trouble(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
    @pytest.mark.parametrize("function", [lotformer.calibrate, lotformer.finetune])
    def test_whatever_ends_it_the_best_weights_stay(self, function, error):
        """None does better at this rate, so the best are those from before."""
        model = bert(solver="sinkhorn")
        before = state(model)
        rate = {"lr": 10.0, "evaluate_every": 2}
        with pytest.raises(type(error)):
            function(model, batches(), steps=20, on_step=raise_at(3, error), **rate)
        assert same(model, before)


def raise_at(step: int, error: BaseException):
    def on_step(now: int, *_: object) -> None:
        if now == step:
            raise error

    return on_step
