import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from stppo import config, schema
from stppo.results import runs
from stppo.results.runs import collect, load_metrics, make_command, read_run, repository_path
from tests.synthetic_runs import N_UPDATES, START, make_run, make_study


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


def test_collected_again_in_another_order_gives_the_same_bytes(study, tmp_path):
    folders, _, out = study
    collect(folders[::-1], tmp_path)
    names = sorted(path.name for path in out.iterdir())
    assert names == ["evaluations.parquet", "iterations.parquet", "runs.json", "summary.csv"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes(), name


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


def test_files_are_compact(study):
    out = study[2]
    file = pq.ParquetFile(out / schema.ITERATIONS_FILE)
    column = file.metadata.row_group(0).column(4)
    assert column.compression == "ZSTD"
    assert {str(f.type) for f in file.schema_arrow} == {"string", "int32", "float"}


def test_summary_holds_known_truth(study):
    collected, out = study[1:]
    summary = pd.read_csv(out / schema.SUMMARY_FILE)
    assert list(summary) == list(schema.SUMMARY_COLUMNS)
    collapsed = summary.groupby("algorithm")["collapsed"].all()
    assert collapsed["token_ppo"] and not collapsed["st_ppo"]
    best = summary[summary["algorithm"] == "st_ppo"]
    assert best["success_final"].between(0.38, 0.52).all()
    assert (summary["success_start"] == START).all()
    assert summary[summary["algorithm"] == "token_ppo"]["collapse_iteration"].between(8, 48).all()


def test_finals_compare_with_the_first_algorithm(study):
    finals = study[1].finals(("token_ppo", "st_ppo"))
    assert finals["algorithm"].tolist() == ["token_ppo", "st_ppo"] * 2
    np.testing.assert_allclose(finals["mean minus token_ppo"][0], 0)
    assert finals["mean minus token_ppo"][1] > 0.3


def test_clip_trend_sees_a_rise(study):
    trends = study[1].clip_trends(("token_ppo", "st_ppo")).set_index(["regime", "algorithm"])
    assert trends.loc[("A", "token_ppo"), "smallest change"] > 0.03
    assert abs(trends.loc[("LONG", "st_ppo"), "change"]) < 0.06


def test_non_finite_run_counts_as_collapsed_where_it_stopped(tmp_path):
    folder = make_run(tmp_path / "run", "st_ppo", iterations=12, non_finite=True)
    metrics = collect([folder], tmp_path / "out")
    assert metrics.summary["collapsed"].all()
    assert metrics.summary["collapse_iteration"].tolist() == [12]
    assert load_metrics(tmp_path / "out").collapses[("A", "st_ppo", 0)].label == "non-finite"


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


def test_unfinished_run_is_refused(run):
    set_field(run, status="running")
    with pytest.raises(ValueError, match="unfinished"):
        read_run(run)


def test_record_without_a_field_names_it(run):
    file = run / schema.RUN_FILE
    record = json.loads(file.read_text())
    del record["warm_start"]
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="lacks warm_start"):
        read_run(run)


def test_missing_column_is_named(run):
    frame = pd.read_parquet(run / schema.UPDATES_FILE).drop(columns="clip_fraction")
    frame.to_parquet(run / schema.UPDATES_FILE)
    with pytest.raises(ValueError, match="lacks column clip_fraction"):
        read_run(run)


def test_same_run_twice_is_refused(run, tmp_path):
    twin = shutil.copytree(run, tmp_path / "twin")
    with pytest.raises(ValueError, match="same run"):
        collect([run, twin], tmp_path / "out")


def test_nothing_to_collect_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no runs"):
        collect([], tmp_path)


def test_broken_run_leaves_an_earlier_collection_untouched(run, tmp_path):
    out = tmp_path / "out"
    collect([run], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = make_run(tmp_path / "two", "gspo", iterations=6)
    (other / schema.UPDATES_FILE).write_bytes(b"")
    with pytest.raises(ValueError):
        collect([run, other], out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_failed_write_leaves_the_old_file_and_no_debris(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def fail(path):
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        runs.write_atomically(file, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"] and file.read_text() == "old"


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("results/smoke/runs/x/run.json", "snakemake results/smoke/runs/x/run.json --config preset=smoke"),
        ("results/reference/laptop/metrics/runs.json", "snakemake reference --config preset=laptop"),
        (
            "results/smoke/manual/LONG/st_ppo/seed3-0123abcd/run.json",
            "stppo train preset=smoke training=regime_long algorithm=st_ppo seed=3"
            " --out results/smoke/manual/LONG/st_ppo/seed3-0123abcd",
        ),
        ("results/smoke/manual/own/run.json", "stppo train preset=smoke --out results/smoke/manual/own"),
        ("elsewhere/run.json", "snakemake elsewhere/run.json"),
    ],
)
def test_remedy_names_the_preset(target, command):
    assert make_command(target) == command


@pytest.mark.parametrize("regime", ["A", "LONG", "ON_POLICY", "mine"])
def test_remedy_of_a_manual_run_composes_to_that_run(regime):
    command = make_command(f"results/smoke/manual/{regime}/st_ppo/seed3-0123abcd/run.json").split()
    run = config.compose(command[2 : command.index("--out")])
    found = (run["preset"], run["training"]["regime"], run["algorithm"]["name"], run["seed"])
    assert found == ("smoke", regime, "st_ppo", 3)


def test_missing_metrics_name_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="snakemake .*runs.json --config preset=smoke"):
        load_metrics(tmp_path / "results" / "smoke" / "metrics")


def test_relative_path_is_found_from_a_subfolder(tmp_path, monkeypatch):
    (tmp_path / "Snakefile").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert repository_path("results/x") == tmp_path / "results/x"
