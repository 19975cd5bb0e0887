"""Devices, queues, tensors, workspaces, the compile cache and the targets."""
