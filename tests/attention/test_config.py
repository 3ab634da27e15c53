"""One configuration of LOT: frozen, nested, the same from every spelling; an option without its part is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lotformer
from lotformer import LOTAttention, LOTConfig, attention
from lotformer.attention import Content, LocalConv, Newton, Pivots, Prefix, Sinkhorn, Window
from lotformer.attention.config import OPTIONS, without_part

NAMES = {part.__name__: part for part in (LOTConfig, Content, LocalConv, Newton, Pivots, Prefix, Sinkhorn, Window)}
KINDS, ODD = st.sampled_from(["1d", "2d"]), st.integers(0, 40).map(lambda n: 2 * n + 1)
FACTORS = st.floats(1e-6, 1e6)
PREFIXES = st.builds(Prefix, st.integers(1, 9), st.none() | FACTORS) | st.builds(
    Prefix,
    st.integers(1, 9),
    st.none() | FACTORS,
    st.just(True),
    st.none() | st.tuples(st.floats(0.1, 8), st.floats(0.1, 8)),
)
LEARNED = st.builds(
    LOTConfig,
    rank=st.integers(1, 512),
    eps=FACTORS,
    solver=st.builds(Sinkhorn, st.integers(1, 50)) | st.builds(Newton, st.none() | st.floats(1e-9, 0.9)),
    scale=st.none() | FACTORS | FACTORS.map(lambda x: -x),
    balance=st.sampled_from(["both", "keys", "none"]),
    learn_eps=st.booleans(),
    pivots=st.builds(
        Pivots,
        st.sampled_from(["fixed", "input-aware"]),
        st.sampled_from(["unit", "small", "data"]),
        st.booleans(),
        FACTORS,
    ),
    key_masses=st.sampled_from(["uniform", "linear", "query-aware"]),
    prefix=st.none() | PREFIXES,
    local_conv=st.none() | st.builds(LocalConv, KINDS, ODD),
    window=st.none() | st.builds(Window, KINDS, ODD),
    dropout=st.floats(0, 0.9),
    backend=st.sampled_from([None, "reference", "cpu"]),
)

FOUND = st.builds(
    LOTConfig,
    rank=st.integers(1, 512),
    balance=st.just("none"),
    pivots=st.builds(Pivots, st.just("found"), steps=st.none() | st.integers(1, 9)),
    prefix=st.none() | PREFIXES,
    local_conv=st.none() | st.builds(LocalConv, KINDS, ODD),
    window=st.none() | st.builds(Window, KINDS, ODD),
    content=st.none() | st.builds(Content, st.integers(1, 9), st.integers(1, 99)),
)
CONFIGS = LEARNED | FOUND

FLAT = {
    "found pivots": (
        {"pivots": "found", "balance": "none", "content": 2, "window": "1d"},
        LOTConfig(pivots=Pivots("found", steps=3), balance="none", window=Window("1d"), content=Content(2)),
    ),
    "balanced found pivots": ({"pivots": "found", "pivot_steps": 1}, LOTConfig(pivots=Pivots("found", steps=1))),
    "nothing": ({}, LOTConfig()),
    "sweeps": ({"iters": 2}, LOTConfig(solver=Sinkhorn(2))),
    "sweeps of a named solver": ({"solver": "sinkhorn", "iters": 2}, LOTConfig(solver=Sinkhorn(2))),
    "newton": ({"solver": "newton"}, LOTConfig(solver=Newton())),
    "fixed passes": ({"solver": "newton", "tol": None}, LOTConfig(solver=Newton(None))),
    "pivots": (
        {"pivots": "input-aware", "pivot_init": "small", "learn_masses": False, "mass_temperature": 4},
        LOTConfig(pivots=Pivots("input-aware", "small", False, 4.0)),
    ),
    "prefix": ({"prefix_tokens": 2, "prefix_beta": 0.5}, LOTConfig(prefix=Prefix(2, 0.5))),
    "polarised": ({"prefix_tokens": 1, "polarize_prefix": True}, LOTConfig(prefix=Prefix(1, 1.0, True, (1.0, 0.5)))),
    "powers": (
        {"prefix_tokens": 1, "polarize_prefix": True, "polarize_powers": [2, 1]},
        LOTConfig(prefix=Prefix(1, polarize=True, powers=(2, 1))),
    ),
    "convolution": ({"local_conv": "1d", "kernel_size": 5}, LOTConfig(local_conv=LocalConv("1d", 5))),
    "window": ({"window": "2d"}, LOTConfig(window=Window("2d"))),
    "wide window": ({"window": "1d", "window_size": 9}, LOTConfig(window=Window("1d", 9))),
    "others": (
        {"rank": 4, "eps": 0.3, "scale": -0.2, "balance": "keys", "learn_eps": True, "key_masses": "linear"},
        LOTConfig(rank=4, eps=0.3, scale=-0.2, balance="keys", learn_eps=True, key_masses="linear"),
    ),
    "parts that are off": (
        {"window": None, "local_conv": None, "prefix_tokens": 0, "polarize_prefix": False, "prefix_beta": None},
        LOTConfig(),
    ),
}

AMBIGUOUS = {
    "a width of no window": ({"window_size": 8}, r'window_size=8 needs a window: window="1d".* or window="2d"'),
    "a default width of no window": ({"window_size": 3, "window": None}, "window_size=3 needs a window"),
    "a width of no convolution": ({"kernel_size": 4}, "kernel_size=4 needs a convolution: local_conv="),
    "a temperature of no prefix": ({"prefix_beta": -2.0}, "prefix_beta=-2.0 needs a prefix: prefix_tokens="),
    "polarising no prefix": ({"polarize_prefix": True}, "polarize_prefix=True needs a prefix: prefix_tokens="),
    "powers of no prefix": ({"polarize_powers": (-1, 3, 5)}, "polarize_powers=.* needs a prefix|polarised prefix"),
    "powers of plain scores": (
        {"prefix_tokens": 1, "polarize_powers": (1.0, 0.5)},
        r"polarize_powers=\(1.0, 0.5\) needs a polarised prefix: polarize_prefix=True",
    ),
    "steps of pivots that are not found": ({"pivot_steps": 3}, "pivot_steps=3 needs pivots that are found"),
    "keys of no groups": ({"content": 2}, 'content=2 reads groups of keys: it needs pivots="found"'),
    "a share of no keys by content": ({"pivots": "found", "content_most": 9}, "content_most=9 needs keys by content"),
    "a temperature of found pivots": ({"pivots": "found", "eps": 0.1}, "eps=0.1 has no meaning for .*softmax's"),
    "learned masses of found pivots": (
        {"pivots": "found", "key_masses": "linear"},
        "key_masses='linear' has no meaning",
    ),
    "a start of found pivots": ({"pivots": "found", "pivot_init": "small"}, "have no start and no learned masses"),
    "sums of found pivots": ({"pivots": "found", "balance": "keys"}, "send every key its mass by construction"),
    "sums beside a window": ({"pivots": "found", "window": "1d"}, 'give balance="none"'),
    "sweeps of newton": ({"solver": "newton", "iters": 20}, 'iters=20 needs sweeps: solver="sinkhorn"'),
    "a tolerance of sweeps": ({"tol": -3.0}, 'tol=-3.0 needs the exact solver: solver="newton"'),
    "fixed passes of sweeps": ({"solver": "sinkhorn", "tol": None}, "tol=None needs the exact solver"),
}

WRONG = {
    "powers": (lambda: Prefix(1, polarize=True, powers=(-1, 3, 5)), "the powers of polarisation must be two numbers"),
    "powers of words": (lambda: Prefix(1, polarize=True, powers="ab"), "the powers of polarisation"),
    "powers without polarising": (lambda: Prefix(1, powers=(1, 2)), "needs a polarised prefix"),
    "no prefix token": (lambda: Prefix(0), "prefix_tokens must be at least 1"),
    "an even window": (lambda: Window("1d", 8), "window_size must be odd"),
    "a window of another kind": (lambda: Window("3d"), "window must be"),
    "an even convolution": (lambda: LocalConv("2d", 4), "kernel_size must be odd"),
    "a tolerance": (lambda: Newton(-3.0), "tol must be a number between 0 and 1"),
    "no sweep": (lambda: Sinkhorn(0), "iters must be at least 1"),
    "a backend": (lambda: LOTConfig(backend="cuda"), "backend must be None or one of"),
    "a flag": (lambda: LOTConfig(learn_eps=1), "learn_eps must be True or False"),
    "a part that is a word": (lambda: LOTConfig(window="1d"), r"window of a LOTConfig must be Window\(…\), got '1d'"),
    "no solver": (lambda: LOTConfig(solver=None), r"solver of a LOTConfig must be Sinkhorn\(…\) or Newton\(…\)"),
    "a part of another kind": (lambda: LOTConfig(window=LocalConv("1d")), "window of a LOTConfig must be Window"),
    "dropout": (lambda: LOTConfig(dropout=1.0), "dropout must be a probability"),
}


@given(CONFIGS)
def test_every_form_describes_the_same_configuration(config: LOTConfig) -> None:
    assert LOTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert LOTConfig.from_options(**config.to_options()) == config
    assert without_part(config.to_options()) == []
    assert eval(repr(config), dict(NAMES)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config, dataclasses.replace(config)}) == 1


@pytest.mark.parametrize("kind", FLAT)
def test_keyword_arguments_give_the_layer_of_their_configuration(kind: str) -> None:
    options, config = FLAT[kind]
    assert LOTConfig.from_options(**options) == config
    layers = []
    for given_ in (options, {"config": config}):
        torch.manual_seed(0)
        layers.append(LOTAttention(24, 3, **given_))
    x = torch.randn(2, 16 + config.prefix_tokens, 24)
    assert layers[0].mechanism.config == layers[1].mechanism.config == config
    assert layers[0].state_dict().keys() == layers[1].state_dict().keys()
    assert torch.equal(layers[0](x), layers[1](x))


@pytest.mark.parametrize("kind", AMBIGUOUS)
@pytest.mark.parametrize(
    "build",
    [
        LOTConfig.from_options,
        lambda **options: LOTAttention(24, 3, **options),
        lambda **options: attention.build("lot", head_dim=8, num_heads=3, **options),
    ],
    ids=["config", "layer", "mechanism"],
)
def test_an_option_without_its_part_is_refused(kind: str, build) -> None:
    options, message = AMBIGUOUS[kind]
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("kind", WRONG)
def test_values_that_no_forward_can_run_with_are_refused(kind: str) -> None:
    make, message = WRONG[kind]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_configuration_is_all_there_is() -> None:
    config = LOTConfig(rank=4, window=Window("1d", 5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 5
    with pytest.raises(TypeError, match="config=… holds every option: put rank into it"):
        LOTAttention(24, 3, config=config, rank=5)
    with pytest.raises(TypeError, match="config must be a LOTConfig, got dict"):
        LOTAttention(24, 3, config=config.to_dict())
    layer = LOTAttention(24, 3, config=config, attn_drop=0.1)
    assert layer.mechanism.config == dataclasses.replace(config, dropout=0.1)
    assert "LOTConfig(rank=4, window=Window(kind='1d', size=5), dropout=0.1)" in repr(layer)


def test_presets_say_why() -> None:
    assert LOTConfig.paper() == LOTConfig()
    assert LOTConfig.paper(mass_temperature=4).pivots.mass_temperature == 4
    assert LOTConfig.for_images(0).prefix is None
    assert LOTConfig.for_images(2).prefix_tokens == 2
    for preset in (LOTConfig.paper, LOTConfig.for_text, LOTConfig.for_images):
        assert len((preset.__doc__ or "").split()) > 40


def test_every_option_is_documented_once_for_all() -> None:
    whole = LOTConfig(
        pivots=Pivots("found"), balance="none", prefix=Prefix(1), local_conv=LocalConv("1d"), window=Window("1d"),
        content=Content(1),
    )  # fmt: skip
    assert OPTIONS.keys() == whole.to_options().keys() | {"tol"}
    for part in NAMES.values():
        assert all(f"        {f.name}: " in part.__doc__ for f in dataclasses.fields(part))
    assert lotformer.LOTConfig is LOTConfig
