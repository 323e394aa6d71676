"""Checkpoints: the state of a run as safetensors and JSON, in folders that are whole or not used.

    folder = CheckpointFolder(run / "checkpoints", keep=2)
    writer = BackgroundWriter(folder)
    writer.save(step, {"model/weight": weight}, {"progress": {"epoch": 3}})
    ...
    loaded = folder.latest()
    loaded.tensors("model"), loaded.json("progress")

`state` turns modules, optimizers, schedules and random numbers into such tensors and values, and
back. One process of a run writes: with several ranks, rank 0 is given what the others have of
their own (random numbers, error feedback: little), under names of their own, such as `rank1/error`.
"""
