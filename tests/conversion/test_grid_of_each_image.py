"""Every image is read on its own grid: whatever passed before it, in whatever thread, and when a block runs again."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
import transformers
from timm.models import checkpoint_seq
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import lotformer
import lotformer.models
from lotformer.conversion import token_grid

PATCH = 5
WIDE, HIGH, LONG = (4, 6), (6, 4), (2, 9)  # the first two have as many tokens


@dataclass(frozen=True)
class Host:
    """A vision transformer, and how its parts are called one by one."""

    build: Callable[[], nn.Module]
    whole: Callable[[nn.Module, Tensor], Tensor]
    embed: Callable[[nn.Module, Tensor], Tensor]
    blocks: Callable[[nn.Module], nn.ModuleList]

    def run(self, model: nn.Module, tokens: Tensor) -> Tensor:
        for block in self.blocks(model):
            tokens = block(tokens)
        return tokens

    def alone(self, model: nn.Module, image: Tensor) -> Tensor:
        """What the blocks make of one image."""
        with torch.no_grad():
            return self.run(model, self.embed(model, image))


_SIZES = {"patch_size": PATCH, "embed_dim": 24, "num_heads": 3, "depth": 3, "num_classes": 5, "img_size": 20}
_CONFIG = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 20,
           "patch_size": PATCH, "image_size": 20}  # fmt: skip


def _converted(model: nn.Module) -> nn.Module:
    lotformer.convert(model, rank=5)
    assert any(part.kind == "2d" for part in model.modules() if isinstance(part, lotformer.nn.near_keys.NearKeys))
    return model


def _hugging_face(kind: str) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**_CONFIG)
    return _converted(getattr(transformers, f"{kind}Model")(config))


def _timm_embed(model: Any, image: Tensor) -> Tensor:
    return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(image))))


def _timm(build: Callable[[], nn.Module]) -> Host:
    return Host(build, lambda model, image: model(image), _timm_embed, lambda model: model.blocks)


def _embed(model: Any, image: Tensor) -> Tensor:
    return model.embeddings(image, interpolate_pos_encoding=True)


HOSTS = {
    "timm": _timm(lambda: _converted(timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **_SIZES))),
    "lot_deit": _timm(lambda: timm.create_model("lot_deit_tiny_patch16_224", dynamic_img_size=True, **_SIZES)),
    "lot_vit": _timm(lambda: timm.create_model("lot_vit_half", dynamic_img_size=True, **_SIZES)),
    "transformers": Host(
        lambda: _hugging_face("ViT"),
        lambda model, image: model(image, interpolate_pos_encoding=True).last_hidden_state,
        _embed,
        lambda model: model.layers,
    ),
    "dinov2": Host(
        lambda: _hugging_face("Dinov2"),
        lambda model, image: model(image).last_hidden_state,
        lambda model, image: model.embeddings(image),
        lambda model: model.encoder.layer,
    ),
}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Host:
    return HOSTS[request.param]


@pytest.fixture
def model(host: Host) -> nn.Module:
    return _spread(host.build()).eval()


def _spread(model: nn.Module) -> nn.Module:
    """Weights large enough for a wrong grid to show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def image(grid: tuple[int, int], batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, PATCH * grid[0], PATCH * grid[1])


