"""The outer step against torch's own SGD, fragments, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.strategies.local.config import Local
from paceline.strategies.local.exchange import Exchanged
from paceline.strategies.local.outer import flatten, fragments_of, weighted_sum
from refusals import refused


def network(layers: int = 5) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))


def test_the_outer_step_is_torchs_nesterov_momentum_on_the_weighted_mean() -> None:
    config = Local(workers=2, outer_learning_rate=0.7, outer_momentum=0.9)
    exchanged = Exchanged(network(), config)
    expected = nn.Parameter(exchanged.outer.values[0].clone())
    optimizer = torch.optim.SGD([expected], 0.7, momentum=0.9, nesterov=True)
    source = torch.Generator().manual_seed(2)
    for _ in range(6):
        first, second = (torch.randn(expected.shape, generator=source) for _ in range(2))
        expected.grad = first * 0.25 + second * 0.75
        optimizer.step()
        exchanged.step(0, [(10, first), (30, second)])
    torch.testing.assert_close(exchanged.outer.values[0], expected.detach(), rtol=2e-6, atol=1e-6)


def test_products_are_rounded_before_they_are_added() -> None:
    # Fused, the first addition would keep the 2**-24 that the product rounds away.
    one = torch.tensor([1 + 2**-12], dtype=torch.float32)
    total = weighted_sum([(1.0, -torch.ones(1)), (float(one), one)])
    assert float(total) == float(one * one) - 1.0


def test_layers_are_dealt_in_turns_and_every_parameter_once() -> None:
    model = network(5)
    found = fragments_of(model, 2)
    layers = [(layer.weight, layer.bias) for layer in model]
    assert [len(one) for one in found] == [6, 4]
    for fragment, numbers in zip(found, ([0, 2, 4], [1, 3]), strict=True):
        own = [one for number in numbers for one in layers[number]]
        assert all(a is b for a, b in zip(fragment, own, strict=True))


def test_a_tied_parameter_belongs_to_one_fragment() -> None:
    model = network(4)
    model[3].weight = model[0].weight
    parameters = [id(one) for fragment in fragments_of(model, 3) for one in fragment]
    assert len(parameters) == len(set(parameters)) == 7


def test_mixing_keeps_a_part_of_the_workers_own_parameters() -> None:
    exchanged = Exchanged(network(), Local(workers=2))
    (fragment,) = exchanged.fragments
    group, own = exchanged.outer.values[0].clone(), flatten(fragment) + 1
    with torch.no_grad():
        for parameter in fragment:
            parameter.add_(1)
    exchanged.outer.load_into(0, fragment, mixing=0.25)
    torch.testing.assert_close(flatten(fragment), 0.25 * own + 0.75 * group)


@pytest.mark.parametrize("count", [6, 9])
def test_more_fragments_than_layers_are_refused(count: int) -> None:
    with refused("fragments"):
        fragments_of(network(), count)


def test_parameters_of_other_types_are_refused() -> None:
    with refused("parameters"):
        fragments_of(network().to(torch.bfloat16), 1)
    mixed = network()
    mixed[0].double()
    with refused("parameters"):
        fragments_of(mixed, 1)


def test_a_codec_takes_no_float64() -> None:
    with refused("codec"):
        Exchanged(network().double(), Local(workers=2, codec="dynamic8"))


@pytest.mark.parametrize("codec", [None, "dynamic8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_never_sent(codec: str | None, bad: float) -> None:
    exchanged = Exchanged(network(), Local(workers=2, codec=codec))
    gradient = torch.zeros_like(exchanged.outer.values[0])
    assert exchanged.encode(0, gradient) is not None
    gradient[3] = bad
    assert exchanged.encode(0, gradient) is None


@pytest.mark.parametrize("codec", [None, "dynamic8", "onebit"])
def test_what_came_decodes_as_it_does_where_it_was_sent(codec: str | None) -> None:
    there, here = (Exchanged(network(), Local(workers=2, codec=codec)) for _ in range(2))
    gradient = torch.randn_like(there.outer.values[0])
    sent = there.encode(0, gradient)
    assert sent is not None
    unaligned = [_moved(one) for one in sent]
    assert torch.equal(here.decode(0, unaligned), there.decode(0, sent))
    with pytest.raises(InvalidInput):
        here.decode(0, [*unaligned[:-1], unaligned[-1][:-1]])


def _moved(buffer: Tensor) -> Tensor:
    """The same bytes at an odd address, as in the middle of a message."""
    whole = torch.empty(len(buffer) + 1, dtype=torch.uint8)
    whole[1:] = buffer
    return whole[1:]


@pytest.mark.parametrize(("workers", "rate"), [(1, 0.5), (2, 0.6), (4, 0.7), (8, 0.8)])
def test_the_outer_learning_rate_follows_the_scaling_laws(workers: int, rate: float) -> None:
    assert Local(workers=workers).outer_rate == pytest.approx(rate)
    assert Local(workers=workers, outer_learning_rate=0.3).outer_rate == 0.3


@pytest.mark.parametrize(
    "fields",
    [
        {"sync_every": 0},
        {"sync_every": 10, "fragments": 11},
        {"sync_every": 10, "fragments": 2, "delay": 5},
        {"mixing": 1.0},
        {"outer_momentum": -0.1},
        {"codec": "nothing"},
    ],
)
def test_configurations_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises((ValueError, InvalidInput), match=next(reversed(fields))):
        Local(**fields)  # type: ignore[arg-type]
