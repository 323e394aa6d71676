"""Recurrent and parametrized modules, hooks, and unusual calls of modules."""

from typing import Any

import torch
import torch.nn.functional as F
from declared import trains
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from steps import backward, learn, mlp, module_of, squares, stepped, trained
from trial import gradients, state_of


def lstm_with_its_state_carried_on(trial):
    """Truncated backpropagation through time: steps pass on a detached state."""

    @module_of(
        lstm=nn.LSTM(5, 6, num_layers=2, batch_first=True, dropout=0.2), head=nn.Linear(6, 3)
    )
    def tagger(self, x: Tensor, state: Any = None) -> Any:
        out, state = self.lstm(x, state)
        return self.head(out), state

    model = trial.wrap(tagger)
    state = None
    for step in stepped(model, 4):
        out, state = model(trial.batch(step, 2, 4, 5), state)
        state = tuple(one.detach() for one in state)
        out.square().mean().backward()
        yield [out, list(state)]


def hooks_of_tensors(trial):
    """Hooks on parameters and activations see and change this rank's own gradients."""
    module = mlp(6, 8, 8, 3)
    seen: list[Tensor] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    module[0].weight.register_hook(double)
    model = trial.wrap(module)
    module[2].bias.register_hook(double)
    for step in stepped(model, 3):
        out = model(trial.batch(step))
        out.register_hook(double)
        backward(out.square().mean())
        yield sorted(float(gradient.sum()) for gradient in seen)
        seen.clear()


def diffusion_step(trial):
    """Train a denoiser with random noise, keyword arguments and random self-conditioning."""

    @module_of(times=nn.Embedding(10, 6), net=mlp(12, 16, 6))
    def denoiser(self, x: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        condition = torch.zeros_like(x) if condition is None else condition
        return self.net(torch.cat([x + self.times(t), condition], 1))

    model = trial.wrap(denoiser)
    for step in stepped(model, 4):
        x, t = trial.batch(step), torch.randint(0, 10, (4,))
        noise = torch.randn_like(x)
        condition = None
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                condition = model(x + noise, t)
        yield backward(F.mse_loss(model(x + noise, t, condition=condition), noise))


def rnn_cell_unrolled(trial):
    @module_of(cell=nn.GRUCell(6, 6))
    def unrolled(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(3):
            state = self.cell(x, state)
        return state

    yield from trained(trial.wrap(unrolled), squares(trial))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@trains(encoder)
def transformer_with_attention(trial, model, step):
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return model(trial.batch(step, 2, 5, 8), mask=mask).square().mean()


def weight_norm_and_spectral_norm(trial):
    """Train parametrizations of weights; spectral norm has buffers."""
    module = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(8, 3)),
    )
    model = trial.wrap(module)
    yield from trained(model, squares(trial), steps=4)
    model.eval()
    with torch.no_grad(), parametrize.cached():
        yield model(trial.batch(30))


def hooks_of_modules(trial):
    """Forward and full backward hooks run once per pass, with DDP's values."""
    module = mlp(6, 8, 8, 3)
    seen: list[Any] = []
    module[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].sum()))
    module[0].register_forward_hook(lambda module, args, out: out * 1.1)
    module[2].register_full_backward_hook(lambda module, before, after: seen.append(after[0].sum()))
    module[2].register_full_backward_pre_hook(lambda module, after: (after[0] * 0.9,))
    model = trial.wrap(module)
    model.register_forward_hook(lambda module, args, out: out + 0.1)
    model.register_full_backward_hook(lambda module, before, after: seen.append(after[0].sum()))
    for loss in trained(model, squares(trial)):
        yield [loss, list(seen)]
        seen.clear()


def features_taken_with_a_hook(trial):
    """Use an activation that a hook captured in the loss, as perceptual losses do."""
    module = mlp(6, 8, 8, 3)
    taken: dict[str, Tensor] = {}
    module[2].register_forward_hook(lambda module, args, out: taken.update(features=out))
    model = trial.wrap(module)
    for step in stepped(model, 3):
        yield backward(squares(trial)(model, step) + taken["features"].abs().mean())


