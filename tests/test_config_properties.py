"""The configuration, in properties: what is written reads back the same, what is wrong gets one line."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.errors import ConfigError
from omnireduce.support.config import Config, check_config, dump_config, load_config, override_config
from omnireduce.support.config.validation import KEYS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "my.toml"


def loading(path: Path | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
    """The message of the error that loading raises, or "" if it raises none."""
    try:
        load_config(path, overrides=overrides, environ=environ or {})
    except ConfigError as error:
        return str(error)
    return ""


def overriding(values: Mapping[str, object]) -> tuple[Config, str]:
    """The default configuration with `values`, and ""; where they are refused, without them, and why."""
    try:
        return override_config(Config(), values, source="test"), ""
    except ConfigError as error:
        return Config(), str(error)


TLS = ("tls_certificate", "tls_key", "tls_ca")
ADDRESSES = ("cluster.aggregators", "aggregator.upstream")  # each may stand there once
FILES = [f"security.{name}" for name in ("secret_file", "teams_folder", *TLS)]
FILES += [f"metrics.{name}" for name in ("token_file", *TLS)]
TEXTS = {
    "cluster.job": r"[A-Za-z0-9._:@+-]{1,128}",
    "cluster.launch": r"[A-Za-z0-9._:@+-]{0,128}",
    "verbs.device": r"[A-Za-z0-9_.-]{1,64}",
    "security.team": r"[A-Za-z0-9_-]{0,64}",
    "protocol.codec": r"none|int8|[a-z_][a-z0-9_.]{0,20}:[A-Za-z_][A-Za-z0-9_]{0,20}",
    "aggregator.codecs": r"[a-z_][a-z0-9_.]{0,20}:[A-Za-z_][A-Za-z0-9_]{0,20}",
    **dict.fromkeys(FILES, r"[^\x00-\x1f\x7f-\xa0\xad\ud800-\udfff\"\\]{0,40}"),
}


def values_of(hint: Any, path: str) -> st.SearchStrategy[Any]:
    """Every value that a key's type allows."""
    limits: dict[str, Any] = {}
    if get_origin(hint) is Annotated:
        hint, *metas = get_args(hint)
        limits = {name: getattr(meta, name) for meta in metas for name in ("ge", "le", "multiple_of")}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        items = values_of(arguments[0], path)
        return st.lists(items, min_size=1, max_size=5, unique=path in ADDRESSES).map(tuple)
    if arguments:
        return st.one_of([values_of(argument, path) for argument in arguments])
    if path in TEXTS:
        return st.from_regex(TEXTS[path], fullmatch=True)
    if hint is bool:
        return st.booleans()
    if hint is str:
        return st.builds("{}:{}".format, st.sampled_from(["host", "[::1]"]), st.integers(1, 65535))
    if hint is float:
        return st.floats(limits["ge"], limits["le"])
    step = limits["multiple_of"] or 1
    return st.integers(-(-limits["ge"] // step), limits["le"] // step).map(lambda count: int(count * step))


PATHS = st.sampled_from(sorted(KEYS))
ALLOWED = st.fixed_dictionaries({}, optional={path: values_of(key.type, path) for path, key in KEYS.items()})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.dates()
    | st.just(datetime.datetime(2000, 1, 1))
    | st.sampled_from(["auto", "sum", "[::1]:1", 0, 8, 256, 65536, 0.5])
)
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(values=ALLOWED)
def test_written_configuration_reads_back_equal(file: Path, values: dict[str, Any]) -> None:
    config, message = overriding(values)
    # Only together can they be wrong, or by what this host lacks.
    assert not message or any(reason in message for reason in (" because ", " shards", "no home folder"))
    file.write_text(dump_config(config))
    assert load_config(file, environ={}) == config
    assert check_config(config) == config


@given(path=PATHS, value=ANYTHING)
def test_any_value_is_read_or_refused_in_one_line(path: str, value: object) -> None:
    config, message = overriding({path: value})
    assert check_config(config) == config
    assert message.isprintable()
    assert not message or (message.startswith(f"test: {path}: got ") and ", expected " in message)


@given(path=PATHS, text=st.text() | ANYTHING.map(str))
def test_any_text_is_read_or_refused_in_one_line(path: str, text: str) -> None:
    variable = f"OMNIREDUCE_{path}".upper().replace(".", "_")
    by_option = loading(overrides=[f"{path}={text}"])
    by_variable = loading(environ={variable: text})
    assert by_option.isprintable()
    assert not by_option or by_option.startswith(f"--set: {path}: got ")
    assert by_variable == by_option.replace("--set", variable, 1)


@given(name=st.text(), section=st.sampled_from(["", "protocol.", "PROTOCOL_"]))
def test_any_name_is_known_or_refused_in_one_line(name: str, section: str) -> None:
    for message in (
        loading(overrides=[f"{section}{name}=1"]),
        loading(environ={f"OMNIREDUCE_{section}{name}": "1"}),
    ):
        assert message.isprintable()


@given(content=st.binary() | st.text().map(lambda text: f"[protocol]\n{text}".encode(errors="replace")))
def test_any_file_is_read_or_refused_in_one_line(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    message = loading(file)
    assert message.isprintable()
    assert not message or message.startswith(f"{file}: ")
