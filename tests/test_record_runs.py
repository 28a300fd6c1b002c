import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stppo.config.algorithms import look
from stppo.files import write_atomically
from stppo.record import schema
from stppo.record.runs import TABLE_MEANS, collect, load_metrics, read_run, uncollected
from tests.synthetic_runs import N_UPDATES, START, Dynamics, gather, make_run, make_study, simulate


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    folders = make_study(root / "runs", seeds=2)
    return folders, collect(folders, root / "metrics"), root / "metrics"


def test_round_trip_keeps_runs_rows_and_verdicts(study):
    folders, collected, out = study
    loaded = load_metrics(out)
    assert len(loaded.runs) == len(folders) == 20
    assert loaded.algorithms("LONG") == ["st_ppo", "token_ppo"]
    pd.testing.assert_frame_equal(loaded.table, collected.table, rtol=1e-5)


def test_collected_in_parts_gives_the_same_bytes(study, tmp_path):
    folders, _, out = study
    collect(folders[3:11], tmp_path / "part")
    collect([*folders[11:], tmp_path / "part", *folders[:3]], tmp_path / "whole")
    for path in out.iterdir():
        assert (tmp_path / "whole" / path.name).read_bytes() == path.read_bytes(), path.name


def test_run_in_two_parts_is_refused(study, tmp_path):
    folders, _, out = study
    with pytest.raises(ValueError, match="are the same run"):
        collect([out, folders[0]], tmp_path)


def test_iterations_hold_means_and_peaks(study):
    folders, collected, _ = study
    record, updates, _ = read_run(folders[0])
    first = updates[updates["iteration"] == 3]
    rows = collected.select(collected.iterations, record)
    row = rows[rows["iteration"] == 3].iloc[0]
    assert len(first) == N_UPDATES
    assert row["gradient_norm"] == pytest.approx(first["gradient_norm"].mean())
    assert row["gradient_norm_max"] == pytest.approx(first["gradient_norm"].max())
    # computed on one update of four: the mean skips the others
    assert row["clipping_bias_norm"] == pytest.approx(first["clipping_bias_norm"].max())
    assert {f"{name}_max" for name in schema.PEAK_COLUMNS} <= set(rows)


def test_summary_holds_known_truth(study):
    summary = pd.read_csv(study[2] / schema.SUMMARY_FILE)
    assert list(summary) == list(schema.SUMMARY_COLUMNS)
    outcomes = summary[summary["regime"] == "A"].groupby("algorithm")["outcome"].unique()
    assert {name: list(found) for name, found in outcomes.items()} == {
        **dict.fromkeys(("turn_ppo", "st_ppo", "so_grpo", "gspo"), ["learned"]),
        **dict.fromkeys(("so_ppo_ctn", "grpo"), ["did not learn"]),
        "token_ppo": ["collapsed"],
        "s_ppo": ["crashed and recovered"],
        "so_grpo_ctn": ["lost its start"],
    }
    assert (summary["start"] == START).all()
    assert summary[summary["algorithm"] == "st_ppo"]["final"].between(0.7, 0.9).all()
    fell = summary[(summary["algorithm"] == "token_ppo") & (summary["regime"] == "A")]
    assert fell["crash_iteration"].between(20, 30).all()


def test_table_counts_runs_and_averages_worlds(study):
    table = study[1].table
    assert table["algorithm"].tolist()[:4] == ["token_ppo", "turn_ppo", "s_ppo", "st_ppo"]
    rows = table.set_index(["regime", "algorithm"])
    counts = rows[["runs", "worlds", "learned", "crashed", "collapsed"]]
    assert counts.loc[("A", "token_ppo")].tolist() == [2, 2, 2, 2, 2]
    assert counts.loc[("A", "s_ppo")].tolist() == [2, 2, 2, 2, 0]
    assert counts.loc[("LONG", "st_ppo")].tolist() == [1, 1, 1, 0, 0]
    st_ppo = study[1].arm("A", "st_ppo")
    for name in TABLE_MEANS:
        assert rows.loc[("A", "st_ppo"), name] == pytest.approx(st_ppo[name].mean())
    assert np.isnan(rows.loc[("A", "grpo"), "gain_kept"]), "nothing was learned, so nothing can be kept"


def test_a_world_counts_once_however_many_runs_it_has():
    runs = [simulate("st_ppo", 0), simulate("st_ppo", 1), simulate("st_ppo", 2, dynamics=Dynamics(0.3))]
    runs[1][0]["world_seed"] = 0
    metrics = gather(runs)
    final = metrics.summary["final"]
    row = metrics.table.iloc[0]
    assert (row["runs"], row["worlds"]) == (3, 2)
    assert row["final"] == pytest.approx(((final[0] + final[1]) / 2 + final[2]) / 2)


