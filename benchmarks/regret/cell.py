"""Measure steps of `auto`, fixed methods and a rank alone on two one-core ranks.

In each round, every method takes a few steps, in random order. A method 1.5 times as slow as
the fastest runs only in the first round, except a rank alone and `auto`.
"""

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from statistics import median
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.core.balance import apportion
from paceline.core.settings import RehearseSettings
from paceline.exchange.alone import stepping
from paceline.exchange.balanced import Balanced
from paceline.exchange.replicas import ReplicaRunner, start
from paceline.exchange.session import Progress, TrainingSession
from paceline.exchange.step import train_step
from paceline.exchange.trials import Trials
from paceline.exchange.trying import Trying
from paceline.links.clock import clock_for
from paceline.links.group import Group
from paceline.record.recorder import Recorder
from paceline.runs.forecasts import alone_or_together, candidates_of, forecasts_of
from paceline.strategies import EXCHANGES
from paceline.training.models.paced import Stretched

ALONE, AUTO = _ALWAYS = "fast worker alone", "auto"
_BUCKETS_MB = (10, 25, 100)
_NUM_ROUNDS, _NUM_SETTLING, _NUM_TIMED = 5, 3, 6
_SHORTEST_S, _LONGEST_S = 0.5, 3.0  # total of a method's timed steps in a round
_SETTLING_S = 2.0
_HOPELESS, _FAR = 1.5, 3.0  # the latter for a first step, which constructs an exchange
_MOST_CHOOSING = 200  # limit on the steps until the decision of `auto`
Step = Callable[[], object]
Make = Callable[[nn.Module], Any]


class Setting(NamedTuple):
    """A model, the samples per step of both workers, and the second worker's slowdown."""

    model: str
    batch_size: int
    slowdown: int
    input_shape: str | None = None


