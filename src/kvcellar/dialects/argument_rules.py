"""Grammar rules of a call's arguments, in each way in which dialects write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.dialects.dialect import (
    MARKS,
    BareArguments,
    CallForm,
    Dialect,
    JsonArguments,
    PythonArguments,
    TaggedArguments,
)
from kvcellar.dialects.held import HeldArguments, schema_json
from kvcellar.dialects.kinds import NO_TEXT, SchemaKinds

_WORD = "/[A-Za-z_][A-Za-z0-9_]*/"
_MOST_PROPERTIES = 200


class Rules:
    """Rules of one grammar, by name; those without a name are whole lines."""

    def __init__(self, dialect: Dialect) -> None:
        """Begin with none."""
        self.dialect = dialect
        self._lines: dict[str, str] = {}
        self._lazy: dict[str, str] = {}

    def add(self, name: str, rule: str) -> None:
        """Add a rule, once."""
        line = f"{name}: {rule}" if name else rule
        self._lines.setdefault(line, line)

    def text_until(self, text: str) -> str:
        """Write any text up to a literal, and the literal."""
        spelt = self.dialect.spelt(text)
        before = re.split(f"[{MARKS}]", spelt)[0]
        if before != spelt:  # text ends where the token of a mark comes
            ends = f"/(.|\\n)*{regex_of(before)}/" if before else "TEXT"
            return f"{ends} {literal(self.dialect, self.dialect.written(spelt[len(before) :]))}"
        if text not in self._lazy:
            self._lazy[text] = f"until_{len(self._lazy)}"
            self.add("", f"{self._lazy[text]}[lazy]: TEXT {_quoted(text)}")
        return self._lazy[text]

    def lines(self) -> list[str]:
        """Return all of them, as lines."""
        return list(self._lines)


def literal(dialect: Dialect, text: str) -> str:
    """Write a literal: text in quotes, tokens of marks, and terms for ``$index`` and ``$id``."""
    written = {dialect.spelt(one.content): f"<[{one.token_id}]>" for one in dialect.tokens}
    written |= {"$index": "/[0-9]{1,3}/", "$id": "/[a-zA-Z0-9]{9}/"}
    parts = [part for part in re.split(rf"([{MARKS}]|\$index|\$id)", dialect.spelt(text)) if part]
    return " ".join(written.get(part) or _quoted(part) for part in parts)


def regex_of(text: str) -> str:
    """Write a text as the grammar's regular expressions match it."""
    return re.sub(r"([\\/.^$*+?()\[\]{}|\"])", r"\\\1", text).replace("\n", "\\n")


def filled(text: str, name: str, number: int | None = None) -> str:
    """Fill in what a literal of a call has holes for; without ``number``, but its number and id."""
    said = re.sub(r"\$\[.*?\$\]", "", text)
    said = said.replace("$<", "").replace("$>", "")
    quoted = json.dumps(name, ensure_ascii=False)[1:-1]
    said = said.replace('"$name"', f'"{quoted}"').replace("$name", name)
    if number is None:
        return said
    return said.replace("$index", str(number)).replace("$id", f"call{number:05}")


def argument_rules(rules: Rules, form: CallForm, one: HeldArguments, number: int) -> str:
    """Add the rules of a tool's arguments, and return what they are."""
    if isinstance(form.arguments, JsonArguments):
        return f"%json {schema_json(one.schema)}"
    writer: _Writer
    if isinstance(form.arguments, TaggedArguments):
        writer = _Tagged(rules, form.arguments, one.schema)
    elif isinstance(form.arguments, PythonArguments):
        writer = _Python(rules, one.schema)
    else:
        writer = _Bare(rules, one.schema, form.arguments)
    return writer.rule(f"arguments_{number}")


