"""Prints the KV cache tensors that vLLM hands to a connector: shapes, strides, storage.

    python benchmarks/kv_shapes.py MODEL_DIR [ATTENTION_BACKEND]

Run it before a layout is supported: what arrives is what counts, not what the sources say. Needs
vLLM; the engine runs in this process and is left as soon as the tensors have arrived.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)


class ShapesConnector(KVConnectorBase_V1):
    """Moves nothing; prints one line of JSON per layer and per cache group."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            for index, group in enumerate(kv_cache_config.kv_cache_groups):
                spec = group.kv_cache_spec
                print("GROUP", json.dumps({"index": index, "spec": str(spec)}))
            print("BLOCKS", kv_cache_config.num_blocks)

    def register_kv_caches(self, kv_caches):
        for name, tensor in list(kv_caches.items())[:3]:
            storage = tensor.untyped_storage()
            facts = {
                "layer": name,
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "dtype": str(tensor.dtype),
                "offset": tensor.storage_offset(),
                "storage_bytes": storage.nbytes(),
                "same_storage_as_first": storage.data_ptr()
                == next(iter(kv_caches.values())).untyped_storage().data_ptr(),
            }
            print("LAYER", json.dumps(facts))
        print("LAYERS", len(kv_caches))

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()


def main() -> None:
    model, *rest = sys.argv[1:]
    options = {"attention_backend": rest[0]} if rest else {}
    print("VLLM", vllm.__version__, os.environ.get("VLLM_KV_CACHE_LAYOUT", ""), rest)
    engine = vllm.LLM(
        model=model,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=4096,
        gpu_memory_utilization=0.2,
        kv_transfer_config={
            "kv_connector": "ShapesConnector",
            "kv_connector_module_path": "kv_shapes",
            "kv_role": "kv_both",
        },
        **options,
    )
    answer = engine.generate({"prompt_token_ids": [1, 2, 3]}, vllm.SamplingParams(max_tokens=2))
    print("ANSWERED", len(answer[0].outputs[0].token_ids))


if __name__ == "__main__":
    main()
