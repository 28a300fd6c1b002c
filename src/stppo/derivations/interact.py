"""Sliders beside a drawing where a live notebook can show them, the drawing alone everywhere else."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from IPython.display import clear_output, display

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# How executed notebooks become HTML that needs no network. papermill stores the widgets' state in the
# notebook's
# metadata, and a page made from that state loads scripts from elsewhere; without it nbconvert shows a
# bundle's next
# kind: the picture.
NBCONVERT_OPTIONS = (
    "--to",
    "stppo.figures.mathml.OfflineHTMLExporter",
    "--ClearMetadataPreprocessor.enabled=True",
    "--ClearMetadataPreprocessor.clear_cell_metadata=False",
)


def explore(draw: Callable[..., Any], *, start: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Show what `draw` draws, with one control per option where a live front end can show controls.

        explore(draw, staleness=(0.0, 2.0, 0.1), granularity=["token", "turn"], start={"staleness": 0.5})

    draw(**values) gets one value per option by keyword, and returns a `Plot`, a matplotlib `Figure`, or
    anything with `_repr_html_` or `_repr_png_`. It is called once with the start values, then at each change
    of a control; a slider counts as changed when it is let go. What `draw` raises later is shown in the
    picture's place.

    options: ipywidgets abbreviations: (low, high) or (low, high, step) gives a slider, a list or dict a
    drop-down menu, a bool a check box, and any ipywidgets value widget stands for itself. start: initial
    values by option; one not named starts at its widget's own (the middle of a slider, the first entry of a
    menu).

    The cell's one output holds the controls and the picture of the start values as alternatives: JupyterLab
    shows the controls, HTML made with `NBCONVERT_OPTIONS`, GitHub and viewers without widgets show the
    picture and name its values.

    ValueError names an option that is no abbreviation, a start value that its option does not offer, or a
    `draw` that returned nothing to show.
    """
    start = dict(start or {})
    if unknown := sorted(set(start) - set(options)):
        raise ValueError(
            f"explore: start names {', '.join(unknown)}, but the options are {', '.join(options)}"
        )
    box, picture = controls(draw, options, start)
    widgets = zip(options, box.children, strict=False)  # the last child is the picture
    said = {name: getattr(widget, "label", widget.value) for name, widget in widgets}
    display({WIDGET_VIEW: box._repr_mimebundle_()[WIDGET_VIEW], **_static(picture, said)}, raw=True)


def controls(
    draw: Callable[..., Any], options: Mapping[str, Any], start: Mapping[str, Any]
) -> tuple[Any, str]:
    """The box of widgets (one per option, then the picture's area), and the start picture as HTML; see
    `explore`."""
    from ipywidgets import Output, VBox

    widgets = {name: _widget(name, option, start) for name, option in options.items()}

    def picture() -> str:
        return _picture(draw(**{name: widget.value for name, widget in widgets.items()}))

    first = picture()
    output = Output(outputs=({"output_type": "display_data", "data": {"text/html": first}, "metadata": {}},))

    def redraw(_: Any) -> None:
        with output:  # also catches what draw raises
            clear_output(wait=True)
            display({"text/html": picture()}, raw=True)

    for widget in widgets.values():
        widget.observe(redraw, names="value")
    return VBox([*widgets.values(), output]), first


def _widget(name: str, option: Any, start: Mapping[str, Any]) -> Any:
    from ipywidgets import interactive

    try:
        widget = interactive.widget_from_abbrev(option)
        widget.value = start.get(name, widget.value)
    except Exception as error:  # of several kinds: no abbreviation, or a value that it does not offer
        raise ValueError(
            f"explore: {name}={option!r}, start {start.get(name)!r}: {error}; use (low, high, step) or a list"
        ) from error
    if name in start and widget.value != start[name]:  # a slider silently moves it into its range
        raise ValueError(f"explore: start {name}={start[name]!r} is not offered by {option!r}")
    widget.description = widget.description or name.replace("_", " ")
    if hasattr(widget, "continuous_update"):
        widget.continuous_update = False  # else slow drawings queue up behind a moving slider
    if "description_width" in widget.style.keys:
        widget.style.description_width = "initial"
    return widget


def _static(picture: str, values: Mapping[str, Any]) -> dict[str, str]:
    at = ", ".join(f"{name.replace('_', ' ')} = {_short(value)}" for name, value in values.items())
    note = f"Drawn at {at}. In JupyterLab, with the notebook's kernel running, these are controls."
    text = f'<div style="font-size:0.9em;color:#5d6875;margin-top:0.4em">{html.escape(note)}</div>'
    return {"text/html": picture + text, "text/plain": note}


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _picture(shown: Any) -> str:
    """A drawing as HTML that needs no other file."""
    if text := getattr(shown, "_repr_html_", lambda: None)():  # a matplotlib Figure has one, which gives None
        return text
    if hasattr(shown, "_repr_png_"):
        png = shown._repr_png_()
        png, size = png if isinstance(png, tuple) else (png, {})
    elif hasattr(shown, "savefig"):
        buffer = BytesIO()
        shown.savefig(buffer, format="png", dpi=110)
        png, size = buffer.getvalue(), {}
    else:
        raise ValueError(
            f"explore: draw returned {type(shown).__name__}; return a Plot or a matplotlib Figure"
        )
    described = html.escape(getattr(shown, "caption", "") or "figure", quote=True)
    source = base64.b64encode(png).decode()
    width = f' width="{size["width"]}"' if "width" in size else ""
    return f'<img alt="{described}"{width} style="max-width:100%" src="data:image/png;base64,{source}">'