def wrapper_within_a_module(trial):
    """A part is wrapped, and the whole around it is not."""
    torch.manual_seed(9)
    whole = nn.Sequential(trial.wrap(mlp(6, 8, 8)), nn.Tanh(), nn.Linear(8, 3))
    for step in stepped(whole, 3):
        learn(trial, whole, step)
        yield [gradients(whole[2]), list(state_of(whole))]
        whole.train(step % 2 == 0)


def functional_call_of_the_wrapper(trial, model):
    """Evaluate with other weights, which changes neither the module nor its gradients."""
    yield from trained(model, squares(trial))
    other = {name: value * 0.5 for name, value in model.named_parameters()}
    with torch.no_grad():
        yield torch.func.functional_call(model, other, (trial.batch(30),))
        bare = {name.removeprefix("module."): value for name, value in other.items()}
        yield torch.func.functional_call(model.module, bare, (trial.batch(30),))
    yield from trained(model, squares(trial))


def transforms_of_the_module(trial, model):
    """Compute per-sample gradients of the bare module with torch.func between steps."""

    def loss_of_one(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model.module, parameters, (x,)).square().mean()

    for loss in trained(model, squares(trial)):
        parameters = {name: p.detach() for name, p in model.module.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of_one), (None, 0))
        yield [loss, each(parameters, trial.batch(30))]


def attributes_through_the_wrapper(trial):
    """Names, modes and attributes are DDP's, and missing attributes raise the same error."""

    @module_of(net=mlp(), config={"width": 8})
    def named(self, x: Tensor) -> Tensor:
        return self.net(x)

    model = trial.wrap(named)
    yield [name for name, _ in model.named_parameters()]
    yield [name for name, _ in model.named_modules()]
    yield [model.module.config, model.training, model.eval().module.training]
    yield trial.refused(lambda: model.config)
    yield isinstance(model, nn.parallel.DistributedDataParallel)
    for name in (
        "device_ids", "output_device", "dim", "broadcast_buffers", "find_unused_parameters",
        "gradient_as_bucket_view", "static_graph", "require_backward_grad_sync", "device",
    ):  # fmt: skip
        yield [name, str(getattr(model, name))]


def arguments_of_ddp_in_their_order(trial):
    """Pass device_ids, output_device and dim by position, as old code does."""
    torch.manual_seed(3)
    kind = type(trial.wrap(mlp()))
    model = kind(mlp(), None, None, 0, False)
    yield [model.dim, model.broadcast_buffers]
    yield trial.refused(lambda: trial.wrap(mlp(), device_ids=[0]))
    yield trial.refused(lambda: trial.wrap(mlp(), device_ids=[0, 1]))
    yield trial.refused(lambda: trial.wrap(mlp(), no_such_argument=1))


def methods_other_than_forward(trial):
    """A generator's own methods are called on the bare module between steps."""

    class Autoencoder(nn.Sequential):
        def encode(self, x: Tensor) -> Tensor:
            return self[0](x)

        def forward(self, x: Tensor) -> Tensor:
            return self[1](self.encode(x) + 0.1 * torch.randn(4))

    model = trial.wrap(Autoencoder(mlp(6, 4), mlp(4, 6)))
    for loss in trained(model, lambda m, step: F.mse_loss(m(trial.batch(step)), trial.batch(step))):
        with torch.no_grad():
            yield [loss, model.module.encode(trial.batch(30))]


def reinforcement_learning(trial):
    """Acting without gradients, learning in several epochs, actor and critic in one module."""

    @module_of(actor=mlp(6, 8, 3), critic=mlp(6, 8, 1))
    def agent(self, x: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x)

    model = trial.wrap(agent)
    for step in range(2):
        with torch.no_grad():
            actions = model(trial.batch(step))[0].sample()
        for _ in stepped(model, 2):
            policy, values = model(trial.batch(step))
            advantage = 1.0 + trial.rank - values.squeeze(1)  # the reward is the rank's own
            loss = -(policy.log_prob(actions) * advantage.detach()).mean()
            loss = backward(loss + advantage.square().mean() - 0.01 * policy.entropy().mean())
            yield [loss, actions]
