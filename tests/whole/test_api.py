"""paceline.train and paceline.plan, as a program of the user's calls them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline as package
from launched import succeeded
from paceline.core.errors import InvalidInput
from paceline.data import load
from paceline.models.networks import LeNet5
from paceline.records.machine_file import read_machine

pytestmark = pytest.mark.slow

MACHINE = Path(__file__).parents[2] / "machines" / "two-core-epyc.toml"

# As a newcomer writes it: nothing protects the module from being imported by its workers.
PROGRAM = """
import json
from pathlib import Path

import paceline

run = paceline.train("lenet5", workers=2, epochs=2, profile_s=0.2, options={"bucket_mb": 5})
wanted = run.report("mine.html")
again = run.report(run.folder / "report.html")
print(json.dumps({
    "accuracy": run.accuracy,
    "result": json.loads(run.result.model_dump_json()),
    "origin": run.timeline.origin,
    "steps": run.timeline.num_steps(),
    "files": sorted(path.name for path in run.folder.iterdir()),
    "folder": str(run.folder),
    "reports": [str(wanted), str(again)],
    "alike": wanted.read_bytes() == again.read_bytes(),
}))
"""

UNEVEN = """
import json

import torch

import paceline
from paceline.core.errors import InvalidInput

common = {"strategy": "hogbatch", "workers": "cpu:1,cpu:1@slow=16", "profile_s": 0.2}
numbers = torch.get_rng_state()
training = {"learning_rate": 0.1, "epochs": 3, "options": {"beta": 0.5}}
# With force: on a busy machine the slow worker may be measured as one that slows the other down.
run = paceline.train("mlp-64-32-10", policy="adaptive", force=True, **common, **training)
print(json.dumps({
    "accuracy": run.accuracy,
    "result": json.loads(run.result.model_dump_json()),
    "origin": run.timeline.origin,
    "folder": str(run.folder),
    "report": str(run.report("mine.html")),
    "numbers": torch.equal(numbers, torch.get_rng_state()),
}))
slow = {"workers": "cpu:1,cpu:1@slow=200", "policy": "hogbatch", "force": True, "epochs": 1}
labels = {"model": "mlp-500-8-983", "data": "delicious-like:samples=300"}
print(json.dumps(paceline.train(**labels, **common | slow).result.updates.by_worker))
for wrong in (
    {"options": {"policy": "adaptive"}},
    {"workers": 0},
    {"port": 7},
    {"strategy": "host", "workers": 2},
    {"learning_rate": 1e38, "workers": 1},
):
    try:
        paceline.train("mlp-64-32-10", **common | {"policy": "hogbatch"} | wrong)
    except InvalidInput as error:
        print(error)
"""

IN_A_THREAD = """
import threading
import paceline

runs = []

def train():
    try:
        runs.append(paceline.train("lenet5", workers=1, epochs=1, profile_s=0.1))
    except BaseException as error:
        runs.append(error)

thread = threading.Thread(target=train)
thread.start()
thread.join()
print(type(runs[0]).__name__)
"""

REFUSED = """
import json
import paceline
from paceline.core.errors import InvalidInput, WorkersFailed

try:
    paceline.train("lenet5", workers=0)
except InvalidInput as error:
    print(error)
try:
    paceline.train("lenet6", profile_s=0.1)
except WorkersFailed as error:
    print(error.exit_code, error)
"""

UNDER_TORCHRUN = """
import gc
import json
import os
from pathlib import Path
import paceline
from paceline.core.errors import InvalidInput

gc.disable()  # so that what a run keeps in a cycle of references shows
run = paceline.train("lenet5", epochs=1, profile_s=0.1)
said = [str(run.folder), run.accuracy, run.result.settings.workers]
try:
    paceline.train("lenet5", strategy="wheel")
