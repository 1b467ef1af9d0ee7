import pickle

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.tasks.running import write
from transformer_jax.data import BatchingConfig, Tokenizer, TokenizerConfig
from transformer_jax.models import GPTConfig
from transformer_jax.tasks import CausalLMConfig
from transformer_jax.training.serialization import from_json, to_json

MODEL = GPTConfig.small()


def byte_pairs(*, begins: bool) -> tokenizers.Tokenizer:
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def begins(tokenizer: Tokenizer, *, separate: bool) -> bool:
    """Whether a prompt has a begin token: then even an empty one has something to go on from."""
    task = CausalLMConfig(separate=separate).build(tokenizer, MODEL, BatchingConfig())
    assert task.problems(["a"]) == [None]
    (prompt,) = task._prompts(["a"])
    assert (prompt[0] == tokenizer.begin_id) == (task.problems([""]) == [None])
    return prompt[0] == tokenizer.begin_id


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("add_begin", [None, False, True])
@pytest.mark.parametrize("file_begins", [False, True])
def test_a_prompt_begins_as_the_checkpoint_or_else_the_training_says(separate, add_begin, file_begins):
    config = TokenizerConfig(pad="</s>", add_begin=add_begin)
    tokenizer = Tokenizer(byte_pairs(begins=file_begins), config)
    assert begins(tokenizer, separate=separate) == (separate if add_begin is None else add_begin)
    assert tokenizer.begins_texts == file_begins


@pytest.mark.parametrize("separate", [False, True])
def test_documents_are_encoded_as_ever(separate):
    tokenizer = Tokenizer(byte_pairs(begins=True), TokenizerConfig(pad="</s>", add_begin=False))
    (example,) = CausalLMConfig(separate=separate).build(tokenizer, MODEL, BatchingConfig()).encode([{"text": "a"}])
    assert example["text"][:1] == ([tokenizer.begin_id] if separate else tokenizer.encode(["a"])[0])


@pytest.mark.parametrize("add_begin", [None, False, True])
def test_it_is_kept_with_a_run(add_begin):
    config = TokenizerConfig(pad="</s>", add_begin=add_begin)
    assert from_json(TokenizerConfig, to_json(config)).add_begin is add_begin
    old = {name: value for name, value in to_json(config).items() if name != "add_begin"}
    assert from_json(TokenizerConfig, old).add_begin is None
    tokenizer = Tokenizer(byte_pairs(begins=False), config)
    assert pickle.loads(pickle.dumps(tokenizer)).add_begin is add_begin


def test_the_tokenizer_of_one_task_is_not_changed_by_another():
    tokenizer = Tokenizer(byte_pairs(begins=False), TokenizerConfig(pad="</s>"))
    assert not begins(tokenizer, separate=False)
    assert begins(tokenizer, separate=True)
    assert tokenizer.add_begin is None


def test_a_prompt_that_the_tokenizer_does_not_know_is_told(recwarn):
    tokenizer = Tokenizer.train(["the cat sat"] * 9, TokenizerConfig(kind="wordpiece", vocab_size=60))
    task = CausalLMConfig().build(tokenizer, MODEL, BatchingConfig())
    prompts = ["the cat", "THE CAT", "the cat SAT", ""]
    with pytest.raises(AttributeError):  # there is no model
        write(task, None, prompts)
    (warning,) = recwarn
    assert str(warning.message).startswith("2 of 2 tokens are unknown to the tokenizer (<unk>) in 1 of 4 prompts; ")
