"""What a head is trained for is what it does when it guesses."""

from __future__ import annotations

from pathlib import Path

import torch

from kvcellar.backends.torch.eagle3.network import Eagle3Network
from kvcellar.models.eagle3.config import read_eagle3_config
from tests.models.eagle3_heads import DenseHead, head_config, head_tensors
from tests.models.players import text
from tests.tools.scripts import load_script


def test_unrolled_passes_are_guesses_behind_true_pairs():
    training = load_script("train_eagle3")
    config = head_config()
    tensors = head_tensors(config)
    embedding = torch.randn(272, 64, generator=torch.Generator().manual_seed(3))
    head = Eagle3Network(read_eagle3_config(config, Path("here")))
    head.load_state_dict(tensors | {"embed_tokens.weight": embedding})
    dense = DenseHead(config, tensors, embedding)
    tokens, n, passes = list(text(12)), 11, 4
    features = torch.randn(12, 192, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        found = training.unroll(head, torch.tensor([tokens]), features[None], passes)
        for j, (n_counting, logits) in enumerate(found):
            assert n_counting == n - j
            said = torch.softmax(logits[0], dim=-1)
            for place in (0, 3, n_counting - 1):
                known, guesses = tokens[1 : place + 2], tokens[place + 2 : place + 2 + j]
                _, want = dense.path(known, features[: place + 1], guesses)
                torch.testing.assert_close(said[place], want, atol=1e-5, rtol=1e-3)


def test_a_head_begins_with_what_its_model_knows():
    training = load_script("train_eagle3")
    import transformers

    from tests.models.tiny_checkpoints import FAMILIES

    config = FAMILIES["llama"]()
    target = transformers.LlamaForCausalLM(config)
    kept = torch.randperm(272, generator=torch.Generator().manual_seed(0))[:50].sort().values
    head = training.make_head(target, training.make_config(target, 50), kept.numpy())
    assert torch.equal(torch.arange(50) + head.d2t, kept)
    assert head.t2d.sum() == 50 and bool(head.t2d[kept].all())
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[kept])
    assert head.config.feature_layers == (1, 2, 3)
    assert not head.embed_tokens.weight.requires_grad
