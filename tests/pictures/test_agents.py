"""Agents with pictures: they fork, go back, end with the process, travel, and come back whole."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.agents import AgentManager
from kvcellar.errors import ModelError, PictureLostError, PromptError, StoreError
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.tokens import pictures_in
from kvcellar.store.store import PICTURES_BETWEEN
from kvcellar.store.values.facts import BadFactError
from tests.agents.fakes import LETTERS, manager, run, tokens_of, turn
from tests.agents.fakes import eager as eager
from tests.engine.fakes import FULL_PARAMS, logits_of
from tests.pictures.fakes import VOCAB, as_read, make_seeing_host, picture_file
from tests.store.shared.servers import wait_long

CAT, DOG = (Picture.read(picture_file(seed, 64, 48)) for seed in (1, 2))


def said(text: str, *pictures: Picture) -> dict[str, Any]:
    """A user's message with pictures at its beginning."""
    return {
        "role": "user",
        "content": text,
        "pictures": [{"name": picture.name, "at": 0} for picture in pictures],
    }


async def look(agents: AgentManager, agent_id: str, text: str, *pictures: Picture) -> Any:
    """A turn that brings pictures; its answer is what the oracle says."""
    for picture in pictures:
        agents.models.shelf.add(picture)
    end = await turn(agents, agent_id, behind=[said(text, *pictures)])
    assert end.finish.error is None, end.finish.error
    tokens = tokens_of(agents, agent_id)
    n = len(end.finish.token_ids)
    assert list(end.finish.token_ids) == answer_to(tokens[:-n], n)
    return end


def answer_to(prompt: Any, n: int) -> list[int]:
    """The greedy tokens after a history, from what a model reads of it alone."""
    tokens = as_read(np.array(prompt, np.int64))
    for _ in range(n):
        logits = logits_of(tokens, VOCAB, FULL_PARAMS)
        logits[list(LETTERS)] += 100.0
        tokens = [*tokens, int(np.argmax(logits))]
    return tokens[-n:]


def seen(agents: AgentManager, agent_id: str) -> list[str]:
    """The names of the pictures in an agent's history."""
    return [one.name for one in pictures_in(np.array(tokens_of(agents, agent_id)))]


def encoded(agents: AgentManager) -> list[str]:
    host = agents.models.host("hash")
    assert host is not None and host.looks is not None
    found: list[str] = host.looks.reader.encoded  # type: ignore[attr-defined]
    return found


pytestmark = pytest.mark.usefixtures("eager")


def test_a_conversation_about_pictures_is_computed_once(tmp_path: Path) -> None:
    async def talk(agents: AgentManager) -> None:
        await agents.lifecycle.create("eye")
        await look(agents, "eye", "who is this?", CAT)
        n = len(tokens_of(agents, "eye"))
        end = await look(agents, "eye", "and this?", DOG, CAT)
        assert end.usage.cached_tokens >= n - 1
        assert seen(agents, "eye") == [CAT.name, DOG.name, CAT.name]
        assert encoded(agents) == [CAT.name, DOG.name]

    with manager(tmp_path, make_seeing_host) as agents:
        run(talk(agents))


def test_another_process_goes_on_with_what_is_stored(tmp_path: Path) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        n = len(tokens_of(agents, "eye"))
    with manager(tmp_path, make_seeing_host) as agents:
        end = run(look(agents, "eye", "are you sure?"))
        assert end.usage.cached_tokens + end.usage.restored_tokens >= n - 1
        assert encoded(agents) == []
        run(look(agents, "eye", "and this?", DOG))
        assert encoded(agents) == [DOG.name]


def test_what_was_lost_of_k_and_v_is_computed_again_from_the_pictures(tmp_path: Path) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
    for block in (tmp_path / "blocks").iterdir():
        block.unlink()
    with manager(tmp_path, make_seeing_host) as agents:
        end = run(look(agents, "eye", "are you sure?"))
        assert end.usage.restored_tokens == 0 and encoded(agents) == [CAT.name]


def test_forks_share_pictures_and_go_their_own_ways(tmp_path: Path) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        run(agents.lifecycle.fork("eye", "other"))
        run(look(agents, "other", "and this?", DOG))
        run(look(agents, "eye", "and that?", CAT))
        assert seen(agents, "other") == [CAT.name, DOG.name]
        assert seen(agents, "eye") == [CAT.name, CAT.name]
        assert encoded(agents) == [CAT.name, DOG.name]
    assert len(list((tmp_path / "pictures").iterdir())) == 2


