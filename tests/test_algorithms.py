"""The registry: one row an algorithm, from its YAML alone."""

import re

import pytest

from stppo.config.algorithms import LINES, ORDER, OWN, algorithms, aliases, look
from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.identity import fingerprint, identity_section, run_section
from stppo.config.loading import build, load
from stppo.figures.curves import GREY

BASED_ON_TURN_PPO = "defaults: [turn_ppo]\nname: {}\n{}"


@pytest.fixture
def write(configs):
    """write(name, text): an algorithm of the configs in use."""
    return lambda name, text: (configs / "algorithm" / f"{name}.yaml").write_text(text)


def test_shipped_rows_come_first_in_their_order_then_others_by_name(write):
    write("zeta", BASED_ON_TURN_PPO.format("zeta", ""))
    write("alpha", BASED_ON_TURN_PPO.format("alpha", ""))
    names = [row.name for row in algorithms()]
    assert tuple(names[: len(ORDER)]) == ORDER
    assert names[len(ORDER) :] == sorted(names[len(ORDER) :]) and {"alpha", "zeta"} <= set(names)


def test_every_shipped_row_says_everything():
    rows = {row.name: row for row in algorithms()}
    for name in ORDER:
        assert rows[name].source and re.fullmatch("#[0-9A-F]{6}", rows[name].color)
        assert rows[name].line == LINES.get(rows[name].granularity, OWN)
        assert rows[name].prior is not None, f"{name} says neither a prior of its knob nor that it has none"
    assert len({row.color for row in rows.values()}) == len(rows)
    for row in rows.values():
        red, green, blue = (int(row.color[i : i + 2], 16) for i in (1, 3, 5))
        grey = max(red, green, blue) - min(red, green, blue) < 24
        assert not (grey and red > 0x70), f"{row.name} looks like token PPO's line behind the others ({GREY})"
    assert aliases()["so_ppo"] == "st_ppo" and look("so_ppo") == rows["st_ppo"]


def test_presentation_is_not_inherited_but_the_granularity_is(write):
    write("mine", BASED_ON_TURN_PPO.format("mine", ""))
    mine = look("mine")
    assert (mine.label, mine.v1, mine.source) == ("mine", "", "")
    assert mine.color != look("turn_ppo").color and mine.line == LINES["turn"]
    assert "label" not in compose(["algorithm=mine"])["algorithm"]


def test_an_edited_label_shows_and_changes_no_run(write):
    write("mine", BASED_ON_TURN_PPO.format("mine", "label: Mine\n"))
    before = compose(["algorithm=mine"])
    assert look("mine").label == "Mine"
    write("mine", BASED_ON_TURN_PPO.format("mine", "label: My own\ncolor: '#123456'\nv1: X\n"))
    after = compose(["algorithm=mine"])
    assert (look("mine").label, look("mine").color) == ("My own", "#123456")
    assert after["algorithm"]["label"] == "My own" and after != before
    for section in (run_section, identity_section):
        assert fingerprint(section(after)) == fingerprint(section(before))


def test_invalid_presentation_names_file_and_key(write):
    write("mine", BASED_ON_TURN_PPO.format("mine", "color: reddish\n"))
    with pytest.raises(ConfigError, match=r"mine\.yaml: color = 'reddish'"):
        algorithms()
    with pytest.raises(ConfigError, match=r"algorithm\.color = 'reddish'"):
        load(compose(["algorithm=mine"]))


def test_name_without_a_file_gets_a_look_of_its_own():
    assert look("somebody_elses").label == "somebody elses" and look("somebody_elses").line == OWN
    variant = look("st_ppo (training.learning_rate=2e-4)")
    assert variant.label == f"{look('st_ppo').label}, training.learning_rate=2e-4"
    assert variant.line == look("st_ppo").line and variant.color != look("st_ppo").color
    assert look("so_grpo_ctn_x").label == f"{look('so_grpo_ctn').label}, x", "the longest name"


# ---- the prior of the one own knob --------------------------------------------------------------------

PRIOR = "prior: {key: objective.clip.epsilon_high, low: 0.05, high: 0.8, scale: log}\n"


def test_a_prior_is_read_and_changes_no_run(write):
    write("mine", BASED_ON_TURN_PPO.format("mine", ""))
    before = compose(["algorithm=mine"])
    assert look("mine").prior is None and look("turn_ppo").prior.keys == (
        "objective.clip.epsilon_low",
        "objective.clip.epsilon_high",
    ), "not inherited"
    write("mine", BASED_ON_TURN_PPO.format("mine", PRIOR))
    after = compose(["algorithm=mine"])
    load(after)
    assert fingerprint(identity_section(after)) == fingerprint(identity_section(before))
    prior = look("mine").prior
    assert [prior.at(share) for share in (0.0, 0.5, 1.0)] == pytest.approx([0.05, 0.2, 0.8])
    drawn = compose(["algorithm=mine", *prior.overrides(prior.at(1.0))])
    assert drawn["algorithm"]["objective"]["clip"]["epsilon_high"] == 0.8
    assert fingerprint(identity_section(drawn)) != fingerprint(identity_section(before))
    write("mine", BASED_ON_TURN_PPO.format("mine", "prior: none\n"))
    assert look("mine").prior == "none"


