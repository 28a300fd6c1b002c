"""What turns are paid: by worlds, in roll-outs, to each credit; and what is refused."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stppo.config.algorithms import algorithms
from stppo.config.composition import compose
from stppo.config.files import ConfigError
from stppo.config.identity import fingerprint, identity_section
from stppo.config.loading import build, load
from stppo.figures.trajectory_view import show_trajectories
from stppo.objectives import BatchBaseline, GroupCentred, GroupNormalised, LeaveOneOut, TokenGAE
from stppo.objectives.rivals import LeaveOneOutKept, VarianceFiltered
from stppo.objectives.rivals_2026 import EqualStates, TrainedCritic
from stppo.policy.policy import load_policy
from stppo.retrieval.bm25 import BM25Retriever
from stppo.retrieval.documents import Document
from stppo.rollout.rollout import RolloutConfig
from stppo.rollout.rollout_torch import TorchRollout
from stppo.training.metrics import rollout_metrics, success_of, trajectory_records
from stppo.training.monte_carlo import true_values
from stppo.training.warm_start import made_for
from stppo.trajectories import Trajectories
from stppo.world import BenchmarkWorld, DemonstrationNoise, SyntheticWorld, TurnRewards, play
from stppo.world.environment import SearchEnvironment
from stppo.world.protocol import Protocol, Question
from tests.conftest import TINY
from tests.objectives_cases import batch_from_turns, normal
from tests.sample_data import DATA, real_data
from tests.test_world_records import HOTPOT

DOCUMENTS = [
    Document("0", "Norway", "The capital of Norway is Oslo."),
    Document("1", "The Oslo", "Oslo was founded by Harald."),
    Document("2", "France", "Paris is large."),
]
QUESTION = Question("q", "founder", ("Harald",), (("Norway", ""), ("oslo", "")), 2)
NORWAY, OSLO, PARIS = (f"<search> {word} </search>" for word in ("capital", "founded", "Paris"))
ANSWER, WRONG, BROKEN = "<answer> Harald </answer>", "<answer> Olaf </answer>", "capital"


def played(*texts, budget=3, question=QUESTION, **turn_rewards):
    environment = SearchEnvironment(
        Protocol(turn_budget=budget), BM25Retriever(DOCUMENTS), 1, turn_rewards=turn_rewards
    )
    episode = environment.start(question)
    for text in texts:
        environment.step([episode], [text])
    return environment, episode


@pytest.mark.parametrize(
    ("texts", "found", "well_formed"),
    [
        ([NORWAY, OSLO, ANSWER], [1, 1, 0], [1, 1, 1]),
        ([NORWAY, NORWAY, ANSWER], [1, 0, 0], [1, 1, 1]),  # a title is found once
        ([PARIS, BROKEN, OSLO, WRONG], [0, 0, 1, 0], [1, 0, 1, 1]),
        ([BROKEN, PARIS, PARIS, NORWAY], [0, 0, 0, 0], [0, 1, 1, 0]),  # the last turn must answer
    ],
)
def test_a_turn_is_paid_for_a_new_gold_title_and_for_its_form(texts, found, well_formed):
    environment, episode = played(*texts, found=0.2, format=0.05)
    assert episode.reward == (texts[-1] == ANSWER)
    expected = [0.2 * f + 0.05 * w for f, w in zip(found, well_formed, strict=True)]
    expected[-1] += episode.reward
    assert environment.rewards(episode) == pytest.approx(expected)
    assert environment.without_search().rewards(episode) == environment.rewards(episode)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("texts", [[NORWAY, OSLO, ANSWER], [PARIS, BROKEN, OSLO, WRONG], [ANSWER], [NORWAY]])
def test_the_potential_form_pays_back(texts, gamma):
    """By the definition, with the potential of each state looked up in the plain form's payments."""
    bonus, episode = played(*texts, found=0.2, format=0.05)
    shaped, _ = played(*texts, found=0.2, format=0.05, form="potential", gamma=gamma)
    earned = bonus.rewards(episode)
    earned[-1] -= episode.reward
    phi = [sum(earned[:turn]) for turn in range(len(texts))] + [0.0]
    expected = [gamma * phi[k + 1] - phi[k] for k in range(len(texts))]
    expected[-1] += episode.reward
    paid = shaped.rewards(episode)
    assert paid == pytest.approx(expected)
    discounted = sum(gamma**turn * reward for turn, reward in enumerate(paid))
    assert discounted == pytest.approx(gamma ** (len(texts) - 1) * episode.reward)
    assert bonus.rewards(episode) != pytest.approx(paid) or texts == [ANSWER]


