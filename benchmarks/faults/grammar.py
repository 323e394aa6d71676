"""Draw lies: each falsifies one place of a worker's message by one rule.

A lie is the name of its rule and a function, drawn before any message is known. The function maps
a message to a false message, or to None if the rule does not apply.
"""

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fuzzing.changes import FLIPS, LITERALS, NODES, PLACES, Change, spliced
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from paceline.rpc.frames import MAX_PARTS, Message

Rule = Callable[[Message], Message | None]
Lie = tuple[str, Rule]

_TOPICS = (
    *("begin", "parameters", "activations", "gradients", "hubs_parameters", "hubs_gradients"),
    *("buffers", "profile", "probe", "done", "failed", "again", "refused"),
    *("state", "round", "units", "part", "parts", "tested", "saved", "clock", "gossip", ""),
)
_FAR = st.sampled_from((0, 1, -1, 2, 7, 1000, 2**31, 2**53, 2**62, -(2**62)))
_NEAR = st.sampled_from((-1, 1, 2, -1000, 1000))
_VALUES = (float("nan"), float("inf"), -float("inf"), 3e38, -1.0, 0.0, 1e-30, 0.5, 2.0**53)
_NOTHING = (b'{"spans":[],"sent":[],"received":[]}', b'{"digest":null}', b"{}", b"")


def lies(number: int, count: int) -> list[Lie]:
    """Draw `count` lies, with `number` as the seed."""
    told: list[Lie] = []
    quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}

    @seed(number)
    @settings(max_examples=count, database=None, phases=[Phase.generate], **quiet)
    @given(_LIES)
    def drawn(lie: Lie) -> None:
        told.append(lie)

    drawn()
    return told


def _with(field: str, values: SearchStrategy[Any]) -> SearchStrategy[Rule]:
    """Draw rules that set a field."""
    return values.map(lambda value: lambda message: replace(message, **{field: value}))


def _number(field: str) -> SearchStrategy[Rule]:
    """Draw rules that set a number, or change it slightly."""
    near: SearchStrategy[Rule] = _NEAR.map(
        lambda by: lambda message: replace(message, **{field: getattr(message, field) + by})
    )
    return near | _with(field, _FAR)


def _on_parts(change: Callable[[list[Any]], list[Any]]) -> Rule:
    """Return a rule that changes the list of parts; it does not apply if nothing changes."""

    def lie(message: Message) -> Message | None:
        parts = list(message.parts)
        changed = change(list(parts))[:MAX_PARTS]
        return replace(message, parts=tuple(changed)) if changed != parts else None

    return lie


def _more_parts(place: int, chosen: int) -> Rule:
    """Insert an empty part, a part of one byte, or a copy of a part."""

    def change(parts: list[Any]) -> list[Any]:
        known, begin = (b"", b"x", *parts), place % (len(parts) + 1)
        return [*parts[:begin], known[chosen % len(known)], *parts[begin:]]

    return _on_parts(change)


def _fewer_parts(place: int) -> Rule:
    """Remove a part."""
    return _on_parts(lambda parts: [p for i, p in enumerate(parts) if i != place % len(parts)])


def _other_order(places: list[int]) -> Rule:
    """Reorder the parts."""

    def change(parts: list[Any]) -> list[Any]:
        order = sorted(range(len(parts)), key=lambda i: places[i % len(places)], reverse=True)
        return [parts[i] for i in order]

    return _on_parts(change)


def _in_a_part(place: int, change: Change) -> Rule:
    """Change one part."""
    return _on_parts(
        lambda parts: [
            change(bytes(part)) if i == place % len(parts) else part for i, part in enumerate(parts)
        ]
    )


def _in_a_record(change: Change) -> Rule:
    """Change the first part that is a JSON record."""

    def lie(message: Message) -> Message | None:
        found = [i for i, part in enumerate(message.parts) if bytes(part[:1]) == b"{"]
        return _in_a_part(found[0], change)(message) if found else None

    return lie


def _noise(first: int, noise: bytes) -> Change:
    """Overwrite bytes with noise, once or repeatedly to the end; the length stays the same."""

    def change(data: bytes) -> bytes:
        begin = first % (len(data) + 1)
        whole = noise * (len(data) // len(noise) + 1) if first % 2 else noise
        return (data[:begin] + whole + data[begin + len(whole) :])[: len(data)]

    return change


def _numbers(form: str, value: float, place: int) -> Change:
    """Overwrite one number, or all numbers, of the `struct` format `form` with `value`."""

    def change(data: bytes) -> bytes:
        changed, size = bytearray(data), struct.calcsize(form)
        places = range(0, len(data) - size + 1, size)
        for one in places if place % 2 else places[place % max(1, len(places)) :][:1]:
            struct.pack_into(form, changed, one, value)
        return bytes(changed)

    return change


def _done_of_nothing(step: int | None, parts: list[bytes]) -> Rule:
    """Replace the message by `done`."""
    return lambda message: Message("done", step or message.step, parts=tuple(parts))


_CUT = st.builds(spliced, PLACES, st.just(2**30), st.just(0), st.binary(max_size=64))
_LONGER = st.builds(spliced, PLACES, st.just(2**30), st.just(2), st.just(b""))
_NOISE = st.builds(_noise, PLACES, st.binary(min_size=1, max_size=64))
_OTHER_VALUES = st.builds(_numbers, st.sampled_from(("<f", "<d")), st.sampled_from(_VALUES), PLACES)
_RULES: dict[str, SearchStrategy[Rule]] = {
    "topic": _with("topic", st.sampled_from(_TOPICS)),
    "step": _number("step"),
    "version": _number("version"),
    "fewer_parts": PLACES.map(_fewer_parts),
    "more_parts": st.builds(_more_parts, PLACES, PLACES),
    "other_order": st.lists(PLACES, min_size=2, max_size=8).map(_other_order),
    "other_size": st.builds(_in_a_part, PLACES, _CUT | _LONGER),
    "random_bytes": st.builds(_in_a_part, PLACES, _NOISE | FLIPS),
    "values": st.builds(_in_a_part, PLACES, _OTHER_VALUES),
    "record": NODES.map(_in_a_record),
    "not_a_record": LITERALS.map(lambda text: _in_a_part(0, lambda _: text)),
    "done_of_nothing": st.builds(
        _done_of_nothing, st.none() | _FAR, st.lists(st.sampled_from(_NOTHING), max_size=2)
    ),
}
_LIES: SearchStrategy[Lie] = st.sampled_from(sorted(_RULES)).flatmap(
    lambda name: _RULES[name].map(lambda rule: (name, rule))
)
