"""Generation methods and what joins a graph to one: bindings, planning, prefill steps, stop rules, scopes."""
