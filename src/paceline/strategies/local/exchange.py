"""The fragments of a model and the codecs of their outer gradients: alike on workers and hub."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.codecs.codec import Codec, as_type
from paceline.codecs.feedback import ErrorFeedback, SentCount
from paceline.codecs.names import find_codec
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import threshold_of, wire_format
from paceline.strategies.local.config import Local
from paceline.strategies.local.outer import OuterModel, fragments_of, is_finite
from paceline.strategies.local.protocol import payload_of


class Exchanged:
    """The fragments of a model, the group's parameters, and a codec for each fragment.

    `decoded` counts what came by a codec that sends a declared share of the values.
    Raises InvalidInput for a model that cannot be dealt into fragments, or encoded.
    """

    def __init__(self, model: nn.Module, config: Local) -> None:
        self.fragments = fragments_of(model, config.fragments)
        self.outer = OuterModel(self.fragments, config)
        self.dtype = self.outer.values[0].dtype
        if config.codec is not None and self.dtype != torch.float32:
            raise InvalidInput(
                "codec", f"{config.codec} encodes float32", hint=f"the model is {self.dtype}"
            )
        # One a fragment: error feedback remembers what was lost of each tensor.
        self._codecs: list[Codec | ErrorFeedback | None] = [
            None if config.codec is None else find_codec(config.codec) for _ in self.fragments
        ]
        threshold = None if config.codec is None else threshold_of(config.codec)
        is_declared = threshold is not None and threshold.share is not None
        self._form = wire_format(str(config.codec)) if is_declared else None
        self.decoded = SentCount()

    def encode(self, fragment: int, gradient: Tensor) -> tuple[Tensor, ...] | None:
        """Return an outer gradient as buffers of bytes; None if a value is NaN or infinite."""
        codec = self._codecs[fragment]
        if codec is None:
            return (gradient.view(torch.uint8),) if is_finite(gradient) else None
        payload = codec.encode(gradient)
        return None if payload.num_nonfinite else payload.buffers

    def decode(self, fragment: int, buffers: Sequence[Tensor]) -> Tensor:
        """Return the values of buffers that came; InvalidInput if they are not the fragment's."""
        like, codec = self.outer.values[fragment], self._codecs[fragment]
        name = "" if codec is None else codec.name
        payload = payload_of(name, like.numel(), like.dtype, buffers)
        if codec is None:
            return as_type(payload.buffers[0], like.dtype)
        if self._form is not None:
            share = self._form.sent_share(payload.count, payload.nbytes) or 0.0
            self.decoded.add(round(share * payload.count), payload.count)
        return codec.decode(payload)

    def step(self, fragment: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Take the outer step with workers' weights and outer gradients, in the workers' order."""
        total = sum(weight for weight, _ in parts)
        terms = [(weight / total if total else 0.0, values) for weight, values in parts]
        self.outer.step(fragment, terms)

    def feedback(self) -> dict[str, Tensor]:
        """Return what codecs remember, by `FRAGMENT/NAME`."""
        return {
            f"{number}/{name}": one
            for number, codec in enumerate(self._codecs)
            if isinstance(codec, ErrorFeedback)
            for name, one in codec.state_dict().items()
        }

    def load_feedback(self, state: dict[str, Tensor]) -> None:
        """Take over what codecs have remembered."""
        for number, codec in enumerate(self._codecs):
            if isinstance(codec, ErrorFeedback):
                prefix = f"{number}/"
                own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                codec.load_state_dict(own)
