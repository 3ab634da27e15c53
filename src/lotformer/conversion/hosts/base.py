"""Knowledge that conversion needs about the models of one library, in one class per library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ...attention.unformed import Projections
from ...data.batches import Batch
from .sites import Site, Skipped

InputKind = Literal["text", "image", "sound", "other"]

CAUSAL = "it is causal, and a causal doubly stochastic matrix is the identity"


class Host(ABC):
    """The attention modules of one library: how they are found, and made to run a mechanism or softmax again.

    A host for a library whose attention is a class of its own names that class and one of yours, and reads off a module
    how many heads it has:

        class ConvertedToyAttention(ToyAttention):
            def forward(self, x, mask=None):
                q, k, v = ...  # as ToyAttention makes them, each (B, H, N, D)
                return self.out(mix(self, q, k, v, mask).transpose(1, 2).flatten(2))

        class Toy(Host):
            name = "toy"
            classes = {ToyAttention: ConvertedToyAttention}

            def heads(self, module):
                return module.heads, module.width // module.heads

        lotformer.conversion.register_host(Toy())

    Hosts hold no state. The first group of methods is about attention modules; the second about the models around
    them, where None means "not known": another host may know, and convert does without if none does.
    """

    name: ClassVar[str]
    """Unique among hosts. Converted modules remember it."""

    classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}
    """The attention classes of the library, each with the subclass whose `forward` calls `mix`."""

    inside_others: ClassVar[str | None] = None
    """For modules that other libraries build on: why one is left alone inside another library's model, unless named."""

    # attention modules

    def is_attention(self, module: nn.Module) -> bool:
        """True if a module is attention of this library, converted or not, convertible or not."""
        return type(module) in self.classes or type(module) in self.classes.values()

    @abstractmethod
    def heads(self, module: nn.Module) -> tuple[int, int]:
        """The number of heads of a convertible attention module, and their dimension."""

    def is_causal(self, model: nn.Module, name: str, module: nn.Module) -> bool:
        """True if the attention module called `name` is causal."""
        return bool(getattr(module, "is_causal", False))

    def why_not(self, model: nn.Module, name: str, module: nn.Module) -> str | None:
        """The reason why an attention module stays as it is; None if it can be converted."""
        return CAUSAL if self.is_causal(model, name, module) else None

    def find(self, model: nn.Module) -> list[Site | Skipped]:
        """Every attention module of the library in a model, in the model's order."""
        found: list[Site | Skipped] = []
        for name, module in model.named_modules():
            if self.is_attention(module):
                reason = self.why_not(model, name, module)
                found.append(
                    Site(name, module, *self.heads(module)) if reason is None else Skipped(name, module, reason)
                )
        return found

    def attach(self, model: nn.Module, modules: list[nn.Module]) -> None:
        """Let modules of the model run the mechanisms that they have been given. Calling it twice changes nothing."""
        for module in modules:
            module.__class__ = self.classes.get(type(module), type(module))

    def detach(self, model: nn.Module, modules: list[nn.Module]) -> None:
        """Called when the mechanisms of modules are gone; undoes `attach` exactly."""
        originals = {converted: original for original, converted in self.classes.items()}
        for module in modules:
            module.__class__ = originals[type(module)]

    def projections(self, module: nn.Module, num_heads: int, head_dim: int) -> Projections | str:
        """The projections of an attention module, or the reason why they are no linear map of its input.

        The factor of the scores that the host would apply, over `D^-1/2`, is in the queries.
        """
        return f"the host {self.name!r} does not tell how its modules form their queries and keys"

    def drop_projections(self, module: nn.Module) -> None:
        """Let a module hand its input to the mechanism in place of queries and keys (`projections` told them)."""
        raise NotImplementedError(f"modules of the host {self.name!r} are not folded.")

    # models, and parts of models, around attention modules

    def input_kind(self, enclosure: nn.Module) -> InputKind | None:
        """The kind of input that a model of this library reads."""
        return None

    def special_tokens(self, enclosure: nn.Module) -> int | None:
        """The number of special tokens ([CLS], distillation, registers) that `enclosure` puts before the patches."""
        return None

    def patches(self, enclosure: nn.Module) -> nn.Module | None:
        """The module in `enclosure` that cuts an image into patches; its output is `(…, rows, columns)`."""
        return None

    def sample_inputs(self, model: nn.Module) -> Batch | None:
        """Two random samples of the kind that a model of this library takes, on the CPU in fp32."""
        return None

    def takes_a_mapping(self, model: nn.Module) -> bool:
        """True if a model takes a batch as one mapping, which it may change, instead of keyword arguments."""
        return False

    def missing_inputs(self, model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> list[str]:
        """Advice after a failed call: the usual arguments of this library's models that were missing."""
        return []
