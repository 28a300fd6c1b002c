"""The figures of a report: their groups, headings and questions, and the pictures of two results folders."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stppo.study.arms import MAIN

OBJECTIVES = "objectives"
# Group of figures -> file name (or its part before the regime) -> heading and the question the figure asks.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "What is compared": {
        OBJECTIVES: (
            "Objectives",
            "What tells the algorithms apart? (a schematic, drawn from their configs; asks what the paper's fig. 1 shows)",
        ),
        "overview": ("Every algorithm", "Which algorithms learn, and which lose what they had learned?"),
    },
    "The paper's figures": {
        "collapse": (
            "Token PPO, seed by seed",
            "Does token-level PPO fail, and what moves when it does? (asks what the paper's fig. 2 asks)",
        ),
        "diagnostics": (
            "Diagnostics",
            "Do gradient norm and clipping bias grow, and for which variant? (fig. 3 a-d)",
        ),
        "trends": (
            "Trends, run by run",
            "How fast do the norms grow, and does a trend describe it? (fig. 3 c-d, Q4)",
        ),
        "stability": (
            "Stability",
            "Do the stabilised variants keep learning where token PPO fails? (fig. 4)",
        ),
        "clip_ratio": ("Clipping", "How much is clipped, and how far does the policy move? (fig. 5)"),
        "survival": ("Time to collapse", "How long does each algorithm last?"),
        "so_grpo": (
            "Group-based variants",
            "Do the same ideas carry over to GRPO? (asked by the second version)",
        ),
        "granularity": ("Granularity", "Does a coarser importance ratio help by itself?"),
    },
    "Could something else explain it?": {
        "controls": ("Controls", "Is it normalisation by the clipping bias, or only smaller or fewer steps?"),
        "factorial": (
            "Ratio and credit",
            "Is it the turn-level ratio that helps, or credit that is as coarse?",
        ),
        "best_settings": (
            "Best settings",
            "Does the comparison hold when each algorithm has its best learning rate?",
        ),
    },
    "What happens before a collapse": {
        "mechanism": (
            "What moves first",
            "Which signal leaves its healthy range first, and only in runs that collapse?",
        ),
        "spikes": ("Spikes", "Do gradient spikes go with collapse? (fig. 3b)"),
        "critic": ("The critic", "Are advantages less accurate off-policy?"),
        "drivers": (
            "A better critic",
            "Does a critic trained longer, or the truth in its place, prevent collapse?",
        ),
        "phase_diagram": ("Phase diagram", "Is it epochs, learning rate, or the age of the batches?"),
    },
    "What the sources leave open": {
        "normalisers": (
            "Choices",
            "Do the divisor, its constant, the ratio, the penalty and the optimiser matter?",
        ),
        "settings": ("Other settings", "Does it hold in other worlds, and for another model family?"),
    },
}
HEADINGS = {name: words for figures in GROUPS.values() for name, words in figures.items()}
_GROUP_OF = {name: group for group, figures in GROUPS.items() for name in figures}
OTHERS = "Other figures"


@dataclass(frozen=True)
class Picture:
    """One figure of one results folder."""

    src: str  # data URI
    caption: str


def _picture(figures_dir: Path, name: str) -> Picture | None:
    for extension, mime in (("png", "image/png"), ("svg", "image/svg+xml")):
        path = figures_dir / f"{name}.{extension}"
        if path.is_file():
            caption = figures_dir / f"{name}.txt"
            text = caption.read_text(encoding="utf-8").strip() if caption.is_file() else ""
            return Picture(f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}", text)
    return None


def _figure_names(*folders: Path | None) -> list[str]:
    """Names of the figures in any of the folders: known ones in the order of HEADINGS, others behind; of the regimes
    the main one first."""
    found = {path.stem for folder in folders if folder for path in folder.glob("*.png")}
    ranks = {name: i for i, name in enumerate(HEADINGS)}
    return sorted(
        found, key=lambda name: (ranks.get(_kind(name), len(ranks)), not name.endswith(f"_{MAIN}"), name)
    )


def _kind(name: str) -> str:
    """The figure's entry in HEADINGS: `diagnostics_A` is of kind `diagnostics`."""
    return next((kind for kind in HEADINGS if name == kind or name.startswith(f"{kind}_")), name)


def figure_sections(own: Path, reference: Path | None) -> list[dict[str, Any]]:
    """One entry per figure of either folder, in the order of `GROUPS`."""
    sections = []
    for name in _figure_names(own, reference):
        kind = _kind(name)
        heading, question = HEADINGS.get(kind, (name.replace("_", " ").capitalize(), ""))
        if name != kind:
            heading = f"{heading}, regime {name.removeprefix(f'{kind}_')}"
        mine, theirs = _picture(own, name), _picture(reference, name) if reference else None
        sections.append(
            {
                "name": name,
                "kind": kind,
                "group": _GROUP_OF.get(kind, OTHERS),
                "heading": heading,
                "question": question,
                "own": mine,
                "reference": None if theirs == mine else theirs,  # the schematic needs no run: one is enough
                "same": mine is not None and theirs == mine,
            }
        )
    return sections
