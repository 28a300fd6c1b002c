"""What it costs to keep a model's text in place of its tokens: an experiment, with SmolLM2 after `stppo fetch smollm2`.

    python benchmarks/retokenised.py measure --data DIR --scratch FOLDER [--questions 300]
    python benchmarks/retokenised.py train --data DIR --out FOLDER [OVERRIDE...]

`measure` plays test questions, encodes what the model wrote again from its text, and asks the same weights for the log-probs
of both. `train` is `stppo train preset=smollm`, but each batch is trained on as it encodes again, with log-probs scored anew:
what a trainer does that gets text from its engine. DIR holds musique/records.jsonl and 2wikimultihopqa/records.jsonl.
"""

import argparse
import dataclasses
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from stppo.config.composition import compose
from stppo.config.loading import LoadedRun, load
from stppo.config.provenance import git_state, hardware, versions
from stppo.files import parse_json, write_json
from stppo.policy.policy import load_tokenizer
from stppo.rollout import engines
from stppo.rollout.mismatch import trainer_logprobs
from stppo.rollout.rollout import Rollout
from stppo.rollout.rollout_torch import TorchRollout
from stppo.training.run import Run
from stppo.training.warm_start import ensure_warm_start, evaluation_questions, load_warm_start
from stppo.trajectories import Trajectories

OUT = Path(__file__).parents[1] / "results" / "reference" / "retokenised.json"
BENCHMARKS = ("musique", "2wikimultihopqa")
BAND = (0.8, 1.2)  # PPO's clip range
TEMPERATURES = (1.0, 1.3)
TOKENS_AT_ONCE = 4096