def test_a_recorded_label_goes_before_the_styles():
    runs = [simulate("token_ppo", 0), simulate("token_ppo_kl_stop", 0, dynamics=Dynamics(0.6))]
    runs[1][0]["label"] = "token PPO, KL stop"
    metrics = gather(runs)
    assert metrics.look("token_ppo_kl_stop").label == "token PPO, KL stop"
    assert metrics.look("token_ppo") == look("token_ppo")
    assert metrics.look("token_ppo_kl_stop").color == look("token_ppo_kl_stop").color
    assert metrics.table["label"].tolist() == [look("token_ppo").label, "token PPO, KL stop"]


def test_what_was_trained_is_read_from_the_runs_config(study):
    record = next(r for r in study[1].runs if r["algorithm"] == "gspo")
    assert record["objective"]["ratio"]["granularity"] == "sequence"
    assert study[1].settings(record) == {"learning_rate": 3.5e-4, "epochs": 2, "staleness": 2}


def test_settings_without_a_config_are_those_of_the_rows(tmp_path):
    folder = make_run(tmp_path / "run", "st_ppo", learning_rate=7e-5, staleness_iterations=4)
    (folder / schema.CONFIG_FILE).unlink()
    metrics = collect([folder], tmp_path / "out")
    assert metrics.settings(metrics.runs[0]) == {"learning_rate": 7e-5, "epochs": 2, "staleness": 4}


def test_epochs_of_a_run_that_stops_early_are_unknown_without_a_config():
    record, updates, evaluations = simulate("st_ppo")
    del record["training"]
    metrics = gather(
        [(record, updates[(updates["iteration"] % 2 == 0) | (updates["epoch"] == 0)], evaluations)]
    )
    assert np.isnan(metrics.settings(record)["epochs"])


def test_broken_config_of_a_run_is_named(run, tmp_path):
    (run / schema.CONFIG_FILE).write_text("algorithm: {}")
    with pytest.raises(ValueError, match="config.yaml is unreadable .*snakemake"):
        collect([run], tmp_path / "out")


def test_non_finite_run_counts_as_collapsed_where_it_stopped(tmp_path):
    folder = make_run(tmp_path / "run", "st_ppo", iterations=12, non_finite=True)
    summary = collect([folder], tmp_path / "out").summary
    assert summary["collapsed"].all() and (summary[["final", "greedy_final"]] == 0).all(axis=None)
    assert summary["crash_iteration"].tolist() == [12]


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "results/smoke/runs/one", "grpo", iterations=6)


def set_field(run, **fields):
    file = run / schema.RUN_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("name", [schema.RUN_FILE, schema.UPDATES_FILE, schema.EVALUATIONS_FILE])
def test_missing_file_names_run_and_command(run, name):
    (run / name).unlink()
    with pytest.raises(FileNotFoundError) as error:
        read_run(run)
    assert f"{run / name} is missing" in str(error.value)
    assert f"snakemake {run}/run.json --config preset=smoke" in str(error.value)


@pytest.mark.parametrize("name", [schema.RUN_FILE, schema.UPDATES_FILE, schema.EVALUATIONS_FILE])
def test_corrupted_file_names_run_and_command(run, name):
    (run / name).write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=f"{name} is unreadable .*snakemake") as error:
        read_run(run)
    assert "\n" not in str(error.value)


def test_missing_column_is_named(run):
    frame = pd.read_parquet(run / schema.UPDATES_FILE).drop(columns="clip_fraction")
    frame.to_parquet(run / schema.UPDATES_FILE)
    with pytest.raises(ValueError, match="lacks column clip_fraction"):
        read_run(run)


def test_broken_run_leaves_an_earlier_collection_untouched(run, tmp_path):
    out = tmp_path / "out"
    collect([run], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = make_run(tmp_path / "two", "gspo", iterations=6)
    (other / schema.UPDATES_FILE).write_bytes(b"")
    with pytest.raises(ValueError):
        collect([run, other], out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_missing_metrics_name_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="snakemake .*runs.json --config preset=smoke"):
        load_metrics(tmp_path / "results" / "smoke" / "metrics")


NEEDED = (*schema.KEY_COLUMNS, "status", "preset", "world", "world_seed", "warm_start_seed", "iterations")
NEEDED += ("updates", "warm_start", "wall_seconds")


def without(*parts):
    """Of records, the last part, all but the named fields."""
    *names, runs = parts
    return [{name: value for name, value in run.items() if name not in names} for run in runs]


@pytest.fixture
def changed(run, tmp_path):
    """A metrics folder of one run, its record changed by a function."""

    def change(by):
        file = tmp_path / "results/smoke/metrics" / schema.RUNS_FILE
        collect([run], file.parent)
        file.write_text(json.dumps(by(json.loads(file.read_text()))))
        return file.parent

    return change


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (lambda runs: {"runs": runs}, "is no list of runs"),
        (lambda runs: [], "holds no runs"),
        (lambda runs: [*runs, "x"], ", run 2 lacks every field"),
        *((partial(without, name), f", run 1 lacks {name}") for name in NEEDED),
        (lambda runs: [run | {"iterations": "x"} for run in runs], "run 1: iterations = 'x' is not what"),
        (lambda runs: [run | {"updates": None} for run in runs], "run 1: updates = None is not what"),
        (lambda runs: [run | {"variant": 3} for run in runs], "run 1: variant = 3 is not what"),
        (lambda runs: [run | {"warm_start": {}} for run in runs], ", run 1 lacks warm_start.success_sampled"),
    ],
)  # fmt: skip
def test_records_that_no_collection_writes_are_named_in_one_line(changed, by, said):
    with pytest.raises(ValueError) as error:
        load_metrics(changed(by))
    message = str(error.value)
    assert f"smoke/metrics/{schema.RUNS_FILE}" in message and said in message
    assert "make it anew with: snakemake" in message and "\n" not in message


