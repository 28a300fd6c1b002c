"""The warm start: supervised learning in two stages, until sampled success is moderate.

Reading: look-ups in made-up documents, which the world invents anew for each step, so that nothing but
copying from
the document helps. Searching: imitation of noisy scripted demonstrations; alone it teaches the protocol but
hardly any copying. A pretrained policy can read; a few dozen steps on demonstrations that succeed teach it
the protocol. Every run starts from here, as the paper's agents start from a pretrained model: RL then has
something to improve, and something to lose."""

import itertools
import logging
import math
import random
import time
import zipfile
from collections import deque
from pathlib import Path
from statistics import fmean

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from stppo.config.composition import compose
from stppo.config.files import Config
from stppo.config.identity import data_section, fingerprint, start_world_section, warm_start_dir
from stppo.config.loading import LoadedRun, load
from stppo.config.settings import RunConfig, WarmStartConfig
from stppo.files import parse_json, repository_path, write_json
from stppo.policy.compiled import choose_kernels
from stppo.policy.compute import place, resolve_device
from stppo.policy.policy import (
    build_policy,
    check_vocabulary,
    load_policy,
    load_tokenizer,
    make_folder,
    save_policy,
    score,
)
from stppo.policy.weights import weights_of
from stppo.record.ownership import FolderLock
from stppo.rollout.engines import make_rollout
from stppo.rollout.rollout import RolloutBuffer, Sampler
from stppo.training.checkpoint import trained
from stppo.training.failures import warm_start_stopped
from stppo.training.gradients import Passes
from stppo.training.metrics import evaluate
from stppo.training.optimizers import make_optimizer
from stppo.training.processes import in_own_process
from stppo.trajectories import Trajectories
from stppo.waiting import saying
from stppo.world.encoding import DialogueEncoder
from stppo.world.environment import Episode
from stppo.world.knowledge import SyntheticWorld
from stppo.world.protocol import Question
from stppo.world.rewards import score as score_reply
from stppo.world.scripted import DemonstrationNoise, World, play

log = logging.getLogger(__name__)

WARM_START_FILE = "warm_start.json"


def encode_episode(episode: Episode, encoder: DialogueEncoder) -> tuple[list[int], list[bool]]:
    """Tokens and agent mask of a played episode, each turn and observation tokenised on its own."""
    return _encode([episode], encoder)[0]


def _encode(episodes: list[Episode], encoder: DialogueEncoder) -> list[tuple[list[int], list[bool]]]:
    turns = [turn for episode in episodes for turn in episode.turns]
    written = iter(encoder.written([turn.text for turn in turns]))
    observed = iter(encoder.observations([turn.observation or "" for turn in turns]))
    encoded = []
    for episode in episodes:
        tokens = encoder.prompt(episode.prompt)
        mask = [False] * len(tokens)
        for _ in episode.turns:
            for ids, by_agent in ((next(written), True), (next(observed), False)):
                tokens += ids
                mask += [by_agent] * len(ids)
        encoded.append((tokens, mask))
    return encoded


def demonstration_batch(episodes: list[Episode], encoder: DialogueEncoder) -> Trajectories:
    """Episodes as one padded batch; behaviour log-probs are unknown and set to 0."""
    encoded = _encode(episodes, encoder)
    lengths = torch.tensor([len(tokens) for tokens, _ in encoded])
    shape = (len(encoded), int(lengths.max()))
    tokens = torch.full(shape, encoder.tokenizer.pad_token_id or 0)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, (ids, agent) in enumerate(encoded):
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = torch.tensor(agent)
    return Trajectories(
        tokens=tokens,
        lengths=lengths,
        agent_mask=mask,
        behaviour_logprobs=torch.zeros(shape),
        rewards=torch.zeros(shape),
        group_ids=torch.arange(len(encoded)),
        policy_updates=torch.zeros(len(encoded), dtype=torch.long),
    )


