"""What all figures share: size, ink, and how a notebook shows them."""

from __future__ import annotations

import io
import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autoshard_ilp.plots.colours import INK

DPI = 110
FONT = 9


class PlanFigure(Figure):
    """A matplotlib figure that shows itself in a notebook, without pyplot, a display or any global state."""

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        held = io.BytesIO()
        self.savefig(held, format="png", dpi=1.5 * DPI)
        width, height = self.get_size_inches()
        return held.getvalue(), {"width": int(width * DPI), "height": int(height * DPI)}


def drawable(suffix: str) -> bool:
    """Whether matplotlib writes files that end in ``suffix``, such as ".png"."""
    return suffix.removeprefix(".").lower() in Figure().canvas.get_supported_filetypes()


def new(width: float, height: float) -> PlanFigure:
    """An empty figure, sizes in inches, that keeps everything inside its frame."""
    figure = PlanFigure(figsize=(width, height), layout="constrained", dpi=DPI)
    figure.patch.set_alpha(0.0)
    return figure


def plain(axes: Axes, title: str = "", *, frame: tuple[str, ...] = ("left", "bottom")) -> Axes:
    """Grey ink on nothing, with only the named sides of the frame."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in frame)
        spine.set_color(INK)
    axes.tick_params(colors=INK, labelsize=FONT - 1, length=3)
    axes.xaxis.label.set(color=INK, fontsize=FONT)
    axes.yaxis.label.set(color=INK, fontsize=FONT)
    axes.set_title(title, loc="left", fontsize=FONT + 1, color=INK, fontweight="bold")
    return axes


def legend(axes: Axes, columns: int = 7) -> None:
    """A legend below the whole figure, in rows of at most ``columns``, only if there is something to name."""
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure()
    if handles and figure is not None:
        rows = math.ceil(len(handles) / columns)
        figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=math.ceil(len(handles) / rows),
            frameon=False,
            fontsize=FONT - 1,
            labelcolor=INK,
            handlelength=1.0,
        )


def heading(figure: Figure, text: str) -> None:
    """A title over all of the figure."""
    figure.suptitle(text, fontsize=FONT + 1, color=INK, x=0.01, ha="left")


def bars(axes: Axes, names: list[str], stacks: dict[str, tuple[list[float], str]], letters: int = 44) -> None:
    """Horizontal bars, the first on top; ``stacks`` maps a part's name to its values and colour."""
    left = [0.0] * len(names)
    for name, (values, colour) in stacks.items():
        axes.barh(range(len(names)), values, left=left, color=colour, height=0.68, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(names)), [shortened(n, letters) for n in names])
    axes.invert_yaxis()
    axes.set_xlim(0, max([*left, 1e-12]) * 1.04)


def shortened(name: str, letters: int = 44) -> str:
    """A long path without its middle."""
    return name if len(name) <= letters else f"{name[: letters // 3]}…{name[-(letters - letters // 3 - 1) :]}"
