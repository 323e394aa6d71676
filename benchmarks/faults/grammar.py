"""Lies: what a worker says, changed by one rule in one place.

A rule takes a message and returns what is sent in its place; None where it does not apply.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from paceline.rpc.frames import MAX_PARTS, Message

_TOPICS = (
    *("begin", "parameters", "activations", "gradients", "whole-parameters", "whole-gradients"),
    *("buffers", "profile", "probe", "done", "failed", "again", "refused"),
    *("state", "round", "units", "part", "parts", "tested", "saved", "clock", "gossip", ""),
)
_CODECS = ("", "dynamic8", "half", "onebit", "linear4", "threshold:0.1", "nonsense")
_NUMBERS = (0, 1, -1, 2, 7, 1000, 2**31, 2**53, 2**62, -(2**62))
_VALUES = (float("nan"), float("inf"), -float("inf"), 1e300, 3e38, -1.0, 0.0, 1e-300, 0.5, 2.0**53)
_LEAVES: tuple[str, ...] = (
    *("NaN", "Infinity", "-Infinity", "-1", "0", "1e400", "1e308", "1e-308", "9" * 400, "null"),
    *("true", '""', '"</script><script>alert(1)</script>"', '"\\u001b[2J"', "[]", "{}", "[[[]]]"),
    *('"' + "x" * 5000 + '"', "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000),
)
_MARK = "\0here\0"
Rule = Callable[[Random, Message], Message | None]


def topic(random: Random, message: Message) -> Message:
    """Call it something else."""
    return replace(message, topic=random.choice(_TOPICS))


def step(random: Random, message: Message) -> Message:
    """Be somewhere else."""
    near = message.step + random.choice((-1, 1, 2, -1000, 1000))
    return replace(message, step=random.choice((near, *_NUMBERS)))


def version(random: Random, message: Message) -> Message:
    """Know other parameters."""
    near = message.version + random.choice((-1, 1, 1000))
    return replace(message, version=random.choice((near, *_NUMBERS)))


def codec(random: Random, message: Message) -> Message:
    """Name another codec."""
    return replace(message, codec=random.choice(_CODECS))


def fewer_parts(random: Random, message: Message) -> Message | None:
    """Leave a part out."""
    if not message.parts:
        return None
    left_out = random.randrange(len(message.parts))
    kept = (part for i, part in enumerate(message.parts) if i != left_out)
    return replace(message, parts=tuple(kept))


def more_parts(random: Random, message: Message) -> Message:
    """Add a part, or one once more."""
    more = random.choice((b"", b"x", *message.parts))
    place = random.randrange(len(message.parts) + 1)
    parts = (*message.parts[:place], more, *message.parts[place:])
    return replace(message, parts=parts[:MAX_PARTS])


def other_order(random: Random, message: Message) -> Message | None:
    """Send the parts in another order."""
    if len(message.parts) < 2:
        return None
    return replace(message, parts=tuple(random.sample(message.parts, len(message.parts))))


def other_size(random: Random, message: Message) -> Message | None:
    """Cut a part, or lengthen it."""

    def sized(data: bytearray) -> None:
        cut = random.randrange(len(data) + 1)
        data[cut:] = random.choice((b"", bytes(8), random.randbytes(64), bytes(data)))

    return _in_a_part(random, message, sized)


def random_bytes(random: Random, message: Message) -> Message | None:
    """Send noise, in one place or all over."""

    def noisy(data: bytearray) -> None:
        begin = random.randrange(len(data) + 1)
        length = random.choice((1, 4, 8, len(data)))
        noise = random.randbytes(len(data[begin : begin + length]))
        data[begin : begin + length] = noise

    return _in_a_part(random, message, noisy)


def values(random: Random, message: Message) -> Message | None:
    """Send numbers that are not finite, zero, or out of all proportion."""

    def changed(data: bytearray) -> None:
        form = random.choice(("<f", "<d"))
        value = random.choice(_VALUES)
        if form == "<f" and abs(value) == 1e300:
            value = 3e38
        size = struct.calcsize(form)
        places = range(0, len(data) - size + 1, size)
        few = random.random() < 0.5
        chosen = random.sample(places, 1) if few and len(places) else places
        for place in chosen:
            struct.pack_into(form, data, place, value)

    return _in_a_part(random, message, changed)


def record(random: Random, message: Message) -> Message | None:
    """Change, add or leave out a field of a record."""
    texts = [i for i, part in enumerate(message.parts) if bytes(part[:1]) == b"{"]
    for i in texts:
        try:
            content = json.loads(bytes(message.parts[i]))
        except ValueError:
            continue
        places = list(_places(content))
        where = random.choice(places)
        text = _changed(random, content, where).encode()
        return replace(message, parts=(*message.parts[:i], text, *message.parts[i + 1 :]))
    return None


def not_a_record(random: Random, message: Message) -> Message | None:
    """Send other JSON, or none, in place of a record."""
    if not message.parts:
        return None
    text = random.choice(_LEAVES).encode()
    return replace(message, parts=(text, *message.parts[1:]))


def done_of_nothing(random: Random, message: Message) -> Message:
    """Say that all is done."""
    texts = (b'{"spans":[],"sent":[],"received":[]}', b'{"digest":null}', b"{}", b"")
    parts = tuple(random.choice(texts) for _ in range(random.randrange(3)))
    return Message("done", random.choice((0, message.step, *_NUMBERS)), parts=parts)


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        *(topic, step, version, codec, fewer_parts, more_parts, other_order, other_size),
        *(random_bytes, values, record, not_a_record, done_of_nothing),
    )
}


def _in_a_part(
    random: Random, message: Message, change: Callable[[bytearray], None]
) -> Message | None:
    """Return the message with one of its parts changed."""
    if not message.parts:
        return None
    chosen = random.randrange(len(message.parts))
    data = bytearray(bytes(message.parts[chosen]))
    change(data)
    parts = (*message.parts[:chosen], bytes(data), *message.parts[chosen + 1 :])
    return replace(message, parts=parts)


def _places(content: Any, where: tuple[Any, ...] = ()) -> "list[tuple[Any, ...]]":
    """Return where in a JSON value there is something to change."""
    found = [where]
    if isinstance(content, dict):
        for key, value in content.items():
            found += _places(value, (*where, key))
    elif isinstance(content, list):
        for i, value in enumerate(content[:50]):
            found += _places(value, (*where, i))
    return found


def _changed(random: Random, content: Any, where: tuple[Any, ...]) -> str:
    """Return the text of a JSON value with what is there replaced, left out, or named otherwise."""
    if not where:
        return random.choice(_LEAVES)
    holder = content
    for key in where[:-1]:
        holder = holder[key]
    leaf = random.choice(_LEAVES)
    if random.random() < 0.2:
        del holder[where[-1]]
    elif isinstance(holder, dict) and random.random() < 0.2:
        holder[random.choice(("", "</script>", "\x1b[31m", "worker", "x" * 1000))] = _MARK
    else:
        holder[where[-1]] = _MARK
    return json.dumps(content).replace(json.dumps(_MARK), leaf)
