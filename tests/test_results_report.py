import json
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from matplotlib.figure import Figure

from stppo import schema
from stppo.results import figures
from stppo.results.report import render_report
from stppo.results.runs import collect
from stppo.results.style import LOOKS, Plot
from stppo.results.trajectory_view import show_trajectories
from stppo.study.evaluation import write_evaluation
from stppo.study.ledger import load_ledger
from stppo.study.outcomes import Arm
from tests.synthetic_runs import START, Behaviour, make_metrics, make_run, replicates, write_metrics


class Page(HTMLParser):
    """Collects what a page refers to, and checks that its tags are balanced."""

    VOID = {"meta", "img", "br", "wbr", "link", "input", "hr"}

    def __init__(self, text):
        super().__init__()
        self.stack, self.images, self.links, self.text = [], [], [], []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in self.VOID:
            self.stack.append(tag)
        if "src" in attrs:
            self.images.append(attrs["src"])
        if tag == "a":
            self.links.append(attrs["href"])

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


AXES = pd.DataFrame(
    {
        "algorithm": ["st_ppo", "my_ppo"],
        "v1": ["ST-PPO", ""],
        "v2": ["SO-PPO, reading A", ""],
        "credit": "token GAE",
        "ratio": ["turn", "token"],
        "aggregation": ["geometric", "–"],
        "stabiliser": ["÷ max(1, ‖C‖/0.1)", "none"],
        "loss aggregation": "trajectory mean",
        "source": ["v1 Eq. 8", ""],
    }
)


def make_results(folder, seeds=1, algorithms=("token_ppo", "st_ppo")):
    run_dirs = [
        make_run(folder / f"runs/{name}-{s}", name, s, iterations=16)
        for name in algorithms
        for s in range(seeds)
    ]
    metrics = collect(run_dirs, folder / "metrics")
    for plot in (figures.collapse_figure(metrics), figures.stability_figure(metrics, 20)):
        if plot:
            plot.save(folder / "figures")
    Plot("objectives", Figure(figsize=(1, 1)), AXES, "schematic").save(folder / "figures")
    return folder


def write_notebook(file, *markdown):
    cells = [{"cell_type": "markdown", "source": [text]} for text in markdown]
    file.write_text(json.dumps({"cells": cells}))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("project") / "results"
    make_results(root / "smoke")
    make_results(root / "reference" / "laptop", seeds=2)
    (root / "smoke" / "20-collapse.html").write_text("<p>executed")
    for name, title in {"02-turns": "# The second step", "01-tokens": "# One & <first> step"}.items():
        (root / "smoke" / f"{name}.html").write_text("<p>executed")
        write_notebook(root / "smoke" / f"{name}.ipynb", f"## Not this\n{title}\n\ntext", "# Nor this")
    (root / "smoke" / "runs" / "token_ppo-0" / "10-train.html").write_text("<p>executed")
    return root


@pytest.fixture(scope="module")
def page(results):
    out = render_report(results / "smoke", results / "reference" / "smoke", results / "smoke" / "report.html")
    return Page(out.read_text())


def test_page_loads_nothing_from_elsewhere(page):
    assert len(page.images) == 5  # two figures, each with its reference, and one schematic for both
    assert all(src.startswith("data:image/png;base64,") for src in page.images)
    outside = [href for href in page.links if not href.startswith("#") and "://" in href]
    assert outside == ["https://arxiv.org/abs/2511.20718"]


def test_inner_links_have_targets_and_notebook_links_exist(page, results):
    html = (results / "smoke" / "report.html").read_text()
    for href in page.links:
        if href.startswith("#"):
            assert f'id="{href[1:]}"' in html, href
        elif "://" not in href:
            assert (results / "smoke" / href).is_file(), href
    assert {"20-collapse.html", "runs/token_ppo-0/10-train.html"} <= set(page.links)


def test_page_says_what_it_is_and_of_what(page):
    text = re.sub(r"\s+", " ", " ".join(page.text))
    for words in (
        "not affiliated",
        "secondary sources",
        "made-up CPU",
        "000000000000",
        "torch 2.13.0",
        "0123456789abcdef",
        "Readings A and B",
    ):
        assert words in text, words
    for name in (*schema.UPDATE_COLUMNS, *schema.EVALUATION_COLUMNS):
        assert name in text, name


