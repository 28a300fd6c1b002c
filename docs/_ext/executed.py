"""Executed notebooks: small copies that are kept in the repository, and those that the site shows.

    python docs/_ext/executed.py keep FILE...     to results/reference/notebooks
    python docs/_ext/executed.py missing          names of derivations of which no copy fits
    python docs/_ext/executed.py show FOLDER      to docs/notebooks: kept copies that fit, and what else is there

A copy fits while the cells of its notebook are those that were executed.
"""

import base64
import re
import sys
from io import BytesIO
from pathlib import Path

import nbformat
from PIL import Image

from stppo.figures.mathml import with_its_parameters

ROOT = Path(__file__).resolve().parents[2]
KEPT, SOURCES, SHOWN = ROOT / "results/reference/notebooks", ROOT / "notebooks", ROOT / "docs/notebooks"
MOST = 400_000  # bytes of a kept copy
MANY = 12  # pictures of one cell: more are left out
SIZES = ((1500, 96), (1200, 96), (1000, 64), (900, 64), (850, 48), (750, 48), (700, 48), (650, 32))
WIDGET = "application/vnd.jupyter.widget-view+json"


def _read(file: Path) -> nbformat.NotebookNode:
    return nbformat.read(file, as_version=4)


def _smaller(png: str, width: int, colours: int) -> str:
    """A picture of at most that many pixels in breadth and so many colours."""
    picture, small = Image.open(BytesIO(base64.b64decode(png))), BytesIO()
    plain = Image.new("RGB", picture.size, "white")
    plain.paste(picture, mask=picture if picture.mode == "RGBA" else None)
    if plain.width > width:
        plain = plain.resize((width, round(plain.height * width / plain.width)), Image.Resampling.LANCZOS)
    plain = plain.quantize(
        colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )  # rare colours are lines
    plain.save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def kept(file: Path, *size: int) -> str:
    """The text of a copy without what says where and when it was made, its pictures of a width and colours at most."""
    nb = with_its_parameters(_read(file))
    nb.metadata = {key: nb.metadata[key] for key in ("kernelspec", "language_info") if key in nb.metadata}
    for cell in nb.cells:
        cell.metadata = {key: cell.metadata[key] for key in ("tags",) if cell.metadata.get(key)}
        if cell.cell_type != "code":
            continue
        cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        pictures = [out for out in cell.outputs if "image/png" in out.get("data", {})]
        if len(pictures) > MANY:
            said = f"{len(pictures)} pictures are left out of this copy: execute the notebook to see them."
            others = [out for out in cell.outputs if out not in pictures]
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=said), *others]
        for data in (out.data for out in cell.outputs if "data" in out):
            data.pop(WIDGET, None)
            if "image/png" in data:
                data["image/png"] = _smaller(data["image/png"], *size)
            if "text/html" in data:
                data["text/html"] = re.sub(r"\n\s+", "\n", data["text/html"])
            for kind in {"text/html", "text/markdown"} & set(
                data
            ):  # what interactive cells show without controls
                data[kind] = re.sub(
                    r"(?<=data:image/png;base64,)[\w+/=]+", lambda m: _smaller(m[0], *size), data[kind]
                )
        cell.outputs = [out for out in cell.outputs if out.get("data", True)]
    return nbformat.writes(nb) + "\n"


def keep(files: list[str]) -> None:
    """Copies below `MOST` bytes, their pictures as large as that allows."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for file in map(Path, files):
        texts = (kept(file, *size) for size in SIZES)
        text = next((text for text in texts if len(text.encode()) < MOST), None)
        if text is None:
            sys.exit(f"{file} is too large, even with small pictures")
        (KEPT / file.name).write_text(text, encoding="utf-8")
        print(KEPT / file.name, f"{len(text.encode()) / 1000:.0f} kB")


def fits(file: Path) -> bool:
    """Whether a copy was executed from its notebook as it is now; what its parameters are set to does not count."""
    source = SOURCES / file.name
    if not source.is_file():
        return False
    typed = [
        [cell.source for cell in _read(of).cells if "parameters" not in cell.metadata.get("tags", ())]
        for of in (source, file)
    ]
    return typed[0] == typed[1]


def missing() -> list[str]:
    """Derivations that have to be executed before the site can show them."""
    return [
        f.stem
        for f in sorted(SOURCES.glob("0*.ipynb"))
        if not ((KEPT / f.name).is_file() and fits(KEPT / f.name))
    ]


def show(folder: Path) -> None:
    SHOWN.mkdir(parents=True, exist_ok=True)
    for old in SHOWN.glob("*.ipynb"):
        old.unlink()
    found = {file.name: file for file in sorted(folder.glob("[0-9]*.ipynb"))}
    found |= {file.name: file for file in sorted(KEPT.glob("*.ipynb")) if fits(file)}
    runs = sorted(folder.glob("runs/*/st_ppo/seed0/10-train.ipynb"))[:1]
    for file in [*found.values(), *runs]:
        nbformat.write(with_its_parameters(_read(file)), SHOWN / file.name)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["keep", *files] if files:
            keep(files)
        case ["missing"]:
            print(*missing())
        case ["show", folder]:
            show(Path(folder))
        case _:
            sys.exit(__doc__)