def test_nothing_is_paid_for_what_the_prompt_shows():
    environment = SearchEnvironment(
        Protocol(turn_budget=2), BM25Retriever(DOCUMENTS), 1, retrieve_first=True, turn_rewards={"found": 0.2}
    )
    episode = environment.start(replace(QUESTION, text="capital of Norway"))
    assert episode.given[0].title == "Norway"
    environment.step([episode], [NORWAY])
    environment.step([episode], [ANSWER])
    assert environment.rewards(episode) == [0.0, 1.0]


@pytest.mark.parametrize("noise", [None, DemonstrationNoise(0.4, 0.3, 0.3)])
def test_the_synthetic_world_pays_for_the_chain_s_documents(noise):
    paying = SyntheticWorld(n_entities=300, n_name_parts=20, n_train=60, n_validation=8, n_test=8,
                            turn_rewards={"found": 0.2, "format": 0.04})  # fmt: skip
    plain = replace(paying, turn_rewards=None)
    questions = plain.questions("train")
    assert questions == paying.questions("train")
    kinds = set()
    for episode in play(paying, questions, random.Random(0), noise):
        chain, seen, expected = {title for title, _ in episode.question.gold_paragraphs}, set(), []
        for turn in episode.turns:
            titles = {document.title for document in turn.documents}
            acts = turn.action.kind == "answer" or bool(titles)  # a search in a known word finds something
            expected.append(0.2 * bool((titles & chain) - seen) + 0.04 * acts)
            seen |= titles
        expected[-1] += episode.reward
        assert paying.environment.rewards(episode) == pytest.approx(expected)
        assert plain.environment.rewards(episode) == [0.0] * (len(expected) - 1) + [episode.reward]
        assert sum(expected) - episode.reward < 1
        kinds.add((len(expected), episode.reward))
    assert len(kinds) > 3


def records(folder, *found):
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in found))
    return file


def test_a_benchmark_pays_for_gold_titles_where_records_name_them(tmp_path):
    world = BenchmarkWorld(records=records(tmp_path, HOTPOT), corpus="contexts", top_k=1,
                           turn_rewards={"found": 0.1})  # fmt: skip
    (question,) = world.questions("test")
    (episode,) = play(world, [question], random.Random(0))
    assert world.environment.rewards(episode) == pytest.approx([0.1, 0.1, 1.0])
    with_title = replace(question, gold_paragraphs=question.gold_paragraphs[:1])
    assert sum(world.environment.rewards(replace_question(episode, with_title))) == pytest.approx(1.1)
    without = replace(question, gold_paragraphs=())
    assert world.environment.rewards(replace_question(episode, without)) == [0.0, 0.0, 1.0]


def replace_question(episode, question):
    episode.question = question
    return episode


