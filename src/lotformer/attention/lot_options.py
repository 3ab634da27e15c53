"""The options of LOT attention, with their defaults and what they mean."""

from __future__ import annotations

from typing import Annotated, TypedDict

from ..nn.depthwise import ConvKind, ConvSharing
from ..nn.key_masses import KeyMassKind
from ..nn.near_keys import WindowKind
from ..nn.pivot_pooling import PivotKind
from ..nn.pivots import PivotInit
from ..ops.problem import Balance, Solver
from .options import Option


class LOTOptions(TypedDict, total=False):
    """The options of LOT attention, stated once: the mechanism and the layer take all of them."""

    rank: Annotated[
        int, Option(32, "number of pivots R, which bounds the rank of the attention matrix; the cost is O(N·R).")
    ]
    eps: Annotated[float, Option(1.0, "entropic regularisation ε, above 0; small is sharp.")]
    solver: Annotated[
        Solver,
        Option(
            "sinkhorn",
            '"sinkhorn" runs a fixed number of sweeps, right at ε ≈ 1; "newton" solves to `tol`, right for small ε '
            "and for exact column sums.",
        ),
    ]
    iters: Annotated[
        int,
        Option(
            5,
            "full Sinkhorn sweeps, two half-steps each, before the closing half-step: 5 are 11 half-steps. Published "
            "code counts half-steps: its `max_iter=5` is `iters=2`.",
        ),
    ]
    tol: Annotated[
        float | None, Option(1e-6, "relative error of the column sums at which Newton stops; None: fixed passes.")
    ]
    scale: Annotated[float | None, Option(None, "factor of the scores, D^-1/2 by default.")]
    balance: Annotated[
        Balance,
        Option(
            "both",
            'which sums are imposed beside unit rows: "both" is the paper\'s; "keys" keeps the column sums for half '
            'the work, with the masses of the pivots as a prior; "none" imposes nothing and solves nothing.',
        ),
    ]
    learn_eps: Annotated[bool, Option(False, "make ε a parameter, one per head, that starts at `eps`.")]
    learn_masses: Annotated[bool, Option(True, "learn the masses of the pivots, starting from uniform.")]
    mass_temperature: Annotated[float, Option(1.0, "the masses are softmax(logits / mass_temperature).")]
    pivot_init: Annotated[
        PivotInit,
        Option(
            "unit",
            '"unit" draws pivots so that scores over ε deviate by one on unit-variance tokens, for training from '
            'scratch; "small" from N(0, 0.02²), for trained checkpoints; "data" starts as "small" and waits for '
            "`mechanism.pivots.initialize_from`.",
        ),
    ]
    pivots: Annotated[
        PivotKind,
        Option("fixed", '"fixed", or "input-aware": moved to where the keys of the sample are (`PivotPooling`).'),
    ]
    key_masses: Annotated[
        KeyMassKind,
        Option(
            "uniform", '"uniform" is doubly stochastic; "linear" and "query-aware" learn column sums (`KeyMasses`).'
        ),
    ]
    prefix_tokens: Annotated[
        int,
        Option(
            0,
            "this many leading tokens ([CLS], registers) read the whole sequence by softmax; the tokens after them are "
            "coupled among themselves. A sequence may consist of prefix tokens alone, but may not be shorter.",
        ),
    ]
    prefix_beta: Annotated[
        float | None, Option(None, "temperature of the prefix rows: by default D^-1/2, with polarised scores 1.")
    ]
    polarize_prefix: Annotated[
        bool, Option(False, "let prefix rows score like and opposite signs apart (`PrefixRows`).")
    ]
    polarize_powers: Annotated[
        tuple[float, float],
        Option((1.0, 0.5), "the powers of the like and the opposite scores; the paper does not state its own."),
    ]
    local_conv: Annotated[
        ConvKind | None,
        Option(
            None,
            'add a depthwise convolution of the values after the prefix: "1d" along the sequence, "2d" on the grid.',
        ),
    ]
    kernel_size: Annotated[int, Option(3, "width of that convolution, odd.")]
    conv_sharing: Annotated[
        ConvSharing,
        Option("none", 'its filters: "none" has one per channel of each head, "heads" the same in every head.'),
    ]
    window: Annotated[
        WindowKind | None,
        Option(
            None,
            "let the tokens after the prefix read the prefix and their neighbours by softmax, and transport the rest "
            'of their rows (`NearKeys`): "1d" along the sequence, "2d" on the grid.',
        ),
    ]
    window_size: Annotated[int, Option(3, "width of that window, odd.")]
    backend: Annotated[str | None, Option(None, "None picks the fastest that can run the problem; a name forces it.")]
