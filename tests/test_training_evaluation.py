"""`stppo evaluate`: any checkpoint on any benchmarks, written down as each ends."""

import json
import math
import random
import re
import shutil
import statistics
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.policy.policy import load_policy, load_tokenizer
from stppo.pretrained.tiny_model import make_tiny_model
from stppo.record import schema
from stppo.retrieval.client import RetrievalUnavailable
from stppo.rollout.rollout import Rollout
from stppo.rollout.rollout_torch import TorchRollout
from stppo.training.evaluation import evaluate_checkpoint, ratio_and_error, replies_of, summarise
from stppo.training.metrics import evaluate, trajectory_records, write_tables
from stppo.training.run import Run
from stppo.training.warm_start import warm_start
from stppo.trajectories import Trajectories
from stppo.world import DemonstrationNoise, Episode, Question, SyntheticWorld, play
from stppo.world.environment import NothingFound
from tests.conftest import TINY, assert_one_line_error

NQ = [{"question": f"who wrote book {i}", "answer": [f"author {i}"]} for i in range(7)]
BAMBOOGLE = [{"Question": f"Where is town {i}?", "Answer": f"Land {i}"} for i in range(5)]
CORPUS = [{"id": str(i), "contents": f'"Town {i}"\nTown {i} is in Land {i}.'} for i in range(20)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A folder with two benchmarks, a corpus and a random model."""
    folder = tmp_path_factory.mktemp("bench")
    for name, records in (("nq", NQ), ("bamboogle", BAMBOOGLE), ("corpus", CORPUS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    make_tiny_model(folder / "model", [json.dumps(CORPUS)], vocabulary=400)
    return folder


@pytest.fixture(scope="module")
def overrides(bench):
    return [
        "world=benchmark",
        "world.benchmark=[nq,bamboogle]",
        f"world.records={{nq: {bench}/nq.jsonl, bamboogle: {bench}/bamboogle.jsonl}}",
        f"world.corpus={bench}/corpus.jsonl",
        "world.cache_dir=null",
        "world.turn_budget=1",
        "world.max_turn_tokens=6",
        "rollout.max_tokens=900",
        "rollout.batch_size=4",
    ]


def run(bench, overrides, out, **options):
    return evaluate_checkpoint(bench / "model", compose(overrides), out, progress=False, **options)


def content(folder):
    """Every file of a folder but for how long things took."""
    texts = {}
    for path in sorted(folder.rglob("*.json")):
        texts[str(path.relative_to(folder))] = found = json.loads(path.read_text())
        for row in (
            [found["row"]] if "row" in found else found.get("results", []) if isinstance(found, dict) else []
        ):
            row.pop("seconds")
    return texts


# --- numbers ---------------------------------------------------------------------------------------


def test_means_are_those_of_the_episodes():
    world = SyntheticWorld(n_train=8, n_validation=8, n_test=200)
    episodes = play(world, world.questions("test"), random.Random(0), DemonstrationNoise(malformed=0.2))
    found = summarise(episodes)
    right = [float((e.answer or "").lower() == e.question.answers[0]) for e in episodes]
    turns = [turn for e in episodes for turn in e.turns]
    assert 0.2 < found["em"] < 0.9, "the case must have right and wrong answers"
    assert found["em"] == pytest.approx(statistics.mean(right))
    assert found["em_se"] == pytest.approx(statistics.stdev(right) / len(right) ** 0.5)
    assert found["turns"] == pytest.approx(len(turns) / len(episodes))
    assert found["valid_format_rate"] == pytest.approx(
        sum(turn.action.kind != "invalid" for turn in turns) / len(turns)
    )
    blind = [
        Episode(e.question, "", answer=e.question.answers[0] if i % 4 == 0 else None)
        for i, e in enumerate(episodes)
    ]
    assert (
        summarise(episodes, blind)["em_without_search"] == pytest.approx(0.25)
        and "em_without_search" not in found
    )
    assert found["f1"] > found["em"], "wrong entities share a name with right ones"


def test_standard_error_of_a_ratio_is_that_of_its_variances_and_covariance():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 6, 300)
    values = rng.binomial(sizes, 0.7)
    ratio, error = ratio_and_error(values.tolist(), sizes.tolist())
    (vy, vxy), (_, vx) = np.cov(values, sizes)
    assert ratio == pytest.approx(values.sum() / sizes.sum())
    expected = (vy + ratio**2 * vx - 2 * ratio * vxy) / len(sizes) / sizes.mean() ** 2
    assert error == pytest.approx(expected**0.5)
    assert np.isnan(ratio_and_error([1.0], [1.0])[1])


def test_training_keeps_the_success_on_each_of_several_benchmarks(bench, overrides, tmp_path):
    config = compose([*overrides, f"policy.pretrained={bench}/model"])
    world, settings = build(config["world"], "world"), load(config).settings
    policy = load_policy(bench / "model")
    sampler = TorchRollout(world.environment, load_tokenizer(bench / "model"), settings.rollout)
    row, _ = evaluate(sampler, policy, world.questions("test"), True, 0)
    assert row["by_benchmark"] == {"nq": 0.0, "bamboogle": 0.0}
    one, _ = evaluate(sampler, policy, world.questions("test")[:3], True, 0)
    assert "by_benchmark" not in one
    place = {"iteration": 4, "update": 8}
    write_tables(tmp_path, [], [{**place, **row}])
    (kept,) = json.loads((tmp_path / schema.BY_BENCHMARK_FILE).read_text())
    assert kept == {**place, "temperature": 0.0, "by_benchmark": row["by_benchmark"]}
    assert list(pd.read_parquet(tmp_path / schema.EVALUATIONS_FILE)) == list(schema.EVALUATION_COLUMNS)


def test_a_character_of_several_tokens_is_shown_whole(bench):
    tokenizer = load_tokenizer(bench / "model")
    text = "Zürich 한국 𝄞 <answer> Łódź </answer>"
    ids = tokenizer(text)["input_ids"]
    half = tokenizer("한")["input_ids"][:2]
    assert len(ids) > len(text) and "\ufffd" in tokenizer.decode(half)
    zeros = torch.zeros(1, len(ids + half))
    own = torch.tensor([[False] * len(ids) + [True] * len(half)])
    batch = Trajectories(
        torch.tensor([ids + half]),
        torch.tensor([len(ids + half)]),
        own,
        zeros,
        zeros,
        torch.tensor([0]),
        torch.tensor([0]),
    )
    episode = Episode(Question("1", "Who?", ("I",)), "")
    (record,) = trajectory_records(Rollout(batch, [episode]), tokenizer, 1)
    assert "".join(record["tokens"][: len(ids)]) == text
    assert "\ufffd" in "".join(record["tokens"][len(ids) :]), "what the agent left unfinished"


# --- files -----------------------------------------------------------------------------------------


def test_each_benchmark_and_decoding_has_its_row_and_its_folder(bench, overrides, tmp_path):
    rows = run(bench, overrides, tmp_path, decodings=("greedy", "sampled"), trajectories=2)
    pairs = [(row["benchmark"], row["decoding"], row["n_questions"]) for row in rows]
    assert pairs == [(b, d, n) for b, n in (("nq", 7), ("bamboogle", 5)) for d in ("greedy", "sampled")]
    table = pd.read_csv(tmp_path / schema.BENCHMARKS_TABLE_FILE)
    assert list(table) == list(schema.BENCHMARK_COLUMNS) and len(table) == 4
    whole = json.loads((tmp_path / schema.BENCHMARKS_FILE).read_text())
    assert whole["results"] == rows and whole["environment"]["versions"]["torch"]
    part = json.loads((tmp_path / "nq" / "sampled" / schema.RESULT_FILE).read_text())
    assert [question["id"] for question in part["questions"]] == [f"nq-{i}" for i in range(1, 8)]
    replies = replies_of(tmp_path)
    means = replies.groupby(["benchmark", "decoding"])[["em", "searches"]].agg(["size", "mean"])
    for row in rows:
        of = means.loc[(row["benchmark"], row["decoding"])]
        assert (of["em", "size"], of["em", "mean"]) == (row["n_questions"], row["em"])
        assert of["searches", "mean"] == pytest.approx(row["searches"])
        assert row["em_constant"] == pytest.approx(1 / row["n_questions"]), "each answer is right once"
        assert row["lenient_em"] >= row["em"] and not math.isnan(row["em_without_search"])
    kept = json.loads((tmp_path / "nq" / "sampled" / schema.TRAJECTORIES_FILE).read_text())
    fields = set(schema.TrajectoryRecord.model_fields) - {"turn_rewards"}  # nothing was paid but the answer
    assert [set(record) for record in kept] == [fields] * 2
    assert kept[0]["question"] == NQ[0]["question"] and "<|im_start|>" in kept[0]["tokens"]


def test_a_sample_of_the_questions_is_one_of_each_benchmark(bench, overrides, tmp_path):
    def asked(out, **options):
        run(bench, overrides, out, questions=3, **options)
        return {
            name: [q["id"] for q in json.loads((out / name / "greedy/result.json").read_text())["questions"]]
            for name in ("nq", "bamboogle")
        }

    first, again, other = asked(tmp_path / "a"), asked(tmp_path / "b"), asked(tmp_path / "c", seed=1)
    assert first == again != other and {len(ids) for ids in first.values()} == {3}


def test_what_was_finished_before_a_failure_is_kept_and_not_played_again(
    bench, overrides, tmp_path, monkeypatch
):
    uninterrupted, broken = tmp_path / "whole", tmp_path / "broken"
    run(bench, overrides, uninterrupted)
    original, asked, searchless = TorchRollout.collect, [], []

    def collect(self, policy, questions, *args, **kwargs):
        asked.append({question.source for question in questions})
        searchless.append(isinstance(self.environment.retriever, NothingFound))
        if len(asked) == 7:  # two chunks of nq, each with and without search; bamboogle fails at its second
            raise RetrievalUnavailable("retrieval server http://x: no usable answer")
        return original(self, policy, questions, *args, **kwargs)

    monkeypatch.setattr(TorchRollout, "collect", collect)
    with pytest.raises(OSError, match="no usable answer; 1 of 2 results are in .*goes on from there"):
        run(bench, overrides, broken)
    assert [row["benchmark"] for row in json.loads((broken / "benchmarks.json").read_text())["results"]] == [
        "nq"
    ]
    run(bench, overrides, broken)
    assert asked[7:] == [{"bamboogle"}] * 4
    run(bench, overrides, broken)
    assert len(asked) == 11, "a finished evaluation plays nothing"
    assert content(broken) == content(uninterrupted)
    assert searchless[:6] == [False, True] * 3, "each chunk is played with and without search"


@pytest.mark.parametrize("change", ["checkpoint", "world.top_k=1", "rollout.max_tokens=800", "questions"])
def test_results_of_something_else_are_refused_and_stay(bench, overrides, tmp_path, change):
    out = tmp_path / "out"
    run(bench, overrides, out)
    before = content(out)
    other, options = list(overrides), {}
    place = bench
    if change == "checkpoint":
        place = tmp_path / "other"
        make_tiny_model(place / "model", [json.dumps(CORPUS)], vocabulary=400, seed=1)
    elif change == "questions":
        options["questions"] = 3
    else:
        other.append(change)
    with pytest.raises(ValueError, match="nq/greedy/result.json belongs to another .*--out"):
        run(place, other, out, **options)
    assert content(out) == before


def test_a_damaged_result_is_named(bench, overrides, tmp_path):
    run(bench, overrides, tmp_path)
    (tmp_path / "nq/greedy/result.json").write_text('{"row": ')
    with pytest.raises(ValueError, match="nq/greedy/result.json is damaged; delete it"):
        run(bench, overrides, tmp_path)


# --- the command -----------------------------------------------------------------------------------


SMALL = [option for option in TINY if option.startswith(("preset=", "world."))]


def test_a_warm_start_and_a_run_folder_are_checkpoints(barely_trained, tmp_path, stppo):
    arguments = ("evaluate", barely_trained, *SMALL, "--decoding", "both", "--out", tmp_path / "a")
    status, said, error = stppo(*arguments)
    assert status == 0, error
    assert said.splitlines()[0].split()[:4] == ["benchmark", "decoding", "n_questions", "em"]
    assert [line.split()[:3] for line in said.splitlines()[1:]] == [
        ["synthetic", "greedy", "32"],
        ["synthetic", "sampled", "32"],
    ]
    folder = tmp_path / "run"
    (folder / "policy").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    for name in ("config.json", "model.safetensors"):  # weights alone: the world has the tokenizer
        (folder / "policy" / name).write_bytes((barely_trained / name).read_bytes())
    status, again, _ = stppo(*arguments[:1], folder, *arguments[2:-1], tmp_path / "b")
    assert status == 0 and again == said


def test_a_run_from_pretrained_weights_is_evaluated_with_its_own_tokenizer(bench, overrides, tmp_path):
    config = compose(
        ["preset=smoke", *overrides, "world.benchmark=bamboogle", "world.train=nq", "world.held_out=0.4"]
        + [f"policy.pretrained={bench}/model", "warm_start.max_steps=0", "warm_start.final_samples=1"]
        + ["evaluation.questions=1", "training.iterations=1", "training.epochs=1"]
        + ["training.trajectories_per_iteration=4"]
    )
    warm_start(load(config), tmp_path / "start", progress=False)
    Run(load(config), tmp_path / "run", tmp_path / "start", progress=False).train()
    (row,) = evaluate_checkpoint(tmp_path / "run", config, tmp_path / "out", questions=2, progress=False)
    assert row["benchmark"] == "bamboogle" and row["n_questions"] == 2


def test_what_a_training_by_gold_titles_met_is_not_asked(bench, tmp_path, caplog):
    """Questions of one hop were trained on; those of two hops, of the same records, need some of the same passages."""
    names = ["Aral", "Brod", "Cori", "Dunn", "Elva", "Fagg"]
    records = []
    for i, pair in enumerate(zip(names[::2], names[1::2], strict=True)):
        paragraphs = [
            {"idx": j, "title": name, "paragraph_text": f"{name} is by {name}son.", "is_supporting": True}
            for j, name in enumerate(pair)
        ]
        hops = [
            {"id": j, "question": f"Who is of {name}?", "answer": f"{name}son", "paragraph_support_idx": j}
            for j, name in enumerate(pair)
        ]
        asked = {"question": f"Who founded the town of {pair[0]}?", "answer": f"{pair[0]}son"}
        asked |= {"answer_aliases": [], "answerable": True}
        records.append({"id": str(i), **asked, "paragraphs": paragraphs, "question_decomposition": hops})
    file = tmp_path / "musique.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = [
        "world=single_hop",
        "world.train=[musique_single_hop]",
        f"world.records={file}",
        "world.cache_dir=null",
    ]
    trained = compose([*options, "world.benchmark=[musique_single_hop]", "world.held_out=0.3"])
    world = build(trained["world"], "world")
    met = {title for q in world.questions("train") for title, _ in q.gold_paragraphs}
    clean = [r["id"] for r in records if not met & {p["title"] for p in r["paragraphs"]}]
    assert 0 < len(clean) < len(records), "else the test shows nothing"

    short = ["world.turn_budget=1", "world.max_turn_tokens=6", "world.max_start_tokens=400"]
    whole = compose([*options, "world.benchmark=[musique]", *short])
    play = partial(evaluate_checkpoint, bench / "model", whole, progress=False)
    assert play(tmp_path / "all")[0]["n_questions"] == len(records)
    assert play(tmp_path / "unseen", trained_on=trained)[0]["n_questions"] == len(clean)
    asked = json.loads((tmp_path / "unseen/musique/greedy/result.json").read_text())["questions"]
    assert [question["id"] for question in asked] == clean
    assert f"{len(records) - len(clean)} of {len(records)} questions are left out" in caplog.text

    moved = trained | {"world": trained["world"] | {"records": str(tmp_path / "gone.jsonl")}}
    assert play(tmp_path / "moved", trained_on=moved)[0]["n_questions"] == len(clean), (
        "found where the evaluation has them"
    )


def test_questions_of_a_file_that_training_asked_are_not_asked_again(bench, overrides, tmp_path, caplog):
    """A config for evaluation need not say what was trained on; without it the file is a test as a whole."""
    options = [*overrides, "world.benchmark=nq", f"world.records={bench}/nq.jsonl"]
    trained = compose([*options, "world.train=nq", "world.held_out=0.3"])
    world, everything = (build(part["world"], "world") for part in (trained, compose(options)))
    met = {question.text for question in world.questions("train")}
    clean = [q.id for q in everything.questions("test") if q.text not in met]
    assert 0 < len(clean) < len(NQ)
    run(bench, options, tmp_path / "clean", trained_on=trained)
    asked = json.loads((tmp_path / "clean/nq/greedy/result.json").read_text())["questions"]
    assert [question["id"] for question in asked] == clean
    assert f"{len(met)} of {len(NQ)} questions are left out" in caplog.text
    moved = trained | {"world": trained["world"] | {"records": "gone.jsonl"}}
    towns = [*overrides, "world.benchmark=bamboogle", f"world.records={bench}/bamboogle.jsonl"]
    (row,) = run(bench, towns, tmp_path / "other", trained_on=moved)
    assert row["n_questions"] == len(BAMBOOGLE) and "cannot be told" in caplog.text


def test_bad_input_is_one_line(bench, overrides, barely_trained, tmp_path, stppo):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((bench / "model" / name).read_bytes())
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "run.json").write_text("{}")
    model = bench / "model"
    heads, cut, trained = (tmp_path / name for name in ("heads", "cut", "trained"))
    for folder in (heads, cut, trained / "policy"):
        shutil.copytree(model, folder)
    shape = json.loads((heads / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps(shape | {"num_attention_heads": 0}))
    (cut / "tokenizer.json").write_text("{}")
    (trained / "run.json").write_text("{}")
    (trained / "config.yaml").write_text("world: {train: 7, split_by: gold_title}")
    cases = [
        ([tmp_path / "none", *overrides], "none cannot be loaded"),
        ([unfinished, *overrides], "no folder `policy` yet"),
        ([bare, *overrides], "the tokenizer at .*bare cannot be loaded"),
        ([model, *SMALL], "another vocabulary than this world"),
        ([model, *overrides, "world.corpus=none.jsonl"], "corpus: no file none.jsonl"),
        ([model, *overrides, "rollout.max_tokens=100"], "rollout.max_tokens=100 leaves no room"),
        ([model, *overrides, "--decoding", "beam"], "allowed are greedy, sampled, both"),
        ([heads, *overrides], "heads cannot be loaded"),
        ([cut, *overrides], "the tokenizer at .*cut cannot be loaded"),
        ([trained, *overrides], "config.yaml: train must be a name or a list of names, got 7"),
    ]
    for arguments, message in cases:
        status, _, error = stppo("evaluate", *arguments, "--out", tmp_path / "out")
        lines = [line for line in error.splitlines() if line.startswith("error")]
        assert status == 1 and len(lines) == 1, (message, error)
        assert re.search(message, lines[0]), lines[0]


def test_tiny_model_command(bench, tmp_path, stppo):
    (tmp_path / "file").write_text("")
    corpus = ("--corpus", bench / "corpus.jsonl", "--vocabulary", "400")
    assert_one_line_error(stppo("tiny-model", tmp_path / "file", *corpus), "a file is in the way")
    assert stppo("tiny-model", tmp_path / "m", *corpus)[0] == 0
    assert (tmp_path / "m" / "tokenizer.json").is_file()


def test_results_and_runs_of_another_torch_are_said(bench, overrides, tmp_path, caplog):
    overrides = [*overrides, "world.benchmark=[bamboogle]"]
    run(bench, overrides, tmp_path)
    assert "torch" not in caplog.text
    result = tmp_path / "bamboogle/greedy/result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"versions": {"torch": "1.2.3"}}))
    its_run = tmp_path / "run"
    shutil.copytree(bench / "model", its_run / "policy")
    (its_run / "run.json").write_text('{"versions": {"torch": "4.5.6"}}')
    evaluate_checkpoint(its_run, compose(overrides), tmp_path, progress=False)
    for version, place in (("1.2.3", result), ("4.5.6", its_run)):
        (line,) = [line for line in caplog.messages if f"made with torch {version}" in line]
        assert str(place) in line
