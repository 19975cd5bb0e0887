"""Texts of the command line to values: dims, dtypes, numbers, files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import numpy as np

    from ..dsl.arguments import In, Param
    from ..dsl.declare import Declaration
    from ..dsl.dtypes import DType

_SPREAD = {"--input": (".npy",), "--dim": (), "--param": (), "--option": ()}


class BadArgument(Exception):
    """A command line that cannot be followed; the message is one line."""


def spread(words: Sequence[str]) -> list[str]:
    """`--input a.npy b.npy` as `--input a.npy --input b.npy`, the same for NAME=VALUE options."""
    made: list[str] = []
    option: str | None = None
    for word in words:
        if word.startswith("-"):
            option = word if word in _SPREAD else None
        elif option is not None and made[-1] != option:
            if "=" in word or word.endswith(_SPREAD[option]):
                made.append(option)
            else:
                option = None
        made.append(word)
    return made


def pairs(texts: Iterable[str] | None, what: str) -> dict[str, str]:
    """NAME=VALUE texts by name; `what` is the option they were given with."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise BadArgument(f"{what} needs NAME=VALUE, got {text!r}")
        if name in found:
            raise BadArgument(f"{what} needs {name} once, got {found[name]} and {value}")
        found[name] = value
    return found


def dtype_of(text: str | None, declaration: Declaration) -> DType | None:
    """`f16` or `float16`; None where nothing was given."""
    from ..dsl.dtypes import dtype_of as find

    if text is None:
        return None
    found = find(text)
    if found is None or found not in declaration.dtypes:
        allowed = ", ".join(t.short for t in declaration.dtypes)
        raise BadArgument(f"{declaration.name} needs a dtype among {allowed}, got {text}")
    return found


def fixed_dims(texts: Iterable[str] | None, declaration: Declaration) -> dict[str, Any]:
    """`H=7`, `rows=3x5` → sizes by name, packs as tuples."""
    from ..samples import pack_names

    packs = pack_names(declaration)
    known = {d.lstrip("*") for d in (*declaration.dim_names(), *declaration.extents)}
    known -= {*declaration.params, *declaration.options}
    made: dict[str, Any] = {}
    for name, text in pairs(texts, "--dim").items():
        _known(name, known, f"a dim of {declaration.name}")
        sizes = tuple(_size(name, part) for part in text.split("x"))
        if name not in packs and len(sizes) > 1:
            raise BadArgument(f"--dim needs one size of {name}, got {text}")
        made[name] = sizes if name in packs else sizes[0]
    return made


def export_dims(
    texts: Iterable[str] | None, declaration: Declaration
) -> tuple[dict[str, int | str], dict[str, int]]:
    """Dims and ranks as `export_operator` takes them; `rows=3x5` gives a pack of two dims."""
    from ..samples import pack_names

    packs = pack_names(declaration)
    dims: dict[str, int | str] = {}
    ranks: dict[str, int] = {}
    for name, text in pairs(texts, "--dim").items():
        parts = text.split("x")
        sizes = [p if p == "dynamic" else _size(name, p) for p in parts]
        if name in packs and len(sizes) > 1:
            ranks[name] = len(sizes)
            dims |= {f"{name}.{i}": s for i, s in enumerate(sizes)}
            continue
        if len(sizes) > 1:
            raise BadArgument(f"--dim needs one size of {name}, got {text}")
        pack, dot, _ = name.partition(".")
        if dot and pack in packs:
            ranks[pack] = ranks.get(pack, 0) + 1
        dims[name] = sizes[0]
    return dims, ranks


def _size(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise BadArgument(f"--dim needs a size of {name}, got {text}")
    return int(text)


def options(texts: Iterable[str] | None, declaration: Declaration) -> dict[str, Any]:
    """Compile-time choices by name, as values."""
    from ..runtime.export import Request

    given = pairs(texts, "--option")
    chosen = dict(Request(declaration, {}).options(given))
    return {n: chosen[n] for n in given}


def settings(texts: Iterable[str] | None, declaration: Declaration) -> dict[str, Any]:
    """`--param` values by name: numbers, compile-time choices, and sizes of free dims."""
    from ..runtime.export import Request

    request = Request(declaration, {})
    known = [*declaration.params, *declaration.options, *declaration.extents]
    made: dict[str, Any] = {}
    for name, text in pairs(texts, "--param").items():
        _known(name, known, f"a parameter of {declaration.name}")
        if name in declaration.options:
            made[name] = request.choice(name, text)
        elif name in declaration.extents:
            made[name] = _number(name, text, int)
        else:
            made[name] = _number(name, text, _type_of(declaration.params[name]))
    return made


def _type_of(param: Param) -> type[int] | type[float]:
    return int if param.dtype.is_int else float


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise BadArgument(f"--param needs {name} {wanted}, got {text!r}") from None


def arrays(texts: Sequence[str], declaration: Declaration) -> dict[str, np.ndarray[Any, Any]]:
    """`--input` files by input: `gamma=g.npy`, or the inputs in order without names."""
    made: dict[str, np.ndarray[Any, Any]] = {}
    names = list(declaration.inputs)
    for text in texts:
        name, sign, path = text.rpartition("=")
        if sign and name in names:
            pass
        elif sign and not Path(text).exists():
            _known(name, names, f"an input of {declaration.name}")
        else:
            path = text
            name = next((n for n in names if n not in made), "")
            if not name:
                raise BadArgument(
                    f"{declaration.name} needs at most {len(names)} inputs, got {len(texts)}"
                )
        if name in made:
            raise BadArgument(f"--input needs {name} once, got it twice")
        made[name] = load(Path(path), declaration.inputs[name])
    return made


def load(path: Path, declared: In) -> np.ndarray[Any, Any]:
    """An array of a `.npy` file. The format cannot name bf16: two untyped bytes are taken as it."""
    import numpy as np

    from ..dsl.dtypes import bf16

    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):
        raise BadArgument(f"needs a .npy file of numbers, got {path}") from None
    if not isinstance(array, np.ndarray):
        raise BadArgument(f"needs a .npy file, got {path}: an archive of several arrays")
    if array.dtype == np.dtype("V2"):
        return array.view(bf16.numpy)
    if array.dtype == np.uint8 and any(t.kind == "bool" for t in declared.accepts(())):
        return array.view(np.bool_)
    return array


def result_paths(given: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """A path for each result: as given, or `y_NAME.npy` for several results and one path."""
    if len(given) == len(names):
        return list(given)
    if len(given) == 1:
        path = given[0]
        return [path.with_name(f"{path.stem}_{n}{path.suffix or '.npy'}") for n in names]
    wanted = f"1 path or {len(names)}" if len(names) > 1 else "1 path"
    raise BadArgument(f"-o needs {wanted} ({', '.join(names)}), got {len(given)}")


def _known(name: str, names: Iterable[str] | Mapping[str, Any], what: str) -> None:
    if name not in names:
        unknown(name, names, what)


def unknown(name: str, names: Iterable[str], what: str) -> NoReturn:
    """Raise BadArgument for a name that is none of `names`."""
    from ..ops.registry import near

    raise BadArgument(f"needs {what}, got {name!r}{near(name, sorted(names))}")
