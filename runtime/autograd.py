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
            result = caller.launch(values)
            ctx.caller, ctx.settings = caller, values[caller.count :]
            ctx.save_for_backward(*tensors, result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            if torch.is_grad_enabled():  # create_graph=True
                name = ctx.caller.declaration.name
                raise OperatorError(f"{name} has no second derivative, got create_graph=True")
            caller, (*saved, result) = ctx.caller, ctx.saved_tensors
            known = dict(zip(caller.names, (*saved, *ctx.settings), strict=True)) | {"y": result}
            grads = _backward(caller, known, grad)
            return (None, None, *(_like(known[n], grads.get(n)) for n in caller.arrays))

    return Operator


def _backward(caller: Caller, known: dict[str, Any], grad: Any) -> dict[str, Any]:
    """Gradients of the inputs by name."""
    from .call import caller as caller_of

    declaration = caller.declaration
    backward = declaration.backward
    assert backward is not None
    first, *rest = backward.inputs
    given = {first: grad} | {n: known[n] for n in rest}
    known = _sizes(declaration, known) | known
    for name in (*backward.params, *backward.options, *backward.extents):
        if name in known:
            given[name] = known[name]
    made = caller_of(backward)
    result = made.launch(made.values((), given))
    grads = result if isinstance(result, tuple) else (result,)
    return dict(zip(declaration.grads, grads, strict=True)) | dict.fromkeys(
        declaration.passes, grad
    )


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
    return _function().apply(caller, values, *values[: caller.count])
