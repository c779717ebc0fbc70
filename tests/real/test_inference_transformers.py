"""`@ci.inference` round a real `transformers` model, small and with random weights."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.conftest import Traced

WORDS = ["[UNK]", *(f"w{number}" for number in range(30))]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_positions=64,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=WORDS[0])


LIMITS = {"max_new_tokens": 5, "do_sample": False}


def request() -> dict[str, Any]:
    (session,) = ci.trace(format="dict")["roots"]
    (node,) = (child for child in session["children"] if child["name"] == "request")
    found: dict[str, Any] = node
    return found


def marks() -> dict[str, Any]:
    return {mark["name"]: mark["value"] for mark in request()["marks"] if mark["kind"] == "summary"}


def test_generate(model: Any, traced: Traced) -> None:
    """The method itself, decorated: the lengths of what goes in and of what comes out."""
    ids = torch.tensor([[1, 2, 3]])

    found = ci.inference(model.generate)(ids, **LIMITS)
    assert torch.equal(model.generate(ids, **LIMITS), found)
    assert {"input_length": 3, "output_length": 8} == marks()


def test_generate_from_a_tokenizer(model: Any, tokenizer: Any, traced: Traced) -> None:
    """What a tokenizer returns goes in, an output with `sequences` comes out."""

    @ci.inference
    def answer(inputs: Any) -> Any:
        return model.generate(**inputs, return_dict_in_generate=True, **LIMITS)

    inputs = tokenizer("w1 w2 w3 w4", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    assert (1, 9) == answer(inputs).sequences.shape
    assert {"input_length": 4, "output_length": 9} == marks()


def test_a_streamer_in_a_thread(model: Any, tokenizer: Any, traced: Traced) -> None:
    """The usual way to stream: `generate` in a thread, its words passed on by a generator."""

    @ci.inference
    def answer(prompt: str) -> Iterator[str]:
        inputs = tokenizer(prompt, return_tensors="pt")
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        arguments = {"input_ids": inputs["input_ids"], "streamer": streamer, **LIMITS}
        thread = threading.Thread(target=model.generate, kwargs=arguments)
        thread.start()
        yield from streamer
        thread.join()

    assert 5 == len("".join(answer("w1 w2 w3")).split())
    assert {"time_to_first_token_s", "tokens_per_second"} == set(marks())


def test_a_streamer_that_is_given(model: Any, traced: Traced) -> None:
    """A streamer gets each token as without us, and the lengths are marked at the end."""

    class Kept(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.is_ended = False

        def put(self, value: Any) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.is_ended = True

    streamer = Kept()
    found = ci.inference(model.generate)(
        input_ids=torch.tensor([[1, 2, 3]]), streamer=streamer, **LIMITS
    )
    assert (found[0].tolist(), True) == (streamer.tokens, streamer.is_ended)
    assert {"input_length": 3, "output_length": 8} == marks()


def test_what_the_model_does_is_inside(model: Any, traced: Traced) -> None:
    """The model's forward passes, seen by the torch hooks, are inside the request."""
    ci.inference(model.generate)(torch.tensor([[1, 2, 3]]), **LIMITS)
    names = {child["name"] for child in request()["children"]}
    assert {"forward"} == names


def test_a_classifier(model: Any, traced: Traced) -> None:
    """An output that is no sequence of token ids has no lengths."""
    ci.inference(model)(torch.tensor([[1, 2, 3]]))
    assert {} == marks()
