"""Reference pages that the code itself writes: algorithms, config keys, metrics, commands, API."""

import ast
import importlib
import inspect
import json
import math
import os
import pkgutil
import re
from pathlib import Path

import click
import typer

DOCS = Path(__file__).parents[1]
OUT = DOCS / "reference" / "generated"
HEAD = "<!-- written by docs/_ext/generated.py; do not edit -->\n\n"
LAYERS = {
    "trajectories": "The batch that all else reads: tokens, whose they are, turns.",
    "objectives": "Ratios, credit, clips, surrogates and stabilisers; torch alone.",
    "oracle": "An enumerable multi-turn MDP: exact values, gradients, bias and variance.",
    "retrieval": "BM25 and dense indexes, in memory, on disk and over HTTP.",
    "world": "Questions, protocol, environment, rewards, scripted agents.",
    "policy": "Policy, critic, compiled kernels, adapters.",
    "rollout": "How batches are sampled, in PyTorch and in vLLM.",
    "config": "From YAML files to settings, objective and world.",
    "training": "Warm start, trainer, checkpoints.",
    "record": "What a run leaves: loading, outcomes, comparison.",
    "figures": "Pictures and the report.",
    "study": "This project's own comparison on top of the records.",
    "derivations": "What the configs say of each algorithm: axes, factors, bias and variance.",
    "pretrained": "Language models fetched, or made tiny.",
    "plugins": "The losses inside verl and TRL.",
    "preflight": "What a run needs and what the machine has.",
}


