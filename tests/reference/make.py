"""How the fixtures were made: `python tests/reference/make.py`, with torch and transformers (the extra [bench]).

Each case is a tiny model of transformers with random weights, saved as transformers saves it, beside what goes into one
forward pass and what comes out. The same versions write the same bytes.
"""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.reference import EXPECTED, FIXTURES, GRADIENTS, Arrays

NOISE = 0.3  # so large that every weight matters, and no bias or norm is left at 0 or 1

ROWS, LENGTH, VOCAB = 3, 7, 40  # of which a few at either end are padding somewhere
random = np.random.default_rng(0)
LENGTHS = np.array([[7], [5], [3]])
RIGHT = (np.arange(LENGTH) < LENGTHS).astype(np.int64)
LEFT = RIGHT[:, ::-1].copy()
EITHER = np.stack([RIGHT[0], RIGHT[1], LEFT[2]])
IDS = random.integers(8, VOCAB - 1, (ROWS, LENGTH))
TYPES = np.sort(random.integers(0, 2, (ROWS, LENGTH)))
TARGET = random.integers(8, VOCAB - 1, (ROWS, 5))
LONG, LONG_TARGET = random.integers(8, VOCAB - 1, (2, 22)), random.integers(8, VOCAB - 1, (2, 20))
IGNORED = -100  # a label without a loss
EVERY_THIRD = (np.arange(ROWS)[:, None] + np.arange(LENGTH)) % 3 == 0
MASKED = np.where(EVERY_THIRD & (RIGHT == 1), random.integers(8, VOCAB - 1, (ROWS, LENGTH)), IGNORED)


def padded(ids: np.ndarray, mask: np.ndarray, pad: int) -> Arrays:
    """The ids with padding, and which are none."""
    return {"input_ids": np.where(mask == 1, ids, pad), "attention_mask": mask}


def translated(pad: int, ids: np.ndarray = IDS, target: np.ndarray = TARGET) -> Arrays:
    """A source with padding, and a target that begins with the id of padding."""
    target = np.concatenate([np.full((len(target), 1), pad), target], axis=1)
    mask = np.ones_like(ids)
    mask[-1, 4:] = 0
    return padded(ids, mask, pad) | {"decoder_input_ids": target}


def permuted() -> Arrays:
    """An order of prediction for each row, and its last two places: those that come first may have nothing to see."""
    order = np.stack([random.permutation(LENGTH) for _ in range(ROWS)])
    places = np.argsort(order)[:, -2:]
    return {
        "perm_mask": (order[:, :, None] <= order[:, None, :]).astype(np.float32),
        "target_mapping": np.eye(LENGTH, dtype=np.float32)[places],
    }


def save(model: PreTrainedModel, folder: Path) -> None:
    """As it is done."""
    model.save_pretrained(folder)


def save_in_bfloat16(model: PreTrainedModel, folder: Path) -> None:
    """With numbers of 16 bits."""
    model.bfloat16().save_pretrained(folder)


def save_in_shards(model: PreTrainedModel, folder: Path) -> None:
    """In several files."""
    model.save_pretrained(folder, max_shard_size="3KB")


def save_as_bin(model: PreTrainedModel, folder: Path) -> None:
    """As transformers did before there was safetensors, with each tensor by all of its names."""
    save_tensors(model, folder, model.state_dict())


def save_with_old_names(model: PreTrainedModel, folder: Path) -> None:
    """As pytorch-pretrained-bert did, with the names of TensorFlow and a buffer."""
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {"embeddings.position_ids": torch.arange(model.config.max_position_embeddings)[None]}
    for name, tensor in model.state_dict().items():
        end = next((end for end in names if name.endswith(end)), "")
        tensors[name.removesuffix(end) + names.get(end, "")] = tensor
    save_tensors(model, folder, tensors)


