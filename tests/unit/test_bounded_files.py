"""Hostile files and messages are refused in one line, with little memory."""

import bz2
import json
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf, nan
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from command_line import Line, write_run
from paceline.core.cost import compute_lane
from paceline.core.errors import InvalidInput, PacelineError, shown
from paceline.core.plan import Kind
from paceline.core.reading import read_json, read_record, read_toml
from paceline.core.timeline import Span
from paceline.links.files import read_file, write_text, written_whole
from paceline.measure.device_profile import PerSecond, Seconds
from paceline.record.worker_trace import Trace
from paceline.rpc.value_checks import ValueChecks, norm_of
from paceline.rpc.workers import difference
from paceline.training.data.libsvm import load_libsvm
from refusals import refused


@given(st.text(), st.text())
def test_an_error_is_one_line_that_a_terminal_can_show(field: str, problem: str):
    message = str(InvalidInput(field, problem))
    assert message.isprintable()
    assert str(PacelineError(message)) == message


def test_an_error_shows_its_field_its_problem_the_value_and_the_hint():
    error = InvalidInput("batch_size", "must be at least 1", got=0, hint="leave it out")
    assert str(error) == "batch_size must be at least 1 (got 0); leave it out"
    again = InvalidInput.of(str(error))
    assert (again.field, str(again)) == ("batch_size", str(error))
    assert str(InvalidInput.of("plain")) == "plain"


def test_long_values_are_shortened_in_errors():
    values = ("a" * 198, "a" * 199, 10**5000, [1, None])
    assert [len(shown(value)) for value in values] == [200, 203, 34, 9]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": [1, NaN]}', "is not JSON"),
        ('{"a": [1, -1e400]}', "a.1 must be"),
        ('{"a": {"b": 9223372036854775808}}', "a.b must"),
        ('{"a": 1e41}', "a must be"),
        ("[" * 201 + "]" * 201, "is nested"),
    ],
)
def test_json_beyond_its_bounds(text: str, place: str):
    with refused("it") as caught:
        read_json(text.encode(), "it")
    assert caught.value.problem.startswith(place)


def test_json_within_its_bounds():
    for value in (2**63 - 1, -(2**63 - 1), 1e40, None):
        assert read_json(json.dumps([value]).encode(), "it") == [value]
    text = "[" * 200 + "]" * 200
    assert read_json(text.encode(), "it") == json.loads(text)


TOML = {
    "arrays": "a = " + "[" * 3000 + "]" * 3000,
    "parts": ".".join(["a"] * 100_000) + " = 1",
    "quoted parts": "[" + ".".join(['"a"'] * 100_000) + "]",
    "digits": "a = " + "9" * 5000,
    "nan": "a = nan",
    "infinite": "a = 1e400",
    "long": "a = 0x" + "f" * 40,
    "tables": "a = {" + "b.c = {" * 40 + "}" * 41,
    "control": "\0",
}


@pytest.mark.parametrize("name", TOML)
def test_toml_beyond_its_bounds(name: str):
    with refused("it"):
        read_toml(TOML[name].encode(), "it")


def test_dots_in_toml_values_do_not_count_as_key_parts():
    text = 'a = "one.two.three"\nb = [' + ", ".join(["1.5"] * 100) + "]\n[c.d.e]\nf = 1"
    assert read_toml(text.encode(), "it")["c"] == {"d": {"e": {"f": 1}}}


