"""What the ablations and the mechanism show, in sentences made from the numbers; see `answers` for Q1-Q8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from pandas.io.formats.style import Styler

from stppo.results import resampling
from stppo.results.forest import forest
from stppo.results.resampling import Estimate, Replicate
from stppo.results.style import look
from stppo.study import words
from stppo.study.answers import Answer, other_settings, versus
from stppo.study.arms import ABLATIONS, CONTROLS, DRIVERS, LONG, MAIN, ON_POLICY, PPO_VARIANTS, SETTINGS
from stppo.study.claims import Plan, Verdict
from stppo.study.comparisons import arm_of, estimate, group_table
from stppo.study.diagnostic_figures import critic_errors
from stppo.study.matching import matching_sentences, matching_table
from stppo.study.mechanism import departures, lead_table
from stppo.study.outcomes import TABLE_DRAWS, Arm, Study
from stppo.study.phase_diagram import FINAL, phase_table
from stppo.study.study_figures import factorial_effects

GROUPS = {group.name: group for group in (*ABLATIONS, *DRIVERS)} | {f"controls_{g.name}": g for g in CONTROLS}


def ablation(study: Study, name: str, planned: Plan | None = None) -> Answer:
    """What one group of `arms` shows. KeyError for a name that no group has."""
    group = GROUPS[name]
    table = group_table(study, group, planned)
    return Answer(group.title, group.question, words.group_sentence(table), "normalisers", table)


def ledger(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """The verdicts, short: id, claim, kind, measured, verdict (`provisional` from fewer runs than planned), runs (recorded
    of planned)."""
    rows = [[v.id, v.text, v.kind, _measured(v), v.shown, v.counted] for v in verdicts]
    return pd.DataFrame(rows, columns=["", "claim", "kind", "measured", "verdict", "runs"])


def text_table(table: pd.DataFrame) -> Styler:
    """A table of words for a notebook: without its index, flush left, columns of sentences not squeezed by the others."""
    wide = [name for name in table if table[name].astype(str).str.len().max() > 25]
    return (
        table.style.hide(axis="index")
        .set_properties(subset=wide, **{"min-width": "13em"})
        .set_table_styles([{"selector": "th, td", "props": "text-align: left"}])
    )


def _measured(verdict: Verdict) -> str:
    return (
        f"{words.number(verdict.value)} [{words.number(verdict.low)}, {words.number(verdict.high)}]"
        if verdict.checks
        else ""
    )


def shown(study: Study, answer: Answer) -> Answer:
    """An answer whose numbers compare arms, with their forest plot; without one where nothing can be compared."""
    if "collapse_risk" not in answer.table:
        return answer
    blocks = answer.table.groupby("block", sort=False) if "block" in answer.table else [("", answer.table)]
    run = {
        block: rows for block, rows in blocks if rows["runs"].iloc[0] and (rows["runs"].iloc[1:] > 0).any()
    }
    plot = forest(
        study.metrics,
        answer.figure,
        answer.question,
        answer.question,
        run,
        labels={"final_difference": "final success,\nminus the diamond's"},
        role="first of the block",
    )
    return replace(answer, plot=plot)


def phase(study: Study) -> Answer:
    """How collapse depends on epochs, learning rate, age of the batches and the split of the updates."""
    data = phase_table(study)
    question = "What drives collapse: epochs, learning rate, or the age of the batches?"
    if data.empty:
        return Answer(
            "Phase diagram", question, words.untested(["the phase diagram's cells"]), "phase_diagram", data
        )
    sentences = []
    for name in PPO_VARIANTS:
        mine = data[data["algorithm"] == name]
        clauses, few = [], []
        for part, along, across, what in (
            ("phase", "x", "y", "epochs"),
            ("phase", "y", "x", "learning rate"),
            ("staleness", "x", "y", "age"),
        ):
            found, ends = _dial(study, mine[mine["part"] == part], along, across)
            if found is None:
                continue
            if found.n_clusters < words.FEWEST:
                few.append(f"{what} {ends} ({words.of(found, sign=True)})")
            else:
                verb = words.difference(found, "rises", "falls", "is not shown to change")
                clauses.append(f"{verb} with {what} {ends}")
        if few:
            clauses.append(f"rests on too few warm starts for a direction along {words.listed(few)}")
        splits = mine[mine["part"] == "split"]
        if len(splits) > 1:
            shares = [f"{row.x}: {words.share(row.collapsed, row.runs)}" for row in splits.itertuples()]
            clauses.append(f"is {', '.join(shares)} as 32 updates are split (epochs × minibatches)")
        if clauses:
            sentences.append(
                f"{words.capital(look(name).label)}'s share of collapsed runs {words.listed(clauses)}."
            )
    starts = [len({replicate.cluster for replicate in study.runs(arm_of(arm))}) for arm in data["arm"]]
    enough = data[[n >= words.FEWEST for n in starts]].drop_duplicates("arm")
    if len(enough) > 1:
        best = enough.loc[enough[FINAL].idxmax()]
        sentences.append(
            f"Of the {len(enough)} cells with runs from {words.FEWEST} warm starts or more, {look(best['algorithm']).label} in "
            f"{best['arm']} has the highest final success ({words.number(best[FINAL])}, {best['runs']} runs)."
        )
    if not sentences:
        sentences = ["Nothing to compare: no cells that differ in one dial only were run."]
    return Answer("Phase diagram", question, " ".join(sentences), "phase_diagram", data)


def _dial(study: Study, cells: pd.DataFrame, along: str, across: str) -> tuple[Estimate | None, str]:
    """Share of collapsed runs at the upper end of one dial minus that at its lower end, and the two ends in words.

    cells: rows of one algorithm and part of `phase_table`. Only those values of the other dial count at which every value
    of this one was run, so that the two ends differ in nothing else; None where there is none.
    """
    arms = cells.pivot(index=across, columns=along, values="arm").dropna()
    levels = sorted(arms.columns, key=float)
    if len(levels) < 2 or arms.empty:
        return None, ""
    ends = [[arm_of(arm) for arm in arms[level]] for level in (levels[-1], levels[0])]
    outcomes = [study.outcomes(arm, study.collapsed) for end in ends for arm in end]
    signs = [sign / len(arms) for sign in (1, -1) for _ in range(len(arms))]
    found = estimate(lambda: resampling.contrast(outcomes, signs, (0.0, 1.0), n_draws=TABLE_DRAWS))
    return found, f"{levels[0]} to {levels[-1]}"


def factorial(study: Study) -> Answer:
    """Main effects of ratio and credit on survival."""
    question = "Is it the turn-level ratio that helps, or credit that is as coarse?"
    effects = factorial_effects(study)
    table = pd.DataFrame(
        [[name, effect.value, *effect.interval(0.95)] for name, effect in effects.items()],
        columns=["effect on mean survival (share of the horizon)", "value", "low", "high"],
    )
    if not effects:
        text = words.untested(["one of the four corners"])
    else:
        told = [
            f"{name} {words.difference(effect, 'lengthens', 'shortens', 'is not shown to change')}"
            for name, effect in list(effects.items())[:2]
        ]
        inter = words.difference(effects["interaction"], "positive", "negative", "not shown to differ from 0")
        text = f"On restricted mean survival (share of the horizon): {'; '.join(told)}. The interaction is {inter}."
    return Answer("Factorial", question, text, "factorial", table)


def moves_first(study: Study, regime: str = MAIN, algorithm: str = "token_ppo") -> Answer:
    """Which signals leave their healthy range before the collapse, and which do so in survivors too."""
    question = "In runs that collapse, what moves first?"
    arm = Arm(regime, algorithm)
    name = f"{look(algorithm).label} in {regime}"
    departed = departures(study, arm)
    table = lead_table(departed) if len(departed) else departed
    ill = departed.loc[departed["collapse"].notna(), list(Replicate._fields)].drop_duplicates()
    starts = len(ill[["world_seed", "warm_start_seed"]].drop_duplicates())
    if table.empty:
        runs = len(study.runs(arm))
        text = f"None of the {runs} runs of {name} collapsed." if runs else words.untested([str(arm)])
        return Answer(f"Mechanism, {regime}", question, text, "mechanism", table)
    if starts < words.FEWEST:
        text = (
            f"{_counted(len(ill), 'collapsed run')} of {name}, from {_counted(starts, 'warm start')}: too few to "
            "say what moves first."
        )
        return Answer(f"Mechanism, {regime}", question, text, "mechanism", table)
    specific = table[
        (table["departed"] / table["collapsed"] > 0.5)
        & (table["survivors_departed"] / table["survivors"].where(table["survivors"] > 0) < 0.25).where(
            table["survivors"] > 0, True
        )
    ]
    first = table.iloc[0]
    text = (
        f"In {name}, {first['label']} leaves its healthy range first on average, "
        f"{words.interval(first['lead_mean'], first['lead_low'], first['lead_high'])} iterations before the collapse, in "
        f"{words.share(first['departed'], first['collapsed'])} collapsed runs and {words.share(first['survivors_departed'], first['survivors'])} "
        "survivors. "
    )
    if len(specific):
        told = [f"{row.label} ({words.number(row.lead_mean)})" for row in specific.itertuples()]
        text += f"Of all signals, those that leave it in most collapsed runs and in less than a quarter of the survivors are, with their mean lead, {words.listed(told)}."
    else:
        text += "No signal leaves it in most collapsed runs and in less than a quarter of the survivors."
    if first["reference"] != "survivors":
        text += " There are fewer than three survivors, so ranges are each run's own first quarter and false alarms are not known."
    return Answer(f"Mechanism, {regime}", question, text, "mechanism", table)


def matching(study: Study) -> Answer:
    """How near each control comes to what it was matched to."""
    question = "Do the controls do what they are there for?"
    table = matching_table(study)
    told = matching_sentences(table)
    text = (
        " ".join(told) + " The other controls are in the table."
        if told
        else "Not tested: no matched arm was run."
    )
    return Answer("Matching", question, text, "controls", table.drop(columns="matched"))


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def settings(study: Study, planned: Plan | None = None) -> Answer:
    """The stabilised variants against token PPO in every other setting."""
    question = "Does it hold in other worlds, and for another model family?"
    table = other_settings(study, planned)
    clauses = [
        f"{words_}: {versus(study, Arm(regime, 's_ppo'), Arm(regime, 'token_ppo'))}; "
        f"{versus(study, Arm(regime, 'st_ppo'), Arm(regime, 'token_ppo'))}"
        for regime, words_ in SETTINGS.items()
    ]
    text = ". ".join(map(words.capital, clauses)) + "."
    return Answer("Settings", question, text, "settings", table)


def critic(study: Study) -> Answer:
    """The critic's error before the collapse, by arm."""
    errors = critic_errors(study)
    question = "How far are the critic's values from the truth?"
    if errors.empty:
        return Answer("Critic", question, "Not tested: no run measured the critic's error.", "critic", errors)
    table = (
        errors.groupby(["regime", "algorithm"])["error"].agg(["count", "mean", "min", "max"]).reset_index()
    )
    told = [
        f"{look(algorithm).label} in {regime} {words.number(part['error'].mean())} ({len(part)} runs)"
        for (regime, algorithm), part in errors.groupby(["regime", "algorithm"])
        if regime in (MAIN, ON_POLICY, LONG) and algorithm in PPO_VARIANTS
    ]
    text = f"Root mean squared error of V over the spread of the true values, mean before the collapse: {words.listed(told)}."
    return Answer("Critic", question, text, "critic", table)