def save_tensors(model: PreTrainedModel, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A config.json, and the tensors by torch.save."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    torch.save(dict(tensors), folder / "pytorch_model.bin")


def as_made(model: PreTrainedModel) -> None:
    """What is done to a model before its weights are drawn: nothing."""


def with_own_output(model: PreTrainedModel) -> None:
    """An output layer of its own, which a T5 v1.1 has though transformers 5 makes none."""
    model.lm_head = torch.nn.Linear(model.config.d_model, model.config.vocab_size, bias=False)


@dataclass(frozen=True)
class Case:
    """A checkpoint, and a forward pass through it."""

    architecture: type[PreTrainedModel]
    config: Mapping[str, Any]
    inputs: Arrays
    outputs: tuple[str, ...] = ("logits",)
    before: Arrays = field(default_factory=dict)
    """What goes through first, whose memory goes in with the inputs."""
    labels: np.ndarray | None = None
    """Of the loss whose gradients are kept, too."""
    prepare: Callable[[PreTrainedModel], None] = as_made
    save: Callable[[PreTrainedModel, Path], None] = save


BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 12,
}
ODD_BERT = BERT | {
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "type_vocab_size": 3,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-2,
    "pad_token_id": 7,
    "hidden_dropout_prob": 0.25,
    "attention_probs_dropout_prob": 0.0,
}
ROBERTA = BERT | {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 8,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 12,
    "max_position_embeddings": 12,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 12, "n_inner": 10}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
T5 = {"vocab_size": VOCAB, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_kv": 3, "d_ff": 12}
T5_V1_1 = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
ODD_T5 = T5 | {
    "num_layers": 3,
    "num_decoder_layers": 1,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "layer_norm_epsilon": 1e-2,
    "pad_token_id": 3,
}
XLNET = {"vocab_size": VOCAB, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12, "mem_len": None}
MARIAN = {
    "vocab_size": VOCAB,
    "d_model": 8,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 12,
    "pad_token_id": VOCAB - 1,
    "decoder_start_token_id": VOCAB - 1,
    "activation_function": "swish",
    "scale_embedding": True,
}
PEGASUS = {name: value for name, value in MARIAN.items() if name != "scale_embedding"} | {
    "activation_function": "relu",
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 10,
}
OWN_TABLES = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 44}

HIDDEN, POOLED, SPAN = ("last_hidden_state",), ("last_hidden_state", "pooler_output"), ("start_logits", "end_logits")
PRETRAINING = ("prediction_logits", "seq_relationship_logits")

PAIRS = padded(IDS, RIGHT, 0) | {"token_type_ids": TYPES}
ODD_PAIRS = padded(IDS, RIGHT, 7) | {"token_type_ids": TYPES + 1}
ROBERTA_TEXTS = padded(IDS, EITHER, 1)
TEXTS = padded(IDS, RIGHT, 0)
XLNET_TEXTS = padded(IDS, LEFT, 5) | {"token_type_ids": TYPES}
PERMUTED = XLNET_TEXTS | permuted()
UNPADDED = {"input_ids": IDS, "token_type_ids": TYPES}  # transformers has no mask for more than one row of one side

