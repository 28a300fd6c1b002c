#!/usr/bin/env bash
# Guessed: MedianPruner stops a trial whose value falls below the median of the others at the same step.
# So is: the trial's best value so far is compared. A run that was ahead once and then fell to 0 is never stopped; the others' values are those of the step.
# optuna 5.0.0.
# Why it matters: a training that collapses early goes on to its end at success 0, and the pruned budget goes to exactly the settings that collapse.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet optuna==5.0.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
STEPS = 20


def steady(step):
    return 0.5 + 0.01 * step


def collapsed(step):
    return 0.9 if step < 6 else 0.0


def low(step):
    return 0.3


def stopped_at(curve):
    """The step at which a trial of this curve is pruned after six steady ones; None: never."""
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner())

    def train(trial):
        of = steady if trial.number < 6 else curve
        for step in range(STEPS):
            trial.report(of(step), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return of(STEPS - 1)

    study.optimize(train, n_trials=7)
    last = study.trials[-1]
    return last.last_step if last.state == optuna.trial.TrialState.PRUNED else None


found = {curve.__name__: stopped_at(curve) for curve in (low, collapsed)}
print("optuna", optuna.__version__, "- of", STEPS, "steps, the one at which MedianPruner stops a run")
print("always at .3, the others at .5 and more:", found["low"])
print("at .9 for six steps, at 0 from there on:", found["collapsed"])
if found["low"] is None or found["collapsed"] is not None:
    sys.exit("CHANGED: what MedianPruner compares")
PYTHON
