"""Changes of valid inputs: of bytes, of texts by their values, of trees of JSON by their nodes."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

# Values that a careless parser takes, or chokes on; each is JSON, or nearly.
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
# Values that most types take, and that stand for nothing that can be.
_SOFT = (0, -1, 1, 7, 10**6, 2**31, 2**62, 0.0, -0.5, 1e-30, 1e39, "", "x", "\x1b[2J", "<b>", None)
_WORDS = (
    *(b"nan", b"inf", b"-1", b"1e400", b"9" * 400, b"0", b"4294967296", b"2147483646", b":", b"#"),
    *(b"\x1b[2J", b"</script>", b"\0", b"\xff\xfe", b"\r\n", b"\n" * 1000, b" " * 1000, b"qid:1"),
)
_VALUE = re.compile(r'"(?:[^"\\\n]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null')
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
Mutation = Callable[[Random, bytes], bytes]


def flipped(random: Random, data: bytes) -> bytes:
    """Flip one bit to sixteen."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 16)) if changed else 0):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def cut(random: Random, data: bytes) -> bytes:
    """Keep the beginning, or the end."""
    place = random.randrange(len(data) + 1)
    return data[:place] if random.random() < 0.7 else data[place:]


def repeated(random: Random, data: bytes) -> bytes:
    """Write a block several times."""
    first, last = sorted(random.randrange(len(data) + 1) for _ in range(2))
    times = random.choice((2, 3, 50)) if last - first < 2000 else 2
    return data[:first] + data[first:last] * times + data[last:]


def removed(random: Random, data: bytes) -> bytes:
    """Leave a block out."""
    first, last = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + data[min(last, first + 100) :]


def inserted(random: Random, data: bytes) -> bytes:
    """Put a word, or random bytes, somewhere."""
    place = random.randrange(len(data) + 1)
    word = random.choice((*_WORDS, random.randbytes(random.choice((1, 4, 64)))))
    return data[:place] + word + data[place:]


def other_number(random: Random, data: bytes) -> bytes:
    """Put another word in the place of a number."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return flipped(random, data)
    one = random.choice(found)
    return data[: one.start()] + random.choice(_WORDS) + data[one.end() :]


def other_value(random: Random, data: bytes) -> bytes:
    """Put another value in the place of one of a text."""
    text = data.decode("utf-8", "replace")
    found = list(_VALUE.finditer(text))
    if not found:
        return inserted(random, data)
    one = random.choice(found)
    changed = text[: one.start()] + random.choice(LEAVES) + text[one.end() :]
    return changed.encode("utf-8", "replace")


def other_line(random: Random, data: bytes) -> bytes:
    """Leave a line out, write it twice, or put it elsewhere."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    one = lines.pop(random.randrange(len(lines)))
    for _ in range(random.choice((0, 1, 2))):
        lines.insert(random.randrange(len(lines) + 1), one)
    return b"".join(lines)


def long_key(random: Random, data: bytes) -> bytes:
    """Add a key of many parts, which is a table in a table in a table."""
    key = b".".join([b"a"] * random.choice((40, 3000, 30_000)))
    return random.choice((b"[%s]\n", b"%s = 1\n", b"x = {%s = 1}\n")) % key + data


def other_node(random: Random, data: bytes) -> bytes:
    """Change the tree of a JSON text in one to three places."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return flipped(random, data)
    for _ in range(random.choice((1, 1, 2, 3))):
        tree = _changed(random, tree)
    marks: list[str] = []

    def literal(leaf: "_Literal") -> str:
        marks.append(leaf.text)
        return f"\0{len(marks) - 1}\0"

    text = json.dumps(tree, default=literal)
    return re.sub(
        r'"\\u0000(\d+)\\u0000"', lambda found: marks[int(found[1])], text
    ).encode("utf-8", "replace")  # fmt: skip


_MANY = 3000  # lists and objects of a tree


class _Literal:
    """A text that stands in JSON as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def _changed(random: Random, tree: Any) -> Any:
    parents = list(_containers(tree))
    if not parents:
        return _Literal(random.choice(LEAVES))
    if len(parents) > _MANY:  # three hundred times three hundred would be too much for the fuzzer
        return tree
    parent = random.choice(parents)
    keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
    key = random.choice(keys)
    rule = random.randrange(8)
    if rule == 0:
        del parent[key]
    elif rule == 1:  # something of the same file in its place
        other = random.choice(parents)
        parent[key] = json.loads(json.dumps(random.choice(_values(other)), default=str))
    elif rule == 2 and isinstance(parent, dict):
        parent[random.choice(("x" * 300, "\x1b[2J", "</script>", "$", "kind"))] = parent[key]
    elif rule == 2:
        parent += [parent[key]] * random.choice((1, 2, 300))
    elif rule == 3 and isinstance(parent[key], int | float):
        parent[key] = -parent[key] if random.random() < 0.5 else 7 - 10**9 * parent[key]
    elif rule in (4, 5, 6):
        alike = [one for one in _SOFT if type(one) is type(parent[key])]
        parent[key] = random.choice(alike or _SOFT)
    else:
        parent[key] = _Literal(random.choice(LEAVES))
    return tree


def _containers(tree: Any) -> list[Any]:
    found, waiting = [], [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list) and one:
            found.append(one)
            waiting += _values(one)
    return found


def _values(one: Any) -> list[Any]:
    return list(one.values()) if isinstance(one, dict) else list(one)


BYTES: tuple[Mutation, ...] = (flipped, cut, repeated, removed, inserted)
TEXT: tuple[Mutation, ...] = (*BYTES, other_number, other_number, other_line)
VALUES: tuple[Mutation, ...] = (*TEXT, *[other_value] * 6)
TOML: tuple[Mutation, ...] = (*VALUES, long_key)
JSON: tuple[Mutation, ...] = (*BYTES, other_value, other_value, *[other_node] * 8)
NODES: tuple[Mutation, ...] = (flipped, other_value, *[other_node] * 10)


def mutated(random: Random, data: bytes, mutations: tuple[Mutation, ...]) -> bytes:
    """Return an input changed by one of the mutations, or by several in turn."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = random.choice(mutations)(random, data)
    return data
