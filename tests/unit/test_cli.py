import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import pytest

from command_line import MACHINE, write_run
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.data.spec import FORMS
from paceline.runs import launching
from paceline.strategies import EXCHANGES, STRATEGIES

GIGABIT = MACHINE.parent / "two-hosts-gigabit.toml"
POWER8 = MACHINE.parent / "power8-p100.toml"


@pytest.mark.parametrize("name", sorted({form.partition(":")[0] for form in FORMS}))
def test_the_help_of_data_names_all_that_there_is(name: str):
    text = TrainSettings.model_fields["data"].description or ""
    assert re.search(rf"(?<![\w-]){name}\b(?!-)", text)


def test_a_machine_is_planned_for_as_one_json_object(line):
    line("plan", "alexnet", "--machine", MACHINE, "--batch-size", 32, "--json")
    assert (line.code, line.err) == (0, "")
    plan = json.loads(line.out)
    assert (plan["model"], plan["batch_size"], plan["origin"]) == ("alexnet", 32, "predicted")
    plain = [row for row in plan["plans"] if (row["strategy"], row["codec"]) == ("allreduce", None)]
    rows = {row["workers"]: row for row in plain}
    assert set(rows) == {1, 2}
    rates = [row["samples_per_s"] for row in plan["plans"]]
    assert rates == sorted(rates, reverse=True)
    # 60,965,224 parameters (Krizhevsky 2012 in one column): two ranks send all through one link.
    assert rows[2]["wire_nbytes_per_step"] == 2 * 4 * 60_965_224
    assert rows[1]["wire_nbytes_per_step"] == 0
    for workers, row in rows.items():
        assert row["samples_per_s"] == pytest.approx(32 / row["step_s"])
        assert workers > 1 or "nothing is exchanged" in row["why"]


def test_a_plan_is_a_table_for_people(line):
    line("plan", "lenet5", "--machine", MACHINE)
    assert line.code == 0
    for text in ("lenet5 predicted on", "allreduce", "samples/s", "482 KiB", "computes"):
        assert text in line.out


def test_the_number_of_workers_can_be_chosen(line):
    line("plan", "lenet5", "--machine", MACHINE, "--workers", 2, "--json")
    plans = json.loads(line.out)["plans"]
    assert {row["workers"] for row in plans} == {2}
    assert {row["strategy"] for row in plans} == STRATEGIES.keys() - {"hierarchy"}
    # Ranks of one host sum in its memory, where nothing is encoded.
    assert {row["codec"] for row in plans if row["strategy"] == "host"} == {None}


def gigabit(line, *arguments: object, rate: str = "117 MB/s") -> dict:
    """Plan AlexNet on two hosts of one core each, joined by a link of that rate."""
    path = Path("hosts.toml")
    path.write_text(GIGABIT.read_text())
    assert "117 MB/s" in path.read_text()
    path.write_text(path.read_text().replace("117 MB/s", rate))
    line("plan", "alexnet", "--machine", path, "--batch-size", 32, "--json", *arguments)
    assert (line.code, line.err) == (0, "")
    return json.loads(line.out)