class _Writer:
    """Writes the rules of an object's members, each with a value that is written in some way."""

    separator = ", "

    def __init__(self, rules: Rules, root: Mapping[str, Any]) -> None:
        self._rules = rules
        self._root = root
        self._kinds = SchemaKinds(root)

    def rule(self, name: str) -> str:
        """Add the rules of the whole, and return the first one's name."""
        return self.members(name, self._root)

    def member(self, name: str, key: str, schema: Any) -> str:
        """Write one member."""
        raise NotImplementedError

    def any_member(self) -> str:
        """Write a member of any name."""
        raise NotImplementedError

    def members(self, name: str, schema: Mapping[str, Any]) -> str:
        """Add the rules of an object's members, in the order of its schema."""
        known = schema.get("properties")
        properties = known if isinstance(known, Mapping) else {}
        required = schema.get("required")
        needed = required if isinstance(required, Sequence) else ()
        others = schema.get("additionalProperties")
        separator = literal(self._rules.dialect, self.separator) if self.separator else ""
        if not properties or len(properties) > _MOST_PROPERTIES:
            if others is False:
                return '""'
            self._rules.add(f"{name}_any", self.any_member())
            self._rules.add(name, f"({name}_any ({separator} {name}_any)*)?")
            return name
        keys = list(properties)
        for i, key in enumerate(keys):
            self._rules.add(f"{name}_{i}", self.member(f"{name}_{i}", key, properties[key]))
        last = len(keys)
        for i, key in enumerate(keys):
            first, more = f"{name}_{i} {name}_b{i + 1}", f"{separator} {name}_{i} {name}_b{i + 1}"
            skips = "" if key in needed else f" | {name}_a{i + 1}"
            passes = "" if key in needed else f" | {name}_b{i + 1}"
            self._rules.add(f"{name}_a{i}", first + skips)
            if i:
                self._rules.add(f"{name}_b{i}", more + passes)
        self._rules.add(f"{name}_a{last}", '""')
        self._rules.add(f"{name}_b{last}", '""')
        return f"{name}_a0"

    def _nested(self, name: str, schema: Any) -> list[str]:
        """Write lists and objects that a schema takes, each of the forms that it has for them."""
        parts = []
        for kind, write in (("array", self._array), ("object", self._object)):
            part = self._kinds.narrowed(schema, frozenset((kind,)))
            forms = [] if part is None else [part]
            for key in ("anyOf", "oneOf"):
                if part is not None and set(part) <= {key}:
                    forms = part[key]
            parts += [write(f"{name}_{kind[0]}{i}", form) for i, form in enumerate(forms)]
        return parts

    def _array(self, name: str, schema: Mapping[str, Any]) -> str:
        """Write a list."""
        raise NotImplementedError

    def _object(self, name: str, schema: Mapping[str, Any]) -> str:
        """Write an object."""
        raise NotImplementedError

    def json(self, schema: Any) -> str:
        """Write a value as JSON of a schema, which may refer to the whole schema."""
        if not isinstance(schema, Mapping):
            schema = {}
        if '"$ref"' in json.dumps(schema):
            shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            refers = re.findall(r'"\$ref": "#/([^"/]*)', json.dumps([schema, shared]))
            is_apart = set(refers) <= shared.keys()  # and not of the whole, or a place in it
            schema = {**schema, **shared} if is_apart else {}
        return f"%json {schema_json(schema)}"


class _Tagged(_Writer):
    """Members between tags: strings as they are, up to the tag; all else JSON."""

    separator = ""

    def __init__(self, rules: Rules, form: TaggedArguments, root: Mapping[str, Any]) -> None:
        super().__init__(rules, root)
        self._form = form

    def member(self, name: str, key: str, schema: Any) -> str:
        texts, others = self._kinds.texts(schema), self._others(schema)
        closing = literal(self._rules.dialect, self._form.closing)
        until_closing = "" if texts is not None else self._rules.text_until(self._form.closing)
        named = " | ".join(map(_quoted, texts or ()))
        if "$string" in self._form.opening:  # which says whether it is one
            string = until_closing if texts is None else f"({named}) {closing}"
            parts = [f"{self._opening(key, True)} {string}"] if texts != [] else []
            parts += [f"{self._opening(key, False)} ({others}) {closing}"] if others else []
            return f"({' | '.join(parts)})" if parts else self._opening(key, True) + closing
        opening = self._opening(key, False)
        if texts is None:  # any text: the reader finds what it is
            return f"{opening} {until_closing}"
        return f"{opening} ({' | '.join(filter(None, (named, others)))}) {closing}"

    def _others(self, schema: Any) -> str:
        """Write what a value can be that is no string; empty: nothing."""
        kinds = NO_TEXT - {"boolean", "null"} if self._form.has_words else NO_TEXT
        part = self._kinds.narrowed(schema, kinds)
        parts = [] if part is None else [self.json(part)]
        if self._form.has_words:
            parts += _words(self._kinds, schema)
        return " | ".join(parts)

    def any_member(self) -> str:
        before, _, behind = self._form.opening.replace("$string", "true").partition("$key")
        ends = (literal(self._rules.dialect, part) for part in (before, behind))
        text = self._rules.text_until(self._form.closing)
        return f"{next(ends)} {_WORD} {next(ends)} {text}"

    def _opening(self, key: str, is_string: bool) -> str:
        said = self._form.opening.replace("$key", key)
        return literal(self._rules.dialect, said.replace("$string", str(is_string).lower()))


