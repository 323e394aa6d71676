"""Plans of wheel with one hub against closed forms; the cut of a model; messages."""

from collections import Counter, defaultdict
from itertools import groupby
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import FLOPS_PER_S, after, box, codec_speed, link, named
from paceline.core.cost import Roofline, Totals, compute_lane, layer_times, link_lane
from paceline.core.machine import Machine
from paceline.core.plan import COMPUTE, Kind, Lane
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.wire_format import Purpose, wire_format
from paceline.core.workload import Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.plan import memory, place, plan
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, messages, on_the_wire, pace_of, split
from refusals import refused
from wheels import BODY, CROSSING, HEAD, SAMPLES, UPDATE_S, layer, model, period_of


def two_hosts(*places: str, kind: str = "cpu", nbytes_per_s: float = 1e12, **device) -> Machine:
    """Return devices on the linked hosts a and b; GPUs have a fast link to their host."""
    kinds = [kind] * len(places)
    links = [link("a", "b", nbytes_per_s)]
    if kind == "gpu":
        links += [link(f"gpu{i}", place, 1e15) for i, place in enumerate(places)]
    else:
        links += [link(place, place, 1e15) for place in sorted(set(places))]
    return box(*kinds, links=links, hosts=places, device=device)


CODECS = {
    "activations": "dynamic8",
    "activation_gradients": "half",
    "parameters": "bfloat16",
    "gradients": "onebit",
}
SPEEDS = dict.fromkeys(("eightbit", "cast", "onebit"), codec_speed(1e9, 1e9))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("codecs", [{}, CODECS])
@pytest.mark.parametrize(("workers", "lanes"), [(1, 1), (5, 3)])
def test_the_link_carries_the_bytes_of_the_formula(kind, codecs, workers, lanes):
    work, config = model(), Wheel(workers=workers, lanes=lanes, **codecs)
    machine = two_hosts("a", "b", "b", kind=kind, codecs=SPEEDS)
    tasks = plan(work, machine, config, Window(3)).tasks
    sent = messages(split(work, config), config)
    for ends, purposes in ((("b", "a"), TO_HUB), (("a", "b"), FROM_HUB)):
        nbytes = sum(task.cost.nbytes for task in tasks if link_lane(*ends) in task.on)
        assert nbytes == 3 * workers * sum(sent[purpose].nbytes for purpose in purposes)


def test_messages_are_encoded_and_decoded_on_the_compute_devices_of_both_ends():
    config = Wheel(workers=1, gradients="half")
    tasks = plan(model(), two_hosts("a", "b", codecs=SPEEDS), config, Window(1))
    encode, decode = (tasks[f"s0/{kind}[gradients]@worker0"] for kind in ("encode", "decode"))
    assert (encode.on[0], decode.on[0]) == (compute_lane("cpu1"), compute_lane("cpu0"))
    assert encode.cost.flops == decode.cost.flops == BODY // 4
    # An update needs the gradients of both halves.
    update = tasks["s0/step@worker0"]
    assert after(update) == (decode.name, "s0/backward[f0]@worker0")
    assert update.on == (compute_lane("cpu0"),)
    # A codec of infinite speed is part of the links' measured times.
    machine = two_hosts("a", "b", codecs={"cast": codec_speed(float("inf"), float("inf"))})
    tasks = plan(model(), machine, config, Window(1)).tasks
    assert not [task for task in tasks if task.kind in {Kind.ENCODE, Kind.DECODE}]


@pytest.mark.parametrize(("workers", "lanes"), [(1, 1), (2, 2), (3, 3), (5, 2)])
@pytest.mark.parametrize("nbytes_per_s", [1e4, 1e12])
def test_turns_on_a_device_do_not_interleave(workers, lanes, nbytes_per_s):
    machine = two_hosts("a", "b", "b", "a", nbytes_per_s=nbytes_per_s)
    config = Wheel(workers=workers, lanes=lanes)
    timeline = simulate(plan(model(), machine, config, Window(6)), Roofline.of(machine))
    for device in set(place(machine, config).bodies):
        spans = [s for s in timeline.tracks[compute_lane(device.name)] if s.kind in COMPUTE]
        turns = [worker for worker, _ in groupby(span.worker for span in spans)]
        own = sorted(set(turns), key=turns.index)
        expected = own * 7 if len(own) > 1 else own  # forward, then six turns
        assert turns == expected