def test_a_codec_is_advised_where_the_link_is_slow(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = gigabit(line, "--workers", 2, rate="11.7 MB/s")
    steps = {(row["strategy"], row["codec"]): row["step_s"] for row in plan["plans"]}
    codecs = {"half", "bfloat16", "dynamic8", "onebit", None}
    assert {codec for strategy, codec in steps if strategy == "allreduce"} == codecs
    assert steps["allreduce", "half"] == steps["allreduce", "bfloat16"]
    advice = plan["advice"]
    assert advice["pays"] is True
    exchanges = {key: step_s for key, step_s in steps.items() if key[0] in EXCHANGES}
    fastest = min(exchanges, key=exchanges.__getitem__)
    assert (advice["strategy"], advice["codec"], advice["workers"]) == (*fastest, 2)
    assert advice["step_s"] == steps[fastest]
    plain = min((key for key in exchanges if key[1] is None), key=exchanges.__getitem__)
    assert (advice["plain_strategy"], advice["plain_workers"]) == (plain[0], 2)
    assert advice["plain_step_s"] == steps[plain]
    # 243.9 MB of gradients at 117 MB/s, and all of 8 buckets' latencies.
    wire_s = 4 * 60_965_224 / 11.7e6
    assert advice["link_busy"] * advice["plain_step_s"] == pytest.approx(wire_s, rel=5e-3)
    said = f"a codec pays: {fastest[0]} with {fastest[1]} on 2 workers is "
    assert advice["sentence"].startswith(said)
    assert "codecs round gradients" in advice["sentence"]


def test_no_codec_is_advised_where_the_link_is_fast(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    advice = gigabit(line, "--strategy", "allreduce", rate="8 GB/s")["advice"]
    assert advice["pays"] is False
    assert advice["plain_step_s"] < advice["step_s"]
    assert advice["sentence"].startswith("no codec pays: the exchange hides behind backward; ")


def test_people_get_the_fastest_codec_of_each_strategy_and_the_advice(line):
    line("plan", "alexnet", "--batch-size", 32, "--machine", GIGABIT)
    assert line.code == 0
    # A row of each strategy that encodes anything: allreduce, host, local, subbatch and wheel.
    assert line.out.count("+ dynamic8") + line.out.count("+ half") == 5
    advised = r"a codec (may )?pays?: (allreduce|host) with dynamic8 on 2 workers is "
    assert re.search(advised, " ".join(line.out.split()))


def test_a_drawing_and_a_chart_are_for_people_and_programs(line):
    plan = ("plan", "alexnet", "--machine", "two-hosts-gigabit", "--batch-size", 32)
    line(*plan, "--workers", 2, "--explain")
    assert line.code == 0
    assert re.search(r"cpu0/compute \|L?F+.*B+.*U+\|", line.out)
    assert "F forward, B backward" in line.out
    line(*plan, "--sweep", "bandwidth=100M:10G", "--json")
    found = json.loads(line.out)
    assert (found["values"][0], found["values"][-1]) == (1e8, pytest.approx(1e10))
    assert len(found["samples_per_s"]["allreduce + codec"]) == len(found["values"])
    assert found["best"][-1].endswith("10 Gbit/s: subbatch")
    line(*plan, "--sweep", "bandwidth=100M:10G")
    assert "samples/s against bandwidth" in line.out


def test_what_cannot_be_planned_is_said_and_the_rest_planned(line):
    line("plan", "mlp-64-32-10", "--machine", "two-hosts-gigabit", "--workers", 2, "--json")
    refused = {row["strategy"]: row["why"] for row in json.loads(line.out)["refused"]}
    assert "those of hogbatch share the model in the memory of one host" in refused["hogbatch"]
    assert "allreduce" not in refused


def test_workers_that_were_asked_for_are_not_called_worth_using(line):
    """The network is so small that eight GPUs may lose against two, as the plan of all says."""
    plan = ("plan", "lenet5", "--machine", "dgx1-v100", "--batch-size", 16, "--json")
    line(*plan)
    every = json.loads(line.out)
    rates = {}
    for row in every["plans"]:
        rates.setdefault(row["workers"], row["samples_per_s"])
    assert every["workers_worth"] < 8
    assert "; 8 may lose " in every["workers_sentence"]
    line(*plan, "--workers", 8)
    asked = json.loads(line.out)
    assert asked["workers_worth"] is None
    assert asked["workers_sentence"].startswith(
        f"8 workers are no faster than one ({rates[8] / rates[1]:.2f}x)"
    )
    assert "worth" not in asked["workers_sentence"]


def test_a_plan_says_how_many_workers_and_how_far_it_errs(line):
    line("plan", "alexnet", "--machine", "k40-gigabit", "--batch-size", 256, "--json")
    plan = json.loads(line.out)
    assert 1 <= plan["workers_worth"] <= 4
    assert plan["workers_sentence"].startswith(f"{plan['workers_worth']} worker")
    assert all(0 < row["range_share"] <= 0.7 for row in plan["plans"])
    best = plan["plans"][0]
    assert best["memory_nbytes"].keys() <= {"gpu0", "gpu1", "gpu2", "gpu3", "station0", "station1"}
    assert max(best["link_nbytes_per_step"].values()) == best["wire_nbytes_per_step"]


def test_a_plan_states_what_is_left_after_backward(line):
    """Le et al. 2018, tables 3 and 4: the tree takes 20 ms down and 23 ms up; host hides all."""
    asked = ("plan", "alexnet", "--machine", POWER8, "--batch-size", 1024, "--workers", 4)
    line(*asked, "--json")
    plan = json.loads(line.out)
    left = {row["strategy"]: row["after_backward"] for row in plan["plans"]}
    assert left["allreduce"] is None
    assert left["host"]["backward_s"] == pytest.approx(0.104, rel=0.01)
    assert left["host"]["left_s"] < 1e-4
    assert left["tree"]["left_s"] == pytest.approx(0.020 + 0.023, rel=0.01)
    assert "sums take 23 ms and the way down 20 ms" in plan["backward_sentence"]
    line(*asked)
    assert "are left with host, 43.1 ms with tree, because with host" in line.out


def test_nothing_is_advised_where_a_machine_says_nothing_of_codecs(line):
    line("plan", "lenet5", "--machine", POWER8, "--json")
    plan = json.loads(line.out)
    assert plan["advice"] is None
    assert {row["codec"] for row in plan["plans"]} == {None}
    line("plan", "lenet5", "--machine", POWER8)
    assert "codec" not in line.out


def test_every_number_of_workers_that_a_machine_allows_can_be_chosen(line, tmp_path):
    # Without a wish only some of many numbers are looked at.
    text = MACHINE.read_text().replace("cores = 2", "cores = 20")
    start, device = text.index("[[devices]]"), text[text.index("[[devices]]") :]
    one = device[: device.index("[[devices]]", 1)]
    links = text[text.index("[[links]]") :]
    devices = "".join(one.replace('"cpu0"', f'"cpu{i}"') for i in range(20))
    (tmp_path / "twenty.toml").write_text(text[:start] + devices + links)
    asked = ("plan", "lenet5", "--machine", "twenty.toml", "--strategy", "allreduce", "--json")
    line(*asked)
    assert line.code == 0, line.err
    seen = sorted({row["workers"] for row in json.loads(line.out)["plans"]})
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    line(*asked, "--workers", 9)
    assert line.code == 0, line.err
    assert {row["workers"] for row in json.loads(line.out)["plans"]} == {9}


def test_a_run_is_compared_with_its_prediction(line, tmp_path):
    folder = write_run(tmp_path / "run", 1.5, 2.0)
    line("compare", folder, "--json")
    assert (line.code, line.err) == (0, "")
    table = json.loads(line.out)
    assert (table["left"], table["right"]) == ("predicted", "measured")
    first = table["rows"][0]
    assert first["quantity"] == "step"
    assert (first["left_s"], first["right_s"]) == pytest.approx((1.5, 2.0))
    assert first["error"] == pytest.approx(-0.25)
    line("compare", folder)
    assert "error" in line.out
    assert "-25.0 %" in line.out


def test_two_runs_are_compared_as_they_were_measured(line, tmp_path):
    one, other = write_run(tmp_path / "one", 1, 3), write_run(tmp_path / "other", 7, 4)
    line("compare", one, other, "--json")
    table = json.loads(line.out)
    assert (table["left"], table["right"]) == ("one", "other")
    assert (table["rows"][0]["left_s"], table["rows"][0]["right_s"]) == pytest.approx((3, 4))
    line("compare", one, other)
    assert line.code == 0
    for text in ("Seconds per step", "one", "other", "forward", "change", "+33.3 %"):
        assert text in line.out


def test_a_report_is_written_anew_and_its_path_printed(line, tmp_path):
    folder = write_run(tmp_path / "run", 1, 1)
    line("report", folder)
    assert (line.code, line.err) == (0, "")
    assert line.out == f"{folder}/report.html\n"
    assert "lenet5" in (folder / "report.html").read_text()
    line("report", folder, "--json")
    assert json.loads(line.out) == {"report": f"{folder}/report.html"}


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ([], "train     Profile, plan and train a model"),
        (["--help"], "Plan and train"),
        (["train", "--help"], "--set FIELD=VALUE"),
        (["rehearse", "--help"], "--stretch <str>"),
        (["plan", "--help"], "--machine <str>"),
        (["compare", "--help"], "{runs}..."),
        (["report", "--help"], "{folder}"),
        (["--version"], version("paceline")),
    ],
)
def test_help_is_no_error(line, command, text):
    line(*command)
    assert (line.code, line.err) == (0, "")
    assert " ".join(text.split()) in " ".join(line.out.split())