class _Python(_Writer):
    """Members as arguments of a Python call, with values as Python writes them."""

    def member(self, name: str, key: str, schema: Any) -> str:
        return f"{_quoted(f'{key}=')} {self._value(f'{name}_v', schema)}"

    def any_member(self) -> str:
        return f'{_WORD} "=" {self._anything()}'

    def _value(self, name: str, schema: Any) -> str:
        if not isinstance(schema, Mapping) or not (schema.get("type") or _is_bound(schema)):
            return self._anything()
        scalars = self._kinds.narrowed(schema, frozenset(("string", "number")))
        parts = [] if scalars is None else [self.json(scalars)]
        parts += _words(self._kinds, schema)
        parts += self._nested(name, schema)
        return f"({' | '.join(parts)})" if parts else self.json(schema)

    def _array(self, name: str, schema: Mapping[str, Any]) -> str:
        self._anything()
        if _is_bound(schema):
            return "any_list"
        self._rules.add(f"{name}_i", self._value(f"{name}_i_v", schema.get("items")))
        return f'"[" ({name}_i (", " {name}_i)*)? "]"'

    def _object(self, name: str, schema: Mapping[str, Any]) -> str:
        self._anything()
        if _is_bound(schema):
            return "any_map"
        inside = _Keyed(self._rules, self._root, self).members(name, schema)
        return f'"{{" {inside} "}}"'

    def _anything(self) -> str:
        rules = self._rules
        text, number = schema_json({"type": "string"}), schema_json({"type": "number"})
        words = '"True" | "False" | "None"'
        rules.add("any", f"%json {text} | %json {number} | {words} | any_list | any_map")
        rules.add("any_list", '"[" (any (", " any)*)? "]"')
        rules.add("any_pair", f'%json {text} ": " any')
        rules.add("any_map", '"{" (any_pair (", " any_pair)*)? "}"')
        return "any"


class _Keyed(_Writer):
    """Members of an object inside of Python arguments: with quotes around keys."""

    def __init__(self, rules: Rules, root: Mapping[str, Any], values: _Python) -> None:
        super().__init__(rules, root)
        self._values = values

    def member(self, name: str, key: str, schema: Any) -> str:
        return f"{_quoted(f'{json.dumps(key)}: ')} {self._values._value(f'{name}_v', schema)}"

    def any_member(self) -> str:
        return f'%json {schema_json({"type": "string"})} ": " {self._values._anything()}'


class _Bare(_Writer):
    """Members as bare keys with values, strings between quotes of the dialect's own."""

    separator = ","

    def __init__(self, rules: Rules, root: Mapping[str, Any], form: BareArguments) -> None:
        super().__init__(rules, root)
        self._form = form

    def member(self, name: str, key: str, schema: Any) -> str:
        return f"{_quoted(f'{key}:')} {self._value(f'{name}_v', schema)}"

    def any_member(self) -> str:
        return f'{_WORD} ":" {self._anything()}'

    def _value(self, name: str, schema: Any) -> str:
        if not isinstance(schema, Mapping) or not schema:
            return self._anything()
        texts = self._kinds.texts(schema)
        parts = [self._text()] if texts is None else [self._string(_quoted(one)) for one in texts]
        scalars = self._kinds.narrowed(schema, frozenset(("number", "boolean", "null")))
        parts += [] if scalars is None else [self.json(scalars)]
        parts += self._nested(name, schema)
        return f"({' | '.join(parts)})" if parts else self._anything()

    def _array(self, name: str, schema: Mapping[str, Any]) -> str:
        self._anything()
        if _is_bound(schema):
            return "bare_array"
        self._rules.add(f"{name}_i", self._value(f"{name}_i_v", schema.get("items")))
        return f'"[" ({name}_i ("," {name}_i)*)? "]"'

    def _object(self, name: str, schema: Mapping[str, Any]) -> str:
        self._anything()
        return "bare_object" if _is_bound(schema) else f'"{{" {self.members(name, schema)} "}}"'

    def _string(self, inside: str) -> str:
        quote = literal(self._rules.dialect, self._form.quote)
        return f"{quote} {inside} {quote}"

    def _text(self) -> str:
        quote = self._form.quote
        return f"{literal(self._rules.dialect, quote)} {self._rules.text_until(quote)}"

    def _anything(self) -> str:
        rules = self._rules
        scalar = schema_json({"type": ["number", "boolean", "null"]})
        rules.add("bare", f"{self._text()} | %json {scalar} | bare_object | bare_array")
        rules.add("bare_array", '"[" (bare ("," bare)*)? "]"')
        rules.add("bare_pair", f'{_WORD} ":" bare')
        rules.add("bare_object", '"{" (bare_pair ("," bare_pair)*)? "}"')
        return "bare"


def _words(kinds: SchemaKinds, schema: Any) -> list[str]:
    """Write the values of a schema that Python writes in words."""
    return [_quoted(repr(word)) for word in (True, False, None) if kinds.takes(schema, word)]


def _is_bound(schema: Any) -> bool:
    """Return true if a schema says anything of its values."""
    said = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref", "not")
    return isinstance(schema, Mapping) and any(key in schema for key in said)


def _quoted(text: str) -> str:
    return json.dumps(text)