def test_a_benchmark_without_gold_titles_is_refused_for_training_and_a_part_is_logged(tmp_path, caplog):
    asked = [{"question": f"who is {i}", "answer": [str(i)]} for i in range(40)]
    (tmp_path / "nq").mkdir()
    nq = records(tmp_path / "nq", *asked)
    options = {"benchmark": "nq", "corpus": DATA, "turn_rewards": {"found": 0.1}}
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "0", "contents": "\\"T\\"\\nx"}\n')
    options["corpus"] = corpus
    world = BenchmarkWorld(train="nq", records=nq, **options)
    with pytest.raises(ValueError, match=r"turn_rewards.found: the records of nq do not say .* leave it out"):
        world.questions("train")
    hotpot = records(tmp_path, *({**HOTPOT, "question": f"{HOTPOT['question']} {i}"} for i in range(40)))
    mixed = BenchmarkWorld(train=["nq", "hotpotqa"], records={"nq": nq, "hotpotqa": hotpot}, **options)
    assert mixed.questions("train")
    assert "the records of nq do not say which titles are gold; it is paid on the other" in caplog.text
    form = BenchmarkWorld(train="nq", records=nq, **options | {"turn_rewards": {"format": 0.1}})
    assert form.questions("train")


@real_data
@pytest.mark.parametrize("benchmark", ["hotpotqa", "2wikimultihopqa", "musique"])
def test_real_records_pay_once_for_each_gold_title(benchmark):
    world = BenchmarkWorld(benchmark, records=DATA / benchmark / "records.jsonl", corpus=DATA / "corpus.jsonl",
                           test_limit=40, turn_budget=5, turn_rewards={"found": 0.1})  # fmt: skip
    rewards, titles = [], []
    for episode in play(world, world.questions("test"), random.Random(0)):
        paid = world.environment.rewards(episode)
        rewards.append(sum(paid) - episode.reward)
        titles.append(len({title.lower() for title, _ in episode.question.gold_paragraphs}))
    assert all(0 <= paid <= 0.1 * n + 1e-9 for paid, n in zip(rewards, titles, strict=True))
    assert sum(rewards) > 0.5 * 0.1 * sum(titles), "the searcher asks for the gold titles"


# --- roll-outs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled(barely_trained):
    """make(max_tokens, **turn_rewards) -> world, policy, sampler, roll-out"""
    policy = load_policy(barely_trained)

    def make(max_tokens=192, n=24, **turn_rewards):
        world = replace(build(compose(TINY)["world"], "world"), turn_rewards=turn_rewards or None)
        sampler = TorchRollout(world.environment, world.tokenizer, RolloutConfig(max_tokens=max_tokens))
        generator = torch.Generator().manual_seed(1)
        return world, policy, sampler, sampler.collect(policy, world.questions("train")[:n], generator)

    return make


def ends_of(batch, row):
    ids = batch.turn_ids[row].tolist()
    return [t for t, turn in enumerate(ids) if turn >= 0 and ids[t + 1 : t + 2] != [turn]]


def test_a_roll_out_has_each_reward_on_the_last_token_of_its_turn(sampled):
    world, _, _, plain = sampled()
    paying, _, _, rollout = sampled(found=0.2, format=0.04)
    batch = rollout.trajectories
    assert torch.equal(batch.tokens, plain.trajectories.tokens), "the world itself is the same"
    for row, episode in enumerate(rollout.episodes):
        ends, expected = ends_of(batch, row), torch.zeros(batch.tokens.shape[1])
        for end, reward in zip(ends, paying.environment.rewards(episode), strict=True):
            expected[end] = reward
        torch.testing.assert_close(batch.rewards[row], expected)
        assert plain.trajectories.rewards[row, ends[-1]] == plain.episodes[row].reward == episode.reward
    assert (batch.turn_rewards > 0).sum() > len(batch) and (plain.trajectories.rewards != 0).sum() < len(
        batch
    )
    assert success_of(rollout) == success_of(plain) == rollout_metrics(rollout, 1.0)["success_train"]
    assert rollout_metrics(rollout, 1.0)["reward_train"] > rollout_metrics(plain, 1.0)["reward_train"]


