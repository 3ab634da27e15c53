"""Small plots as SVG text: enough for a report page that needs no library and no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

INK, FAINT, WARM, COOL = "#1f2430", "#d8dce4", "#d9663b", "#2f6db5"


def _open(width: int, height: int, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="inherit" font-size="12" fill="{INK}">'
    )


def _text(x: float, y: float, words: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def log_log(
    series: Mapping[str, Sequence[tuple[float, float]]], colours: Sequence[str], x_name: str, y_name: str
) -> str:
    """Lines through points on two logarithmic axes; the last point of each line carries its name."""
    width, height, left, bottom, top, right = 560, 330, 58, 44, 16, 96
    points = [point for line in series.values() for point in line]
    x_low, x_high = (f(math.log2(x) for x, _ in points) for f in (min, max))
    y_low, y_high = math.floor(min(math.log10(y) for _, y in points)), math.ceil(max(math.log10(y) for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - x_low) / max(x_high - x_low, 1e-9)
        up = (math.log10(y) - y_low) / max(y_high - y_low, 1e-9)
        return left + across * (width - left - right), height - bottom - up * (height - bottom - top)

    parts = [_open(width, height, f"{y_name} against {x_name}")]
    for power in range(y_low, y_high + 1):
        y = place(2**x_low, 10**power)[1]
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{FAINT}"/>')
        parts.append(_text(left - 8, y + 4, f"{10**power:g}", "end"))
    for x in sorted({x for x, _ in points}):
        parts.append(_text(place(x, 10**y_low)[0], height - bottom + 18, f"{int(x)}" if x < 1024 else f"{x / 1024:g}k"))
    parts.append(_text((left + width - right) / 2, height - 6, x_name))
    parts.append(_text(left, top - 4, y_name, "start"))
    for (name, line), colour in zip(series.items(), colours, strict=True):
        spots = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>' for x, y in spots]
        parts.append(_text(spots[-1][0] + 9, spots[-1][1] + 4, name, "start", f'fill="{colour}" font-weight="600"'))
    return "".join([*parts, "</svg>"])


def curve(values: Sequence[float], x_name: str, y_name: str) -> str:
    """One line over its index, on a logarithmic axis, with a running mean."""
    width, height, left, bottom, top, right = 560, 300, 58, 44, 16, 14
    span = max(1, len(values) // 25)
    smooth = [sum(values[max(0, i - span) : i + 1]) / len(values[max(0, i - span) : i + 1]) for i in range(len(values))]
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = low - 0.05 * (high - low + 1e-9), high + 0.05 * (high - low + 1e-9)

    def line(numbers: Sequence[float]) -> str:
        spots = []
        for i, value in enumerate(numbers):
            x = left + i / max(len(values) - 1, 1) * (width - left - right)
            y = height - bottom - (math.log10(value) - low) / (high - low) * (height - bottom - top)
            spots.append(f"{x:.1f},{y:.1f}")
        return " ".join(spots)

    parts = [_open(width, height, f"{y_name} against {x_name}")]
    for tick in range(5):
        level = low + (high - low) * tick / 4
        y = height - bottom - tick / 4 * (height - bottom - top)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{FAINT}"/>')
        parts.append(_text(left - 8, y + 4, f"{10**level:.2g}", "end"))
    parts.append(f'<polyline points="{line(values)}" fill="none" stroke="{COOL}" stroke-width="1" opacity="0.35"/>')
    parts.append(f'<polyline points="{line(smooth)}" fill="none" stroke="{COOL}" stroke-width="2.4"/>')
    for share in (0.0, 0.5, 1.0):
        parts.append(_text(left + share * (width - left - right), height - bottom + 18, f"{int(share * len(values))}"))
    parts.append(_text((left + width - right) / 2, height - 6, x_name))
    parts.append(_text(left, top - 4, y_name, "start"))
    return "".join([*parts, "</svg>"])


def matrix(rows: Sequence[Sequence[float]], tokens: Sequence[str], title: str, colour: str) -> str:
    """A matrix as shaded squares with the sum of every column as a bar above it, and its tokens if they are few."""
    count, left, top, bars = len(tokens), 78, 30, 56
    named = count <= 30
    cell = 15 if named else 5
    side = count * cell
    width, height = left + side + 8, top + bars + side + (78 if named else 8)
    peak = max(max(row) for row in rows)
    sums = [sum(row[j] for row in rows) for j in range(count)]
    parts = [_open(width, height, title), _text(left, 16, title, "start", 'font-weight="600"')]
    for j, total in enumerate(sums):
        tall = total / max(sums) * (bars - 16)
        x, y = left + j * cell + 1, top + bars - 4 - tall
        parts.append(f'<rect x="{x}" y="{y:.1f}" width="{cell * 0.86:.1f}" height="{tall:.1f}" fill="{colour}"/>')
    highest = max(range(count), key=sums.__getitem__)
    parts.append(_text(left + highest * cell + cell / 2, top + bars - 8 - (bars - 16), f"{sums[highest]:.1f}"))
    parts.append(_text(left - 8, top + bars - 10, "column sums", "end", 'font-size="10"'))
    for i, row in enumerate(rows):
        y = top + bars + i * cell
        if named:
            parts.append(_text(left - 8, y + 11, tokens[i], "end", 'font-size="10"'))
        for j, value in enumerate(row):
            shade = math.sqrt(value / peak)  # a root shows small entries too
            square = f'x="{left + j * cell}" y="{y}" width="{cell}" height="{cell}"'
            parts.append(f'<rect {square} fill="{colour}" opacity="{shade:.3f}"/>')
    for j, token in enumerate(tokens if named else ()):
        x, y = left + j * cell + 10, top + bars + side + 10
        parts.append(
            f'<text transform="translate({x},{y}) rotate(-60)" text-anchor="end" font-size="10">{escape(token)}</text>'
        )
    parts.append(f'<rect x="{left}" y="{top + bars}" width="{side}" height="{side}" fill="none" stroke="{FAINT}"/>')
    return "".join([*parts, "</svg>"])
