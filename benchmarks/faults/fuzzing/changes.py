"""Hypothesis strategies for changes to bytes, text and JSON trees.

A strategy draws a function from bytes to bytes that includes its places and values. The input need
not be known yet, so the same changes apply to files, frames and message parts.
"""

import json
import re
from collections.abc import Callable
from functools import reduce
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Change = Callable[[bytes], bytes]
Changes = SearchStrategy[Change]

PLACES = st.integers(0, 2**20)  # used modulo the number of places
# Values that a careless parser accepts or fails on; each is JSON, or nearly JSON.
LEAVES: tuple[str, ...] = (
    *("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "1e400", "-1e400", "1e308", "1e-308"),
    *("-1", "0", "-0.0", "1.5", "2147483648", "9223372036854775808", "-9223372036854775809"),
    *("9" * 400, "9" * 5000, "null", "true", "false", '""', '" "', "[]", "{}", "[[]]", "[null]"),
    *('"</script><script>alert(1)</script>"', '"\\u001b[2J\\u0007\\r\\n"', '"a\\u0000b"'),
    *('"\\ud800"', '"\\u202e\\u2028x"', '"../../../etc/passwd"', '"%s%n{0}"', '"x y"', '"é"'),
    *('"' + "x" * 5000 + '"', '"' + "9" * 5000 + '"', "[" + "0," * 5000 + "0]"),
    *("[" * 150 + "]" * 150, "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000),
    *("1979-05-27T07:32:00Z", "'''\n'''", "0xffffffffffffffffffff", '"1e30 GB/s"', '"1" * 3'),
)
# Values of common JSON types that make no sense in most fields.
_SOFT = (0, -1, 1, 7, 10**6, 2**31, 2**62, 0.0, -0.5, 1e-30, 1e39, "", "x", "\x1b[2J", "<b>", None)
_WORDS = (
    *(b"nan", b"inf", b"-1", b"1e400", b"9" * 400, b"0", b"4294967296", b"2147483646", b":", b"#"),
    *(b"\x1b[2J", b"</script>", b"\0", b"\xff\xfe", b"\r\n", b"\n" * 1000, b" " * 1000, b"qid:1"),
)
_KEYS = st.sampled_from(("x" * 300, "\x1b[2J", "</script>", "$", "kind", "worker", ""))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=5,
)
_VALUE = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null')
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_MANY = 3000  # most lists and objects: changes in sequence could make 300 x 300 copies of one


def flipped(bits: list[int]) -> Change:
    """Flip bits."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for bit in bits if data else ():
            changed[bit // 8 % len(data)] ^= 1 << bit % 8
        return bytes(changed)

    return change


def spliced(first: int, length: int, times: int, word: bytes) -> Change:
    """Repeat a block, or remove it (`times` 0), and insert a word after it."""

    def change(data: bytes) -> bytes:
        begin = first % (len(data) + 1)
        block = data[begin : begin + length]
        repeats = min(times, 2) if len(block) > 2000 else times
        return data[:begin] + block * repeats + word + data[begin + length :]

    return change


def _put(pattern: re.Pattern[bytes], place: int, word: bytes) -> Change:
    """Replace one match of the pattern by a word; without a match, flip a bit."""

    def change(data: bytes) -> bytes:
        found = list(pattern.finditer(data))
        if not found:
            return flipped([place])(data)
        one = found[place % len(found)]
        return data[: one.start()] + word + data[one.end() :]

    return change


def _other_node(place: int, key: int, rule: int, soft: Any, name: str) -> Change:
    """Remove, replace, repeat or negate one entry of a JSON tree."""

    def change(data: bytes) -> bytes:
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            return flipped([place])(data)
        parents = _containers(tree)
        if not 0 < len(parents) <= _MANY:
            return data
        parent = parents[place % len(parents)]
        where = list(parent if isinstance(parent, dict) else range(len(parent)))
        own = where[key % len(where)]
        if rule == 0:
            del parent[own]
        elif rule == 1:  # replace it by a copy of another node
            parent[own] = json.loads(json.dumps(parents[key % len(parents)]))
        elif rule == 2 and isinstance(parent, dict):
            parent[name] = parent[own]
        elif rule == 2:
            parent += [parent[own]] * (key % 300 + 1)
        elif rule == 3 and isinstance(parent[own], int | float):
            parent[own] = 7 - 10**9 * parent[own] if key % 2 else -parent[own]
        else:
            parent[own] = soft
        return json.dumps(tree).encode()

    return change


def _containers(tree: Any) -> list[Any]:
    found, waiting = [], [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list) and one:
            found.append(one)
            waiting += list(one.values()) if isinstance(one, dict) else one
    return found


def several(changes: Changes) -> Changes:
    """Return a strategy that draws one change, or two to four applied in sequence."""
    some = st.lists(changes, min_size=2, max_size=4)
    return changes | some.map(
        lambda some: lambda data: reduce(lambda now, change: change(now), some, data)
    )


def behind_one_byte(change: Change) -> Change:
    """Change all but the first byte, which distinguishes seeds of several kinds."""
    return lambda data: data[:1] + change(data[1:])


LITERALS = (st.sampled_from(LEAVES) | _JSON.map(json.dumps)).map(
    lambda text: text.encode("utf-8", "replace")
)
FLIPS = st.lists(PLACES, min_size=1, max_size=16).map(flipped)
_WORD = st.sampled_from(_WORDS) | st.binary(max_size=64)
_LENGTHS = st.integers(0, 100) | PLACES
BYTES = FLIPS | st.builds(spliced, PLACES, _LENGTHS, st.sampled_from((0, 0, 1, 2, 3, 50)), _WORD)
TEXT = BYTES | st.builds(_put, st.just(_NUMBER), PLACES, _WORD)
_OTHER_VALUE = st.builds(_put, st.just(_VALUE), PLACES, LITERALS)
_DEEP_KEYS = st.builds(
    lambda form, parts: lambda data: form % b".".join([b"a"] * parts) + data,
    st.sampled_from((b"[%s]\n", b"%s = 1\n", b"x = {%s = 1}\n")),
    st.sampled_from((40, 3000, 30_000)),
)
TOML = TEXT | _OTHER_VALUE | _DEEP_KEYS
# Six copies: `one_of` draws all strategies equally often, and these usually keep JSON valid.
_NODES = [
    st.builds(_other_node, PLACES, PLACES, st.integers(0, 5), st.sampled_from(_SOFT), _KEYS)
    for _ in range(6)
]
NODES = st.one_of(_OTHER_VALUE, *_NODES)
JSON = st.one_of(BYTES, NODES)
