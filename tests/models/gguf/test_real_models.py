"""Two models that people have, from their files: the same tokens as llama.cpp and transformers.

``HYPOTHESIS_PROFILE=thorough`` takes all prompts, and a chat of 20 turns.
"""

from __future__ import annotations

import functools
import gc
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, get_gguf_hf_weights_map

from kvcellar.models import load_model
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.gguf.tokens import tokenizer_of
from kvcellar.models.sizes.sizing import size_model
from tests.models.players import Player
from tests.real_models import GEMMA3, SMOLLM2

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
EXPECTED = Path(__file__).parent / "expected"
MODELS = {"gemma3": GEMMA3, "smollm2": SMOLLM2}
N_TOKENS = 24 if IS_THOROUGH else 8

CONFIGS = {
    "smollm2": lambda: transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}
"""As the makers published them, which the files must lead to."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 5, 8, 13,",
    "The three primary colours are",
    "# A list of things to pack\n\n- ",
    "Q: What is photosynthesis?\nA:",
    "In 1969, the first people",
    "Wer reitet so spät durch Nacht und Wind?",
    "The opposite of hot is",
    "To make bread you need",
    "import numpy as np\n\nx = np.",
    "She opened the door and saw",
    "Mathematics is the study of",
    "<html>\n<head>\n<title>",
    "The largest planet of the solar system",
    "It was the best of times, it was",
    "A haiku about autumn:\n",
)


@functools.lru_cache(maxsize=1)
def reference(name: str) -> Any:
    """transformers' own class in float32, with the weights as its own code takes them."""
    file = read_gguf(MODELS[name].found())
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS[file.architecture](config=config.to_dict())
    names = get_gguf_hf_weights_map(network, processor)
    made = {}
    for key, tensor in file.tensors.items():
        plain = gguf.dequantize(
            np.array(file.stored(tensor)), gguf.GGMLQuantizationType(tensor.kind)
        )
        done = processor.process(
            plain.reshape(tensor.shape), key, tensor_key_mapping=names, parsed_parameters={}
        )
        made[names[done.name]] = torch.from_numpy(np.array(done.weights))
    network.load_state_dict(made, strict=False, assign=True)
    network.tie_weights()
    for module in network.modules():  # what lies outside of a checkpoint was on the meta device
        if hasattr(module, "rope_init_fn") or "RotaryEmbedding" in type(module).__name__:
            module.__init__(config)
    embed = network.model.embed_tokens
    if hasattr(embed, "scalar_embed_scale"):
        embed.embed_scale = torch.tensor(embed.scalar_embed_scale)
    assert not any(one.is_meta for one in [*network.parameters(), *network.buffers()])
    return network.eval()


def greedy(network: Any, prompt: list[int], n_tokens: int, ends: Any = ()) -> list[int]:
    """The continuation by transformers alone, with its own cache."""
    cache, ids, found = transformers.DynamicCache(config=network.config), torch.tensor([prompt]), []
    with torch.inference_mode():
        while len(found) < n_tokens and not (found and found[-1] in ends):
            out = network(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            found.append(int(out.logits[0, -1].argmax()))
            ids = torch.tensor([found[-1:]])
    return found


@functools.lru_cache(maxsize=1)
def loaded(name: str) -> Any:
    return load_model(MODELS[name].found(), dtype="float32", weights="none")


@pytest.fixture(scope="module", autouse=True)
def little_is_left_behind():
    yield
    reference.cache_clear()
    loaded.cache_clear()
    gc.collect()


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_cut_into_the_tokens_that_llama_cpp_cuts_them_into(name):
    tokenizer = tokenizer_of(read_gguf(MODELS[name].found()))
    expected = json.loads((EXPECTED / f"{name}.json").read_text())
    assert len(expected["tokens"]) == 200
    assert tokenizer("a")["input_ids"] == expected["opened"]
    got = [
        [text, tokenizer(text, add_special_tokens=False)["input_ids"]]
        for text, _ in expected["tokens"]
    ]
    assert got == expected["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers_on_the_dequantised_weights(name):
    model, theirs = loaded(name), reference(name)
    for prompt in PROMPTS if IS_THOROUGH else PROMPTS[:2]:
        ids = model.tokenizer(prompt)["input_ids"]
        with Player(model, "contiguous") as player:
            got, _ = player.greedy(player.feed(ids), N_TOKENS)
        assert got == greedy(theirs, ids, N_TOKENS), prompt


@pytest.mark.slow
def test_a_chat_is_that_of_transformers_turn_by_turn():
    model, theirs = loaded("smollm2"), reference("smollm2")
    messages: list[dict[str, str]] = []
    held: list[int] = []
    with Player(model, "contiguous", 4096) as player:
        for turn in range(20 if IS_THOROUGH else 3):
            messages.append({"role": "user", "content": f"{turn}: {PROMPTS[turn]} Why?"})
            ids = model.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            same = next(
                (n for n, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), len(held)
            )
            assert same >= 0.9 * len(held), "what is reused"
            player.cut(same)
            got, row = [], player.feed(ids[same:])[-1]
            while len(got) < N_TOKENS and not (got and got[-1] in model.eos_token_ids):
                got.append(int(row.argmax()))
                row = player.feed(got[-1:])[-1]
            assert got == greedy(theirs, ids, N_TOKENS, model.eos_token_ids), turn
            held = [*ids, *got]
            answer = model.tokenizer.decode(got, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})


@pytest.mark.slow
def test_a_model_is_sized_by_its_file():
    spec = size_model(SMOLLM2.found())
    assert spec.family == "llama" and spec.stored_bytes < SMOLLM2.found().stat().st_size
    assert "134,515,008 parameters, sizes from its files" in spec.counted