@pytest.mark.parametrize("rows_in", [1, 20])
def test_going_back_into_a_picture_goes_to_its_beginning(tmp_path: Path, rows_in: int) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "hello"))
        run(look(agents, "eye", "who is this?", CAT))
        (placed,) = pictures_in(np.array(tokens_of(agents, "eye")))
        info = run(agents.lifecycle.rewind("eye", position=placed.start + rows_in))
        assert info.n_tokens == placed.start
        assert f"{placed.start + rows_in} is inside of a picture" in info.notes[0]
        assert seen(agents, "eye") == []
        run(look(agents, "eye", "who is that?", DOG))
        assert seen(agents, "eye") == [DOG.name]
        child = run(agents.lifecycle.fork("eye", "child", position=placed.start + 30))
        assert child.n_tokens == placed.start and "is inside of a picture" in child.notes[0]


def test_an_export_takes_pictures_along(tmp_path: Path) -> None:
    file = tmp_path / "eye.kvcellar"
    with manager(tmp_path / "a", make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        run(agents.sleep.export("eye", file))
    with manager(tmp_path / "b", make_seeing_host) as agents:
        run(agents.sleep.import_file(file))
        end = run(look(agents, "eye", "are you sure?"))
        assert end.usage.restored_tokens > 0 and encoded(agents) == []
        assert seen(agents, "eye") == [CAT.name]
        assert agents.store.picture(CAT.name) == CAT.data


def test_an_export_of_a_stranger_brings_the_pictures_that_it_names_or_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "eye.kvcellar"
    with manager(tmp_path / "a", make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        run(agents.sleep.export("eye", file))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(f"pictures/{DOG.name}", DOG.data)
    with manager(tmp_path / "b", make_seeing_host) as agents:
        run(agents.sleep.import_file(file))
        assert agents.store.picture(DOG.name) is None
        assert agents.store.picture(CAT.name) == CAT.data
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, DOG.data if name.endswith(CAT.name) else data)
    with manager(tmp_path / "c", make_seeing_host) as agents:
        with pytest.raises(StoreError, match="other pixels"):
            run(agents.sleep.import_file(file))
        assert not (tmp_path / "c" / "pictures").exists()


def test_machines_share_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_long(monkeypatch)
    share = str(tmp_path / "share")
    with manager(tmp_path / "a", make_seeing_host, shared=share) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        assert agents.store.shared is not None and agents.store.shared.flush(120)
    with manager(tmp_path / "b", make_seeing_host, shared=share) as agents:
        end = run(look(agents, "eye", "are you sure?"))
        assert end.usage.restored_tokens > 0 and encoded(agents) == []
        assert agents.store.picture(CAT.name) == CAT.data


def test_a_stranger_s_file_in_a_place_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_long(monkeypatch)
    share = tmp_path / "share"
    with manager(tmp_path / "a", make_seeing_host, shared=str(share)) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        assert agents.store.shared is not None and agents.store.shared.flush(120)
    (file,) = share.glob(f"pictures/*/{CAT.name}")
    for data in (DOG.data, b"no picture"):
        file.write_bytes(data)
        with manager(tmp_path / "b", make_seeing_host, shared=str(share)) as agents:
            assert agents.store.picture(CAT.name) is None
            assert any(CAT.name in event.subject for event in agents.store.take_events())


def test_upkeep_keeps_pictures_that_somebody_names(tmp_path: Path) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        run(agents.lifecycle.create("other"))
        run(look(agents, "other", "who is this?", DOG))
        agents.store.flush()
        age(tmp_path)
        assert agents.store.gc().n_pictures == 0
        run(agents.lifecycle.delete("other"))
        agents.store.flush()
        age(tmp_path)
        assert agents.store.gc().n_pictures == 0, "undo brings it back"
        run(agents.dropped.undo("other"))
        assert agents.store.picture(DOG.name) == DOG.data
        run(agents.lifecycle.delete("other", is_final=True))
        agents.store.flush()
        age(tmp_path)
        report = agents.store.gc()
        assert report.n_pictures == 1 and agents.store.picture(DOG.name) is None
        assert agents.store.picture(CAT.name) == CAT.data


def test_pictures_that_nobody_names_go_by_themselves(tmp_path: Path) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        run(agents.lifecycle.create("other"))
        run(look(agents, "other", "who is this?", DOG))
        run(agents.lifecycle.delete("other", is_final=True))
        age(tmp_path)
        for seed in range(PICTURES_BETWEEN):
            one = Picture.read(picture_file(100 + seed, 8, 8))
            agents.store.put_picture(one.name, one.data)
        agents.store.flush()
        assert agents.store.picture(DOG.name) is None
        assert agents.store.picture(CAT.name) == CAT.data


def age(store: Path) -> None:
    """Make the pictures older than what upkeep leaves alone."""
    for path in (store / "pictures").iterdir():
        os.utime(path, (1, 1))


def test_a_damaged_picture_is_put_away(tmp_path: Path) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        (file,) = (tmp_path / "pictures").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_bytes(file.read_bytes()[:-7])
        report = agents.store.verify()
        assert CAT.name in report.damaged and not file.exists()
        assert (tmp_path / "quarantine").exists()


def test_a_turn_whose_picture_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))

        def full(name: str, data: bytes) -> None:
            raise StoreError("no room")

        monkeypatch.setattr(agents.store, "put_picture", full)
        end = run(look(agents, "eye", "who is this?", CAT))
        assert end.notice is not None and "not on disk" in end.notice
        monkeypatch.undo()
        run(look(agents, "eye", "and now?"))
        assert agents.store.picture(CAT.name) == CAT.data


