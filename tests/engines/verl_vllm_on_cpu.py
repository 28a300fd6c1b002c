"""How vLLM's build for a CPU takes the weights that verl hands over: a worker extension that `engine_kwargs` names.

verl's own calls `model.load_weights` (workers/rollout/vllm_rollout/utils.py:405), but on a CPU vLLM has packed its linear layers
by then and kept no weights to load into. vLLM's `reload_weights` lays them out again.
"""

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class Extension(vLLMColocateWorkerExtension):
    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False) -> None:
        weights = []  # copied: on a CPU they are views of shared memory, which is closed
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm)
        receiver.receive_weights(
            lambda part, last: weights.extend((name, weight.clone()) for name, weight in part)
        )
        self.reload_weights(weights_iterator=iter(weights))
