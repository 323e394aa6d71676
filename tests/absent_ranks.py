"""Groups for tests of a single rank, whose other ranks do not exist."""

import torch

from paceline.links.group import Group, Member


def group_of(
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    boot_ids: str = "a",
    kind: type[Group] = Group,
) -> Group:
    """Return the group of a rank; `boot_ids`: a letter per rank's host, repeated."""
    members = tuple(
        Member(
            rank=i,
            pid=i + 1,
            boot_id=boot_ids[i % len(boot_ids)],
            pid_namespace="one",
            device_type=device,
        )
        for i in range(world_size)
    )
    return kind(
        rank=rank,
        world_size=world_size,
        device=torch.device(device),
        members=members,
        store=None,
        control=None,
        deadline_s=30.0,
    )