except InvalidInput as error:
    said.append(str(error))
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
said.append([name for name in threads if "gloo" in name])
os.write(1, f"{json.dumps(said)}\\n".encode())
"""


def program(start, tmp_path, text: str, *launcher: str):
    (tmp_path / "program.py").write_text(text)
    return start(*launcher, "program.py").finish()


def accuracy_of(weights: Path) -> float:
    """What a fresh model with these weights gets right."""
    model = LeNet5().eval()
    model.load_state_dict(load_file(weights))
    test = load("digits", (1, 32, 32), seed=0).test
    inputs, targets = test.__getitems__(range(len(test)))
    return int((model(inputs).argmax(1) == targets).sum()) / len(test)


def test_a_program_trains_and_looks_at_its_run(start, tmp_path):
    done = program(start, tmp_path, PROGRAM)
    assert done.code == 0, done.err
    # What the program prints is its own: progress and tables stay away from its output.
    assert done.out.count("\n") == 1
    said = json.loads(done.out)
    folder = tmp_path / said["folder"]
    assert folder.parent == tmp_path / "runs"
    files = ["model.safetensors", "report.html", "result.json", "run.toml", "trace.json"]
    assert said["files"] == files
    assert accuracy_of(folder / "model.safetensors") == said["accuracy"]
    assert said["result"] == json.loads((folder / "result.json").read_text())
    assert said["accuracy"] == said["result"]["accuracy"] > 0.5
    assert said["result"]["faults"] == []
    assert said["result"]["settings"]["options"] == {"bucket_mb": 5}
    assert (said["origin"], said["steps"]) == ("measured", 20)
    assert said["reports"] == ["mine.html", f"{said['folder']}/report.html"]
    assert said["alike"]
    assert "lenet5" in (tmp_path / "mine.html").read_text()


def test_a_program_trains_on_uneven_workers(start, tmp_path):
    done = program(start, tmp_path, UNEVEN)
    assert done.code == 0, done.err
    first, forced, *refused = done.out.splitlines()
    said = json.loads(first)
    folder = tmp_path / said["folder"]
    assert said["result"] == json.loads((folder / "result.json").read_text())
    assert said["result"]["settings"]["options"] == {"policy": "adaptive", "beta": 0.5}
    assert said["result"]["score"] == "accuracy"
    assert said["accuracy"] == said["result"]["accuracy"] > 0.5
    assert set(said["result"]["updates"]["by_worker"]) == {"cpu0", "cpu1"}
    assert said["origin"] == "measured"
    assert said["report"] == "mine.html"
    assert (tmp_path / "mine.html").read_text() == (folder / "report.html").read_text()
    assert said["numbers"]  # those that the program draws are its own
    assert min(json.loads(forced).values()) > 0
    assert "epoch 3/3: train loss " in done.err
    assert ", precision@1 " in done.err
    for message, line in zip(
        (
            "policy: 'hogbatch', but options say 'adaptive'",
            "workers: from 1 to 256 can train one model, not 0",
            "port: goes not with strategy hogbatch, only with strategies allreduce, ",
            "policy: goes not with strategy host, only with strategy hogbatch",
            "learning_rate: the loss of worker 0 (cpu:",
        ),
        refused,
        strict=True,
    ):
        assert line.startswith(message)


def test_a_thread_of_a_program_may_train(start, tmp_path):
    done = program(start, tmp_path, IN_A_THREAD)
    assert (done.code, done.out) == (0, "Run\n"), done.err


def test_what_cannot_be_done_is_an_exception_of_the_program(start, tmp_path):
    done = program(start, tmp_path, REFUSED)
    assert done.code == 0, done.err
    field, code = done.out.splitlines()
    assert field == "workers: Input should be greater than or equal to 1, not 0"
    assert code.startswith("2 ")
    assert "lenet6" in code
    assert done.err.count("\n") == 1  # which the workers have said
    assert "lenet6" in done.err


def test_under_torchrun_each_process_of_a_program_is_one_of_the_workers(start, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = succeeded(lambda: program(start, tmp_path, UNDER_TORCHRUN, *launcher))
    first, second = map(json.loads, done.out.splitlines())
    assert first == second
    folder, accuracy, workers, refused, threads = first
    assert (workers, accuracy > 0.3) == (2, True)
    assert json.loads((tmp_path / folder / "result.json").read_text())["accuracy"] == accuracy
    assert refused == "strategy: wheel starts its workers itself; run it without torchrun"
    assert threads == []  # a group's thread may abort a program that has ended


def test_a_module_of_the_programs_own_is_planned_for():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    before = torch.get_rng_state()
    forecasts = package.plan(model, MACHINE, batch_size=33, input_shape=(1, 8, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert [one.samples_per_s for one in forecasts] == sorted(
        (one.samples_per_s for one in forecasts), reverse=True
    )
    plain = [one for one in forecasts if (one.strategy, one.codec) == ("allreduce", None)]
    by_workers = {one.workers: one for one in plain}
    num_parameters = 64 * 100 + 100 + 100 * 10 + 10
    assert by_workers[2].wire_nbytes == 2 * 4 * num_parameters
    # 33 samples are 17 and 16: the step takes as long as with 34, but 33 are done.
    assert by_workers[2].samples_per_s == pytest.approx(33 / by_workers[2].step_s)
    even = package.plan(model, MACHINE, batch_size=34, input_shape=(1, 8, 8), workers=2)
    (of_even,) = (one for one in even if (one.strategy, one.codec) == ("allreduce", None))
    assert by_workers[2].step_s == of_even.step_s
    assert by_workers[1].samples_per_s == pytest.approx(33 / by_workers[1].step_s)


def test_a_machine_may_be_a_file_or_an_object():
    from_file = package.plan("lenet5", str(MACHINE))
    from_object = package.plan("lenet5", read_machine(MACHINE))
    assert [one.step_s for one in from_file] == [one.step_s for one in from_object]


def test_no_more_workers_are_planned_for_than_samples():
    assert [one.workers for one in package.plan("lenet5", MACHINE, batch_size=1)] == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: must be at least 1, not 0"),
        ({"workers": 3}, "workers: 3 do not fit; machine two-core-epyc .* allows 1 to 2"),
        ({"input_shape": ()}, "input_shape: sizes must be at least 1"),
        ({"input_shape": (1, 0, 32)}, "input_shape: sizes must be at least 1"),
        ({"machine": "none.toml"}, r"none\.toml: cannot be read"),
        ({"model": nn.Linear(3, 3)}, "input_shape: model Linear does not say it"),
        ({"model": nn.ReLU(), "input_shape": (3,)}, "ReLU has no trainable parameters"),
        ({"model": "lenet6"}, "no model is called 'lenet6'"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        package.plan(**{"model": "lenet5", "machine": MACHINE} | arguments)
