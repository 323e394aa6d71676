"""Checkpoints: the state of a run as safetensors and JSON, in folders that are complete or ignored.

    folder = CheckpointFolder(run / "checkpoints", keep=2)
    writer = BackgroundWriter(folder)
    writer.save(step, {"model/weight": weight}, {"progress": {"epoch": 3}})
    ...
    loaded = folder.latest()
    loaded.tensors("model"), loaded.json("progress")

One process of a run writes: rank 0 gathers the other ranks' state (random numbers, error feedback)
and stores it under names such as `rank1/error`.
"""
