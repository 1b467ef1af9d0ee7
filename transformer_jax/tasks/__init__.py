"""What a model is trained for: how examples become batches, what the loss is, how well it does."""

from transformer_jax.tasks.causal_lm import CausalLM, CausalLMConfig
from transformer_jax.tasks.denoising import Denoising, DenoisingConfig
from transformer_jax.tasks.masked_lm import MaskedLM, MaskedLMConfig
from transformer_jax.tasks.permutation_lm import PermutationLM, PermutationLMConfig
from transformer_jax.tasks.task import Task
from transformer_jax.tasks.translation import Translation, TranslationConfig

TaskConfig = TranslationConfig | CausalLMConfig | MaskedLMConfig | DenoisingConfig | PermutationLMConfig

__all__ = [
    "CausalLM",
    "CausalLMConfig",
    "Denoising",
    "DenoisingConfig",
    "MaskedLM",
    "MaskedLMConfig",
    "PermutationLM",
    "PermutationLMConfig",
    "Task",
    "TaskConfig",
    "Translation",
    "TranslationConfig",
]