def warm_start(run: LoadedRun, out_dir: Path, progress: bool = True, again: bool = True) -> dict:
    """Train and save a warm start in `out_dir` (weights, tokenizer, `warm_start.json`); returns the record.

    With max_steps=0 nothing is trained: pretrained weights are measured and saved as they are. Else all
    weights are trained, whatever `policy.lora` says, or with trained_weights=policy those that training
    trains; adapters are merged into what is saved. The record holds sampled success S0 (from `final_samples`
    trajectories on the evaluation questions), greedy success, steps of both stages, what was measured on the
    way, and seconds. Raises ValueError where a stage does not reach its target within its `max_steps`, and
    where `out_dir` holds a warm start for another world or policy; RunStopped where memory runs out. Where
    another process makes one there, it is waited for. again=False: a finished one is left as it is. Where the
    folder holds none and `recorded_start` finds one, that is copied in place of training."""
    config, settings = run.config, run.settings
    record = out_dir / WARM_START_FILE
    make_folder(out_dir)
    try:
        with FolderLock(out_dir, wait=True):
            if record.is_file():
                found = read_record(record)
                if found.get("made_for") != made_for(config):
                    raise ValueError(
                        f"{out_dir} holds a warm start for another world or policy, and runs may stand on "
                        "it: choose another folder or delete that one"
                    )
                if not again:
                    return found
            elif (kept := recorded_start(config)) is not None:
                log.info("the warm start is that of %s, which the recorded runs began from", kept.parent)
                with zipfile.ZipFile(kept) as archive:
                    names = set(archive.namelist()) - {WARM_START_FILE}
                    archive.extractall(out_dir, sorted(names))
                write_json(record, found := _kept_record(kept))  # last, as below
                return found
            return _warm_start(run, out_dir, progress)
    except Exception as error:
        stopped = warm_start_stopped(error, settings)
        if stopped is None:
            raise
        raise stopped from error


def _warm_start(loaded: LoadedRun, out_dir: Path, progress: bool) -> dict:
    config, world, run = loaded.config, loaded.world, loaded.settings
    settings, training = run.warm_start, run.training
    torch.set_num_threads(1)
    torch.manual_seed(run.warm_start_seed)
    began = time.perf_counter()
    tokenizer = world.tokenizer
    if tokenizer is None:
        tokenizer = load_tokenizer(run.policy.pretrained)
    rng = random.Random(run.warm_start_seed)
    encoder = DialogueEncoder(world.environment.protocol, tokenizer)
    data = None
    if settings.max_steps:
        questions = world.questions("train")
        noise = DemonstrationNoise(**settings.noise)
        demonstrations = [rng.choice(questions) for _ in range(settings.demonstrations)]
        episodes = play(world, demonstrations, rng, noise)
        data = (
            _successes(episodes, encoder, run)
            if settings.only_successes
            else demonstration_batch(episodes, encoder)
        )

    policy = build_policy(run.policy, tokenizer)
    check_vocabulary(policy, tokenizer)
    size = sum(p.numel() for p in policy.parameters())
    place(policy, resolve_device(training.device), training.precision, training.gradient_checkpointing)
    policy = _with_trained(policy, run)
    sampler = make_rollout(world.environment, tokenizer, run.rollout, policy).for_evaluation()
    history = []
    try:
        # S0 is measured on the very questions that training is evaluated on, or it would be no baseline for
        # them.
        evaluated = evaluation_questions(world, run.evaluation.questions)
        RolloutBuffer(sampler, evaluated)  # whether they fit shows before anything is trained
        if world.tokenizer is None:  # real questions are of any length
            asked = world.questions("train")
            with saying(f"looking whether {len(asked)} training questions fit into a trajectory"):
                for start in range(0, len(asked), 1024):
                    RolloutBuffer(sampler, asked[start : start + 1024])
        # Other worlds make up no documents, and a pretrained policy can read.
        reads = hasattr(world, "reading_examples") and run.policy.pretrained is None
        if data is not None and reads and settings.reading.max_steps:
            history += _read(policy, world, encoder, run, progress)
        if data is not None:
            history += _imitate(policy, data, sampler, world, run, rng, progress)
        many = list(itertools.islice(itertools.cycle(evaluated), settings.final_samples))
        sampled, _ = evaluate(sampler, policy, many, greedy=False, seed=run.warm_start_seed)
        greedy, _ = evaluate(sampler, policy, evaluated, greedy=True, seed=0)
    finally:
        sampler.close()
    last = {row["stage"]: row["step"] for row in history}
    record = {
        "made_for": made_for(config),
        "success_sampled": sampled["success"],
        "success_greedy": greedy["success"],
        "valid_format_rate": sampled["valid_format_rate"],
        "n_sampled": settings.final_samples,
        "reading_steps": last.get("reading", 0),
        "steps": last.get("searching", 0),
        "seconds": round(time.perf_counter() - began, 1),
        "parameters": size,
        "history": history,
    }
    (out_dir / WARM_START_FILE).unlink(missing_ok=True)
    save_policy(policy, out_dir, tokenizer)
    write_json(out_dir / WARM_START_FILE, record)  # last: its presence means the folder is whole
    return record


