"""Gradients of scalars of a minibatch with respect to a model's parameters: of a whole batch, or in micro-batches.

In micro-batches the result is that of the whole batch for every objective, because the objective sees all log-probs at
once: they are computed without a graph first; the gradient of a scalar with respect to *them* is exact; and a second
pass, micro-batch by micro-batch with a graph, carries it on to the parameters (chain rule). The price is one more
forward pass.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stppo.agent.policy import Scores, rows_within, score
from stppo.trajectories import Trajectories


def global_norm(tensors: list[Tensor]) -> float:
    """L2 norm of all tensors taken as one vector."""
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors])))


def gradient_of(scalar: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Gradient of a scalar, keeping the graph for the passes that follow."""
    found = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
    return [g if g is not None else torch.zeros_like(p) for g, p in zip(found, parameters, strict=True)]


@dataclass(frozen=True)
class Passes:
    """How a model passes over a batch.

    budget: most padded tokens of a micro-batch; rows of like length go together. A row that is longer has a micro-batch
    of its own, so the longest trajectory sets what memory is needed at least. None: the whole batch at once.
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

    def backward(self, loss: Tensor, watched: dict[str, Tensor]) -> dict[str, float]:
        """Leave the gradient of the loss in the parameters' `grad`; returns the L2 norm of the gradient of each watched
        scalar. To be called once: it ends the graph."""
        if len(self.parts) == 1:
            norms = {
                name: global_norm(gradient_of(scalar, self.parameters)) for name, scalar in watched.items()
            }
            loss.backward()
            return norms
        seeds = {name: self._seeds(scalar) for name, scalar in watched.items()}
        sums = {name: [torch.zeros_like(p) for p in self.parameters] for name in watched}
        for_loss = self._seeds(loss)
        for rows, part in self.parts:
            outputs = self._outputs(self._score(part))
            for name, seed in seeds.items():
                found = torch.autograd.grad(
                    outputs, self.parameters, self._of(seed, rows, part), retain_graph=True, allow_unused=True
                )
                for total, gradient in zip(sums[name], found, strict=True):
                    if gradient is not None:
                        total += gradient
                del found
            torch.autograd.backward(outputs, self._of(for_loss, rows, part))
        return {name: global_norm(total) for name, total in sums.items()}

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
