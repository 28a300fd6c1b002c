"""The random batches reach the corners that the referees are there for; otherwise agreement says little."""

import pytest
from hypothesis import given

from stppo.objectives import Ratio
from tests.differential.cases import cases, referee_settings
from tests.differential.peers import objective, our_loss, value_and_gradient

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("granularity", ["token", "turn", "sequence"])
def test_batches_reach_the_corners(granularity):
    seen = []
    rule = objective(Ratio(granularity), 0.2, 0.2)

    @referee_settings
    @given(case=cases())
    def look(case):
        diagnostics = rule(case.logprobs, case.batch, case.advantages).diagnostics
        gradient = value_and_gradient(our_loss(rule, case), case.logprobs)[1]
        clipped, advantages = diagnostics["clip_fraction"], case.layout.gather(case.advantages)
        both_signs = advantages.min() < 0 < advantages.max()
        seen.append(
            {
                "all clipped": clipped == 1,
                "some clipped": 0 < clipped < 1,
                "none clipped, with a gradient": clipped == 0 and gradient.abs().max() > 1e-3,
                "a gradient": gradient.abs().max() > 1e-3,
                "log-ratio beyond 20": case.log_ratio.abs().max() > 20,
                "several rows": len(case.mask) > 1,
                "several turns": case.layout.row_turns.max() > 1,
                "single-token turns": (case.layout.turn_lengths == 1).any(),
                "one agent token only": len(case.log_ratio) == 1,
                "no advantage": not advantages.any(),
                "advantages of one sign": advantages.any() and not both_signs,
                "advantages of both signs": both_signs,
            }
        )

    look()
    counts = {corner: sum(bool(batch[corner]) for batch in seen) for corner in seen[0]}
    # Once is enough: hypothesis mixes constants of our sources into its draws, so counts change with any module.
    missed = [corner for corner, n in counts.items() if not n]
    assert counts["a gradient"] >= len(seen) // 3
    assert len(seen) >= 100 and not missed