@pytest.mark.parametrize(
    ("places", "nbytes_per_s", "config", "head_s", "expected"),
    [
        # A lane waits 0.05 + 0.3 + 0.05 s for activation gradients, during the other's 3 s.
        ("ab", 20 * CROSSING, Wheel(), 0.1, 2 * 3.0),
        # A single lane waits for everything.
        ("ab", CROSSING, Wheel(1, 1), 0.1, 3.0 + 0.3 + UPDATE_S + 2 * (1 + BODY / CROSSING)),
        ("abbb", 1e9, Wheel(6), 0.1, 6.0),  # three devices in parallel
        # p = 2.4 s, k = 3, t = 3 s: one device with heads instead of 2.4.
        ("abbb", 1e9, Wheel(6), 0.8, 6 * (2.4 + UPDATE_S)),
    ],
)
def test_lanes_and_hubs_set_the_pace(places, nbytes_per_s, config, head_s, expected):
    machine = two_hosts(*places, nbytes_per_s=nbytes_per_s)
    assert period_of(model(head_s=head_s), machine, config) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("lanes", "waits"),
    [
        (1, {"s1/step@worker1"}),  # the worker's own last update
        (2, {"s0/step@worker1", "s1/send[activation_gradients]@worker1"}),  # the update before it
    ],
)
def test_a_fetch_waits_for_the_required_update(lanes, waits):
    tasks = plan(model(), two_hosts("a", "b", "b"), Wheel(lanes=lanes), Window(3))
    assert set(after(tasks["s2/send[parameters]@worker1"])) == waits


def test_gpus_copy_messages_and_synchronise_at_the_end_of_each_half():
    tasks = plan(model(), two_hosts("a", "b", kind="gpu"), Wheel(workers=1), Window(1)).tasks
    ways = defaultdict(list)
    for task in tasks:
        if task.part in set(Purpose):
            ways[task.part].append(task.kind.value)
    whole = ["d2h", "send", "h2d"]
    # Labels are in host memory already.
    assert ways == dict.fromkeys((*TO_HUB, *FROM_HUB), whole) | {"labels": ["send", "h2d"]}
    synced = {task.name.removesuffix("@worker0") for task in tasks if task.cost.num_syncs}
    assert synced == {"s0/forward[c1]", "s0/backward[f0]", "s0/backward[c0]"}


def test_the_hub_is_the_first_device_or_on_the_named_host_and_needs_memory():
    work, machine, config = model(), two_hosts("a", "b", "b"), Wheel(workers=3)
    assert place(machine, Wheel()).hub.name == "cpu0"
    there = place(machine, Wheel(workers=3, hub="b"))
    assert (there.hub.host, there.hub.name) == ("b", "cpu1")
    assert [device.name for device in there.bodies] == ["cpu0", "cpu0", "cpu2"]
    features = 8 * CROSSING + CROSSING + 9 * CROSSING  # features; input and output gradients of c1
    lane = 3 * BODY + features + 3000
    head_features = 16000 + 400 + 16400
    hub = 2 * (BODY + HEAD) + 3 * (BODY + HEAD + CROSSING) + head_features
    assert memory(work, machine, config) == {"cpu0": hub, "cpu1": 2 * lane, "cpu2": lane}


@pytest.mark.parametrize(
    ("names", "config", "field"),
    [
        (("c0", "c1"), {}, "strategy"),  # no fully-connected layer
        (("c0",), {}, "strategy"),  # a single layer
        (("c0", "c1", "f0"), {"head": "fc"}, "head"),
        (("c0", "c1", "f0"), {"head": "c0"}, "head"),  # leaves nothing for the body
        (("c0", "c1", "f0"), {"workers": 5}, "workers"),
        (("c0", "c1", "f0"), {"hub": "z"}, "hub"),
        (("c0", "c1", "f0"), {"gradients": "threshold:0.1"}, "codec"),
        (("c0", "c1", "f0"), {"gradients": "half"}, "codec"),  # of unknown speed
    ],
)
def test_unsuitable_models_and_settings_are_refused(names, config, field):
    with refused(field):
        plan(model(names=names), two_hosts("a", "b", "b"), Wheel(**config), Window(1))
    with refused("machine box"):
        plan(model(), box("cpu", "cpu", hosts="ab"), Wheel(), Window(1))


@pytest.mark.parametrize("hosts", ["hh", "ab"])
def test_tasks_on_a_single_core_take_turns(hosts: str):
    """The tasks are of a hub and a body on one host, or of a hub and its messages."""
    work = model() if hosts == "hh" else model(body_s=0.01, head_s=1.0)
    host = {} if hosts == "hh" else {"message_bytes_per_s": 1e5}
    config, links = Wheel(workers=2, lanes=2), [link(*hosts, 1e15)]
    apart = box("cpu", "cpu", links=links, hosts=hosts, host=host).with_each("hosts", cores=2)
    own, tasks = Roofline.of(apart), plan(work, apart, config, Window(1)).tasks
    assert Lane.CORE not in {on.lane for task in tasks for on in task.on}
    one, other = ("cpu0/compute", "cpu1/compute" if hosts == "hh" else "a/messages")
    busy = [
        sum(own.seconds(task) for task in tasks if lane in map(str, task.on))
        for lane in (one, other)
    ]
    lone_s = period_of(work, apart.with_each("hosts", cores=1), config)
    assert lone_s == pytest.approx(sum(busy), rel=0.05)
    apart_s = period_of(work, apart, config)
    assert apart_s == pytest.approx(max(busy), rel=0.05) if hosts == "hh" else apart_s < lone_s


