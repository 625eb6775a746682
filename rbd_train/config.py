"""From YAML and `key=value` words to typed, checked config objects; every fault names the key and the way out."""

import dataclasses
import difflib
import importlib
import inspect
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rbd_train.errors import UsageError
from rbd_train.manifest import flat


def data_dir(name: str) -> Path:
    """Return the folder `conf` or `launch`: inside the package in a wheel, beside it in a checkout."""
    packaged = Path(__file__).parent / name
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / name


def compose(stage: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose `conf/<stage>.yaml` with overrides into a plain, resolved dictionary.

    Raises:
        UsageError: a word that can't be parsed, a key or choice that isn't there, a value that is missing.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # an experiment sets keys of the whole config; said here, since hydra wants it in a file's first line
    overrides = [re.sub("^experiment=", "experiment@_global_=", word) for word in overrides]
    for word in overrides:
        if word.lstrip("+~").startswith(("hydra.", "hydra/")):  # composing, Hydra takes it and does nothing with it
            raise UsageError(
                f"{word}: Hydra composes the config, but rbd runs the stage; there is no key of Hydra's own"
            )
    with initialize_config_dir(config_dir=str(data_dir("conf")), version_base="1.3"):
        try:
            composed = hydra_compose(stage, overrides=list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise UsageError(_explain(stage, overrides, error)) from error
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise UsageError(f"{missing[0]} has no value; set {missing[0]}=...")
    try:
        container = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UsageError(_first_line(error)) from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def slot(word: str, *overrides: str) -> Any:
    """Build what a word of the command line names, for use from Python.

    `slot("judge=generative", "engine@judge.engine=http", "judge.engine.model=gpt-4o").open(ledger)` is the judge that
    `rbd judgements` opens for the same words.

    Raises:
        UsageError: as `compose` and `build`.
    """
    group = word.split("=", 1)[0]
    values = compose("base", [f"+{word}", *overrides])[group]
    return build(locate(str(values["_target_"])), values, f"{group}.")


def build(kind: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Build a config dataclass, slots with `_target_` included.

    Raises:
        UsageError: an unknown key (with the nearest valid one), a wrong type, or a value that is missing.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {key: value for key, value in values.items() if key != "_target_"}
    for key in values:
        if key not in fields:
            raise UsageError(unknown_key(f"{prefix}{key}", [f"{prefix}{_typed(name)}" for name in fields]))
    hints = typing.get_type_hints(kind)
    slots = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and "_target_" in value:
            slots[key] = build(locate(str(value["_target_"])), value, f"{prefix}{key}.")
        else:
            _refuse_misread(f"{prefix}{_typed(key)}", hints[key], value)
    try:
        plain = {key: value for key, value in values.items() if key not in slots}
        merged: Any = OmegaConf.merge(OmegaConf.structured(kind), plain)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "")
        wanted = "must be a list, written [a,b]; " if "ListConfig" in str(error) else ""
        raise UsageError(f"{prefix}{_typed(key)}: {wanted}{_first_line(error)}") from error
    for name in fields:
        if name not in slots and OmegaConf.is_missing(merged, name):
            raise UsageError(f"{prefix}{_typed(name)} has no value; set {prefix}{_typed(name)}=...")
    made = {}
    for name in fields:
        value = merged[name] if name not in slots else slots[name]
        made[name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
    return kind(**made)


def _typed(name: str) -> str:
    return "from" if name == "from_" else name


def unknown_key(key: str, valid: Sequence[str]) -> str:
    """Say that a key isn't there, and which one may be meant."""
    near = difflib.get_close_matches(key, valid, 1, 0.5) or difflib.get_close_matches(
        key.rsplit(".", 1)[-1], [name.rsplit(".", 1)[-1] for name in valid], 1, 0.5
    )
    meant = [name for name in valid if name == near[0] or name.endswith("." + near[0])] if near else []
    hint = f"; did you mean {meant[0]}?" if meant else f"; valid keys: {', '.join(valid[:40])}"
    return f"there is no key {key}{hint}"


def field_help(kind: type) -> dict[str, str]:
    """Read the comment beside each field of a config dataclass: the one place where a field is described."""
    comments: dict[str, str] = {}
    for line in inspect.getsource(kind).splitlines():
        match = re.match(r"    (\w+): [^#]*#\s*(.*)$", line)
        if match:
            comments[match[1]] = match[2]
    return comments


def choices(group: str) -> list[str]:
    """List the choices of a config group."""
    return sorted(path.stem for path in (data_dir("conf") / group).glob("*.yaml"))


def locate(target: str) -> type:
    """Import the config dataclass that a `_target_` names.

    Raises:
        UsageError: it can't be imported or is no dataclass.
    """
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"_target_ {target!r} can't be imported: {error}") from error
    if not dataclasses.is_dataclass(found):
        raise UsageError(f"_target_ {target!r} is not a config dataclass")
    return typing.cast(type, found)


def _refuse_misread(key: str, hint: Any, value: Any) -> None:
    """Refuse numbers that are none, and YAML's readings of unquoted text, at any depth: Yes is a boolean, 012 is 10."""
    inner = typing.get_args(hint)
    if isinstance(value, list) and typing.get_origin(hint) is list:
        for part in value:
            _refuse_misread(key, inner[0], part)
    elif isinstance(value, Mapping) and typing.get_origin(hint) is dict:
        for name, part in value.items():
            _refuse_misread(f"{key}.{name}", inner[1], part)
    elif isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        for name in value.keys() & hints.keys():
            _refuse_misread(f"{key}.{name}", hints[name], value[name])
    elif isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{key} is {value}; it must be a finite number")
    elif (hint is str or (str in inner and type(None) in inner)) and not isinstance(value, str | list | Mapping | None):
        raise UsageError(
            f"{key} must be text, got {value!r} ({type(value).__name__}): "
            f'quote it, in YAML "{value}", at the command line \'{key}="{value}"\''
        )


def _explain(stage: str, overrides: Sequence[str], error: Exception) -> str:
    text = str(error)
    word = getattr(error, "override", None)  # of hydra's parser, whose own text often leaves it out
    if word is not None or "LexerNoViableAltException" in text or "Error parsing override" in text:
        found = re.search(r"(?:Error parsing override '|LexerNoViableAltException: )(.*?)'?$", text, re.MULTILINE)
        return (
            f"can't parse {word or (found[1] if found else text)!r}: write key=value; a value with spaces, commas, "
            "quotes, =, < or other than plain letters needs quotes of its own inside the shell's, for example "
            "'key=\"a, b\"'; long texts belong in files"
        )
    absent = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text)
    if absent:
        key = absent[1] or absent[2]
        full = next((w.split("=", 1)[0] for w in overrides if w.split("=", 1)[0].endswith(key)), key)
        slots = [word for word in overrides if (data_dir("conf") / word.split("=", 1)[0].split("@", 1)[0]).is_dir()]
        full, valid = full.lstrip("+~"), list(flat(compose_defaults(stage, slots)))
        if full in valid:  # a mapping without entries takes new ones by +
            return f"{full} has no such entry yet; add it by +{full}.<name>=<value>"
        return unknown_key(full, valid)
    group = re.search(r"Could not find '([\w@.]+)/([^']+)'", text) or re.search(
        r"In '[^']*': Could not find '(\w+)/([^']+)'", text
    )
    if group:
        name = group[1].split("@", 1)[0]
        near = difflib.get_close_matches(group[2], choices(name), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        return f"{name} has no choice {group[2]!r}{meant}; choices: {', '.join(choices(name))}"
    if "Ambiguous value for argument" in text or "sweep" in text.casefold():
        return f"{_first_line(error)} (several values need -m, a list is written [a,b])"
    return _first_line(error)


def compose_defaults(stage: str, slots: Sequence[str] = ()) -> dict[str, Any]:
    """Compose a stage with no override but the choices of its slots, unresolved, to list its keys."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(data_dir("conf")), version_base="1.3"):
        container = OmegaConf.to_container(hydra_compose(stage, overrides=list(slots)), resolve=False)
    return {str(k): v for k, v in container.items()} if isinstance(container, dict) else {}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
