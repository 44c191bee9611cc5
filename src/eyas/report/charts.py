"""Charts of the report, as SVG text: drawn by matplotlib, coloured by the page's own style."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

INK, PALE = "#33414f", "#d9dfe5"
COLOURS = ("#2f6f9f", "#d9822b", "#4d9a6a", "#a5527d", "#7a6fb0", "#8c7a4f")


def _axes(width: float = 5.6, height: float = 3.1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "eyas"}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
    return buffer.getvalue().partition("<svg")[1] + buffer.getvalue().partition("<svg")[2]


def acceptance(by_domain: dict[str, Sequence[float]], overall: Sequence[float]) -> str:
    """Cumulative acceptance p_i by draft position, one line a domain."""
    figure, axes = _axes()
    x = range(1, len(overall) + 1)
    for (name, p), colour in zip(by_domain.items(), COLOURS * 4, strict=False):
        axes.plot(
            x, [v * 100 for v in p], color=colour, linewidth=1.4, marker="o", markersize=3.5, label=name
        )
    axes.plot(x, [v * 100 for v in overall], color=INK, linewidth=2.4, marker="o", markersize=5, label="all")
    axes.set_xticks(list(x))
    axes.set_ylim(0, None)
    axes.set_xlabel("draft position", color=INK)
    axes.set_ylabel("accepted, % of steps", color=INK)
    axes.legend(frameon=False, fontsize=8.5)
    return _svg(figure)


def losses(steps: Sequence[dict[str, Any]]) -> str:
    """Training loss by step, and its mean over a window; steps that were skipped are left out."""
    figure, axes = _axes()
    steps = [s for s in steps if "skipped" not in s]
    x, y = [s["step"] for s in steps], [s["loss"] for s in steps]
    axes.plot(x, y, color=COLOURS[0], linewidth=0.7, alpha=0.45)
    window = max(1, len(y) // 20)
    mean = [
        sum(y[max(0, i - window + 1) : i + 1]) / len(y[max(0, i - window + 1) : i + 1]) for i in range(len(y))
    ]
    axes.plot(x, mean, color=COLOURS[0], linewidth=2)
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel("loss, summed over draft steps (nats)", color=INK)
    return _svg(figure)


def taus(evals: Sequence[dict[str, Any]]) -> str:
    """Held-out acceptance length by epoch, with its interval."""
    figure, axes = _axes()
    shown = [e["tau"][str(e["select_k"])] for e in evals]
    x = [e["epoch"] for e in evals]
    values = [t["value"] for t in shown]
    axes.errorbar(
        x, values, yerr=[[t["value"] - t["low"] for t in shown], [t["high"] - t["value"] for t in shown]],
        color=COLOURS[0], linewidth=2, marker="o", markersize=5, capsize=3,
    )  # fmt: skip
    axes.set_xticks(x)
    axes.set_xlabel("epoch", color=INK)
    axes.set_ylabel(f"tokens a step (k={evals[-1]['select_k']})", color=INK)
    return _svg(figure)


def speedups(cells: Sequence[dict[str, Any]], wanted: float) -> str:
    """Measured speed-up by k with its interval, the prediction, and the line to reach."""
    figure, axes = _axes()
    x = [str(c["k"]) for c in cells]
    s = [c["S"] for c in cells]
    axes.bar(x, [v["value"] for v in s], color=COLOURS[0], width=0.55, label="measured")
    axes.errorbar(
        x, [v["value"] for v in s], yerr=[[v["value"] - v["low"] for v in s], [v["high"] - v["value"] for v in s]],
        fmt="none", color=INK, capsize=4, linewidth=1.3,
    )  # fmt: skip
    predicted = [(i, c["S_predicted"]) for i, c in enumerate(cells) if c["S_predicted"]]
    if predicted:
        axes.plot(
            *zip(*predicted, strict=True),
            "D",
            color=COLOURS[1],
            markersize=6,
            label="predicted: replayed tau / C",
        )
    axes.axhline(1, color=INK, linewidth=1)
    axes.axhline(wanted, color=COLOURS[2], linewidth=1.4, linestyle="--", label=f"asked for: {wanted:.2f}x")
    axes.set_xlabel("k, drafted tokens a step", color=INK)
    axes.set_ylabel("speed-up", color=INK)
    axes.set_ylim(0, max(wanted, *(v["high"] for v in s)) * 1.3)
    axes.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=2)
    return _svg(figure)


def loads(cells: Sequence[dict[str, Any]], wanted: float) -> str:
    """Measured speed-up by load, one line a k with its intervals, and the prediction as diamonds."""
    figure, axes = _axes()
    places = sorted({c["concurrency"] for c in cells})
    for k, colour in zip(sorted({c["k"] for c in cells}), COLOURS * 4, strict=False):
        mine = [c for c in cells if c["k"] == k]
        x = [places.index(c["concurrency"]) for c in mine]
        s = [c["S"] for c in mine]
        axes.errorbar(
            x, [v["value"] for v in s], yerr=[[v["value"] - v["low"] for v in s], [v["high"] - v["value"] for v in s]],
            color=colour, linewidth=2, marker="o", markersize=5, capsize=3, label=f"k={k}",
        )  # fmt: skip
        predicted = [(i, c["S_predicted"]) for i, c in zip(x, mine, strict=True) if c["S_predicted"]]
        if predicted:
            axes.plot(*zip(*predicted, strict=True), "D", color=colour, markersize=6, markerfacecolor="none")
    axes.axhline(1, color=INK, linewidth=1)
    axes.axhline(wanted, color=INK, linewidth=1.4, linestyle="--", label=f"asked for: {wanted:.2f}x")
    axes.set_xticks(range(len(places)), [str(b) for b in places])
    axes.set_xlabel("requests at once (diamonds: predicted, replayed tau / C)", color=INK)
    axes.set_ylabel("speed-up", color=INK)
    axes.set_ylim(0, max(wanted, *(c["S"]["high"] for c in cells)) * 1.3)
    axes.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=2)
    return _svg(figure)


def contexts(rows: Sequence[dict[str, Any]], trained: int) -> str:
    """Tokens a step by tokens of context, replayed and measured, and the cost that breaks even: where the lines cross, it stops paying.
    trained: tokens of the longest training row, 0 where unknown."""
    figure, axes = _axes()
    for name, label, colour, style in (
        ("tau_replayed", "replayed", COLOURS[0], "o-"),
        ("tau", "measured", COLOURS[0], "D"),
        ("C", "breaks even (cost of a step)", COLOURS[1], "s--"),
    ):
        known = [(i, r[name]) for i, r in enumerate(rows) if r[name]]
        x, y = [i for i, _ in known], [v if name == "tau_replayed" else v["value"] for _, v in known]
        if known:
            axes.plot(x, y, style, color=colour, linewidth=2, markersize=5, label=label,
                      markerfacecolor="none" if name == "tau" else colour)  # fmt: skip
        if known and name == "C":
            axes.errorbar(
                x, y, yerr=[[v["value"] - v["low"] for _, v in known], [v["high"] - v["value"] for _, v in known]],
                fmt="none", color=colour, capsize=3,
            )  # fmt: skip
    if (
        trained
        and (inside := [i for i, r in enumerate(rows) if r["from"] < trained])
        and len(inside) < len(rows)
    ):
        axes.axvline(inside[-1] + 0.5, color=INK, linewidth=1, linestyle=":")
        axes.text(inside[-1] + 0.45, 1.03, f"trained to {trained:,}", color=INK, fontsize=8.5, ha="right")
    axes.set_xticks(range(len(rows)), [f"{r['from']:,} to\n{r['below']:,}" for r in rows])
    axes.set_ylim(1, None)
    axes.set_xlabel("tokens of context", color=INK)
    axes.set_ylabel("tokens a step", color=INK)
    axes.legend(frameon=False, fontsize=8.5)
    return _svg(figure)