def test_undo_brings_a_turn_back_with_its_pictures(tmp_path: Path) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        before = agents.directory.agent("eye").messages
        for drop in (agents.lifecycle.rewind("eye", turn=0), agents.lifecycle.delete("eye")):
            run(drop)
            agents.store.gc(grace_s=0)
            run(agents.dropped.undo("eye"))
            assert agents.directory.agent("eye").messages == before
            assert agents.store.picture(CAT.name) == CAT.data
    lose(tmp_path, "pictures")
    with manager(tmp_path, make_seeing_host) as agents:  # what it remembers of it came back too
        run(look(agents, "eye", "are you sure?"))


def lose(store: Path, *folders: str) -> None:
    for folder in folders:
        for file in (store / folder).iterdir():
            file.unlink()


def test_an_agent_goes_on_without_a_picture_that_was_lost_while_k_and_v_are_there(
    tmp_path: Path,
) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
    lose(tmp_path, "pictures")
    for text in ("are you sure?", "really?"):
        with manager(tmp_path, make_seeing_host) as agents:
            n = len(tokens_of(agents, "eye"))
            end = run(look(agents, "eye", text))
            assert end.usage.cached_tokens + end.usage.restored_tokens >= n - 1
            assert encoded(agents) == [] and seen(agents, "eye") == [CAT.name]
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.fork("eye", "other"))
        run(look(agents, "other", "and this?", DOG))
        assert seen(agents, "other") == [CAT.name, DOG.name]
        assert encoded(agents) == [DOG.name]


def test_who_takes_back_a_turn_is_told_of_its_pictures_that_were_lost(tmp_path: Path) -> None:
    from kvcellar.server.commands.verbs import take_back

    async def taken() -> Any:
        return await take_back(agents, lambda *_: None, agent_id="eye")

    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        for text in ("who is this?", "and now?"):
            run(look(agents, "eye", text, CAT))
        first = run(taken())
        assert (first["text"], len(first["images"]), first["n_lost"]) == ("and now?", 1, 0)
    lose(tmp_path, "pictures")
    with manager(tmp_path, make_seeing_host) as agents:
        second = run(taken())
        assert (second["text"], second["images"], second["n_lost"]) == ("who is this?", [], 1)