def test_a_trajectory_that_runs_out_of_room_pays_its_potential_back(sampled):
    world, _, _, rollout = sampled(90, found=0.2, format=0.04, form="potential")
    cut = [row for row, episode in enumerate(rollout.episodes) if not episode.done]
    assert cut and any(rollout.trajectories.rewards[row].any() for row in cut)
    answers = torch.tensor([episode.reward for episode in rollout.episodes])
    torch.testing.assert_close(rollout.trajectories.returns, answers, atol=1e-6, rtol=0)


def test_a_reward_for_a_turn_that_does_not_exist_is_refused(sampled, monkeypatch):
    _, policy, sampler, rollout = sampled(n=4)
    rewards = SearchEnvironment.rewards
    monkeypatch.setattr(SearchEnvironment, "rewards", lambda self, episode: [*rewards(self, episode), 0.5])
    asked = [episode.question for episode in rollout.episodes]
    with pytest.raises(
        ValueError, match=r"^SearchEnvironment.rewards: \d numbers for the \d turns of question"
    ):
        sampler.collect(policy, asked, torch.Generator().manual_seed(1))


def test_true_values_leave_out_what_earlier_turns_were_paid(sampled):
    """A policy that leaves nothing to chance: the value of a turn's start is what its own path still pays."""
    _, policy, sampler, _ = sampled(found=0.2, format=0.04)
    sharp = TorchRollout(sampler.environment, sampler.tokenizer, RolloutConfig(temperature=1e-4))
    world = sampled(found=0.2, format=0.04)[0]
    path = sharp.collect(policy, world.questions("train")[:12], torch.Generator().manual_seed(0))
    batch = path.trajectories
    truth = true_values(sharp, policy, path, 2, torch.Generator().manual_seed(3))
    expected = []
    for row in range(len(batch)):
        paid = [float(batch.rewards[row, end]) for end in ends_of(batch, row)]
        expected += [sum(paid[turn:]) for turn in range(len(paid))]
    torch.testing.assert_close(truth.returns, torch.tensor(expected)[:, None].expand(-1, 2))
    assert len({round(value, 4) for value in expected}) > 3


def test_records_and_the_viewer_show_what_turns_were_paid(sampled):
    world, _, sampler, rollout = sampled(found=0.2, format=0.04, form="potential")
    kept = trajectory_records(rollout, sampler.tokenizer, 12)
    for row, record in enumerate(kept):
        expected = world.environment.rewards(rollout.episodes[row])
        assert record["turn_rewards"] == pytest.approx(expected, abs=1e-5)
        assert record["reward"] == rollout.episodes[row].reward
        marks = [f">{paid:+.4g}</span>" for paid in expected[:-1] if paid]
        back = expected[-1] - record["reward"]
        page = show_trajectories([record]).html
        found = page.split("</style>")[1].split('<span class="paid"')[1:]
        assert len(found) == len(marks) + (abs(back) > 1e-9)
        assert all(mark in part for mark, part in zip(marks, found, strict=False))
        assert f">reward {record['reward']:g}<" in page
    plain = sampled()[3]
    assert all("turn_rewards" not in record for record in trajectory_records(plain, sampler.tokenizer, 12))
    with pytest.raises(ValueError, match=r"^trajectory 0: turn_rewards has 9 entries for \d turns"):
        show_trajectories([kept[0] | {"turn_rewards": [0.0] * 9}])


def test_play_shows_what_turns_are_paid(stppo):
    command = ("play", "world=synthetic_small", "--questions", "8", "--transcripts", "2")
    code, plain, _ = stppo(*command)
    assert code == 0 and "paid" not in plain
    code, paying, _ = stppo(*command, "+world.turn_rewards={found: 0.15, form: potential}")
    lines = [line for line in paying.splitlines() if not line.startswith("  paid")]
    assert code == 0 and lines == plain.splitlines()
    paid = [line.split()[1] for line in paying.splitlines() if line.startswith("  paid")]
    assert "+0.15" in paid and sum(map(float, paid)) == pytest.approx(0)


# --- config ----------------------------------------------------------------------------------------


