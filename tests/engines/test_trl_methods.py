"""Related methods that the TRL plug-in offers by name, against the objectives of their YAML files and TRL's own code."""

import pytest
import torch

pytest.importorskip("trl")

from stppo.plugins import methods
from stppo.plugins.trl import TurnGRPOConfig, TurnGRPOTrainer
from stppo.trajectories import Layout
from tests.engines.methods_cases import evaluated, plain_gradient, random_case, yaml_objective
from tests.engines.test_trl_plugin import (
    loss_and_gradient,
    options,
    small_world,
    trainer_of,
)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NAMES = methods.OFFERED["trl"]
MEANS = {"trajectory_mean": "grpo", "token_mean": "bnpo"}
# A value of each method's knobs that is not its default, and acts on the batches here.
KNOBS = {
    "topr": {"clip": {"most": 2.0}},
    "m2po": {"surrogate": {"tau": 0.3}},
    "bapo": {"clip": {"high_most": 1.3}},
    "bapo_ratio": {"clip": {"high_most": 1.3}},
    "grpo_guard": {"ratio": {"floor": 0.5}},
    "llds": {"stabilizer": {"coefficient": 1.5}},
    "tis": {"clip": {"epsilon_high": 0.3}},
    "icepop": {"clip": {"epsilon_high": 0.3}},
    "dppo": {"surrogate": {"delta": 0.05}},
    "drpo": {"surrogate": {"delta": 0.3}},
    "geometric_mask": {"surrogate": {"width": 0.3}},
    "dro": {"stabilizer": {"coefficient": 0.5}},
    "prime_rl": {"stabilizer": {"coefficient": 0.5}},
    "vaco": {"surrogate": {"delta": 0.6}},
    "ctpo": {"clip": {"low": 0.3, "high": 0.5}},
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world():
    return small_world()


@pytest.fixture
def trainer(world, tmp_path):
    def make(kind=TurnGRPOTrainer, config=TurnGRPOConfig, use_vllm=False, beta=0.0, **changes):
        made = trainer_of(kind, config(**options(tmp_path, **changes)), world)
        # A reference model would have to be loaded; its log-probs are given here.
        made.use_vllm, made.beta = use_vllm, beta
        return made

    return make


def published(name):
    """TRL's options with which a method is its YAML's."""
    rule = yaml_objective(name)
    given = {"objective": name, "loss_type": MEANS[rule.loss_aggregation]}
    if methods.clips_as_host(name):
        given |= {"epsilon": rule.clip.epsilon_low, "epsilon_high": rule.clip.epsilon_high}
    return given


def inputs_of(mask, old, new, advantages):
    """What TRL gives its loss for the same batch."""
    columns = torch.arange(mask.shape[1]).expand(mask.shape)
    completion = columns <= columns.where(mask, -1).amax(1, keepdim=True)
    noise = random_case(99)[2]
    return {
        "prompt_ids": torch.zeros(len(mask), 1).long(),
        "prompt_mask": torch.ones(len(mask), 1).long(),
        "completion_ids": torch.zeros(mask.shape).long(),
        "completion_mask": completion.long(),
        "tool_mask": (mask | ~completion).long(),
        "advantages": advantages[:, 0],
        "old_per_token_logps": old,
        "ref_per_token_logps": old + 0.1 * noise,
        "importance_sampling_ratio": (0.2 * noise[:, :1]).exp(),
        "num_items_in_batch": mask.sum(),
    }


def case_of(seed, **changes):
    return random_case(seed, per_row=True, **changes)


def assert_same(got, expected, tolerance=1e-10):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_loss_gradient_and_metrics_are_those_of_the_yaml(trainer, name, monkeypatch):
    rule, made = yaml_objective(name), trainer(**published(name))
    for seed in range(3):
        mask, old, new, advantages = case_of(seed)
        got = loss_and_gradient(made, new, inputs_of(mask, old, new, advantages), monkeypatch)
        assert_same(got, evaluated(rule, mask, old, new, advantages))
        plain = torch.allclose(got[1], plain_gradient(rule, mask, advantages))
        assert plain == (name == "reinforce"), "the others do something off the old policy"
        layout, log_ratio = Layout.of(mask), (new - old)[mask]
        found = rule.evaluate(log_ratio, advantages[mask], layout, behaviour_logprobs=old[mask]).diagnostics
        metrics = {key: values[seed] for key, values in made._metrics["train"].items()}
        for side, key in {
            "region": "clip_fraction",
            "low": "clip_fraction_low",
            "high": "clip_fraction_high",
        }.items():
            assert metrics[f"clip_ratio/{side}_mean"] == pytest.approx(found[key], abs=1e-6)
        assert metrics.get("stabilizer/ctn_penalty", 0.0) == pytest.approx(found["ctn_penalty"], abs=1e-9)
        assert (found["ctn_penalty"] > 0) == (name in ("llds", "p3o", "dro", "prime_rl"))


@pytest.mark.parametrize("name", KNOBS)
def test_knobs_are_the_yamls_constants(trainer, name, monkeypatch):
    mask, old, new, advantages = case_of(1)
    inputs = inputs_of(mask, old, new, advantages)
    got = loss_and_gradient(trainer(**published(name), knobs=KNOBS[name]), new, inputs, monkeypatch)
    assert_same(got, evaluated(yaml_objective(name, **KNOBS[name]), mask, old, new, advantages))
    without = loss_and_gradient(trainer(**published(name)), new, inputs, monkeypatch)
    assert not torch.allclose(got[1], without[1])


def test_every_method_with_knobs_is_tried():
    assert set(KNOBS) == {name for name in NAMES if methods.knobs_of(name)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(objective="topo"), "objective='topo': must be one of topr, minirl"),
        (dict(objective="vcpo"), "objective='vcpo': not offered, since it divides the learning rate"),
        (dict(objective="st_ppo"), "objective='st_ppo': not offered, since it is TurnGRPOConfig(stabilizer="),
        (dict(loss_type="vespo"), "loss_type='vespo': use one of grpo, bnpo"),
        (dict(importance_sampling_level="token"), "importance_sampling_level='token' would do nothing, since objec"),
        (dict(ratio_aggregation="product"), "ratio_aggregation='product' would do nothing"),
        (dict(stabilizer="ctn_kl"), "stabilizer='ctn_kl' would do nothing"),
        (dict(epsilon=0.3), "epsilon=0.3 would do nothing, since objective='topr' has its own"),
        (dict(epsilon_high=0.3), "epsilon_high=0.3 would do nothing"),
        (dict(knobs={"clip": {"mots": 2}}), "knobs.clip.mots: no knob of topr; allowed: clip.most"),
        (dict(knobs={"clip": {"most": -1}}), "knobs.clip: TaperedClip.most=-1: must be a number in [0"),
        (dict(knobs=2.0), "knobs=2.0: must be a mapping"),
        (dict(objective=None, knobs={"clip": {"most": 2}}), "knobs={'clip': {'most': 2}}: are those of a method"),
        (dict(objective="minirl", epsilon=-1.0), "epsilon=-1.0: must be a number"),
    ],
)  # fmt: skip
def test_bad_options_are_named_in_one_line(tmp_path, changes, message):
    with pytest.raises(ValueError) as error:
        TurnGRPOConfig(**options(tmp_path, **{"objective": "topr", **changes}))
    text = str(error.value)
    assert message in text and text.startswith("TurnGRPOConfig.") and "\n" not in text