MALFORMED = [
    (PRIOR, "prior: 0.2\n", "prior = 0.2"),
    (", scale: log", "", "prior.scale"),
    ("scale: log", "scale: log, unit: nats", "prior.unit"),
    ("scale: log", "scale: cubic", "prior.scale = 'cubic'"),
    ("low: 0.05", "low: 0.9", "prior.high = 0.8"),
    ("low: 0.05", "low: 0", "prior.scale = 'log'"),
    ("low: 0.05", "low: .nan", "prior.low = nan"),
    ("objective.clip.epsilon_high", "training.epochs", "prior.key = 'training.epochs'"),
    ("low: 0.05", "low: true", "prior.low = True"),
]
OF_NO_KNOB = [  # which only who builds the objective can tell
    ("epsilon_high", "epsilon", "prior.key = objective.clip.epsilon"),
    ("epsilon_high", "clip_on", "prior.key = objective.clip.clip_on"),
    ("low: 0.05, high: 0.8, scale: log", "low: -1, high: 1, scale: linear", "prior reaches -1"),
]


@pytest.mark.parametrize(("old", "new", "named"), [*MALFORMED, *OF_NO_KNOB])
def test_a_malformed_prior_is_one_line_that_names_its_key(write, old, new, named):
    assert old in PRIOR
    write("mine", BASED_ON_TURN_PPO.format("mine", PRIOR.replace(old, new)))
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.{named}")) as error:
        load(compose(["algorithm=mine"]))
    assert "\n" not in str(error.value)
    if (old, new, named) in MALFORMED:
        with pytest.raises(ConfigError, match=re.escape(named)) as error:
            algorithms()
        assert "mine.yaml" in str(error.value) and "\n" not in str(error.value)


# ---- the paper's points of the product credit x ratio x clip x stabiliser x loss aggregation ----------

GEOMETRIC_TURN = ("turn", "geometric")
# name: credit, ratio, stabiliser, loss aggregation, epsilon low and high
TABLE = {
    "token_ppo": ("TokenGAE", ("token", "geometric"), "NoStabilizer", "trajectory_mean", 0.2, 0.2),
    "turn_ppo": ("TokenGAE", GEOMETRIC_TURN, "NoStabilizer", "trajectory_mean", 0.2, 0.2),
    "s_ppo": ("TokenGAE", ("token", "geometric"), "ClippingBiasNorm", "trajectory_mean", 0.2, 0.2),
    "st_ppo": ("TokenGAE", GEOMETRIC_TURN, "ClippingBiasNorm", "trajectory_mean", 0.2, 0.2),
    "so_ppo_ctn": ("TurnReturnMinusValue", ("turn", "arithmetic"), "CtnKL", "turn_mean", 0.2, 0.2),
    "grpo": ("GroupNormalised", ("token", "geometric"), "NoStabilizer", "trajectory_mean", 0.2, 0.2),
    "so_grpo": ("GroupNormalised", GEOMETRIC_TURN, "ClippingBiasNorm", "trajectory_mean", 0.2, 0.2),
    "so_grpo_ctn": ("GroupNormalised", ("turn", "arithmetic"), "CtnKL", "turn_mean", 0.2, 0.2),
    "gspo": ("GroupNormalised", ("sequence", "geometric"), "NoStabilizer", "trajectory_mean", 3e-4, 4e-4),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_algorithm_is_its_row_of_the_table(name):
    objective = build(compose([f"algorithm={name}"])["algorithm"]["objective"], "algorithm.objective")
    credit, ratio, clip = objective.credit, objective.ratio, objective.clip
    assert TABLE[name] == (
        type(credit).__name__,
        (ratio.granularity, ratio.aggregation),
        type(objective.stabilizer).__name__,
        objective.loss_aggregation,
        clip.epsilon_low,
        clip.epsilon_high,
    )
    assert credit.needs_critic is credit.whiten is ("ppo" in name)
    assert credit.group_size == (1 if "ppo" in name else 8)
    if "grpo" in name:
        assert credit.returns == ("turn" if name == "so_grpo_ctn" else "trajectory")


def test_options_do_not_drift():
    """Where two algorithms use the same class for an axis, they use it with the same options. Clip's epsilon (gspo), the
    ratio and the group returns are axes themselves."""
    seen = {}
    for name in TABLE:
        objective = compose([f"algorithm={name}"])["algorithm"]["objective"]
        for part in ("credit", "stabilizer"):
            options = {k: v for k, v in objective[part].items() if k != "returns"}
            assert seen.setdefault(options["_target_"], options) == options, name
