"""The token grid for attention inside models whose blocks hand on a sequence and no shape."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .depthwise import DepthwiseMixing
from .feature_maps import TokenPositions
from .found_pivots import FoundPivots
from .near_keys import NearKeys

Grid = tuple[int, int]

_TAG = "_lotformer_grids"
_Table = tuple[OrderedDict[str, Any], dict[str, bool]]


class GridSource:
    """Tells attention modules the `(rows, columns)` of their tokens, read off the convolution that cuts the patches.

    Nothing is kept from one forward to the next. Hooks on the modules of the host do three things:

    - A call of the enclosure, the module that holds convolution and attention, opens a scope of its thread, and the
      convolution notes its grids in there. An attention inside reads the one that has as many tokens as it was given;
      where two have, it refuses. Methods that bypass the call of the enclosure (`forward_features`) leave their notes
      in a scope of the thread, where a new image displaces those that have been read.
    - A call of any module between enclosure and attention tags the tokens that go in and come out with their grid. A
      block that checkpointing runs again, after the scope is closed and maybe in another thread, finds it on its input.
    - A backward pass sees no notes of the forward: what it runs again has a tag, or brings its own image.

    Copies and pickles start without notes.
    """

    def __init__(self, prefix_tokens: int = 0) -> None:
        self.prefix_tokens = prefix_tokens
        self._notes = _Notes()

    def __reduce__(self) -> tuple[type[GridSource], tuple[int]]:
        return GridSource, (self.prefix_tokens,)

    def of(self, tokens: int) -> Grid:
        """The grid of so many tokens, those of the prefix among them, that an attention was given.

        Raises:
            ValueError: nothing tells, or two images do.
        """
        scope = self._notes.scope()
        if scope is not None:
            grids = scope.grids
            if len(grids) > 1:
                grids = scope.fitting(tokens - self.prefix_tokens) or grids
            if len(grids) == 1:
                scope.use(grids[0])
                return grids[0]
            self._notes.forget()
            shapes = " or ".join(f"{rows}×{columns}" for rows, columns in grids)
            raise ValueError(
                f"{tokens} tokens may be those of {shapes} patches: several images were embedded before the attention "
                f"ran. Run the model on one after the other, or the blocks {_BY_HAND}"
            )
        raise ValueError(
            f"nothing tells the grid of {tokens} tokens: no image was cut into patches in this forward. Run the whole "
            f"model, or the blocks {_BY_HAND}"
        )

    def supply(self, enclosure: nn.Module, patches: nn.Module, reader: str) -> None:
        """Place the hooks for the attention module called `reader` in the enclosure."""
        self._place(_Opener, enclosure)
        self._place(_Listener, patches)
        parts = reader.split(".")
        for end in range(1, len(parts) + 1):
            self._place(_Reader if end == len(parts) else _Follower, enclosure.get_submodule(".".join(parts[:end])))

    def _place(self, kind: type[_Hook], module: nn.Module) -> None:
        if not any(hook.source is self and type(hook) is kind for hook in _hooks(module)):
            kind(self).place(module)


def needs_grid(mechanism: nn.Module) -> bool:
    """True if some part of the mechanism sees its tokens on a grid."""
    flat = (DepthwiseMixing, FoundPivots, NearKeys)
    return any(
        (isinstance(part, flat) and part.kind == "2d") or (isinstance(part, TokenPositions) and part.grid is not None)
        for part in mechanism.modules()
    )


def release(model: nn.Module, readers: Iterable[nn.Module]) -> None:
    """Attention modules read no grid any more; hooks that serve none go too."""
    for module in readers:
        for hook in _hooks(module):
            if isinstance(hook, _Reader):
                hook.remove(module)
    found = [(module, hook) for module in model.modules() for hook in _hooks(module)]
    served = {id(hook.source) for _, hook in found if isinstance(hook, _Reader)}
    for module, hook in found:
        if id(hook.source) not in served:
            hook.remove(module)


@contextmanager
def token_grid(module: nn.Module, rows: int, columns: int) -> Iterator[None]:
    """While inside, attention in `module` takes tokens for `rows × columns` patches, after the special tokens.

    For blocks of a vision model that run on their own, without the image that would tell:

        with lotformer.conversion.token_grid(model.blocks, 16, 14):
            tokens = model.blocks(tokens)

    It holds for the current thread, and for backward passes in it.

    Raises:
        ValueError: there is no attention in `module` that reads the grid of a model.
    """
    sources = {id(hook.source): hook.source for part in module.modules() for hook in _hooks(part)}
    if not sources:
        raise ValueError(
            f"{type(module).__name__} holds no attention that reads the grid of its model: converted modules with a "
            "2-D part do, and the vision transformers of lotformer.models. Others take `grid=` where they are called."
        )
    scope = _Scope(None, [(rows, columns)], given=True)
    stacks = [source._notes.stack for source in sources.values()]
    for stack in stacks:
        stack.append(scope)
    try:
        yield
    finally:
        for stack in stacks:
            del stack[stack.index(scope) :]  # with what calls have left inside that were interrupted


_BY_HAND = "within `with lotformer.conversion.token_grid(module, rows, columns):`."


class _Scope:
    """The grids noted during one call of `owner`, or by hand."""

    def __init__(self, owner: nn.Module | None, grids: list[Grid], given: bool = False) -> None:
        self.owner = owner
        self.grids = grids
        self.used: list[Grid] = []
        self.given = given
        self.backward = _backward()

    def is_current(self) -> bool:
        """True if it was opened in the current backward pass, or outside of any with none running now."""
        return torch.compiler.is_compiling() or self.backward == _backward()

    def fitting(self, tokens: int) -> list[Grid]:
        return [(rows, columns) for rows, columns in self.grids if rows * columns == tokens]

    def note(self, grid: Grid) -> None:
        if grid not in self.grids:
            self.grids.append(grid)

    def use(self, grid: Grid) -> None:
        """Only the scope of a thread, which nobody closes, has to know."""


class _ThreadScope(_Scope):
    """Grids noted outside of any enclosed call: a new image replaces those that have been read."""

    def note(self, grid: Grid) -> None:
        self.grids = [old for old in self.grids if old not in self.used]
        self.used = []
        super().note(grid)

    def use(self, grid: Grid) -> None:
        if grid not in self.used:
            self.used.append(grid)


class _Notes(threading.local):
    """The open scopes of a thread."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []
        self.loose = _ThreadScope(None, [])

    def scope(self) -> _Scope | None:
        """The innermost one that holds a grid, of the backward pass that is running or of none."""
        for scope in reversed(self.stack):
            if scope.grids and (scope.given or scope.is_current()):
                return scope
        return self.loose if self.loose.grids and self.loose.is_current() else None

    def note(self, grid: Grid) -> None:
        if not torch.compiler.is_compiling():
            self._drop_interrupted()
        if self.stack and self.stack[-1].given:
            return
        if self.stack and self.stack[-1].is_current():
            self.stack[-1].note(grid)
            return
        if not self.loose.is_current():
            self.loose = _ThreadScope(None, [])
        self.loose.note(grid)

    def close(self, owner: nn.Module) -> _Scope | None:
        """Close the scope of a call, and any that an interrupt has left open inside it."""
        for index in reversed(range(len(self.stack))):
            if self.stack[index].owner is owner:
                scope = self.stack[index]
                del self.stack[index:]
                return scope
        return None  # another hook failed before the scope was opened

    def forget(self) -> None:
        """After a refusal: the images are not to trouble the next ones."""
        self.loose = _ThreadScope(None, [])

    def _drop_interrupted(self) -> None:
        """PyTorch runs no hook after a `KeyboardInterrupt`: scopes whose call is over are found by Python's stack."""
        running, frame = set(), sys._getframe()
        while frame is not None:
            if "_call_impl" in frame.f_code.co_name:
                running.add(id(frame.f_locals.get("self")))
            frame = frame.f_back  # type: ignore[assignment]
        while self.stack and not self.stack[-1].given and id(self.stack[-1].owner) not in running:
            self.stack.pop()


