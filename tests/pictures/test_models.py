"""Agents of real models that read pictures: each answer is what the wrapper itself would say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.agents import AgentManager
from kvcellar.hosting.host import ModelHost, open_host
from kvcellar.pictures.tokens import ids_of, pictures_in
from tests.agents.fakes import manager, run, tokens_of, turn
from tests.vision_checkpoints import make_picture, make_vision_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CAT, DOG = make_picture(32, 24, seed=1), make_picture(24, 40, seed=2)
PLAIN = {"dtype": "float32", "weights": "none", "capacity": 2048, "backend": "torch"}


class Wrapper:
    """transformers' own model and processor of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        from kvcellar.backends.torch.vision.processor import Processor

        auto: Any = transformers.AutoModelForImageTextToText
        made = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model = made.eval()
        self.processor = Processor(folder, made.config)

    def next_ids(self, tokens: Any) -> list[int]:
        """The likeliest token behind each token of a history."""
        ids = ids_of(tokens)
        names = {one.name: one.pixels() for one in (CAT, DOG)}
        images = [names[one.name] for one in pictures_in(tokens)]
        text = " ".join([self.processor.written] * len(images))
        given = dict(self.processor._processor(images=images, text=[text], return_tensors="pt"))
        kinds = torch.from_numpy((ids == self.model.config.image_token_id).astype(np.int64))[None]
        given |= {name: kinds for name in given if name.endswith("token_type_ids")}
        del given["attention_mask"]
        given["input_ids"] = torch.from_numpy(ids)[None]
        with torch.inference_mode():
            found: list[int] = self.model(**given, use_cache=False).logits[0].argmax(-1).tolist()
        return found


async def ask(agents: AgentManager, wrapper: Wrapper, text: str, *pictures: Any) -> Any:
    """A turn whose answer is held to the wrapper's."""
    named = [{"name": one.name, "at": 0} for one in pictures]
    message = {"role": "user", "content": text, "pictures": named}
    end = await turn(agents, "eye", behind=[message])
    assert end.finish.error is None, end.finish.error
    answer = list(end.finish.token_ids)
    tokens = np.array(tokens_of(agents, "eye"))
    assert answer == wrapper.next_ids(tokens)[-len(answer) - 1 : -1]
    return end


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_5_vl"])
def test_a_conversation_about_pictures_is_the_wrappers(family: str, tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path / "model", family)
    wrapper = Wrapper(folder)

    def load(name: str) -> ModelHost:
        return open_host(str(folder), **PLAIN)

    for said in ("who is this?", "and after a restart?"):
        with manager(tmp_path / "store", load) as agents:
            for one in (CAT, DOG):
                agents.models.shelf.add(one)
            if not agents.directory.infos():
                run(agents.lifecycle.create("eye"))
            run(ask(agents, wrapper, said, CAT))
            n = len(tokens_of(agents, "eye"))
            end = run(ask(agents, wrapper, "and these?", DOG, CAT))
            assert end.usage.cached_tokens > n // 2
            run(ask(agents, wrapper, "text behind them"))