def _read(
    policy: PreTrainedModel, world: SyntheticWorld, encoder: DialogueEncoder, run: RunConfig, progress: bool
) -> list[dict]:
    """Supervised steps on reading examples until the looked-up words are copied; returns what was measured on
    the way.

    No example comes twice, so the accuracy of the steps themselves is that on unseen documents.
    """
    settings, rng = run.warm_start.reading, random.Random(f"reading {run.warm_start_seed}")
    optimizer = make_optimizer("adam", list(policy.parameters()), settings.learning_rate)
    history, recent = [], deque(maxlen=settings.measure_every)
    with tqdm(
        total=settings.max_steps, desc="warm start: reading", disable=not progress, mininterval=1
    ) as bar:
        for step in range(1, settings.max_steps + 1):
            rate = settings.learning_rate * min(1, step / settings.learning_rate_warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = demonstration_batch(world.reading_examples(settings.batch_size, rng), encoder)
            recent.append(_supervised_step(policy, optimizer, batch, run))
            bar.update()
            if step % settings.measure_every == 0 or step == settings.max_steps:
                loss, accuracy = (fmean(values) for values in zip(*recent, strict=True))
                history.append({"stage": "reading", "step": step, "loss": loss, "accuracy": accuracy})
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}")
                if accuracy >= settings.target_accuracy:
                    return history
    raise ValueError(
        f"warm start: reading accuracy {accuracy:.3f} after "
        f"warm_start.reading.max_steps={settings.max_steps} is below "
        f"warm_start.reading.target_accuracy={settings.target_accuracy}; raise one or lower the other"
    )


def _imitate(
    policy: PreTrainedModel,
    data: Trajectories,
    sampler: Sampler,
    world: World,
    run: RunConfig,
    rng: random.Random,
    progress: bool,
) -> list[dict]:
    """Supervised steps until sampled success reaches the target; returns what was measured on the way."""
    settings, held_out = run.warm_start, world.questions("validation")
    optimizer = make_optimizer("adam", list(trained(policy).values()), settings.learning_rate)
    history = []
    with tqdm(
        total=settings.max_steps, desc="warm start: searching", disable=not progress, mininterval=1
    ) as bar:
        for step in range(1, settings.max_steps + 1):
            batch = data.select(torch.randint(len(data.lengths), (settings.batch_size,)))
            loss, _ = _supervised_step(policy, optimizer, batch, run)
            bar.update()
            if step % settings.evaluate_every == 0 or step == settings.max_steps:
                row, all_asked = _measured(sampler, policy, held_out, settings, rng, step)
                history.append({"stage": "searching", "step": step, "loss": loss, **row})
                bar.set_postfix(
                    loss=f"{loss:.3f}",
                    format=f"{row['valid_format_rate']:.2f}",
                    success=f"{row['success']:.3f}",
                )
                if all_asked and row["success"] >= settings.target_success:
                    return history
    raise ValueError(
        f"warm start: sampled success {history[-1]['success']:.3f} after warm_start.max_steps="
        f"{settings.max_steps} is below warm_start.target_success={settings.target_success}; raise one or "
        "lower the other"
    )


def _measured(
    sampler: Sampler,
    policy: PreTrainedModel,
    held_out: list[Question],
    settings: WarmStartConfig,
    rng: random.Random,
    step: int,
) -> tuple[dict[str, float], bool]:
    """Sampled success, F1 and valid format on some held-out questions, and whether all that are wanted were
    asked: not where the first lie over two standard errors below what a policy at the target would have."""
    first, target = settings.first_questions, settings.target_success
    for n in [settings.evaluate_questions] if first is None else [first, settings.evaluate_questions]:
        some = [rng.choice(held_out) for _ in range(n)]
        row, _ = evaluate(sampler, policy, some, greedy=False, seed=step)
        found = {name: row[name] for name in ("n_questions", "success", "f1", "valid_format_rate")}
        if n == first and row["success"] < target - 2 * math.sqrt(target * (1 - target) / n):
            return found, False
    return found, True


def _successes(episodes: list[Episode], encoder: DialogueEncoder, run: RunConfig) -> Trajectories:
    """The episodes whose answer is right and that fit into a trajectory; ValueError where none is left."""
    right = [e for e in episodes if score_reply(e.question, e.answer) == 1]
    if not right:
        raise ValueError(
            f"warm start: none of {len(episodes)} demonstrations succeeded, so there is nothing to imitate; "
            "lower warm_start.noise, or see what the retriever finds with `stppo play`"
        )
    data = demonstration_batch(right, encoder)
    fitting = (data.lengths <= run.rollout.max_tokens).nonzero().flatten()
    if not len(fitting):
        raise ValueError(
            f"warm start: the shortest demonstration has {int(data.lengths.min())} tokens, above "
            f"rollout.max_tokens={run.rollout.max_tokens}: raise it"
        )
    log.info(
        "warm start: %d of %d demonstrations succeeded, %d of them fit into rollout.max_tokens=%d",
        len(right),
        len(episodes),
        len(fitting),
        run.rollout.max_tokens,
    )
    return data.select(fitting)


