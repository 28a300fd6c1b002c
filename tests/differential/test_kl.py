"""KL estimators against verl's `kl_penalty(logprob, ref_logprob, name)`: samples from the first policy, an
estimate of KL(first || second). Our log-ratio l is log pi_theta - log pi_old, our samples are pi_old's."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from stppo.objectives import Ratio, kl_behaviour_to_policy, kl_policy_to_behaviour
from tests.differential.cases import case_of, cases, referee_settings
from tests.differential.peers import objective, pairs, value_and_gradient

pytestmark = pytest.mark.engines

# verl clamps k3 at 10: r - 1 - l reaches it at l = 2.6 and l = -11, r l - r + 1 = r k3 at the mirrored ends.
BEHAVIOUR_TO_POLICY, POLICY_TO_BEHAVIOUR = (-10.9, 2.6), (-2.6, 10.9)


def verl_kl(logprob, ref_logprob, name):
    from verl.trainer.ppo.core_algos import kl_penalty

    return kl_penalty(logprob, ref_logprob, name)


def mean_over_agent_tokens(case, estimate):
    return value_and_gradient(
        lambda x: estimate(case.layout.gather(x), case.layout.gather(case.batch.behaviour_logprobs)).mean(),
        case.logprobs,
    )


@pytest.mark.parametrize("name", ["k3", "low_var_kl"])
@referee_settings
@given(case=cases(log_ratios=BEHAVIOUR_TO_POLICY))
def test_kl_behaviour_to_policy_is_verls_k3(referees, name, case):
    mine = mean_over_agent_tokens(case, lambda new, old: kl_behaviour_to_policy(new - old))
    theirs = mean_over_agent_tokens(case, lambda new, old: verl_kl(old, new, name))
    referees.compare(f"kl_behaviour_to_policy / verl {name}(old, new)", **pairs(mine, theirs))


@referee_settings
@given(case=cases(log_ratios=POLICY_TO_BEHAVIOUR))
def test_kl_policy_to_behaviour_is_verls_k3_reweighted_to_our_samples(referees, case):
    """verl's k3(new, old) wants samples of the new policy; weighted by the ratio it serves those of the old."""
    mine = mean_over_agent_tokens(case, lambda new, old: kl_policy_to_behaviour(new - old))
    theirs = mean_over_agent_tokens(case, lambda new, old: (new - old).exp() * verl_kl(new, old, "k3"))
    referees.compare("kl_policy_to_behaviour / ratio * verl k3(new, old)", **pairs(mine, theirs))


@referee_settings
@given(case=cases(), name=st.sampled_from(["kl", "k1"]))
def test_reported_k1_is_verls(referees, case, name):
    rule = objective(Ratio("token"), 0.2, 0.2)
    diagnostics = rule(case.logprobs, case.batch, case.advantages).diagnostics
    theirs, _ = mean_over_agent_tokens(case, lambda new, old: verl_kl(old, new, name))
    mine = torch.tensor(diagnostics["kl_behaviour_k1"], dtype=torch.float64)
    referees.compare("kl_behaviour_k1 / verl k1(old, new)", value=(mine, theirs))


@referee_settings
@given(case=cases(log_ratios=BEHAVIOUR_TO_POLICY))
def test_reported_k3_is_verls(referees, case):
    rule = objective(Ratio("token"), 0.2, 0.2)
    diagnostics = rule(case.logprobs, case.batch, case.advantages).diagnostics
    theirs, _ = mean_over_agent_tokens(case, lambda new, old: verl_kl(old, new, "k3"))
    mine = torch.tensor(diagnostics["kl_behaviour_k3"], dtype=torch.float64)
    referees.compare("kl_behaviour_k3 / verl k3(old, new)", value=(mine, theirs))


@referee_settings
@given(case=cases(log_ratios=(-0.5, 0.5)), name=st.sampled_from(["k2", "mse"]))
def test_both_kls_are_verls_k2_to_second_order(case, name):
    """We report no k2 = l^2 / 2. It is the common second-order part of our two estimators, the rest being
    below |l|^3 (Taylor, for |l| <= 1/2): the names mean the same family."""
    l = case.log_ratio
    k2 = verl_kl(l, torch.zeros_like(l), name)
    for estimate in (kl_behaviour_to_policy, kl_policy_to_behaviour):
        assert ((estimate(l) - k2).abs() <= l.abs() ** 3 + 1e-15).all()


def test_verl_clamps_k3_at_10():
    """At l = 5 the estimate is 142; verl says 10 with no gradient. Ours stays unbiased; the clamp hides how far
    a token has gone, exactly where it matters."""
    case = case_of([[1]], [5.0], [0.0])
    mine = mean_over_agent_tokens(case, lambda new, old: kl_behaviour_to_policy(new - old))
    theirs = mean_over_agent_tokens(case, lambda new, old: verl_kl(old, new, "k3"))
    assert [x.sum().item() for x in mine] == pytest.approx([math.exp(5) - 6, math.exp(5) - 1])
    assert [x.sum().item() for x in theirs] == [10.0, 0.0]


def test_verls_k3_plus_has_k2s_gradient():
    """The estimate's value with l as its gradient, which is that of the KL under samples of the policy itself;
    ours differentiates the estimate on fixed samples of pi_old, whose ratio carries that correction."""
    case = case_of([[1]], [0.7], [0.0])
    theirs = mean_over_agent_tokens(case, lambda new, old: verl_kl(new, old, "k3+"))
    k3 = math.exp(-0.7) - 1 + 0.7
    assert [x.sum().item() for x in theirs] == pytest.approx([k3, 0.7])
    mine = mean_over_agent_tokens(case, lambda new, old: kl_policy_to_behaviour(new - old))
    assert mine[1].sum().item() == pytest.approx(math.exp(0.7) * theirs[1].sum().item())
