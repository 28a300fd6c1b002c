"""What the rules of an objective may look at: everything known of a minibatch's agent tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stppo.trajectories import Layout


@dataclass(frozen=True, eq=False)
class Tokens:
    """The N agent tokens of a minibatch, (N,) each; a rule sees all of them at once.

    log_ratio           log pi_theta - log pi_old of each token, nats, with graph
    ratio               w of the objective's ratio rule, shared by the tokens of a segment, with graph
    advantages          without graph
    layout              rows, turns, sentences: `layout.segments(name)`
    behaviour_logprobs  log pi_old, nats; None for callers that know ratios alone
    entropy             of the policy's next-token distribution, nats, without graph; None likewise
    proximal            log pi_prox - log pi_old, nats, without graph, of a policy between the one that
                        sampled and this one, see `SurrogateRule.proximal`; None likewise

    Training knows all that a rule asks for. It asks for one of the last three by `known`.
    """

    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    layout: Layout
    behaviour_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    proximal: Tensor | None = None

    def known(self, name: str) -> Tensor:
        """(N,) `behaviour_logprobs`, `entropy` or `proximal`; ValueError for another name and where the
        caller did not give it."""
        if name not in ("behaviour_logprobs", "entropy", "proximal"):
            raise ValueError(f"known({name!r}): must be behaviour_logprobs, entropy or proximal")
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{name}: a rule of this objective reads it, but the caller gave none")
        return value


def per_token(values: Tensor, tokens: Tokens, what: str) -> Tensor:
    """`values` of a rule; ValueError naming it unless there is one for each agent token."""
    shape = getattr(values, "shape", None)
    if shape != tokens.ratio.shape:
        got = type(values).__name__ if shape is None else tuple(shape)
        raise ValueError(f"{what}: expected one value a token, {tuple(tokens.ratio.shape)}, got {got}")
    return values
