import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stppo.trajectories import Layout, Trajectories, turn_ids
from tests.objectives_cases import batch_from_turns, mixed_batch


def rows_of_masks(min_rows=1):
    def same_width(width):
        row = st.lists(st.booleans(), min_size=width, max_size=width)
        return st.lists(row, min_size=min_rows, max_size=4)

    return st.integers(1, 9).flatmap(same_width)


def turn_ids_by_hand(row):
    ids, current, inside = [], -1, False
    for agent in row:
        if agent and not inside:
            current += 1
        inside = agent
        ids.append(current if agent else -1)
    return ids


@given(rows_of_masks())
@settings(max_examples=80, deadline=None)
def test_turn_ids_number_maximal_runs(rows):
    assert turn_ids(torch.tensor(rows)).tolist() == [turn_ids_by_hand(row) for row in rows]


@given(rows_of_masks())
@settings(max_examples=80, deadline=None)
def test_layout_agrees_with_turn_ids(rows):
    mask = torch.tensor(rows)
    layout, ids = Layout.of(mask), turn_ids(mask)
    places = [(i, j) for i, row in enumerate(rows) for j, agent in enumerate(row) if agent]
    assert layout.rows.tolist() == [i for i, _ in places]
    assert layout.positions.tolist() == [i * mask.shape[1] + j for i, j in places]
    keys = [(i, int(ids[i, j])) for i, j in places]
    distinct = list(dict.fromkeys(keys))
    assert layout.turns.tolist() == [distinct.index(key) for key in keys]
    assert layout.turn_lengths.tolist() == [keys.count(key) for key in distinct]
    assert layout.turn_rows.tolist() == [i for i, _ in distinct]
    assert layout.row_turns.tolist() == (ids.max(1).values + 1).tolist()
    assert layout.row_lengths.tolist() == mask.sum(1).tolist()
    assert layout.turn_starts.tolist() == [keys.index(key) for key in distinct]


def test_turns_of_neighbouring_rows_stay_apart():
    # The last token of row 0 and the first of row 1 are adjacent in flat order.
    layout = Layout.of(torch.tensor([[False, True], [True, False]]))
    assert layout.turn_lengths.tolist() == [1, 1]


def test_gather_and_scatter_are_inverse_on_the_mask_and_zero_elsewhere():
    batch = mixed_batch()
    values = torch.arange(batch.tokens.numel(), dtype=torch.float64).view(batch.tokens.shape) + 1
    back = batch.layout.scatter(batch.layout.gather(values))
    assert torch.equal(back, values * batch.agent_mask)


def test_counts_and_returns():
    batch = batch_from_turns([[3, 1], [2]])
    assert batch.n_agent_tokens.tolist() == [4, 2]
    assert batch.n_turns.tolist() == [2, 1]
    assert len(batch) == 2
    torch.testing.assert_close(batch.returns, torch.stack([row.sum() for row in batch.rewards]))
    assert batch.turn_ids is batch.turn_ids


def _set(name, index, value):
    def change(state):
        state[name] = state[name].clone()
        state[name][index] = value

    return change