class _Hook:
    """Hooks on one module for one source."""

    def __init__(self, source: GridSource) -> None:
        self.source = source

    def place(self, module: nn.Module) -> None:
        """Register `enter`, before other hooks, and `leave`, always called.

        PyTorch's own registration would give the hooks of every module another number, which `torch.compile` guards
        on: blocks that are alike would no longer share their graph.
        """
        before, after = _tables(module)
        key = next(key for number in itertools.count() if (key := f"lotformer.grids.{number}") not in before[0])
        before[0][key], before[1][key] = self.enter, True
        before[0].move_to_end(key, last=False)
        after[0][key], after[1][key] = self.leave, True

    def remove(self, module: nn.Module) -> None:
        for hooks, marks in _tables(module):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key], marks[key]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        pass


class _Listener(_Hook):
    """On the convolution that cuts the patches."""

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if output is not None:  # it has not failed
            self.source._notes.note((output.shape[-2], output.shape[-1]))


class _Opener(_Hook):
    """On the enclosure."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.source._notes.stack.append(_Scope(module, []))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.source._notes.close(module)


class _Follower(_Hook):
    """On a module that tokens pass on their way to an attention.

    There is no storage to tag while a program is traced. It needs no tags either: the whole forward is in the program,
    or the scopes are of the calls around it.
    """

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        notes = self.source._notes
        tokens = _first_tokens((*args, *kwargs.values()))
        scope = notes.scope()
        given = scope is not None and scope.given
        grid = None if tokens is None or given else _tag_of(tokens)
        if grid is None and tokens is not None and scope is not None:
            fitting = scope.fitting(tokens.shape[1] - self.source.prefix_tokens)
            if len(fitting) == 1:
                grid = fitting[0]
                scope.use(grid)
                _tag(tokens, grid)
        # an empty scope is looked through
        notes.stack.append(_Scope(module, [] if grid is None else [grid], given and grid is not None))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        scope = self.source._notes.close(module)
        if scope is None or not scope.grids:
            return
        tokens = _first_tokens(output if isinstance(output, tuple) else (output,))
        rows, columns = scope.grids[0]
        if tokens is not None and tokens.shape[1] == rows * columns + self.source.prefix_tokens:
            _tag(tokens, (rows, columns))


class _Reader(_Follower):
    """On the attention itself."""


def _hooks(module: nn.Module) -> list[_Hook]:
    """Ours on a module, each once."""
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, _Hook)]


def _tables(module: nn.Module) -> tuple[_Table, _Table]:
    """Hooks of a module and how they are called: before `forward` with keywords, after it even if it failed."""
    before: Any = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    after: Any = module._forward_hooks, module._forward_hooks_always_called
    return before, after


def _first_tokens(values: Iterable[Any]) -> Tensor | None:
    """The first tensor, if it is `(B, N, C)`."""
    first = next((value for value in values if isinstance(value, Tensor)), None)
    return first if first is not None and first.dim() == 3 else None


def _tags(tokens: Tensor) -> tuple[dict[Any, tuple[int, Grid]], Any, int] | None:
    """The tags on the storage of a tensor, the key of the tensor among them, and its version.

    The storage is what the input of a checkpointed block and the tensor that it is run again with have in common; the
    version tells that something else has been written into it since.
    """
    try:
        storage = tokens.untyped_storage()
    except (NotImplementedError, RuntimeError):  # `vmap` and its like have none
        return None
    version = 0 if tokens.is_inference() else tokens._version
    return storage.__dict__.setdefault(_TAG, {}), (tokens.storage_offset(), tokens.shape, tokens.stride()), version


def _tag(tokens: Tensor, grid: Grid) -> None:
    found = _tags(tokens)
    if found is not None:
        tags, key, version = found
        for other in [other for other, (of, _) in tags.items() if of != version]:
            del tags[other]
        tags[key] = version, grid


def _tag_of(tokens: Tensor) -> Grid | None:
    found = _tags(tokens)
    if found is None:
        return None
    tags, key, version = found
    of, grid = tags.get(key, (None, None))
    return grid if of == version else None


def _backward() -> int:
    """The number of the backward pass that runs in this thread, -1 if none."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
