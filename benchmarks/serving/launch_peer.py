"""Runs a peer inside this process after its BLAS was put in place; executed by the peer's own interpreter.

`launch_peer BLAS STATE MODULE:FUNCTION ARGUMENTS...`, where BLAS is "plain" (the library that we use, with its own
threads), "shim" (exactly what our runtime does, our ways around that library included) or "stock" (what the peer's
own install does).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from engine.runtime.blas import default_openers
from engine.runtime.blas_library import BlasUnusableError
from engine.runtime.blas_shim import LoadedShim
from engine.runtime.prepare import prepare_runtime
from engine.runtime.settings import RuntimeSettings


def put_blas_in_place(kind: str, state: Path) -> None:
    """Do what `kind` asks for; call before anything imports mlx."""
    if kind == "stock":
        return
    runtime = prepare_runtime(RuntimeSettings(cache_directory=state / "cache", device="cpu"))
    shim = LoadedShim.of_this_process()
    if kind == "plain" and shim is not None:
        pass_products_on(shim)
    sys.stderr.write(f"BLAS ({kind}): {runtime.info.blas}\n")


def pass_products_on(shim: LoadedShim) -> None:
    """Leave nothing of the shim but the way through it, and give the library behind it its threads back."""
    for opener in default_openers().values():
        try:
            library = opener()
        except BlasUnusableError:
            continue
        if library.describe() == shim.label:
            library.set_threads(shim.threads, shim.threads)
            shim.tune(few_rows=0, threads=1, label=shim.label)
            return
    raise SystemExit(f"{shim.label} is not there to be lent")


def main() -> None:
    """Prepare, then become the peer."""
    kind, state, target, *arguments = sys.argv[1:]
    put_blas_in_place(kind, Path(state))
    module, _, function = target.partition(":")
    sys.argv = [module, *arguments]
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main()
