"""All parsers by their names; a process imports only what its own parser needs."""

from importlib import import_module

from fuzzing.parser import Parser

MODULES = {
    "fuzzing.records": (
        *("machine", "configuration", "option", "result", "trace", "report", "compare", "journal"),
    ),
    "fuzzing.tensors": (
        *("libsvm", "packed libsvm", "images", "tokens"),
        *("checkpoint", "checkpoint values", "worker state"),
    ),
    "fuzzing.wire": ("frame", "record", "part", "packet"),
}
NAMES = tuple(name for names in MODULES.values() for name in names)


def parser_of(name: str) -> Parser:
    """Return the parser of a name; KeyError if there is none."""
    module = next((module for module, names in MODULES.items() if name in names), None)
    if module is None:
        raise KeyError(name)
    return {one.name: one for one in import_module(module).PARSERS}[name]
