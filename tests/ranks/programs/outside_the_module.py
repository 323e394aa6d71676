"""Gradients outside the wrapped module, and gradients computed without a training step."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from declared import programs, trains
from torch import nn

from steps import backward, learn, mlp, sgd, squares, stepped, trained
from trial import Trial, gradients, state_of


@trains(lambda: mlp(4, 8, 3))
def prompt_outside_of_the_wrapper(trial, model, *, steps=4):
    """The prompt's gradient is not exchanged, and a small one stays exact in float64."""
    prompt = nn.Parameter(torch.zeros(4))
    for step in stepped(sgd([*model.parameters(), prompt]), steps):
        model(trial.batch(step, 4, 4) + prompt).sum().mul(1e-3).backward()
        yield {"prompt": prompt.grad}


def prompt_before_a_frozen_first_layer(trial):
    module = mlp(4, 8, 8, 3)
    module[0].requires_grad_(False)
    model = trial.wrap(module)
    prompt = nn.Parameter(torch.zeros(2, 4))
    for step in range(3):
        prompt.grad = None
        tokens = torch.cat([prompt, trial.batch(step, 3, 4)])
        model(tokens).square().mean().backward()
        yield {"prompt": prompt.grad}


def small_loss_beside_a_head_outside(trial):
    """A head outside the wrapper keeps this rank's gradients, even very small ones."""
    body, head = trial.wrap(mlp(6, 8, 8)), nn.Linear(8, 2)
    for step in stepped(sgd([*body.parameters(), *head.parameters()]), 3):
        loss = backward(head(body(trial.batch(step))).square().mean() * 1e-6)
        yield {"loss": loss, "head": gradients(head)}


def two_wrappers_in_a_chain(trial):
    first, second = trial.wrap(mlp(6, 8, 5)), trial.wrap(mlp(5, 7, 2))
    for step in stepped(sgd([*first.parameters(), *second.parameters()]), 4):
        yield backward(second(first(trial.batch(step)).tanh()).square().mean())


def distillation_from_a_frozen_teacher(trial):
    teacher = mlp().requires_grad_(False).eval()
    student = trial.wrap(copy.deepcopy(teacher).requires_grad_(True))
    for step in stepped(student, 3):
        x = trial.batch(step)
        yield backward(F.mse_loss(student(x) * 1.1, teacher(x)))
    yield state_of(teacher)


def three_wrappers_of_which_the_middle_is_frozen_for_a_step(trial):
    models = [trial.wrap(mlp(6, 6)) for _ in range(3)]
    for step in stepped([sgd(model) for model in models], 4):
        x = trial.batch(step)
        for number, model in enumerate(models):
            with torch.set_grad_enabled((number, step) != (1, 2)):
                x = x + model(x)
        yield backward(x.square().mean())


def _gan(trial: Trial, toggles: bool) -> Iterator[Any]:
    """Alternate a discriminator step with a generator step through the discriminator."""
    generator, discriminator = trial.wrap(mlp(3, 8, 6)), trial.wrap(mlp(6, 8, 1))
    optimizers = [torch.optim.Adam(m.parameters(), eps=1e-3) for m in (generator, discriminator)]
    for step in range(4):
        fake = generator(trial.batch(step, 4, 3))
        discriminator.requires_grad_(True)
        optimizers[1].zero_grad()
        if toggles:
            real = F.softplus(-discriminator(trial.batch(10 + step))).mean()
            (real + F.softplus(discriminator(fake.detach())).mean()).backward()
        else:
            real = backward(F.softplus(-discriminator(trial.batch(10 + step))).mean())
            backward(F.softplus(discriminator(fake.detach())).mean())
        optimizers[1].step()
        discriminator.requires_grad_(not toggles)
        optimizers[0].zero_grad()
        yield [real, backward(F.softplus(-discriminator(fake)).mean())]
        optimizers[0].step()


programs(
    __name__,
    {
        # The discriminator is frozen during the generator's step, as in pix2pix.
        "gan_with_requires_grad_toggled": lambda trial: _gan(trial, toggles=True),
        # As in the DCGAN example: two backward passes of the discriminator per step.
        "gan_without_toggling": lambda trial: _gan(trial, toggles=False),
    },
)


def wgan_gp_with_double_backward(trial):
    """Penalize the gradient of the discriminator's input, computed with create_graph."""
    discriminator = trial.wrap(nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)))
    for step in stepped(torch.optim.Adam(discriminator.parameters(), eps=1e-3), 3):
        real, fake = trial.batch(step), trial.batch(10 + step)
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(discriminator(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = backward(discriminator(fake).mean() - discriminator(real).mean() + 10 * penalty)
        yield {"loss": loss, "slope": slope}


def gradient_penalty_of_the_same_forward(trial):
    """Penalize the input gradient of the forward pass that also gives the score."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1))
    model = trial.wrap(module)
    for step in stepped(model, 3):
        x = trial.batch(step).requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.mean() + slope.square().mean()).backward()
        yield slope


def saliency_between_steps(trial, model):
    """torch.autograd.grad between steps does not change the next step's gradients."""
    for step in stepped(model, 4):
        x = trial.batch(20 + step).requires_grad_()
        yield [torch.autograd.grad(model(x).sum(), x), learn(trial, model, step)]


def saliency_on_one_rank_only(trial, model):
    """One rank plots while the other trains on; a model without buffers needs nobody for that."""
    for step in stepped(model, 4):
        if trial.rank == 0 and step % 2:
            model.eval()
            x = trial.batch(20 + step).requires_grad_()
            yield torch.autograd.grad(model.module(x).sum(), x)
            model.train()
        yield learn(trial, model, step)


def adversarial_examples_by_fgsm(trial, model):
    for step in stepped(model, 4):
        x = trial.batch(step).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x)
        attacked = (x + 0.1 * slope.sign()).detach()
        loss = backward(model(attacked).square().mean())
        yield [attacked, loss]


def adversarial_examples_by_backward(trial, model):
    """Compute x.grad with a full backward pass, then clear the model's gradients."""
    for step in stepped(model, 3):
        x = trial.batch(step).requires_grad_()
        model(x).square().mean().backward()
        yield x.grad
        model.zero_grad()
        model((x + 0.1 * x.grad.sign()).detach()).square().mean().backward()
        yield x.grad


def backward_for_the_inputs_only(trial, model):
    """backward(inputs=[x]) leaves the gradients of parameters None."""
    x = trial.batch(0).requires_grad_()
    model(x).sum().backward(inputs=[x])
    yield x.grad
    yield from trained(model, squares(trial))


def decay_in_the_loss(trial, model, step):
    """The loss uses parameters directly and through forward; their gradient is the sum."""
    decay = sum(parameter.square().sum() for parameter in model.parameters())
    return model(trial.batch(step)).square().mean() + 0.1 * decay


def weighting_of_losses_outside(trial):
    """Learned weights of two losses, which only the loss function knows."""
    model, logs = trial.wrap(mlp(6, 8, 4)), nn.Parameter(torch.zeros(2))
    for step in stepped(sgd([*model.parameters(), logs]), 4):
        one, other = model(trial.batch(step)).chunk(2, dim=1)
        losses = torch.stack([one.square().mean(), other.abs().mean()])
        (losses * logs.neg().exp() + logs).sum().backward()
        yield [losses, logs.grad]


def gradient_with_respect_to_parameters(trial, model):
    """torch.autograd.grad of the parameters is not exchanged, as with DDP."""
    for step in range(2):
        loss = model(trial.batch(step)).square().mean()
        yield list(torch.autograd.grad(loss, list(model.parameters())))
    yield from trained(model, squares(trial))
