"""Lines as speculators 0.9.0 prints them."""

import pytest

from aerie.training.trainer_log import parse_step, parse_validation

STEP = (
    "[16:56:36] INFO  train/loss_0=1.927, train/full_acc_0=0.311, train/cond_acc_0=0.311, train/cond_acc_1=0.154, "
    "train/loss={loss}, train/error_records={errors}, profile/fwd_ms=683.093, profile/step_ms=1.34e+03, "
    "profile/tokens_per_s=703.205, epoch=1, lr=6.38e-05, global_step=91  trainer.py:587"
)


def line(loss: str = "5.942", errors: str = "0.000") -> str:
    return STEP.format(loss=loss, errors=errors)


def test_a_step_is_read_with_its_figures():
    step = parse_step(line())
    assert (step.global_step, step.epoch, step.loss, step.learning_rate) == (91, 1, 5.942, 6.38e-05)
    assert (step.tokens_per_second, step.accuracies) == (703.205, (0.311, 0.154))
    assert step.fault is None


@pytest.mark.parametrize(
    ("loss", "errors", "said"),
    [
        ("0.00e+00", "4.000", "error_records"),
        ("0.00e+00", "0.000", "the loss is exactly 0"),
        ("nan", "0.000", "the loss is nan"),
        ("inf", "0.000", "the loss is inf"),
    ],
)
def test_a_step_that_learns_from_nothing_is_a_fault_though_the_trainer_goes_on(loss, errors, said):
    assert said in parse_step(line(loss, errors)).fault


def test_a_step_without_its_error_count_is_not_taken_for_a_good_one():
    with pytest.raises(KeyError, match="error_records"):
        parse_step(line().replace("train/error_records=0.000, ", ""))


def test_muons_two_learning_rates_give_the_one_of_adamw():
    assert parse_step(line().replace("lr=6.38e-05", "lr/Muon=2.00e-03, lr/AdamW=1.00e-03")).learning_rate == 1e-3


def test_validation_is_read_and_other_lines_are_not():
    validation = parse_validation("INFO  val/cond_acc_0_epoch=0.514, val/loss_epoch=3.581, epoch=0  trainer.py:660")
    assert validation == {"cond_acc_0_epoch": 0.514, "loss_epoch": 3.581}
    assert parse_validation(line()) is None
    assert parse_step("INFO  Training epoch 2/2 started  trainer.py:737") is None
