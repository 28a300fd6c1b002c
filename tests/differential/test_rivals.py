"""Related methods as their YAML files have them against verl's and TRL's own losses and weights.

Gradients by log-probability are compared, and values where both are the same function: a term sg(f) A log pi has no
value of its own, and our gate is shifted by a constant.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from stppo.config import files as config_files
from stppo.config.loading import build
from tests.differential.cases import cases, referee_settings
from tests.differential.peers import our_loss, trl_case, value_and_gradient, verl_case

pytestmark = pytest.mark.engines

few = settings(referee_settings, max_examples=40)
# Ratios up to e^4: far beyond every bound, and short of verl's clamp of log-ratios at 20 in a sum over 20 tokens.
LOG_RATIOS = (-4.0, 4.0)
TOKEN, ROWS = "token-mean", "seq-mean-token-mean"


def ours(name, case, **changed):
    """Value and gradient of a shipped algorithm, its keys changed as section={key: value}."""
    section = config_files.lineage("algorithm", name)[0][1]["objective"]
    for part, options in changed.items():
        section = section | {part: section[part] | options if isinstance(options, dict) else options}
    rule = build(section, "algorithm.objective")
    return value_and_gradient(our_loss(rule, case), case.logprobs)


@few
@given(case=cases(log_ratios=LOG_RATIOS), c=st.sampled_from([1.5, 3.0, 10.0]))
def test_dual_clip_is_verls_vanilla(referees, case, c):
    mine = ours("dual_clip", case, surrogate={"c": c})
    theirs = verl_case("vanilla", case, 0.2, 0.2, ROWS, clip_ratio_c=c)
    referees.compare("dual clip / verl vanilla", value=(mine[0], theirs[0]), gradient=(mine[1], theirs[1]))


@few
@given(case=cases(log_ratios=LOG_RATIOS), delta=st.sampled_from([0.02, 0.2, 0.7]))
def test_dppo_is_verls(referees, case, delta):
    mine = ours("dppo", case, surrogate={"delta": delta})
    theirs = verl_case("dppo_tv", case, delta, delta, TOKEN, clip_ratio_c=20.0)
    referees.compare("DPPO / verl dppo_tv", gradient=(mine[1], theirs[1]))


@few
@given(case=cases(log_ratios=LOG_RATIOS))
def test_cispo_is_verls(referees, case):
    theirs = verl_case("cispo", case, 1.0, 4.0, TOKEN)
    referees.compare("CISPO / verl cispo", gradient=(ours("cispo", case)[1], theirs[1]))


@few
@given(case=cases(log_ratios=LOG_RATIOS))
def test_sapo_is_verls(referees, case):
    theirs = verl_case("sapo", case, 0.2, 0.2, ROWS, tau_pos=1.0, tau_neg=1.05)
    referees.compare("SAPO / verl sapo", gradient=(ours("sapo", case)[1], theirs[1]))


@few
@given(case=cases(log_ratios=LOG_RATIOS, advantages_per="row"))
def test_gmpo_is_verls(referees, case):
    """verl's divides by lengths + 1e-8, and takes the row's mean advantage."""
    mine, theirs = ours("gmpo", case), verl_case("geo_mean", case, 0.4, 0.4, "not used")
    referees.compare("GMPO / verl geo_mean", value=(mine[0], theirs[0]), gradient=(mine[1], theirs[1]))


@pytest.mark.parametrize(("name", "threshold"), [("tis", 2.0), ("icepop", "0.5_5.0")])
@few
@given(case=cases(log_ratios=LOG_RATIOS))
def test_weights_are_verls_rollout_correction(referees, name, threshold, case):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    # Where no token is left, verl's metrics divide by the weights' sum, 0.
    assume(((case.log_ratio.exp() >= 0.5) & (case.log_ratio.exp() <= 5.0)).any())
    log_ratio = (case.logprobs - case.batch.behaviour_logprobs).where(case.mask, 0.0 * case.logprobs)
    weights, _ = compute_rollout_correction_weights(log_ratio, case.mask.double(), "token", threshold)
    lengths = case.mask.sum(1, keepdim=True)
    expected = -weights * case.advantages.where(case.mask, 0.0 * weights) / lengths / len(case.mask)
    referees.compare(f"{name} / verl rollout correction", gradient=(ours(name, case)[1], expected))


@few
@given(case=cases(log_ratios=LOG_RATIOS, advantages_per="row"))
def test_cispo_is_trls(referees, case):
    theirs = trl_case(case, 0.2, 5.0, "token", "cispo")
    referees.compare("CISPO / TRL cispo", gradient=(ours("cispo", case)[1], theirs[1]))


@few
@given(case=cases(log_ratios=LOG_RATIOS, advantages_per="row"))
def test_sapo_is_trls(referees, case):
    arguments = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    theirs = trl_case(case, 0.2, 0.2, "token", "sapo", **arguments)
    referees.compare("SAPO / TRL sapo", gradient=(ours("sapo", case)[1], theirs[1]))


@few
@given(case=cases(log_ratios=(-0.8, 0.8), advantages_per="row"))
def test_vespo_is_trls(referees, case):
    """TRL clamps the trajectory's log-ratio to [log 1e-8, 20]; 20 tokens of 0.8 stay within."""
    assert case.layout.row_sum(case.log_ratio).abs().max() < 18.4
    arguments = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    theirs = trl_case(case, 0.2, 0.2, "token", "vespo", **arguments)
    referees.compare("VESPO / TRL vespo", gradient=(ours("vespo", case)[1], theirs[1]))


@few
@given(case=cases(log_ratios=LOG_RATIOS, advantages_per="row"), delta=st.sampled_from([1e-4, 0.1, 0.5]))
def test_sequence_mask_is_trls(referees, case, delta):
    mine = ours("sequence_mask", case, surrogate={"delta": delta})
    theirs = trl_case(case, 0.2, 0.2, "token", "grpo", off_policy_mask_threshold=delta)
    referees.compare("sequence mask / TRL off_policy_mask_threshold", gradient=(mine[1], theirs[1]))
