"""The picture: bars against the peers, and throughput over the block count."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from peers.engines import ENGINES

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["draw"]

OWN, PEER = "#1f6f8b", "#b9c4c9"
BARS = {"1": "decode, batch 1", "8": "decode, batch 8"}


def draw(document: dict[str, Any], path: Path) -> None:
    """Write one row of panels for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = document["models"]
    figure, rows = plt.subplots(
        len(models), 4, figsize=(16, 3.6 * len(models)), squeeze=False, layout="constrained"
    )
    for (model, found), axes in zip(models.items(), rows, strict=True):
        for axis, (title, values) in zip(axes, _panels(found).items(), strict=False):
            _bars(axis, f"{model}: {title}", values)
        _line(axes[-1], f"{model}: trace over block count", found.get("blocks", {}))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panels(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the medians of the panels with bars, in tokens per second."""
    decoding = found.get("decoding", {"decode": {}, "prefill": {}})
    panels = {
        title: {
            name: median(decoding["decode"][name][batch])
            for name in ENGINES
            if name in decoding["decode"]
        }
        for batch, title in BARS.items()
    }
    trace = {
        f"{name}, {pool}": median(run["tokens_per_s"] for run in runs)
        for pool, engines in found.get("trace", {}).items()
        for name, runs in sorted(engines.items(), key=lambda pair: list(ENGINES).index(pair[0]))
    }
    return {**panels, "trace": trace}


def _bars(axis: Any, title: str, values: dict[str, float]) -> None:
    names = list(values)[::-1]
    colours = [OWN if name.startswith("reblock") else PEER for name in names]
    bars = axis.barh(names, [values[name] for name in names], color=colours)
    axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("tokens per second")
    axis.margins(x=0.15)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _line(axis: Any, title: str, blocks: dict[str, Any]) -> None:
    counts = sorted(map(int, blocks))
    rates = [median(run["tokens_per_s"] for run in blocks[str(count)]) for count in counts]
    axis.plot(counts, rates, marker="o", color=OWN)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("blocks")
    axis.set_ylabel("tokens per second")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
