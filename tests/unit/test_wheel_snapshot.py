"""Snapshots of a parameter server: going on from one is as if nothing had happened."""

import json
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from halved import CASES, Case, Make, ManualWorker, batches, equal
from paceline.core.errors import InvalidInput
from paceline.models.networks import MLP
from paceline.strategies.wheel import checkpoint
from paceline.strategies.wheel.checkpoint import load, read_manifest, save
from paceline.strategies.wheel.cut import cut
from paceline.strategies.wheel.server import ParameterServer

PROGRAM = Path(__file__).parent / "programs" / "snapshots.py"
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01, amsgrad=True),
    "groups": lambda model: torch.optim.AdamW(
        [
            {"params": list(model.parameters())[:2], "lr": torch.tensor(0.01)},
            {"params": list(model.parameters())[2:], "betas": (0.8, 0.9)},
        ],
        0.002,
    ),
}
RUN, LAYOUT = "run-1", "4f2a"


def serve(case: Case, first: str, make: Make, num_workers: int = 2) -> ParameterServer:
    model = case.model()
    halves = cut(model, case.inputs(), first)
    return ParameterServer(model, halves, make(model), num_workers=num_workers, staleness=None)


def mlp(make: Make = OPTIMIZERS["momentum"], **options) -> ParameterServer:
    return serve(CASES["mlp"], "layers.3", make, **options)


def train(server: ParameterServer, hands: list[ManualWorker], case: Case, steps: range) -> None:
    """Take steps of two workers in turn, of which the second's gradients are one update old."""
    source = list(batches(case, 2 * steps.stop))
    for step in steps:
        versions = [hand.fetch() for hand in hands]
        for hand, version in zip(hands, versions, strict=True):
            gradients, _ = hand.forward(step, version, *source[2 * step + hand.worker])
            server.update(hand.worker, step, version, gradients)


def hands_of(server: ParameterServer, case: Case, first: str) -> list[ManualWorker]:
    return [
        ManualWorker(server, cut(case.model(), case.inputs(), first), worker) for worker in range(2)
    ]


def state(server: ParameterServer) -> list[Tensor]:
    return [value.clone() for value in server.model.state_dict().values()]


def save_here(folder: Path, server: ParameterServer) -> None:
    save(folder, server, run_id=RUN, layout=LAYOUT)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "first"), [("mlp", "layers.3"), ("dropping", "norm")])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    tmp_path: Path, name: str, first: str, optimizer: str
):
    """Parameters, running means in the head, the optimizer's state, and the dropout to come."""
    case, make = CASES[name], OPTIMIZERS[optimizer]
    whole, before, after = (serve(case, first, make) for _ in range(3))
    hands = [hands_of(server, case, first) for server in (whole, before, after)]
    torch.manual_seed(8)
    train(whole, hands[0], case, range(10))
    torch.manual_seed(8)
    train(before, hands[1], case, range(5))
    save_here(tmp_path, before)
    torch.manual_seed(99)
    manifest = load(tmp_path, after, layout=LAYOUT, run_id=RUN)
    assert (manifest.run_id, manifest.version, after.version) == (RUN, 10, 10)
    groups, expected = after.optimizer.param_groups, whole.optimizer.param_groups
    for one, other in zip(groups, expected, strict=True):
        assert {**one, "params": None} == {**other, "params": None}
    train(after, hands[2], case, range(5, 10))
    assert equal(state(after), state(whole))
    assert after.updates == whole.updates
    assert after.updates.staleness["all workers"] == {0: 10, 1: 10}
    assert after.updates.by_worker == {"worker0": 10, "worker1": 10}


def test_a_step_that_the_snapshot_has_is_not_applied_again(tmp_path: Path):
    case, server = CASES["mlp"], mlp()
    hands = hands_of(server, case, "layers.3")
    train(server, hands, case, range(3))
    save_here(tmp_path, server)
    after = mlp()
    load(tmp_path, after, layout=LAYOUT)
    before = state(after)
    hand = ManualWorker(after, hands[0].halves)
    assert after.workers.of(0).next_step == 3
    assert hand.step(2, case.inputs(), case.labels())[0] == 5
    assert equal(state(after), before)


def test_half_done_steps_are_not_kept(tmp_path: Path):
    case, server = CASES["mlp"], mlp()
    hand = hands_of(server, case, "layers.3")[0]
    hand.forward(0, hand.fetch(), case.inputs(), case.labels())
    save_here(tmp_path, server)
    after = mlp()
    load(tmp_path, after, layout=LAYOUT)
    assert after.workers.of(0).half is None
    assert not after.workers.of(0).is_live


def test_a_snapshot_is_two_files_and_replaces_the_one_before(tmp_path: Path):
    server = mlp()
    for version in (3, 3, 4):
        server.version = version
        save_here(tmp_path, server)
        (tmp_path / "snapshot-9-interrupted.safetensors").touch()
        (tmp_path / ".partial").mkdir()
        (tmp_path / ".partial" / ".tmp123").touch()
    save_here(tmp_path, server)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.partition("-")[0] for name in names] == ["manifest.json", "snapshot"]
    assert read_manifest(tmp_path).tensors == names[1]
    assert read_manifest(tmp_path).version == 4