def test_the_plus_sign_switches_it_on_and_nothing_else_changes(tiny):
    plain, paying = tiny(), tiny("+world.turn_rewards.found=0.1")
    assert "turn_rewards" not in plain["world"]
    assert paying["world"] == plain["world"] | {"turn_rewards": {"found": 0.1}}
    assert fingerprint(identity_section(plain)) != fingerprint(identity_section(paying))
    assert made_for(plain) == made_for(paying), "runs with and without begin from the same weights"
    assert load(paying).world.environment.turn_rewards == TurnRewards(found=0.1)
    with pytest.raises(ConfigError, match=r"write \+world.turn_rewards.found=... to set it"):
        tiny("world.turn_rewards.found=0.1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{found: 0.3, format: 0.1}", "turn_rewards: found=0.3 in 3 turns and format=0.1 in 4 may sum to 1.3, which "
         "must stay below 1"),
        ("{found: 0.25, format: 0.0625}", "may sum to 1, which must stay below 1"),
        ("{found: -0.1}", r"TurnRewards.found=-0.1: must be a number in \[0, 1\]"),
        ("{found: true}", "TurnRewards.found=True: must be a number"),
        ("{form: bonuses}", "TurnRewards.form='bonuses': must be one of bonus, potential"),
        ("{gamma: 2}", "TurnRewards.gamma=2"),
        ("{find: 0.1}", "turn_rewards must be null or a mapping of found, format, form, gamma, got"),
        ("0.1", "turn_rewards must be null or a mapping"),
    ],
)  # fmt: skip
def test_bad_turn_rewards_are_named_in_one_line(tiny, given, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(tiny(f"+world.turn_rewards={given}"))
    assert str(error.value).startswith("world") and "\n" not in str(error.value)


def test_a_world_in_which_no_turn_searches_pays_for_no_find():
    with pytest.raises(ConfigError, match=r"found=0.1: there is no turn that searches"):
        load(compose(["preset=smoke", "world=single_turn", "+world.turn_rewards.found=0.1"]))
    assert load(compose(["preset=smoke", "world=single_turn", "+world.turn_rewards.format=0.1"]))


TURN_CREDIT = "algorithm=so_ppo_ctn"


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        (["algorithm=grpo"], True),
        ([TURN_CREDIT], True),
        ([TURN_CREDIT, "algorithm.objective.credit.gamma=0.9"], False),
        ([TURN_CREDIT, "algorithm.objective.credit.gamma=0.9", "+world.turn_rewards.gamma=0.9"], True),
        (["algorithm=token_ppo", "algorithm.objective.credit.gamma=0.9", "+world.turn_rewards.gamma=0.9"], False),
        (["algorithm=gigpo"], False),
        (["algorithm=gigpo", "+world.turn_rewards.gamma=0.95"], False),
        (["algorithm=gigpo", "algorithm.objective.credit.gamma=1"], True),
    ],
)  # fmt: skip
def test_a_potential_is_discounted_as_the_credit_is(tiny, overrides, allowed):
    config = tiny("+world.turn_rewards.form=potential", "+world.turn_rewards.found=0.1", *overrides)
    if allowed:
        load(config)
        return
    with pytest.raises(ConfigError, match=r"^world.turn_rewards.form=potential: .* discounts by"):
        load(config)
    load(tiny("+world.turn_rewards.found=0.1", *overrides[:1]))  # a bonus goes with any credit


def test_the_page_says_of_every_shipped_credit_what_it_does():
    page = (Path(__file__).parents[1] / "docs/howto/turn-rewards.md").read_text(encoding="utf-8")
    credits = {
        compose([f"algorithm={row.name}"])["algorithm"]["objective"]["credit"]["_target_"].rpartition(".")[2]
        for row in algorithms()
    }
    assert len(credits) > 8 and not {name for name in credits if f"`{name}`" not in page}


# --- credits, against plain loops ------------------------------------------------------------------

