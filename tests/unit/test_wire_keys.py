"""Keys and addresses of the wire: what is secret stays so, and nobody listens everywhere."""

import os
import stat
from pathlib import Path

import pytest

from paceline.core.errors import InvalidInput
from paceline.wire import Client, Identity, generate, load_client, load_hub
from paceline.wire.addresses import parse, to_bind, to_connect

LAYOUT = "ab" * 32


class TestKeys:
    def test_what_is_generated_can_be_loaded_and_secrets_are_private(self, tmp_path: Path):
        before = os.umask(0)
        try:
            written = generate(tmp_path / "keys")
        finally:
            os.umask(before)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in written}
        assert modes == {
            "hub.key": 0o600,
            "hub.pub": 0o644,
            "worker.key": 0o600,
            "worker.pub": 0o644,
        }
        hub, client = load_hub(tmp_path / "keys"), load_client(tmp_path / "keys")
        assert hub.workers == {client.public}
        assert hub.secret.decode() not in repr(hub)
        assert client.secret.decode() not in repr(client)

    def test_keys_are_never_overwritten(self, tmp_path: Path):
        generate(tmp_path)
        before = (tmp_path / "hub.key").read_bytes()
        with pytest.raises(InvalidInput, match="is there already"):
            generate(tmp_path)
        assert (tmp_path / "hub.key").read_bytes() == before

    def test_a_worker_needs_nothing_that_is_the_hubs_secret(self, tmp_path: Path):
        generate(tmp_path)
        (tmp_path / "hub.key").unlink()
        load_client(tmp_path)
        with pytest.raises(InvalidInput, match=r"hub\.key: No such file"):
            load_hub(tmp_path)

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
        generate(tmp_path)
        spoil(tmp_path)
        with pytest.raises(InvalidInput, match=said):
            load_hub(tmp_path)


class TestAddresses:
    @pytest.mark.parametrize("text", ["tcp://10.0.0.1:5555", "tcp://[fe80::1]:1", "tcp://a.b:80"])
    def test_an_address_is_read_as_it_is_written(self, text: str):
        assert str(parse(text)) == text

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
    def test_what_is_no_address_is_refused(self, text: str):
        with pytest.raises(InvalidInput, match="is not of the form"):
            parse(text)

    @pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
    def test_a_hub_never_listens_everywhere(self, host: str):
        with pytest.raises(InvalidInput, match="every interface"):
            to_bind(f"tcp://{host}:5555", has_keys=True)

    def test_without_keys_nobody_leaves_this_machine(self):
        for plain in ("tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0"):
            assert to_bind(plain, has_keys=False).is_loopback
        with pytest.raises(InvalidInput, match="needs keys"):
            to_bind("tcp://10.0.0.1:5555", has_keys=False)
        with pytest.raises(InvalidInput, match="needs keys"):
            to_connect("tcp://hub.example:5555", has_keys=False)
        assert to_connect("tcp://hub.example:5555", has_keys=True).port == 5555

    def test_a_client_checks_its_address_before_it_does_anything(self):
        with pytest.raises(InvalidInput, match="port 0"):
            Client(
                "tcp://127.0.0.1:0",
                Identity("run", LAYOUT, 0),
                keys=None,
                deadline_s=1,
                say=lambda text: None,
            )