def test_only_regular_files_up_to_a_size_are_read(tmp_path: Path):
    """Reading a pipe would block, and reading a device would never end."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with refused(path):
        read_file(path, 4)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "/dev/zero", ".", "none", "nul\0"):
        with refused(tmp_path / name):
            read_file(tmp_path / name, 100)


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "\x1b[2J\x07"])
def test_hostile_names_reach_neither_terminal_nor_markup(line: Line, tmp_path: Path, name: str):
    """The name replaces those of the device, the model, the strategy and the processor."""
    folder = write_run(tmp_path / "run", 0.01, 0.011)
    for file in ("trace.json", "result.json"):
        text = (folder / file).read_text()
        for known in ("cpu0", "lenet5", "allreduce", "processor"):
            text = text.replace(f'"{known}', json.dumps(name)[:-1])
        (folder / file).write_text(text)
    line("report", folder)
    if line.code == 0:  # otherwise the report refuses it
        assert "alert(1)</script>" not in (folder / "report.html").read_text()
    line("compare", folder, folder)
    assert not {"\x1b", "\x07"} & set(line.out + line.err)
    assert len(line.err.splitlines()) <= 1


@contextmanager
def with_memory(most_nbytes: int) -> Iterator[None]:
    """Assert that at most this memory is allocated at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_small_files_cannot_fill_the_memory(tmp_path: Path):
    packed, wide = tmp_path / "a.bz2", tmp_path / "b.libsvm"
    packed.write_bytes(bz2.compress(bytes(3 * 10**8)))
    with with_memory(64 * 2**20), refused(packed):
        load_libsvm(str(packed), None, 0)
    wide.write_bytes(b"1 1:1\n2 20000000:1\n" * 5)  # 800 MB as dense values
    with refused(wide):
        load_libsvm(str(wide), None, 0)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "result.json"
    write_text(path, "first")
    with suppress(KeyError), written_whole(path) as partly:
        partly.write_text("sec")
        raise KeyError
    assert path.read_text() == "first"
    write_text(path, "second")
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"result.json": "second"}


SPAN = Span(Kind.FORWARD, 3, "fc", 1, (compute_lane("cpu1"),), 1.0, 2.0)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize("data", [b"[" * 10**5, b'{"a":' * 10**5])
def test_deep_json_is_refused_with_little_memory(data: bytes):
    with with_memory(3 * len(data) + 2**20), refused("layout"):
        read_json(data, "layout")


@given(st.binary() | st.text().map(str.encode) | ANY_JSON.map(json.dumps).map(str.encode))
def test_any_bytes_are_parsed_or_refused(data: bytes):
    with suppress(InvalidInput):
        read_json(data, "layout")


@given(ANY_JSON, ANY_JSON)
def test_a_layout_of_any_shape_is_compared(value: object, other: object):
    here = {"samples": [4, 1], "body": {"a": "float32 [3]"}}
    there = here | {"body": value, "more": other}
    try:
        found = difference(json.dumps(here), json.dumps(there))
    except InvalidInput:
        return
    assert (found is None) == (value == here["body"] and set(there) == set(here))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "1e400", '"x"', "[]", "null", "1e31"])
@pytest.mark.parametrize("kind", [Seconds, PerSecond])
def test_impossible_times_and_speeds_are_refused(value: str, kind: object):
    with refused("profile"):
        read_record(TypeAdapter(dict[str, kind]), f'{{"a": {value}}}'.encode(), "profile")


WRONG_SPANS = {
    "worker": (0, None),
    "start_s": (nan, -1.0),
    "end_s": (inf, 0.5),
    "step": (-1, 2**31),
    "part": ("x" * 201,),
    "on": (SPAN.on * 17, (compute_lane("x" * 201),)),
}


@pytest.mark.parametrize("name", WRONG_SPANS)
def test_impossible_spans_are_refused(name: str):
    Trace([SPAN]).check(1, 1, ())
    for value in WRONG_SPANS[name]:
        with refused("trace"):
            Trace([SPAN, SPAN._replace(**{name: value})]).check(1, 1, ())


def test_a_gradient_norm_is_compared_with_those_of_other_workers():
    checks = ValueChecks([torch.tensor([10.0])], reads_values=True, is_clipped=False)
    checks.compares_norms = True

    def check(worker: int, norm: float) -> None:
        checks.gradients("gradients", "gradients", worker, [torch.tensor([norm])])

    check(0, 1e7)  # without earlier gradients, the parameters set the limit
    with refused("gradients"):
        check(0, 1.2e7)
    for _ in range(100):
        check(1, 2.0)
        check(2, 0.0)
    check(0, 199.0)
    for _ in range(100):
        with refused("gradients"):
            check(0, 201.0)
    check(1, 10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_of_large_values_does_not_overflow(dtype: torch.dtype):
    found = norm_of([torch.full((4,), 1e30, dtype=dtype), torch.full((12,), 1e30, dtype=dtype)])
    assert found == pytest.approx(4e30, rel=1e-2)
    assert norm_of([torch.tensor([1.0, nan])]) != norm_of([torch.ones(1)])
