"""The operators, a file a family: declaration, contract checks, strategies. No target is named."""
