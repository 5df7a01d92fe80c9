"""Policies of growing tables as options write them: KIND:VALUE,NAME=VALUE…, such as min_count:5,forget_after=7d."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import cast

from elasticps.errors import SpecError
from elasticps.model.policies import ADMISSIONS, EVICTIONS, Admission, Eviction, Policy

NONE = "none"


def read_admission(text: str) -> Admission | None:
    """The admission policy that an option names, None for "none". SpecError for any other text."""
    return None if text == NONE else cast(Admission, _read(text, ADMISSIONS, "admission"))


def read_evictions(texts: Sequence[str]) -> list[Eviction]:
    """The eviction policies that options name; "none" adds none. SpecError for any other text."""
    return [cast(Eviction, _read(text, EVICTIONS, "eviction")) for text in texts if text != NONE]


def shown(policies: Sequence[Policy | None]) -> str:
    """Policies as options write them."""
    return " ".join(_text(policy) for policy in policies if policy is not None) or NONE


def _text(policy: Policy) -> str:
    first, *more = fields(policy)  # type: ignore[arg-type]
    values = [(field.name, getattr(policy, field.name), field.default) for field in more]
    others = [f",{name}={value}" for name, value, default in values if value != default]
    return f"{policy.kind}:{getattr(policy, first.name)}{''.join(others)}"


def _read(text: str, known: Mapping[str, type[Policy]], what: str) -> Policy:
    kind, _, rest = text.partition(":")
    cls = known.get(kind)
    if cls is None:
        raise SpecError(f"unknown {what} policy {kind!r}; it is one of {', '.join(known)} or {NONE}, got {text!r}")
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    given: dict[str, object] = {}
    for place, part in enumerate(rest.split(",") if rest else []):
        name, equals, value = part.partition("=")
        if not equals:
            name, value = names[0], part
        if name not in names or name in given or (not equals and place):
            example = f"{kind}:{names[0].upper()}" + "".join(f",{each}=…" for each in names[1:])
            raise SpecError(f"{what} {text!r}: {part!r} says nothing of {kind}; write {example}")
        given[name] = _value(value)
    if names[0] not in given:
        raise SpecError(f"{what} {text!r}: {kind} needs {names[0]}, as in {kind}:VALUE")
    return cls(**given)


def _value(text: str) -> object:
    if text == NONE:
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
