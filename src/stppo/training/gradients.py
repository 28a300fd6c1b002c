"""Gradients of scalars of a minibatch with respect to a model's parameters: of a whole batch, or in
micro-batches.

In micro-batches the result is that of the whole batch for every objective, because the objective sees all
log-probs at once: they are computed without a graph first; the gradient of a scalar with respect to *them* is
exact; and a second pass, micro-batch by micro-batch with a graph, carries it on to the parameters (chain
rule). The price is one more forward pass."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stppo.policy.policy import Scores, rows_within, score
from stppo.trajectories import Trajectories


def global_norm(tensors: list[Tensor]) -> float:
    """L2 norm of all tensors taken as one vector."""
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors])))


@dataclass(frozen=True)
class WatchedNorm:
    """A scalar of the scores, and the parameters over which the norm of its gradient is wanted."""

    scalar: Tensor
    parameters: list[Tensor]


@dataclass(frozen=True)
class Passes:
    """How a model passes over a batch.

    budget: most padded tokens of a micro-batch; rows of like length go together. A row that is longer has a
    micro-batch of its own, so the longest trajectory sets what memory is needed at least. None: the whole
    batch at once.
    chunks: length-sorted chunks of a batch that is not cut (they share one graph: less padding, same memory).
    """

    budget: int | None = None
    chunks: int = 1

    def cut(self, batch: Trajectories) -> list[tuple[Tensor, Trajectories]]:
        """The micro-batches, each with its rows in the batch; the batch itself where it fits."""
        budget, lengths = self.budget, batch.lengths.tolist()
        if budget is None or len(lengths) * max(lengths) <= budget:
            return [(torch.arange(len(lengths)), batch)]
        return [(torch.tensor(rows), batch.select(rows)) for rows in rows_within(lengths, budget)]

    def chunks_of(self, parts: list[tuple[Tensor, Trajectories]]) -> int:
        """Chunks for each part: rows of a micro-batch are of like length already."""
        return self.chunks if len(parts) == 1 else 1


def join(parts: list[tuple[Tensor, Tensor]], like: Tensor) -> Tensor:
    """Values (b, t) of the rows (b,) of a batch, put together as (B, T) with zeros beyond t."""
    if len(parts) == 1:
        return parts[0][1]
    out = parts[0][1].new_zeros(like.shape)
    for rows, values in parts:
        out[rows, : values.shape[1]] = values
    return out


def _by_scalar(
    watched: dict[str, WatchedNorm],
) -> list[tuple[Tensor, list[Tensor], dict[str, list[Tensor]]]]:
    """Each scalar once, with all parameters that its norms are over, and these norms' parameters by name."""
    found: dict[int, tuple[Tensor, dict[Tensor, None], dict[str, list[Tensor]]]] = {}
    for name, norm in watched.items():
        _, union, wanted = found.setdefault(id(norm.scalar), (norm.scalar, {}, {}))
        union.update(dict.fromkeys(norm.parameters))
        wanted[name] = norm.parameters
    return [(scalar, list(union), wanted) for scalar, union, wanted in found.values()]


def _norms(gradients: dict[Tensor, Tensor | None], wanted: dict[str, list[Tensor]]) -> dict[str, float]:
    """Each wanted norm, of gradients by parameter; one of None is zero."""
    return {
        name: global_norm([g for p in parameters if (g := gradients[p]) is not None] or [torch.zeros(1)])
        for name, parameters in wanted.items()
    }


class PolicyPass:
    """Scores of a minibatch, and the way back from scalars of them to the policy's parameters.

    scores: what scalars are made of, on the batch's device; the entropy has a gradient only on request.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        batch: Trajectories,
        passes: Passes,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> None:
        self.policy, self.temperature, self.entropy_gradient = policy, temperature, entropy_gradient
        self.parts = passes.cut(batch)
        self.chunks = passes.chunks_of(self.parts)
        if len(self.parts) == 1:
            self.scores = self._score(batch)
            return
        with torch.no_grad():
            scored = [(rows, self._score(part)) for rows, part in self.parts]
        self.scores = Scores(
            *(
                join([(rows, getattr(scores, name)) for rows, scores in scored], batch.tokens)
                for name in ("logprobs", "entropy", "squared_prob_sum")
            )
        )
        self.scores.logprobs.requires_grad_()
        self.scores.entropy.requires_grad_(entropy_gradient)

    @functools.cached_property
    def parameters(self) -> list[Tensor]:
        return [p for p in self.policy.parameters() if p.requires_grad]

    def _score(self, part: Trajectories) -> Scores:
        return score(self.policy, part, self.temperature, self.chunks, self.entropy_gradient)

    def backward(self, loss: Tensor, watched: dict[str, WatchedNorm]) -> dict[str, float]:
        """Leave the gradient of the loss in the parameters' `grad`; returns the L2 norms that are watched, by
        name.

        A scalar takes one pass, however many norms of it are wanted, and no further down than their
        parameters lie. To be called once: it ends the graph."""
        passes = _by_scalar(watched)
        if len(self.parts) == 1:
            norms: dict[str, float] = {}
            for scalar, parameters, wanted in passes:
                found = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
                norms |= _norms(dict(zip(parameters, found, strict=True)), wanted)
            loss.backward()
            return norms
        seeds = [self._seeds(scalar) for scalar, _, _ in passes]
        sums = [{p: torch.zeros_like(p) for p in parameters} for _, parameters, _ in passes]
        for_loss = self._seeds(loss)
        for rows, part in self.parts:
            outputs = self._outputs(self._score(part))
            for seed, total in zip(seeds, sums, strict=True):
                found = torch.autograd.grad(
                    outputs, list(total), self._of(seed, rows, part), retain_graph=True, allow_unused=True
                )
                for summed, gradient in zip(total.values(), found, strict=True):
                    if gradient is not None:
                        summed += gradient
                del found
            torch.autograd.backward(outputs, self._of(for_loss, rows, part))
        norms = {}
        for total, (_, _, wanted) in zip(sums, passes, strict=True):
            norms |= _norms(total, wanted)
        return norms

    def _outputs(self, scores: Scores) -> list[Tensor]:
        return [scores.logprobs, scores.entropy] if self.entropy_gradient else [scores.logprobs]

    def _seeds(self, scalar: Tensor) -> list[Tensor]:
        """Gradient of a scalar with respect to the scores of the whole minibatch."""
        leaves = self._outputs(self.scores)
        found = torch.autograd.grad(scalar, leaves, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]

    @staticmethod
    def _of(seeds: list[Tensor], rows: Tensor, part: Trajectories) -> list[Tensor]:
        return [seed[rows, : part.tokens.shape[1]] for seed in seeds]
