"""The report page: one HTML file with everything inside, readable with the network off."""

from __future__ import annotations

import platform
from html import escape

import torch

from .. import __version__
from .run import DemoResult, Heads, Stage
from .svg import COOL, WARM, curve, log_log, matrix

_STYLE = """
:root { --ink: #1f2430; --soft: #5b6474; --line: #e3e6ec; --warm: #d9663b; --cool: #2f6db5; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink);
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 72px; }
h1 { font-size: 34px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }
h2 { font-size: 21px; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 72ch; color: var(--soft); }
p b, p code { color: var(--ink); }
section { background: white; border: 1px solid var(--line); border-radius: 14px; padding: 26px 28px; margin-top: 22px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 16px; margin-top: 26px; }
.fact { background: white; border: 1px solid var(--line); border-radius: 14px; padding: 18px 20px; }
.fact strong { display: block; font-size: 30px; letter-spacing: -0.02em; color: var(--cool); }
.fact span { color: var(--soft); font-size: 14px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 22px; align-items: start; }
@media (max-width: 820px) { .pair { grid-template-columns: 1fr; } }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; margin-top: 10px; }
th, td { text-align: right; padding: 9px 10px; border-bottom: 1px solid var(--line);
         font-variant-numeric: tabular-nums; }
th { font-weight: 600; color: var(--soft); font-size: 13px; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
code, pre { font: 13.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { background: #f6f7f9; border-radius: 10px; padding: 14px 16px; overflow-x: auto; margin: 8px 0 0; }
footer { color: var(--soft); font-size: 13px; margin-top: 26px; }
"""


def render(result: DemoResult) -> str:
    """The whole page as text."""
    last = result.stages[-1]
    facts = [
        (f"{last.fidelity.cosine:.4f}", "cosine between the converted and the original embedding, on text kept back"),
        (f"{_residual(last)}", "worst relative error of a column sum: the couplings are exact"),
        (f"{sum(stage.seconds for stage in result.stages):.0f} s", "to calibrate and fine-tune on this machine"),
    ]
    if result.speeds:
        best = max(result.speeds, key=lambda speed: speed.gain)
        facts.append((f"{best.gain:.1f}×", f"as fast as fused softmax attention at {best.tokens:,} tokens, end to end"))
    cards = "".join(f'<div class="fact"><strong>{a}</strong><span>{escape(b)}</span></div>' for a, b in facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>A sentence encoder on LOT attention</title><style>{_STYLE}</style></head><body><main>"
        "<h1>all-MiniLM-L6-v2, on linear attention</h1>"
        f"<p>A trained sentence encoder whose {len(result.conversion.converted)} softmax attention layers were "
        f"replaced by LOT attention with {result.conversion.options['rank']} pivots per head: every token reads "
        f"itself and the {result.conversion.options['window_size'] // 2} on either side by softmax; the rest of its "
        "mass goes to the pivots, and from them to the tokens, both by optimal transport. The cost grows linearly "
        f"with the text. {result.conversion.parameters_added:,} parameters were added; all others stayed "
        "as they were until fine-tuning.</p>"
        f'<div class="facts">{cards}</div>{_fidelity(result)}{_heads(result)}{_learning(result)}{_use(result)}'
        f"<footer>lotformer {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{escape(platform.processor() or platform.machine())}, Python {platform.python_version()}</footer>"
        "</main></body></html>"
    )


def _residual(stage: Stage) -> str:
    worst = stage.coupling.residual_max
    return "–" if worst is None else f"{worst:.0e}"


def _fidelity(result: DemoResult) -> str:
    sts = result.sts_softmax is not None
    head = ["", "embedding cosine", "rank correlation of similarities", "same nearest neighbour", "residual, worst key",
            "doubly stochastic error, mean"]  # fmt: skip
    rows = []
    for stage in (*result.stages, result.second_best):
        cells = [
            escape(stage.name),
            f"{stage.fidelity.cosine:.4f}",
            f"{stage.fidelity.rank_correlation:.4f}",
            f"{100 * stage.fidelity.neighbour_agreement:.1f} %",
            _residual(stage),
            f"{stage.coupling.doubly_stochastic_mean:.2f}",
        ]
        if sts:
            cells.append("–" if stage.sts_recovered is None else f"{100 * stage.sts_recovered:.2f} %")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if sts:
        head.append("STS-B Spearman recovered")
    return (
        "<section><h2>How much of the model survives</h2>"
        f"<p>Calibrated on {result.calibration_texts:,} passages of Python's reference manual, judged on "
        f"{result.held_back_texts:,} passages of topics kept back, against the original model. <b>Calibrated</b>: "
        "only the new parameters have learned. <b>Fine-tuned</b>: all weights have, without labels, from the "
        "original's outputs. <b>Second best</b>: another conversion, a little faster. "
        "<b>Residual</b>: how far a column sum of what is transported is from the key's mass. "
        "<b>Doubly stochastic error</b>: how far it is from one. Learned key masses make the second large on purpose: "
        "trained encoders have attention sinks, which no doubly stochastic matrix can imitate.</p><table><thead><tr>"
        + "".join(f"<th>{name}</th>" for name in head)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


def _heads(result: DemoResult) -> str:
    def pair(heads: Heads) -> str:
        before = matrix(
            heads.softmax.tolist(), heads.tokens, f"softmax, layer {heads.layer + 1}, head {heads.head + 1}", WARM
        )
        after = matrix(heads.converted.tolist(), heads.tokens, "LOT attention, the same head", COOL)
        return f'<div class="pair">{before}{after}</div>'

    return (
        "<section><h2>Before and after, inside one head</h2>"
        "<p>Rows are tokens that look, columns tokens looked at; the bars above add up each column. In three layers, "
        f"the head with the tallest sink, on a text of {len(result.heads[0].tokens)} tokens. The matrix on the right "
        f"is a band and a matrix of rank {result.conversion.options['rank']}, and is never formed when the model "
        "runs.</p>" + "".join(pair(heads) for heads in result.heads) + "</section>"
    )


def _learning(result: DemoResult) -> str:
    learning = (
        "<div><h2>Learning the pivots</h2><p>Relative squared error of the attention output after its projection, "
        f"averaged over layers.</p>{curve(result.losses, 'step', 'relative error')}</div>"
    )
    if not result.speeds:
        return f"<section>{learning}</section>"
    series = {
        "softmax": [(s.tokens, s.softmax) for s in result.speeds],
        "LOT": [(s.tokens, s.converted) for s in result.speeds],
    }
    gains = "".join(f"<td>{s.gain:.2f}×</td>" for s in result.speeds)
    heads = "".join(f"<th>{s.tokens:,}</th>" for s in result.speeds)
    speed = (
        "<div><h2>Speed of the whole encoder</h2><p>Seconds a text, batch 1, exact couplings, against PyTorch's fused "
        "softmax. Past 512 tokens the position table repeats: fine for timing, not for meaning.</p>"
        f"{log_log(series, (WARM, COOL), 'tokens', 'seconds')}</div>"
    )
    return (
        f'<section><div class="pair">{learning}{speed}</div><table><thead><tr><th>tokens</th>{heads}</tr></thead>'
        f"<tbody><tr><td>times as fast as softmax</td>{gains}</tr></tbody></table></section>"
    )


def _use(result: DemoResult) -> str:
    return (
        "<section><h2>Use it</h2><p>The converted model is an ordinary checkpoint:</p><pre>import lotformer\n"
        "from transformers import AutoModel, AutoTokenizer\n\n"
        f'model = AutoModel.from_pretrained("{escape(str(result.saved))}")</pre></section>'
    )
