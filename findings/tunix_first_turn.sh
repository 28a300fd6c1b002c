#!/usr/bin/env bash
# Guessed: in Tunix's agentic GRPO a reward function's `completions` are what the agent answered, or all that it wrote.
# So is: they are the first message that the agent wrote in each conversation. Of an agent that searches and then answers, it is the search; the answer
# is judged nowhere but in the environment's own reward. google-tunix 0.1.7.
# Why it matters: a reward function that worked for single turns goes on without a word. Only an answer that is guessed at once can be paid.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet google-tunix==0.1.7 jax==0.10.2 flax==0.12.8
fi
JAX_PLATFORMS=cpu "$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

import grain
import numpy as np
import optax
from flax import nnx
from jax.interpreters import pxla
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import rl_cluster
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.agentic.agents.agent_types import Action, Step
from tunix.rl.agentic.agents.base_agent import ConversationAgentBase
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.tests.test_common import MockVocab, ModelConfig, ToyTransformer

question, passage, search, answer = "who wrote Emma", "passage: Jane Austen", "search: Emma", "answer: Jane Austen"
words = ["<pad>", "<s>", "</s>", "user:", "assistant:", *dict.fromkeys(f"{question} {passage} {search} {answer}".split())]
tokenizer = TokenizerAdapter(MockVocab(mapping_text_to_id={word: i for i, word in enumerate(words)}))


class Parser:
    assistant_token = "assistant:"

    def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
        text = " ".join(f"{message['role']}: {message['content']}" for message in messages if message["content"])
        return text + (" assistant:" if add_generation_prompt else "")

    def update_assistant_end_tokens(self, tokens):
        return tokens, 0


class Search(BaseTaskEnv):
    def __init__(self, entry, max_steps, **rest):
        super().__init__(max_steps=max_steps, **rest)

    def _initial_observation(self):
        return question

    def _step_impl(self, action):
        done = action == answer
        return EnvStepResult(observation="" if done else passage, reward=0.0, done=done, info={})


class Agent(ConversationAgentBase):
    def _observation_to_messages(self, observation, reward, done, info):
        if observation:
            self._messages.append({"role": "user", "content": observation})

    def update_from_model(self, response, **rest):
        self._trajectory.steps.append(Step(model_response=response, action=response))
        self._messages.append({"role": "assistant", "content": response})
        return Action(action=response)


class Script(rl_cluster.RLCluster):
    """The model's words are given: it searches, and answers once it has read the passage."""

    def generate(self, prompts, **rest):
        prompt = prompts[0] if isinstance(prompts, list) else prompts
        text = answer if passage in prompt else search
        tokens = np.array(tokenizer.encode(text))
        read = np.array([tokenizer.encode(prompt)])
        return RolloutOutput(text=[text], tokens=[tokens], left_padded_prompt_tokens=read, logits=None, logprobs=[-np.ones(len(tokens))])


conversations, judged = [], []


class Learner(GRPOLearner):
    def _process_results(self, trajectories, *arguments, **rest):
        conversations.extend([turn["content"] for turn in item.traj["conversation_text"] if turn["role"] == "assistant"] for item in trajectories)
        return super()._process_results(trajectories, *arguments, **rest)


def reward(prompts, completions, **rest):
    judged.extend(completions)
    return [float(answer in completion) for completion in completions]


def toy():
    return ToyTransformer(config=ModelConfig(vocab_size=len(words)), rngs=nnx.Rngs(0))


mesh = pxla.thread_resources.env.physical_mesh
roles = {role: mesh for role in (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)}
training = rl_cluster.RLTrainingConfig(actor_optimizer=optax.sgd(1e-3), eval_every_n_steps=10, max_steps=1, gradient_accumulation_steps=None)
rollout = RolloutConfig(max_tokens_to_generate=32, max_prompt_length=16, return_logprobs=True, kv_cache_size=64)
config = rl_cluster.ClusterConfig(role_to_mesh=roles, rollout_engine="vanilla", offload_to_cpu=False, training_config=training, rollout_config=rollout)
cluster = Script(actor=toy(), reference=toy(), tokenizer=tokenizer, cluster_config=config)
cluster.with_external_metrics_logger(lambda *arguments, **rest: None)
learner = Learner(
    rl_cluster=cluster,
    reward_fns=reward,
    chat_parser=Parser(),
    agent_class=Agent,
    agent_kwargs={"system_prompt": ""},
    env_class=Search,
    env_kwargs={"max_steps": 4},
    algo_config=GRPOConfig(num_generations=2, max_response_length=32, max_concurrency=1),
)
learner.train(grain.MapDataset.source([question]).batch(1).map(lambda batch: {"prompts": batch, "question": batch}))
print("google-tunix", version("google-tunix"))
print("what the agent wrote, a trajectory a list:", conversations)
print("what the reward function was given:", judged)
if conversations != [[search, answer]] * 2 or judged != [search] * 2:
    sys.exit("CHANGED: the reward function is now given more than the first turn")
PYTHON
