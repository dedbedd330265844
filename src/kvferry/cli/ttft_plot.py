"""Lines over two axes from 0, as a small SVG: times to first token over prompt lengths, first."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 230, 24, 50
COLOURS = ("#555555", "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#386cb0")

Series = Mapping[str, Sequence[tuple[float, float]]]
"""By name: points of, say, tokens and milliseconds."""


def svg(
    title: str, series: Series, x_name: str = "tokens of the prompt", y_name: str = "ms"
) -> str:
    """One line for each series; both axes from 0."""
    points = [point for line in series.values() for point in line]
    x_max = max((x for x, _ in points), default=1.0)
    y_max = max((y for _, y in points), default=1.0) * 1.05

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + x / x_max * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - y / y_max * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts = [_text(LEFT, 16, title)]
    for step in range(6):
        (x, bottom), (left, y) = at(x_max * step / 5, 0), at(0, y_max * step / 5)
        right = WIDTH - RIGHT
        parts += [
            f'<path d="M{left} {y}H{right}M{x} {bottom}v4" stroke="#cccccc"/>',
            _text(left - 6, y + 4, f"{y_max * step / 5:.0f}", "end"),
            _text(x, bottom + 18, f"{x_max * step / 5:,.0f}", "middle"),
        ]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, "middle"))
    parts.append(_text(6, HEIGHT / 2, y_name))
    for index, (name, line) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [at(*point) for point in sorted(line)]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
        height = TOP + 18 * index + 8
        parts.append(f'<path d="M{WIDTH - RIGHT + 16} {height}h18" stroke="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 40, height + 4, name))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