def _with_trained(policy: PreTrainedModel, run: RunConfig) -> PreTrainedModel:
    """The policy with what is to be trained requiring gradients, computed as training will compute it."""
    top = run.policy.trainable_layers
    if run.warm_start.trained_weights == "all" or (run.policy.lora is None and top is None):
        choose_kernels(policy, run.training.kernels)
        return policy
    if run.policy.lora is None:
        from stppo.policy.frozen import freeze_below

        freeze_below(policy, top)
        return policy
    from stppo.policy.lora import with_lora

    return with_lora(policy, run.policy.lora)


def _supervised_step(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Trajectories, run: RunConfig
) -> tuple[float, float]:
    """One step on the agent tokens of a batch: its loss (nats per token) and the mean probability of those
    tokens."""
    passes = Passes(run.training.micro_batch_tokens, chunks=2)
    optimizer.zero_grad()
    loss = probability = 0.0
    parts = passes.cut(batch)
    for _, part in parts:
        logprobs = score(policy, part, n_chunks=passes.chunks_of(parts)).logprobs
        mean = -logprobs.sum() / batch.agent_mask.sum()
        mean.backward()
        loss += float(mean.detach())
        probability += float(logprobs.detach()[part.agent_mask].exp().sum() / batch.agent_mask.sum())
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return loss, probability


def evaluation_questions(world: World, n: int) -> list[Question]:
    """The fixed held-out questions of all evaluations: the first n of the validation split."""
    held_out = world.questions("validation")
    if len(held_out) < n:
        raise ValueError(
            f"evaluation.questions={n} but the world has only {len(held_out)} validation questions"
        )
    return held_out[:n]


def made_for(config: Config) -> str:
    """Fingerprint of the world and policy that a warm start fits."""
    data = data_section(config)
    return fingerprint([start_world_section(config), config["policy"], *([data] if data else [])])


def recorded_start(config: Config) -> Path | None:
    """The warm start that the preset's recorded runs of this world began from, packed in one file, where it
    was kept: made again on another kind of processor it has other weights, and the runs of a world are
    compared because they begin alike.

    It is told by its seed, world and policy: the rest of its folder's name changes with the code, its weights
    do not. None where the config's `warm_start` is not the preset's own, nor that of a world which the preset
    names: what was recorded was not made with other settings."""
    pipeline = config.get("pipeline") or {}
    folder, preset = pipeline.get("recorded"), f"preset={config['preset']}"
    if not folder:
        return None
    overrides = (
        o for regime in (pipeline.get("regimes") or {}).values() for o in regime.get("overrides") or ()
    )
    worlds = {override for override in overrides if override.startswith("world=")}
    if config["warm_start"] not in [compose([preset, *world])["warm_start"] for world in ((), *zip(worlds))]:
        return None
    seed = warm_start_dir(config).name.partition("-")[0]
    for start in sorted((repository_path(folder) / "warm_start").glob(f"{seed}-*.zip")):
        if _kept_record(start).get("made_for") == made_for(config):
            return start
    return None


def _kept_record(archive: Path) -> dict:
    with zipfile.ZipFile(archive) as kept:
        return parse_json(kept.read(WARM_START_FILE))


def ensure_warm_start(run: LoadedRun) -> Path:
    """The folder of the cached warm start, made first where there is none: with vLLM in a process of its
    own."""
    path = warm_start_dir(run.config)
    if (path / WARM_START_FILE).is_file():
        return path
    if run.settings.rollout.engine == "vllm":
        in_own_process("stppo.training.warm_start:warm_start_of", run.config, path)
    else:
        warm_start(run, path, again=False)
    return path


def warm_start_of(config: Config, path: Path, progress: bool = True) -> dict:
    """`warm_start` of a config that is loaded in this process; a finished one is left as it is."""
    return warm_start(load(config), path, progress, again=False)


def read_record(file: Path) -> dict:
    """What a warm start recorded; ValueError names a file that is damaged."""
    try:
        record = parse_json(file.read_bytes())
        return {name: record[name] for name in ("success_sampled", "success_greedy", "n_sampled")} | record
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {error}); make the warm start again"
        ) from error


def load_warm_start(path: Path, attention: str = "sdpa") -> tuple[PreTrainedModel, dict, str]:
    """Policy, record and hash of the weights (`weights_of`) of a saved warm start; raises
    FileNotFoundError."""
    record = path / WARM_START_FILE
    if not record.is_file():
        raise FileNotFoundError(f"{path} holds no finished warm start; run `stppo warm-start` first")
    policy = load_policy(path, attention)
    return policy, read_record(record), weights_of(path, policy)