def test_there_is_none_in_an_empty_folder(tmp_path: Path):
    assert read_manifest(tmp_path) is None
    with pytest.raises(InvalidInput, match="there is no snapshot"):
        load(tmp_path, mlp(), layout=LAYOUT)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_save_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
):
    """The disk is full while the tensors are written, or the manifest."""
    server = mlp()
    server.version = 1
    save_here(tmp_path, server)
    names = sorted(path.name for path in tmp_path.iterdir())
    calls = []

    def to_disk(path: Path) -> None:
        calls.append(path)
        if len(calls) == 2 * failing - 1:  # after each file its folder
            raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", to_disk)
    server.version = 2
    with pytest.raises(InvalidInput, match=r"one before is kept: .* No space left"):
        save_here(tmp_path, server)
    assert set(names) <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / ".partial").exists()
    after = mlp()
    assert load(tmp_path, after, layout=LAYOUT).version == 1


def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_snapshot(start, tmp_path: Path):
    done = start(str(PROGRAM)).finish()
    assert done.code == 0, done.err
    versions = [int(line) for line in done.out.split()]
    assert len(versions) == 12
    assert versions == sorted(set(versions))
    save_here(tmp_path / "snapshots", mlp())
    assert len(list((tmp_path / "snapshots").iterdir())) == 2  # what was left half-way is gone


def other_shape() -> ParameterServer:
    case = CASES["mlp"]._replace(build=lambda: nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 4)))
    return serve(case, "1", OPTIMIZERS["momentum"])


def wider() -> ParameterServer:
    case = CASES["mlp"]._replace(build=lambda: MLP([12, 9, 7, 4]))
    return serve(case, "layers.3", OPTIMIZERS["momentum"])


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (mlp, {"run_id": "run-2"}, "the snapshot's run is run-1, not run-2"),
        (mlp, {"layout": "0000"}, "the snapshot's layout is 4f2a, not 0000"),
        (lambda: mlp(num_workers=3), {}, "number of workers is 2, not 3"),
        (lambda: mlp(OPTIMIZERS["adam"]), {}, "its optimizer is SGD, and not Adam"),
        (other_shape, {}, "'0.bias' is not in it; '0.weight' is not in it; .* and 7 more"),
        (wider, {}, "'layers.3.bias' is 8 float64, and not 7 float64; 'layers.3.weight' is 8x9"),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused_with_the_difference(
    tmp_path: Path, build: Callable[[], ParameterServer], options: dict, message: str
):
    save_here(tmp_path, mlp())
    server = build()
    before = state(server)
    with pytest.raises(InvalidInput, match=message):
        load(tmp_path, server, **({"layout": LAYOUT} | options))
    assert equal(state(server), before)
    assert server.version == 0


def test_another_order_of_parameters_is_refused(tmp_path: Path):
    save_here(tmp_path, mlp())
    turned = mlp(lambda model: torch.optim.SGD(list(model.parameters())[::-1], 0.1))
    with pytest.raises(InvalidInput, match="other groups of parameters"):
        load(tmp_path, turned, layout=LAYOUT)


def test_broken_files_are_refused(tmp_path: Path):
    save_here(tmp_path, mlp())
    path = tmp_path / "manifest.json"
    fields = json.loads(path.read_text())

    def refused(message: str) -> None:
        with pytest.raises(InvalidInput, match=message) as error:
            load(tmp_path, mlp(), layout=LAYOUT)
        assert "\n" not in str(error.value)

    for text, message in (
        ("{", "cannot be read"),
        (json.dumps(fields | {"format_version": 2}), "format 2; this version reads 1"),
        (json.dumps(fields | {"version": "many"}), "version: Input should be"),
        (json.dumps(fields | {"tensors": "../other.safetensors"}), "not a file beside it"),
        (json.dumps(fields | {"tensors": "gone.safetensors"}), "cannot be read"),
    ):
        path.write_text(text)
        refused(message)
    path.write_text(json.dumps(fields))
    tensors = tmp_path / fields["tensors"]
    tensors.write_bytes(tensors.read_bytes()[:-8])
    refused("cannot be read")


class Tied(nn.Module):
    """Two layers of the head have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 6)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, samples: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.body(samples))))


def test_shared_parameters_are_kept_once_and_stay_shared(tmp_path: Path):
    case = Case(Tied, (12,), 6, ("a",))
    server = serve(case, "a", OPTIMIZERS["momentum"])
    train(server, hands_of(server, case, "a"), case, range(2))
    save_here(tmp_path, server)
    after = serve(case, "a", OPTIMIZERS["momentum"])
    load(tmp_path, after, layout=LAYOUT)
    assert equal(state(after), state(server))
    assert after.model.b.weight is after.model.a.weight
    assert "model/b.weight" not in load_file(tmp_path / read_manifest(tmp_path).tensors)


def test_an_optimizer_that_keeps_something_else_is_refused(tmp_path: Path):
    server = mlp()
    server.optimizer.state[server.halves.head_parameters[0]]["history"] = {"losses": [1.0]}
    with pytest.raises(InvalidInput, match="optimizer's 'history' is dict, which cannot be saved"):
        save_here(tmp_path, server)
    assert not list(tmp_path.iterdir())
