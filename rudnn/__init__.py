"""Declare a neural-network operator once; run, check and embed it on every target."""

from __future__ import annotations

import os as _os

# In a checkout the subpackages lie beside this folder, not in it, and a Python started at its root
# finds this file before the installed package.
if not _os.path.isdir(_os.path.join(__path__[0], "dsl")):
    __path__.append(_os.path.dirname(_os.path.abspath(__path__[0])))
