"""What an app links: the object, its header, the native runtime's source, an example host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ....schedules.program import Program
from ...arguments import work
from ...embed import copy_support
from ...embed.header import Header
from ...embed.host import Host
from ...plan import SMALL_WORK
from ...signature import Signature
from . import compile as codegen
from . import cpu, toolchain

SUPPORT = tuple(toolchain.NATIVE / n for n in (*toolchain.EMBED_FILES, "rudnn_host.h"))
_ALIAS_TYPE = re.compile(r'(?<=!")0x[0-9a-f]+')
# TVM puts its conversions of half precision into every module as weak functions. In an app they
# would stand in for the compiler library's, whose calling convention is another.
_WEAK = re.compile(r"^define weak (dso_local )?(?=[^@\n]*@__(?:truncsfhf2|extendhfsf2)\()", re.M)


def export(program: Program, signature: Signature, arch: str, folder: Path) -> dict[str, Any]:
    """Write everything into `folder`; the manifest's target part.

    The kernel is `int32_t NAME_entry(const int64_t *args)`, its arguments as the plan's slots say.
    Raises CompileError.
    """
    name = signature.name
    target: Any = cpu.tvm_target(arch)
    module, plan = codegen.lower(program, f"{name}_entry", target)
    _write_object(codegen.build(module, target), folder, name)
    header = Header(
        signature, plan, signature.c(program.workspace.total),
        signature.c(work(program.graph)), SMALL_WORK,
    )  # fmt: skip
    (folder / f"{name}.h").write_text(header.text(), "utf-8")
    build = f"cc -O2 -o {name}_host {name}_host.c {name}.o rudnn_runtime.c -lm -lpthread"
    (folder / f"{name}_host.c").write_text(Host(signature, header, build).text(), "utf-8")
    support = copy_support(folder, SUPPORT)
    made = [f"{name}.o", f"{name}.ll", f"{name}.h", f"{name}_host.c", *support]
    return {
        "function": name, "header": f"{name}.h", "object": f"{name}.o",
        "build": build,
        "plan": plan.to_json(),
        "workspace_bytes": {"python": signature.public(plan.workspace), "c": header.workspace},
        "small_work": header.small_work,
        "work": {"python": signature.public(plan.work), "c": header.work},
        "cpu": {"triple": str(target.attrs["mtriple"]), "cpu": str(target.attrs["mcpu"])},
        "files": made,
    }  # fmt: skip


def _write_object(built: Any, folder: Path, name: str) -> None:
    """NAME.ll and NAME.o of a compiled module."""
    import tvm

    text = folder / f"{name}.ll"
    text.write_text(_stable(_WEAK.sub("define internal ", built.inspect_source("ll"))))
    module = tvm.get_global_func("ffi.Module.load_from_file.ll")(str(text), "ll")
    module.write_to_file(str(folder / f"{name}.o"), "o")


def _stable(text: str) -> str:
    """LLVM IR with alias types numbered: TVM names them by an address of this process."""
    numbers: dict[str, str] = {}
    return _ALIAS_TYPE.sub(lambda m: numbers.setdefault(m[0], f"buffer{len(numbers)}"), text)
