"""Composition, validation, sweeps, planned runs and fingerprints of the configs."""

import random

import pytest

from stppo.config.algorithms import PAPER
from stppo.config.composition import compose, expand_sweep
from stppo.config.files import ConfigError, options
from stppo.config.identity import (
    fingerprint,
    identity_section,
    run_section,
    warm_start_dir,
    warm_start_section,
)
from stppo.config.loading import build, load
from stppo.config.plan import plan, seconds
from stppo.config.planned import SECTIONS, PlannedRun, label_of, planned_runs, warm_start_overrides
from stppo.config.settings import RunConfig
from tests.conftest import edit

ALGORITHMS = sorted([*PAPER, "so_ppo"])  # the paper's; a reader may have added a file


def check(*overrides: str) -> None:
    load(compose(list(overrides)))


# ---- what is offered is valid -------------------------------------------------------------------


@pytest.mark.parametrize("preset", options("preset"))
def test_every_preset_is_valid(preset):
    composed = compose([f"preset={preset}"])
    assert load(composed).settings.training.regime and composed["preset"] == preset


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_valid(algorithm):
    name = load(compose([f"algorithm={algorithm}"])).settings.algorithm.name
    assert name == ("st_ppo" if algorithm == "so_ppo" else algorithm)


@pytest.mark.parametrize("training", options("training"))
def test_every_training_option_is_valid(training):
    check(f"training={training}")


# ---- what is wrong is named ---------------------------------------------------------------------


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("foo", "warm_start_seed"),
        ("training.foo", "epochs"),
        ("warm_start.reading.foo", "target_accuracy"),
        ("warm_start.noise.foo", "early_answer"),
        ("algorithm.foo", "objective"),
        ("algorithm.objective.foo", "credit, ratio, clip"),
        ("algorithm.objective.clip.foo", "epsilon_low, epsilon_high, clip_on"),
        ("world.foo", "n_entities"),
    ],
)
def test_unknown_key_is_named_with_the_allowed_ones(plus, key, allowed):
    with pytest.raises(ConfigError) as error:
        check(f"{plus}{key}=1")
    message = str(error.value)
    assert message.startswith(f"{key}: unknown key; allowed: ") and allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("policy.lora={rnak: 4}", r"policy\.lora\.rnak", "rank, alpha; did you mean rank"),
        ("algorithm.objective.credit.lam=0.9", r"algorithm\.objective\.credit\.lam", "group_size"),
    ],
)
def test_unknown_key_lists_the_keys_of_what_is_chosen(override, key, allowed):
    with pytest.raises(ConfigError, match=f"^{key}: unknown key; allowed: {allowed}"):
        check("algorithm=grpo", override)


def test_a_key_that_exists_but_is_not_set_says_how_to_set_it():
    for chosen, key in (
        ("policy=tiny", "policy.trainable_layers"),
        ("world=single_hop", "world.only_in_corpus"),
    ):
        with pytest.raises(ConfigError, match=rf"^{key} is not set by what was chosen; write \+{key}="):
            check(chosen, f"{key}=1")


GRPO = "algorithm=grpo"
OBJECTIVE = "algorithm.objective"