def test_records_of_an_older_version_are_read(changed):
    optional = ("label", "variant", "resumed_on", "objective", "training", "cpu_seconds", "versions")
    old = changed(partial(without, *optional))
    assert len(load_metrics(old).summary) == 1


@pytest.mark.parametrize(
    ("name", "column"),
    [(schema.ITERATIONS_FILE, "clip_fraction"), (schema.COLLECTED_EVALUATIONS_FILE, "success")],
)
def test_a_table_without_a_column_is_named(changed, name, column):
    file = changed(lambda runs: runs) / name
    pd.read_parquet(file).drop(columns=column).to_parquet(file)
    with pytest.raises(ValueError, match=f"{name} lacks column {column}; make it anew"):
        load_metrics(file.parent)


def test_unfinished_run_is_refused(run):
    set_field(run, status="running")
    with pytest.raises(ValueError, match="unfinished"):
        read_run(run)


def test_runs_that_say_something_else_than_was_collected_are_found(run, tmp_path):
    """As where a run is brought home with its old time stamps."""
    out = tmp_path / "out"
    assert uncollected(out, [run]) == []
    collect([run], out)
    assert uncollected(out, [run, tmp_path / "nowhere"]) == []
    set_field(run, updates=7)
    os.utime(run / "run.json", (1, 1))
    assert uncollected(out, [run]) == [run / "run.json"]


def test_failed_write_leaves_the_old_file_and_no_debris(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def fail(path):
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        write_atomically(file, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"] and file.read_text() == "old"


# ---- the schema ------------------------------------------------------------------------------------


REFERENCE = Path(__file__).parents[1] / "results/reference"


def test_every_name_is_an_identifier_with_a_one_line_text():
    for columns in schema.GLOSSARY.values():
        for name, text in columns.items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
            assert text and "\n" not in text, name


def test_every_seconds_column_is_a_timing_column():
    columns = [*schema.UPDATE_COLUMNS, *schema.EVALUATION_COLUMNS]
    assert {c for c in columns if c.startswith("seconds")} <= set(schema.TIMING_COLUMNS)


@pytest.mark.parametrize(
    "file", sorted(REFERENCE.rglob("runs.json")), ids=lambda file: str(file.parent.relative_to(REFERENCE))
)
def test_every_committed_record_is_read_by_the_model(file):
    """Those of earlier versions too, whose columns are known, means and peaks of iterations included."""
    records = json.loads(file.read_text(encoding="utf-8"))
    for n, record in enumerate(records):
        schema.check_record(record, f"{file} {n}", "nothing")
        read = schema.RunRecord.model_validate(record)
        assert (read.seed, read.warm_start.success_sampled) == (
            record["seed"],
            record["warm_start"]["success_sampled"],
        )
    known = {*schema.KEY_COLUMNS, *schema.UPDATE_COLUMNS, *(f"{name}_max" for name in schema.PEAK_COLUMNS)}
    table = file.with_name("iterations.parquet")
    assert not table.exists() or set(pd.read_parquet(table)) <= known


def test_a_row_refuses_what_is_no_column():
    row = schema.Row(schema.UPDATE_COLUMNS, {"update": 1})
    row |= {"iteration": 1}
    for write in (lambda: row.__setitem__("updat", 1), lambda: row.__ior__({"updat": 1})):
        with pytest.raises(KeyError, match="updat is no column"):
            write()
    assert row == {"update": 1, "iteration": 1}


def test_a_mixture_of_two_collections_is_refused(run, tmp_path, monkeypatch):
    out, swap, moved = tmp_path / "out", os.replace, []
    collect([run], out)

    def killed(source, target):
        if Path(target).parent == out:
            moved.append(target)
            if len(moved) == 3:
                raise KeyboardInterrupt
        swap(source, target)

    monkeypatch.setattr(os, "replace", killed)
    other = make_run(tmp_path / "two", "gspo", iterations=6)
    with pytest.raises(KeyboardInterrupt):
        collect([run, other], out)
    with pytest.raises(ValueError, match="is of other runs than runs.json; make both with: "):
        load_metrics(out)
    monkeypatch.undo()
    collect([run, other], out)
    assert len(load_metrics(out).runs) == 2 and len(list(out.iterdir())) == 4