def _metrics() -> str:
    from stppo.record import schema

    parts = [
        HEAD + "# Every metric\n\nWhat a run records, with the names that files, tables and loggers use.\n"
    ]
    for title, columns in schema.GLOSSARY.items():
        measured = any(getattr(text, "unit", "") for text in columns.values())
        heads = ("name", "unit", "meaning", "written by") if measured else ("name", "meaning")
        rows = []
        for name, text in columns.items():
            meaning = text.replace("|", "\\|")
            cells = (
                (f"`{name}`", text.unit, meaning, f"`{text.writer}`") if measured else (f"`{name}`", meaning)
            )
            rows.append(f"| {' | '.join(cells)} |")
        table = "\n".join([f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|", *rows])
        parts.append(f"\n## {title}\n\n{table}\n")
    return "".join(parts)


def _commands() -> str:
    from stppo.cli import app

    root = typer.main.get_command(app)
    parts = [HEAD + "# Every command\n\nThe same texts as `stppo COMMAND --help`.\n"]

    def walk(command: click.Command, name: str) -> None:
        if isinstance(command, click.Group):
            for child in command.list_commands(None):
                walk(command.get_command(None, child), f"{name} {child}")
            return
        context = click.Context(command, info_name=name)
        rows = []
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                text = parameter.help or ""
                rows.append(f"| `{', '.join(parameter.opts)}` | {text.replace('|', chr(92) + '|')} |")
        table = "\n| option | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n" if rows else ""
        usage = " ".join(command.collect_usage_pieces(context))
        parts.append(
            f"\n## {name}\n\n```text\n{name} {usage}\n```\n\n{inspect.cleandoc(command.help or '')}\n{table}"
        )

    walk(root, "stppo")
    return "".join(parts)


def _configs() -> str:
    """Every YAML file of every group, with its comments: they are the documentation of the keys."""
    from stppo.config.files import config_dir, groups

    parts = [
        HEAD
        + "# Every config key\n\nHydra groups; `stppo train GROUP=OPTION key=value`. Comments say what a key means and, "
        "where it was measured, why it has its value.\n"
    ]
    folder = config_dir()
    parts.append(f"\n## config.yaml\n\n```yaml\n{(folder / 'config.yaml').read_text().strip()}\n```\n")
    for group in groups():
        parts.append(f"\n## {group}\n")
        for file in sorted((folder / group).glob("*.yaml")):
            parts.append(f"\n### {group}={file.stem}\n\n```yaml\n{file.read_text().strip()}\n```\n")
    return "".join(parts)


def _algorithms() -> str:
    """The names of the paper's two versions and the point that each algorithm's YAML stands for."""
    from stppo.config.algorithms import PAPER, aliases
    from stppo.derivations.axes import axes_table

    also = {name: f" (or `{alias}`)" for alias, name in aliases().items()}
    shown = ["v1", "v2", "ratio", "aggregation", "credit", "clip", "stabiliser", "source"]
    lines = [f"| `algorithm=` | {' | '.join(shown)} |", "| --- " * (len(shown) + 1) + "|"]
    for name, row in axes_table(PAPER).iterrows():
        cells = (str(row[column]).replace("|", "\\|") or "–" for column in shown)
        lines.append(f"| `{name}`{also.get(name, '')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rivals() -> str:
    """Related methods: the comment of each YAML, which says what it is and what is uncertain, its knob and source."""
    from stppo.config.algorithms import RIVALS, look, notes
    from stppo.config.files import NO_KNOB

    lines = ["| `algorithm=` | what it is | its knob | source |", "| --- " * 4 + "|"]
    for name in RIVALS:
        row = look(name)
        text = notes(name).replace("|", "\\|").replace("<", "&lt;")
        knob = "none"
        if row.prior != NO_KNOB:
            keys = ", ".join(f"`{key.removeprefix('objective.')}`" for key in row.prior.keys)
            knob = f"{keys}, {row.prior.low:g} to {row.prior.high:g}, {row.prior.scale}"
        lines.append(f"| `{name}` | **{row.label}.** {text} | {knob} | {row.source} |")
    return "\n".join(lines) + "\n"


def _plug_in(host: str) -> str:
    """What a plug-in offers by name, the host's options with which any algorithm is its YAML's, and what no options make."""
    from stppo.config.algorithms import PAPER, RIVALS, aliases, look
    from stppo.plugins import methods

    lines = ["| name | method | options that make it its YAML | remark | its knobs |", "| --- " * 5 + "|"]
    for name in methods.OFFERED[host]:
        line, but = methods.options(host, name)
        knobs = methods.knobs_of(name).items()
        values = [f"`{part}.{key}` {value:g}" for part, keys in knobs for key, value in keys.items()]
        cells = [f"`{name}`", look(name).label, f"`{line}`", but or "–", ", ".join(values) or "–"]
        lines.append(f"| {' | '.join(cells)} |")
    names = [name for name in (*PAPER, *aliases(), *RIVALS) if methods.why_not(host, name)]
    shown = {"verl": "verl", "trl": "TRL"}[host]
    lines += ["", f"Not offered by name in {shown}, because options make them:", ""]
    lines += ["| algorithm | options that make it its YAML | remark |", "| --- " * 3 + "|"]
    for name in names:
        if found := methods.options(host, name):
            lines.append(f"| `{name}` | `{found.line}` | {found.but or '–'} |")
    lines += ["", f"Not in {shown} at all:", "", "| algorithm | why |", "| --- | --- |"]
    lines += [
        f"| `{name}` | {methods.why_not(host, name)} |" for name in names if not methods.options(host, name)
    ]
    return "\n".join(lines) + "\n"


HOSTS = {
    **{"verl": "verl", "trl": "TRL", "torchrl": "TorchRL", "openrlhf": "OpenRLHF", "agilerl": "AgileRL"},
    **{"areal": "AReaL", "art": "ART", "swift": "ms-swift", "trinity": "Trinity-RFT", "tunix": "Tunix"},
    "skyrl": "SkyRL",
}


def _hosts() -> str:
    """What other libraries compute at their defaults, from the file that `benchmarks/hosts` wrote."""
    recorded = json.loads((DOCS.parent / "results/reference/hosts.json").read_text(encoding="utf-8"))
    found = {host: recorded[host] for host in HOSTS if host in recorded}
    names = dict.fromkeys(name for host in found.values() for name in host["cells"])

    def cosine(row: dict) -> str:
        return "=" if row["distance"] < 1e-3 else f"{row['cosine']:.2f}"

    def factor(row: dict) -> str:
        return f"{row['norm_ratio']:.3g}"

    def line(text: str) -> str:
        return f"`{text.replace('actor_rollout_ref.actor.', '')}`"

    lines = [
        f"| algorithm | {' | '.join(HOSTS[host] for host in found)} |",
        "| --- " * (1 + len(found)) + "|",
    ]
    for name in names:
        rows = [host["cells"].get(name) for host in found.values()]
        cells = [
            "–" if row is None else cosine(row) + "*" * (row["note"].startswith("our loss")) for row in rows
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    for host, record in found.items():
        versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        lines += ["", f"## {HOSTS[host]}", "", f"Made with {versions}.", ""]
        heads = ("algorithm", "cosine", "size", "cut", "at the defaults", "what makes it equal", "note")
        lines += [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
        for name, row in record["cells"].items():
            cut, equal, makes = row["cut"], row["equal"], "–"
            changes = "same" if cut["distance"] < 1e-6 else f"{cut['cosine']:.2f}, × {factor(cut)}"
            if equal is not None:
                makes = f"[its line](../howto/{host}.md)" if host in ("verl", "trl") else line(equal["line"])
                if equal["distance"] > 1e-5:
                    parallel = equal["cosine"] > 1 - 1e-6 and equal["distance"] > 1e-2
                    makes += f", size × {factor(equal)}" if parallel else f", {equal['distance']:.1g} apart"
            cells = [cosine(row), factor(row), changes, line(row["line"]), makes, row["note"] or "–"]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _leaderboard() -> str:
    """The benchmark's own page, its pictures and its table; methods not yet run at every point with their counts."""
    from stppo.record.runs import load_metrics
    from stppo.study import benchmark
    from stppo.study.benchmark_figures import pictures

    if not benchmark.metrics_folder().is_dir():
        text = f"No run is recorded yet. {len(benchmark.points())} runs of a method make a row of this page."
        return f"{HEAD}**{text}**\n"
    metrics = load_metrics(benchmark.metrics_folder())
    table = benchmark.leaderboard(metrics)
    whole, part = table[table["complete"]], table[~table["complete"]]
    text = f"{HEAD}{recorded_page('benchmark')}\n## Every number\n\n"
    if len(whole):
        for plot in pictures(metrics, table)[1:]:  # the first is on the benchmark's own page
            plot.save(OUT)
            text += f"![{plot.title}](../reference/generated/{plot.name}.png)\n\n*{plot.caption}*\n\n"
        text += "| method | best of 1 | best of 5 | best of 20 | greedy, best of 5 | learned | above token PPO | above the best plain one | core minutes a run | confirmed | knob drawn from |\n"
        text += "| --- " * 11 + "|\n"
    for _, row in whole.iterrows():
        best = [
            f"{row[f'best_of_{k}']:.2f} [{row[f'best_of_{k}_low']:.2f}, {row[f'best_of_{k}_high']:.2f}]"
            for k in benchmark.BEST_OF
        ]
        fresh = metrics.arm(benchmark.CONFIRMATION, row["method"])["final"]
        confirmed = f"{fresh.mean():.2f} in {len(fresh)} worlds" if len(fresh) else "not yet"
        cells = [f"{row['label']} (`{row['method']}`)" + ", plain" * row["null"], *best]
        cells += [f"{row['greedy_best_of_5']:.2f}", f"{row['learned']:.0%}"]
        for share in (row.get("above_token_ppo", math.nan), row.get("above_null", math.nan)):
            cells.append("" if math.isnan(share) else f"{share:.0%}")
        cells += [f"{row['core_minutes']:.1f}", confirmed, row["knob"]]
        text += f"| {' | '.join(cells)} |\n"
    if len(part):
        names = ", ".join(f"{row['label']} ({row['points']})" for _, row in part.iterrows())
        text += f"\nNot ranked, because not all {len(benchmark.points())} points are run yet: {names}.\n"
    return text + f"\nMade with {'; '.join(sorted(set(table['versions'])))}.\n"


# Pages of recorded runs that are pages of the site too: folder in `results/reference`, file in `docs/explanation`.
RECORDED = {
    "study": "study",
    "benchmark": "leaderboard",
    "mechanism": "mechanism",
    "search": "search",
    "mild": "milder-setting",
    "oracle": "unbiased",
    "divisor": "divisor",
    "starving": "starving",
    "thousand": "thousand-iterations",
    "smollm": "language-model",
}


def recorded_page(name: str) -> str:
    """The page of `results/reference/<name>` without its title, its links as those of a page in `docs/explanation`."""
    reference = DOCS.parent / "results/reference"
    folder = reference / name
    pages = {
        reference / there / "README.md": DOCS / f"explanation/{here}.md" for there, here in RECORDED.items()
    }

    def link(found: re.Match[str]) -> str:
        file = (folder / found[3]).resolve()
        file = pages.get(file, file)
        plain = found[1] or DOCS in file.parents  # pictures and pages; any other file is one to download
        here = os.path.relpath(file, DOCS / "explanation") + (found[4] or "")
        return f"{found[1]}[{found[2]}]({'' if plain else 'path:'}{here})"

    text = (folder / "README.md").read_text(encoding="utf-8").split("\n", 1)[1]
    return re.sub(r"(!?)\[([^]]*)\]\(([^)#:]+)(#[^)]*)?\)", link, text)


def _study() -> str:
    """The study's own page, with its picture first."""
    return f"{HEAD}{_picture('../../')}\n{recorded_page('study')}"


def _picture(root: str) -> str:
    """The README's picture, for a page from which the repository's root is `root`; empty where it was not drawn."""
    text, place = re.search(
        r"!\[([^]]*)\]\((\S+)\)", (DOCS.parent / "README.md").read_text(encoding="utf-8")
    ).groups()
    return f"![{text}]({root}{place})\n" if (DOCS.parent / place).is_file() else ""


SPEED = DOCS.parent / "results/reference/speed"
# What is aimed at: what is measured, the aim (at least, or at most), and the cell: file, table, row, column.
AIMS = (
    (
        "An iteration of token PPO against that of 0072184",
        ">=",
        1.4,
        "against",
        "Against",
        "token_ppo, whole",
        "there takes",
    ),
    ("... of ST-PPO", ">=", 1.4, "against", "Against", "st_ppo, whole", "there takes"),
    (
        "An iteration of GRPO against TRL's",
        ">=",
        6.5,
        "trl",
        "GRPO against TRL",
        "TRL, episodes together",
        "against the first",
    ),
    (
        "... one episode at a time",
        ">=",
        10,
        "trl",
        "GRPO against TRL",
        "TRL, one episode",
        "against the first",
    ),
    (
        "... with SmolLM2",
        ">=",
        3,
        "trl_smollm",
        "GRPO against TRL",
        "TRL, episodes together",
        "against the first",
    ),
    (
        "A roll-out against `generate`",
        ">=",
        5,
        "run",
        "Roll-out against",
        "generate, 128",
        "the first is faster by",
    ),
    ("An update's passes against PyTorch's", ">=", 2.5, "kernels", "A minibatch", "auto", "eager takes"),
    (
        "Their speed as a share of a large matrix product's",
        ">=",
        0.3,
        "kernels",
        "A minibatch",
        "auto",
        "share of a large product's speed",
    ),
    (
        "Exact clipping bias, token PPO",
        "<=",
        1.15,
        "kernels",
        "‖C‖ of token_ppo",
        "auto",
        "exact against off",
    ),
    ("Exact clipping bias, ST-PPO", "<=", 1.15, "kernels", "‖C‖ of st_ppo", "auto", "exact against off"),
    (
        "Growth with trajectories, exponent",
        "<=",
        1.05,
        "run",
        "Cost against size",
        "trajectories",
        "exponent",
    ),
    ("... with epochs", "<=", 1.05, "run", "Cost against size", "epochs", "exponent"),
    ("... with tokens", "<=", 1.05, "run", "Cost against length", "1", "exponent in tokens"),
    ("Memory of a training run, MiB", "<=", 1024, "run", "Memory", "training", "resident MiB"),
    (
        "... after 1,000 iterations, of that after 100",
        "<=",
        1.1,
        "run",
        "Memory",
        "after 1,000",
        "of that above",
    ),
    ("An iteration with SmolLM2, CPU seconds", "<=", 70, "smollm", "SmolLM2", "together", "measured"),
    ("... memory, GiB", "<=", 3.7, "smollm", "SmolLM2", "most memory", "measured"),
    ("A question among 21 million passages, CPU ms", "<=", 40, "retrieval", "BM25", "21,015,324", "CPU ms"),
    ("`make all`, minutes", "<=", 10, "commands", "Commands", "make all", "minutes"),
    ("`make all PRESET=smoke`, minutes", "<=", 1, "commands", "Commands", "make all PRESET=smoke", "minutes"),
    ("`make test` after set-up, minutes", "<=", 3, "commands", "Commands", "make test", "minutes"),
)


def _speed() -> str:
    """What is aimed at and what was measured, then every table of `benchmarks/`, with where it was."""
    names = ("run", "kernels", "trl", "trl_smollm", "against", "smollm", "commands")
    found = {name: json.loads((SPEED / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    tables = {name: content["tables"] for name, content in found.items()}
    sizes = json.loads((SPEED.parent / "retrieval.json").read_text(encoding="utf-8"))["sizes"]
    asked = [
        {"passages": f"{int(n):,}", "CPU ms": f"{size['search']['again']['cpu_ms']['p50']:.0f}"}
        for n, size in sizes.items()
    ]
    tables["retrieval"] = {"BM25": asked}
    text = HEAD + "| what | aim | measured | met |\n| --- | --- | --- | --- |\n"
    for what, sense, aim, file, title, first, column in AIMS:
        (table,) = (rows for name, rows in tables[file].items() if name.startswith(title))
        named = {next(iter(row.values())): row[column] for row in table}
        cell = named.get(first) or next(cell for name, cell in named.items() if name.startswith(first))
        value = float(cell.split()[0])
        met = value >= aim if sense == ">=" else value <= aim
        text += f"| {what} | {'at least' if sense == '>=' else 'at most'} {aim:g} | {cell} | {'yes' if met else 'no'} |\n"
    places = {f"{f['hardware']['cpu']}, {f['date']}, commit {f['git_commit'][:7]}" for f in found.values()}
    loads = ", ".join(f"{f['load_average']:.1f}" for f in found.values())
    text += f"\nMeasured on {'; '.join(sorted(places))}; with one thread, the commands with all cores. "
    text += f"Load of the machine at the end of each script: {loads}. Each cell with a range is a median.\n"
    for content in found.values():
        for title, rows in content["tables"].items():
            lines = [" | ".join(["", *row, ""]).strip() for row in (rows[0].keys(), ["---"] * len(rows[0]))]
            lines += [" | ".join(["", *row.values(), ""]).strip() for row in rows]
            text += f"\n### {title}\n\n" + "\n".join(lines) + "\n"
    return text


# Folders of pictures in `results/reference`, in the order of the page that shows all, with what their runs were.
PICTURED = {
    "study/figures": "The study: many methods at one setting, each in many made-up worlds",
    "study/claims": "The study's questions, one by one",
    "benchmark/figures": "The benchmark: forty settings for every method",
    "laptop/figures": "What `make all` trains on a laptop: thirteen methods in three worlds",
    "search/figures": "The search for a setting at which token PPO fails",
    "search/dependence/figures": "What that failure depends on",
    "mechanism/figures": "PPO's ratio taken apart",
    "mild/figures": "A milder setting",
    "starving/figures": "Slow questions under an asynchronous trainer",
    "divisor/part2/figures": "The divisor, where it may help",
    "thousand/figures": "A thousand iterations",
    "smollm_comparison/figures": "A small language model, one world",
    "first_study/figures": "The first study, whose facts could be learned by heart",
}


def _figures() -> str:
    """Every recorded picture with the sentence that it states, and the notebooks that have more."""
    from stppo.figures.figures import FIGURES
    from stppo.figures.style import words_of

    reference, order = DOCS.parent / "results/reference", list(FIGURES)
    text = HEAD + "# Every figure\n\nAbove each stands what it shows. All were drawn from recorded runs.\n"
    for folder, heading in PICTURED.items():
        text += f"\n## {heading}\n"
        files = {file.stem: file for file in sorted((reference / folder).glob("*.png"))}
        for name in sorted(files, key=lambda name: order.index(name) if name in order else len(order)):
            title = words_of(files[name])[0]  # drawn in the picture, too
            text += f"\n![{title}]({os.path.relpath(files[name], OUT)})\n"
            text += "" if title else f"\n*{name.replace('_', ' ').capitalize()}.*\n"
    text += "\n## In the notebooks\n\n"
    for file in sorted((DOCS / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        title = next(line.lstrip("# ") for line in prose.splitlines() if line.startswith("# "))
        drawn = sum("image/png" in out.get("data", {}) for cell in cells for out in cell.get("outputs", ()))
        text += f"- [{title}](../../notebooks/{file.name}): {drawn} picture{'s' * (drawn != 1)}\n"
    return text


def _front() -> str:
    """The picture of the first page; nothing where there is none."""
    return HEAD + _picture("../")


def _api() -> dict[str, str]:
    import stppo

    pages = {}
    for layer, text in LAYERS.items():
        folder = Path(stppo.__file__).parent / layer
        modules = sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))
        parts = [HEAD + f"# stppo.{layer}\n\n{text}\n"]
        if not modules:  # one module, no folder of them
            parts.append(f"\n```{{eval-rst}}\n.. automodule:: stppo.{layer}\n```\n")
        for module in modules:
            try:
                importlib.import_module(f"stppo.{layer}.{module}")
            except ImportError:  # its host library is an extra
                source = (folder / f"{module}.py").read_text()
                text = ast.get_docstring(ast.parse(source)) or ""
                parts.append(f"\n## {module}\n\n```text\n{text}\n```\n")
                continue
            parts.append(f"\n## {module}\n\n```{{eval-rst}}\n.. automodule:: stppo.{layer}.{module}\n```\n")
        pages[f"api-{layer}"] = "".join(parts)
    return pages


# Tables inside committed pages, so that whoever reads the source has them: between `<!-- table ... -->` and `<!-- end -->`.
TABLES = {
    "explanation/names.md": _algorithms,
    "explanation/rivals.md": _rivals,
    "explanation/one-name.md": _hosts,
    "howto/verl.md": lambda: _plug_in("verl"),
    "howto/trl.md": lambda: _plug_in("trl"),
}


def with_table(page: str) -> str:
    """A committed page with its table as the code has it now."""
    text = (DOCS / page).read_text(encoding="utf-8")
    begin, table = "<!-- table, written by `make docs` -->\n", TABLES[page]()
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition("<!-- end of the table -->")
    if not (found and ended):
        raise ValueError(f"docs/{page} lacks the two comments that its table stands between")
    return f"{before}{begin}\n{table}\n<!-- end of the table -->{after}"


def _write(app) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for page in TABLES:
        (DOCS / page).write_text(with_table(page), encoding="utf-8")
    pages = {
        "front": _front(),
        "leaderboard": _leaderboard(),
        "study": _study(),
        **{
            here: HEAD + recorded_page(there)
            for there, here in RECORDED.items()
            if here not in ("study", "leaderboard")
        },
        "speed": _speed(),
        "figures": _figures(),
        "metrics": _metrics(),
        "commands": _commands(),
        "configs": _configs(),
        **_api(),
    }
    for name, text in pages.items():
        file = OUT / f"{name}.md"
        text = re.sub(r"\n{3,}", "\n\n", text)
        if not file.is_file() or file.read_text() != text:  # an unchanged page is not built again
            file.write_text(text)


def _plain(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings here are plain text: paragraphs with `code`, and blocks whose columns are aligned by spaces."""
    out = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = paragraph.split("\n")
        aligned = any(re.search(r"\S {2,}\S", row) for row in rows)
        if aligned or any(row.startswith("    ") for row in rows):
            out += ["::", "", *(f"    {row}" for row in rows), ""]
        else:
            text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", " ".join(row.strip() for row in rows))
            parts = re.split(r"(``[^`]*``)", text)
            said = [
                part if part.startswith("``") else re.sub(r"([\\*_|<>`])", r"\\\1", part) for part in parts
            ]
            # a letter right behind code, as in `name`s, needs a mark between
            joined = (
                f"{part}\\ " if part.startswith("``") and after[:1].isalnum() else part
                for part, after in zip(said, [*said[1:], ""], strict=True)
            )
            out += [
                "".join(joined),
                "",
            ]
    lines[:] = out


def _is_a_place(app, what, name, obj, skip, options) -> bool | None:
    """Fields of a named tuple say nothing but their place, which its signature says too."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field number") else None


def setup(app):
    app.connect("builder-inited", _write)
    app.connect("autodoc-skip-member", _is_a_place)
    app.connect("autodoc-process-docstring", _plain)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
