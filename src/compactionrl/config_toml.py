"""A configuration as commented TOML, and command-line values as the configuration understands them."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from compactionrl.config import Config, ConfigError

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump(config: Config) -> str:
    """All keys with their descriptions as comments. `load_config` of the text gives an equal configuration."""
    lines = ["# Every key, its meaning and its value here. TOML has no null: a commented key is not set."]
    for name in Config.model_fields:
        section: BaseModel = getattr(config, name)
        lines += ["", f"[{name}]"]
        for key, info in type(section).model_fields.items():
            lines += [*comment(info), assignment(key, getattr(section, key))]
    return "\n".join(lines) + "\n"


def comment(field: FieldInfo) -> list[str]:
    return textwrap.wrap(field.description or "", width=118, initial_indent="# ", subsequent_indent="# ")


def assignment(key: str, value: Any) -> str:
    return f"# {key} =" if value is None else f"{key} = {toml(value)}"


def toml(value: Any) -> str:
    """One TOML value on one line."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            # JSON's escapes are TOML's, except that JSON leaves DEL as it is.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            inside = ", ".join(f"{bare_or_quoted(key)} = {toml(item)}" for key, item in value.items())
            return f"{{ {inside} }}" if value else "{}"
    raise ConfigError(f"{value!r} cannot be written as TOML: use text, numbers, true, false, lists and tables")


def bare_or_quoted(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else toml(key)


def parse_value(key: str, text: str) -> Any:
    """What `--key text` means: text for a key that holds text, otherwise a TOML value, or text where it is none.

    A list may also be written with commas alone: x1,x4.
    """
    kind = field_type(key)
    if kind is str:
        return text
    if get_origin(kind) is list and not text.startswith("["):
        return text.split(",")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def field_type(key: str) -> Any:
    """The annotation of a dotted key; None for an unknown key and below free-form tables."""
    annotation: Any = Config
    for part in key.split("."):
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel) and part in annotation.model_fields):
            return None
        annotation = annotation.model_fields[part].annotation
    return annotation
