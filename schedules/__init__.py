"""How a declaration becomes a fast loop nest: patterns, capability records, rules, configs."""
