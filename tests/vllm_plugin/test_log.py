"""What an operator greps for in the log of an engine is there, with its time."""

import logging

import pytest

from kvferry.vllm_plugin import log_as_vllm


@pytest.fixture
def ours():
    logger = logging.getLogger("kvferry")
    before, logger.handlers = logger.handlers, []
    yield logger
    logger.handlers = before


def test_the_layers_below_log_as_vllm_does(ours, monkeypatch):
    theirs = [logging.NullHandler()]
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", theirs)
    log_as_vllm()
    log_as_vllm()
    assert ours.handlers == theirs


def test_a_logger_of_the_users_own_is_kept(ours):
    own = logging.NullHandler()
    ours.addHandler(own)
    log_as_vllm()
    assert ours.handlers == [own]
