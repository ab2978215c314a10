"""Plugin for vLLM, which finds `register` by the entry point `vllm.general_plugins`: `vllm serve` on saved folders."""

from acm_compiler.checkpoint.hf_files import MODEL_TYPE

ARCHITECTURE = "AcmForCausalLM"


def register() -> None:
    """Tell vLLM and transformers, in each of vLLM's processes, what a folder written by `acm.save` is."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from acm_compiler.serving.vllm.config import FolderConfig, Limits

    AutoConfig.register(MODEL_TYPE, FolderConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, "acm_compiler.serving.vllm.model:AcmForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = Limits
