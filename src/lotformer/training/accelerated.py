"""Updates and teams on Accelerate: one process or many, any device, bf16, DDP or FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import timm_parts
from .finite import Buffers, not_finite
from .teams import Process
from .updates import ParamGroup

if TYPE_CHECKING:
    from accelerate import Accelerator

Grouping = Callable[[nn.Module], list[ParamGroup]]


def make_accelerator() -> Accelerator:
    """The processes set up by `torchrun` or `accelerate launch`, or this one alone."""
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError as error:
        raise ImportError("training needs accelerate: pip install 'lotformer[train]'.") from error
    # DDP otherwise regroups gradients after its first step, and sums of four or more processes then round differently:
    # a resumed run would not be bit for bit the one that was never interrupted.
    fixed_groups = DistributedDataParallelKwargs(find_unused_parameters=True)
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    # Without `cpu`, processes on CPUs are not joined. Precision is not told: Accelerate cannot change it within a
    # process, and runs of both kinds may follow each other.
    cpu = not torch.accelerator.is_available()
    return Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[fixed_groups])


class AcceleratedTeam:
    """The processes that an accelerator knows of."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.process = Process(accelerator.process_index, accelerator.num_processes)
        self._device = accelerator.device

    def gather(self, value: Any) -> list[Any]:
        if self.process.count == 1:
            return [value]
        values: list[Any] = [None] * self.process.count
        torch.distributed.all_gather_object(values, value)
        return values

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        if self.process.count == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        rows = [torch.empty_like(own) for _ in range(self.process.count)]
        torch.distributed.all_gather(rows, own)
        return [row.tolist() for row in rows]


class AcceleratedUpdates:
    """Updates of a whole model, the same on every process.

    Args:
        model: in fp32; `self.model` is what to call, `self.bare` what to look into.
        groups: the parameter groups of a model. optimizer: makes the optimizer from them.
        clip: the largest norm of the gradient, None for no limit.
        ema: decay of an average of the weights in `self.average`, None for none.
        sharded: FSDP2 in place of DDP: every process holds a part of the weights.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        groups: Grouping,
        optimizer: Callable[[list[ParamGroup]], torch.optim.Optimizer],
        *,
        clip: float | None = None,
        ema: float | None = None,
        sharded: bool = False,
    ) -> None:
        if sharded and ema is not None:
            raise ValueError(
                "an average of the weights (ema) of a sharded model is not supported: leave one of them out."
            )
        if sharded and accelerator.num_processes == 1:
            raise ValueError("a model is sharded over processes: start several with torchrun or `accelerate launch`.")
        self._accelerator, self._clip, self._sharded = accelerator, clip, sharded
        self.bare = model.to(accelerator.device)
        self.average = None if ema is None else _average(self.bare, ema)
        self.model = _shard(self.bare, accelerator) if sharded else accelerator.prepare_model(self.bare)
        self.optimizer = optimizer([group for group in groups(self.bare) if group["params"]])
        self._buffers = Buffers(self.bare.buffers())
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def evaluated(self) -> nn.Module:
        """The model whose metrics count: the average if there is one."""
        if self.average is not None:
            return self.average.module
        return self.model if self._sharded else self.bare

    @contextmanager
    def collecting(self, last: bool) -> Iterator[None]:
        self._buffers.keep()
        if self._sharded:
            self.model.set_requires_gradient_sync(last)
        if last or self._sharded:
            yield
            return
        with self._accelerator.no_sync(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def norm(self) -> Tensor:
        self._norm = nn.utils.get_total_norm([p.grad for p in self.bare.parameters() if p.grad is not None])
        return self._norm.full_tensor() if self._sharded else self._norm  # type: ignore[attr-defined]  # a DTensor

    def apply(self, factor: float) -> None:
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(self.bare.parameters(), self._clip, self._norm)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.bare)
        self._buffers.accept()

    def drop(self) -> None:
        self.optimizer.zero_grad()
        self._buffers.undo()

    def not_finite(self) -> list[str]:
        return not_finite({name: p for name, p in self.bare.named_parameters() if p.requires_grad})

    def weights(self) -> dict[str, Tensor]:
        """The weights that count, by their names in the bare model; of a sharded one on the first process only."""
        if self._sharded:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            return get_model_state_dict(self.model, options=options)  # type: ignore[return-value]  # of tensors
        return self.evaluated.state_dict()

    def state_dict(self) -> dict[str, Any]:
        if self._sharded:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

            if not self.optimizer.state:  # it would be filled, by a step that counts
                return {"weights": self.weights(), "optimizer": None, "average": None}
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights, optimizer = get_state_dict(self.model, self.optimizer, options=options)
            return {"weights": weights, "optimizer": optimizer, "average": None}
        return {
            "weights": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.module.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._sharded:
            from torch.distributed.checkpoint import state_dict as sharded

            options = sharded.StateDictOptions(full_state_dict=True)
            if state["optimizer"] is None:
                sharded.set_model_state_dict(self.model, state["weights"], options=options)
                return
            sharded.set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["weights"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
            return
        self.bare.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.module.load_state_dict(state["average"])

    def foreign(self, state: Mapping[str, Any]) -> str:
        return ""


def _average(model: nn.Module, decay: float) -> Any:
    _, average = timm_parts.parts()
    return average(model, decay=decay)


def _shard(model: nn.Module, accelerator: Accelerator) -> Any:
    """Shard every repeated block, then the rest: weights are then gathered block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            blocks = [block for block in container if any(True for _ in block.parameters())]
            if len(blocks) > 1 and len({type(block) for block in blocks}) == 1:
                for block in blocks:
                    fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