def test_a_picture_that_has_to_be_read_and_is_lost_is_named_with_its_turn_and_the_ways_out(
    tmp_path: Path,
) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "hello"))
        run(look(agents, "eye", "who is this?", CAT))
        run(agents.lifecycle.fork("eye", "back"))
    lose(tmp_path, "pictures", "blocks")
    with manager(tmp_path, make_seeing_host) as agents:
        for _ in range(2):
            end = run(turn(agents, "eye", "are you sure?"))
            assert isinstance(end.finish.error, PictureLostError)
            said = str(end.finish.error)
            assert f"the picture {CAT.name} in turn 2 of agent 'eye'" in said
            assert "send it again" in said and "to the first 1 turn" in said
        run(look(agents, "eye", "here it is", CAT))
        assert encoded(agents) == [CAT.name] and agents.store.picture(CAT.name) == CAT.data
    lose(tmp_path, "pictures", "blocks")
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.rewind("back", turn=1))
        run(look(agents, "back", "something else"))


def test_what_an_agent_remembers_of_a_picture_is_checked(tmp_path: Path) -> None:
    from kvcellar.agents.records.looks import looks_as_json, looks_of
    from kvcellar.models.seeing import Look

    known = {CAT.name: Look("[" + "<pad>" * 5000 + "]", 5000, (50, 100)), DOG.name: Look("x", 3)}
    kept = looks_as_json(known, [CAT.name, DOG.name, "0" * 20])
    assert looks_of(kept) == known and len(str(kept)) < 400
    packed = kept[CAT.name][0]
    for bad in ([], [packed, 1, 2], ["?", 1, 2, 3], [packed[:8], 1, 2, 3], [packed, -1, 2, 3], 5):
        with pytest.raises(BadFactError):
            looks_of({CAT.name: bad})


def test_a_text_model_is_told_of_pictures_in_a_line(tmp_path: Path) -> None:
    def blind(name: str) -> Any:
        host = make_seeing_host(name)
        host.looks = None
        return host

    with manager(tmp_path, blind) as agents:
        run(agents.lifecycle.create("eye"))
        end = run(turn(agents, "eye", behind=[said("who is this?", CAT)]))
        host = agents.models.host("hash")
        assert host is not None and host.tokenizer is not None
        text = host.tokenizer.decode(list(tokens_of(agents, "eye")))
        assert "[image: left out, this model reads text alone]\nwho is this?" in text
        assert any("1 image in the messages left out" in note for note in end.usage.notes)


def test_a_template_that_leaves_pictures_out_is_refused(tmp_path: Path) -> None:
    def deaf(name: str) -> Any:
        host = make_seeing_host(name)
        assert host.looks is not None
        host.looks.reader.written = "<another>"
        return host

    with manager(tmp_path, deaf) as agents:
        run(agents.lifecycle.create("eye"))
        agents.models.shelf.add(CAT)
        with pytest.raises(ModelError, match="writes 0 of 1 pictures"):
            run(turn(agents, "eye", behind=[said("who is this?", CAT)]))


def test_another_picture_is_told_as_the_cause(tmp_path: Path) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        run(look(agents, "eye", "who is this?", CAT))
        agents.models.shelf.add(DOG)
        messages = [said("who is this?", DOG), {"role": "assistant", "content": "?"}]
        run(turn(agents, "eye", messages=[*messages, {"role": "user", "content": "sure?"}]))
        miss = agents.directory.agent("eye").miss
        assert miss is not None and miss.cause == "picture"
        assert f"[picture {CAT.name}]" in miss.was and f"[picture {DOG.name}]" in miss.became


@pytest.mark.parametrize("text", ["hi <|en#d|> there", "a #<|end|>b", "<|e#nd|#>"])
def test_no_picture_makes_a_control_token_of_what_is_around_it(text: str) -> None:
    """A template may put texts together that a picture stands between."""
    from kvcellar.models.text.prompts import encode, render
    from tests.models.tiny_checkpoints import make_tokenizer
    from tests.pictures.fakes import FakeReader

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<pad>", "<picture>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content if p.type == 'image' %}<picture>{% endfor %}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}"
        "<|end|>{% endfor %}"
    )
    looks: Any = FakeReader()
    looks.token_id = tokenizer.convert_tokens_to_ids("<pad>")
    looks.look = lambda name: FakeReader.look(looks, CAT)
    content, places = text.replace("#", ""), [i for i, c in enumerate(text) if c == "#"]
    pictures = [{"name": CAT.name, "at": at - i} for i, at in enumerate(places)]
    message = {"role": "user", "content": content, "pictures": pictures}
    rendered = render(tokenizer, [message], looks=looks, is_asking=False)
    ids = encode(tokenizer, rendered)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert ids.count(end) == 1 and ids[-1] == end
    assert len(pictures_in(np.array(ids, np.int64))) == len(places)


