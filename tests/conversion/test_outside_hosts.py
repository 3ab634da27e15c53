"""Another package brings a host for a library that lotformer has never heard of."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

import lotformer
from lotformer import conversion
from lotformer.conversion import hosts, recipe
from lotformer.conversion.hosts import registry
from lotformer.conversion.hosts.sites import converted

TOY = """
import torch
from torch import nn


class ToyAttention(nn.Module):
    def __init__(self, width, heads, causal=False):
        super().__init__()
        self.width, self.heads, self.is_causal = width, heads, causal
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(width, width) for _ in range(4))

    def split(self, x):
        return (to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))

    def forward(self, x, mask=None):
        allowed = None if mask is None else mask[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(*self.split(x), allowed, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ToyEncoder(nn.Module):
    def __init__(self, width=16, heads=2, depth=2, words=50, causal=False):
        super().__init__()
        self.words, self.embed = words, nn.Embedding(words, width)
        self.layers = nn.ModuleList(ToyAttention(width, heads, causal) for _ in range(depth))
        self.pool = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, mask)
        return x + self.pool(x, x, x, need_weights=False)[0]
"""

HOST = """
import torch
from toylib import ToyAttention, ToyEncoder
from lotformer.conversion import Host, mix


class ConvertedToyAttention(ToyAttention):
    def forward(self, x, mask=None):
        return self.out(mix(self, *self.split(x), mask).transpose(1, 2).flatten(2))


class Toy(Host):
    name = "toy"
    classes = {ToyAttention: ConvertedToyAttention}

    def heads(self, module):
        return module.heads, module.width // module.heads

    def input_kind(self, enclosure):
        return "text" if isinstance(enclosure, ToyEncoder) else None

    def sample_inputs(self, model):
        return torch.arange(40).view(2, 20) if isinstance(model, ToyEncoder) else None
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The library and the package that knows it, written to a folder and imported from there."""
    (tmp_path / "toylib.py").write_text(TOY)
    (tmp_path / "toylib_lot.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toylib"), importlib.import_module("toylib_lot")
    for name in ("toylib", "toylib_lot"):
        sys.modules.pop(name, None)


@pytest.fixture
def registered(toy):
    library, package = toy
    conversion.register_host(package.Toy())
    yield library
    conversion.unregister_host("toy")


def built(library: types.ModuleType, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = library.ToyEncoder(**options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def ids(length: int = 20) -> torch.Tensor:
    return torch.randint(0, 50, (3, length), generator=torch.Generator().manual_seed(1))


def test_a_model_is_converted_calibrated_saved_loaded_and_reverted(registered, tmp_path):
    model, batch = built(registered), ids()
    original, state = model(batch), {name: x.clone() for name, x in model.state_dict().items()}

    report = lotformer.convert(model, rank=4, window_size=5)
    assert [layer.name for layer in report.converted] == ["layers.0", "layers.1"]
    assert [layer.kind for layer in report.converted] == ["ToyAttention"] * 2
    assert report.probe is not None  # on inputs that the host makes up
    assert recipe(model).options["window"] == "1d"  # it reads text, says the host
    assert [type(module).__name__ for _, module in converted(model)] == ["ConvertedToyAttention"] * 2

    batches = [{"ids": ids(), "mask": torch.arange(20) < torch.tensor([20, 17, 12])[:, None]}, {"ids": batch}]
    learned = lotformer.calibrate(model, batches, steps=2)
    assert learned.steps == 2
    after = model(batch)
    assert not torch.equal(after, original)

    conversion.save(model, tmp_path / "toy.safetensors")
    again = built(registered)
    conversion.load(again, tmp_path / "toy.safetensors")
    assert torch.equal(again(batch), after)

    lotformer.revert(model)
    assert torch.equal(model(batch), original)
    assert {type(layer) for layer in model.layers} == {registered.ToyAttention}
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_padding_reaches_the_mechanism(registered):
    model = built(registered)
    lotformer.convert(model, rank=4)
    mask = torch.ones(3, 20, dtype=torch.bool)
    mask[:, 15:] = False
    layer, x = model.layers[0], model.embed(ids())
    torch.testing.assert_close(layer(x, mask)[:, :15], layer(x[:, :15]))


def test_a_pooling_head_of_pytorch_inside_its_model_is_left_alone_unless_named(registered):
    report = lotformer.convert(built(registered), rank=4)
    assert {layer.name: layer.reason for layer in report.skipped} == {
        "pool": "a MultiheadAttention inside another library's model; name it to convert it"
    }
    model = built(registered)
    assert [x.name for x in lotformer.convert(model, rank=4, layers=["pool"]).converted] == ["pool"]


def test_causal_attention_is_left_alone_without_a_word_from_the_host(registered):
    model = built(registered, causal=True)
    reasons = {layer.name: layer.reason for layer in lotformer.convert(model, rank=4).skipped}
    assert reasons["layers.0"] == "it is causal, and a causal doubly stochastic matrix is the identity"


def test_folding_is_refused_where_the_host_does_not_tell_the_projections(registered):
    model = built(registered)
    lotformer.convert(model, rank=4, pivots="fixed", window=None)
    with pytest.raises(ValueError, match="the host 'toy' does not tell how"):
        lotformer.fold(model)


def test_the_first_host_that_lists_a_module_decides_about_it(registered):
    class Mine(conversion.Host):
        name = "mine"

        def is_attention(self, module):
            return isinstance(module, nn.MultiheadAttention)

        def heads(self, module):
            return module.num_heads, module.head_dim

        def why_not(self, model, name, module):
            return "it is mine"

    conversion.register_host(Mine())
    try:
        assert [host.name for host in hosts.present()][:2] == ["toy", "mine"]
        assert hosts.present()[-1].name == "torch_mha"
        (pool,) = [item for host, item in hosts.find(built(registered)) if item.name == "pool"]
        assert pool.reason == "it is mine"
    finally:
        conversion.unregister_host("mine")


def test_without_its_host_a_converted_model_says_what_is_missing_and_stays_as_it_is(toy):
    library, package = toy
    conversion.register_host(package.Toy())
    model = built(library)
    lotformer.convert(model, rank=4)
    before = model(ids())
    conversion.unregister_host("toy")
    with pytest.raises(ValueError, match="the host 'toy', which is not registered here"):
        lotformer.revert(model)
    assert torch.equal(model(ids()), before)
    conversion.register_host(package.Toy())
    try:
        lotformer.revert(model)
    finally:
        conversion.unregister_host("toy")


class TestRefusals:
    def test_a_name_that_is_taken(self, registered, toy):
        with pytest.raises(ValueError, match="a host is called 'toy' already"):
            conversion.register_host(toy[1].Toy())

    def test_a_name_of_ours(self, toy):
        class Other(toy[1].Toy):
            name = "timm_vit"

        with pytest.raises(ValueError, match="a host is called 'timm_vit' already"):
            conversion.register_host(Other())

    def test_a_class_in_place_of_an_instance(self, toy):
        with pytest.raises(TypeError, match=r"register an instance, Toy\(\)"):
            conversion.register_host(toy[1].Toy)

    def test_a_host_without_a_name(self):
        class Nameless(conversion.Host):
            def heads(self, module):
                return 1, 1

        with pytest.raises(TypeError, match="Nameless has no name"):
            conversion.register_host(Nameless())

    def test_taking_away_what_was_not_registered(self):
        with pytest.raises(ValueError, match="no host 'torch_mha' was registered"):
            conversion.unregister_host("torch_mha")


class TestInstalledPackages:
    """Entry points of the group `lotformer.hosts`."""

    @pytest.fixture
    def offers(self, monkeypatch):
        def offer(**points):
            made = [EntryPoint(name, value, registry.GROUP) for name, value in points.items()]
            monkeypatch.setattr(registry, "entry_points", lambda group: made)
            registry._offers.cache_clear()

        yield offer
        registry._offers.cache_clear()

    def test_bring_hosts_for_libraries_that_are_loaded(self, toy, offers):
        offers(toylib="toylib_lot:Toy", nothing="not_there:Host")
        assert [host.name for host in hosts.present()].count("toy") == 1
        assert len(lotformer.convert(built(toy[0]), rank=4).converted) == 2

    def test_that_are_broken_are_left_out_with_a_warning(self, toy, offers):
        offers(toylib="toylib_lot:Missing")
        with pytest.warns(UserWarning, match="the host toylib_lot:Missing for toylib is left out"):
            assert "toy" not in [host.name for host in hosts.present()]


def test_no_module_of_the_conversion_imports_itself_by_way_of_another():
    """Inside functions too; what only type checkers read is not counted."""
    root = Path(conversion.__file__).parent
    graph: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        place = path.relative_to(root).with_suffix("").parts
        package = list(place[:-1])
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing = [node for block in ast.walk(tree) if isinstance(block, ast.If) and "TYPE_CHECKING" in
                  ast.unparse(block.test) for node in ast.walk(block)]  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node not in typing and 0 < node.level <= len(package) + 1:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
                for parts in [[part for part in base if part]] + [[*base, alias.name] for alias in node.names]:
                    target = root.joinpath(*parts)
                    if (target != root and target.with_suffix(".py").is_file()) or (target / "__init__.py").is_file():
                        graph.setdefault("/".join(place), set()).add("/".join(p for p in parts if p))

    def reaches(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return seen

    assert {"pretrained", "hosts/huggingface", "hosts/configs"} <= graph.keys()
    assert [module for module in graph if module in reaches(module)] == []
