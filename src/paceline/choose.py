"""The exchanges that a module in a user's own loop can have, and the balance of its batches."""

import sys
from collections.abc import Sequence
from importlib import import_module

from torch import nn

from paceline.data.balanced import BalancedSampler
from paceline.exchange.balanced import Balanced
from paceline.exchange.compressed import Compression
from paceline.exchange.method import Method
from paceline.exchange.replica import Alone
from paceline.links.group import Group
from paceline.planner.admission import admit, refused
from paceline.strategies import EXCHANGES
from paceline.tune.chunk import LearnedSearch


def methods(
    exchange: str, chunk: int | str, compression: Compression | None, of_torch_alone: bool
) -> list[Method]:
    """Return the methods to try: the one asked for, or all that do what is asked.

    With `of_torch_alone` "auto" has torch's all-reduce only. The host's is the last one, so that it
    need not learn its chunk twice.
    """
    if exchange != "auto":
        return [_method(exchange, chunk, compression)]
    names = ["allreduce"]
    if not of_torch_alone:
        names += ["host"] if compression else ["tree", "host"]
    return [_method(name, chunk, compression) for name in names]


def _method(name: str, chunk: int | str, compression: Compression | None) -> Method:
    strategy = EXCHANGES[name]
    run = import_module(strategy.run)
    found: Method
    if name == "host":
        config = strategy.config(chunk=1 if chunk == "auto" else chunk)
        tuner = LearnedSearch if chunk == "auto" else None
        found = run.method(config, compression, tuner)
    elif name == "allreduce":
        found = run.method(strategy.config(), compression)
    else:
        found = run.method(strategy.config())
    return found


def balanced(module: nn.Module, group: Group, force: bool) -> Balanced:
    """Return what balances batches, around no exchange.

    A rank that would not help gets no samples, unless it is to be there by `force`; rank 0 says why
    on standard error.
    """

    def refuse(speeds: Sequence[float], sampler: BalancedSampler) -> list[int]:
        verdicts = refused(admit(speeds, sampler.batch_size, most=sampler.most))
        end = "gets some all the same, by force" if force else "gets no samples (force overrides)"
        for verdict in verdicts if group.rank == 0 else ():
            sys.stderr.write(f"paceline: {verdict.why}; it {end}\n")
        return [] if force else [verdict.worker for verdict in verdicts]

    return Balanced(Alone(module), module, group, admit=refuse)