TURNS = [[2, 1, 3], [1], [2, 2], [1, 1, 1, 2], [3], [2, 1], [1, 2], [2]]
GROUPS = [0, 1, 0, 1, 1, 0, 0, 1]


@pytest.fixture
def batch():
    """Two questions of four trajectories each, with 1 to 4 turns, every turn paid."""
    state = batch_from_turns(TURNS, seed=4).state_dict()
    return Trajectories(**state | {"group_ids": torch.tensor(GROUPS)})


def by_turn(batch, credit):
    """Of each trajectory its turns' advantages, which all tokens of a turn share."""
    found = []
    for row in range(len(batch)):
        on = [credit.advantages[row][batch.turn_ids[row] == turn] for turn in range(len(TURNS[row]))]
        assert all(part.max() == part.min() for part in on)
        found.append([float(part[0]) for part in on])
    return found


def paid_of(batch):
    return [[float(batch.rewards[row, end]) for end in ends_of(batch, row)] for row in range(len(batch))]


def from_turn(rewards, turn):
    """The rewards from a turn on, or from the last turn where there are fewer."""
    return sum(rewards[min(turn, len(rewards) - 1) :])


@pytest.mark.parametrize("returns", ["trajectory", "turn"])
@pytest.mark.parametrize("rule", [GroupNormalised, GroupCentred, LeaveOneOut, LeaveOneOutKept])
def test_group_credits_of_turns(batch, rule, returns):
    found, paid = by_turn(batch, rule(group_size=4, returns=returns)(batch)), paid_of(batch)
    for row, turns in enumerate(found):
        members = [other for other in range(len(paid)) if GROUPS[other] == GROUPS[row]]
        for turn, advantage in enumerate(turns):
            counted = turn if returns == "turn" else 0
            compared = {other: from_turn(paid[other], counted) for other in members}
            mean = sum(compared.values()) / 4
            expected = compared[row] - mean
            if rule is GroupNormalised:
                expected /= math.sqrt(sum((one - mean) ** 2 for one in compared.values()) / 3) + 1e-6
            elif rule is not GroupCentred:
                expected = compared[row] - sum(v for o, v in compared.items() if o != row) / 3
            assert advantage == pytest.approx(expected, rel=1e-9), (row, turn)


def test_what_all_have_earned_before_changes_no_later_turn(batch):
    """The same bonus for everybody's first turn, where all have a second one."""
    rows = [row for row, turns in enumerate(TURNS) if len(turns) > 1][:4]
    batch = Trajectories(**batch.select(rows).state_dict() | {"group_ids": torch.zeros(4, dtype=torch.int64)})
    rewards = batch.rewards.clone()
    for row in range(4):
        rewards[row, ends_of(batch, row)[0]] += 0.3
    richer = Trajectories(**batch.state_dict() | {"rewards": rewards})
    for rule in (GroupNormalised, GroupCentred, LeaveOneOut):
        credit = rule(group_size=4, returns="turn")
        torch.testing.assert_close(credit(richer).advantages, credit(batch).advantages)


def test_a_group_that_agrees_but_for_rounding_has_no_advantage():
    """In float32 the sum of what a potential pays and takes back is not exactly 0."""
    batch = batch_from_turns([[1] * 6] * 4)
    rewards = torch.zeros(batch.rewards.shape)
    for row in range(4):
        parts = torch.rand(5, generator=torch.Generator().manual_seed(row)) / 5
        for end, part in zip(ends_of(batch, row), [*parts, 1 - parts.double().sum()], strict=True):
            rewards[row, end] = part
    rounded = Trajectories(**batch.state_dict() | {"rewards": rewards, "group_ids": torch.zeros(4).long()})
    assert 0 < rounded.returns.max() - rounded.returns.min() < 1e-6
    assert not GroupNormalised(group_size=4)(rounded).advantages.any()


