"""Take a rank's inner steps (on its own replica), test the averaged model, make checkpoints."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.json_values import apart, dumps, loads, together
from paceline.checkpoints.state import load_optimizer_state, optimizer_state
from paceline.codecs.stand_ins import stand_ins_for
from paceline.core.errors import InvalidInput
from paceline.core.rounds import Rounds
from paceline.exchange.checkpoints import State
from paceline.exchange.learner import WholeModel
from paceline.exchange.local_updates import LocalUpdates
from paceline.exchange.replica import ModelReplica, Statistics
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import TrainingSetup
from paceline.exchange.step import Share
from paceline.record.recorder import Recorder
from paceline.strategies.local.config import Local
from paceline.training.data.dataset import IndexedSamples

Tensors = dict[str, Tensor]
_PART, _VALUES = "local_updates", "values"  # names in a checkpoint


class LocalModel(WholeModel, ModelReplica):
    """Takes the inner steps of a rank by `replica`, and exchanges parameters once per round.

    The training loop uses this object in place of a replica that would exchange gradients.

    A checkpoint contains the averaged model, from which any number of ranks can resume. It also has
    each rank's parameters and optimizer state, with which as many ranks resume bit for bit.
    """

    def __init__(
        self,
        session: TrainingSession,
        config: Local,
        setup: TrainingSetup,
        recorder: Recorder,
        replica: ModelReplica,
        manager: Any = None,
    ) -> None:
        super().__init__(session.group, setup, recorder, replica)
        self._num_steps = num_steps = sum(setup.epoch_steps)
        if config.sync_every > num_steps:
            problem = f"must be at most the run's {num_steps} steps"
            raise InvalidInput("sync_every", problem, got=config.sync_every)
        self._loaded: dict[str, Any] = {}
        self._loaded_optimizer: dict[str, Any] = {}
        self.updates = LocalUpdates(
            setup.model,
            self._optimizer,
            **{one.name: getattr(config, one.name) for one in fields(Rounds)},
            num_steps=num_steps,
            process_group=session.group.process_group,
            deadline_s=session.group.deadline_s,
            manager=manager,
        )
        self._num_taken = 0
        make = stand_ins_for(config.codec)
        if setup.times is not None and make is not None:
            self.updates.stand_in_for_gradients(make)

    def _step(self, source: Iterator[Share]) -> Tensor:
        """Take an inner step; return the mean loss times this rank's weight in the batch.

        Returns 0 for steps that the other workers took before this worker joined.
        """
        share = next(source)
        self._num_taken += 1
        if self._num_taken <= self.updates.num_steps:
            return torch.zeros((), device=self._group.device)
        self.updates.weight = float(share.num_samples)
        loss = super()._step(iter((share._replace(weight=1.0),))) * share.weight
        if self.updates.num_steps == self._num_steps:
            self.updates.close()
        return loss

    def _test(self, samples: IndexedSamples) -> tuple[float, float]:
        with self.updates.averaged():
            return super()._test(samples)

    def _state(self) -> State:
        with self.updates.averaged():
            # Copy, because the checkpoint is written after this block, when the model has this
            # rank's own parameters again.
            tensors, parts = super()._state()
            tensors = {name: one.clone() for name, one in tensors.items()}
        values, found = apart(self.updates.state_dict() | {"own": None})
        tensors |= {f"{_PART}/{name}": one for name, one in found.items()}
        return State(tensors, parts | {_PART: values})

    def _load(self, state: State) -> None:
        own = state.own_part(_PART)
        if "tensors" not in own:
            raise InvalidInput("resume", "requires the Paceline version that wrote the checkpoint")
        super()._load(state)
        self._loaded = together(own, state.file(_PART))
        self.updates.load_state_dict(self._loaded)
        self._loaded_optimizer = state.parts["optimizer"]
        self._num_taken = self.updates.num_steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of this rank's model."""
        return self._replica(*args, **kwargs)

    def statistics(self) -> Statistics:
        """Return the traffic and time of all exchanges of outer gradients so far."""
        return self.updates.statistics()

    def close(self) -> None:
        """Abort exchanges that still run."""
        self.updates.abort()

    def exchange_state(self) -> Tensors:
        """Return the state that differs between ranks: parameters, buffers, optimizer, exchange."""
        optimizer, _ = optimizer_state(self._optimizer, list(self._model.named_parameters()))
        own = {
            "updates": self.updates.state_dict()["own"],
            "parameters": self.updates.own_parameters(),
            "buffers": list(self._model.buffers()),
            "optimizer": optimizer,
        }
        values, tensors = apart(own)
        text = bytearray(dumps("a worker's state", values))
        return {_VALUES: torch.frombuffer(text, dtype=torch.uint8), **tensors}

    def load_exchange_state(self, state: Tensors) -> None:
        """Load this rank's result of `exchange_state`; the number of ranks must be unchanged."""
        own = together(loads(state[_VALUES].numpy().tobytes()), state)
        self.updates.load_state_dict(self._loaded | {"own": own["updates"]})
        self.updates.load_own_parameters(own["parameters"])
        with torch.no_grad():
            for buffer, one in zip(self._model.buffers(), own["buffers"], strict=True):
                buffer.copy_(one)
        names = list(self._model.named_parameters())
        load_optimizer_state(self._optimizer, names, own["optimizer"], self._loaded_optimizer)
