"""Hugging Face models train on two ranks as in one process with all samples."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from pair import Ranks
from programs_of_ranks import check, names_in

MISSING = [name for name in ("transformers", "peft") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"without {MISSING}"),
    pytest.mark.timeout(600),
]
PROGRAMS = Path(__file__).parent / "programs" / "hugging_face"
EXCHANGES = ("ddp", "allreduce", "host", "tree", "auto")


@pytest.mark.parametrize("name", names_in(PROGRAMS))
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_two_ranks_train_a_model_as_one_process_does(pair: Ranks, name: str, exchange: str):
    pair(check, PROGRAMS, name, exchange, "alone", group=False, deadline_s=300)