BAD = [
    ("Clip.epsilon_low=0", f"{OBJECTIVE}.clip.epsilon_low=0"),
    ("Clip.epsilon_high=-0.2", f"{OBJECTIVE}.clip.epsilon_high=-0.2"),
    ("clip.epsilon_low = 'wide'", f"{OBJECTIVE}.clip.epsilon_low=wide"),
    ("group_size=1", GRPO, f"{OBJECTIVE}.credit.group_size=1"),
    ("group_size=7", GRPO, f"{OBJECTIVE}.credit.group_size=7"),
    ("group_size=8", GRPO, f"~{OBJECTIVE}.credit.group_size", "training.trajectories_per_iteration=20"),
    ("Clip.clip_on='turn'", "algorithm=token_ppo", f"{OBJECTIVE}.clip.clip_on=turn"),
    ("granularity='word'", f"{OBJECTIVE}.ratio.granularity=word"),
    ("ClippingBiasNorm.c0=0", f"{OBJECTIVE}.stabilizer.c0=0"),
    (f"{OBJECTIVE}.credit = 'GAE'", f"{OBJECTIVE}.credit=GAE"),
    ("no such class", f"{OBJECTIVE}._target_=stppo.objectives.Nothing"),
    ("credit.whiten = 'no'", f"{OBJECTIVE}.credit.whiten=no"),
    ("rollout.max_tokens=300", "rollout.max_tokens=300"),
    ("rollout.temperature = 0", "rollout.temperature=0"),
    ("training.minibatches=5", "training.minibatches=5"),
    ("training.epochs = 'abc'", "training.epochs=abc"),
    ("training.epochs = 0", "training.epochs=0"),
    ("training.epochs = True", "training.epochs=true"),
    ("training.epochs = '08'", "training.epochs=08"),
    ("training.epochs", "~training.epochs"),
    ("training.epochs", "training.epochs"),
    ("training.optimizer = 'lion'", "training.optimizer=lion"),
    ("training.learning_rate = nan", "training.learning_rate=nan"),
    ("training.learning_rate = 1e+300", "training.learning_rate=1e300"),
    ("training.gradient_checkpointing = 'on'", "training.gradient_checkpointing=on"),
    ("policy.heads=4 must divide hidden_size=65", "policy.hidden_size=65"),
    ("policy.layers = True", "policy.layers=true"),
    ("n_entities", "world.n_entities=0"),
    ("world.n_entities = 60.0", "world.n_entities=60.0"),
    ("warm_start.noise.malformed", "warm_start.noise.malformed=2"),
    ("evaluation.trajectories = 0", "evaluation.trajectories=0"),
    ("seed = 99999999999999999999", "seed=99999999999999999999"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[-1])
def test_bad_value_is_one_line_that_names_it(case):
    """Values are not converted, either: a text for a switch is true to Python, and true is the number 1."""
    named, *overrides = case
    with pytest.raises(ConfigError) as error:
        check(*overrides)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("override", ["training.epochs=08", "training.learning_rate=nan"])
def test_a_plan_refuses_what_training_would(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        plan("smoke", [override])


def test_several_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        check("training.epochs=0", "evaluation.questions=few")
    assert "training.epochs = 0" in str(error.value) and "evaluation.questions = 'few'" in str(error.value)


# ---- sweeps and planned runs --------------------------------------------------------------------


def test_sweep_is_the_product_of_the_choices():
    assert expand_sweep(["algorithm=token_ppo,st_ppo", "training.epochs=2", "seed=0,1"]) == [
        ["algorithm=token_ppo", "training.epochs=2", "seed=0"],
        ["algorithm=token_ppo", "training.epochs=2", "seed=1"],
        ["algorithm=st_ppo", "training.epochs=2", "seed=0"],
        ["algorithm=st_ppo", "training.epochs=2", "seed=1"],
    ]


def test_sweep_knows_ranges_and_leaves_lists_alone():
    assert expand_sweep(["seed=range(3)"]) == [["seed=0"], ["seed=1"], ["seed=2"]]
    assert expand_sweep(["world.hop_shares=[1,0,0]"]) == [["world.hop_shares=[1,0,0]"]]
    assert expand_sweep([]) == [[]]


def test_an_endless_sweep_is_refused():
    for sweep in (["seed=range(0,1e8)"], ["seed=range(0,2000)", "training.epochs=range(1,2000)"]):
        with pytest.raises(ConfigError, match="the sweep has more than 10000 runs"):
            expand_sweep(sweep)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pipeline.regimes", "abc"),
        ("pipeline.regimes.OFF_POLICY", "3"),
        ("pipeline.regimes.OFF_POLICY.seeds", "null"),
        ("pipeline.regimes.OFF_POLICY.seeds", "abc"),
        ("pipeline.regimes.OFF_POLICY.seeds", "[true]"),
        ("pipeline.regimes.OFF_POLICY.algorithms", "3"),
        ("pipeline.regimes.OFF_POLICY.overrides", "a"),
    ],
)
def test_a_plan_of_the_wrong_kind_is_named(key, value):
    with pytest.raises(ConfigError, match=key):
        planned_runs("smoke", [f"++{key}={value}"])


