"""The example host of an operator compiled for a device: it runs the operator there once."""

from __future__ import annotations

from ..signature import TensorInfo
from .header import C_TYPES, wrapped
from .host import FAILED, Host


class DeviceHost(Host):
    """As `Host`; the arrays are copied to the device and the results back."""

    def variables(self) -> list[str]:
        there = [f"void *{self.there(t.name)} = NULL;" for t in self.signature.tensors]
        kept = [line for line in super().variables() if line]
        return [*kept, *there, "rudnn_device *device = NULL;", "rudnn_module *module = NULL;", ""]

    def there(self, tensor: str) -> str:
        """The variable of a tensor's memory on the device."""
        return f"{self.c.tensor(tensor)}_there"

    def call(self) -> list[str]:
        """Every step only if those before it went well; `status` is the first that did not."""
        name = self.signature.name
        steps = ["rudnn_open(0, &device)", f'{name}_load(device, ".", &module)']
        for tensor in self.signature.tensors:
            steps.append(f"rudnn_alloc(device, {self.size(tensor)}, &{self.there(tensor.name)})")
        for tensor in self.inputs():
            steps.append(f"rudnn_copy_in(device, {self.there(tensor.name)}, "
                         f"{self.c.tensor(tensor.name)}, {self.size(tensor)})")  # fmt: skip
        lines = ["status = RUDNN_OK;", *(f"if (!status) status = {step};" for step in steps)]
        lines += ["if (!status)", *(f"    {line}" for line in self.start())]
        for tensor in self.outputs():
            lines.append(f"if (!status) status = rudnn_copy_out(device, "
                         f"{self.c.tensor(tensor.name)}, {self.there(tensor.name)}, "
                         f"{self.size(tensor)});")  # fmt: skip
        lines += ["if (!status) status = rudnn_wait(device);", *FAILED]
        lines += [f"rudnn_free(device, {self.there(t.name)});" for t in self.signature.tensors]
        return [*lines, "rudnn_unload(device, module);", "rudnn_close(device);"]

    def size(self, tensor: TensorInfo) -> str:
        return f"({self.count(tensor)}) * {tensor.dtype.bytes}"

    def start(self) -> list[str]:
        arguments = ["device", "module"]
        for tensor in self.signature.tensors:
            constant = "const " if tensor.role == "input" else ""
            arguments.append(f"({constant}{C_TYPES[tensor.dtype.name]} *){self.there(tensor.name)}")
            if tensor.name in self.header.strided:
                arguments.append("NULL")
        arguments += self.header.dims()
        arguments += [self.c.scalar(s.name) for s in self.signature.scalars]
        return wrapped(f"status = {self.signature.name}(", [*arguments, "NULL"], ");", 92)
