"""Rules of one's own, in a module outside the package: named in a config they train, are recorded and resume.

Each stands for a method of related work, in few lines; none is claimed to be exact.
"""

import sys

import pytest

from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.loading import load
from tests.conftest import TINY
from tests.training_runs import assert_same_metrics, interrupted, run, tables

MODULE = "own_rules_of_a_user"
SOURCE = '''
from dataclasses import dataclass

import torch

from stppo.objectives import Bounds, ClipRule, CreditRule, Divisor, Estimate, Penalty, RatioRule, Weight


@dataclass(frozen=True)
class CentredTurns(RatioRule):
    """Log-ratios of turns, centred over the batch at each place of a turn in its trajectory (after GRPO-Guard)."""

    granularity = "turn"
    sees_batch = True

    def ratio(self, log_ratio, layout):
        first = layout.row_turns.cumsum(0) - layout.row_turns
        place = torch.arange(len(layout.turn_rows)) - first[layout.turn_rows]
        logs = layout.turn_mean(log_ratio)
        sums = logs.new_zeros(int(place.max()) + 1).index_add(0, place, logs)
        return (logs - (sums / place.bincount())[place].detach()).exp()[layout.turns]


@dataclass(frozen=True)
class EntropyClip(ClipRule):
    """Wider bounds for tokens of high entropy (after SSPO)."""

    epsilon: float = 0.2

    def bounds(self, tokens):
        width = self.epsilon * (0.5 + tokens.known("entropy"))
        return Bounds(1 - width.clamp(max=0.9), 1 + width)


@dataclass(frozen=True)
class ProbabilityMask(Weight):
    """Drops tokens whose probability has moved too far, and caps the weight of the others (after DPPO)."""

    delta: float = 0.2
    cap: float = 20.0

    def factor(self, tokens, bounds):
        moved = tokens.known("behaviour_logprobs").exp() * torch.expm1(tokens.log_ratio.detach())
        far = (tokens.advantages.sign() * moved) > self.delta
        return torch.where(far, 0.0, tokens.ratio.detach().clamp(max=self.cap))


@dataclass(frozen=True, kw_only=True)
class MedianBaseline(CreditRule):
    """R minus the iteration's median return."""

    whiten: bool = False

    def estimate(self, trajectories, layout, values):
        returns = trajectories.returns
        return Estimate((returns - returns.median() + 0.1)[layout.rows])


@dataclass(frozen=True)
class BySampleSize(Divisor):
    """Shorter steps on stale batches: times the root of the effective sample size (after VCPO)."""

    estimator = "effective_sample_size"

    def divisor(self, value):
        return value**-0.5


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
SHORT = [
    "training.iterations=2",
    "training.checkpoint_every=1",
    "training.learning_rate=0.01",
    "training.trajectories_per_iteration=8",
]
RULES = {
    "ratio": "CentredTurns",
    "clip": "EntropyClip",
    "surrogate": "ProbabilityMask",
    "credit": "MedianBaseline",
    "stabilizer": "BySampleSize",
    "stabilizer ": "KeepLikely",
}


@pytest.fixture(scope="module")
def own_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop(MODULE, None)


def with_rule(kind, name):
    """Overrides that put a rule, with its defaults, in the place of another."""
    key = f"algorithm.objective.{kind.strip()}"
    return ["algorithm=turn_ppo", f"~{key}", f"+{key}._target_={MODULE}.{name}"]


@pytest.fixture(scope="module")
def shipped(barely_trained, tmp_path_factory):
    """The updates of the algorithm that each rule is put into."""
    folder = tmp_path_factory.mktemp("shipped")
    run(compose([*TINY, "algorithm=turn_ppo", *SHORT]), folder, barely_trained)
    return tables(folder)[0]


@pytest.mark.parametrize(("kind", "name"), RULES.items())
def test_a_rule_of_ones_own_trains_is_recorded_and_resumes(
    own_module, shipped, tiny, barely_trained, tmp_path, kind, name
):
    config = tiny(*with_rule(kind, name), *SHORT)
    run(config, tmp_path / "whole", barely_trained)
    interrupted(config, tmp_path / "resumed", barely_trained, after=1)
    run(config, tmp_path / "resumed", barely_trained)
    assert_same_metrics(tmp_path / "whole", tmp_path / "resumed")

    updates = tables(tmp_path / "whole")[0]
    assert list(updates) == list(shipped)
    assert updates["update_norm"].gt(0).all()
    assert updates["update_norm"].iloc[-1] != shipped["update_norm"].iloc[-1]
    assert shipped["clip_high"].to_numpy() == pytest.approx(1.2)
    moved = updates["clip_high"].max() - updates["clip_high"].min() > 1e-3
    assert moved == (name == "EntropyClip")


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("clip", "NoBounds", ["algorithm.objective.clip", "NoBounds", "must define bounds"]),
        ("clip", "Foreign", ["algorithm.objective.clip", "Foreign", "ClipRule", "write its bounds"]),
        ("ratio", "Foreign", ["algorithm.objective.ratio", "Foreign", "RatioRule", "write its ratio"]),
        ("surrogate", "EntropyClip", ["algorithm.objective.surrogate", "EntropyClip", "write its terms"]),
        ("credit", "Foreign", ["algorithm.objective.credit", "Foreign", "CreditRule", "write its estimate"]),
        (
            "stabilizer",
            "Foreign",
            ["algorithm.objective.stabilizer", "Foreign", "Divisor and write its divisor, or"],
        ),
        ("clip", "Nothing", [f"algorithm.objective.clip._target_ = {MODULE}.Nothing", "no such class"]),
    ],
)
def test_what_is_no_such_rule_is_said_in_one_line(own_module, tiny, kind, name, said):
    with pytest.raises(ConfigError) as error:
        load(tiny(*with_rule(kind, name)))
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in said), text