def _replace(name, function):
    def change(state):
        state[name] = function(state[name])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replace("tokens", lambda x: x[0]), r"tokens: .*\(B, T\)"),
        (_replace("tokens", lambda x: x[:, :0]), "tokens: .*non-empty"),
        (_replace("rewards", lambda x: x[:, 1:]), "rewards: expected shape"),
        (_replace("group_ids", lambda x: x[:1]), "group_ids: expected shape"),
        (_replace("agent_mask", lambda x: x.long()), "agent_mask: expected bool"),
        (_replace("rewards", lambda x: x.long()), "rewards: expected float"),
        (_replace("tokens", lambda x: x.int()), "tokens: expected int64"),
        (_set("lengths", 1, 0), r"lengths: .*\(row 1\)"),
        (_set("lengths", 1, 99), r"lengths: .*\(row 1\)"),
        (_set("agent_mask", (1, -1), True), r"agent_mask: .*padding.*\(row 1\)"),
        (_set("agent_mask", (0, 0), True), r"agent_mask: .*position 0.*\(row 0\)"),
        (_set("agent_mask", 1, False), r"agent_mask: no agent token, hence no turn \(row 1\)"),
        (_set("behaviour_logprobs", (0, 2), float("nan")), r"behaviour_logprobs: .*\(row 0\)"),
        (_set("behaviour_logprobs", (0, 2), float("-inf")), r"behaviour_logprobs: .*\(row 0\)"),
        (_set("rewards", (0, 4), float("inf")), r"rewards: not finite \(row 0\)"),
        (_set("rewards", (1, 0), 1.0), r"rewards: non-zero off the agent mask \(row 1\)"),
    ],
)
def test_contradictions_are_refused_by_name(change, message):
    state = batch_from_turns([[3, 1], [2]]).state_dict()
    change(state)
    if "no agent token" in message:
        state["rewards"] = torch.zeros_like(state["rewards"])
    with pytest.raises(ValueError, match=message) as error:
        Trajectories(**state)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "index", [[1, 2], torch.tensor([1, 2]), torch.tensor([False, True, True] + [False] * 3)]
)
def test_select_takes_rows_and_trims_to_the_longest(index):
    batch = mixed_batch()
    chosen = batch.select(index)
    width = int(batch.lengths[1:3].max())
    assert chosen.tokens.shape == (2, width)
    assert torch.equal(chosen.lengths, batch.lengths[1:3])
    assert torch.equal(chosen.rewards, batch.rewards[1:3, :width])
    assert torch.equal(chosen.group_ids, batch.group_ids[1:3])
    assert torch.equal(chosen.layout.gather(chosen.tokens), chosen.tokens[chosen.agent_mask])


def test_select_nothing_is_refused():
    for nothing in ([], torch.zeros(6, dtype=torch.bool)):
        with pytest.raises(ValueError, match="names no row"):
            mixed_batch().select(nothing)


def test_cat_undoes_select():
    batch = mixed_batch(extra=0)
    joined = Trajectories.cat([batch.select([0]), batch.select([1, 2, 3]), batch.select([4, 5])])
    for name, value in batch.state_dict().items():
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None] if value.ndim == 2 else True
        assert torch.equal(joined.state_dict()[name] * real, value * real), name
    with pytest.raises(ValueError, match="no batch"):
        Trajectories.cat([])


def test_state_dict_round_trip_and_mismatch(tmp_path):
    batch = mixed_batch()
    torch.save(batch.state_dict(), tmp_path / "batch.pt")
    loaded = Trajectories.from_state_dict(torch.load(tmp_path / "batch.pt", weights_only=True))
    for name, value in batch.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    state = batch.state_dict()
    state["reward"] = state.pop("rewards")
    with pytest.raises(ValueError, match=r"missing fields \['rewards'\], unknown fields \['reward'\]"):
        Trajectories.from_state_dict(state)


def test_a_batch_saved_without_sentences_has_one_a_turn():
    batch = mixed_batch()
    assert len(batch.layout.segments("sentence").lengths) > len(batch.layout.turn_lengths)
    state = batch.state_dict()
    del state["sentence_ends"]
    loaded = Trajectories.from_state_dict(state)
    assert torch.equal(loaded.layout.segments("sentence").index, loaded.layout.turns)


def test_sentences_follow_the_marks_and_stay_within_turns():
    batch = batch_from_turns([[4, 2], [3]])
    ends = torch.zeros_like(batch.agent_mask)
    first, second = ((batch.turn_ids[0] == k).nonzero().flatten().tolist() for k in (0, 1))
    ends[0, first[1]] = ends[0, second[1]] = True  # the second mark is at a turn's last token: nothing new
    state = batch.state_dict() | {"sentence_ends": ends}
    sentences = Trajectories(**state).layout.segments("sentence")
    assert sentences.index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert sentences.lengths.tolist() == [2, 2, 2, 3] and sentences.starts.tolist() == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="segments='word': must be one of token, turn, sentence, sequence"):
        batch.layout.segments("word")


def test_moved_batches_keep_their_content():
    batch = mixed_batch()
    assert torch.equal(batch.to("cpu").rewards, batch.rewards)
