"""Paced halves for rehearsals: names and sizes of the real ones, and the times of their layers."""

import pytest
import torch

from halved import CASES, Case, ManualWorker
from paceline.models import describe
from paceline.models import paced as module_of_paced
from paceline.models.paced import PacedSGD
from paceline.strategies.wheel.cut import cut
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.split import Split
from paceline.strategies.wheel.stand_in import paced_halves
from ticking import Sleeping


@pytest.fixture
def paced_lenet(monkeypatch: pytest.MonkeyPatch) -> tuple[Sleeping, Case, Split]:
    clock = Sleeping()
    monkeypatch.setattr(module_of_paced, "time", clock)
    case = CASES["lenet5"]
    example = case.inputs(dtype=torch.float32)
    return clock, case, Split.before(describe(case.model(torch.float32), example), 2)


def test_paced_halves_have_names_sizes_and_residuals_of_the_real_ones(paced_lenet):
    _, case, parts = paced_lenet
    real = cut(case.model(torch.float32), case.inputs(dtype=torch.float32), "fc3")
    whole, halves = paced_halves(parts, [0.0] * 5, [0.0] * 5, 0.0, 10)
    assert halves.crossing == real.crossing
    assert set(halves.body_names) == set(real.body_names)
    assert set(halves.head_names) == set(real.head_names)
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    assert shapes == {name: p.shape for name, p in case.model().named_parameters()}
    named = dict(whole.named_parameters())
    pairs = zip(halves.body_names, halves.body_parameters, strict=True)
    assert all(named[key] is parameter for key, parameter in pairs)
    activations = halves.body(torch.zeros(3, 1, 32, 32))
    taken_in = activations.detach().requires_grad_()
    scores = halves.head(taken_in)
    assert scores.shape == (3, 10)
    scores.sum().backward()
    torch.autograd.backward(activations, taken_in.grad)
    assert taken_in.grad.shape == (3, 400)
    assert [p.grad.shape for p in whole.parameters()] == [p.shape for p in whole.parameters()]


def test_paced_halves_take_the_times_of_their_own_layers(paced_lenet):
    clock, _, parts = paced_lenet
    _, halves = paced_halves(parts, [1, 2, 4, 8, 16], [32, 64, 128, 256, 512], 0.0, 10)
    ends = []
    activations = halves.body(torch.zeros(3, 1, 32, 32))
    ends.append(clock.now)
    taken_in = activations.detach().requires_grad_()
    scores = halves.head(taken_in)
    ends.append(clock.now)
    scores.sum().backward()
    ends.append(clock.now)
    torch.autograd.backward(activations, taken_in.grad)
    ends.append(clock.now)
    took = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert took == pytest.approx([3, 28, 896, 96])
    assert torch.equal(taken_in.grad, torch.zeros(3, 400))


def test_a_rehearsal_takes_the_times_of_body_head_and_update(paced_lenet):
    clock, case, parts = paced_lenet
    whole, halves = paced_halves(parts, [1.0] * 5, [2.0] * 5, 0.5, 10)
    optimizer = PacedSGD(whole.parameters(), whole.update_s)
    server = ParameterServer(
        whole, halves, optimizer, num_workers=1, staleness=0, checks_values=False
    )
    hand = ManualWorker(server, halves)
    for step in range(2):
        before = clock.now
        hand.step(step, torch.zeros(4, 1, 32, 32), case.labels())
        assert clock.now - before == pytest.approx(5 + 10 + 0.5)
    assert server.version == 2
