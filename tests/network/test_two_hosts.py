import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "two_hosts.py"


@pytest.mark.parametrize("exchange", ["host", "tree"])
def test_two_ranks_on_each_of_two_hosts_train_as_one_process_does(on_hosts, exchange):
    finished = on_hosts(2, str(PROGRAM), exchange)
    assert [one.code for one in finished] == [0, 0], "".join(one.err for one in finished)
    rows = [json.loads(line) for one in finished for line in one.out.splitlines()]
    assert sorted(row["rank"] for row in rows) == [0, 1, 2, 3]
    assert max(row["error"] for row in rows) < 1e-12
    assert len({tuple(row["bits"]) for row in rows}) == 1
    # With host the first rank of each exchanges its sums with the other host. The other rank waits
    # for that, and says so: else a report would call it idle.
    between = {row["rank"] for row in rows if any("send" in name for name in row["spans"])}
    assert between == {0, 1, 2, 3}
