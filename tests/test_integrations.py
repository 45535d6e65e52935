"""Adapters to frameworks, one step of each: test_transformers.py and test_trl.py have the rest."""
import ast
import copy
from pathlib import Path

import pytest

from fusedloss import integrations
from fusedloss.integrations.transformers import patch


def test_a_patched_model_of_transformers_takes_the_same_step():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import pair, same_step
    same_step(*pair())


def test_a_patched_head_of_trl_says_the_same():
    pytest.importorskip("trl", reason="TRL is not installed")
    from test_trl import made, same_head, unpatch
    try:
        same_head(made())
    finally:
        unpatch()


def test_a_patched_model_serves_threads():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import pair, serves_threads
    serves_threads(pair()[1], rounds=15)


@pytest.mark.parametrize("name", ["Bart", "Marian", "Pegasus"])
def test_a_patched_encoder_with_a_decoder_takes_the_same_step(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import test_encoders_with_decoders
    test_encoders_with_decoders(name)


@pytest.mark.parametrize("name", ["Wav2Vec2", "Parakeet"])
def test_a_patched_model_for_ctc_takes_the_same_step(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import same_losses, speech
    plain, given = speech(name)
    same_losses(plain, patch(copy.deepcopy(plain)), given)


def test_trainable_tokens_of_a_tied_model_take_the_same_step():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import test_trainable_tokens
    test_trainable_tokens("tied", "patch")


def test_an_adapter_that_does_more_is_refused_by_patch():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_transformers import test_adapters_of_other_kinds_are_refused_and_nothing_changes
    test_adapters_of_other_kinds_are_refused_and_nothing_changes("Lora")


def test_no_framework_is_imported_before_it_is_used():
    frameworks = {"accelerate", "datasets", "peft", "transformers", "trl"}
    for path in Path(integrations.__file__).parent.glob("*.py"):
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {name.partition(".")[0] for node in nodes for name in [getattr(node, "module", None) or "", *(a.name for a in node.names)]}
        assert nodes and not frameworks & names, path


def test_an_adapter_is_loaded_when_it_is_asked_for():
    assert {"transformers", "trl"} <= set(dir(integrations)) and callable(integrations.trl.patch)
    with pytest.raises(AttributeError, match="'fusedloss.integrations' has no attribute 'keras'"):
        integrations.keras
