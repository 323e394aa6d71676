"""The example of activations that travel encoded, as torchrun starts it."""

from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "activations.py"


@pytest.mark.slow
def test_the_example_learns_and_says_what_it_sent(start):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = start(*torchrun, str(EXAMPLE)).finish()
    assert done.code == 0, done.err
    words = done.out.split()
    assert float(words[words.index("accuracy") + 1].rstrip("%")) > 90
    nbytes = int(words[words.index("bytes") - 1].replace(",", ""))
    # Rows of 128 activations and of 10 errors in 8 bits, and nearly as much back: of 8 epochs and
    # of the test, whose rows have no errors; rank 0 has 899 samples, and rank 1 has 898.
    rows = 8 * (899 * (128 + 10) + 898 * (128 + 10)) + 899 * 128 + 898 * 10
    assert rows < nbytes < 1.1 * rows
