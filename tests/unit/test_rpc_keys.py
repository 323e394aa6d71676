"""Keys and addresses: secret keys are private, and no hub listens on every interface."""

import os
import stat
from pathlib import Path

import pytest

from paceline.core.errors import InvalidInput
from paceline.rpc.client import Client
from paceline.rpc.keys import (
    bind_address,
    connect_address,
    generate_keys,
    load_hub_keys,
    load_worker_keys,
    parse_address,
)
from paceline.rpc.limits import Identity

LAYOUT = "ab" * 32


class TestKeys:
    def test_generated_keys_can_be_loaded_and_secret_ones_are_private(self, tmp_path: Path):
        before = os.umask(0)
        try:
            written = generate_keys(tmp_path / "keys")
        finally:
            os.umask(before)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in written}
        assert modes == {
            "hub.key": 0o600,
            "hub.pub": 0o644,
            "worker.key": 0o600,
            "worker.pub": 0o644,
        }
        hub, client = load_hub_keys(tmp_path / "keys"), load_worker_keys(tmp_path / "keys")
        assert hub.workers == {client.public}
        assert hub.secret.decode() not in repr(hub)
        assert client.secret.decode() not in repr(client)

    def test_keys_are_never_overwritten(self, tmp_path: Path):
        generate_keys(tmp_path)
        before = (tmp_path / "hub.key").read_bytes()
        with pytest.raises(InvalidInput, match="is there already"):
            generate_keys(tmp_path)
        assert (tmp_path / "hub.key").read_bytes() == before

    def test_a_worker_needs_no_secret_of_the_hub(self, tmp_path: Path):
        generate_keys(tmp_path)
        (tmp_path / "hub.key").unlink()
        load_worker_keys(tmp_path)
        with pytest.raises(InvalidInput, match=r"hub\.key: No such file"):
            load_hub_keys(tmp_path)

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (lambda folder: (folder / "hub.key").chmod(0o640), "chmod 600"),
            (lambda folder: (folder / "worker.pub").unlink(), "no worker could join"),
            (lambda folder: (folder / "worker.pub").write_text("hello\n"), "40 characters"),
            (lambda folder: (folder / "hub.key").write_text(""), "40 characters"),
        ],
    )
    def test_keys_that_cannot_be_used_are_refused(self, tmp_path: Path, spoil, said: str):
        generate_keys(tmp_path)
        spoil(tmp_path)
        with pytest.raises(InvalidInput, match=said):
            load_hub_keys(tmp_path)


class TestAddresses:
    @pytest.mark.parametrize("text", ["tcp://10.0.0.1:5555", "tcp://[fe80::1]:1", "tcp://a.b:80"])
    def test_an_address_prints_as_it_was_parsed(self, text: str):
        assert str(parse_address(text)) == text

    @pytest.mark.parametrize(
        "text",
        [
            "10.0.0.1:5555",
            "tcp://10.0.0.1",
            "tcp://:5555",
            "tcp://*:5555",
            "tcp://1.2.3.4:65536",
            "tcp://1.2.3.4:-1",
            "tcp://1.2.3.4:٣",
            "tcp://::1:80",
            "ipc://x:1",
            "tcp://a;b:1",
            "",
        ],
    )
    def test_other_texts_are_refused(self, text: str):
        with pytest.raises(InvalidInput, match="is not of the form"):
            parse_address(text)

    @pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
    def test_a_hub_never_binds_every_interface(self, host: str):
        with pytest.raises(InvalidInput, match="every interface"):
            bind_address(f"tcp://{host}:5555", has_keys=True)

    def test_without_keys_only_loopback_addresses_are_accepted(self):
        for plain in ("tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0"):
            assert bind_address(plain, has_keys=False).is_loopback
        with pytest.raises(InvalidInput, match="needs keys"):
            bind_address("tcp://10.0.0.1:5555", has_keys=False)
        with pytest.raises(InvalidInput, match="needs keys"):
            connect_address("tcp://hub.example:5555", has_keys=False)
        assert connect_address("tcp://hub.example:5555", has_keys=True).port == 5555

    def test_a_client_checks_its_address_first(self):
        with pytest.raises(InvalidInput, match="port 0"):
            Client("tcp://127.0.0.1:0", Identity("run", LAYOUT, 0), keys=None, deadline_s=1)
