"""Table 6: sweeps T, regularisation ε and fixed or learned masses; the exact solver as a further column."""

from __future__ import annotations

from lotformer.cli.tables import Table

from .ablation import Found, Row, ablation, top1

SWEEPS, EPS, EPS_SWEEP = (1, 5, 10, 20), (0.1, 1.0), (0.01, 0.1, 1.0, 10.0, 100.0)
MASSES = {"fixed": False, "learned": True}
EXACT = "newton"


def _slug(masses: str, eps: float, solve: int | str) -> str:
    return f"{masses}-eps{eps:g}-{solve if solve == EXACT else f't{solve}'}"


def _row(masses: str, eps: float, solve: int | str) -> Row:
    options = {"solver": EXACT} if solve == EXACT else {"iters": solve}
    return Row("lot", {"learn_masses": MASSES[masses], "eps": eps, **options})


_CELLS = [(m, e, t) for m in MASSES for e in EPS for t in (*SWEEPS, EXACT)]
_CELLS += [(m, e, 10) for m in MASSES for e in EPS_SWEEP if (m, e, 10) not in _CELLS]

ROWS: dict[str, Row] = {_slug(*cell): _row(*cell) for cell in _CELLS}

PAPER: dict[tuple[str, float, int | str], float] = {
    **dict(zip([("fixed", 0.1, t) for t in SWEEPS], (79.6, 80.4, 80.8, 80.9), strict=True)),
    **dict(zip([("fixed", 1.0, t) for t in SWEEPS], (80.2, 81.2, 81.4, 81.7), strict=True)),
    **dict(zip([("learned", 0.1, t) for t in SWEEPS], (79.8, 80.7, 81.1, 81.1), strict=True)),
    **dict(zip([("learned", 1.0, t) for t in SWEEPS], (80.5, 81.5, 82.1, 82.0), strict=True)),
    **dict(zip([("fixed", e, 10) for e in EPS_SWEEP], (79.1, 80.8, 81.4, 81.2, 79.5), strict=True)),
    **dict(zip([("learned", e, 10) for e in EPS_SWEEP], (79.2, 81.1, 82.1, 81.3, 79.6), strict=True)),
}
"""Top-1 on ImageNet-100 with the paper's reduced ViT."""


def _tables(found: Found) -> list[Table]:
    """Both parts of the table, as far as their cells are finished; the paper's numbers in brackets."""

    def shown(masses: str, eps: float, solve: int | str) -> str:
        made, paper = found.get(_slug(masses, eps, solve)), PAPER.get((masses, eps, solve))
        return (top1(made) if made else "–") + (f" ({paper:.1f})" if paper is not None else "")

    by_sweeps = [
        (f"{masses} masses, ε = {eps:g}", *(shown(masses, eps, solve) for solve in (*SWEEPS, EXACT)))
        for masses in MASSES
        for eps in EPS
    ]
    by_eps = [(f"{masses} masses", *(shown(masses, eps, 10) for eps in EPS_SWEEP)) for masses in MASSES]
    return [
        Table("Top-1 % by sweeps T", ("", *(f"T = {t}" for t in SWEEPS), "exact"), tuple(by_sweeps)),
        Table("Top-1 % by ε at T = 10", ("", *(f"ε = {e:g}" for e in EPS_SWEEP)), tuple(by_eps)),
    ]


EXPERIMENT = ablation(
    "sinkhorn-ablation",
    "Table 6: accuracy by Sinkhorn sweeps, ε and masses, and with the exact solver.",
    ROWS,
    _tables,
    ("In brackets: the paper, ImageNet-100. T counts sweeps of two half-steps.",),
    paper_model="lot_vit_half",
)
