"""Configuration: one frozen tree, decoded from vLLM's `kv_connector_extra_config`.

What cannot be right is a `ConfigError` that names the key, its value, what was expected and the
nearest valid name; nothing is guessed and nothing is ignored. Fields are of two scopes: *cluster*
fields must be equal in all engines that share a store, *process* fields are tuning of one process.
The reference page docs/configuration.md is generated from this class.

This is also the only module that looks at the environment and at the user's folders.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvferry import server_url
from kvferry.errors import ConfigError
from kvferry.setting_values import parse_size, unknown_key, wrong

PAGES_SCHEMES = ("posix", "usrbio", "memory")
CATALOG_SCHEMES = ("lmdb", "valkey", "memory")
_URL_FORMS = {"memory": "memory:", "valkey": server_url.FORM}

SECRET_VARIABLE = "KVFERRY_TRANSFER_SECRET"
VIEW_TOKEN_VARIABLE = "KVFERRY_VIEW_TOKEN"
CATALOG_PASSWORD_VARIABLE = "KVFERRY_CATALOG_PASSWORD"

cluster = partial(Meta, extra={"scope": "cluster"})
process = partial(Meta, extra={"scope": "process"})

_Bytes = Annotated[int, Meta(ge=4096, le=1 << 60)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
_Threads = Annotated[int, Meta(ge=1, le=64)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Tokens = Annotated[int, Meta(ge=1, le=1 << 16)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the offload connector in one process. Made by `decode`; immutable."""

    pages: Annotated[
        str | list[str],
        process(
            description="URL of the page store: `posix:///path` (a folder on any file system that"
            " all engines see), `usrbio:///path` (a folder on 3FS, by its own interface)"
            " or `memory:` (this process only, for tests). Or a list of `posix:` URLs: one store"
            " over several mounts, the first of which must always be there."
        ),
    ]
    capacity_bytes: Annotated[
        _Bytes | None,
        cluster(
            description="Hard budget of the store. Needed to create it; afterwards it may be left"
            " out, and must agree if given (`kvferry resize` changes it)."
        ),
    ] = None
    catalog: Annotated[
        str | None,
        cluster(
            description="URL of the catalog: `lmdb:///path` (a folder on a local disk of the one"
            " host), `valkey://[user:password@]host:port[/database]` for engines on many hosts"
            " (`valkeys://` with TLS, `?ca_file=/path` for an authority of your own; the password"
            " may be in the environment variable `KVFERRY_CATALOG_PASSWORD` instead) or `memory:`."
            " Default: an LMDB in"
            " `$XDG_STATE_HOME/kvferry/<store id>`, or `~/.local/state` where that is not set."
        ),
    ] = None
    eviction: Annotated[
        Literal["adaptive", "lru"],
        cluster(
            description="Which pages give way first: `adaptive` keeps longer what was used again,"
            " and learns how much longer; `lru` looks at the last use only. May be changed at any"
            " start."
        ),
    ] = "adaptive"
    chunk_tokens: Annotated[
        _Tokens | None,
        cluster(
            description="Tokens in one chunk, a multiple of vLLM's block size. Default: the"
            " smallest power of two for which one head's part has 1 MiB, at most 256."
        ),
    ] = None
    model_id: Annotated[
        _Name | None,
        cluster(
            description="Name of the model in the store's keys. Default: derived from the model's"
            " commit or files. Set it only if you know that the bytes are interchangeable."
        ),
    ] = None
    weights_id: Annotated[
        _Name | None,
        cluster(
            description="Name of the weights after an update in a running engine. Without it, what"
            " is computed after an update stays private to that engine."
        ),
    ] = None
    tenant: Annotated[
        str,
        process(
            max_length=256,
            description="Whose pages this engine stores: written into each, and what the quotas of"
            " `kvferry limit` are about. Loads do not ask for it; to keep tenants from finding"
            " what others stored, give requests a `cache_salt`.",
        ),
    ] = ""
    alignment_bytes: Annotated[
        _Bytes,
        cluster(
            description="Where slots may start: a power of two, at least 4096. Raise it to the"
            " block size of the file system (3FS: its chunk size). Fixed when the store is made."
        ),
    ] = 4096
    segment_bytes: Annotated[
        _Bytes | None,
        cluster(
            description="Length of a segment file, a multiple of `alignment_bytes`. Default: by"
            " capacity. Fixed when the store is made."
        ),
    ] = None
    direct_io: Annotated[
        Literal["auto", "on", "off"],
        process(
            description="Bypass the page cache: `auto` where the file system can, `on` refuses to"
            " start where it cannot, `off` never."
        ),
    ] = "auto"
    usrbio_library: Annotated[
        _Name | None,
        process(
            description="Path of `libhf3fs_api_shared.so`, for `usrbio:`. Default: where the loader"
            " finds it, or `/usr/lib`, `/usr/local/lib`, `/opt/3fs/lib`."
        ),
    ] = None
    staging_bytes: Annotated[
        int,
        process(
            ge=1 << 20,
            le=1 << 44,
            description="Memory of each worker between engine and storage: bounds the bytes in"
            " flight.",
        ),
    ] = 256 << 20
    gpu_buffer_bytes: Annotated[
        int,
        process(
            ge=1 << 20,
            le=1 << 40,
            description="GPU memory of each worker between the KV cache and staging. Four pages"
            " must fit into it.",
        ),
    ] = 256 << 20
    read_threads: Annotated[
        _Threads | None,
        process(
            description="Threads that read pages; a third of them while the engine computes, where"
            " they copy from the page cache. Default: three for four cores, 4 to 16."
        ),
    ] = None
    write_threads: Annotated[
        _Threads | None,
        process(
            description="Threads that write pages. Default: one for two cores, 1 (with direct I/O"
            " 4) to 8."
        ),
    ] = None
    copy_threads: Annotated[
        _Threads, process(description="Threads that copy between engine memory and staging.")
    ] = 1
    lookup_deadline_s: Annotated[
        Seconds,
        process(description="A lookup that has no answer by then is a miss."),
    ] = 0.5
    load_deadline_s: Annotated[
        Seconds,
        process(description="A load that is not complete by then is given up and recomputed."),
    ] = 10.0
    store_deadline_s: Annotated[
        Seconds,
        process(description="A store that is not on storage by then is dropped."),
    ] = 30.0
    reservation_lease_s: Annotated[
        Seconds,
        process(
            description="How long a reserved slot is held for its writer; at least twice"
            " `store_deadline_s`, since a slot is used only while a store surely ends in time."
            " After a crash the slot is free again after this time and `grace_s`."
        ),
    ] = 60.0
    grace_s: Annotated[
        float,
        process(
            ge=0,
            le=86400,
            description="How long an evicted slot is not reused, for readers that are under way.",
        ),
    ] = 10.0
    reserve_ahead_count: Annotated[
        int,
        process(ge=1, le=65536, description="Slots reserved ahead, so that no store waits."),
    ] = 64
    load_tokens_min: Annotated[
        int,
        process(ge=0, le=1 << 30, description="A hit of fewer tokens is computed, not loaded."),
    ] = 0
    cost_model: Annotated[
        bool,
        process(
            description="Skip loads that by measurement would be slower than computing the tokens."
        ),
    ] = True
    allow_failed_requests: Annotated[
        bool,
        process(
            description="Start although `kv_load_failure_policy` is `fail`: a page that cannot be"
            " loaded then fails its request."
        ),
    ] = False
    allow_weight_updates: Annotated[
        bool,
        process(
            description="Start although `weight_transfer_config` is set: whoever updates weights"
            " then resets with `reset_connector=True` or pauses with the cache cleared. Without"
            " that, KV of the old weights is served."
        ),
    ] = False
    failed_key_ttl_s: Annotated[
        Seconds,
        process(description="A page that failed to load is not offered again for this time."),
    ] = 30.0

    @property
    def roots(self) -> tuple[str, ...]:
        """The URLs in `pages`."""
        return (self.pages,) if isinstance(self.pages, str) else tuple(self.pages)

    @property
    def home(self) -> str:
        """The first of `roots`: where the superblock and the owner's word are."""
        return self.roots[0]

    def catalog_url(self, store_id: bytes) -> str:
        """Where the catalog of the opened store is. `store_id`: from the store's superblock."""
        if self.catalog is not None:
            return self.catalog
        if split_url(self.home).scheme == "memory":
            return "memory:"
        return f"lmdb://{state_folder() / store_id.hex()}"


