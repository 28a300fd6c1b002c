"""What a figure was drawn from, in words."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from stppo.results.resampling import Replicate
from stppo.results.runs import Metrics
from stppo.results.statistics import band_note
from stppo.results.style import LOOKS, STYLE_NOTE, look


def replicates(metrics: Metrics, regime: str, algorithm: str) -> dict[int, Replicate]:
    """Replicate of every seed of an arm."""
    return {
        run["seed"]: Replicate(run["world_seed"], run["warm_start_seed"], run["seed"])
        for run in metrics.runs
        if (run["regime"], run["algorithm"]) == (regime, algorithm)
    }


def is_clustered(of: Iterable[Replicate]) -> bool:
    """Whether some warm start has several seeds, so that runs are not independent."""
    of = list(of)
    return len({replicate.cluster for replicate in of}) < len(of)


def _numbers(values: Sequence[float], pattern: str = "{:g}") -> str:
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return low if low == high else f"{low}–{high}"


def short(value: float) -> str:
    """Four significant digits at most, as people write learning rates: 3.5e-4, 8.75e-5."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def describe_setting(metrics: Metrics, regimes: Container[str] | None = None) -> str:
    """Model and world of the runs (all, unless regimes are given), in words."""
    runs = [run for run in metrics.runs if regimes is None or run["regime"] in regimes]
    parts = []
    policies = sorted({str(run["policy"]) for run in runs if run.get("policy")})
    sizes = [run["policy_parameters"] / 1e6 for run in runs if run.get("policy_parameters")]
    if policies:
        size = f" ({_numbers(sizes, '{:.2g}')} M parameters)" if sizes else ""
        parts.append(f"{', '.join(policies)} policy{size}")
    parts.append(f"{', '.join(sorted({str(run['world']) for run in runs}))} world")
    return ", ".join(parts)


def _seeds(metrics: Metrics, regime: str, algorithms: Sequence[str]) -> str:
    counts = [
        sum((r["regime"], r["algorithm"]) == (regime, name) for r in metrics.runs) for name in algorithms
    ]
    counts = [count for count in counts if count]
    return f"{_numbers(counts)} seed{'s' if max(counts) > 1 else ''}"


def describe_regime(metrics: Metrics, regime: str, algorithms: Sequence[str]) -> str:
    """Learning rate, staleness, updates per iteration and seeds of a regime, as recorded."""
    settings = regime_settings(metrics, regime, algorithms)
    words = {"learning_rate": "lr {}", "staleness": "staleness {}", "updates": "{} updates per iteration"}
    parts = [pattern.format(settings[name]) for name, pattern in words.items() if name in settings]
    return ", ".join([*parts, _seeds(metrics, regime, algorithms)])


def regime_settings(metrics: Metrics, regime: str, algorithms: Sequence[str]) -> dict[str, str]:
    """What these algorithms' runs in a regime recorded: iterations, learning_rate (or its range), staleness (iterations,
    the largest) and updates (per iteration, the most); what none recorded is left out."""
    runs = [run for run in metrics.runs if run["regime"] == regime and run["algorithm"] in algorithms]
    settings = {}
    if iterations := [run["iterations"] for run in runs if run.get("iterations")]:
        settings["iterations"] = f"{max(iterations)}"
    rows = metrics.iterations[
        (metrics.iterations["regime"] == regime) & metrics.iterations["algorithm"].isin(algorithms)
    ]
    if "learning_rate" in rows and rows["learning_rate"].notna().any():
        rates = (
            rows.groupby(["algorithm", "seed"])["learning_rate"].max().agg(["min", "max"]).map(short).unique()
        )
        settings["learning_rate"] = "–".join(rates)
    if "staleness_iterations" in rows and rows["staleness_iterations"].notna().any():
        settings["staleness"] = f"{rows['staleness_iterations'].max():.0f}"
    if per_iteration := [run["updates"] / run["iterations"] for run in runs if run.get("iterations")]:
        settings["updates"] = f"{max(per_iteration):.0f}"
    return settings


def _bands(metrics: Metrics, regimes: Sequence[str], algorithms: Sequence[str]) -> str:
    """How lines and bands summarise the seeds; arms with several seeds from a warm start are drawn in a way of their own."""
    arms = sorted({(run["regime"], run["algorithm"]) for run in metrics.runs})
    drawn = [replicates(metrics, *arm).values() for arm in arms if arm[0] in regimes and arm[1] in algorithms]
    counts = {kind: [len(of) for of in drawn if is_clustered(of) == kind] for kind in (True, False)}
    notes = [band_note(n, clustered=kind) for kind, n in counts.items() if n]
    if len(notes) == 1:
        return notes[0]
    return f"Arms with several seeds from a warm start: {notes[0]} Other arms: {notes[1]}"


def caption(
    metrics: Metrics,
    what: str,
    regimes: Sequence[str],
    algorithms: Sequence[str],
    means: bool = True,
    marks: bool = True,
) -> str:
    """What was drawn and of which runs; with `means`, how lines and bands summarise the seeds; with `marks`, what an x is."""
    runs = metrics.summary[
        metrics.summary["regime"].isin(regimes) & metrics.summary["algorithm"].isin(algorithms)
    ]
    settings = "; ".join(f"regime {r}: {describe_regime(metrics, r, algorithms)}" for r in regimes)
    mark = " An x marks a seed's collapse." if marks and runs["collapsed"].any() else ""
    lines = f" {_bands(metrics, regimes, algorithms)} {STYLE_NOTE}" if means else ""
    if means and (own := [look(name).label for name in runs["algorithm"].unique() if name not in LOOKS]):
        lines += f" Dash-dotted: {', '.join(own)}."
    return f"{what} Our own measurement, not the paper's curves: {describe_setting(metrics, regimes)}; {settings}.{mark}{lines}"
