"""torch autograd for every operator with a backward; loaded only where torch is."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..dsl.errors import OperatorError

if TYPE_CHECKING:
    from .call import Caller


def tracked(caller: Caller, given: dict[str, Any]) -> bool:
    """Whether torch wants gradients of this call."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    tensor = getattr(torch, "Tensor", None)
    if tensor is None:
        return False
    wants = any(
        isinstance(given[n], tensor) and given[n].requires_grad for n in caller.arrays
    )
    return wants and torch.is_grad_enabled()


@lru_cache(maxsize=1)
def _function() -> Any:
    import torch

    class Operator(torch.autograd.Function):
        """One call of a differentiable operator."""

        @staticmethod
        def forward(ctx: Any, caller: Caller, given: dict[str, Any], *tensors: Any) -> Any:
            result = caller.launch(given)
            ctx.caller, ctx.given = caller, {
                n: v for n, v in given.items() if n not in caller.arrays
            }
            ctx.save_for_backward(*tensors, result)
            return result

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            from .call import caller as caller_of

            caller = ctx.caller
            backward = caller.declaration.backward
            *saved, result = ctx.saved_tensors
            known = dict(zip(caller.arrays, saved, strict=True)) | ctx.given | {"y": result}
            first, *rest = backward.inputs
            values = {first: grad} | {n: known[n] for n in rest}
            for name in (*backward.params, *backward.options, *backward.extents):
                if name in known:
                    values[name] = known[name]
            made = caller_of(backward)
            out = made.launch(made.arguments((), values))
            grads = out if isinstance(out, tuple) else (out,)
            by_name = dict(zip(caller.declaration.grads, grads, strict=True))
            by_name |= dict.fromkeys(caller.declaration.passes, grad)
            return (None, None, *(_like(known[n], by_name.get(n)) for n in caller.arrays))

    return Operator


def _like(tensor: Any, grad: Any) -> Any:
    """torch wants a gradient in its tensor's dtype, and none where there is no tensor."""
    if tensor is None or grad is None or not tensor.requires_grad:
        return None
    return grad.to(tensor.dtype)


def apply(caller: Caller, given: dict[str, Any], out: Any) -> Any:
    """Run with gradients recorded. Raises OperatorError where there is no backward."""
    declaration = caller.declaration
    if declaration.backward is None:
        raise OperatorError(
            f"{declaration.name} has no backward, got a tensor that requires grad: detach it"
        )
    if out is not None:
        raise OperatorError(f"{declaration.name} needs no out= where gradients are recorded")
    tensors = [given[n] for n in caller.arrays]
    return _function().apply(caller, given, *tensors)