class FieldFacts(NamedTuple):
    """What the reference page says of one field."""

    name: str
    kind: str
    default: str
    scope: str
    description: str


class Url(NamedTuple):
    """A backend and where it is. `path` is absolute, or empty for `memory:`."""

    scheme: str
    path: str


def decode(options: Mapping[str, Any]) -> Config:
    """`kv_connector_extra_config` to `Config`. Raises ConfigError, see the module."""
    values = decode_fields(options, Config)
    if "pages" not in values:
        raise ConfigError(
            "config.missing",
            'pages is missing: where the pages are, such as "posix:///var/kv"',
            key="pages",
        )
    config = Config(**values)
    _check(config)
    return config


def decode_fields(options: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The values that are set, each by itself as its type says. Raises ConfigError."""
    if not isinstance(options, Mapping):
        raise wrong("kv_connector_extra_config", options, "an object")
    types = {field.name: field for field in _settable(kind)}
    for name, value in options.items():
        if name not in types:
            raise unknown_key(name, value, list(types))
    return {name: _convert(name, value, types[name].type) for name, value in options.items()}


def field_facts(kind: type[msgspec.Struct] = Config) -> list[FieldFacts]:
    """All fields, in the order of the class."""
    return [_facts(kind, field) for field in _settable(kind)]


def transfer_secret(file: str | None) -> bytes:
    """What a file holds, or else the environment, without white space around it; empty if neither
    does. Raises ConfigError if the file cannot be read."""
    return _secret("secret_file", file, SECRET_VARIABLE)


def view_token(file: str | None) -> bytes:
    """The same for what `kvferry exporter` and `kvferry dashboard` ask for."""
    return _secret("token_file", file, VIEW_TOKEN_VARIABLE)


def _secret(name: str, file: str | None, variable: str) -> bytes:
    if file is None:
        return os.environb.get(variable.encode(), b"").strip()
    try:
        return Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"config.{name}", f"{name}={file!r} cannot be read: {error}", key=name
        ) from error


def catalog_password() -> str | None:
    """Of the catalog's server, where its URL has none."""
    return os.environ.get(CATALOG_PASSWORD_VARIABLE) or None


def split_url(url: str) -> Url:
    """`posix:///var/kv` to ("posix", "/var/kv"); `memory:` to ("memory", "")."""
    scheme, _, rest = url.partition(":")
    return Url(scheme, rest.removeprefix("//"))


def state_folder() -> Path:
    """Where embedded catalogs lie by default. It need not exist."""
    return _user_folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """Where what can be made again lies (the demo's converted model). It need not exist."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def enabled_plugins() -> list[str] | None:
    """The plugins that vLLM may load, by its own variable; None: all."""
    names = os.environ.get("VLLM_PLUGINS")
    return None if names is None else [name.strip() for name in names.split(",")]


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a child process."""
    return {**os.environ, **changes}


def default_variable(name: str, value: str) -> None:
    """For libraries that look at this process's environment. What the operator has set stays."""
    os.environ.setdefault(name, value)


def _user_folder(variable: str, below_home: str) -> Path:
    named = os.environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named, "kvferry")
    try:
        return Path.home() / below_home / "kvferry"
    except RuntimeError:
        raise ConfigError(
            "config.no_home", f"no home folder: set {variable} to an absolute path"
        ) from None


