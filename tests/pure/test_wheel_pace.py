"""What a rehearsal of wheel paces devices by is what the plan prices their layers with."""

from collections import Counter

import pytest

from boxes import box, link
from paceline.core.cost import Roofline, Totals, compute_lane, layer_times
from paceline.core.plan import Kind
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.plan import plan
from paceline.strategies.wheel.split import pace_of, split
from wheels import model


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_layers_take_what_they_take_in_the_plan(kind: str):
    work, config = model(), Wheel(workers=1, lanes=1)
    ends = [link("a", "b", 1e12), link("a", "a", 1e15), link("b", "b", 1e15)]
    ends += [link(f"{kind}{i}", host, 1e15) for i, host in enumerate("ab") if kind == "gpu"]
    device = {"sync_latency_s": 0.25}
    links = ends[:1] + ends[3:] if kind == "gpu" else ends
    machine = box(kind, kind, links=links, hosts="ab", device=device)
    roofline = Roofline.of(machine)
    rate = roofline.rates[compute_lane(machine.devices[0].name)]
    times = layer_times(work, rate, Totals(2.0, 5.0, 0.5))
    pace = pace_of(split(work, config), times, rate, kind == "gpu", None)
    usual = layer_times(work, rate)
    scaled = {Kind.FORWARD: 2.0 / sum(usual.forward_s), Kind.BACKWARD: 5.0 / sum(usual.backward_s)}
    planned: Counter[tuple[Kind, str]] = Counter()
    for span in simulate(plan(work, machine, config, Window(1)), roofline).spans:
        if span.kind in scaled:
            planned[span.kind, span.part] += span.duration_s
    names = [layer.name for layer in work.layers]
    for phase, usual_s, paced_s in (
        (Kind.FORWARD, usual.forward_s, pace.forward_s),
        (Kind.BACKWARD, usual.backward_s, pace.backward_s),
    ):
        for name, alone_s, own_s in zip(names, usual_s, paced_s, strict=True):
            handing_over_s = planned[phase, name] - alone_s
            assert own_s == pytest.approx(alone_s * scaled[phase] + handing_over_s)
    assert sum(pace.forward_s) - 2.0 == pytest.approx(0.25 * (kind == "gpu"))
    assert sum(pace.backward_s) - 5.0 == pytest.approx(0.5 * (kind == "gpu"))
    assert (pace.update_s, pace.samples) == (0.5, work.batch_size)
