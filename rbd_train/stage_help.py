"""What `rbd --help` and `rbd <stage> --help` print: every stage, and every key with its default and its comment."""

import ast
import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rbd_train.app import STAGES, BaseConfig, Stage
from rbd_train.config import choices, compose_defaults, data_dir, field_help, locate
from rbd_train.sweep import SweepConfig


def overview() -> str:
    """Return all stages, each with the first line of its module."""
    lines = ["rbd <stage> key=value ...   (rbd <stage> --help lists the keys; -m sweeps over a,b,c)", ""]
    lines += [f"  {name:<12} {_first_docline(module)}" for name, module in STAGES.items()]
    return "\n".join(lines)


def _first_docline(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return (ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or "").split("\n", 1)[0]


def stage_help(chosen: Stage, slots: Sequence[str]) -> str:
    """Return a stage's keys; `slots` are overrides that choose what stands in a slot, such as judge=planted."""
    module = sys.modules[chosen.function.__module__]
    lines = [(module.__doc__ or "").strip(), "", "Keys:"]
    defaults = compose_defaults(chosen.name, slots)
    helps = field_help(BaseConfig) | field_help(chosen.config)
    for field in dataclasses.fields(chosen.config):
        key = "from" if field.name == "from_" else field.name
        value = defaults.get(key)
        if isinstance(value, Mapping) and "_target_" in value:
            group = key if (data_dir("conf") / key).is_dir() else "engine"
            lines.append(f"  {key:<16} {helps.get(field.name, '')}; choices: {', '.join(choices(group))}")
            lines += _slot_help(key, value)
        elif dataclasses.is_dataclass(field.type) and isinstance(value, Mapping):
            lines.append(f"  {key:<16} {helps.get(field.name, '')}")
            inner = field_help(field.type)  # type: ignore[arg-type]
            lines += [f"    {f'{key}.{k}={v}':<36} {inner.get(k, '')}" for k, v in value.items()]
        else:
            lines.append(f"  {f'{key}={value}':<38} {helps.get(field.name, '')}")
    lines += ["", "With -m, a sweep:"]
    lines += [
        f"  {f'sweep.{f.name}={f.default}':<38} {field_help(SweepConfig)[f.name]}"
        for f in dataclasses.fields(SweepConfig)
    ]
    return "\n".join(lines)


def _slot_help(prefix: str, value: Mapping[str, Any]) -> list[str]:
    helps = field_help(locate(str(value["_target_"])))
    lines = []
    for key, entry in value.items():
        if isinstance(entry, Mapping) and "_target_" in entry:
            lines.append(f"    {prefix}.{key}: engine; choices: {', '.join(choices('engine'))}")
            lines += _slot_help(f"{prefix}.{key}", entry)
        elif key != "_target_":
            lines.append(f"    {f'{prefix}.{key}={entry}':<36} {helps.get(key, '')}")
    return lines
