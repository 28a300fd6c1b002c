"""One look for every figure: a fixed colour and line style per algorithm, and reproducible files."""

from __future__ import annotations

import html
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from scipy.spatial.distance import cdist

from stppo.files import repository_path, write_atomically

# In derivations, where no algorithm has a name yet, the colour is the granularity and the line the
# aggregation.
GRANULARITY_COLORS = {"token": "#D55E00", "turn": "#0061A8", "sequence": "#4D4D4D"}
AGGREGATION_LINES = {"geometric": "-", "arithmetic": "--", "product": ":"}
STYLE_NOTE = "Dashed: token-level ratio; solid: turn-level; dotted: sequence-level."


def style() -> AbstractContextManager[None]:
    """The matplotlib settings of all figures, as a context."""
    settings = {
        **sns.axes_style("ticks"),
        "axes.axisbelow": True,
        "axes.edgecolor": "#888888",
        "axes.grid": True,
        "axes.labelcolor": "#333333",
        "axes.labelsize": 9.5,
        "axes.linewidth": 0.8,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "figure.facecolor": "white",
        "figure.titlesize": 12.5,
        "figure.titleweight": "bold",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same picture on every machine
        "font.size": 9.5,
        "grid.color": "#E4E4E4",
        "grid.linewidth": 0.7,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "legend.handlelength": 2.4,
        "svg.hashsalt": "stppo",  # else element ids are random
        "xtick.color": "#666666",
        "xtick.labelsize": 8.5,
        "ytick.color": "#666666",
        "ytick.labelsize": 8.5,
    }
    return mpl.rc_context(settings)


@dataclass(frozen=True)
class Plot:
    """A figure with what it shows as numbers and in words; notebooks display it as a picture."""

    name: str
    figure: Figure
    data: pd.DataFrame
    caption: str
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # further CSVs, by suffix
    title: str = ""  # what the figure shows in one sentence, where it states one

    @cached_property
    def png(self) -> bytes:
        """The picture at 150 dpi in 256 colours (`in_few_colours`): a third of the size. It carries its words
        (`words_of`)."""
        full, small, words = BytesIO(), BytesIO(), PngInfo()
        words.add_itxt("Title", self.title)
        words.add_itxt("Description", self.caption)
        with style():
            self.figure.savefig(full, format="png", dpi=150)
        in_few_colours(Image.open(full)).save(
            small, format="png", optimize=True, dpi=(150, 150), pnginfo=words
        )
        return small.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        # The saved picture, shown at 110 pixels an inch: a second rendering would cost more than a sharper
        # one.
        return self.png, {"width": round(110 * self.figure.get_figwidth())}

    def save(self, out_dir: str | Path) -> list[Path]:
        """Write NAME.svg, .png, .csv (the plotted data) and .txt (title, if any, and caption); returns the
        paths.

        Files hold no dates: the same data and library versions give the same bytes. Further `tables`
        become NAME_<suffix>.csv.
        """
        out_dir, name = Path(out_dir), self.name
        with style():
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")  # laid out once, not anew for every format
            metadata = {"Date": None, **({"Title": self.title} if self.title else {})}
            write_atomically(
                out_dir / f"{name}.svg",
                lambda path: self.figure.savefig(path, format="svg", metadata=metadata),
            )
        write_atomically(out_dir / f"{name}.png", lambda path: path.write_bytes(self.png))
        paths = [out_dir / f"{name}.svg", out_dir / f"{name}.png"]
        tables = {"": self.data, **{f"_{key}": table for key, table in self.tables.items()}}
        for suffix, table in tables.items():
            path = out_dir / f"{name}{suffix}.csv"
            text = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
            write_atomically(path, lambda p, t=text: p.write_text(t, encoding="utf-8"))
            paths.append(path)
        path, text = out_dir / f"{name}.txt", "\n".join(filter(None, (self.title, self.caption))) + "\n"
        write_atomically(path, lambda p: p.write_text(text, encoding="utf-8"))
        return [*paths, path]


def words_of(file: str | Path) -> tuple[str, str]:
    """Title and caption of a saved PNG; empty where it carries none."""
    with Image.open(file) as picture:
        words = picture.info  # read before the pixels are
        return words.get("Title", ""), words.get("Description", "")


def in_few_colours(image: Image.Image, frequent: int = 192) -> Image.Image:
    """A picture in 256 colours: its most frequent ones as they are, so lines and bands keep theirs, and of
    the rest, which are the blurred edges of letters and lines, 64 that cover them."""
    pixels = np.asarray(image.convert("RGB"))
    packed = pixels.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
    found, places, counts = np.unique(packed, return_inverse=True, return_counts=True)
    colors = np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1).astype(np.uint8)
    order = np.argsort(-counts, kind="stable")
    palette, rest = colors[order[:frequent]], colors[order[frequent:]]
    if len(rest):
        covered = Image.fromarray(rest[None]).quantize(
            256 - frequent, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        palette = np.concatenate([palette, np.array(covered.getpalette(), np.uint8).reshape(-1, 3)])[:256]
    nearest = cdist(colors, palette, "sqeuclidean").argmin(1).astype(np.uint8)
    small = Image.fromarray(nearest[places].reshape(packed.shape))
    small.putpalette(palette.tobytes())
    return small


def publish(plot: Plot | None, out_dir: str | Path) -> Plot | None:
    """Save a plot, show its caption and return it, so that a notebook cell ends by showing it. None where the
    runs support none, which is said."""
    if plot is None:
        print("Not drawn: these runs do not have what the picture needs.")
        return None
    from IPython.display import HTML, display

    plot.save(repository_path(out_dir))
    display(HTML(f"<p>{html.escape(plot.caption)}</p>"))
    return plot
