"""Hugging Face models on two ranks, beside one process on all samples: see programs/peers."""

import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import Started

MISSING = [name for name in ("transformers", "peft") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"without {MISSING}")
PEERS = Path(__file__).parent / "programs" / "peers"
PAIRS = runpy.run_path(str(PEERS / "pairs.py"))
DEADLINE_S = PAIRS["ALL_S"] + 60
EXCHANGES = ("ddp", "allreduce", "host", "tree", "auto")
NAMES = PAIRS["names_in"]([PEERS / "hugging_face.py"])

Outcomes = dict[tuple[str, str], list[str]]  # what went wrong, of each model and exchange


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    folder = tmp_path_factory.mktemp("hugging_face")
    arguments = [str(folder), "alone", ",".join(EXCHANGES), "hugging_face"]
    started = Started([sys.executable, str(PEERS / "pairs.py"), *arguments], folder)
    try:
        done = started.finish(DEADLINE_S)
        left = started.members()
    finally:
        started.kill()
    assert done.code == 0, done.err
    assert not left
    rows = map(json.loads, done.out.splitlines())
    return {(name, exchange): failures for name, exchange, failures, _ in rows}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_a_model_as_one_process_does(outcomes: Outcomes, name: str, exchange: str):
    failures = outcomes[name, exchange]
    assert not failures, "\n".join(failures)
