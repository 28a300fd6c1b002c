"""Rules of one's own, in a module outside the package: those of the site's page and two more train, are recorded and resume."""

import sys

import pytest

from stppo.config import files as config_files
from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.loading import load
from tests.conftest import TINY
from tests.test_docs import write_examples
from tests.training_runs import assert_same_metrics, interrupted, run, tables

SOURCE = '''
from dataclasses import dataclass

from stppo.objectives import Bounds, ClipRule, Penalty


@dataclass(frozen=True)
class EntropyClip(ClipRule):
    """Wider bounds for tokens of high entropy (after SSPO)."""

    epsilon: float = 0.2

    def bounds(self, tokens):
        width = self.epsilon * (0.5 + tokens.known("entropy"))
        return Bounds(1 - width.clamp(max=0.9), 1 + width)


@dataclass(frozen=True)
class KeepLikely(Penalty):
    """Holds up the probability of tokens with positive advantage (after LLDS)."""

    coefficient: float = 0.2

    def penalty(self, tokens, bounds):
        return self.coefficient * (-tokens.log_ratio).clamp(min=0)[tokens.advantages >= 0].sum() / len(tokens.ratio)


class NoBounds(ClipRule):
    pass


class Foreign:
    pass
'''
SHORT = ["training.iterations=2", "training.checkpoint_every=1", "training.learning_rate=0.01"]
SHORT += ["training.trajectories_per_iteration=8"]


def with_rule(kind, name):
    """Overrides that put a rule, with its defaults, in the place of another."""
    key = f"algorithm.objective.{kind}"
    return ["algorithm=turn_ppo", f"~{key}", f"+{key}._target_=rules_of_a_user.{name}"]


RULES = {
    **{name: [f"algorithm={name}"] for name in ("harmonic", "no_clip", "median", "few_effective")},
    "entropy clip": with_rule("clip", "EntropyClip"),
    "penalty": with_rule("stabilizer", "KeepLikely"),
}


@pytest.fixture(autouse=True)
def own_configs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(config_files.VARIABLE, str(tmp_path / "mine"))
    write_examples("howto/add-an-algorithm.md", tmp_path / "mine")
    (tmp_path / "mine" / "rules_of_a_user.py").write_text(SOURCE)
    yield
    for module in ("my_rules", "rules_of_a_user"):
        sys.modules.pop(module, None)


@pytest.fixture(scope="module")
def shipped(barely_trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped")
    run(compose([*TINY, "algorithm=turn_ppo", *SHORT]), folder, barely_trained)
    return tables(folder)[0]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_ones_own_trains_is_recorded_and_resumes(shipped, tiny, barely_trained, tmp_path, rule):
    config = tiny(*RULES[rule], *SHORT)
    run(config, tmp_path / "whole", barely_trained)
    interrupted(config, tmp_path / "resumed", barely_trained, after=1)
    run(config, tmp_path / "resumed", barely_trained)
    assert_same_metrics(tmp_path / "whole", tmp_path / "resumed")
    updates = tables(tmp_path / "whole")[0]
    assert list(updates) == list(shipped) and updates["update_norm"].gt(0).all()
    assert updates["update_norm"].iloc[-1] != shipped["update_norm"].iloc[-1]
    if rule == "entropy clip":
        assert shipped["clip_high"].to_numpy() == pytest.approx(1.2)
        assert updates["clip_high"].max() - updates["clip_high"].min() > 1e-3


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("clip", "NoBounds", "must define bounds"),
        ("clip", "Foreign", "ClipRule"),
        ("ratio", "Foreign", "RatioRule"),
        ("surrogate", "EntropyClip", "terms"),
        ("credit", "Foreign", "CreditRule"),
        ("stabilizer", "Foreign", "Divisor"),
        ("clip", "Nothing", "no such class"),
    ],
)
def test_what_is_no_such_rule_is_said_in_one_line(tiny, kind, name, said):
    with pytest.raises(ConfigError) as error:
        load(tiny(*with_rule(kind, name)))
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in (f"algorithm.objective.{kind}", name, said)), (
        text
    )