def _convert(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, str) and _is_size(name):
        value = parse_size(name, value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise wrong(name, value, _expected(kind, str(error)), value, _choices(kind)) from None


def _is_size(name: str) -> bool:
    return name.endswith(("_bytes", "_bytes_max"))


def _choices(kind: Any) -> tuple[str, ...]:
    plain = get_args(kind)[0]
    return get_args(plain) if get_origin(plain) is Literal else ()


def _expected(kind: Any, message: str) -> str:
    """From msgspec's "Expected `int` >= 1" or "Expected `float`, got `str`"."""
    if choices := _choices(kind):
        return " or ".join(f'"{choice}"' for choice in choices)
    return message.removeprefix("Expected ").partition(", got")[0].replace("`", "")


def _check(config: Config) -> None:
    """What one field's type cannot say."""
    _check_pages(config)
    if config.catalog is not None:
        _check_catalog(config.catalog)
    alignment = config.alignment_bytes
    if alignment & (alignment - 1) or alignment > 1 << 30:
        raise wrong("alignment_bytes", alignment, "a power of two, 4096 to 1 GiB")
    segment = config.segment_bytes
    if segment is not None and (segment % alignment or segment < 2 * alignment):
        raise wrong("segment_bytes", segment, f"a multiple of {alignment}, at least two of them")
    capacity = config.capacity_bytes
    if capacity is not None and capacity < (segment or 2 * alignment):
        raise wrong("capacity_bytes", capacity, "at least one segment")
    if config.reservation_lease_s < 2 * config.store_deadline_s:
        expected = f"at least twice store_deadline_s ({config.store_deadline_s})"
        raise wrong("reservation_lease_s", config.reservation_lease_s, expected)


def _check_pages(config: Config) -> None:
    if not config.pages:
        raise wrong("pages", config.pages, 'a URL such as "posix:///var/kv", or several')
    for url in config.roots:
        _check_url("pages", url, PAGES_SCHEMES)
    folders = {os.path.normpath(split_url(url).path) for url in config.roots}
    are_posix = all(split_url(url).scheme == "posix" for url in config.roots)
    if len(config.roots) > 1 and not (are_posix and len(folders) == len(config.roots)):
        raise wrong("pages", config.pages, "a list of posix:// URLs of different folders")


def _check_catalog(url: str) -> None:
    if server_url.is_server(url):
        server_url.parse(url)
    else:
        _check_url("catalog", server_url.shown(url), CATALOG_SCHEMES)


def _check_url(name: str, url: str, schemes: tuple[str, ...]) -> None:
    scheme, path = split_url(url)
    forms = ", ".join(_URL_FORMS.get(known, f"{known}:///path") for known in schemes)
    if url.startswith("/"):
        raise wrong(name, url, f"a URL, such as {schemes[0]}://{url}")
    if scheme not in schemes:
        raise wrong(name, url, forms, scheme, schemes)
    if scheme == "memory":
        if path:
            raise wrong(name, url, "memory: with nothing behind it")
    elif not url.startswith(f"{scheme}:///") or path.strip("/") == "":
        near = f"{scheme}:///{path.strip('/') or 'path'}"
        raise wrong(name, url, f"an absolute path with three slashes, such as {near}")


def _settable(kind: type[msgspec.Struct]) -> list[msgspec.structs.FieldInfo]:
    """The fields that a user sets: those that say what they are for."""
    return [f for f in msgspec.structs.fields(kind) if hasattr(f.type, "__metadata__")]


def _facts(kind: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> FieldFacts:
    meta = field.type.__metadata__[-1]
    plain = get_type_hints(kind)[field.name]
    return FieldFacts(
        field.name,
        "size" if _is_size(field.name) else _kind_text(plain),
        "required" if field.required else _default_text(field),
        meta.extra["scope"],
        meta.description,
    )


def _kind_text(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    plain = next((member for member in get_args(kind) if member is not type(None)), kind)
    return {int: "integer", float: "number", str: "text", bool: "boolean"}[plain]


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.default is None:
        return "see text"
    if _is_size(field.name) and field.default >= 1 << 20:
        return f'"{field.default >> 20}MiB"'
    return msgspec.json.encode(field.default).decode()
