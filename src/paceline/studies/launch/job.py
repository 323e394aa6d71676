"""A training as a job of a cluster: on how many machines, with how many processes, by what command.

torchrun ... -m paceline train gpt --workers 8 --strategy host --steps 10000
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from paceline.core.errors import InvalidInput, shown
from paceline.core.settings import Record, TrainSettings
from paceline.records.settings import AUTO, strategy_of

_NAME = re.compile(r"[^a-z0-9]+")
_LONGEST_NAME = 50  # Kubernetes makes longer ones from it, of at most 63 characters
_ALWAYS = ("strategy", "workers", "batch_size")  # said even if they are the default
_TABLES = {"options": "--set", "optimizer_options": "--optimizer-set"}
# Of one machine's processes, which torchrun starts here.
_OF_LAUNCHER = ("kind", "port", "bind", "keys", "run", "resume")


class JobSettings(Record):
    """What a cluster is asked for beside the training itself."""

    nodes: int = Field(1, ge=1, description="Machines; with --machine as many as it has hosts.")
    gpu: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="GPUs, by the cluster's name for them, such as H100; without it CPU cores.",
    )
    cpus: int | None = Field(None, ge=1, description="Cores of each machine, without GPUs.")
    hours: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        None, description="The most time that the job may take."
    )
    master: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9.:_-]+$",
        description="The first machine's address, for torchrun: 10.0.0.1.",
    )
    master_port: int = Field(29500, ge=1, lt=65536, description="Where processes meet there.")
    image: str | None = Field(
        None, description="A container image that has paceline, for kubernetes."
    )


class Job(Record):
    """A training on a cluster; `predicted` are sentences of its plan."""

    settings: TrainSettings
    asked: JobSettings
    predicted: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        settings, nodes = self.settings, self.asked.nodes
        if settings.strategy != AUTO:
            strategy = strategy_of(settings)
            if strategy.is_led:
                raise InvalidInput(
                    "strategy",
                    f"{strategy.name} starts its workers itself, and has no ranks that a cluster "
                    "could start",
                    hint="choose allreduce, host, tree, subbatch, local or auto",
                )
        if int(settings.workers) % nodes:
            raise InvalidInput(
                "nodes", f"{settings.workers} workers cannot be shared equally by {nodes} machines"
            )
        for word in words(settings):
            if not word.isprintable():
                raise InvalidInput(
                    "job", f"{shown(word)} has characters that no such file can hold"
                )
        if settings.resume is not None:
            raise InvalidInput("resume", "a job begins a run", hint="resume it where its folder is")
        return self

    @property
    def name(self) -> str:
        """A name that clusters take: lower-case letters, digits and hyphens."""
        plain = _NAME.sub("-", f"paceline-{self.settings.model}".lower())
        return plain[:_LONGEST_NAME].strip("-")

    @property
    def num_per_node(self) -> int:
        """The processes of each machine."""
        return int(self.settings.workers) // self.asked.nodes

    @property
    def seconds(self) -> int | None:
        """The most time that the job may take."""
        return None if self.asked.hours is None else max(1, round(3600 * self.asked.hours))

    @property
    def module(self) -> tuple[str, ...]:
        """The words after torchrun's options."""
        return ("-m", "paceline", "train", *words(self.settings))

    @property
    def shell_module(self) -> str:
        """The same, for a shell."""
        return shlex.join(self.module)


def words(settings: TrainSettings) -> Iterator[str]:
    """Yield the arguments of `paceline train` that give these settings, most defaults left out."""
    yield settings.model
    for name, field in TrainSettings.model_fields.items():
        value = getattr(settings, name)
        is_usual = value == field.default and name not in _ALWAYS
        if name == "model" or name in _OF_LAUNCHER or value is None or is_usual:
            continue
        if name in _TABLES:
            yield from _fields(_TABLES[name], value)
        elif value is True:
            yield f"--{name.replace('_', '-')}"
        else:
            yield f"--{name.replace('_', '-')}"
            yield str(value)


def _fields(flag: str, table: Mapping[str, Any]) -> Iterator[str]:
    for field, value in table.items():
        yield flag
        yield f"{field}={value if isinstance(value, str) else json.dumps(value)}"