def encoded_again(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of the text of a turn; control tokens stay what they are."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def retokenised(batch: Trajectories, tokenizer: PreTrainedTokenizerBase) -> Trajectories:
    """The batch (B, T) with each turn as its text encodes; observations and rewards stay. Log-probs are 0, to be scored."""
    rows = []
    for row in range(len(batch)):
        length = int(batch.lengths[row])
        parts = zip(
            batch.tokens[row, :length].tolist(),
            batch.agent_mask[row, :length].tolist(),
            batch.rewards[row, :length].tolist(),
            strict=True,
        )
        tokens, mask, rewards = [], [], []
        for by_agent, part in groupby(parts, lambda entry: entry[1]):
            ids, _, paid = zip(*part, strict=True)
            new = encoded_again(list(ids), tokenizer) if by_agent else list(ids)
            tokens += new
            mask += [by_agent] * len(new)
            rewards += [0.0] * (len(new) - 1) + [sum(paid)]
        rows.append((torch.tensor(tokens), torch.tensor(mask), torch.tensor(rewards)))
    tokens, mask, rewards = (pad_sequence(part, batch_first=True) for part in zip(*rows, strict=True))
    return Trajectories(
        tokens=tokens,
        lengths=torch.tensor([len(ids) for ids, *_ in rows]),
        agent_mask=mask,
        behaviour_logprobs=torch.zeros(tokens.shape),
        rewards=rewards,
        group_ids=batch.group_ids,
        policy_updates=batch.policy_updates,
    )


class Retokenising(TorchRollout):
    """PyTorch's sampler, whose training batches forget the tokens: what is greedy or for evaluation stays as it is."""

    training = True

    def for_evaluation(self) -> "Retokenising":
        other = super().for_evaluation()
        other.training = False
        return other

    def collect(
        self, policy, questions, generator, group_ids=None, greedy=False, policy_updates=0, forced=None
    ):
        found = super().collect(policy, questions, generator, group_ids, greedy, policy_updates, forced)
        if not self.training or greedy or forced is not None:
            return found
        batch = retokenised(found.trajectories, self.tokenizer)
        with torch.no_grad():
            scored = trainer_logprobs(policy, batch, self.config.temperature, TOKENS_AT_ONCE)
        return Rollout(dataclasses.replace(batch, behaviour_logprobs=scored), found.episodes)


# ---- ratios on fresh data -----------------------------------------------------------------------


def spans(batch: Trajectories, again: Trajectories, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """The shortest pieces of text that both tokenisations have in common, a row each.

    trajectory, turn: numbers; before, after: tokens; same: whether it is one token in both; log_ratio: nats, log-prob of
    the piece as it encodes again less that of the piece as it was sampled. Tokens' strings are bytes, as in GPT-2."""
    rows = []
    old, new = (_turns(part, tokenizer) for part in (batch, again))
    for turn, (mine, other) in enumerate(zip(old, new, strict=True)):
        ends = [list(accumulate(map(len, part.pieces))) for part in (mine, other)]
        common = set(ends[0]).intersection(ends[1])
        if "".join(mine.pieces) != "".join(other.pieces):  # half a character was sampled: one piece
            ends, common = [[*cuts[:-1], -1] for cuts in ends], {-1}
        begins = [0, 0]
        for cut in (cut for cut in ends[0] if cut in common):
            places = [slice(begin, cuts.index(cut) + 1) for begin, cuts in zip(begins, ends, strict=True)]
            begins = [place.stop for place in places]
            ids = [part.ids[place] for part, place in zip((mine, other), places, strict=True)]
            logs = [sum(part.logprobs[place]) for part, place in zip((mine, other), places, strict=True)]
            rows.append(
                {
                    "trajectory": mine.trajectory,
                    "turn": turn,
                    "before": len(ids[0]),
                    "after": len(ids[1]),
                    "same": ids[0] == ids[1],
                    "log_ratio": logs[1] - logs[0],
                }
            )
    return pd.DataFrame(rows)


class Turn(NamedTuple):
    """pieces: the tokens' byte strings; logprobs: nats."""

    trajectory: int
    ids: list[int]
    pieces: list[str]
    logprobs: list[float]


def _turns(batch: Trajectories, tokenizer: PreTrainedTokenizerBase) -> list[Turn]:
    layout = batch.layout
    lengths = layout.turn_lengths.tolist()
    ids = layout.gather(batch.tokens).split(lengths)
    logprobs = layout.gather(batch.behaviour_logprobs).double().split(lengths)
    return [
        Turn(row, part.tolist(), tokenizer.convert_ids_to_tokens(part.tolist()), logs.tolist())
        for row, part, logs in zip(layout.turn_rows.tolist(), ids, logprobs, strict=True)
    ]


def summary(pieces: pd.DataFrame) -> dict[str, float]:
    """Shares, and how many ratios leave BAND: of single tokens, and of the geometric mean and the product of a turn's or a
    trajectory's, over the tokens that were sampled."""
    changed = ~pieces.same
    turns, trajectories = (pieces.groupby(key) for key in ("turn", "trajectory"))
    drifted = ~turns.same.transform("all")
    found = {
        "turns": turns.ngroups,
        "turns_changed": 1 - turns.same.all().mean(),
        "trajectories": trajectories.ngroups,
        "trajectories_changed": 1 - trajectories.same.all().mean(),
        "tokens": int(pieces.before.sum()),
        "tokens_changed": pieces.before[changed].sum() / pieces.before.sum(),
        "tokens_after": pieces.after.sum() / pieces.before.sum(),
        "log_ratio_of_changed_piece": pieces.log_ratio[changed].median(),
        "outside_token": _outside(pieces.log_ratio[pieces.same]),
        "outside_token_in_changed_turn": _outside(pieces.log_ratio[pieces.same & drifted]),
        "outside_changed_piece": _outside(pieces.log_ratio[changed]),
    }
    for name, groups in (("turn", turns), ("trajectory", trajectories)):
        total, count = groups.log_ratio.sum(), groups.before.sum()
        found[f"outside_{name}_mean"] = _outside(total / count)
        found[f"outside_{name}_product"] = _outside(total)
        found[f"median_{name}_product"] = float(total[~groups.same.all()].median())
    return {name: round(float(value), 5) for name, value in found.items()}


def _outside(log_ratio: pd.Series) -> float:
    ratio = torch.tensor(log_ratio.to_numpy()).exp()
    return float(((ratio < BAND[0]) | (ratio > BAND[1])).double().mean())


@torch.no_grad()
def measure(run: LoadedRun, start: Path, questions: int) -> dict[str, dict[str, float]]:
    """`summary` at each of TEMPERATURES, of test questions played by the warm start."""
    policy, *_ = load_warm_start(start, run.settings.policy.attention)
    tokenizer = run.world.tokenizer or load_tokenizer(start)
    asked = evaluation_questions(run.world, questions)
    found = {}
    for temperature in TEMPERATURES:
        rollout = dataclasses.replace(run.settings.rollout, temperature=temperature)
        sampler = TorchRollout(run.world.environment, tokenizer, rollout)
        batch = sampler.collect(policy, asked, torch.Generator().manual_seed(0)).trajectories
        pair = [_scored(policy, part, temperature) for part in (batch, retokenised(batch, tokenizer))]
        found[str(temperature)] = summary(spans(*pair, tokenizer))
        print(temperature, found[str(temperature)], flush=True)
    return found


def _scored(policy, batch: Trajectories, temperature: float) -> Trajectories:
    logprobs: Tensor = trainer_logprobs(policy, batch, temperature, TOKENS_AT_ONCE)
    return dataclasses.replace(batch, behaviour_logprobs=logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "train"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, help="where measure's warm start is, or is made")
    parser.add_argument("--out", type=Path, help="of train: the run's folder")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    records = ",".join(f"{name}: {options.data / name / 'records.jsonl'}" for name in BENCHMARKS)
    config = compose(["preset=smollm", f"world.records={{{records}}}", *options.overrides])
    if options.what == "train":
        engines.ENGINES["torch"] = f"{Retokenising.__module__}.{Retokenising.__name__}"
        run = load(config)
        print(Run(run, options.out, ensure_warm_start(run)).train())
        return
    run = load(config)
    start = options.scratch if options.scratch and options.scratch.is_dir() else ensure_warm_start(run)
    record = parse_json(OUT.read_bytes()) if OUT.is_file() else {}
    record["ratios"] = measure(run, start, options.questions)
    record["provenance"] = {"versions": versions(), "hardware": hardware(), **git_state()}
    write_json(OUT, record)


if __name__ == "__main__":
    main()
