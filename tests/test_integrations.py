"""Adapters to frameworks, one step of each: test_transformers.py and test_trl.py have the rest."""
import pytest


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