class _Ddp:
    """DistributedDataParallel with the `close` method of Paceline's replicas."""

    def __init__(self, module: nn.Module, bucket_mb: int, hook: Any = None) -> None:
        self._parallel = DistributedDataParallel(
            module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, init_sync=False
        )
        if hook is not None:
            self._parallel.register_comm_hook(None, hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._parallel(*args, **kwargs)

    def close(self) -> None:
        """Do nothing: torch frees the reducer with the module."""


def measure(group: Group, quick: bool, case: str) -> dict[str, Any]:
    """Return step times by method and round, and the choice of `auto` with its cost."""
    model, batch_size, slowdown, shape = case.split(",")
    setting = Setting(model, int(batch_size), int(slowdown), shape or None)
    settings = RehearseSettings.model_validate(
        {
            "model": setting.model,
            "batch_size": setting.batch_size,
            "workers": 2,
            "strategy": "auto",
            "codec": "auto",
            "balance": "auto",
            "profile_s": 1.0,
            "slowdown": f"1,{setting.slowdown}",
            "input_shape": setting.input_shape,
        }
    )
    strategy = next(iter(EXCHANGES.values()))
    session = TrainingSession(
        settings, strategy, strategy.config(workers=2), "regret", group, Progress()
    )
    with start(session) as runner, _auto(session, runner) as (auto, chosen):
        ways = _fixed(runner, group, setting)
        if auto is not None:
            ways[AUTO] = auto
        seconds = _timed(ways, group, 1 if quick else _NUM_ROUNDS)
    # if `auto` chose the worker alone, both are the same program
    seconds.setdefault(AUTO, seconds[ALONE])
    return {"seconds": seconds, **chosen}


def _fixed(runner: ReplicaRunner, group: Group, setting: Setting) -> dict[str, Any]:
    """Return context managers that provide a step, one for each method a user can choose."""
    samples, world_size = setting.batch_size, group.world_size
    parts = {"": [1.0, 1.0], ", balanced": [1.0, 1 / setting.slowdown]}
    if setting.slowdown == 1:
        del parts[", balanced"]
    makes: dict[str, Make] = {
        **{f"DDP {mb} MB": partial(_Ddp, bucket_mb=mb) for mb in _BUCKETS_MB},
        "DDP, fp16": partial(_Ddp, bucket_mb=25, hook=fp16_compress_hook),
    }
    for name, strategy in EXCHANGES.items():
        replica = strategy.runner().replica
        config = partial(strategy.config, workers=world_size)
        makes[name] = partial(replica, config=config(), group=group)
        if "codec" in strategy.options.settings:
            makes[f"{name}, dynamic8"] = partial(
                replica, config=config(codec="dynamic8"), group=group
            )
    whole = samples if group.rank == 0 else 0
    ways: dict[str, Any] = {ALONE: lambda: stepping(runner.setup, group, whole, 1.0, None)}
    for name, make in makes.items():
        for how, speeds in parts.items():
            own = apportion(samples, speeds)[group.rank]
            weight = own * world_size / samples
            ways[name + how] = partial(stepping, runner.setup, group, own, weight, make)
    return ways


@contextmanager
def _auto(session: TrainingSession, runner: ReplicaRunner) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Let Paceline choose; yield a context manager with its step, and the choice's cost.

    There is no context manager if the choice is the fast worker alone.
    """
    group, setup, started = session.group, runner.setup, time.monotonic()
    forecasts = forecasts_of(session, runner)
    predicted = {one.exchange: one.step_s for one in forecasts}
    chosen: dict[str, Any] = {"predicted": predicted, "profile_s": time.monotonic() - started}
    started = time.monotonic()
    found = alone_or_together(session, runner, forecasts)
    chosen["trial_s"] = time.monotonic() - started
    if found.why_alone is not None:
        chosen |= {"choice": ALONE, "num_steps": 0, "choosing_s": 0.0, "reason": found.why_alone}
        yield None, chosen
        return
    decisions, model = list[str](), copy.deepcopy(setup.model).train()
    candidates, unlikely = candidates_of(group, forecasts, decisions.append)
    with ExitStack() as stack:
        if setup.factor is not None:
            stack.callback(Stretched(model, setup.factor).remove)
        clock = clock_for(group.device)
        assert setup.sampler is not None
        sampler = setup.sampler
        known = {"on_decision": decisions.append, "shares": lambda: sampler.shares}
        trials = Trials(candidates, clock, found.slow, unlikely, **known)
        tried = Trying(model, candidates, trials, group=group, gradient_as_bucket_view=True)
        stack.callback(tried.close)
        replica = Balanced(tried, model, group, sampler, weighs=False)
        optimizer, source = setup.optimizer(model), setup.source(0)
        recorder = Recorder(clock, "", group.rank)
        step = partial(train_step, replica, optimizer, source, recorder, setup.learning)
        seconds = list[float]()
        while not trials.settled and len(seconds) < _MOST_CHOOSING:
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        chosen |= {"num_steps": len(seconds), "choosing_s": sum(seconds), "reason": decisions[-1]}

        @contextmanager
        def steps() -> Iterator[Step]:
            yield step

        yield steps, chosen
        chosen |= {"choice": trials.name, "shares": list(sampler.shares)}


def _timed(ways: dict[str, Any], group: Group, num_rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's mean step time for each method, by round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)  # noqa: S311 - no secret
    for number in range(num_rounds):
        limit_s = _HOPELESS * min((one[0] for one in seconds.values() if one), default=1e9)
        names = [
            name for name in ways if not number or name in _ALWAYS or seconds[name][0] <= limit_s
        ]
        for name in order.sample(names, len(names)):
            group.barrier()
            with ways[name]() as step:
                most_s = inf if name in _ALWAYS else limit_s
                # the table shows the ratio to DDP, so that even its slow steps exclude the first
                far_s = inf if name.startswith("DDP") else _FAR * most_s
                seconds[name].append(_mean_step(step, group, most_s, far_s))
            limit_s = min(limit_s, _HOPELESS * seconds[name][-1])
    return seconds


def _mean_step(step: Step, group: Group, limit_s: float, far_s: float) -> float:
    """Return the mean of timed steps, or the last untimed step if it exceeds `limit_s`.

    A first step that exceeds `far_s` is the only one.
    """

    def run(count: int) -> float:
        group.barrier()
        began = time.perf_counter()
        for _ in range(count):
            step()
        return max(group.gather(time.perf_counter() - began)) / count

    settling = list[float]()
    # the first step includes the construction of an exchange
    while len(settling) < 2 or (len(settling) < _NUM_SETTLING and sum(settling) < _SETTLING_S):
        settling.append(run(1))
        if settling[-1] > far_s:
            break
    if settling[-1] > limit_s:
        return settling[-1]
    at_least, at_most = (int(seconds / median(settling)) for seconds in (_SHORTEST_S, _LONGEST_S))
    return run(max(1, min(max(_NUM_TIMED, at_least), at_most)))