RESULTS = {
    "json": "{{ m.content | tojson }}",
    "texts": "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}",
    "parts": "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<picture>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}",
}
"""How templates write results of tools."""

TURNS = (
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' or "
    "(m.role == 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('take turns') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}"
)
"""That of a template where the user and answers that are no calls have to take turns."""


@pytest.mark.parametrize("way", [*RESULTS, "turns"])
def test_a_picture_of_a_result_is_read_there_or_in_a_message_of_the_user_behind(way: str) -> None:
    from kvcellar.models.text.prompts import encode, render
    from tests.models.tiny_checkpoints import make_tokenizer
    from tests.pictures.fakes import FakeReader

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<pad>", "<picture>"]})
    tokenizer.chat_template = (
        (
            "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'tool' %}RESULT{% else %}PLAIN"
            "{% endif %}{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}"
            "<|end|>{% endfor %}"
        )
        .replace("RESULT", RESULTS["json" if way == "turns" else way])
        .replace("PLAIN", RESULTS["parts"])
    )
    if way == "turns":
        tokenizer.chat_template = TURNS + tokenizer.chat_template
    looks: Any = FakeReader()
    looks.token_id = tokenizer.convert_tokens_to_ids("<pad>")
    looks.look = lambda name: FakeReader.look(looks, {CAT.name: CAT, DOG.name: DOG}[name])
    call = {"id": "a12345678", "function": {"name": "see", "arguments": {}}}
    results = [
        {"role": "tool", "content": "OneTwo", "pictures": [{"name": CAT.name, "at": 3}]},
        {"role": "tool", "content": "", "pictures": [{"name": DOG.name, "at": 0}]},
    ]
    messages = [
        said("look", DOG),
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        *results,
    ]
    behind = {"role": "assistant", "content": "Seen."}
    first = render(tokenizer, messages, looks=looks, is_asking=False)
    rendered = render(tokenizer, [*messages, behind], looks=looks, is_asking=False)
    ids = encode(tokenizer, rendered)
    names = [one.name for one in pictures_in(np.array(ids, np.int64))]
    assert names == [DOG.name, CAT.name, DOG.name]
    assert rendered.text.startswith(first.text), "what follows changes nothing"
    rows = "[" + "<pad>" * FakeReader.look(looks, CAT).n_rows + "]"
    if way == "parts":
        assert f"<|tool|>One{rows}Two<|end|><|tool|>[" in rendered.text and not rendered.notes
    else:
        line = "[image: shown below]"
        quote = "" if way == "texts" else '"'
        between = "<|assistant|>I look at what came.<|end|>" if way == "turns" else ""
        assert f"<|tool|>{quote}One{line}Two{quote}<|end|><|tool|>{quote}{line}{quote}<|end|>" in (
            rendered.text
        )
        assert f"<|end|>{between}<|user|>{rows}[" in rendered.text
        assert bool(between) == any("a short answer is read" in note for note in rendered.notes)
        assert any("read in a message of the user behind" in note for note in rendered.notes)


def test_pictures_go_with_their_messages_where_a_template_has_these_moved() -> None:
    from kvcellar.models.text.pictures import marked_pictures, picture_parts

    one = said("one", CAT)
    two = {
        **said("two", DOG),
        "pictures": [{"name": CAT.name, "at": 3}, {"name": DOG.name, "at": 1}],
    }
    first, second = marked_pictures([one, two], "#")
    order: list[int] = []
    parts = picture_parts([second, first], "#", order)
    assert order == [1, 2, 0]  # the second message's in the order of their places
    assert [p["type"] for p in parts[0]["content"]] == ["text", "image", "text", "image"]


@pytest.mark.parametrize(
    "pictures",
    ["abc", [{"name": CAT.name}], [{"name": "x", "at": 0}], [{"name": CAT.name, "at": 99}], [7]],
)
def test_what_names_no_picture_is_refused(tmp_path: Path, pictures: Any) -> None:
    with manager(tmp_path, make_seeing_host) as agents:
        run(agents.lifecycle.create("eye"))
        with pytest.raises(PromptError, match="a list of objects"):
            run(turn(agents, "eye", behind=[{**said("hi"), "pictures": pictures}]))
