"""The study's own figures, of the form of `stppo.figures.figures.FIGURES`; notebooks 20 and 21 draw both."""

from __future__ import annotations

from stppo.figures.figures import HAPPENS, WHY, Kind
from stppo.study.beginnings import beginnings
from stppo.study.each_seed import each_seed
from stppo.study.early_warning import early_warning
from stppo.study.settings import every_setting

FIGURES: dict[str, Kind] = {
    draw.__name__: Kind(group, draw)
    for group, draw in (
        (HAPPENS, each_seed),
        (HAPPENS, every_setting),
        (WHY, beginnings),
        (WHY, early_warning),
    )
}