def test_settings_of_a_run_are_those_of_the_command_line(line, monkeypatch, tmp_path):
    requests = []
    monkeypatch.setattr(launching, "carry_out", requests.append)
    options = ["--set", "bucket_mb=5", "--set", "gradient_as_bucket_view=false", "--seed", 7]
    line("train", "lenet5", "--epochs", 2, "--learning-rate", 0.5, "--output", tmp_path, *options)
    assert line.code == 0, line.err
    (request,) = requests
    chosen = {"data": "digits", "optimizer": "sgd", "momentum": 0.9, "schedule": "constant"}
    expected = TrainSettings(
        model="lenet5",
        **chosen,
        epochs=2,
        learning_rate=0.5,
        output=tmp_path,
        seed=7,
        options={"bucket_mb": 5, "gradient_as_bucket_view": False},
    )
    assert (request.verb, request.settings, request.as_json) == ("train", expected, False)
    monkeypatch.setenv("WORLD_SIZE", "3")  # as many as torchrun has started
    line("plan", "lenet5", "--json")
    planned = requests[1]
    assert (planned.verb, planned.settings.workers, planned.as_json) == ("plan", 3, True)


def test_settings_of_a_rehearsal_are_those_of_the_command_line(line, monkeypatch):
    requests = []
    monkeypatch.setattr(launching, "carry_out", requests.append)
    times = ["--forward-ms", 50.6, "--backward-ms", 104]
    search = ["--chunk-search", "runtime", "--search-step", 3, "--interval", 4]
    line("rehearse", "mine:net", "--device", "P100", "--input-shape", "3x8x8", *times, *search,
         "--strategy", "host", "--workers", 4, "--json")  # fmt: skip
    assert line.code == 0, line.err
    (request,) = requests
    assert request.settings == RehearseSettings(
        model="mine:net",
        device="P100",
        input_shape=(3, 8, 8),
        forward_ms=50.6,
        backward_ms=104,
        chunk_search="runtime",
        search_step=3,
        interval=4,
        strategy="host",
        workers=4,
    )
    assert (request.verb, request.as_json) == ("rehearse", True)
    assert "rehearsed" in request.run_id
    again = type(request).model_validate_json(request.model_dump_json())  # as a worker gets it
    assert again == request