def test_sections_of_a_preset_are_those_of_a_run_and_of_the_pipeline():
    assert set(SECTIONS) == {*RunConfig.model_fields, "preset", "pipeline", "study"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "# @package _global_\ndefaults: [smoke]\npreset: mine\npipelin: {}\n",
            "pipelin: unknown key.*mean pipeline",
        ),
        (
            "# @package _global_\ndefaults: [smoke]\npreset: mine\npipeline: {regime: {}}\n",
            "pipeline.regime: unknown key.*mean regimes",
        ),
        (
            "# @package _global_\ndefaults: [smoke]\npreset: mine\npipeline: {regimes: {OFF_POLICY: {algoritms: [grpo]}}}\n",
            "pipeline.regimes.OFF_POLICY.algoritms: unknown key.*mean algorithms",
        ),
        (
            "# @package _global_\ndefaults: [smoke]\npreset: mine\npipeline: {regimes: {OFF_POLICY: {algorithms: [st_pppo]}}}\n",
            "OFF_POLICY.algorithms: st_pppo is no algorithm.*mean st_ppo",
        ),
        (
            "defaults: [smoke]\npreset: mine\n",
            "preset=mine: the first line of its file must be `# @package _global_`",
        ),
    ],
)
def test_what_nothing_would_read_in_a_preset_is_named(configs, text, said):
    (configs / "preset" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        planned_runs("mine")


def test_malformed_sweep_is_a_config_error():
    with pytest.raises(ConfigError, match="seed="):
        expand_sweep(["seed=("])


@pytest.mark.parametrize("preset", ["divisor", "study", "laptop", "smoke"])
def test_planned_configs_are_those_of_their_overrides_and_names(preset):
    runs = planned_runs(preset)
    for run in [*random.Random(0).sample(runs, 6), runs[-1]]:
        config = run.config
        assert config == compose(list(run.overrides)), run.name
        assert config["algorithm"]["name"] == run.algorithm and config["seed"] == run.seed
        assert config["training"]["regime"] == run.regime


@pytest.fixture
def study_like(configs):
    """A preset with an arm, replicates, a second entry of one regime, and what an override may refer to."""

    def plan(**entries):
        regimes = "".join(f"\n    {name}: {text}" for name, text in entries.items())
        (configs / "preset" / "small.yaml").write_text(
            "# @package _global_\npreset: small\npipeline:\n"
            "  arms: {wide_ppo: {label: 'Turn-PPO, wide', overrides: [algorithm=turn_ppo, algorithm.objective.clip.epsilon_high=0.4]}}\n"
            "  replicates: {7: [world.seed=3, warm_start_seed=30], 8: [world.seed=4, warm_start_seed=40]}\n"
            f"  regimes:{regimes}\n"
        )
        return planned_runs("small")

    return plan


def test_arms_replicates_and_entries_of_one_regime(study_like):
    runs = study_like(
        A="{training: off_policy, algorithms: [token_ppo, wide_ppo], seeds: [7, 8]}",
        A_LATER="{regime: A, training: off_policy, algorithms: [grpo], seeds: [8], overrides: [training.epochs=2]}",
    )
    assert [run.name for run in runs] == [
        *("A/token_ppo/seed7", "A/wide_ppo/seed7", "A/token_ppo/seed8", "A/wide_ppo/seed8"),
        "A/grpo/seed8",
    ], "a seed's runs stay together"
    token, wide, later = runs[0].config, runs[3].config, runs[4].config
    assert (token["world"]["seed"], token["warm_start_seed"]) == (3, 30)
    assert (wide["world"]["seed"], wide["warm_start_seed"]) == (4, 40)
    assert wide["algorithm"]["name"] == "wide_ppo"
    assert wide["algorithm"]["objective"]["clip"]["epsilon_high"] == 0.4
    assert (label_of(wide), label_of(later)) == ("Turn-PPO, wide", later["algorithm"].get("label"))
    assert (later["training"]["regime"], later["training"]["epochs"]) == ("A", 2)


def test_overrides_may_name_the_seed_and_the_one_after_it(study_like):
    runs = study_like(
        A="{training: off_policy, algorithms: [token_ppo], seeds: [7, 8], overrides: ['world.cache_dir={seed}-{next_seed}']}"
    )
    assert [run.config["world"]["cache_dir"] for run in runs] == ["7-8", "8-7"]


def test_run_that_is_planned_twice_is_refused(study_like):
    entry = "{regime: A, training: off_policy, algorithms: [token_ppo], seeds: [7]}"
    with pytest.raises(ConfigError, match="TWICE: the run A/token_ppo/seed7 is planned twice"):
        study_like(ONCE=entry, TWICE=entry)


def test_override_applies_to_all_runs_of_a_pipeline():
    runs = planned_runs("smoke", ["training.iterations=3"])
    assert {run.config["training"]["iterations"] for run in runs} == {3}


@pytest.mark.parametrize(
    "override", ["seed=5", "algorithm=grpo", "training=nearly_on_policy", "preset=laptop"]
)
def test_pipeline_refuses_to_override_what_tells_its_runs_apart(override):
    with pytest.raises(ConfigError, match=r"pipeline\.regimes"):
        planned_runs("smoke", [override])


def test_preset_without_a_pipeline_is_refused():
    with pytest.raises(ConfigError, match=r"plans no run: `pipeline\.regimes`"):
        planned_runs("smoke", ["~pipeline"])


# ---- fingerprints -------------------------------------------------------------------------------


def fingerprints(runs):
    return {run.name: fingerprint(run_section(run.config)) for run in runs}


def test_how_many_trajectories_are_shown_is_no_part_of_a_run():
    plain, more = (compose(["preset=smoke", f"evaluation.trajectories={n}"]) for n in (3, 10))
    assert load(more).settings.evaluation.trajectories == 10
    assert run_section(plain) == run_section(more)
    assert identity_section(plain) == identity_section(more)
    assert warm_start_dir(plain) == warm_start_dir(more)
    del plain["evaluation"]["trajectories"]  # as runs before this key recorded it
    assert run_section(plain) == run_section(more)
    assert load(plain).settings.evaluation.trajectories == 3


def test_changed_value_changes_exactly_the_runs_that_use_it(configs):
    runs = fingerprints(planned_runs("smoke"))
    for file, old, new, changed in (
        ("algorithm/gspo.yaml", "epsilon_low: 3.0e-4", "epsilon_low: 5.0e-4", {"OFF_POLICY/gspo/seed0"}),
        ("algorithm/gspo.yaml", "# GSPO", "# A comment about GSPO", set()),
        ("training/off_policy.yaml", "critic_epochs: 1", "critic_epochs: 2", set(runs)),
    ):
        edit(configs / file, old, new)
        before, runs = runs, fingerprints(planned_runs("smoke"))
        assert {name for name in before if before[name] != runs[name]} == changed, file
    wide = (configs / "algorithm" / "grpo.yaml").read_text().replace("name: grpo", "name: wide")
    (configs / "algorithm" / "wide.yaml").write_text(wide.replace("0.2", "0.4"))
    edit(configs / "preset" / "smoke.yaml", "gspo]", "gspo, wide]")
    after = fingerprints(planned_runs("smoke"))
    assert after.pop("OFF_POLICY/wide/seed0") and after == runs, (
        "a new file is a new algorithm, and that is all"
    )
    check("algorithm=wide")


def test_a_composed_config_is_the_callers_own_and_follows_an_edit(configs):
    compose(["preset=smoke"])["training"]["epochs"] = 77
    assert (before := compose(["preset=smoke"])["training"]["epochs"]) != 77
    edit(configs / "preset" / "smoke.yaml", f"epochs: {before}", f"epochs: {before + 1}")
    assert compose(["preset=smoke"])["training"]["epochs"] == before + 1
    edit(configs / "config.yaml", "seed: 0", "seed: 5")
    assert compose(["algorithm=grpo"])["seed"] == 5


def test_fingerprint_does_not_depend_on_the_order_of_keys():
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def start_dir(*overrides):
    return warm_start_dir(compose(["preset=smoke", "seed=1", *overrides]))


def test_warm_start_is_shared_by_algorithms_and_regimes_of_one_seed():
    shared = {
        start_dir(f"algorithm={a}", f"training={t}")
        for a in ALGORITHMS
        for t in ("off_policy", "nearly_on_policy")
    }
    assert len(shared) == 1
    assert shared == {start_dir("training.learning_rate=1e-5", "evaluation.every=3")}


@pytest.mark.parametrize("preset", ["smoke", "laptop", "search", "workstation"])
def test_a_warm_start_made_from_its_overrides_alone_is_the_one_that_runs_want(preset):
    for run in {run.seed: run for run in planned_runs(preset)}.values():  # one a warm start
        alone = [*warm_start_overrides(run), f"warm_start_seed={run.config['warm_start_seed']}"]
        assert warm_start_dir(compose(alone)) == warm_start_dir(run.config)


@pytest.mark.parametrize(
    "override",
    [
        "seed=2",
        "world.seed=1",
        "world.n_entities=200",
        "policy.hidden_size=32",
        "warm_start.batch_size=32",
        "warm_start.reading.batch_size=32",
        "evaluation.questions=32",
        "training.precision=bfloat16",
        "training.device=auto",
    ],
)
def test_warm_start_changes_with_what_makes_it(override):
    assert start_dir(override) != start_dir()


def test_name_of_a_warm_start_in_float32_on_a_cpu_says_nothing_of_training():
    """Older runs' warm starts keep their names, and settings that only save memory share one."""
    config = compose(["preset=smoke"])
    assert "training" not in warm_start_section(config)
    assert start_dir("training.micro_batch_tokens=64", "training.gradient_checkpointing=true") == start_dir()


def test_a_warm_start_of_the_pipeline_computes_as_its_runs_do():
    """Its job is given these overrides alone: without them it trained in float32 on the CPU beside runs on a GPU."""
    memory = ["training.micro_batch_tokens=64", "training.gradient_checkpointing=true"]
    run = planned_runs("smoke", ["training.device=cuda", "training.precision=bfloat16", *memory])[0]
    mine, alone = run.config["training"], compose(warm_start_overrides(run))["training"]
    names = ("device", "precision", "micro_batch_tokens", "gradient_checkpointing", "kernels")
    assert {name: alone[name] for name in names} == {name: mine[name] for name in names}


def test_regimes_that_share_a_warm_start_name_it_alike():
    """Else the pipeline would make it again, and train every run again, once a regime is added or left out."""
    old, fresh = (
        PlannedRun("R", "token_ppo", 1, ("preset=smoke", f"training={name}", "seed=1"))
        for name in ("off_policy", "nearly_on_policy")
    )
    assert old.config["training"] != fresh.config["training"]
    assert warm_start_dir(old.config) == warm_start_dir(fresh.config)
    assert warm_start_overrides(old) == warm_start_overrides(fresh)


# ---- engines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("preset", ["smoke", "smollm", "qwen"])
def test_presets_survive_every_engine(preset, engine):
    run = load(compose([f"preset={preset}", f"rollout={engine}"])).settings
    assert run.rollout.engine == engine


def test_what_an_engine_does_not_know_is_forgotten_unless_it_was_typed():
    chosen = ["preset=qwen", "rollout=torch"]
    rollout = compose(chosen)["rollout"]
    assert rollout["max_tokens"] == 4596, "what both engines know is kept"
    assert set(rollout) == {"engine", "temperature", "max_tokens", "batch_size"}
    assert compose(["preset=qwen"])["rollout"]["max_num_seqs"] == 256
    with pytest.raises(ConfigError, match=r"rollout\.max_num_seqs: unknown key; allowed: engine, "):
        load(compose([*chosen, "rollout.max_num_seqs=3"]))


@pytest.mark.parametrize("value", [1, 2.5, True, None, "x"])
def test_what_a_parameter_admits_is_taken_as_it_is(value, tmp_path, monkeypatch):
    """Of a class of one's own, whatever way it is annotated."""
    module = tmp_path / "own_switch.py"
    text = "class Own:\n    def __init__(self, x: bool | float | str | None, y=None):\n        self.x = x\n"
    module.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    built = build({"_target_": "own_switch.Own", "x": value, "y": "anything"}, "own")
    assert built.x == value and type(built.x) is type(value)


# ---- the plan's cost -------------------------------------------------------------------------------


def cost(*overrides):
    return seconds(compose(list(overrides)))


def test_every_planned_run_is_counted_once():
    groups = plan("laptop")
    runs = planned_runs("laptop")
    assert sum(group.runs for group in groups) == len(runs)
    assert {(g.regime, g.algorithm) for g in groups} == {(r.regime, r.algorithm) for r in runs}


def test_cost_grows_with_what_a_run_does():
    base = cost("algorithm=token_ppo")
    assert cost("algorithm=token_ppo", "training.epochs=2") < base
    assert cost("algorithm=s_ppo") > base > cost("algorithm=grpo")
    assert cost("algorithm=token_ppo", "training.critic_epochs=8") > base
    assert cost("algorithm=token_ppo", "training.values=monte_carlo") > 2 * base
    assert cost("algorithm=token_ppo", "evaluation.value_error_every=8") > base
    assert cost("algorithm=grpo", "training.values=monte_carlo") == cost("algorithm=grpo"), (
        "no critic, no values"
    )


def test_a_preset_that_says_what_an_iteration_costs_is_planned_by_that():
    (token, _) = plan("smollm")
    config = compose(["preset=smollm"])
    per_iteration = config["pipeline"]["core_seconds_per_iteration"]
    assert token.hours == per_iteration * config["training"]["iterations"] / 3600
    assert 0.2 < token.hours < 1


@pytest.mark.parametrize(("written", "read"), [("010", 8), ("1:30", 90), ("[1, 017]", 15)])
def test_a_number_in_another_base_is_refused(tmp_path, monkeypatch, written, read):
    file = tmp_path / "world" / "mine.yaml"
    file.parent.mkdir()
    monkeypatch.setenv("STPPO_CONFIG_DIR", str(tmp_path))
    file.write_text(f"defaults: [synthetic]\nn_hops: '010'\nseed: {written} # of mine\n")
    with pytest.raises(ConfigError, match=rf"mine.yaml, line 3: .* is {read} in YAML"):
        compose(["world=mine"])
