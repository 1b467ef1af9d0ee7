"""What a model is trained for: how records become examples, what the loss is, what is predicted, how well it does."""

from transformer_jax.tasks.abilities import AttentionMap, GivesAttention, ShowsSamples, WritesText
from transformer_jax.tasks.causal_lm import CausalLM, CausalLMConfig, SamplingConfig
from transformer_jax.tasks.classification import Classification, ClassificationConfig
from transformer_jax.tasks.denoising import Denoising, DenoisingConfig
from transformer_jax.tasks.masked_lm import MaskedLM, MaskedLMConfig
from transformer_jax.tasks.permutation_lm import PermutationLM, PermutationLMConfig
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.question_answering import QuestionAnswering, QuestionAnsweringConfig
from transformer_jax.tasks.tagging import Tagging, TaggingConfig
from transformer_jax.tasks.task import BestCheckpoint, Loss, LossTerm, Metrics, Results, Task, TaskConfig
from transformer_jax.tasks.translation import BeamSearchConfig, Translation, TranslationConfig

__all__ = [
    "AttentionMap",
    "BeamSearchConfig",
    "BestCheckpoint",
    "CausalLM",
    "CausalLMConfig",
    "Classification",
    "ClassificationConfig",
    "Denoising",
    "DenoisingConfig",
    "GivesAttention",
    "Loss",
    "LossTerm",
    "MaskedLM",
    "MaskedLMConfig",
    "Metrics",
    "PermutationLM",
    "PermutationLMConfig",
    "Predictor",
    "QuestionAnswering",
    "QuestionAnsweringConfig",
    "Results",
    "SamplingConfig",
    "ShowsSamples",
    "Tagging",
    "TaggingConfig",
    "Task",
    "TaskConfig",
    "Translation",
    "TranslationConfig",
    "WritesText",
]
