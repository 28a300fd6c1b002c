"""A reader's own folder of configs: found beside the shipped ones, refused in one line where something is wrong."""

import sys

import pytest

from stppo.config import files as config_files
from stppo.config.composition import compose
from stppo.config.files import ConfigError, options
from stppo.config.loading import build, load
from stppo.config.provenance import config_targets, imported_files

RATIO = """
from dataclasses import dataclass

from stppo.objectives import Ratio


@dataclass(frozen=True)
class MyRatio(Ratio):
    power: float = 1.0


class Plain:
    def __init__(self, power=1.0):
        self.power = power
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """write(name, text) puts a file into a folder of configs that is in use."""
    folder = tmp_path / "my configs"
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("own_ratios", "own_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setenv(config_files.VARIABLE, str(folder))

    def write(name, text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        return folder / name

    write("own_ratios.py", RATIO)
    write(
        "algorithm/my_ppo.yaml",
        "defaults: [turn_ppo]\nname: my_ppo\nobjective: {credit: {pooling: turn_mean}}\n",
    )
    yield write
    for module in ("own_ratios", "own_broken"):
        sys.modules.pop(module, None)


def refused(*overrides) -> str:
    with pytest.raises(ConfigError) as error:
        load(compose(list(overrides)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_both_folders_are_offered_and_composed(own):
    own("world/my_world.yaml", "defaults: [synthetic]\nn_train: 77\n")
    assert {"my_ppo", "st_ppo"} <= set(options("algorithm"))
    composed = compose(["algorithm=my_ppo", "world=my_world"])
    assert load(composed).settings.algorithm.name == "my_ppo"
    assert composed["algorithm"]["objective"]["credit"]["pooling"] == "turn_mean"
    assert composed["world"]["n_train"] == 77


def test_class_of_a_module_in_the_folder(own):
    text = "defaults: [turn_ppo]\nname: powered\nobjective: {ratio: {_target_: own_ratios.MyRatio, power: 0.5}}\n"
    own("algorithm/powered.yaml", text)
    composed = compose(["algorithm=powered"])
    load(composed)
    ratio = build(composed["algorithm"]["objective"], "algorithm.objective").ratio
    assert type(ratio).__module__ == "own_ratios" and (ratio.power, ratio.granularity) == (0.5, "turn")
    assert "own_ratios" in imported_files(config_targets(composed["algorithm"]))


def test_name_of_a_shipped_file_is_refused(own):
    mine = own("algorithm/grpo.yaml", "name: grpo\n")
    message = refused("algorithm=my_ppo")
    assert str(mine) in message and str(config_files.config_dir() / "algorithm" / "grpo.yaml") in message
    assert "rename" in message


@pytest.mark.parametrize("name", ["", "name: grpo\n"])
def test_algorithm_that_would_be_recorded_under_another_name_is_refused(own, name):
    file = own(
        "algorithm/mine.yaml", f"defaults: [turn_ppo]\n{name}objective: {{credit: {{pooling: turn_mean}}}}\n"
    )
    message = refused("algorithm=mine")
    assert str(file) in message and "name: mine" in message
    assert compose(["algorithm=mine", "algorithm.name=arm"])["algorithm"]["name"] == "arm"


@pytest.mark.parametrize(
    ("folder", "part"), [("nowhere", "No such file"), ("my configs/algorithm", "none of")]
)
def test_folder_that_is_none_is_refused(own, tmp_path, monkeypatch, folder, part):
    monkeypatch.setenv(config_files.VARIABLE, str(tmp_path / folder))
    message = refused()
    assert str(tmp_path / folder) in message and part in message and "--config-dir" in message


def test_syntax_error_of_yaml_names_file_and_line(own):
    file = own("algorithm/bad.yaml", "name: bad\nobjective: {a: [}\n")
    assert refused("algorithm=bad").startswith(f"{file}: line 2: ")
    own("algorithm/bad.yaml", "- a\n")
    own("world/bad.yaml", "_target_: [\n")
    assert str(file.parents[1] / "world" / "bad.yaml") in refused("world=bad")


@pytest.mark.parametrize(
    ("target", "text", "part"),
    [
        ("own_ratios.None_such", "", "own_ratios.None_such: no such class"),
        ("own_broken.X", "class X(:\n", "SyntaxError"),
        ("own_absent.X", "", "No module named 'own_absent'"),
    ],
)
def test_class_that_cannot_be_had_says_why(own, target, text, part):
    own("own_broken.py", text)
    own(
        "algorithm/bad.yaml",
        f"defaults: [turn_ppo]\nname: bad\nobjective: {{ratio: {{_target_: {target}}}}}\n",
    )
    assert part in refused("algorithm=bad")


def test_key_that_is_inherited_and_does_not_fit_says_how_to_drop_it(own):
    text = "defaults: [my_ppo]\nname: bad\nobjective: {ratio: {_target_: own_ratios.Plain}}\n"
    own("algorithm/bad.yaml", text)
    ratio = "algorithm.objective.ratio"
    message = refused("algorithm=bad")
    assert message.startswith(f"{ratio}.granularity, {ratio}.aggregation: unknown keys; allowed: power")
    drops = [f"~{ratio}.granularity", f"~{ratio}.aggregation"]
    assert f"what a file inherits is dropped by '{drops[0]}'" in message
    assert "needed" in refused("algorithm=bad", *drops), "a Ratio is needed, but the keys are gone"


def test_command_takes_the_folder(own, tmp_path, stppo):
    folder = str(tmp_path / "my configs")
    override = "pipeline.regimes.OFF_POLICY.algorithms=[my_ppo]"
    for arguments in (
        ["plan", "preset=smoke", override, "--config-dir", folder],
        ["--config-dir", folder, "plan", "preset=smoke", override],
    ):
        code, out, error = stppo(*arguments)
        assert code == 0 and "my_ppo" in out, error
