"""Answers to the reviewers' questions Q1-Q8, in two sentences each, made from the numbers.

No outcome is written down here: what a sentence says follows from intervals at 95 %, and where runs are
missing it says which.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pandas as pd

from stppo.results import resampling
from stppo.results.statistics import final_mean
from stppo.results.style import Plot, look
from stppo.study import words
from stppo.study.arms import (
    BEST,
    CONTROLS,
    MAIN,
    NINE,
    PPO_VARIANTS,
    SETTINGS,
    variant,
)
from stppo.study.claims import Plan
from stppo.study.comparisons import (
    arm_of,
    compare,
    estimate,
    extra_risk,
    final_difference,
    group_table,
    missing_arms,
)
from stppo.study.diagnostic_figures import run_trends, trend_table
from stppo.study.matching import matching_sentences, matching_table
from stppo.study.outcomes import TABLE_DRAWS, Arm, Study
from stppo.study.study_figures import LOWEST, best_table


@dataclass(frozen=True)
class Answer:
    """A question, its answer in words, the numbers behind it and the figure that shows them."""

    id: str
    question: str
    text: str
    figure: str
    table: pd.DataFrame = field(repr=False)
    see: tuple[str, ...] = ()  # notebooks that derive the reason
    plot: Plot | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        """For a notebook: the picture, the answer and its numbers."""
        rows = words.readable(self.table).to_html(
            index=False, float_format="{:.3g}".format, na_rep="", border=0
        )
        rows = rows.replace("<td>", '<td style="white-space: nowrap">')
        see = words.listed([f'<a href="{name}.ipynb">notebook {name[:2]}</a>' for name in self.see])
        text = html.escape(self.text) + (f" See also {see}." if see else "")
        return (
            f"{self._picture()}<p><b>{html.escape(self.id)}.</b> {text}</p>{rows if len(self.table) else ''}"
        )

    def _picture(self) -> str:
        if self.plot is None:
            return ""
        png, size = self.plot._repr_png_()
        data = base64.b64encode(png).decode()
        return f'<img alt="{html.escape(self.question)}" width="{size["width"]}" src="data:image/png;base64,{data}">'


def _main(name: str) -> Arm:
    return Arm(MAIN, name)


def _label(arm: Arm) -> str:
    return look(arm.algorithm).label


def versus(study: Study, one: Arm, other: Arm) -> str:
    """One clause on collapse risk and final success of an arm against another, with intervals."""
    runs = [study.runs(arm) for arm in (one, other)]
    if not all(runs):
        absent = [str(arm) for arm, of in zip((one, other), runs, strict=True) if not of]
        return f"{_label(one)} against {_label(other)} is not tested (no runs of {words.listed(absent)})"
    counts = [words.share(sum(study.collapsed(run) == 1 for run in of.values()), len(of)) for of in runs]
    risk = words.difference(
        estimate(extra_risk, study, one, other), "more often", "less often", "no difference shown"
    )
    final = words.difference(
        estimate(final_difference, study, one, other), "higher", "lower", "with no difference shown"
    )
    return f"{_label(one)} collapses in {counts[0]} runs against {counts[1]} of {_label(other)}, {risk}, and ends {final}"


def _compared(study: Study, names: Sequence[str], planned: Plan | None, regime: str = MAIN) -> pd.DataFrame:
    """Arms of a regime beside the first one."""
    return compare(study, [(Arm(regime, name), look(name).label) for name in names], planned)


def _stop(table: pd.DataFrame) -> str | None:
    """What to say if the first arm of a comparison, or all others, have no runs."""
    if not table["runs"].iloc[0] or not (table["runs"].iloc[1:] > 0).any():
        return words.untested(missing_arms(table))
    return None


def _leaders(table: pd.DataFrame) -> str:
    """Which arms of a comparison end highest and collapse least, of those with enough warm starts to be named."""
    enough = table[(table["warm_starts"] >= words.FEWEST) & table["final_success_low"].notna()]
    if len(enough) < 2:
        return f"too few have runs from {words.FEWEST} warm starts to name the best ({len(enough)})"
    named = "" if len(enough) == len(table) else f"of the {len(enough)} with runs from enough warm starts "
    top = words.ranking(list(zip(enough["label"], enough["final_success"], strict=True)))
    row = enough[enough["label"] == top[0]].iloc[0]
    first = table["label"].iloc[0]
    beside = (
        f"against {first}, {words.found(table, 'final_difference', 1)} end higher and "
        f"{words.found(table, 'final_difference', -1)} lower"
    )
    known = enough[enough["collapse_risk"].notna()]
    least = (
        words.ranking(list(zip(known["label"], known["collapse_risk"], strict=True)), min)
        if len(known)
        else []
    )
    lowest = words.number(known["collapse_risk"].min())
    risk = f", and the lowest collapse risk ({lowest}) is that of {words.listed(least)}" if least else ""
    if len(least) == len(known):
        risk = f", and all have the same collapse risk ({lowest})"
    return (
        f"{named}{words.listed(top)} has the highest mean final success "
        f"({words.interval(row['final_success'], row['final_success_low'], row['final_success_high'])}); {beside}{risk}"
    )


def baselines(study: Study, planned: Plan | None) -> Answer:
    """Q1: the other algorithms."""
    table = _compared(study, NINE, planned)
    text = _stop(table)
    if text is None:
        run = table[table["runs"] > 0]
        text = (
            f"Of the {len(run)} algorithms run at shared settings, {_leaders(run)}; token PPO collapsed in "
            f"{words.share(run['collapsed'].iloc[0], run['runs'].iloc[0])} runs. "
        )
        best = best_table(study, planned)
        if best is None:
            text += f"Each at its best learning rate: not tested (no runs of {BEST})"
        else:
            text += f"Each at its best learning rate ({LOWEST}: the lowest tried), {_leaders(best)}"
        absent = [
            *(["TOPR"] if not any("topr" in a.algorithm for a in study.arms) else []),
            *missing_arms(table),
        ]
        text += f"; not run: {words.listed(absent)}." if absent else "."
    question = "How do the stabilised variants compare with GRPO, GSPO, TOPR and others?"
    return Answer("Q1", question, text, "best_settings", table)


def turn_level_on_top(study: Study, planned: Plan | None) -> Answer:
    """Q2: the turn ratio once the correction is on."""
    pairs = {"with a critic": ("s_ppo", "st_ppo"), "without a critic": ("s_grpo", "so_grpo")}
    parts = [_compared(study, names, planned).assign(block=block) for block, names in pairs.items()]
    table = pd.concat(parts, ignore_index=True)
    text = (
        f"With the divisor on, {versus(study, _main('st_ppo'), _main('s_ppo'))}. "
        f"Without a critic, {versus(study, _main('so_grpo'), _main('s_grpo'))}."
    )
    question = "Does turn-level sampling add anything once the clipping-bias correction is on?"
    return Answer("Q2", question, text, "stability", table)


def _clip_level(study: Study, name: str) -> resampling.Estimate | None:
    def change(run) -> float:
        values = study.steady(run)["clip_fraction"].to_numpy(float)
        return final_mean(values) - final_mean(values[::-1])

    return estimate(lambda: resampling.mean(study.outcomes(_main(name), change), n_draws=TABLE_DRAWS))


def turn_ppo(study: Study, planned: Plan | None) -> Answer:
    """Q3: Turn-PPO in figures 4 and 5."""
    table = _compared(study, ("turn_ppo", "token_ppo", "s_ppo", "st_ppo"), planned)
    text = _stop(table)
    if text is None:
        text = (
            f"{words.capital(versus(study, _main('turn_ppo'), _main('token_ppo')))}; against ST-PPO, "
            f"{versus(study, _main('turn_ppo'), _main('st_ppo'))}. "
        )
        changes = [(name, _clip_level(study, name)) for name in PPO_VARIANTS]
        told = [
            f"{look(name).label} {words.of(found, sign=True)}" for name, found in changes if found is not None
        ]
        text += (
            "From full staleness to the collapse or the end, the clip fraction changes from the first to the last tenth like "
            f"this: {words.listed(told)}."
        )
    question = "What does Turn-PPO do in figures 4 and 5?"
    return Answer("Q3", question, text, "clip_ratio", table)


def diagnostics(study: Study, planned: Plan | None) -> Answer:
    """Q4: trends of 3c-d for all variants."""
    table = trend_table(run_trends(study, MAIN))
    if table.empty:
        text = words.untested([str(_main(name)) for name in PPO_VARIANTS])
    else:
        sentences = []
        norms = {"clipping_bias_norm": "The clipping-bias norm", "gradient_norm": "the gradient norm"}
        for metric, name in norms.items():
            rows = table[table["metric"] == metric]
            told = [
                f"{words.interval(r.factor, r.factor_low, r.factor_high)} for {look(r.algorithm).label}, "
                f"with a median R² of {words.number(r.r_squared)}"
                for r in rows.itertuples()
            ]
            sentences.append(
                f"{name} changes per ten iterations by a factor (above 1: it grows) of {words.listed(told)}"
                if told
                else f"{name} was not recorded"
            )
        shown = table[table["metric"].isin(norms)]
        note = f"; in {(shown['r_squared'] < 0.5).sum()} of these {len(shown)} the trend explains less than half of the variance of the logarithm"
        text = f"{sentences[0]}. {words.capital(sentences[1])}{note}."
        absent = [str(_main(name)) for name in PPO_VARIANTS if name not in set(table["algorithm"])]
        text += f" Not run: {words.listed(absent)}." if absent else ""
    question = "Do S-PPO and ST-PPO show the same diagnostics (3c-d), with a trend and its goodness of fit?"
    return Answer("Q4", question, text, "trends", table)


def why_divide(study: Study, planned: Plan | None) -> Answer:
    """Q5: controls of the cure, which shorten or skip steps and know nothing of their own clipping bias."""
    table = pd.concat(
        [group_table(study, group, planned).assign(block=group.title) for group in CONTROLS],
        ignore_index=True,
    )
    treated = table["block"].map(
        {group.title: look(arm_of(group.default).algorithm).label for group in CONTROLS}
    )
    controls = table.assign(treated=treated)[
        [variant(arm_of(name).algorithm) is not None for name in table["arm"]]
    ]
    run = controls[controls["shared"] >= words.FEWEST]
    if run.empty:
        text = f"Not tested: no control shares {words.FEWEST} warm starts with what it controls."
    else:
        named = run.assign(label=run["label"] + " against " + run["treated"])
        arms = run.drop_duplicates("arm")
        absent = missing_arms(controls)
        text = (
            f"{words.share((arms['collapsed'] == 0).sum(), len(arms))} controls had no collapse in any run. In {len(run)} comparisons of {words.listed(list(run['treated'].unique()))} with controls that shorten or skip "
            f"steps and know nothing of their own clipping bias, the control collapses more often in {words.found(named, 'extra_risk', 1)} "
            f"and less often in {words.found(named, 'extra_risk', -1)}; in the others no difference is shown. "
            f"It ends higher in {words.found(named, 'final_difference', 1)} and lower in "
            f"{words.found(named, 'final_difference', -1)}{f'; not run: {words.listed(absent)}' if absent else ''}. "
            + " ".join(matching_sentences(matching_table(study)))
        ).rstrip()
    question = "Why should dividing by ‖C‖ help at all?"
    see = ("03-clipping-bias", "04-stabilised-objectives")
    return Answer("Q5", question, text, "controls", table, see)


def other_settings(study: Study, planned: Plan | None) -> pd.DataFrame:
    """The PPO variants in the main regime and in every other setting, block by block."""
    parts = [
        _compared(study, PPO_VARIANTS, planned, regime).assign(block=words_)
        for regime, words_ in {MAIN: "main regime", **SETTINGS}.items()
    ]
    return pd.concat(parts, ignore_index=True)


def other_family(study: Study, planned: Plan | None) -> Answer:
    """Q6: another model family."""
    table = other_settings(study, planned)
    clauses = [versus(study, Arm("LLAMA", name), Arm("LLAMA", "token_ppo")) for name in ("s_ppo", "st_ppo")]
    main = versus(study, _main("st_ppo"), _main("token_ppo"))
    text = f"With a Llama-type policy, {clauses[0]}; {clauses[1]}. For comparison, in the main regime {main}."
    return Answer("Q6", "Does it hold for another model family?", text, "settings", table)


def grpo(study: Study, planned: Plan | None) -> Answer:
    """Q7: GRPO."""
    table = _compared(study, ("grpo", "turn_grpo", "s_grpo", "so_grpo", "so_grpo_ctn", "gspo"), planned)
    text = (
        f"{words.capital(versus(study, _main('so_grpo'), _main('grpo')))}; in reading B, "
        f"{versus(study, _main('so_grpo_ctn'), _main('grpo'))}. "
        f"Of its two parts alone, {versus(study, _main('turn_grpo'), _main('grpo'))} (turn ratio), and "
        f"{versus(study, _main('s_grpo'), _main('grpo'))} (divisor)."
    )
    return Answer("Q7", "Does it hold for GRPO?", text, "so_grpo", table)


def boundaries(study: Study, planned: Plan | None) -> Answer:
    """Q8: wrong turn boundaries, of which no boundary and a boundary at every token are the extremes."""
    table = _compared(study, ("turn_grpo", "grpo", "gspo"), planned)
    matched = f"; with matched ε, {versus(study, _main('turn_grpo'), _main('gspo_epsilon_matched'))}"
    text = (
        "Turns end at a closing search or answer tag, kept as token positions when they are sampled, so no run here has a wrong "
        "boundary; the extremes of wrong ones are a boundary at every token (GRPO's ratio) and none (GSPO's, which also clips "
        f"more narrowly). {words.capital(versus(study, _main('turn_grpo'), _main('grpo')))}; "
        f"{versus(study, _main('turn_grpo'), _main('gspo'))}{matched}."
    )
    question = "How are turn boundaries found, and what happens when they are wrong?"
    return Answer("Q8", question, text, "granularity", table, ("05-search-agent",))


QUESTIONS: dict[str, Callable[[Study, Plan | None], Answer]] = {
    "Q1": baselines,
    "Q2": turn_level_on_top,
    "Q3": turn_ppo,
    "Q4": diagnostics,
    "Q5": why_divide,
    "Q6": other_family,
    "Q7": grpo,
    "Q8": boundaries,
}


def all_answers(study: Study, planned: Plan | None = None) -> list[Answer]:
    """Q1-Q8, in order; deterministic."""
    return [answer(study, planned) for answer in QUESTIONS.values()]
