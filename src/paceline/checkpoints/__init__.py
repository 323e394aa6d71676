"""Save and load the state of a run in folders of safetensors and JSON files.

    folder = CheckpointFolder(run / "checkpoints", keep=2)
    writer = BackgroundWriter(folder)
    writer.save(step, {"model/weight": weight}, {"progress": {"epoch": 3}})
    ...
    loaded = folder.latest()
    loaded.tensors("model"), loaded.json("progress")

Only rank 0 writes: it gathers the other ranks' random number states and error feedback, and stores
them under names such as `rank1/error`.
"""
