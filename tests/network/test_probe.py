import pytest

from paceline.records.machine_file import read_machine

pytestmark = pytest.mark.slow


def test_the_wire_between_two_hosts_is_measured(on_hosts, tmp_path):
    options = ("--seconds", "0.2", "--output", "two.toml")
    finished = on_hosts(2, "-m", "paceline", "probe", *options)
    assert [one.code for one in finished] == [0, 0], "".join(one.err for one in finished)
    machine = read_machine(tmp_path / "two.toml")
    # Two hosts of one name, as both are this computer.
    assert [host.name for host in machine.hosts] == ["host0", "host1"]
    assert [device.host for device in machine.devices] == ["host0", "host0", "host1", "host1"]
    between = {link.between: link for link in machine.links}
    assert list(between) == [("host0", "host0"), ("host1", "host1"), ("host0", "host1")]
    assert [link.uses_cores for link in between.values()] == [True, True, False]
    assert all(1e6 < link.bandwidth_bytes_per_s < 1e12 for link in between.values())
