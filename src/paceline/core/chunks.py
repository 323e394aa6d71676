"""Chunks: layers whose gradients are exchanged together (Le et al. 2018, section 4.1)."""


def chunks(num_layers: int, size: int) -> list[range]:
    """Group layers into chunks of `size`; the last of the backward phase stay alone.

    Layers are numbered as their gradients become ready, from 0. If `size` divides the number of
    layers, the last `size` of them are chunks of one, else those that remain: what is exchanged
    last hides behind nothing, and should be small. ValueError if either number is below 1.
    """
    if num_layers < 1 or size < 1:
        raise ValueError(f"chunks: {num_layers} layers in chunks of {size}; both must be positive")
    whole = num_layers // size - (1 if num_layers % size == 0 else 0)
    together = [range(i * size, (i + 1) * size) for i in range(whole)]
    return together + [range(i, i + 1) for i in range(whole * size, num_layers)]
