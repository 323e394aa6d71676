"""Save and load the state of a run in folders of safetensors and JSON files.

Only rank 0 writes. Rank 0 gathers the other ranks' random number states and error feedback, and
stores them under names such as `ranks/1/error`.
"""
