"""Jobs of a cluster, for tests of what starts them."""

import shlex

from paceline.records.settings import validated_settings
from paceline.studies.launch.job import Job, JobSettings


def job(asked: dict | None = None, **settings: object) -> Job:
    """Return a job of four workers on two nodes unless others are asked for."""
    given = validated_settings({"model": "lenet5", "workers": 4, "batch_size": 64, **settings})
    return Job(settings=given, asked=JobSettings(**(asked or {"nodes": 2})))


def arguments_of(text: str) -> list[str]:
    """Return the words after `paceline` of the last command in a text, as a shell reads them."""
    line = next(one for one in text.splitlines()[::-1] if " -m paceline " in one)
    return shlex.split(line.partition(" -m paceline ")[2])
