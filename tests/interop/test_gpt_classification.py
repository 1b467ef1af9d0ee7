"""GPT-2 with a head for labels, beside transformers itself."""

import numpy as np
import pytest

import transformer_jax as tj

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.array([[5, 6, 7, 8, 9], [3, 4, 0, 0, 0]])
VALID = IDS != 0


@pytest.mark.parametrize("kind", ["GPT2ForSequenceClassification", "GPT2ForTokenClassification"])
def test_logits_are_those_of_transformers_and_weights_go_there_and_back(kind, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    theirs = getattr(transformers, kind)(transformers.GPT2Config(**sizes, num_labels=3, pad_token_id=0)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS), attention_mask=torch.tensor(VALID).long()).logits.numpy()
    ours = tj.from_pretrained(tmp_path / "theirs")
    hidden = ours.apply("hidden", IDS, valid=VALID)
    if kind == "GPT2ForSequenceClassification":
        np.testing.assert_allclose(ours.apply("classify", hidden, VALID), expected, atol=1e-6)
    else:
        np.testing.assert_allclose(ours.apply("tag", hidden)[VALID], expected[VALID], atol=1e-6)
    tj.save_pretrained(ours.model, tmp_path / "ours")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "ours")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
