"""What all facts about hardware have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$", examples=["gpu0"])]
Source = Annotated[
    str, Field(min_length=1, description="where the numbers come from", examples=["data sheet"])
]


class Fact(BaseModel):
    """Something known of a machine: it never changes, and has no fields that nobody asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")
