"""torch autograd for every operator with a backward; loaded only where torch is."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..dsl.errors import OperatorError

if TYPE_CHECKING:
    from ..dsl.declare import Declaration
    from .call import Caller


def tracked(arrays: tuple[Any, ...]) -> bool:
    """Whether torch wants gradients of a call on these arrays."""
    torch = sys.modules["torch"]
    tensor = getattr(torch, "Tensor", ())  # a torch still being imported has none
    wants = any(isinstance(a, tensor) and a.requires_grad for a in arrays)
    return wants and torch.is_grad_enabled()


@lru_cache(maxsize=1)
def _function() -> Any:
    import torch

    class Operator(torch.autograd.Function):
        """One call of a differentiable operator."""

        @staticmethod
        def forward(ctx: Any, caller: Caller, values: tuple[Any, ...], *tensors: Any) -> Any:
            asked = caller.declaration.asked
            given = dict(zip(caller.names, values, strict=True))
            more = {option: True for option in asked.values()}
            made = caller.launch(tuple((given | more).values()))
            results = _by_name(caller, made)
            ctx.caller, ctx.settings = caller, values[caller.count :]
            ctx.given = tuple(n for n in results if n not in asked or given[asked[n]])
            ctx.set_materialize_grads(False)
            ctx.results = tuple(results)
            ctx.save_for_backward(*tensors, *results.values())
            returned = tuple(results[n] for n in ctx.given)
            return returned if len(returned) > 1 else returned[0]

        @staticmethod
        def backward(ctx: Any, *grads_of_results: Any) -> Any:
            if torch.is_grad_enabled():  # create_graph=True
                name = ctx.caller.declaration.name
                raise OperatorError(f"{name} has no second derivative, got create_graph=True")
            caller, tensors = ctx.caller, ctx.saved_tensors
            saved, results = tensors[: caller.count], tensors[caller.count :]
            known = dict(zip(caller.names, (*saved, *ctx.settings), strict=True))
            known |= dict(zip(ctx.results, results, strict=True)) | {"y": results[0]}
            first, *rest = grads_of_results
            known |= {f"grad_{n}": g for n, g in zip(ctx.given[1:], rest, strict=True)}
            grad = torch.zeros_like(results[0]) if first is None else first
            grads = _backward(caller, known, grad)
            return (None, None, *(_like(known[n], grads.get(n)) for n in caller.arrays))

    return Operator


def _backward(caller: Caller, known: dict[str, Any], grad: Any) -> dict[str, Any]:
    """Gradients of the inputs by name."""
    from .call import caller as caller_of

    declaration = caller.declaration
    known = _sizes(declaration, known) | known
    found: dict[str, Any] = dict.fromkeys(declaration.passes, grad)
    for backward, wanted in declaration.links():
        if not any(known[n] is not None and known[n].requires_grad for n in wanted):
            continue
        first, *rest = backward.inputs
        given = {first: grad} | {n: _ranked(backward, n, known.get(n)) for n in rest}
        for name in (*backward.params, *backward.options, *backward.extents):
            if name in known:
                given[name] = known[name]
        made = caller_of(backward)
        result = made.launch(made.values((), given))
        grads = result if isinstance(result, tuple) else (result,)
        found |= dict(zip(wanted, grads, strict=True))
    return found


def _by_name(caller: Caller, made: Any) -> dict[str, Any]:
    """The results of a call, those that it has."""
    if not isinstance(made, tuple):
        return {caller.declaration.outputs[0].name: made}
    return {n: t for n, t in made._asdict().items() if t is not None}  # type: ignore[attr-defined]


def _ranked(backward: Declaration, name: str, tensor: Any) -> Any:
    """An input that broadcast in the forward, with all of the dims that the backward names."""
    declared = backward.inputs[name]
    if tensor is None or declared.broadcast or any(d.startswith("*") for d in declared.dims):
        return tensor
    return tensor[(None,) * (len(declared.dims) - tensor.dim())]


def _sizes(declaration: Declaration, known: dict[str, Any]) -> dict[str, int]:
    """Dims of the forward's inputs by name, packs and broadcast inputs apart: a backward may ask
    for them."""
    sizes: dict[str, int] = {}
    for name, declared in declaration.inputs.items():
        if known[name] is None or declared.broadcast:
            continue
        dims, shape = declared.dims, known[name].shape
        leading = next((i for i, d in enumerate(dims) if d.startswith("*")), len(dims))
        trailing = len(dims) - leading - 1
        sizes |= dict(zip(dims[:leading], shape, strict=False))
        if trailing > 0:
            sizes |= dict(zip(dims[-trailing:], shape[-trailing:], strict=True))
    return sizes


def _like(tensor: Any, grad: Any) -> Any:
    """torch wants a gradient in its tensor's dtype and shape, none where there is no tensor."""
    if tensor is None or grad is None or not tensor.requires_grad:
        return None
    return grad.to(tensor.dtype).sum_to_size(tensor.shape)


def apply(caller: Caller, values: tuple[Any, ...], out: Any) -> Any:
    """Run with gradients recorded. Raises OperatorError where there is no backward."""
    declaration = caller.declaration
    if declaration.backward is None:
        raise OperatorError(
            f"{declaration.name} has no backward, got a tensor that requires grad: detach it"
        )
    if out is not None:
        raise OperatorError(f"{declaration.name} needs no out= where gradients are recorded")
    tensor = sys.modules["torch"].Tensor
    for array in values[: caller.count]:
        if array is not None and not isinstance(array, tensor):
            got = type(array).__name__
            raise OperatorError(
                f"{declaration.name} needs torch tensors only where it records gradients, got {got}"
            )
    made = _function().apply(caller, values, *values[: caller.count])
    return caller.result_type(*made) if isinstance(made, tuple) else made
