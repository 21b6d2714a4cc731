"""MODEL.COMPILE step: training steps on static buffers, on CUDA as replays of one CUDA graph.

A GPU runs the operations of short steps faster than the host launches them. The graph holds forward pass, loss,
backward pass, clipping, optimizer, the moving average of the weights, and meter. What depends on the position of a step
is not in it: batches are mixed before they are copied to the buffers, learning rates and the decay of the average are
tensors, and the generator, whose seed the graph reads from the device, is seeded before each replay. What takes place
in some steps only, e.g. lookahead and an average with EMA.EVERY_STEPS, follows the graph.

On a CPU the same function runs eagerly, with the bits of MODEL.COMPILE none. In a graph, accumulated micro-batches draw
from one seed, e.g. for dropout.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.batch import map_leaves
from distribuuuu.data.seeding import derive_seed, seed_step
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.run import Training
from distribuuuu.optim.ema import Ema
from distribuuuu.tasks.base import Task
from distribuuuu.tasks.metrics import ScoreMetric


def use_static_steps(training: Training) -> None:
    """Let the steps of a training run on static buffers; ConfigError: they may consist of different operations."""
    task = training.task
    bases = [*type(task).__mro__, *type(getattr(task, "criterion", None)).__mro__]
    own = [base for base in bases if base.__module__.partition(".")[0] not in ("distribuuuu", "torch", "builtins")]
    reasons = [f"{base.__name__}, which does not declare `capturable = True`" for base in own
               if not vars(base).get("capturable")]  # fmt: skip
    scores = [name for name, metric in task.train_metrics.items() if isinstance(metric, ScoreMetric)]
    reasons += [f"the metric {name}, which keeps all scores" for name in scores]
    reasons += ["a task that computes gradients several times"] if task.gradient_passes > 1 else []
    if reasons:
        problem = Problem("MODEL.COMPILE", f"got step with {reasons[0]}; fix: set it to default or none")
        raise ConfigError(problem, training.cfg.origins)
    task.update = StaticStep(training)  # type: ignore[method-assign]


class StaticStep:
    """`Task.update` of a training, with a `Step` whose `gradients` fills the buffers and whose `apply` does the rest.

    A new graph is captured when the shapes of batches, the trainable parameters or the modes of modules have changed.
    """

    def __init__(self, training: Training):
        self._training, state, self._device = training, training.state, training.train_loader.device
        self._groups, self._on_cuda = state.optimizer.param_groups, self._device.type == "cuda"
        self._weights, self._modules = list(state.model.parameters()), list(state.model.modules())
        takes_tensors = self._on_cuda or isinstance(state.optimizer, torch.optim.SGD)  # on a CPU, Adam takes none
        self._rates = [torch.zeros((), device=self._device) for _ in self._groups] if takes_tensors else []
        for group in (group for group in self._groups if self._on_cuda and "capturable" in group):
            group["capturable"] = True  # torch asks for it, though fused kernels always are
        self._form, self._graph = None, None
        self._is_plain = type(training.task).update is Task.update  # else it may change weights after `apply`
        self._shares = {average: torch.zeros((), device=self._device) for average in state.averages.values()
                        if self._is_plain and type(average) is Ema and average.every_steps == 1}  # fmt: skip
        for average in self._shares:
            average.finish_step = lambda *position: None  # type: ignore[method-assign]  # a step of ours moves it

    def __call__(self, step: Any) -> None:
        """Update the weights with a global batch; `step` is the `trainer.Step`."""
        step.gradients, step.apply = functools.partial(self._load, step), functools.partial(self._run, step)
        type(self._training.task).update(self._training.task, step)

    def _load(self, step: Any, all_reduce: bool = True, in_metrics: bool = True) -> None:
        """Copy the micro-batches of a step to the buffers; if the form of the step is new, make buffers and a graph."""
        micro_batches = list(step.micro_batches)
        if not (micro_batches and in_metrics):
            message = "got step with a task that calls step.gradients twice or without metrics; fix: set it to none"
            raise ConfigError(Problem("MODEL.COMPILE", message, self._training.cfg.origins))
        self._keys, batches = zip(*micro_batches, strict=True)
        tensors = _tensors(batches)
        form: Any = ([weight.requires_grad for weight in self._weights], [module.training for module in self._modules],
                     [{**group, "lr": None} for group in self._groups],
                     [(tensor.shape, tensor.dtype) for tensor in tensors])  # fmt: skip
        if form != self._form:
            self._form, self._graph = form, None  # its memory is free before more is needed
            self._batches = map_leaves(torch.Tensor, torch.clone, batches)
            self._buffers = _tensors(self._batches)
            self._graph = self._capture()
        torch._foreach_copy_(self._buffers, tensors)
        if not self._is_plain:  # its update finds no gradients of the step before
            self._training.state.optimizer.zero_grad()

    def _run(self, step: Any) -> None:
        """Replay the graph; without one, compute the step."""
        state = self._training.state
        for group, rate in zip(self._groups, self._rates, strict=False):
            rate.fill_(group["lr"])
        for average, share in self._shares.items():
            seen = state.images_seen + state.global_batch
            share.fill_(average.share(state.epoch, state.step, seen, state.global_batch))
        seed_step(derive_seed(*self._keys[0], dist.rank()), self._device)
        state.clock.mark()
        if self._graph:
            self._graph.replay()
        else:
            self._compute()
        state.clock.mark("step")
        step.is_applied = True
        if state.epoch == step.number == 0:  # the first loss, which the next replay overwrites
            step.loss = self._loss.clone()
        if not self._is_plain:  # as after `Step.gradients`, for what its update draws
            seed_step(derive_seed(state.seed, state.epoch, step.number, 1), self._device)

    def _compute(self) -> None:
        """Take a step with the buffers, as `Step.gradients` and `Step.apply` do; the host waits for nothing."""
        training, state, num = self._training, self._training.state, len(self._batches)
        state.optimizer.zero_grad()
        for key, batch in zip(self._keys, self._batches, strict=True):
            if not self._on_cuda:  # a graph draws for all micro-batches with the seed of the first one
                seed_step(derive_seed(*key, dist.rank()), self._device)
            output = training.task.train_step(training.model, batch, key)
            state.precision.backward(output.loss if num == 1 else output.loss / num)
            state.meter.update(output)
            self._loss = output.loss.detach()
        state.meter.add_pending()
        scheduled = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._rates, strict=False):
            group["lr"] = rate
        state.precision.step(state.optimizer, training.clip)
        for group, lr in zip(self._groups, scheduled, strict=True):  # which a checkpoint holds
            group["lr"] = lr
        for average, share in self._shares.items():
            average.update(share)

    def _capture(self) -> Any:
        """Warm up, on another stream, and undo that; on CUDA return the graph of a step, which does not run yet."""
        before = {id(tensor): (tensor, tensor.detach().clone()) for tensor in self._list_changed()}
        side = torch.cuda.Stream(self._device) if self._on_cuda else None
        if side:
            side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # None: the current one
            for _ in range(3):  # libraries choose algorithms and allocate workspaces
                self._compute()
        if side:
            torch.cuda.current_stream(self._device).wait_stream(side)
        for tensor in self._list_changed():  # those that the optimizer and the meter make in their first step are zeros
            tensor.detach().copy_(before[id(tensor)][1] if id(tensor) in before else torch.zeros_like(tensor))
        if not side:
            return None
        graph = torch.cuda.CUDAGraph()  # it registers the generator of the device
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # workers of the loader may go on
            self._compute()
        return graph

    def _list_changed(self) -> list[torch.Tensor]:
        """Return the tensors that a step may change: of models, task, optimizer and meter."""
        state, task = self._training.state, self._training.task
        leaves = tree_leaves([vars(task), vars(state.meter), *state.optimizer.state.values()])
        modules = [*state.models.values(), *(leaf for leaf in leaves if isinstance(leaf, nn.Module))]
        weights = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return [*weights, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_leaves(torch.Tensor, found.append, value)
    return found
