"""What every registered mechanism must do: one sweep over the registry, whatever is in it."""

from __future__ import annotations

import pytest
import torch

from lotformer import attention
from lotformer.attention.promises import DIM, PROMISES, Check, Subject, close, gradients, leaves, run, tokens

NAMES = attention.names()

# knobs brought to the size of the sweep's sequences, so that they bite; everything else is the default
SMALL: dict[str, dict[str, object]] = {
    "linformer": {"max_length": 64},
    "nystromformer": {"landmarks": 5},
    "skyformer": {"features": 8},
    "lowrank-ot": {"outer_steps": 4, "inner_steps": 4},
}

# options under which mechanisms that iterate towards double stochasticity have arrived
CONVERGED: dict[str, dict[str, object]] = {
    "sinkformer": {"half_steps": 401},
    "lowrank-ot": {"outer_steps": 5, "inner_steps": 200},
    "lot": {"solver": "newton"},
}


def subject(name: str) -> Subject:
    return Subject(name, SMALL.get(name, {}), CONVERGED.get(name))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_every_mechanism_does_what_is_promised(name: str, promise: Check) -> None:
    promise(subject(name))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_to_one_graph_with_the_same_output_and_gradients(name: str) -> None:
    _compare_compiled(name, "aot_eager")


@pytest.mark.parametrize(("name", "options"), [("softmax", {}), ("lot", {"iters": 1})], ids=["softmax", "lot"])
def test_inductor_gives_the_same_output_and_gradients(name: str, options: dict[str, object]) -> None:
    _compare_compiled(name, "inductor", **options)


def _compare_compiled(name: str, backend: str, **options: object) -> None:
    torch._dynamo.reset()
    module = subject(name).build(**options)
    n = subject(name).lengths[1]
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, n // 2 :] = False
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    results = []
    for candidate in (module, compiled):
        inputs = leaves(tokens(2, 3, n))
        out = run(candidate, *inputs, mask, mask)
        results.append([out, *gradients(module, out, inputs)])
    for got, expected in zip(*reversed(results), strict=True):
        close(got, expected, "compiled", 1e-4)


def test_options_that_converge_are_known_for_all_that_have_to() -> None:
    assert set(CONVERGED) == {name for name in NAMES if attention.entry(name).doubly_stochastic == "converged"}


def test_unknown_names_are_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'sinkformer'"):
        attention.build("sinkforner", head_dim=DIM, num_heads=1)
