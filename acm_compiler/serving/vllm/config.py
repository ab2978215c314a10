"""A saved folder as vLLM's configuration sees it: its base model's config, and what vLLM may not be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from acm_compiler.checkpoint.hf_files import MODEL_TYPE
from acm_compiler.checkpoint.load import read_folder
from acm_compiler.errors import ModelSourceError, UsageError
from acm_compiler.serving.vllm import ARCHITECTURE
from acm_compiler.serving.vllm.budgets import SavedBudgets
from acm_compiler.serving.vllm.processor import processor_for
from acm_compiler.sources.from_hf import recorded_config

SCHEDULER = "acm_compiler.serving.vllm.scheduler.make_scheduler"


class FolderConfig(PreTrainedConfig):
    """The config.json of a saved folder, which transformers reads as the config of the model before conversion."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """The base model's config, with our architecture. ModelSourceError for what is no decoder of transformers."""
        folder = options.get("name_or_path") or config_dict.get("_name_or_path", "")
        description, _, _ = read_folder(folder)
        record = description["source"] or {}
        if record.get("source") != "hf" or record.get("auto_class") != "AutoModelForCausalLM":
            raise ModelSourceError(
                "vLLM serves language models that transformers builds by AutoModelForCausalLM",
                where=folder,
                found=record.get("auto_class") or description["class"],
                fix="acmc serve serves models of embeddings and classes",
            )
        config = recorded_config(record)
        config.architectures, config.name_or_path = [ARCHITECTURE], folder
        # vLLM keeps compiled graphs by the config's values, and sizes, costs and rules of gates are constants in them
        config.acm_save = description["save"]
        return (config, {}) if options.get("return_unused_kwargs") else config


class Limits(VerifyAndUpdateConfig):
    """The settings that a converted model can be served with, checked before anything is loaded."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse, by UsageError, what would be wrong without a word; let requests name budgets where they can."""
        for words, fix in _refusals(vllm_config):
            raise UsageError(f"a converted model cannot be served with {words}", fix=fix)
        SavedBudgets.of_engine(vllm_config)
        if vllm_config.cache_config.enable_prefix_caching:
            vllm_config.scheduler_config.scheduler_cls = SCHEDULER
        model = vllm_config.model_config
        model.logits_processors = [*(model.logits_processors or ()), processor_for(vllm_config)]


def _refusals(vllm_config: Any) -> Iterator[tuple[str, str]]:
    """Settings that cannot be served, each with the way out."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if vllm_config.use_v2_model_runner:
        yield "vLLM's model runner V2", "set VLLM_USE_V2_MODEL_RUNNER=0 in the environment"
    if parallel.world_size > 1:
        yield "tensor or pipeline parallelism", "serve it on one device"
    if vllm_config.lora_config is not None:
        yield "LoRA adapters", "merge them into the original model, then convert it"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding", "leave --speculative-config out"
    if model.quantization is not None:
        yield "--quantization", "acm.quantize(model) quantises learners; save the model after it"
    if model.enable_prompt_embeds:
        yield "--enable-prompt-embeds", "send token ids or text"
    if vllm_config.cache_config.enable_prefix_caching and vllm_config.scheduler_config.scheduler_cls is not None:
        yield "prefix caching by another scheduler", "start vLLM with --no-enable-prefix-caching"
    if model.runner_type != "generate":
        yield f"--runner {model.runner_type}", "acmc serve serves models of embeddings and classes"
