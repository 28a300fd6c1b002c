"""The axes table says what the YAML files say, and figure 1 follows it."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from PIL import Image

from stppo.config.algorithms import PAPER, RIVALS, algorithms, look
from stppo.derivations import axes
from stppo.figures.schematic import CHANGED
from stppo.figures.style import in_few_colours
from tests.conftest import edit

ROOT = Path(__file__).parents[1]
NAMES = PAPER  # the algorithms of figure 1


@pytest.fixture(scope="module")
def table():
    return axes.axes_table()


def test_every_algorithm_has_a_row_and_an_alias_has_none(table):
    files = {
        path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs/algorithm").glob("*.yaml")
    }
    assert set(table.index) == {name for name, content in files.items() if "name" in content}
    assert "so_ppo" not in table.index and axes.axes_table(["so_ppo"]).loc["so_ppo", "ratio"] == "turn"
    assert list(table.index) == [row.name for row in algorithms()]
    assert list(table.columns) == ["label", "v1", "v2", *axes.AXES, "source"]


def test_table_says_what_the_files_say(table):
    for name, row in table.loc[list(NAMES)].iterrows():
        said = yaml.safe_load((ROOT / f"configs/algorithm/{name}.yaml").read_text())["objective"]
        assert row["ratio"] == said["ratio"]["granularity"], name
        assert row["aggregation"] in ("–", said["ratio"]["aggregation"]), name
        assert row["pooling"] == said["credit"]["pooling"].replace("_", " "), name
        assert row["whiten"] == ("yes" if said["credit"]["whiten"] else "no"), name
        assert row["loss aggregation"] == said["loss_aggregation"].replace("_", " "), name
        low, high = map(float, re.findall(r"[\d.]+", row["clip"]))
        assert low == pytest.approx(1 - said["clip"]["epsilon_low"], abs=1e-6), name
        assert high == pytest.approx(1 + said["clip"]["epsilon_high"], abs=1e-6), name
        kind = said["stabilizer"]["_target_"].rpartition(".")[2]
        sign = {"NoStabilizer": "none", "ClippingBiasNorm": "÷", "CtnKL": "+"}[kind]
        assert row["stabiliser"].startswith(sign), name
    assert table.loc["token_ppo", "credit"] == "token GAE (γ 1, λ 1)"
    assert table.loc["so_grpo_ctn", "credit"] == "group normalised (groups of 8, turn returns)"


@pytest.mark.parametrize(
    ("algorithm", "old", "new", "column", "said"),
    [
        ("s_ppo", "c0: 0.1", "c0: 0.5", "stabiliser", "÷ max(1, ‖C‖/0.5)"),
        ("s_ppo", "form: max", "form: one_plus", "stabiliser", "÷ (1 + ‖C‖/0.1)"),
        ("s_ppo", "estimator: exact", "estimator: logit", "stabiliser", "÷ max(1, ‖C‖/0.1), logit estimate"),
        ("so_ppo_ctn", ": inside", ": outside", "stabiliser", "+ 1 · E[share] · E[KL(π‖π_old)]"),
        ("st_ppo", "clip_on: token", "clip_on: turn", "clip", "[0.8, 1.2] on turn sums"),
        ("st_ppo", "lam: 1.0", "lam: 0.95", "credit", "token GAE (γ 1, λ 0.95)"),
        ("st_ppo", "aggregation: geometric", "aggregation: product", "aggregation", "product"),
    ],
)  # fmt: skip
def test_a_changed_file_changes_its_cell_alone(configs, table, algorithm, old, new, column, said):
    edit(configs / f"algorithm/{algorithm}.yaml", old, new)
    now = axes.axes_table([algorithm]).loc[algorithm]
    assert now[column] == said
    assert (now != table.loc[algorithm]).sum() == 1


def test_worked_example_by_hand():
    token, turn = axes.worked_example("s_ppo").dropna(), axes.worked_example("st_ppo").dropna()
    ratios, sign = token["token_ratio"].to_numpy(), token["advantage"].to_numpy()
    means = np.repeat([np.exp(np.log(part).mean()) for part in np.split(ratios, [4, 9])], [4, 5, 3])
    for frame, used in ((token, ratios), (turn, means)):
        clipped = ((sign > 0) & (used > 1.2)) | ((sign < 0) & (used < 0.8))
        assert clipped.any() and not clipped.all()
        np.testing.assert_allclose(frame["ratio"], used, rtol=1e-12)
        np.testing.assert_array_equal(frame["clipped"], clipped)
        # All tokens of a turn share sign and fate, so a turn's ratio spreads evenly over its tokens.
        np.testing.assert_allclose(frame["gradient"], np.where(clipped, 0, sign * used), rtol=1e-12)
        divisor = np.linalg.norm(np.where(clipped, sign * used, 0)) / 12 / 0.1
        np.testing.assert_allclose(frame["divisor"], divisor, rtol=1e-12)
        np.testing.assert_allclose(frame["step"], frame["gradient"] / divisor, rtol=1e-12)


def drawn(plot):
    """What a reader sees: texts, and the heights of the bars."""
    texts, bars, shaded = [], [], 0
    for ax in plot.figure.get_axes():
        texts += [text.get_text() for text in ax.texts]
        bars += [round(patch.get_height(), 6) for container in ax.containers for patch in container]
        shaded += sum(
            isinstance(p, Rectangle) and to_hex(p.get_facecolor()) == CHANGED.lower() for p in ax.patches
        )
    return texts, bars, shaded


def test_figure_shows_the_papers_algorithms_and_shades_what_differs(table):
    plot = axes.objectives_figure()
    table = table.drop(index=list(RIVALS))
    texts, bars, shaded = drawn(plot)
    assert plot.name == "objectives" and {look(name).label for name in table.index} <= set(texts)
    points = table[list(axes.AXES)]
    assert shaded == (points != points.loc["token_ppo"]).to_numpy().sum() > 0
    assert list(plot.data["algorithm"]) == list(table.index)
    # 12 token bars in each token panel, 3 blocks in each turn panel; 12 gradients in each, twice under a
    # divisor
    assert len(bars) == 2 * 12 + 2 * 3 + 6 * 12
    assert "all divided by 1.98" in texts and "all divided by 1.47" in texts


def test_saved_picture_keeps_small_patches_and_pale_bands_as_they_are():
    """Beside twenty thousand other colours."""
    pixels = np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)
    pixels[:, :200] = [253, 238, 210]  # a pale orange beside an orange one and two greys
    pixels[:50, :100], pixels[50:60, :20], pixels[60:70, :20] = (
        [251, 233, 220],
        [138, 138, 138],
        [145, 145, 145],
    )
    kept = np.asarray(in_few_colours(Image.fromarray(pixels)).convert("RGB")).astype(int)
    assert np.array_equal(kept[:, :200], pixels[:, :200])
    assert np.abs(kept - pixels).max() < 100