def test_reference_of_another_preset_is_remarked(page):
    text = re.sub(r"\s+", " ", " ".join(page.text))
    assert "There is no reference for preset smoke" in text and "committed reference, preset laptop" in text


def test_reference_of_the_same_preset_is_not_remarked(results, tmp_path):
    mine = make_results(tmp_path / "results" / "laptop")
    render_report(mine, results / "reference" / "laptop", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "There is no reference" not in text and "committed reference" in text


def test_committed_runs_are_shown_once(results, tmp_path):
    reference = results / "reference" / "laptop"
    render_report(reference, reference, tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    text = re.sub(r"\s+", " ", " ".join(page.text))
    assert len(page.images) == 3 and "committed runs" in text and "These are the committed runs" in text
    assert (
        "your run" not in text.lower()
        and "No committed reference" not in text
        and "reference final" not in text
    )


def test_without_any_reference_the_page_says_so(results, tmp_path):
    render_report(results / "smoke", tmp_path / "none" / "smoke", tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert len(page.images) == 3 and "No committed reference" in " ".join(page.text)


def test_table_shows_collapse_counts(page, results):
    html = (results / "smoke" / "report.html").read_text()
    row = next(r for r in html.split("<tr") if LOOKS["token_ppo"].label in r and 'class="n bad"' in r)
    assert ">1/1<" in re.sub(r"\s+", "", row)


def test_mixed_code_and_uncommitted_changes_are_remarked(page, tmp_path):
    assert "runs were trained" not in " ".join(page.text)
    folder = make_results(tmp_path / "results" / "mixed", seeds=2)
    file = folder / "metrics" / schema.RUNS_FILE
    records = json.loads(file.read_text())
    records[0]["code_hash"] = "another"
    records[0]["warm_start"]["success_sampled"] += 0.01
    records[0]["started"] = "2025-01-02T00:00:00+00:00"  # after the others
    records[1]["git_dirty"] = records[2]["git_dirty"] = True
    file.write_text(json.dumps(records))
    html = render_report(folder, None, tmp_path / "r.html").read_text()
    remark = next(part for part in html.split('<p class="remark">') if part.startswith("<b>Your run"))
    assert "The 4 runs were trained by 2 different versions of the code." in remark
    assert "2 of 4 runs were trained from a tree with uncommitted changes." in remark
    assert "made more than once, with different weights (1 of 2 in A)" in remark
    table = words_of(html.split("which runs began from which</summary>")[1].split("</table>")[0])
    first, second = f"{START:.3f}", f"{START + 0.01:.3f}"
    assert f"A 1 3 0: {first}, 1: {first} Linux" in table
    seed, name = records[0]["warm_start_seed"], records[0]["algorithm"]
    assert f"A 2 1 {seed}: {second} Linux {name} (1)" in table


def test_page_says_how_the_learning_rates_were_chosen(page):
    text = re.sub(r"\s+", " ", " ".join(page.text))
    assert "tuning seed that is not reported" in text and "by selection" in text


@pytest.fixture(scope="module")
def study_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project") / "results" / "study"
    runs = {Arm("MAIN", "token_ppo"): Behaviour(risk=16 / 18), Arm("MAIN", "s_ppo"): Behaviour()}
    ablation = Arm("MAIN", "st_ppo_raw")
    metrics = make_metrics(runs | {ablation: Behaviour()})
    write_metrics(metrics, folder / "metrics")
    plan = folder / "planned.json"
    plan.write_text(json.dumps({str(arm): 18 for arm in runs} | {str(ablation): 20, "LLAMA/s_ppo": 3}))
    write_evaluation(folder / "metrics", folder / "claims", plan)
    Plot("stability", Figure(figsize=(1, 1)), pd.DataFrame({"x": [1]}), "curves").save(folder / "figures")
    Plot("controls", Figure(figsize=(1, 1)), pd.DataFrame({"x": [1]}), "bars").save(folder / "figures")
    html = render_report(folder, None, folder / "report.html").read_text()
    Page(html)
    return html


def section(html, name):
    return html.split(f'<section id="{name}"')[1].split("</section>")[0]


def words_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_claims_come_first_with_their_verdicts_and_numbers(study_page):
    assert re.findall(r'<section id="([^"]+)"', study_page)[:4] == [
        "claims",
        "questions",
        "coverage",
        "results",
    ]
    claims = section(study_page, "claims")
    table = claims[claims.index("<table") :]
    assert len(re.findall(r'class="verdict ', table)) == sum(len(c.parts) for c in load_ledger().claims)
    row = next(row for row in claims.split("<tr")[1:] if "S-PPO prevents token PPO" in row)
    text = words_of(row)
    assert 'class="verdict supported"' in row and 'href="#stability"' in row and "36 of 36" in text
    assert re.search(r"0\.89 \[0\.\d\d, 1\.00\]", text) and "below 0.25: holds" in text
    missing = words_of(next(row for row in claims.split("<tr")[1:] if "SO-GRPO (reading A, divisor)" in row))
    assert "not tested" in missing and "no runs of MAIN/grpo, MAIN/so_grpo" in missing
    counted = re.search(
        r"Of (\d+) primary verdicts: (\d+) supported, (\d+) not supported, (\d+) inconclusive, (\d+) not tested",
        claims,
    )
    total, *parts = map(int, counted.groups())
    assert total == load_ledger().n_primary == sum(parts) and parts[0] >= 1 and parts[3] >= 1
    in_short, listed = (re.findall(r"<li>.*?</li>", part, re.DOTALL) for part in claims.split(counted[0]))
    assert "collapsed: token PPO" in in_short[0]
    listed = [line for line in listed if 'class="verdict ' in line]
    assert len(listed) == parts[0] + parts[1]
    assert any('"verdict supported"' in line and "S-PPO prevents" in line for line in listed)


def test_provisional_verdicts_and_notes_stand_beside_the_verdict(study_page, tmp_path):
    claims = section(study_page, "claims")
    row = next(row for row in claims.split("<tr")[1:] if "S-PPO prevents token PPO" in row)
    assert "Clopper-Pearson" in row and "(provisional)" not in claims
    arms = {Arm("MAIN", "token_ppo"): Behaviour(risk=16 / 18), Arm("MAIN", "s_ppo"): Behaviour()}
    write_metrics(make_metrics(arms), tmp_path / "metrics")
    (tmp_path / "planned.json").write_text(json.dumps({str(arm): 20 for arm in arms}))
    write_evaluation(tmp_path / "metrics", tmp_path / "claims", tmp_path / "planned.json")
    claims = section(render_report(tmp_path, None, tmp_path / "r.html").read_text(), "claims")
    row = words_of(next(row for row in claims.split("<tr")[1:] if "S-PPO prevents token PPO" in row))
    assert "supported (provisional)" in row and "36 of 40" in row
    assert re.search(r"not tested; \d+ of them provisional\.", words_of(claims))


def test_what_was_run_and_answers_stand_behind_the_claims(study_page):
    coverage = words_of(section(study_page, "coverage"))
    assert re.search(r"MAIN the main regime 40 3\.5e-4 2 \d+ 3 of 3 54 of 56 st_ppo_raw 18 of 20", coverage)
    assert "LLAMA Llama policy 0 of 1 0 of 3 s_ppo 0 of 3" in coverage
    assert "1121 is world 11, warm start 112" in coverage
    questions = words_of(section(study_page, "questions"))
    assert (
        all(f"Q{i}." in questions for i in range(1, 9))
        and "no runs of LLAMA/s_ppo and LLAMA/token_ppo" in questions
    )
    assert "chosen blind, by token PPO alone" in words_of(section(study_page, "results"))


@pytest.mark.parametrize("planned", [18, 19])
def test_what_is_missing_has_a_column_only_where_something_is(planned, tmp_path):
    arms = {Arm("MAIN", "token_ppo"): Behaviour(), Arm("MAIN", "s_ppo"): Behaviour()}
    write_metrics(make_metrics(arms), tmp_path / "metrics")
    (tmp_path / "planned.json").write_text(json.dumps({str(arm): planned for arm in arms}))
    write_evaluation(tmp_path / "metrics", tmp_path / "claims", tmp_path / "planned.json")
    table = section(render_report(tmp_path, None, tmp_path / "r.html").read_text(), "coverage")
    assert ("<th>missing</th>" in table) == ("s_ppo 18 of 19" in table) == (planned == 19)


def test_regime_is_shown_beside_the_rates_that_were_tried(study_page, tmp_path):
    """Beside the registered protocol lie the runs by which the main regime was chosen."""
    reference = tmp_path / "reference"
    tried = {"LOW": Behaviour(learning_rate=2.5e-4), "HIGH": Behaviour(risk=1, learning_rate=4.2e-4)}
    of = replicates(1, 1, 3)
    tuning = make_metrics({Arm(regime, "token_ppo"): what for regime, what in tried.items()}, of)
    write_metrics(tuning, reference / "tuning/stage1/metrics")
    folder = tmp_path / "study"
    write_metrics(make_metrics({Arm("MAIN", "token_ppo"): Behaviour()}, of), folder / "metrics")
    said = "2.5e-4: 0 of 3, 4.2e-4: 3 of 3"
    assert said not in words_of(render_report(folder, reference, tmp_path / "r.html").read_text())
    (reference / "PROTOCOL.md").write_text("registered")
    assert said in words_of(render_report(folder, reference, tmp_path / "r.html").read_text())


def test_runs_made_again_elsewhere_are_compared_number_by_number(tmp_path):
    reference, folder, of = tmp_path / "reference", tmp_path / "study", replicates(1, 1, 3)
    arms = {Arm("MAIN", "token_ppo"): 1.0, Arm("MAIN", "st_ppo"): 0.0}
    first = make_metrics({arm: Behaviour(risk=risk) for arm, risk in arms.items()}, of)
    again = make_metrics({arm: Behaviour(risk=0.0) for arm in arms}, of)
    write_metrics(first, folder / "metrics")
    write_metrics(again, reference / "processor/metrics")
    (reference / "PROTOCOL.md").write_text("registered")
    text = words_of(render_report(folder, reference, tmp_path / "r.html").read_text())
    final = [m.summary[m.summary["algorithm"] == "token_ppo"]["success_final"].mean() for m in (first, again)]
    assert (
        "token PPO collapsed in 0 of 3 (3 the first time, the same run by run in 0), "
        f"final success {final[1] - final[0]:.2f} apart on average" in text
    )
    assert "ST-PPO (SO-PPO) collapsed in 0 of 3 (0 the first time, the same run by run in 3)" in text


def test_collapses_by_other_lines_stand_beside_the_rule(study_page):
    folded = section(study_page, "results").split("if the line were drawn elsewhere")[1]
    columns = re.findall(r"<th.*?>(.*?)</th>", folded)
    row = next(row for row in folded.split("<tr") if "token PPO" in row)
    counts = [int(n) for n in re.findall(r'<td class="n">(\d+)</td>', row)]
    assert columns[3:] == [f"at or below<br>{f} of the peak" for f in ("0.4", "0.5", "0.6")]
    assert counts[0] == 18 and counts[2] == 16 and counts[1:] == sorted(counts[1:])
    assert "st_ppo_raw" not in folded and "neither centred" not in folded


def test_runs_of_several_versions_are_told_apart(results, tmp_path):
    folder = make_results(tmp_path / "results" / "smoke", seeds=2)
    file = folder / "metrics" / schema.RUNS_FILE
    runs = json.loads(file.read_text())
    for run in runs:
        run["code_hash"] = "new" if run["algorithm"] == "st_ppo" else "old"
    file.write_text(json.dumps(runs))
    text = words_of(section(render_report(folder, None, tmp_path / "r.html").read_text(), "provenance"))
    assert re.search(r"old 2 \w+ \(token_ppo\)", text) and re.search(r"new 2 \w+ \(st_ppo\)", text)


def test_ablations_are_folded_away_in_the_table(study_page):
    shown, folded = section(study_page, "results").split("1 more arms")
    assert LOOKS["s_ppo"].label in shown and "neither centred nor scaled" not in shown
    assert "neither centred nor scaled" in folded


def test_claims_that_no_run_tests_are_folded_away(results, tmp_path):
    folder = make_results(tmp_path / "results" / "smoke")
    write_evaluation(folder / "metrics", folder / "claims")
    html = render_report(folder, None, tmp_path / "r.html").read_text()
    assert "None of the paper's claims is tested by the preset smoke" in words_of(section(html, "claims"))
    assert '<details class="plain">' in html


def test_text_from_records_is_escaped(results, tmp_path):
    folder = make_results(tmp_path / "results" / "odd")
    file = folder / "metrics" / schema.RUNS_FILE
    file.write_text(file.read_text().replace("made-up CPU", "<script>alert(1)</script>"))
    render_report(folder, None, tmp_path / "r.html")
    assert "<script>alert" not in (tmp_path / "r.html").read_text()


def test_missing_metrics_name_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="snakemake"):
        render_report(tmp_path / "results" / "smoke", None, tmp_path / "r.html")


def test_names_are_those_of_the_table_beside_the_schematic(page, results, tmp_path):
    text = re.sub(r"\s+", " ", " ".join(page.text))
    for words in ("SO-PPO, reading A", "turn, geometric", "÷ max(1, ‖C‖/0.1)", "my_ppo", "v1 Eq. 8"):
        assert words in text, words
    folder = make_results(tmp_path / "results" / "bare")
    for file in (folder / "figures").glob("objectives.*"):
        file.unlink()
    html = render_report(folder, None, tmp_path / "r.html").read_text()
    assert "No figure <code>objectives</code> lies beside this report" in html


def test_schematic_comes_first_and_once(page, results):
    html = (results / "smoke" / "report.html").read_text()
    assert re.findall(r'<section id="([^"]+)"', html)[:3] == ["results", "objectives", "collapse"]
    section = html.split('<section id="objectives">')[1].split("</section>")[0]
    assert section.count("<img") == 1 and "your run and the committed reference alike" in section
    assert "The reference has no such figure" not in section


def test_derivations_are_linked_by_title_in_reading_order_before_the_others(page, results):
    html = (results / "smoke" / "report.html").read_text()
    listed = html.split('<section id="notebooks">')[1].split("</section>")[0]
    assert re.findall(r"<h3>(.+?)</h3>", listed) == [
        "Derivations, in reading order",
        "Figures",
        "Training runs",
    ]
    links = re.findall(r'<a href="([^"]+)">(.+?)</a>', listed)
    assert links[:3] == [
        ("01-tokens.html", "One &amp; &lt;first&gt; step"),
        ("02-turns.html", "The second step"),
        ("20-collapse.html", "20-collapse"),
    ]


# --- trajectories -----------------------------------------------------------------------------
RECORD = {
    "question": "who is <b>the mentor?",
    "answers": ["alba & moss"],
    "reward": 1.0,
    "tokens": ["question", "<search>", "alba", "</search>", "</div><script>", "<answer>", "moss"],
    "agent_mask": [0, 1, 1, 1, 0, 1, 1],
    "turn_ids": [-1, 0, 0, 0, -1, 1, 1],
    "logprobs": [0.0, -0.1, -0.2, -0.3, 0.0, -0.6931, -0.5],
}


def test_trajectory_is_escaped_and_balanced():
    html = show_trajectories([RECORD]).html
    Page(html)
    assert "<script>" not in html and "&lt;search&gt;" in html and "alba &amp; moss" in html


def test_turns_have_colours_and_tokens_tooltips():
    html = show_trajectories([RECORD])._repr_html_()
    colors = re.findall(r'class="turn" style="background:(#\w+)"', html)
    assert len(colors) == 2 and len(set(colors)) == 2
    assert html.count('class="env"') == 2
    assert "turn 1, log-probability -0.693, probability 0.500" in html


def test_words_are_spaced_and_subwords_are_not():
    words = "".join(Page(show_trajectories([RECORD]).html).text)
    assert "<search> alba </search>" in words
    subwords = {**RECORD, "tokens": ["who", " is", " <", "search", ">", " mo", "ss"]}
    assert "who is <search> moss" in "".join(Page(show_trajectories([subwords]).html).text)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"logprobs": [0.0]}, "logprobs has 1 entries for 7"), ({"reward": None}, None)],
)
def test_bad_records_are_named(change, message):
    record = RECORD | change
    if message is None:
        del record["reward"]
        message = "trajectory 0 lacks reward"
    with pytest.raises(ValueError, match=message):
        show_trajectories([record])


def test_file_of_trajectories(tmp_path):
    file = tmp_path / "trajectories.json"
    file.write_text(json.dumps([RECORD, RECORD]))
    assert show_trajectories(file).html.count('class="stppo-trajectory"') == 2
    file.write_text("[{")
    with pytest.raises(ValueError, match="not valid JSON"):
        show_trajectories(file)
