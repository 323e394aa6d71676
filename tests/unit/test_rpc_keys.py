"""Keys and addresses: secret keys are private, and no hub listens on every interface."""

import os
import stat
from pathlib import Path

import pytest

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
from refusals import refused


def test_generated_keys_can_be_loaded_and_secret_ones_are_private(tmp_path: Path):
    before = os.umask(0)
    try:
        written = generate_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in written}
    secret, public = ("hub.key", "worker.key"), ("hub.pub", "worker.pub")
    assert modes == dict.fromkeys(secret, 0o600) | dict.fromkeys(public, 0o644)
    hub, client = load_hub_keys(tmp_path / "keys"), load_worker_keys(tmp_path / "keys")
    assert hub.workers == {client.public}
    assert hub.secret.decode() not in repr(hub)
    assert client.secret.decode() not in repr(client)


def test_keys_are_never_overwritten_and_a_worker_needs_no_secret_of_the_hub(tmp_path: Path):
    generate_keys(tmp_path)
    before = (tmp_path / "hub.key").read_bytes()
    with refused("keys"):
        generate_keys(tmp_path)
    assert (tmp_path / "hub.key").read_bytes() == before
    (tmp_path / "hub.key").unlink()
    load_worker_keys(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda folder: (folder / "hub.key").unlink(), "hub.key"),
        (lambda folder: (folder / "hub.key").chmod(0o640), "hub.key"),
        (lambda folder: (folder / "hub.key").write_text(""), "hub.key"),
        (lambda folder: (folder / "worker.pub").write_text("hello\n"), "worker.pub"),
        (lambda folder: (folder / "worker.pub").unlink(), None),
    ],
)
def test_keys_that_cannot_be_used_are_refused(tmp_path: Path, spoil, field: str | None):
    generate_keys(tmp_path)
    spoil(tmp_path)
    with refused(tmp_path / field if field else "keys"):
        load_hub_keys(tmp_path)


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:5555", "tcp://[fe80::1]:1", "tcp://a.b:65535"])
def test_an_address_prints_as_it_was_parsed(text: str):
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("10.0.0.1:5555", "tcp://10.0.0.1", "tcp://:5555", "tcp://*:5555", "tcp://1.2.3.4:65536"),
        *("tcp://1.2.3.4:-1", "tcp://1.2.3.4:٣", "tcp://::1:80", "ipc://x:1", "tcp://a;b:1", ""),
    ],
)
def test_other_texts_are_refused(text: str):
    with refused("address"):
        parse_address(text)


def test_a_hub_never_binds_every_interface_or_without_keys_any_but_loopback_ones():
    for host in ("0.0.0.0", "[::]", "a.name"):
        with refused("bind"):
            bind_address(f"tcp://{host}:5555", has_keys=True)
    for plain in ("tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0"):
        assert bind_address(plain, has_keys=False).is_loopback
    with refused("bind"):
        bind_address("tcp://10.0.0.1:5555", has_keys=False)
    with refused("connect"):
        connect_address("tcp://hub.example:5555", has_keys=False)
    assert connect_address("tcp://hub.example:5555", has_keys=True).port == 5555


def test_a_client_checks_its_address_first():
    with refused("connect"):
        Client("tcp://127.0.0.1:0", Identity("run", "ab" * 32, 0), keys=None, deadline_s=1)
