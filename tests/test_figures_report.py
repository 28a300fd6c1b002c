"""The HTML report of made-up runs: what it shows, in which order, and that it needs nothing else."""

import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from stppo.figures.report import render_report, summary_lines
from stppo.record.runs import collect, load_metrics
from tests.synthetic_runs import make_run

HOSTILE = '<script>alert("x")</script>'
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Words that are seen before anything is unfolded, and everything that a browser would load."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.open, self.visible, self.tags = text, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        folded = "details" in self.open and "summary" not in self.open
        if not folded and not {"style", "script", "title"} & set(self.open):
            self.visible += data.split()

    def place(self, name: str) -> int:
        return self.text.index(f'id="{name}"')


def draw(folder, *names):
    folder.mkdir(parents=True)
    for i, name in enumerate(names):
        words = PngInfo()
        words.add_itxt("Title", f"{name} found {HOSTILE}")
        picture = Image.new("RGB", (40, 20), (i, len(folder.parent.name), 0))
        picture.save(folder / f"{name}.png", pnginfo=words)
        if folder.parent.name == "mine":  # the committed reference has no vector files
            (folder / f"{name}.svg").touch()


def relabel(run, **fields):
    file = run / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs of known and unknown algorithms, members of a sweep among them; three figures are drawn, one of
    them new."""
    root = tmp_path_factory.mktemp("results")
    known = [
        make_run(root / f"runs/{a}{s}", a, s, "OFF_POLICY")
        for a in ("token_ppo", "st_ppo", "so_grpo")
        for s in (0, 1)
    ]
    strange = relabel(make_run(root / "runs/strange", "gspo", 7), regime="OFF_POLICY", algorithm=HOSTILE)
    sweep = [relabel(make_run(root / f"runs/E{e}", "grpo"), regime=f"E{e}_L0_3.5e-4") for e in (4, 16)]
    collect([*known, strange, *sweep], root / "mine" / "metrics")
    draw(root / "mine" / "figures", "learning", "clip_ratio", "norms", "my_own_figure")
    (root / "mine" / "claims").mkdir()
    (root / "mine" / "claims" / "claims.csv").write_text(
        "id,claim,measured,verdict\nC1,It helps.,one,supported\nC1,It "
        "helps.,two,supported\nC2,Always.,one,inconclusive\n"
    )
    (root / "mine" / "20-what-happened.html").write_text("")
    collect(known[:4], root / "reference" / "metrics")
    draw(root / "reference" / "figures", "learning", "norms")
    return root


@pytest.fixture(scope="module")
def page(results):
    file = render_report(results / "mine", results / "reference", results / "mine" / "report.html")
    return Page(file.read_text(encoding="utf-8"))


def test_what_happens_comes_first_and_what_is_looked_up_last(page):
    order = ["learning", "outcomes", "clip_ratio", "norms", "my_own_figure", "notebooks", "runs"]
    order += ["provenance", "glossary", "claims"]
    assert [page.place(name) for name in order] == sorted(page.place(name) for name in order)


def test_the_first_lines_count_the_runs(page, results):
    metrics = load_metrics(results / "mine" / "metrics")
    counted = summary_lines(metrics)
    assert f"{len(metrics.runs)} runs: " in counted[0] and f" of {len(metrics.runs)} learned" in counted[2]
    assert {run["warm_start"]["n_sampled"] for run in metrics.runs} != {len(metrics.runs)}
    assert all(line in page.text for line in counted[:3])


def test_everything_that_was_trained_appears(page, results):
    shown = page.text[page.place("outcomes") :]
    for name in ("token PPO", "ST-PPO", "SO-GRPO", "GRPO", "E4_L0_3.5e-4", "E16_L0_3.5e-4", "&lt;script&gt;"):
        assert name in shown, name
    rows = re.findall(r"<tr>.*?</tr>", page.text[page.place("runs") : page.place("provenance")])
    assert len(rows) == 9 + 1, "one a run, below the heading"


def test_each_of_a_few_runs_has_its_success_before_and_after_with_intervals(page, results, monkeypatch):
    lines = re.findall(
        r"<li>([^<]*): success on 256 unseen questions, before and after \[95 % Wilson interval\]: "
        r"([^<]*)</li>",
        page.text,
    )
    assert len(lines) == 9 and "token PPO, seed 1" in dict(lines)
    assert all(re.match(r"sampled [.\d]+ \[[.\d]+, [.\d]+\] to [.\d]+ \[", told) for _, told in lines)
    monkeypatch.setattr("stppo.figures.report.FEW", 8)
    many = render_report(results / "mine", None, results / "mine" / "many.html")
    assert "Wilson" not in many.read_text(encoding="utf-8")


def test_page_loads_nothing_and_names_are_text_wherever_they_stand(page):
    assert HOSTILE not in page.text and not [tag for tag, _ in page.tags if tag == "script"]
    loaded = [a[k] for _, a in page.tags for k in ("src", "srcset", "data") if k in a]
    assert loaded and all(url.startswith("data:image/png;base64,") for url in loaded)
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base")]
    assert not re.search(r"@import|url\(", page.text)


def test_links_lead_to_files_beside_the_page(page):
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    figures = {
        "figures/learning.svg",
        "../reference/figures/learning.png",
        "../reference/figures/learning.csv",
    }
    assert {"20-what-happened.html", *figures} <= set(links)
    assert "learning found &lt;script&gt;" in page.text


def test_reference_stands_beside_the_same_regime_and_algorithm(page):
    rows = {
        name: re.search(rf"<tr>(?:(?!</tr>).)*{name}.*?</tr>", page.text)[0] for name in ("ST-PPO", "SO-GRPO")
    }
    assert "2/2" in rows["ST-PPO"], "the reference's two runs learned"
    assert "/2" not in rows["SO-GRPO"], "the reference has none"


def test_reference_of_the_same_runs_is_shown_once_and_claims_only_where_there_are_some(results, tmp_path):
    folder = results / "reference"
    text = render_report(folder, folder, tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("<img") == 2 and "committed runs" in text and 'id="claims"' not in text


def test_runs_that_are_hard_to_compare_are_said_to_be(tmp_path):
    clean = make_run(tmp_path / "a", "st_ppo", 0, iterations=6)
    dirty = relabel(make_run(tmp_path / "b", "grpo", 0, iterations=6), git_dirty=True, code_hash="other")
    start = {"success_sampled": 0.3, "success_greedy": 0.45, "n_sampled": 2048}
    again = relabel(make_run(tmp_path / "c", "gspo", 0, iterations=6), warm_start=start)
    collect([clean, dirty, again], tmp_path / "metrics")
    page = Page(render_report(tmp_path, None, tmp_path / "report.html").read_text(encoding="utf-8"))
    seen = " ".join(page.visible)
    for said in (
        "2 versions of the code",
        "1 of 3 runs were trained from a tree",
        "1 warm start made more than once",
    ):
        assert said in seen