@pytest.mark.parametrize("code", [0, 2])
def test_a_rank_of_torchrun_ends_at_once(line, monkeypatch, code):
    # Threads of a process group can abort a process that takes the usual way out.
    def leave(code: int) -> NoReturn:
        raise SystemExit(f"left with {code}")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(launching, "work", lambda request: code)
    monkeypatch.setattr(launching, "leave", leave)
    with pytest.raises(SystemExit, match=f"left with {code}"):
        line("train", "lenet5")


DECLARED = ("--strategy", "allreduce", "--set", "codec=threshold:0.001@0.01")


def test_a_declared_threshold_is_planned_beside_no_codec(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = gigabit(line, *DECLARED, "--workers", 2)
    rows = {row["codec"]: row for row in result["plans"]}
    assert set(rows) == {None, "threshold:0.001@0.01"}
    encoded = rows["threshold:0.001@0.01"]
    assert encoded["config"]["codec"] == "threshold:0.001@0.01"
    # Of two ranks each sends four bytes for a hundredth of the values.
    share = encoded["wire_nbytes_per_step"] / rows[None]["wire_nbytes_per_step"]
    assert share == pytest.approx(0.01, rel=1e-3)


def test_a_threshold_without_a_share_is_refused_in_one_line(line):
    asked = ("--strategy", "allreduce", "--set", "codec=threshold:0.001", "--workers", 2)
    line("plan", "alexnet", "--machine", "two-hosts-gigabit", *asked, "--json")
    (refused,) = json.loads(line.out)["refused"]
    assert (
        "declare the share of the values that it sends, such as threshold:0.001@0.01"
        in (refused["why"])
    )
    assert line.code == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("--set", "codec=half"), "options: codec go with one strategy; name it"),
        (("--strategy", "allreduce,host", "--set", "chunk=1"), "go with one strategy; name it"),
        (
            ("--strategy", "host", "--set", "chunks=1"),
            "strategy host: field: 'chunks' is not known; did you mean 'chunk'?",
        ),
        (("--strategy", "host", "--set", "workers=1"), "workers is a setting of its own"),
        (("--strategy", "host", "--set", "codec=threshold:1@2"), "after @ stands the share"),
    ],
)
def test_options_of_a_plan_are_fields_of_one_strategy(line, asked, message):
    line("plan", "lenet5", "--machine", MACHINE, *asked)
    assert line.code == 2
    assert message in line.err


def test_a_plan_has_the_options_that_are_asked_for(line):
    asked = ("--strategy", "host", "--set", "chunk=3", "--workers", 2, "--json")
    line("plan", "lenet5", "--machine", MACHINE, *asked)
    assert {row["config"]["chunk"] for row in json.loads(line.out)["plans"]} == {3}
    line("plan", "lenet5", "--machine", MACHINE, *asked[:4], "--sweep", "latency=10u:1m", "--json")
    assert json.loads(line.out)["samples_per_s"].keys() == {"host"}