def in_one_call(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """The model with another `forward`."""
    model.__class__ = type("Changed", (type(model),), {"forward": forward})
    return model


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("enclosed", [True, False], ids=["in a call of the model", "part by part"])
class TestTwoImages:
    def both(self, host: Host, model: nn.Module, enclosed: bool, run: Callable[..., Any], *images: Tensor) -> Any:
        """`run(model, tokens, …)`, when all images are embedded."""

        def forward(model: nn.Module, *images: Tensor) -> Any:
            return run(model, *[host.embed(model, image) for image in images])

        return in_one_call(model, forward)(*images) if enclosed else forward(model, *images)

    def test_of_different_sizes_are_told_apart(self, host: Host, model: nn.Module, enclosed: bool) -> None:
        images = image(WIDE), image(LONG)
        expected = [host.alone(model, each) for each in images]
        got = self.both(host, model, enclosed, lambda model, a, b: (host.run(model, a), host.run(model, b)), *images)
        for mine, right in zip(got, expected, strict=True):
            close(mine, right)

    def test_with_as_many_tokens_are_refused(self, host: Host, model: nn.Module, enclosed: bool) -> None:
        with pytest.raises(ValueError, match=r"several images .* one after the other.*token_grid"):
            self.both(host, model, enclosed, lambda model, a, b: host.run(model, a), image(WIDE), image(HIGH))
        later = image(HIGH)  # which a refusal does not touch
        close(host.alone(model, later), host.alone(copy.deepcopy(model), later))

    def test_with_as_many_tokens_are_read_by_hand(self, host: Host, model: nn.Module, enclosed: bool) -> None:
        def run(model: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            with token_grid(model, *WIDE):
                first = host.run(model, a)
            with token_grid(model, *HIGH):
                return first, host.run(model, b)

        images = image(WIDE), image(HIGH)
        expected = [host.alone(model, each) for each in images]
        for mine, right in zip(self.both(host, model, enclosed, run, *images), expected, strict=True):
            close(mine, right)


def test_tokens_that_a_block_has_seen_know_their_grid(host: Host, model: nn.Module) -> None:
    first, *rest = host.blocks(model)
    images = image(WIDE), image(HIGH)
    expected = [host.alone(model, each) for each in images]
    both = [first(host.embed(model, each)) for each in images]
    for block in rest:
        both = [block(tokens) for tokens in both]
    for mine, right in zip(both, expected, strict=True):
        close(mine, right)


def test_a_second_image_in_a_call_makes_new_tokens_of_the_first_ambiguous(host: Host, model: nn.Module) -> None:
    def forward(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        first, second, *_ = host.blocks(model)
        tokens = first(host.embed(model, a)) + 0  # no tensor that the block has seen
        host.embed(model, b)
        return second(tokens)

    with pytest.raises(ValueError, match="several images"):
        in_one_call(model, forward)(image(WIDE), image(HIGH))


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_do_not_meet(host: Host, threads: int) -> None:
    model = _spread(host.build()).eval()
    grids = [(2, 25), (25, 2)]
    images = [image(grids[index % 2], 1) for index in range(threads)]
    with torch.no_grad():
        expected = [host.whole(model, each) for each in images]

        def work(index: int) -> list[Tensor]:
            with torch.no_grad():  # which a thread has of its own
                return [host.whole(model, images[index]) for _ in range(200 // threads)]

        with ThreadPoolExecutor(threads) as pool:
            for right, outputs in zip(expected, pool.map(work, range(threads)), strict=True):
                for got in outputs:
                    close(got, right)


def gradients(host: Host, model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """Of one loss over images of several shapes."""
    model.zero_grad()
    torch.manual_seed(1)
    sum(run(model, image(grid)).square().mean() for grid in (WIDE, HIGH, LONG)).backward()
    wrapper = "_checkpoint_wrapped_module."
    found = {n.replace(wrapper, ""): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert found
    return found


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, right in expected.items():
        torch.testing.assert_close(got[name], right, rtol=1e-4, atol=1e-6)


class TestCheckpointing:
    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
    @pytest.mark.parametrize("enclosed", [True, False], ids=["in a call of the model", "part by part"])
    @pytest.mark.parametrize("every", [1, 2, 3])
    def test_of_blocks(self, host: Host, model: nn.Module, reentrant: bool, enclosed: bool, every: int) -> None:
        def forward(model: nn.Module, image: Tensor) -> Tensor:
            tokens = host.embed(model, image)
            if not again:
                return host.run(model, tokens)
            return checkpoint_seq(list(host.blocks(model)), tokens, every=every, use_reentrant=reentrant)

        run = in_one_call(model, forward) if enclosed else None
        again = False
        expected = gradients(host, model, run_of(run, forward))
        again = True
        got = gradients(host, model, run_of(run, forward))
        same(got, expected)

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
    def test_of_attention_alone(self, host: Host, model: nn.Module, reentrant: bool) -> None:
        plain = gradients(host, model, host.whole)
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for block in host.blocks(model):
            name = "attn" if hasattr(block, "attn") else "attention"
            setattr(block, name, checkpoint_wrapper(getattr(block, name), kind))
        same(gradients(host, model, host.whole), plain)

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
    def test_of_the_whole_model(self, host: Host, model: nn.Module, reentrant: bool) -> None:
        def again(model: nn.Module, image: Tensor) -> Tensor:
            return checkpoint(host.whole, model, image.requires_grad_(), use_reentrant=reentrant)

        same(gradients(host, model, again), gradients(host, model, host.whole))

    def test_by_the_hosts_own_switch(self, host: Host, model: nn.Module) -> None:
        model.train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        plain = gradients(host, model, host.whole)
        for words in [{"use_reentrant": True}, {"use_reentrant": False}]:
            if isinstance(model, transformers.PreTrainedModel):
                model.gradient_checkpointing_enable(words)
            else:
                model.set_grad_checkpointing()
            same(gradients(host, model, host.whole), plain)

    def test_of_tokens_that_nobody_has_seen_is_refused(self, host: Host, model: nn.Module) -> None:
        tokens = host.embed(model, image(WIDE))
        first = host.blocks(model)[0]
        out = checkpoint(lambda tokens: first(tokens + 0), tokens, use_reentrant=False)
        with pytest.raises(ValueError, match="nothing tells the grid"):
            out.sum().backward()


def run_of(enclosed: nn.Module | None, forward: Callable[..., Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return forward if enclosed is None else lambda model, image: enclosed(image)


class TestCopies:
    @pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
    def test_of_blocks_know_no_grid(self, host: Host, model: nn.Module, way: Callable[[Any], Any]) -> None:
        host.whole(model, image(HIGH))
        tokens = host.embed(model, image(WIDE)).detach()
        blocks = way(host.blocks(model))
        square = torch.randn(2, 17, 24)
        for each in (tokens, square):
            with pytest.raises(ValueError, match="nothing tells the grid of"):
                blocks[0](each)
        with token_grid(blocks, *WIDE):
            got = blocks[0](tokens)
        with token_grid(model, *WIDE):
            close(got, host.blocks(model)[0](tokens))

    @pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
    def test_of_models_have_grids_of_their_own(self, host: Host, model: nn.Module, way: Callable[[Any], Any]) -> None:
        wide, high = image(WIDE), image(HIGH)
        expected = [host.whole(model, each) for each in (wide, high)]
        twin = way(model)

        def forward(twin: nn.Module, image: Tensor) -> Tensor:
            tokens = host.embed(twin, image)
            host.whole(model, wide)
            return host.run(twin, tokens)

        close(host.whole(twin, high), expected[1])
        close(forward(twin, high), host.alone(model, high))


class TestLeftovers:
    @pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize("place", ["block", "before"])
    def test_of_calls_that_fail(self, host: Host, model: nn.Module, kind: type[BaseException], place: str) -> None:
        wide, high = image(WIDE), image(HIGH)
        expected = host.whole(model, high), host.alone(model, high)

        def fail(*_: Any) -> None:
            raise kind

        block = host.blocks(model)[1 if place == "block" else 0]
        part = block.mlp if place == "block" else block
        for enclosed in (True, False):
            handle = part.register_forward_pre_hook(fail, prepend=True)
            with pytest.raises(kind):
                host.whole(model, wide) if enclosed else host.alone(model, wide)
            handle.remove()
            if enclosed or place == "block":
                close(host.alone(model, high), expected[1])
            close(host.whole(model, high), expected[0])

    def test_memory_is_flat(self, host: Host, model: nn.Module) -> None:
        def objects() -> int:
            gc.collect()
            return len(gc.get_objects())

        images = [image(grid, 1) for grid in (WIDE, HIGH, LONG)]
        for each in images:
            host.whole(model, each).sum().backward()
        before = objects()
        for index in range(30):
            host.whole(model, images[index % 3]).sum().backward()
            host.alone(model, images[index % 3])
        assert objects() <= before + 20

    def test_of_a_call_inside_another(self, host: Host, model: nn.Module) -> None:
        wide, high = image(WIDE), image(HIGH)
        expected = host.whole(model, wide), host.whole(model, high)
        inner: list[Tensor] = []

        def call(*_: Any) -> None:
            handle.remove()
            inner.append(host.whole(model, high))

        handle = host.blocks(model)[1].mlp.register_forward_pre_hook(call)
        close(host.whole(model, wide), expected[0])
        close(inner[0], expected[1])


@pytest.mark.parametrize("name", ["timm", "lot_deit", "lot_vit"])
class TestMethodsOfTimm:
    def test_that_bypass_the_call(self, name: str) -> None:
        model: Any = _spread(HOSTS[name].build()).eval()
        for grid in (WIDE, HIGH, LONG, HIGH, WIDE):
            pixels = image(grid)
            right = copy.deepcopy(model).forward_features(pixels)
            close(model.forward_features(pixels), right)
            final, maps = model.forward_intermediates(pixels)
            close(final, right)
            assert {tuple(each.shape[2:]) for each in maps} == {grid}
            close(model.get_intermediate_layers(pixels, 1)[0], maps[-1].flatten(2).mT)
            early = model.forward_intermediates(pixels, indices=[0], stop_early=True, intermediates_only=True)
            close(early[0], maps[0])

    def test_features_only(self, name: str) -> None:
        plain: Any = _spread(HOSTS[name].build()).eval()
        features = timm.models._features.FeatureGetterNet(plain, out_indices=(0, 1), norm=False)
        for grid in (WIDE, HIGH):
            pixels = image(grid)
            right = plain.forward_intermediates(pixels, indices=[0, 1], intermediates_only=True)
            for got, expected in zip(features(pixels), right, strict=True):
                close(got, expected)


@pytest.mark.parametrize(
    "host", [HOSTS["timm"], HOSTS["dinov2"], HOSTS["lot_deit"]], ids=["timm", "dinov2", "lot_deit"]
)
class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        torch._dynamo.reset()

    def test_whole(self, host: Host, model: nn.Module) -> None:
        compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
        with torch.no_grad():
            for grid in (WIDE, HIGH, WIDE):
                pixels = image(grid)
                close(host.whole(compiled, pixels), host.whole(model, pixels))
            pixels = image(WIDE)  # the last grid was the other one's in neither world
            close(host.alone(model, pixels), host.alone(copy.deepcopy(model), pixels))

    def test_block_by_block(self, host: Host, model: nn.Module) -> None:
        twin, counter = copy.deepcopy(model), CompileCounter()
        for block in host.blocks(model):
            block.compile(backend=counter, fullgraph=True)
        with torch.no_grad():
            for grid in (WIDE, HIGH, WIDE):
                pixels = image(grid)
                close(host.whole(model, pixels), host.whole(twin, pixels))
            assert counter.frame_count == 2  # one for each shape, not for each block
            for grid in (WIDE, HIGH, WIDE):
                pixels = image(grid)
                close(host.alone(model, pixels), host.alone(twin, pixels))


def test_functional_calls(host: Host, model: nn.Module) -> None:
    images = image(WIDE), image(HIGH)
    for each in images:
        right = host.whole(model, each)
        words = {} if not isinstance(model, transformers.ViTModel) else {"interpolate_pos_encoding": True}
        got = torch.func.functional_call(model, dict(model.named_parameters()), (each,), words)
        close(got if isinstance(got, Tensor) else got.last_hidden_state, right)


def test_a_grid_by_hand_needs_a_reader() -> None:
    with (
        pytest.raises(ValueError, match=r"holds no attention that reads the grid.*grid="),
        token_grid(nn.Linear(2, 2), 1, 2),
    ):
        pass