def test_the_cores_of_a_hub_handle_messages_one_after_another():
    links = [link("a", other, 1e12) for other in "bc"]
    free = box("cpu", "cpu", "cpu", links=links, hosts="abc")
    work, config = model(), Wheel(workers=2, lanes=1)
    tasks = plan(work, free, config, Window(1)).tasks
    sent = sum(task.cost.nbytes for task in tasks if task.kind is Kind.SEND)
    slow = free.with_each("hosts", message_bytes_per_s=sent / 1e4)  # nothing else is slow
    assert period_of(work, slow, config) == pytest.approx(1e4, rel=0.05)
    handled = [task for task in plan(work, slow, config, Window(1)).tasks if "on a" in task.part]
    assert {str(on) for task in handled for on in task.on} == {"a/messages"}


def test_a_message_within_a_host_holds_its_cores_during_the_transfer():
    links = [link("a", "b", 1e12), link("a", "a", 1e3)]
    machine = box("cpu", "cpu", "cpu", links=links, hosts="aab", host={"message_bytes_per_s": 1e9})
    tasks = plan(model(), machine, Wheel(workers=2, lanes=1), Window(1))
    within = tasks["s0/send[activations]@worker0"]
    assert [str(on) for on in within.on] == ["a->a/wire", "cpu1/upload", "a/messages"]
    assert Roofline.of(machine).seconds(within) == pytest.approx(within.cost.nbytes / 1e3)
    assert "send[activations on a]@worker0" not in named(tasks)
    assert {"send[activations on a]@worker1", "send[activations on b]@worker1"} <= named(tasks)


def test_messages_have_the_sizes_of_table_1_and_each_codec_shrinks_its_purpose():
    def sizes(config: Wheel) -> dict[str, int]:
        sent = messages(split(model(), config), config)
        return {purpose: message.nbytes for purpose, message in sent.items()}

    plain = {
        "labels": 4 * SAMPLES,
        **dict.fromkeys(("activations", "activation_gradients"), CROSSING),
        **dict.fromkeys(("parameters", "gradients"), BODY),
        **dict.fromkeys(("head_parameters", "head_gradients"), HEAD),
    }
    assert sizes(Wheel()) == plain
    assert sizes(Wheel(**CODECS)) == plain | {
        purpose: wire_format(codec).nbytes(plain[purpose] // 4) for purpose, codec in CODECS.items()
    }


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**6), min_size=9, max_size=9),
)
def test_the_cut_sends_the_fewest_bytes(num_convolutions, matrices, handed_on):
    shapes = [(8, 8, 3, 3)] * num_convolutions + matrices
    layers = tuple(
        layer(f"l{i}", shape, 4 * n, 2 * prod(shape) / FLOPS_PER_S)
        for i, (shape, n) in enumerate(zip(shapes, handed_on, strict=False))
    )
    work = Workload("any", 1, layers, tuple(reversed(range(len(layers)))), 4)
    nbytes = [one.gradient_nbytes for one in layers]
    whole = 4 + 2 * sum(nbytes)
    costs = {
        f"l{first}": 4 + 2 * (layers[first - 1].activation_nbytes + sum(nbytes[:first]))
        for first in range(num_convolutions, len(layers))
    }
    least, last = min(costs.values()), layers[-1].activation_nbytes
    if least >= whole and last >= sum(nbytes):
        with refused("strategy"):
            split(work, Wheel())
        return
    found = split(work, Wheel())
    if least >= whole:  # no cut saves bytes: asynchronous data parallelism
        assert (found.first, found.head.layers, found.body.layers) == ("loss", (), layers)
        assert on_the_wire(messages(found, Wheel())) == whole + 2 * last
        return
    assert costs[found.head.layers[0].name] == least
    assert on_the_wire(messages(found, Wheel())) == least


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_rehearsal_paces_layers_by_their_times_in_the_plan(kind: str):
    work, config = model(), Wheel(workers=1, lanes=1)
    machine = two_hosts("a", "b", kind=kind, sync_latency_s=0.25)
    roofline = Roofline.of(machine)
    rate = roofline.rates[compute_lane(machine.devices[0].name)]
    times = layer_times(work, rate, Totals(2.0, 5.0, 0.5))
    pace = pace_of(split(work, config), times, rate, kind == "gpu", None)
    usual = layer_times(work, rate)
    planned: Counter[tuple[Kind, str]] = Counter()
    for span in simulate(plan(work, machine, config, Window(1)), roofline).spans:
        planned[span.kind, span.part] += span.duration_s
    for phase, total_s, usual_s, paced_s, syncs in (
        (Kind.FORWARD, 2.0, usual.forward_s, pace.forward_s, 1),
        (Kind.BACKWARD, 5.0, usual.backward_s, pace.backward_s, 2),
    ):
        for one, alone_s, own_s in zip(work.layers, usual_s, paced_s, strict=True):
            handing_over_s = planned[phase, one.name] - alone_s
            assert own_s == pytest.approx(alone_s * total_s / sum(usual_s) + handing_over_s)
        assert sum(paced_s) - total_s == pytest.approx(0.25 * syncs * (kind == "gpu"))
    assert (pace.update_s, pace.samples) == (0.5, work.batch_size)
