"""What is profiled: data that fit the model and the batch, and what does not."""

import pytest
import torch

from groups import group_of
from paceline.core.errors import InvalidInput
from paceline.records.profile import ProfileSettings
from paceline.studies.profile.profiled_steps import subject_of

FAILING = """
from torch import nn

class Failing(nn.Linear):
    def forward(self, x):
        raise ValueError("the third layer is not there")

def make():
    return Failing(64, 10)
"""


def settings(**values: object) -> ProfileSettings:
    return ProfileSettings(**{"model": "lenet5"} | values)


@pytest.mark.parametrize("batch_size", [3, 64, 700])
def test_synthetic_samples_have_the_model_s_shape_and_make_whole_batches(batch_size: int) -> None:
    subject = subject_of(settings(batch_size=batch_size), group_of())
    assert subject.recipe.example(3).shape == (3, 1, 32, 32)
    assert set(subject.batches.global_sizes) == {batch_size}
    shares = subject.source(torch.device("cpu"))
    # It goes on after the last batch of the samples.
    for _ in range(len(subject.batches) + 1):
        assert next(shares).inputs.shape == (batch_size, 1, 32, 32)


def test_a_perceptron_without_widths_has_its_usual_ones() -> None:
    subject = subject_of(settings(model="mlp"), group_of())
    assert subject.recipe.example(3).shape == (3, 54)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match="batch_size: 5000 samples a step, but the data have 1438"
    ):
        subject_of(settings(data="digits", batch_size=5000), group_of())


def test_a_model_that_fails_in_forward_says_what_and_where(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_that_fails.py").write_text(FAILING)
    wanted = settings(model="model_that_fails:make", data="synthetic:64", batch_size=8)
    problem = "model model_that_fails:make: fails on a sample of its train data, float32 1x64: "
    with pytest.raises(InvalidInput, match=f"{problem}ValueError: the third layer is not there"):
        subject_of(wanted, group_of())
