"""`plan`: a page for people, one object for programs, and what cannot be asked for."""

import json
from importlib.util import find_spec

import pytest

from transformer_jax.commands.plan import plan_and_show
from transformer_jax.errors import UserError
from transformer_jax.parallel.topology import ENVIRONMENT

TINY = (
    *("gpt_text", "--model.num-layers", "2", "--model.d-model", "16", "--model.num-heads", "2", "--model.unroll", "1"),
    *("--model.d-ff", "32", "--model.max-length", "16", "--processor.vocab-size", "320", "--batching.rows", "8"),
)


def test_one_json_object_has_everything(capsys):
    plan_and_show([*TINY, "--devices", "4", "--mesh.fsdp", "2", "--chip", "v5p", "--json"], "plan")
    found = json.loads(capsys.readouterr().out)
    assert (found["num_devices"], found["mesh"]["data"], found["mesh"]["fsdp"]) == (4, 2, 2)
    assert found["batch"]["text"] == [8, 17]
    assert found["estimate"]["chip"] == "TPU v5p" and found["fits"] is True
    assert found["collectives"]["all-gather"]["bytes_moved"] > 0


def test_a_page_for_people(capsys):
    plan_and_show([*TINY, "--mesh.fsdp", "4", "--mesh.tensor", "2", "--chip", "H100"], "plan")
    page = capsys.readouterr().out
    assert "8 x cpu, mesh fsdp=4 tensor=2" in page
    assert "text 8x17" in page and "no data were read" in page
    row = next(line for line in page.splitlines() if "embedding.table" in line and "position" not in line)
    assert "vocab=320 embed=16" in row and "tensor, fsdp" in row
    assert "ESTIMATE, not measured, for H100 SXM" in page
    assert page.rstrip().endswith("fits")


def test_without_a_chip_nothing_is_estimated_or_judged(capsys):
    plan_and_show([*TINY, "--devices", "2"], "plan")
    page = capsys.readouterr().out
    assert "ESTIMATE" not in page and "fit" not in page
    assert "model FLOPs of a step" in page


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--topology", "v5e:2x2", "--devices", "4"), "--topology v5e:2x2 says the devices .* leave --devices out"),
        (("--topology", "v5e:2x2", "--chip", "H100"), "leave --chip out"),
        (("--slices", "2"), "--slices 2 is for a --topology"),
        (("--devices", "0"), "--devices is 0; it must be at least 1"),
        (("--devices", "16"), "told to simulate 8"),
        (("--chip", "H1000"), "chip 'H1000' is unknown; choose among v3, .*H100 SXM"),
        (("--topology", "v5e"), "topology 'v5e' is not known"),
        (("--devices", "3", "--mesh.fsdp", "2"), "does not divide 3 devices"),
    ],
)
def test_what_cannot_be_asked_for(flags, problem):
    with pytest.raises(UserError, match=problem):
        plan_and_show([*TINY, *flags], "plan")


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_a_step_that_does_not_fit_a_tpu_and_the_setting_that_does(capsys, monkeypatch):
    """What 262,144 tokens leave behind for the backward pass of 4 layers is more than the 16 GiB of the chip."""
    for name, value in {**ENVIRONMENT, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        monkeypatch.setenv(name, value)
    larger = ("--model.max-length", "512", "--model.d-model", "1024", "--model.d-ff", "4096", "--batching.rows", "512")
    plan_and_show([*TINY, *larger, "--topology", "v5e:1x1", "--json"], "plan")
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["memory"] is None and found["collectives"] == {}
    assert found["attempts"][-1]["fits"] is True
    assert found["advice"].startswith("it fits with --accumulate")