@pytest.mark.parametrize("returns", ["trajectory", "turn"])
def test_loop_leaves_out_a_trajectory_whose_every_turn_has_no_advantage(returns):
    batch = batch_from_turns([[1, 1], [1, 1]])
    for paid, kept in (([[0.5, 0.0], [0.0, 0.5]], returns == "turn"), ([[0.1, 0.2]] * 2, False)):
        rewards = torch.zeros_like(batch.rewards)
        for row in range(2):
            rewards[row, ends_of(batch, row)] = torch.tensor(paid[row], dtype=torch.float64)
        one = Trajectories(**batch.state_dict() | {"rewards": rewards, "group_ids": torch.zeros(2).long()})
        credit = LeaveOneOutKept(group_size=2, returns=returns)(one)
        assert (credit.kept is not None and bool(credit.kept.all())) == kept


def test_credits_of_whole_trajectories_count_every_turn(batch):
    paid = paid_of(batch)
    returns = [sum(rewards) for rewards in paid]
    mean = sum(returns) / len(returns)
    for row, turns in enumerate(by_turn(batch, BatchBaseline()(batch))):
        assert turns == pytest.approx([returns[row] - mean] * len(turns))


@pytest.mark.parametrize("rule", [TokenGAE, TrainedCritic, VarianceFiltered])
def test_token_credits_see_a_turn_s_reward_at_its_last_token(batch, rule):
    values = normal(batch.rewards, 7)
    options = {"group_size": 4} if rule is VarianceFiltered else {}
    found = rule(gamma=0.9, lam=0.8, whiten=False, **options)(batch, values).advantages
    for row in range(len(batch)):
        at = [t for t, turn in enumerate(batch.turn_ids[row].tolist()) if turn >= 0]
        later = 0.0
        for place in reversed(range(len(at))):
            value = float(values[row, at[place]])
            following = float(values[row, at[place + 1]]) if place + 1 < len(at) else 0.0
            paid = float(batch.rewards[row, at[place]]) if at[place] in ends_of(batch, row) else 0.0
            later = paid + 0.9 * following - value + 0.9 * 0.8 * later
            assert float(found[row, at[place]]) == pytest.approx(later)


def test_gigpo_counts_turns_in_both_of_its_parts(batch):
    """Every turn in a state of its own but the first: there the returns of the question's trajectories meet."""
    tokens = torch.arange(batch.tokens.numel()).view(batch.tokens.shape)
    batch = Trajectories(**batch.state_dict() | {"tokens": tokens})
    starts = [batch.agent_mask[row].tolist().index(True) for row in range(len(batch))]
    tokens[torch.arange(len(batch)), : min(starts)] = 0
    found = by_turn(batch, EqualStates(group_size=4, gamma=0.5)(batch))
    paid = paid_of(batch)
    whole = by_turn(batch, GroupNormalised(group_size=4)(batch))
    for row, turns in enumerate(found):
        members = [other for other in range(len(paid)) if GROUPS[other] == GROUPS[row]]
        first = {o: sum(0.5**k * reward for k, reward in enumerate(paid[o])) for o in members}
        mean = sum(first.values()) / 4
        spread = math.sqrt(sum((one - mean) ** 2 for one in first.values()) / 3)
        expected = [(first[row] - mean) / (spread + 1e-6)] + [0.0] * (len(turns) - 1)
        expected = [a + b for a, b in zip(whole[row], expected, strict=True)]
        assert turns == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rule", [GroupNormalised, GroupCentred, LeaveOneOut])
def test_unequal_groups_are_refused_and_unequal_turns_are_not(batch, rule):
    assert rule(group_size=4, returns="turn")(batch).advantages.isfinite().all()
    with pytest.raises(ValueError, match=r"group 0 has 3 trajectories in this batch, group_size is 4"):
        rule(group_size=4, returns="turn")(batch.select([0, 2, 5, 1, 3, 4, 7]))
    with pytest.raises(
        ValueError, match=rf"{rule.__name__}.returns='token': must be one of trajectory, turn"
    ):
        rule(returns="token")