CASES = {
    "bert_model": Case(transformers.BertModel, BERT, PAIRS, POOLED),
    "bert_pretraining": Case(transformers.BertForPreTraining, BERT, PAIRS, PRETRAINING),
    "bert_masked_lm": Case(transformers.BertForMaskedLM, BERT, PAIRS, labels=MASKED),
    "bert_next_sentence": Case(transformers.BertForNextSentencePrediction, BERT, PAIRS),
    "bert_sequence_classification": Case(transformers.BertForSequenceClassification, BERT | {"num_labels": 5}, PAIRS),
    "bert_token_classification": Case(transformers.BertForTokenClassification, BERT | {"num_labels": 5}, PAIRS),
    "bert_question_answering": Case(transformers.BertForQuestionAnswering, BERT, PAIRS, SPAN),
    "bert_odd": Case(transformers.BertForMaskedLM, ODD_BERT, ODD_PAIRS),
    "bert_bfloat16": Case(transformers.BertForNextSentencePrediction, BERT, PAIRS, save=save_in_bfloat16),
    "bert_old_names": Case(transformers.BertModel, BERT, PAIRS, POOLED, save=save_with_old_names),
    "roberta_model": Case(transformers.RobertaModel, ROBERTA, ROBERTA_TEXTS, POOLED),
    "roberta_masked_lm": Case(transformers.RobertaForMaskedLM, ROBERTA, ROBERTA_TEXTS),
    "roberta_sequence_classification": Case(
        transformers.RobertaForSequenceClassification,
        ROBERTA | {"num_labels": 3, "pad_token_id": 4},
        padded(IDS, EITHER, 4),
    ),
    "roberta_token_classification": Case(
        transformers.RobertaForTokenClassification, ROBERTA | {"num_labels": 3}, ROBERTA_TEXTS
    ),
    "roberta_question_answering": Case(transformers.RobertaForQuestionAnswering, ROBERTA, ROBERTA_TEXTS, SPAN),
    "distilbert_model": Case(transformers.DistilBertModel, DISTILBERT, TEXTS, HIDDEN),
    "distilbert_masked_lm": Case(transformers.DistilBertForMaskedLM, DISTILBERT, TEXTS),
    "distilbert_sequence_classification": Case(
        transformers.DistilBertForSequenceClassification, DISTILBERT | {"num_labels": 3}, TEXTS
    ),
    "distilbert_token_classification": Case(
        transformers.DistilBertForTokenClassification, DISTILBERT | {"num_labels": 3}, TEXTS
    ),
    "distilbert_question_answering": Case(transformers.DistilBertForQuestionAnswering, DISTILBERT, TEXTS, SPAN),
    "gpt2_model": Case(transformers.GPT2Model, GPT2, TEXTS, HIDDEN),
    "gpt2_lm": Case(transformers.GPT2LMHeadModel, GPT2, TEXTS, labels=np.where(RIGHT == 1, IDS, IGNORED)),
    "gpt2_untied": Case(
        transformers.GPT2LMHeadModel, GPT2 | {"n_layer": 3, "n_inner": None, "tie_word_embeddings": False}, TEXTS
    ),
    "gpt2_sharded": Case(transformers.GPT2LMHeadModel, GPT2, TEXTS, save=save_in_shards),
    "gpt2_untied_model": Case(transformers.GPT2Model, GPT2 | {"tie_word_embeddings": False}, TEXTS, HIDDEN),
    "llama_model": Case(transformers.LlamaModel, LLAMA, TEXTS, HIDDEN),
    "llama_grouped": Case(transformers.LlamaForCausalLM, LLAMA, TEXTS),
    "llama_biased": Case(
        transformers.LlamaForCausalLM,
        LLAMA
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
        TEXTS,
    ),
    "llama_scaled": Case(
        transformers.LlamaForCausalLM, LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 50.0}}, TEXTS
    ),
    "llama_linear": Case(
        transformers.LlamaForCausalLM,
        LLAMA
        | {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0},
        },
        TEXTS,
    ),
    "t5_v1_0": Case(transformers.T5ForConditionalGeneration, T5, translated(0)),
    "t5_v1_1": Case(transformers.T5ForConditionalGeneration, T5_V1_1, translated(0), prepare=with_own_output),
    "t5_v1_1_tied": Case(transformers.T5ForConditionalGeneration, T5_V1_1, translated(0)),
    "t5_odd": Case(transformers.T5ForConditionalGeneration, ODD_T5, translated(3, LONG, LONG_TARGET)),
    "t5_five_buckets": Case(
        transformers.T5ForConditionalGeneration,
        T5 | {"relative_attention_num_buckets": 5, "relative_attention_max_distance": 7},
        translated(0, LONG, LONG_TARGET),
    ),
    "t5_bin": Case(transformers.T5ForConditionalGeneration, T5, translated(0), save=save_as_bin),
    "t5_model": Case(transformers.T5Model, T5_V1_1, translated(0), HIDDEN),
    "t5_encoder": Case(transformers.T5EncoderModel, T5_V1_1, TEXTS, HIDDEN),
    "xlnet_model": Case(transformers.XLNetModel, XLNET, XLNET_TEXTS, HIDDEN),
    "xlnet_lm": Case(transformers.XLNetLMHeadModel, XLNET, XLNET_TEXTS),
    "xlnet_permuted": Case(transformers.XLNetLMHeadModel, XLNET, PERMUTED),
    "xlnet_memory": Case(
        transformers.XLNetLMHeadModel, XLNET | {"mem_len": 9}, PERMUTED, ("logits", "mems"), before=XLNET_TEXTS
    ),
    "xlnet_clamped": Case(
        transformers.XLNetLMHeadModel, XLNET | {"clamp_len": 2, "n_layer": 3, "ff_activation": "relu"}, XLNET_TEXTS
    ),
    "xlnet_one_sided": Case(transformers.XLNetLMHeadModel, XLNET | {"attn_type": "uni"}, UNPADDED),
    "marian_model": Case(transformers.MarianModel, MARIAN, translated(VOCAB - 1), HIDDEN),
    "marian_shared": Case(transformers.MarianMTModel, MARIAN, translated(VOCAB - 1)),
    "marian_own_tables": Case(transformers.MarianMTModel, MARIAN | OWN_TABLES, translated(VOCAB - 1)),
    "marian_other_decoder": Case(
        transformers.MarianMTModel,
        MARIAN | {"decoder_attention_heads": 4, "decoder_ffn_dim": 10},
        translated(VOCAB - 1),
    ),
    "pegasus_model": Case(transformers.PegasusModel, PEGASUS, translated(VOCAB - 1), HIDDEN),
    "pegasus_shared": Case(
        transformers.PegasusForConditionalGeneration, PEGASUS | {"scale_embedding": True}, translated(VOCAB - 1)
    ),
    "marian_untied": Case(
        transformers.MarianMTModel,
        MARIAN | OWN_TABLES | {"tie_word_embeddings": False, "scale_embedding": False},
        translated(VOCAB - 1),
    ),
}


