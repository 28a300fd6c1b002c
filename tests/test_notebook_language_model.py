"""Notebook 26 on a run of a few updates: its cells of texts are skipped where no run lies, so only this executes them."""

import json
from pathlib import Path

import papermill

from stppo.config.loading import build, load
from stppo.record.runs import collect
from stppo.training.run import Run
from stppo.training.warm_start import warm_start
from tests.test_training_warm_start_pretrained import model, records, small

__all__ = ["model", "records", "small"]  # fixtures

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "26-language-model.ipynb"


def test_every_cell_runs_and_no_passage_of_the_training_is_asked_for(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # outside the repository, whose own results stay as they are
    config = small(
        "training.iterations=2",
        "training.trajectories_per_iteration=8",
        "training.epochs=1",
        "training.staleness_iterations=0",
        "evaluation.every=2",
        "evaluation.greedy_every=2",
    )
    # Another version of the code may have named the start.
    start = Path("results/smollm/warm_start/seed0-0123456789ab")
    run = Path("results/smollm/runs/SMOLLM/token_ppo/seed0")
    warm_start(load(config), start, progress=False)
    Run(load(config), run, start, progress=False).train()
    collect([run], "results/smollm/metrics")
    parameters = {"algorithm": "token_ppo", "seed": 0, "n_questions": 6}
    papermill.execute_notebook(
        NOTEBOOK, "26.ipynb", parameters=parameters, cwd=tmp_path, kernel_name="python3", progress_bar=False
    )

    cells = json.loads(Path("26.ipynb").read_text())["cells"]
    printed = "".join(
        "".join(output.get("data", {}).get("text/html", output.get("text", "")))
        for cell in cells
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    )
    for said in ("an answer of a training question", "hops", "searches a question", "outside [0.8, 1.2]"):
        assert said in printed, said

    trained = {t for q in build(config["world"], "world").questions("train") for t, _ in q.gold_paragraphs}
    numbers = json.loads(Path("results/scratch/smollm/token_ppo_seed0.json").read_text())
    assert {row["agent"] for row in numbers["one hop"] + numbers["more hops"]} == {"before", "after"}
    for agent in ("before", "after"):
        asked = [
            sum(row["n_questions"] for row in numbers[name] if row["agent"] == agent)
            for name in ("one hop", "one hop, by length")
        ]
        assert asked[0] == asked[1] > 0, "both tables divide the same questions"

    answers = json.loads(
        Path("results/scratch/smollm/more_hops/token_ppo_seed0/musique/greedy/result.json").read_text()
    )
    records_by_id = {
        record["id"]: {p["title"] for p in record["paragraphs"] if p["is_supporting"]}
        for record in map(json.loads, Path(config["world"]["records"]).read_text().splitlines())
    }
    played = [records_by_id[answer["id"]] for answer in answers["questions"]]
    assert played and not any(titles & trained for titles in played)