def made(case: Case) -> PreTrainedModel:
    """The model of a case, every weight of which has been drawn."""
    torch.manual_seed(0)
    model = case.architecture(case.architecture.config_class(**case.config)).eval()
    case.prepare(model)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for weight in weights + [buffer for name, buffer in model.named_buffers() if name == "final_logits_bias"]:
            weight += NOISE * torch.randn_like(weight)
            if case.save is save_in_bfloat16:  # what is run is what is saved
                weight.copy_(weight.bfloat16())
    return model


def run(model: PreTrainedModel, inputs: Arrays, before: Arrays) -> Any:
    """What comes out of a model."""
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    if before:
        tensors["mems"] = run(model, before, {}).mems
    with torch.no_grad():
        return model(**tensors)


def array(output: torch.Tensor | tuple[torch.Tensor, ...]) -> np.ndarray:
    """An output, of which there may be one for each layer."""
    return (torch.stack(output) if isinstance(output, tuple) else output).numpy()


def gradients(model: PreTrainedModel, inputs: Arrays, labels: np.ndarray) -> Arrays:
    """Of the mean loss, by the names of the tensors."""
    model.zero_grad()
    tensors = {name: torch.from_numpy(array) for name, array in (inputs | {"labels": labels}).items()}
    model(**tensors).loss.backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def write(case: Case, folder: Path) -> None:
    """The checkpoint of a case, and what is expected of it."""
    folder.mkdir(parents=True)
    model = made(case)
    output = run(model, case.inputs, case.before)
    arrays = {f"input.{name}": value for name, value in case.inputs.items()}
    arrays |= {f"before.{name}": value for name, value in case.before.items()}
    arrays |= {f"output.{name}": array(getattr(output, name)) for name in case.outputs}
    if case.labels is not None:
        arrays["labels"] = case.labels
        save_file(gradients(model, case.inputs, case.labels), folder / GRADIENTS)
    np.savez(folder / EXPECTED, **arrays)
    case.save(model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    """Write all fixtures anew."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    shutil.rmtree(FIXTURES, ignore_errors=True)
    for name, case in CASES.items():
        write(case, FIXTURES / name)


if __name__ == "__main__":
    main()
